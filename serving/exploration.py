"""Exploration with exact propensities and a cap on its cost: without it, off-policy estimates have nothing to go by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from routewright.errors import BadInput

WINDOW = 1000  # requests over which the cap counts


@dataclass(frozen=True)
class Draw:
    """One request's draw: whether to explore, and the probability with which that happened."""

    explore: bool
    epsilon: float


class Exploration:
    """ε-exploration of at most a share ``cap`` of every window of requests; for the worker's thread alone.

    Once a window's share is spent, ε is 0 until the next window begins. That depends on past requests only, so every
    logged propensity is exact; what was logged with ε = 0 says nothing about other actions, and the log says which.
    """

    def __init__(self, epsilon: float, cap: float = 1.0, window: int = WINDOW, seed: int | None = None) -> None:
        if not 0 <= epsilon <= 1:
            raise BadInput(f"epsilon: expected a probability, found {epsilon}")
        if not 0 <= cap <= 1:
            raise BadInput(f"epsilon-cap: expected a share from 0 to 1, found {cap}")
        self.epsilon, self.window = epsilon, window
        self.random = random.Random(seed)
        self._allowed = int(cap * window)
        self._seen = self._explored = 0

    def draw(self) -> Draw:
        """The next request's draw."""
        if self._seen == self.window:
            self._seen = self._explored = 0
        self._seen += 1
        epsilon = self.epsilon if self._explored < self._allowed else 0.0
        explore = self.random.random() < epsilon
        self._explored += explore
        return Draw(explore, epsilon)


def agents_propensity(taken: Sequence[int], greedy: Sequence[int], agents: int, epsilon: float) -> float:
    """P(taken) = (1 − ε)·[taken = greedy] + (ε/N)·[taken is a single agent], both sets of agent numbers below N.

    With probability ε one agent is drawn evenly, the router's own choice included; otherwise the router's choice stands.
    """
    stands = (1 - epsilon) if set(taken) == set(greedy) else 0.0
    return stands + (epsilon / agents if len(taken) == 1 else 0.0)


def escalation_propensity(escalate: bool, above: bool, epsilon: float) -> float:
    """P(escalate) where a fair coin decides with probability ε, and otherwise whether the risk is above the threshold."""
    return 1 - epsilon / 2 if escalate == above else epsilon / 2
