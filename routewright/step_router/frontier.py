"""Success against escalation: frontier, area, comparisons at an equal rate, and the worst perturbation seeds.

Everything is measured on re-executed episodes. Episodes of one game or problem resemble each other, so intervals
resample those groups (a cluster bootstrap): the same seed and the same groups give the same resamples, which pairs the
rows of a table. They speak of new games under these perturbation seeds. With ``also``, the perturbation seed of each
episode (n,), they speak of new games under new seeds (`crossed_draws`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from routewright.evaluation.bootstrap import RESAMPLES, Estimate
from routewright.evaluation.clustered import codes, crossed_draws, finite_vector, group_draws, percentiles


def worst_count(alpha: float, seeds: int) -> int:
    """⌈α·|Z|⌉, the number of seeds that CVaR_α averages; ValueError unless 0 < α ≤ 1 and there is a seed."""
    if not 0 < alpha <= 1 or seeds < 1:
        raise ValueError(f"CVaR needs 0 < alpha <= 1 and at least one seed, got alpha {alpha} and {seeds} seeds")
    return math.ceil(round(alpha * seeds, 9))  # 0.1 · 30 is 3.0000000000000004 in floating point


def cvar(failure_rates: ArrayLike, alpha: float = 0.2) -> float:
    """CVaR_α = mean of the worst ⌈α|Z|⌉ seeds' failure rates (arXiv 2605.16604); `failure_rates` (Z,)."""
    rates = np.sort(finite_vector(failure_rates))
    return float(rates[-worst_count(alpha, rates.size) :].mean())


def seed_failure_rates(success: ArrayLike, seed: Sequence[Hashable]) -> dict[Hashable, float]:
    """F_z: each perturbation seed's share of failed episodes, in order of appearance; `success` (n,) in [0, 1]."""
    values = finite_vector(success)
    _, index = codes(seed, values.size)
    names = list(dict.fromkeys(seed))
    return dict(zip(names, (1 - np.bincount(index, values) / np.bincount(index)).tolist(), strict=True))


def worst_seed_success(success: ArrayLike, seed: Sequence[Hashable]) -> float:
    """Success rate of the perturbation seed with the lowest one."""
    return 1 - max(seed_failure_rates(success, seed).values())


def escalation(llm_steps: ArrayLike, steps: ArrayLike) -> float:
    """Σ LLM steps / Σ steps over episodes (n,), in [0, 1]."""
    return float(finite_vector(llm_steps).sum() / finite_vector(steps).sum())


def post_hoc_oracle(
    slm_success: ArrayLike, slm_steps: ArrayLike, llm_success: ArrayLike, llm_steps: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Success, LLM steps and steps (n,) when the LLM runs exactly the episodes that the SLM alone fails.

    It knows the outcome in advance but escalates whole episodes, so a router that steps in late can beat its
    escalation.
    """
    failed = finite_vector(slm_success) < 0.5
    return (
        np.where(failed, finite_vector(llm_success), finite_vector(slm_success)),
        np.where(failed, finite_vector(llm_steps), 0.0),
        np.where(failed, finite_vector(llm_steps), finite_vector(slm_steps)),
    )


@dataclass(frozen=True)
class Sweep:
    """The same n episodes re-executed at m settings of one router (thresholds, rates).

    ``success`` (m, n) in [0, 1]; ``llm_steps`` and ``steps`` (m, n); ``group`` (n,) the game or problem of each
    episode. The settings should reach from never to always escalating, else the curve is held level beyond its ends.
    """

    success: np.ndarray
    llm_steps: np.ndarray
    steps: np.ndarray
    group: Sequence[Hashable]

    def __post_init__(self) -> None:
        shapes = {np.shape(a) for a in (self.success, self.llm_steps, self.steps)}
        if len(shapes) > 1 or np.ndim(self.success) != 2 or np.shape(self.success)[1] != len(self.group):
            raise ValueError(f"a sweep needs three (settings, episodes) arrays and a group an episode, got {shapes}")
        if not all(np.isfinite(a).all() for a in (self.success, self.llm_steps, self.steps)):
            raise ValueError("a sweep holds a value that is not finite")
        if (np.asarray(self.steps) < np.asarray(self.llm_steps)).any() or (np.asarray(self.steps) < 1).any():
            raise ValueError("an episode has more LLM steps than steps, or no step at all")


@dataclass(frozen=True)
class Point:
    """One setting: escalation share, success rate, LLM calls an episode, share of episodes with any escalation."""

    setting: int
    escalation: float
    success: float
    llm_calls_per_episode: float
    escalated_episodes: float


def frontier(sweep: Sweep) -> list[Point]:
    """One point a setting, by rising escalation."""
    points = [
        Point(i, escalation(calls, steps), float(success.mean()), float(calls.mean()), float((calls > 0).mean()))
        for i, (success, calls, steps) in enumerate(zip(sweep.success, sweep.llm_steps, sweep.steps, strict=True))
    ]
    return sorted(points, key=lambda point: (point.escalation, point.success))


def success_at(rate: float, escalations: ArrayLike, successes: ArrayLike) -> float:
    """Success at an escalation rate, linear between measured points (a coin tossed between two settings attains it)."""
    x, y = _curve(np.asarray(escalations, dtype=float), np.asarray(successes, dtype=float))
    return float(np.interp(rate, x, y))


def area(escalations: ArrayLike, successes: ArrayLike) -> float:
    """∫₀¹ success d(escalation) of the piecewise linear curve, level beyond its ends, in [0, 1]."""
    x, y = _curve(np.asarray(escalations, dtype=float), np.asarray(successes, dtype=float))
    return float(np.trapezoid(np.concatenate([y[:1], y, y[-1:]]), np.concatenate([[0.0], x, [1.0]])))


def area_interval(sweep: Sweep, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """Area under the success–escalation curve with its 95 % interval over groups; ``n`` counts episodes."""
    return _sweep_interval([sweep], lambda x, y: area(x[0], y[0]), seed, resamples)


def area_difference(
    a: Sweep, b: Sweep, seed: int, resamples: int = RESAMPLES, also: Sequence[Hashable] | None = None
) -> Estimate:
    """Area of `a` minus area of `b`, paired over the same groups."""
    return _sweep_interval([a, b], lambda x, y: area(x[0], y[0]) - area(x[1], y[1]), seed, resamples, also)


def matched_success(sweep: Sweep, rate: float, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """Success at one escalation rate, read off each resample's own curve."""
    return _sweep_interval([sweep], lambda x, y: success_at(rate, x[0], y[0]), seed, resamples)


def matched_difference(
    a: Sweep, b: Sweep, rate: float, seed: int, resamples: int = RESAMPLES, also: Sequence[Hashable] | None = None
) -> Estimate:
    """Success of `a` minus success of `b` at the same escalation rate, paired over the same groups."""
    return _sweep_interval(
        [a, b], lambda x, y: success_at(rate, x[0], y[0]) - success_at(rate, x[1], y[1]), seed, resamples, also
    )


def brier_skill(
    risk: ArrayLike, failed: ArrayLike, episode: ArrayLike, group: Sequence[Hashable], seed: int,
    also: Sequence[Hashable] | None = None,
) -> Estimate:  # fmt: skip
    """1 − Brier(risk) / Brier(base rate), at most 1 and 0 for the base rate itself, with its interval over groups.

    ``risk`` (n,) of each step, ``episode`` (n,) its episode's index, ``failed`` and ``group`` (E,). Every episode
    weighs the same, whatever its length. The base rate is that of the evaluated episodes, which the router does not
    know. ValueError where all episodes end alike: there is no skill to measure.
    """
    p, y, e = finite_vector(risk), finite_vector(failed), np.asarray(episode, dtype=int)
    if (np.bincount(e, minlength=y.size) == 0).any() or e.max() >= y.size or p.size != e.size:
        raise ValueError("every step needs an episode and every episode a step")
    if y.min() == y.max():
        raise ValueError("all episodes end alike: there is no base rate to beat")
    own = np.bincount(e, (p - y[e]) ** 2, y.size) / np.bincount(e, minlength=y.size)

    def skill(draws: np.ndarray) -> np.ndarray:
        base = (draws @ y) / draws.sum(axis=1)
        reference = np.maximum(base * (1 - base), 1e-12)
        return 1 - (draws @ own) / draws.sum(axis=1) / reference

    draws = _draws(group, also, seed, RESAMPLES)
    failures = draws @ y
    mixed = draws[(failures > 0) & (failures < draws.sum(axis=1))]  # where all end alike the skill does not exist
    return percentiles(skill(np.ones((1, y.size)))[0], skill(mixed), y.size)


def _draws(group: Sequence[Hashable], also: Sequence[Hashable] | None, seed: int, resamples: int) -> np.ndarray:
    """How often each episode counts in each resample, (resamples, n)."""
    if also is not None:
        return crossed_draws(group, also, seed, resamples)
    count, index = codes(group, len(group))
    return group_draws(count, seed, resamples)[:, index]


def _curve(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points by rising x, those with one x averaged."""
    distinct, index = np.unique(x, return_inverse=True)
    return distinct, np.bincount(index, y) / np.bincount(index)


def _sweep_interval(
    sweeps: Sequence[Sweep],
    statistic: Callable[[list[np.ndarray], list[np.ndarray]], float],
    seed: int,
    resamples: int,
    also: Sequence[Hashable] | None = None,
) -> Estimate:
    group = list(sweeps[0].group)
    if any(list(sweep.group) != group for sweep in sweeps):
        raise ValueError("a paired comparison needs the same episodes in the same order in both sweeps")
    draws = np.concatenate([np.ones((1, len(group))), _draws(group, also, seed, resamples)])
    x = [(draws @ s.llm_steps.T) / (draws @ s.steps.T) for s in sweeps]
    y = [(draws @ s.success.T) / draws.sum(axis=1)[:, None] for s in sweeps]
    values = np.array([statistic([a[i] for a in x], [b[i] for b in y]) for i in range(len(draws))])
    return percentiles(values[0], values[1:], len(group))
