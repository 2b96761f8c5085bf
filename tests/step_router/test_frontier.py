"""Frontier, area, CVaR and comparisons against hand-worked numbers."""

from __future__ import annotations

import numpy as np
import pytest

from routewright.step_router.frontier import (
    Sweep,
    area,
    area_difference,
    area_interval,
    brier_skill,
    cvar,
    escalation,
    frontier,
    matched_difference,
    matched_success,
    post_hoc_oracle,
    seed_failure_rates,
    success_at,
    worst_count,
    worst_seed_success,
)


@pytest.mark.parametrize(
    ("alpha", "seeds", "count"),
    [(0.2, 20, 4), (0.2, 5, 1), (0.2, 6, 2), (0.2, 1, 1), (0.1, 30, 3), (0.07, 100, 7), (1.0, 3, 3), (0.01, 3, 1)],
)
def test_worst_count_is_a_ceiling_without_floating_point_dust(alpha: float, seeds: int, count: int) -> None:
    assert worst_count(alpha, seeds) == count


def test_cvar_by_hand() -> None:
    """⌈0.3 · 4⌉ = 2 worst of 0.1, 0.5, 0.2, 0.4: 0.45; int() would say 0.5."""
    assert cvar([0.1, 0.5, 0.2, 0.4], 0.3) == pytest.approx(0.45)
    assert cvar([0.1, 0.5, 0.2, 0.4], 0.25) == pytest.approx(0.5)
    assert cvar([0.1, 0.5, 0.2, 0.4], 1.0) == pytest.approx(0.3)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1])
def test_cvar_needs_a_share(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        cvar([0.1], alpha)


def test_seed_failure_rates_by_hand() -> None:
    seed = [7, 3, 7, 3, 3, 9]
    success = [1, 0, 0, 0, 1, 1]
    assert seed_failure_rates(success, seed) == {7: 0.5, 3: pytest.approx(2 / 3), 9: 0.0}
    assert worst_seed_success(success, seed) == pytest.approx(1 / 3)


def test_escalation_is_a_ratio_of_sums() -> None:
    assert escalation([1, 0, 9], [10, 10, 10]) == pytest.approx(1 / 3)
    assert escalation([1, 9], [1, 99]) == pytest.approx(0.1)  # not the mean of the shares 1 and 1/11


def test_post_hoc_oracle_by_hand() -> None:
    success, calls, steps = post_hoc_oracle([1, 0, 0], [4, 10, 10], [1, 1, 0], [3, 5, 6])
    assert success.tolist() == [1, 1, 0]
    assert calls.tolist() == [0, 5, 6]
    assert steps.tolist() == [4, 5, 6]
    assert escalation(calls, steps) == pytest.approx(11 / 15)


def hand_sweep() -> Sweep:
    """Four episodes in two games at three settings: escalation 1, 0 and 1/4; success 1, 1/2 and 3/4."""
    return Sweep(
        success=np.array([[1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 1, 0]]),
        llm_steps=np.array([[4, 4, 4, 4], [0, 0, 0, 0], [0, 3, 0, 1]]),
        steps=np.array([[4, 4, 4, 4], [2, 6, 2, 6], [2, 6, 2, 6]]),
        group=["a", "a", "b", "b"],
    )


def test_frontier_by_hand() -> None:
    points = frontier(hand_sweep())
    assert [p.setting for p in points] == [1, 2, 0]
    assert [p.escalation for p in points] == [0, 0.25, 1]
    assert [p.success for p in points] == [0.5, 0.75, 1]
    assert [p.llm_calls_per_episode for p in points] == [0, 1, 4]
    assert [p.escalated_episodes for p in points] == [0, 0.5, 1]


def test_area_and_success_at_by_hand() -> None:
    """0.25 · (0.5 + 0.75)/2 + 0.75 · (0.75 + 1)/2 = 0.8125."""
    assert area([1, 0, 0.25], [1, 0.5, 0.75]) == pytest.approx(0.8125)
    assert area_interval(hand_sweep(), seed=0).mean == pytest.approx(0.8125)
    assert success_at(0.5, [1, 0, 0.25], [1, 0.5, 0.75]) == pytest.approx(0.75 + 0.25 / 3)
    assert matched_success(hand_sweep(), 0.125, seed=0).mean == pytest.approx(0.625)


def test_a_curve_that_ends_early_is_held_level() -> None:
    assert area([0.2, 0.6], [0.5, 0.9]) == pytest.approx(0.2 * 0.5 + 0.4 * 0.7 + 0.4 * 0.9)
    assert success_at(0.9, [0.2, 0.6], [0.5, 0.9]) == 0.9


def test_points_at_one_escalation_are_averaged() -> None:
    assert area([0, 0, 1], [0.4, 0.6, 1]) == pytest.approx(0.75)


def simulated(rng: np.random.Generator, games: int, seeds: int, skill: float) -> Sweep:
    """Games of unequal difficulty; a step-independent router whose escalations hit failures `skill` of the time."""
    difficulty = np.repeat(rng.beta(1, 2, games), seeds)
    fails, luck, order = (
        rng.random(difficulty.size) < difficulty,
        rng.random(difficulty.size),
        rng.random(difficulty.size),
    )
    aimed = np.where(luck < skill, np.where(fails, order / 3, 1 / 3 + order * 2 / 3), order)
    rates = np.array([0, 0.2, 0.4, 1.0])
    chosen = aimed[None, :] < rates[:, None]
    steps = np.full(chosen.shape, 5.0)
    return Sweep(~fails | chosen, np.where(chosen, 5.0, 0.0), steps, np.repeat(np.arange(games), seeds).tolist())


def test_a_better_router_separates_at_the_matched_rate_and_in_area_and_an_equal_one_does_not() -> None:
    good = simulated(np.random.default_rng(0), 150, 3, 0.9)
    poor = simulated(np.random.default_rng(0), 150, 3, 0.0)
    assert matched_difference(good, poor, 0.2, seed=1, resamples=500).low > 0.02
    assert area_difference(good, poor, seed=1, resamples=500).low > 0.01
    none = area_difference(good, good, seed=1, resamples=100)
    assert (none.mean, none.low, none.high) == (0, 0, 0)


def test_paired_sweeps_must_hold_the_same_episodes() -> None:
    one, other = hand_sweep(), hand_sweep()
    with pytest.raises(ValueError, match="same episodes"):
        area_difference(one, Sweep(other.success, other.llm_steps, other.steps, ["b", "b", "a", "a"]), seed=0)


def test_area_interval_covers_its_expectation() -> None:
    rng = np.random.default_rng(5)
    truth = np.mean([area_interval(simulated(rng, 60, 3, 0.6), 0, resamples=2).mean for _ in range(300)])
    trials = 100
    found = [area_interval(simulated(rng, 60, 3, 0.6), trial, resamples=200) for trial in range(trials)]
    assert 0.86 <= np.mean([e.low <= truth <= e.high for e in found]) <= 1.0


def test_brier_skill_by_hand() -> None:
    """Episode 0 failed, risks 0.5 and 1: (0.25 + 0)/2; episode 1 did not, risk 0.5: 0.25. Mean 0.1875 against 0.25."""
    estimate = brier_skill([0.5, 1.0, 0.5], [1, 0], [0, 0, 1], ["a", "b"], seed=0)
    assert estimate.mean == pytest.approx(1 - 0.1875 / 0.25)
    assert estimate.n == 2


def test_brier_skill_of_the_base_rate_is_zero_and_of_the_truth_one() -> None:
    failed = np.array([1, 0, 0, 0] * 10)
    episode = np.repeat(np.arange(40), 2)
    group = list(range(40))
    base = brier_skill(np.full(80, 0.25), failed, episode, group, seed=0)
    assert base.mean == pytest.approx(0)
    assert base.low <= base.high <= 1e-9  # against each resample's own base rate a constant never wins
    assert brier_skill(failed[episode], failed, episode, group, seed=0).mean == 1


def test_brier_skill_does_not_count_long_episodes_more() -> None:
    long = brier_skill([0.0] * 50 + [0.0], [1, 0], [0] * 50 + [1], ["a", "b"], seed=0)
    assert long.mean == pytest.approx(1 - 0.5 / 0.25)


def test_brier_skill_needs_two_outcomes_and_steps_for_every_episode() -> None:
    with pytest.raises(ValueError, match="end alike"):
        brier_skill([0.5, 0.5], [1, 1], [0, 1], ["a", "b"], seed=0)
    with pytest.raises(ValueError, match="every episode a step"):
        brier_skill([0.5, 0.5], [1, 0, 1], [0, 1], ["a", "b", "c"], seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"success": np.ones((2, 4))}, "three"),
        ({"group": ["a"]}, "three"),
        ({"llm_steps": np.full((3, 4), 9)}, "more LLM steps"),
        ({"success": np.full((3, 4), np.nan)}, "not finite"),
    ],
)
def test_bad_sweeps_are_refused(change: dict, message: str) -> None:
    parts = {name: getattr(hand_sweep(), name) for name in ("success", "llm_steps", "steps", "group")}
    with pytest.raises(ValueError, match=message):
        Sweep(**(parts | change))
