"""95 % percentile bootstrap over queries (Efron 1979).

The resamples depend only on the seed and the number of values, so values of two rows given in the same query order and
with the same seed are resampled together: that is what makes the intervals paired.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict

RESAMPLES = 2000
_CHUNK = 2_000_000  # resampled values held in memory at once


class Estimate(BaseModel):
    """A statistic with its 95 % interval over ``n`` queries; ``mean`` is the statistic itself, also for a quantile."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mean: float
    low: float
    high: float
    n: int


def _checked(values: ArrayLike) -> np.ndarray:
    vector = np.asarray(values, dtype=float)
    if vector.ndim != 1 or vector.size == 0:
        raise ValueError(f"a bootstrap needs a non-empty vector of values, got shape {vector.shape}")
    if not np.isfinite(vector).all():
        bad = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise ValueError(f"value {bad} of {vector.size} is {vector[bad]}, a bootstrap needs finite numbers")
    return vector


def _resampled(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], generator: np.random.Generator, resamples: int
) -> np.ndarray:
    """``statistic`` of each resample, shape (resamples,); it maps (k, n) to (k,)."""
    step = max(1, _CHUNK // values.size)
    return np.concatenate(
        [
            statistic(values[generator.integers(values.size, size=(min(step, resamples - done), values.size))])
            for done in range(0, resamples, step)
        ]
    )


def _interval(
    values: ArrayLike, statistic: Callable[[np.ndarray], np.ndarray], seed: int, resamples: int = RESAMPLES
) -> Estimate:
    vector = _checked(values)
    replicates = _resampled(vector, statistic, np.random.default_rng(seed), resamples)
    low, high = np.quantile(replicates, (0.025, 0.975))
    return Estimate(mean=float(statistic(vector[None, :])[0]), low=float(low), high=float(high), n=vector.size)


def mean_interval(values: ArrayLike, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """The mean of ``values`` (n,) and its interval; ValueError for empty, NaN or infinite input."""
    return _interval(values, lambda x: x.mean(axis=1), seed, resamples)


def std_interval(values: ArrayLike, seed: int) -> Estimate:
    """The population standard deviation of ``values`` (n,) and its interval; errors as ``mean_interval``."""
    return _interval(values, lambda x: x.std(axis=1), seed)


def percentile_interval(values: ArrayLike, percent: float, seed: int) -> Estimate:
    """A percentile (0–100) of ``values`` (n,) and its interval; errors as ``mean_interval``.

    The interval of a p99 is too narrow below some 300 values: no resample holds anything above the largest value.
    """
    return _interval(values, lambda x: np.percentile(x, percent, axis=1), seed)


def paired_difference(a: ArrayLike, b: ArrayLike, seed: int) -> Estimate:
    """Mean of ``a − b`` over the same queries (n,) and its interval; ValueError where the lengths differ."""
    first, second = _checked(a), _checked(b)
    if first.size != second.size:
        raise ValueError(f"a paired difference needs the same queries twice, got {first.size} and {second.size}")
    return mean_interval(first - second, seed)


def macro_interval(values: ArrayLike, groups: Sequence[Hashable], seed: int) -> Estimate:
    """Mean over groups of the group means; queries are resampled within their group, groups are kept.

    ``values`` and ``groups`` have n entries each; every group weighs the same, whatever its size.
    """
    vector = _checked(values)
    if len(groups) != vector.size:
        raise ValueError(f"got {vector.size} values but {len(groups)} group names")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    generator = np.random.default_rng(seed)
    parts = [vector[indices] for indices in members.values()]
    replicates = np.mean([_resampled(part, lambda x: x.mean(axis=1), generator, RESAMPLES) for part in parts], axis=0)
    low, high = np.quantile(replicates, (0.025, 0.975))
    mean = float(np.mean([part.mean() for part in parts]))
    return Estimate(mean=mean, low=float(low), high=float(high), n=vector.size)
