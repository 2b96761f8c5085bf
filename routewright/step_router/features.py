"""The 15 features of one decision, all of which a live agent can compute before it acts.

The paper (arXiv 2605.16604) does not list its 15; these are ours. What perturbed the episode is not among them: nobody
knows it at deployment. The LLM budget left is not either: the label is the failure of the small model *alone*, where no
budget is ever spent, so the feature would be constant in training and move only afterwards. The budget acts in
`budget.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import log_softmax

from routewright.errors import BadInput

FEATURES: dict[str, str] = {
    "entropy": "Entropy of the policy over the distinct candidate actions, divided by ln of their number, [0, 1].",
    "entropy_history": "Mean of `entropy` over the steps so far, this one included, [0, 1].",
    "surprisal": "Mean of −log p over the first candidate's tokens, nats, ≥ 0: a sample of the token-level entropy.",
    "evidence": "Computed from: 0 log-probabilities and verifier scores; 1 scores only, entropy and "
    "surprisal are pseudo (softmax of the scores); −1 log-probabilities only, a score is exp(mean log p).",
    "verifier_mean": "Mean verifier score of the candidates.",
    "verifier_spread": "Population standard deviation of the candidates' scores, ≥ 0.",
    "verifier_best": "Highest score of the candidates.",
    "verifier_worst": "Lowest score of the candidates.",
    "verifier_margin": "Score of the first candidate minus the best of another action; 0 where there is none.",
    "consistency": "Mean word overlap (Jaccard) of the other candidates with the first, [0, 1]; 1 if it is alone.",
    "repeats": "How often the first candidate's action was already taken in this episode.",
    "time": "step / max_steps, [0, 1].",
    "step": "Steps taken before this one.",
    "observation_novelty": "1 − the largest word overlap (Jaccard) with an earlier observation, [0, 1]; 1 at first.",
    "objective_overlap": "Share of the words of the first candidate's action that occur in the objective, [0, 1].",
}
NAMES = tuple(FEATURES)
PSEUDO_TEMPERATURE = 0.1
"""Temperature of the softmax over verifier scores in [0, 1]: the gap of 0.1 that makes a preference pair is one nat."""
MAX_CHARACTERS = 4000  # of a text that count: a long print costs no more
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Candidate:
    """A proposed action, log p of its tokens (nats) and the verifier's score, where there are any."""

    action: str
    token_logprobs: Sequence[float] | None = None
    verifier_score: float | None = None


@dataclass(frozen=True)
class PastStep:
    """A step already taken: the action, what was observed before it, and its `entropy` feature."""

    action: str
    observation: str
    entropy: float


@dataclass(frozen=True)
class Context:
    """One decision. The first candidate is the action that the small model would take; steps are counted from 0."""

    objective: str
    observation: str
    candidates: Sequence[Candidate]
    step: int
    max_steps: int
    history: Sequence[PastStep] = ()


def without_logprobs(context: Context) -> Context:
    """The same decision without log-probabilities; a router trained on both views works both ways."""
    return replace(context, candidates=[replace(c, token_logprobs=None) for c in context.candidates])


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text[:MAX_CHARACTERS].casefold()))


def _overlap(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a or b else 1.0


def _checked(context: Context) -> None:
    if not context.candidates:
        raise BadInput("candidates: expected at least one candidate action, found none")
    if context.max_steps < 1:
        raise BadInput(f"max_steps: expected a whole number of at least 1, found {context.max_steps}")
    if not 0 <= context.step <= context.max_steps:
        raise BadInput(f"step: expected a whole number from 0 to max_steps = {context.max_steps}, found {context.step}")
    for i, candidate in enumerate(context.candidates):
        score, tokens = candidate.verifier_score, candidate.token_logprobs
        if score is not None and not math.isfinite(score):
            raise BadInput(f"candidates[{i}].verifier_score: expected a finite number, found {score}")
        if tokens is not None and not len(tokens):
            raise BadInput(f"candidates[{i}].token_logprobs: expected one log-probability a token, found an empty list")
        for t, value in enumerate(() if tokens is None else tokens):
            if not math.isfinite(value) or value > 1e-3:  # servers round: log p of a sure token comes back as 1e-6
                raise BadInput(f"candidates[{i}].token_logprobs[{t}]: expected a number of at most 0, found {value}")
    for i, past in enumerate(context.history):
        if not math.isfinite(past.entropy):
            raise BadInput(f"history[{i}].entropy: expected a finite number, found {past.entropy}")


def compute_features(context: Context) -> np.ndarray:
    """The features of one decision in the order of `NAMES`, float64 (15,).

    Log-probabilities and scores count only where every candidate has them. BadInput names the field that is missing,
    not finite or out of range.
    """
    _checked(context)
    candidates = context.candidates
    actions = [" ".join(c.action.split()) for c in candidates]
    words = [_words(action) for action in actions]
    tokens = [np.asarray(c.token_logprobs, dtype=float) for c in candidates if c.token_logprobs is not None]
    given = [c.verifier_score for c in candidates if c.verifier_score is not None]
    has_tokens, has_scores = len(tokens) == len(candidates), len(given) == len(candidates)
    if not has_tokens and not has_scores:
        raise BadInput("candidates: expected token_logprobs on every candidate or verifier_score on every candidate")
    scores = np.array(given) if has_scores else np.array([math.exp(min(t.mean(), 0.0)) for t in tokens])

    distinct = {action: i for i, action in reversed(list(enumerate(actions)))}  # action -> its first candidate
    rows = sorted(distinct.values())
    logits = np.array([tokens[i].sum() for i in rows]) if has_tokens else scores[rows] / PSEUDO_TEMPERATURE
    log_p = log_softmax(logits)
    entropy = float(-(np.exp(log_p) * log_p).sum() / math.log(len(rows))) if len(rows) > 1 else 0.0
    entropies = [*(past.entropy for past in context.history), entropy]
    others = [scores[i] for i in range(len(actions)) if actions[i] != actions[0]]
    observation = _words(context.observation)
    seen = [_overlap(observation, _words(past.observation)) for past in context.history]
    values = {
        "entropy": entropy,
        "entropy_history": sum(entropies) / len(entropies),
        "surprisal": max(0.0, float(-tokens[0].mean() if has_tokens else -log_p[0])),
        "evidence": 0.0 if has_tokens and has_scores else 1.0 if has_scores else -1.0,
        "verifier_mean": float(scores.mean()),
        "verifier_spread": float(scores.std()),
        "verifier_best": float(scores.max()),
        "verifier_worst": float(scores.min()),
        "verifier_margin": float(scores[0] - max(others)) if others else 0.0,
        "consistency": float(np.mean([_overlap(words[0], w) for w in words[1:]])) if words[1:] else 1.0,
        "repeats": float(sum(" ".join(past.action.split()) == actions[0] for past in context.history)),
        "time": context.step / context.max_steps,
        "step": float(context.step),
        "observation_novelty": 1.0 - max(seen, default=0.0),
        "objective_overlap": len(words[0] & _words(context.objective)) / max(1, len(words[0])),
    }
    return np.array([values[name] for name in NAMES])


def check_features(rows: np.ndarray) -> np.ndarray:
    """The rows as float64 (n, 15); BadInput names the first feature that is NaN or infinite, or the wrong shape."""
    matrix = np.asarray(rows, dtype=float)
    if matrix.ndim != 2 or matrix.shape[1] != len(NAMES):
        raise BadInput(f"features: expected rows of {len(NAMES)} numbers, found an array of shape {matrix.shape}")
    bad = np.argwhere(~np.isfinite(matrix))
    if len(bad):
        row, column = bad[0]
        raise BadInput(f"features[{row}].{NAMES[column]}: expected a finite number, found {matrix[row, column]}")
    return matrix


def named(row: np.ndarray) -> dict[str, float]:
    """One feature row as the contract's JSON object."""
    return dict(zip(NAMES, row.tolist(), strict=True))


def from_named(values: Mapping[str, float]) -> np.ndarray:
    """A logged feature row back as float64 (15,); BadInput names a feature that is missing, unknown or not finite."""
    for name in NAMES:
        if name not in values:
            raise BadInput(f"features.{name}: missing, expected a number")
    for name in values:
        if name not in FEATURES:
            raise BadInput(f"features.{name}: unknown, expected only {', '.join(NAMES)}")
    for name in NAMES:
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadInput(f"features.{name}: expected a finite number, found {value!r}")
    return np.array([float(values[name]) for name in NAMES])
