"""Where to put the threshold τ (escalate iff a step's signal > τ): from costs, for a budget, or with a guarantee.

The guarantees read a loss matrix (units, thresholds): each unit's loss in [0, 1] when its episodes are re-executed at
each threshold of a grid. The grid ascends (the safest, most escalating threshold first) and is fixed before these units
are looked at; the units are exchangeable with those to come and took no part in training. Episodes of one game are not
independent: then a unit is a game, its loss the share of its episodes that failed. Both may answer None, which says
nothing about any threshold: leave every step to the LLM.

Games that share perturbation seeds are independent *given* those seeds only: a guarantee over them is for new games under
the calibration's seeds. How often a threshold fails under other seeds they do not tell, however many games there are; for
that no two games may share a seed.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from routewright.errors import BadInput


def bayes_threshold(c_slm: float, c_llm: float, kappa: float) -> float:
    """τ* = (c_LLM − c_SLM)/κ (arXiv 2605.16604), κ the cost of a failed episode; may exceed 1: then never escalate.

    For the signal p_SLM − p_LLM, which takes the LLM for no better than it is and what follows for alike in cost; for the
    paper's P(failure of the small model alone) it is right only where the LLM is flawless and the step is the last.
    """
    if not kappa > 0:
        raise BadInput(f"kappa: the cost of a failure must be above 0, found {kappa}")
    if not c_llm >= c_slm:
        raise BadInput(f"c_llm: expected at least c_slm = {c_slm}, found {c_llm}")
    return (c_llm - c_slm) / kappa


def calls_at(risks: ArrayLike, episode: ArrayLike, thresholds: ArrayLike) -> np.ndarray:
    """Steps with p_t > τ, per episode and threshold, (E, m); `risks` and `episode` (n,).

    On SLM-only rollouts this is a forecast: an escalation changes the steps that follow. Re-executed counts are better.
    """
    p, e, grid = np.asarray(risks, dtype=float), np.asarray(episode, dtype=int), np.asarray(thresholds, dtype=float)
    above = (p[:, None] > grid).astype(float)
    calls = np.zeros((int(e.max()) + 1, grid.size))
    np.add.at(calls, e, above)
    return calls


def threshold_for_calls(calls: ArrayLike, thresholds: ArrayLike, budget: float) -> float:
    """The smallest threshold whose mean LLM calls an episode stay within `budget`, in the sample `calls` (E, m).

    No guarantee beyond the sample. Returns inf (never escalate) where even the largest threshold calls too often, and
    for a budget of 0.
    """
    matrix, grid = _losses(calls, thresholds, bounded=False)
    if not budget >= 0:
        raise BadInput(f"budget: expected a number of calls of at least 0, found {budget}")
    fits = np.flatnonzero(matrix.mean(axis=0) <= budget)
    return float(grid[fits[0]]) if fits.size and budget > 0 else float("inf")


def binomial_p_value(failures: ArrayLike, n: int, target: float) -> np.ndarray:
    """P(Binomial(n, target) ≤ failures): exact for H: R > target when the n losses are independent and 0 or 1."""
    return np.asarray(binom.cdf(failures, n, target))


def hoeffding_bentkus_p_value(mean: ArrayLike, n: int, target: float) -> np.ndarray:
    """min(exp(−n·h(min(R̂, r), r)), e·P(Bin(n, r) ≤ ⌈n·R̂⌉)) for H: R > r = target (Bates et al. 2021).

    h(a, b) = a·ln(a/b) + (1 − a)·ln((1 − a)/(1 − b)). Valid for n independent losses anywhere in [0, 1].
    """
    observed = np.asarray(mean, dtype=float)
    a = np.minimum(observed, target)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = np.where(a > 0, a * np.log(a / target), 0.0)
        second = np.where(a < 1, (1 - a) * np.log((1 - a) / (1 - target)), 0.0)
    hoeffding = np.exp(-n * (first + second))
    bentkus = np.e * binom.cdf(np.ceil(np.round(n * observed, 9)), n, target)
    return np.minimum(1.0, np.minimum(hoeffding, bentkus))


def learn_then_test(
    losses: ArrayLike,
    thresholds: ArrayLike,
    target: float,
    delta: float = 0.05,
    p_value: Literal["binomial", "hoeffding-bentkus"] = "binomial",
    correction: Literal["fixed-sequence", "bonferroni"] = "fixed-sequence",
) -> float | None:
    """The largest threshold τ̂ certified to fail at most at rate `target` (Angelopoulos et al. 2021), or None.

    Statement: with probability at least 1 − δ over the calibration units, the answer is None or the expected loss of a
    new unit at τ̂ is at most `target`. Where τ̂ stands, it holds for all future units together; it holds for
    independent, identically distributed units whatever the shape of the loss in τ.

    Each H_j: R(τ_j) > target gets a p-value: "binomial" needs losses of 0 or 1 (single episodes), "hoeffding-bentkus"
    takes [0, 1] (games). "fixed-sequence" tests at level δ from the safest threshold on and stops at the first that
    cannot be rejected; "bonferroni" tests all m at δ/m, which still certifies something where the safest thresholds are
    not the best.
    """
    matrix, grid = _losses(losses, thresholds, bounded=True)
    _rates(target=target, delta=delta)
    n = len(matrix)
    if p_value == "binomial":
        if not np.isin(matrix, (0.0, 1.0)).all():
            raise BadInput("losses: the binomial p-value needs losses of 0 or 1, use hoeffding-bentkus for shares")
        p = binomial_p_value(matrix.sum(axis=0), n, target)
    else:
        p = hoeffding_bentkus_p_value(matrix.mean(axis=0), n, target)
    if correction == "bonferroni":
        rejected = np.flatnonzero(p <= delta / grid.size)
    else:
        kept = np.flatnonzero(p > delta)
        rejected = np.arange(kept[0] if kept.size else grid.size)
    return float(grid[rejected[-1]]) if rejected.size else None


def conformal_risk_control(losses: ArrayLike, thresholds: ArrayLike, target: float) -> float | None:
    """The largest threshold τ̂ with (n·R̂(τ̂) + 1)/(n + 1) ≤ target (Angelopoulos et al. 2022), or None.

    Statement: E[loss of the next unit at τ̂] ≤ `target`, a None counting 0, the expectation over calibration units
    *and* the next one. It bounds the mean over many calibrations: one calibration may well exceed the target (about
    half of them do). For a statement about the τ̂ in hand use `learn_then_test`.

    The loss must not fall as τ rises. Re-executed episodes do not always oblige, so each unit's loss is replaced by its
    largest at this or a safer threshold, which only makes the bound more cautious.
    """
    matrix, grid = _losses(losses, thresholds, bounded=True)
    _rates(target=target)
    n = len(matrix)
    monotone = np.maximum.accumulate(matrix, axis=1)
    fits = np.flatnonzero((monotone.sum(axis=0) + 1) / (n + 1) <= target + 1e-12)
    return float(grid[fits[-1]]) if fits.size else None


def _losses(losses: ArrayLike, thresholds: ArrayLike, bounded: bool) -> tuple[np.ndarray, np.ndarray]:
    matrix, grid = np.asarray(losses, dtype=float), np.asarray(thresholds, dtype=float)
    if matrix.ndim != 2 or matrix.size == 0 or matrix.shape[1:] != grid.shape:
        raise BadInput(f"losses: expected (units, {grid.size} thresholds), found shape {matrix.shape}")
    if not (np.diff(grid) > 0).all():
        raise BadInput("thresholds: expected an ascending grid")
    if not np.isfinite(matrix).all() or (matrix < 0).any() or (bounded and (matrix > 1).any()):
        raise BadInput(f"losses: expected finite numbers {'in [0, 1]' if bounded else 'of at least 0'}")
    return matrix, grid


def _rates(**rates: float) -> None:
    for name, value in rates.items():
        if not 0 < value < 1:
            raise BadInput(f"{name}: expected a rate above 0 and below 1, found {value}")
