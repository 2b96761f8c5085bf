"""95 % bootstrap over groups: episodes of one task, or queries about one thing, resemble each other and are resampled
together; where episodes share perturbation seeds too, over both.

The same seed and the same groups give the same resamples, which pairs the rows of a table.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from routewright.evaluation.bootstrap import RESAMPLES, Estimate


def clustered_mean(
    values: ArrayLike,
    group: Sequence[Hashable],
    seed: int,
    weights: ArrayLike | None = None,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Σ values / Σ weights over episodes (n,) with its 95 % interval over groups; without weights, the mean.

    With LLM steps as values and steps as weights it is the escalation share.
    """
    vector = finite_vector(values)
    over = np.ones_like(vector) if weights is None else finite_vector(weights)
    count, index = codes(group, vector.size)
    sums, norms = np.bincount(index, vector, count), np.bincount(index, over, count)
    draws = group_draws(count, seed, resamples)
    return percentiles(vector.sum() / over.sum(), (draws @ sums) / (draws @ norms), vector.size)


def clustered_macro(values: ArrayLike, home: Sequence[Hashable], group: Sequence[Hashable], seed: int) -> Estimate:
    """Mean over homes of the mean of their values (n,), every home weighing the same, with its interval over groups."""
    vector = finite_vector(values)
    homes, at = codes(home, vector.size)
    count, index = codes(group, vector.size)
    sums, norms = np.zeros((count, homes)), np.zeros((count, homes))
    np.add.at(sums, (index, at), vector)
    np.add.at(norms, (index, at), 1.0)
    draws = group_draws(count, seed, RESAMPLES)
    drawn = draws @ norms
    # A small home may be missing from a resample, whose mean is that of the others.
    means = np.divide(draws @ sums, drawn, out=np.full(drawn.shape, np.nan), where=drawn > 0)
    return percentiles((sums.sum(axis=0) / norms.sum(axis=0)).mean(), np.nanmean(means, axis=1), vector.size)


def clustered_difference(a: ArrayLike, b: ArrayLike, group: Sequence[Hashable], seed: int) -> Estimate:
    """Mean of ``a − b`` over the same episodes (n,), paired, with its interval over groups."""
    first, second = finite_vector(a), finite_vector(b)
    if first.size != second.size:
        raise ValueError(f"a paired difference needs the same episodes twice, got {first.size} and {second.size}")
    return clustered_mean(first - second, group, seed)


def finite_vector(values: ArrayLike) -> np.ndarray:
    """The values as floats (n,); ValueError for none, for other shapes and for what is not finite."""
    vector = np.asarray(values, dtype=float)
    if vector.ndim != 1 or vector.size == 0 or not np.isfinite(vector).all():
        raise ValueError(f"expected a non-empty vector of finite numbers, got shape {vector.shape}")
    return vector


def codes(names: Sequence[Hashable], size: int) -> tuple[int, np.ndarray]:
    """Number of distinct names, and each entry's index among them by first appearance (n,)."""
    if len(names) != size:
        raise ValueError(f"got {size} episodes but {len(names)} names of their groups or seeds")
    code = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return len(code), np.array([code[name] for name in names])


def group_draws(groups: int, seed: int, resamples: int) -> np.ndarray:
    """How often each group occurs in each resample, (resamples, groups)."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(groups, np.full(groups, 1 / groups), size=resamples).astype(float)


def crossed_draws(group: Sequence[Hashable], other: Sequence[Hashable], seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """How often each episode (n,) counts where groups *and* others (perturbation seeds) are resampled, (≤ resamples, n).

    The pigeonhole bootstrap (Owen 2007, doi:10.1214/07-AOAS122): both are drawn with replacement, each by itself, and an
    episode counts as often as its group times as often as its other. Intervals of it speak of new groups under new others;
    it is conservative: the noise of single episodes counts up to three times. The groups are drawn as by `group_draws`.
    Resamples that hold no episode are left out. Few seeds tell little of how unequal seeds are, a single one nothing.
    """
    groups, index = codes(group, len(group))
    others, at = codes(other, len(group))
    by_other = np.random.default_rng((seed, 1)).multinomial(others, np.full(others, 1 / others), size=resamples)
    draws = group_draws(groups, seed, resamples)[:, index] * by_other[:, at]
    return draws[draws.any(axis=1)]


def percentiles(value: float, replicates: np.ndarray, n: int) -> Estimate:
    """A value with the 2.5 and 97.5 % quantiles of its replicates."""
    low, high = np.quantile(replicates, (0.025, 0.975))
    return Estimate(mean=float(value), low=float(low), high=float(high), n=n)
