"""How good a policy would have been on logged traffic: IPS, SNIPS and doubly robust estimates, and when to believe them.

An action is the set of agents that a query is sent to; its reward is the best outcome, 0..1, that those agents had. With
weights w_i = π(a_i|x_i) / propensity_i over n logged decisions (rewards r_i):

- IPS: Σ w r / n (Horvitz and Thompson 1952).
- SNIPS: Σ w r / Σ w (Swaminathan and Joachims 2015), less variance for a bias of order 1/n.
- DR: mean of Σ_a π(a|x) q(x, a) + w (r − q(x, a_i)) (Dudík et al. 2011), right where the propensities or the outcome
  model q is.

Intervals are the asymptotic 95 % ones (mean ± 1.96 standard errors; the delta method for SNIPS), hence the demand for an
effective sample size before anything is concluded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict

from routewright.errors import BadInput
from routewright.evaluation.bootstrap import Estimate
from routewright.pools.query_log import QueryLogEntry

MIN_DECISIONS = 200
MIN_EFFECTIVE = 100.0
MAX_UNSUPPORTED = 0.01
"""Share of the candidate's decisions that the log could never have taken; rewards in 0..1 make it a bound on the bias."""
MAX_BALANCE_ERRORS = 3.0  # standard errors that the mean weight, 1 in expectation, may be away from 1
_Z = 1.959964

Action = frozenset[str]


class OffPolicyEstimate(BaseModel):
    """What the log says about a candidate; intervals are 95 %, ``gain`` is candidate − logged policy.

    ``conclusive`` is False, with the ``reason`` in one sentence, where nothing may be decided on these numbers; the
    estimates are then None if they have no meaning at all. ``dr`` and its gain need an outcome model's predictions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    conclusive: bool
    reason: str
    n: int
    effective_sample_size: float
    explored: float
    """Share of the decisions whose propensity is below 1."""
    unsupported: float
    """Mean candidate probability of actions that the log cannot hold: its policy was certain of another one, or its
    exploration never draws so many agents."""
    logged: Estimate
    mean_weight: Estimate | None = None
    ips: Estimate | None = None
    snips: Estimate | None = None
    dr: Estimate | None = None
    gain: Estimate | None = None
    """By the doubly robust estimate where there is one, else by SNIPS."""


def _vector(values: ArrayLike, name: str, low: float, high: float, n: int | None = None) -> np.ndarray:
    vector = np.asarray(values, dtype=float)
    if vector.ndim != 1 or vector.size == 0 or (n is not None and vector.size != n):
        raise ValueError(f"{name}: expected a non-empty vector{'' if n is None else f' of {n}'}, got shape {vector.shape}")
    inside = (vector >= low) & (vector <= high)
    if not inside.all():
        bad = int(np.flatnonzero(~inside)[0])
        raise ValueError(f"{name} {bad} of {vector.size} is {vector[bad]}, expected a number from {low:g} to {high:g}")
    return vector


def _estimate(mean: float, influence: np.ndarray) -> Estimate:
    """``mean`` ± 1.96 standard errors, from the influence of each decision on it (n,)."""
    error = _Z * float(influence.std(ddof=1)) / np.sqrt(influence.size) if influence.size > 1 else 0.0
    return Estimate(mean=float(mean), low=float(mean - error), high=float(mean + error), n=influence.size)


def importance_weights(candidate: ArrayLike, propensities: ArrayLike) -> np.ndarray:
    """w = π(a|x) / propensity of the logged actions; candidate in [0, 1], propensities in (0, 1], both (n,)."""
    logged = _vector(propensities, "propensity", np.nextafter(0, 1), 1)
    return _vector(candidate, "candidate probability", 0, 1, logged.size) / logged


def effective_sample_size(weights: ArrayLike) -> float:
    """(Σ w)² / Σ w² (Kish 1965), from 0 (no weight at all) to n; weights (n,) at least 0."""
    w = _vector(weights, "weight", 0, np.inf)
    return float(w.sum() ** 2 / (w**2).sum()) if w.any() else 0.0


def ips(rewards: ArrayLike, weights: ArrayLike) -> Estimate:
    """Inverse propensity score: mean of w·r over n decisions, rewards in [0, 1]; ValueError for other input."""
    w = _vector(weights, "weight", 0, np.inf)
    contributions = w * _vector(rewards, "reward", 0, 1, w.size)
    return _estimate(contributions.mean(), contributions)


def snips(rewards: ArrayLike, weights: ArrayLike) -> Estimate:
    """Self-normalised IPS: Σ w r / Σ w; influence of a decision w (r − estimate) / mean w. ValueError if all w are 0."""
    w = _vector(weights, "weight", 0, np.inf)
    r = _vector(rewards, "reward", 0, 1, w.size)
    if not w.any():
        raise ValueError("all weights are 0: the candidate takes none of the logged actions")
    value = float((w * r).sum() / w.sum())
    return _estimate(value, w * (r - value) / w.mean())


def doubly_robust(rewards: ArrayLike, weights: ArrayLike, predicted: ArrayLike, expected: ArrayLike) -> Estimate:
    """Mean of expected + w (r − predicted).

    ``predicted`` (n,) is q(x, a) of the logged actions, ``expected`` (n,) is Σ_a π(a|x) q(x, a), both in [0, 1] from a
    model that did not learn from the same decisions (see ``outcome_predictions``). ValueError for other input.
    """
    contributions = _dr_contributions(rewards, weights, predicted, expected)
    return _estimate(contributions.mean(), contributions)


def _dr_contributions(rewards: ArrayLike, weights: ArrayLike, predicted: ArrayLike, expected: ArrayLike) -> np.ndarray:
    w = _vector(weights, "weight", 0, np.inf)
    r = _vector(rewards, "reward", 0, 1, w.size)
    q = _vector(predicted, "predicted outcome", 0, 1, w.size)
    return np.asarray(_vector(expected, "expected outcome", 0, 1, w.size) + w * (r - q))


def off_policy_estimate(
    rewards: ArrayLike,
    propensities: ArrayLike,
    candidate: ArrayLike,
    predicted: ArrayLike | None = None,
    expected: ArrayLike | None = None,
    min_decisions: int = MIN_DECISIONS,
    min_effective: float = MIN_EFFECTIVE,
    never_drawn: ArrayLike | None = None,
) -> OffPolicyEstimate:
    """All estimates of a candidate from n logged decisions, and whether to believe them.

    ``rewards`` in [0, 1], ``propensities`` in (0, 1] (exploration included) and ``candidate`` in [0, 1], the candidate's
    probability of the logged action, are (n,); ``predicted`` and ``expected`` as in ``doubly_robust``, both or neither;
    ``never_drawn`` (n,) in [0, 1], where it is known, the candidate's probability of what exploration never draws.
    Refuses (``conclusive`` False) without exploration, where the candidate takes actions that the log cannot hold, and
    below the least number of decisions or the least effective sample size. ValueError for malformed vectors.
    """
    if (predicted is None) != (expected is None):
        raise ValueError("a doubly robust estimate needs predicted and expected outcomes, got one of them")
    p = _vector(propensities, "propensity", np.nextafter(0, 1), 1)
    pi = _vector(candidate, "candidate probability", 0, 1, p.size)
    r = _vector(rewards, "reward", 0, 1, p.size)
    w = importance_weights(pi, p)
    never = _vector(np.zeros(p.size) if never_drawn is None else never_drawn, "probability never drawn", 0, 1, p.size)
    found: dict[str, Any] = {
        "n": p.size,
        "effective_sample_size": effective_sample_size(w),
        "explored": float((p < 1).mean()),
        "unsupported": float(np.where(p == 1, 1 - pi, never).mean()),
        "logged": _estimate(r.mean(), r),
    }
    if (p == 1).all():
        reason = (
            "every propensity is 1: the log was written without exploration (epsilon = 0), so it says nothing about "
            "actions that were not taken"
        )
        return OffPolicyEstimate(conclusive=False, reason=reason, **found)
    if not w.any():
        reason = f"the candidate takes none of the {p.size} logged actions, so the log says nothing about it"
        if never.mean() > MAX_UNSUPPORTED:
            reason = _never_drawn(float(never.mean()))
        return OffPolicyEstimate(conclusive=False, reason=reason, **found)
    found |= {"mean_weight": _estimate(w.mean(), w), "ips": ips(r, w), "snips": snips(r, w)}
    if predicted is not None and expected is not None:
        contributions = _dr_contributions(r, w, predicted, expected)
        found |= {"dr": _estimate(contributions.mean(), contributions)}
        found |= {"gain": _estimate((contributions - r).mean(), contributions - r)}
    else:
        value = float((w * r).sum() / w.sum())
        found |= {"gain": _estimate(value - r.mean(), w * (r - value) / w.mean() - (r - r.mean()))}
    shares = float(never.mean()), float(np.where(p == 1, 1 - pi, 0).mean())
    refusal = _refusal(w, found["effective_sample_size"], *shares, min_decisions, min_effective)
    reason = refusal or f"{p.size} decisions, an effective {found['effective_sample_size']:.0f} of them"
    return OffPolicyEstimate(conclusive=not refusal, reason=reason, **found)


def _never_drawn(share: float) -> str:
    return (
        f"for {share:.1%} of the traffic the candidate asks more agents than exploration ever draws, expected at most "
        f"{MAX_UNSUPPORTED:.0%}: draw larger sets"
    )


def _refusal(w: np.ndarray, effective: float, never: float, certain: float, min_n: int, min_effective: float) -> str:
    """Why nothing may be concluded; empty where it may."""
    n = w.size
    if n < min_n:
        return f"only {n} decisions with an outcome, expected at least {min_n}"
    if never > MAX_UNSUPPORTED:
        return _never_drawn(never)
    if effective < min_effective:
        return (
            f"the effective sample size is {effective:.0f} of {n} decisions, expected at least {min_effective:.0f}: the "
            "candidate differs too much from the logged policy, explore more or collect longer"
        )
    if certain > MAX_UNSUPPORTED:
        return (
            f"for {certain:.1%} of the traffic the candidate takes actions that were logged without exploration, "
            f"expected at most {MAX_UNSUPPORTED:.0%}"
        )
    error = float(w.std(ddof=1)) / np.sqrt(n)
    if abs(w.mean() - 1) > MAX_BALANCE_ERRORS * error + 1e-9:
        untried = f"for about {1 - w.mean():.0%} of the traffic the candidate takes actions that exploration never tries"
        return (
            f"the mean weight is {w.mean():.3f} ± {error:.3f} where 1 is expected: the propensities are wrong"
            f"{f', or {untried}' if w.mean() < 1 else ''}"
        )
    return ""


def action_of(entry: QueryLogEntry) -> Action | None:
    """The agents that a logged query was sent to; None where the entry does not say."""
    agents = (entry.decision or {}).get("agents")
    if not isinstance(agents, list) or not agents or not all(isinstance(agent, str) for agent in agents):
        return None
    return frozenset(agents)


def reward_of(entry: QueryLogEntry) -> float | None:
    """The best outcome of the agents asked, 0..1; None where none of them has one."""
    found = [entry.outcome[agent] for agent in action_of(entry) or () if agent in entry.outcome]
    return max(found) if found else None


def usable_entries(entries: Sequence[QueryLogEntry]) -> list[QueryLogEntry]:
    """The entries with a request id, a decision, a propensity and an outcome of an agent asked, in order."""
    return [
        entry
        for entry in entries
        if entry.request_id is not None and entry.propensity is not None and reward_of(entry) is not None
    ]


def estimate_from_log(
    entries: Sequence[QueryLogEntry],
    candidate: Mapping[str, Mapping[Action, float]],
    outcome_model: Mapping[str, Mapping[Action, float]] | None = None,
    min_decisions: int = MIN_DECISIONS,
    min_effective: float = MIN_EFFECTIVE,
) -> OffPolicyEstimate:
    """``off_policy_estimate`` of a query log; entries without id, decision, propensity or outcome are left out.

    So are those with propensity 1 beside explored ones: exploration pauses by the clock or its cap, not by the query, so
    the others are a fair sample.

    ``candidate`` gives {request id: {action: probability}} (sums to 1; actions left out have probability 0),
    ``outcome_model`` {request id: {action: q(x, a)}} for the logged action and all that the candidate takes. What the
    candidate asks beyond an entry's ``largest`` is what exploration never draws. BadInput where
    no entry is usable or a request id is missing from either.
    """
    used = usable_entries(entries)
    if not used:
        raise BadInput(
            f"query log: expected entries with request_id, decision, propensity and an outcome of an agent asked, found "
            f"none among {len(entries)}"
        )
    if any(entry.propensity != 1 for entry in used):
        used = [entry for entry in used if entry.propensity != 1]
    rewards: list[float] = []
    propensities: list[float] = []
    pi: list[float] = []
    predicted: list[float] = []
    expected: list[float] = []
    never: list[float] = []
    for entry in used:
        name, action = str(entry.request_id), action_of(entry) or frozenset()
        if name not in candidate:
            raise BadInput(f"query log: request_id {name}: expected the candidate's action probabilities for it, found none")
        told = candidate[name]
        if abs(sum(told.values()) - 1) > 1e-6:
            raise BadInput(
                f"query log: request_id {name}: expected action probabilities of the candidate that sum to 1, found "
                f"{sum(told.values()):.6g}"
            )
        rewards.append(reward_of(entry) or 0.0)
        propensities.append(entry.propensity or 0.0)
        pi.append(told.get(action, 0.0))
        beyond = sum(p for a, p in told.items() if entry.largest is not None and len(a) > entry.largest)
        never.append(min(1.0, beyond))
        if outcome_model is not None:
            q = outcome_model.get(name, {})
            missing = [a for a in (action, *told) if a not in q]
            if missing:
                raise BadInput(
                    f"query log: request_id {name}: expected a predicted outcome for {', '.join(sorted(missing[0]))}, "
                    "found none"
                )
            predicted.append(q[action])
            expected.append(sum(p * q[a] for a, p in told.items()))
    q_logged, q_candidate = (predicted, expected) if outcome_model is not None else (None, None)
    return off_policy_estimate(rewards, propensities, pi, q_logged, q_candidate, min_decisions, min_effective, never)


def outcome_predictions(
    texts: Sequence[str], actions: Sequence[Action], rewards: ArrayLike, agents: Sequence[str], seed: int, folds: int = 5
) -> np.ndarray:
    """q(x, a) of every single agent for every query, float (n, len(agents)) in [0, 1], each from the other folds.

    Ridge regression of the reward on TF-IDF words and, interacting with them, the agents asked; cross-fitted
    (Chernozhukov et al. 2018), so that no decision is judged by a model that has seen it.
    """
    import scipy.sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import KFold

    r = _vector(rewards, "reward", 0, 1, len(texts))
    asked = np.array([[float(agent in action) for agent in agents] for action in actions])

    def design(words: scipy.sparse.csr_matrix, chosen: np.ndarray) -> scipy.sparse.csr_matrix:
        parts = [words.multiply(chosen[:, [column]]) for column in range(len(agents))]
        return scipy.sparse.hstack([scipy.sparse.csr_matrix(chosen), words, *parts]).tocsr()

    found = np.zeros((len(texts), len(agents)))
    for train, test in KFold(min(folds, len(texts)), shuffle=True, random_state=seed).split(found):
        vectorizer = TfidfVectorizer(sublinear_tf=True)
        words = vectorizer.fit_transform([texts[i] for i in train])
        model = Ridge(alpha=3.0).fit(design(words, asked[train]), r[train])
        unseen = vectorizer.transform([texts[i] for i in test])
        for column in range(len(agents)):
            alone = np.zeros((len(test), len(agents)))
            alone[:, column] = 1
            found[test, column] = model.predict(design(unseen, alone))
    return found.clip(0, 1)
