"""Signals of escalation: a step goes to the LLM iff its signal exceeds a threshold.

Every signal looks at the decision only, as a live agent sees it: nothing of the true state, of the perturbation or of the
outcome. The rows `slm` and `llm` need no signal, only the thresholds `NEVER` and `ALWAYS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from routewright.errors import BadInput
from routewright.step_router.features import NAMES, Context

if TYPE_CHECKING:
    from routewright.step_router.risk import RiskModel

NEVER, ALWAYS = math.inf, -math.inf
ENTROPY, REPEATS = NAMES.index("entropy"), NAMES.index("repeats")
BLOCK = 32  # rows that a risk model sees at once


@dataclass(frozen=True, eq=False)
class Decision:
    """One decision of an episode. ``features`` (15,) are this step's, ``first`` (15,) those of its first decision."""

    task: str
    seed: int
    context: Context
    features: np.ndarray
    first: np.ndarray


Signal = Callable[[Decision], float]
"""Higher means rather the LLM. A signal with a method ``many(decisions) -> (n,)`` is asked for many decisions at once."""


def random(decision: Decision) -> float:
    """Uniform in [0, 1), hashed from task, seed and step: escalates a share 1 − threshold of the steps.

    A live agent needs an identifier of its episode and the step's number.
    """
    return Random(f"escalate/{decision.task}/{decision.seed}/{decision.context.step}").random()


def entropy(decision: Decision) -> float:
    """Entropy of the policy over its candidates, [0, 1].

    A live agent needs the candidates with log-probabilities; verifier scores give the pseudo-entropy instead.
    """
    return float(decision.features[ENTROPY])


def verifier(decision: Decision) -> float:
    """Minus the verifier's score of the action that the small model would take; BadInput where it has none.

    A live agent needs the verifier, on that one action only.
    """
    score = decision.context.candidates[0].verifier_score
    if score is None:
        raise BadInput("candidates[0].verifier_score: missing, the verifier's signal needs a number")
    return -score


def time(decision: Decision) -> float:
    """Steps taken so far: with a threshold of k − 0.5 the LLM takes over from step k (counted from 0) on.

    A live agent needs to count.
    """
    return float(decision.context.step)


def repeat(decision: Decision) -> float:
    """How often the action that the small model would take was already taken in this episode.

    A live agent needs the list of its actions.
    """
    return float(decision.features[REPEATS])


@dataclass(frozen=True)
class Coin:
    """Uniform in [0, 1), hashed from task, seed, step and draw: another coin for every ``draw``.

    No router: with a threshold of 1 − rate each step is the LLM's with probability rate, whatever the state, which shows
    what its acting changes.
    """

    draw: int

    def __call__(self, decision: Decision) -> float:
        return Random(f"coin/{self.draw}/{decision.task}/{decision.seed}/{decision.context.step}").random()


@dataclass(frozen=True)
class Benefit:
    """p_SLM − p_LLM, [−1, 1]: by how much P(failure) falls if the LLM takes this step, from the features of this step.

    A live agent needs what `features.Context` holds. The thresholds of `risk-no-cvar` and `risk-no-jsd` belong to the same
    signal with another model or on another policy.
    """

    model: RiskModel

    def __call__(self, decision: Decision) -> float:
        return float(self.many([decision])[0])

    def many(self, decisions: Sequence[Decision]) -> np.ndarray:
        """The signal of each decision, float64 (n,), whatever the others are."""
        return _in_blocks(self.model.benefits, [decision.features for decision in decisions])


@dataclass(frozen=True)
class Risk:
    """P(the small model alone fails this episode), from the features of this step, [0, 1]: the paper's rule.

    A live agent needs what `features.Context` holds.
    """

    model: RiskModel

    def __call__(self, decision: Decision) -> float:
        return float(self.many([decision])[0])

    def many(self, decisions: Sequence[Decision]) -> np.ndarray:
        """The signal of each decision, float64 (n,), whatever the others are."""
        return _in_blocks(self.model.risks, [decision.features for decision in decisions])


@dataclass(frozen=True)
class QueryLevel:
    """P(the small model alone fails this episode), from the features of its first decision, [0, 1].

    It is the same at every step, so that the LLM takes a whole episode or nothing of it, as a router of queries does. A
    live agent needs what `features.Context` holds, once an episode.
    """

    model: RiskModel

    def __call__(self, decision: Decision) -> float:
        return float(self.many([decision])[0])

    def many(self, decisions: Sequence[Decision]) -> np.ndarray:
        """The signal of each decision, float64 (n,), whatever the others are."""
        return _in_blocks(self.model.risks, [decision.first for decision in decisions])


def _in_blocks(predict: Callable[[np.ndarray], np.ndarray], rows: Sequence[np.ndarray]) -> np.ndarray:
    found = []
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        # always the same number of rows: a product of another shape rounds differently, and could cross a threshold
        filled = np.stack([*block, *[block[0]] * (BLOCK - len(block))])
        found.append(predict(filled)[: len(block)])
    return np.concatenate(found) if found else np.zeros(0)
