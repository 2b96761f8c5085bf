"""Thresholds from hand-made episodes, the temperature's tasks, the ROC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_policy import tiny_profile

from routewright.step_router.calibration import (
    benefit_grid,
    choose_thresholds,
    fit,
    held_out_tasks,
    longest_limit,
    roc,
)
from routewright.step_router.dataset import fetch_tasks, read_tasks
from routewright.step_router.episodes import Episode
from routewright.step_router.features import NAMES
from routewright.step_router.risk import RiskModel, RiskSettings, Rollouts, calibrate, fit_risk

GRID = [0.2, 0.5, 0.8]
FAST = RiskSettings(steps=4)


def setting(row: str, threshold: float | None, wins: int, calls: int, steps: int, tasks: int, seeds: int) -> list[Episode]:
    """One episode a task and seed; the first ``wins`` of them, seed after seed, succeed."""
    pairs = [(f"t{i}", seed) for seed in range(seeds) for i in range(tasks)]
    return [
        Episode(row, threshold, task, "quest", seed, number < wins, steps, calls)
        for number, (task, seed) in enumerate(pairs)
    ]


def played(tasks: int = 40, seeds: int = 1, wins: tuple[float, float, float] = (1.0, 1.0, 0.5), llm: float = 1.0) -> Any:
    """The LLM's share of wins and those at the three thresholds; 3, 2 and 1 calls in 4, 5 and 6 steps."""
    n = tasks * seeds
    episodes = setting("slm", None, n // 4, 0, 6, tasks, seeds) + setting("llm", None, round(llm * n), 4, 4, tasks, seeds)
    for threshold, share, calls, steps in zip(GRID, wins, (3, 2, 1), (4, 5, 6), strict=True):
        episodes += setting("risk", threshold, round(share * n), calls, steps, tasks, seeds)
    return episodes


def thresholds(episodes: list[Episode], **router: float) -> dict[str, float | None]:
    settings = {"c_slm": 1.0, "c_llm": 50.0, "kappa": 500.0, "call_budget": 2.0, "target_failure": 0.1, "delta": 0.05}
    chosen = choose_thresholds(episodes, GRID, tiny_profile(router=settings | router))["thresholds"]
    assert isinstance(chosen, dict)
    return chosen


def test_thresholds_by_hand() -> None:
    """(50 − 1)/500 = 0.098; 0.9^40·e = 0.04 ≤ 0.05 certifies 40 wins of 40."""
    assert thresholds(played()) == pytest.approx(
        {"parity": 0.5, "bayes": 0.098, "budget": 0.5, "guaranteed": 0.5}
    )


def test_measured_shares_by_hand() -> None:
    found = choose_thresholds(played(), GRID, tiny_profile())
    assert found["success"] == pytest.approx([1, 1, 0.5])
    assert found["escalation"] == pytest.approx([3 / 4, 2 / 5, 1 / 6])
    assert (found["slm_success"], found["llm_success"]) == (pytest.approx(0.25), pytest.approx(1.0))


def test_parity_is_the_largest_threshold_near_the_llm() -> None:
    """0.98 of 0.9 is 0.882: reached by 0.9, and by 0.8 only where the LLM itself wins 0.8."""
    assert thresholds(played(wins=(1.0, 0.9, 0.8), llm=0.9))["parity"] == 0.5
    assert thresholds(played(wins=(1.0, 0.9, 0.8), llm=0.8))["parity"] == 0.8
    assert thresholds(played(wins=(0.9, 0.5, 0.95), llm=0.9))["parity"] == 0.8, "wherever the curve dips before"
    assert thresholds(played(wins=(0.5, 0.4, 0.3)))["parity"] == -1.0, "every step where none is near"


@pytest.mark.parametrize(("budget", "expected"), [(3.0, 0.2), (2.0, 0.5), (1.5, 0.8), (1.0, 0.8), (0.5, 1.0), (0.0, 1.0)])
def test_budget_by_hand(budget: float, expected: float) -> None:
    assert thresholds(played(), call_budget=budget)["budget"] == expected


def test_costs_by_hand() -> None:
    """A failure that costs little is never worth a call: thresholds stop at 1."""
    assert thresholds(played(), kappa=10.0)["bayes"] == 1.0
    assert thresholds(played(), c_llm=1.0)["bayes"] == 0.0


def test_guarantee_needs_enough_tasks_not_episodes() -> None:
    """0.9^10·e = 0.95 and 0.9^10 = 0.35 are above 0.05, with one seed a task as with eight."""
    assert thresholds(played(tasks=10))["guaranteed"] is None
    assert thresholds(played(tasks=10, seeds=8))["guaranteed"] is None
    assert thresholds(played(tasks=80))["guaranteed"] == 0.5


def test_guarantee_counts_a_tasks_share_of_failures() -> None:
    """At 0.5 the second half of the seeds fails: each task's loss is 1/2, far above 0.1; alike where it is below."""
    assert thresholds(played(seeds=2, wins=(1.0, 0.5, 0.5)))["guaranteed"] == 0.2
    assert thresholds(played(seeds=2, wins=(1.0, 0.5, 0.5)), target_failure=0.8)["guaranteed"] == 0.8


def test_held_out_tasks_are_a_fifth() -> None:
    tasks = [f"t{i}" for i in range(23)]
    chosen = held_out_tasks(tasks, 0)
    assert len(chosen) == 4
    assert chosen < set(tasks)
    assert chosen == held_out_tasks(tasks[::-1], 0)
    assert chosen != held_out_tasks(tasks, 1)
    assert len(held_out_tasks(tasks[:2], 0)) == 1


def test_the_limit_is_the_environments_not_what_the_small_model_took(tmp_path: Path) -> None:
    """A shell allows 8 steps, also where the small model submits at the first."""
    fetch_tasks("shell", tmp_path, tiny_profile(tasks={"policy": 2, "router": 2, "threshold": 1, "test": 1}))
    tasks = read_tasks(tmp_path)
    assert longest_limit(tasks, tasks.splits["threshold"]) == 8


def rollouts(failed: list[int], lengths: list[int], seed: int = 0) -> Rollouts:
    n = sum(lengths)
    features = np.random.default_rng(seed).normal(size=(n, len(NAMES)))
    features[:, NAMES.index("evidence")] = 0.0
    episode = np.repeat(np.arange(len(lengths)), lengths)
    return Rollouts(features, episode, np.array(failed, dtype=float), np.arange(len(failed)) % 2)


def test_roc_by_hand() -> None:
    """A failed episode of two steps, half a weight each, and two successes of one step."""
    found = roc(np.array([0.9, 0.8, 0.1, 0.85]), rollouts([1, 0, 0], [2, 1, 1]))
    assert found["thresholds"] == pytest.approx([1.0, 0.9, 0.85, 0.8, 0.1])
    assert found["tpr"] == pytest.approx([0, 0.5, 0.5, 1, 1])
    assert found["fpr"] == pytest.approx([0, 0, 0.5, 0.5, 1])


@pytest.mark.parametrize("outcome", [0, 1])
def test_there_is_no_roc_where_all_end_alike(outcome: int) -> None:
    assert roc(np.array([0.5, 0.2, 0.1]), rollouts([outcome] * 2, [2, 1])) == {"fpr": [], "tpr": [], "thresholds": []}


def test_fit_calibrates_on_the_holdout() -> None:
    train, holdout = rollouts([0, 1, 0, 1], [3, 2, 4, 1]), rollouts([1, 0, 1], [2, 2, 2], seed=1)
    model, history = fit(train, None, holdout, FAST, 5)
    expected, steps = fit_risk(train, None, FAST, 5)
    before = expected.risks(train.features)
    calibrate(expected, holdout)
    assert np.array_equal(model.risks(train.features), expected.risks(train.features))
    assert not np.allclose(model.risks(train.features), before)
    assert history == steps
    assert len(history) == 4


def test_fit_falls_back_to_the_training_episodes() -> None:
    train, holdout = rollouts([0, 1, 0, 1], [3, 2, 4, 1]), rollouts([1, 1], [2, 2], seed=1)
    model, _ = fit(train, None, holdout, FAST, 5)
    expected, _ = fit_risk(train, None, FAST, 5)
    calibrate(expected, train)
    assert np.array_equal(model.risks(train.features), expected.risks(train.features))


@pytest.mark.parametrize("outcome", [0, 1])
def test_fit_goes_without_a_failure_or_a_success(outcome: int) -> None:
    """Four episodes that ended alike: a constant risk of 5/6 or 1/6, and a benefit from the coin's episodes."""
    train, holdout = rollouts([outcome] * 4, [3, 2, 4, 1]), rollouts([outcome] * 2, [2, 2], seed=1)
    model, history = fit(train, None, holdout, FAST, 5)
    assert model.risks(train.features) == pytest.approx((4 * outcome + 1) / 6)
    assert len(history) == 4


def test_the_grid_is_of_the_models_benefits() -> None:
    data = rollouts([0, 1], [60, 60])
    model, _ = fit_risk(data, None, FAST, 0)
    grid, benefits = benefit_grid(model, data), model.benefits(data.features)
    assert grid == sorted(set(grid))
    assert np.mean(benefits > grid[0]) == pytest.approx(0.9, abs=0.02)
    assert np.mean(benefits > grid[-1]) == pytest.approx(0.05, abs=0.02)
    constant = RiskModel()
    constant.standardise(np.zeros((2, len(NAMES))))
    assert len(benefit_grid(constant.eval(), data)) == 1
