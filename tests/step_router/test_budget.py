"""Budgets: pacing against hand-worked quantiles, limits that hold for any risks, days, competing threads."""

from __future__ import annotations

import math
import threading
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routewright.errors import BadInput
from routewright.step_router.budget import DayBudget, EpisodeBudget, escalate, paced_threshold

MORNING = datetime(2026, 3, 2, 0, 0, tzinfo=UTC)


def test_paced_threshold_by_hand() -> None:
    """Two calls for eight steps: a quarter of 0.1 … 0.8 lies above 0.6; with no call left, nothing passes."""
    risks = [0.8, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert paced_threshold(0.3, 2, 8, risks) == 0.6
    assert paced_threshold(0.75, 2, 8, risks) == 0.75
    assert paced_threshold(0.3, 8, 8, risks) == 0.3
    assert paced_threshold(0.3, 0, 8, risks) == math.inf
    assert paced_threshold(0.3, 2, 8, []) == 0.3


def run_episode(risks: np.ndarray, budget: EpisodeBudget) -> list[int]:
    return [step for step, risk in enumerate(risks) if escalate(float(risk), step, budget)]


def test_an_episode_without_pacing_by_hand() -> None:
    assert run_episode(np.array([0.2, 0.6, 0.5, 0.9, 0.8]), EpisodeBudget(2, 0.5, 5)) == [1, 3]


def test_an_episode_saves_its_only_call_for_the_step_that_needs_it() -> None:
    """One call, four steps, past risks 0.1 … 0.9. The level falls with the steps left: 0.7, 0.7, 0.5, τ."""
    past = [0.1, 0.3, 0.5, 0.7, 0.9]
    budget = EpisodeBudget(1, 0.2, 4, past)
    assert [budget.threshold_at(step) for step in range(4)] == [0.7, 0.7, 0.5, 0.2]
    assert run_episode(np.array([0.6, 0.65, 0.55, 0.9]), budget) == [2]


def test_pacing_spends_the_same_calls_on_more_risk() -> None:
    rng = np.random.default_rng(0)
    past = np.sort(rng.random(500)).tolist()
    paced = greedy = 0.0
    for _ in range(200):
        risks = rng.random(20)
        paced += risks[run_episode(risks, EpisodeBudget(3, 0.3, 20, past))].sum()
        greedy += risks[run_episode(risks, EpisodeBudget(3, 0.3, 20))].sum()
    assert paced > 1.2 * greedy


@given(
    st.lists(st.floats(0, 1), max_size=40),
    st.integers(0, 5),
    st.floats(0, 1),
    st.lists(st.floats(0, 1), max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_a_budget_is_never_overdrawn(risks: list[float], calls: int, threshold: float, past: list[float]) -> None:
    episode = EpisodeBudget(calls, threshold, 10, past)  # more steps than announced, too
    taken = run_episode(np.array(risks), episode)
    assert len(taken) == episode.spent <= calls
    assert all(risks[step] > threshold for step in taken)


def test_a_budget_of_zero_never_escalates() -> None:
    episode = EpisodeBudget(0, 0.0, 5)
    assert run_episode(np.ones(5), episode) == []
    day = DayBudget(0, 0.0, 100)
    assert not escalate(1.0, 0, EpisodeBudget(5, 0.0, 5), day, MORNING)
    assert day.spent == 0


def test_a_no_costs_nothing() -> None:
    """A step that the day refuses is not charged to the episode, nor the other way round."""
    episode, day = EpisodeBudget(3, 0.2, 5), DayBudget(3, 0.6, 100)
    assert not escalate(0.5, 0, episode, day, MORNING)
    assert not escalate(0.7, 0, EpisodeBudget(0, 0.2, 5), day, MORNING)
    assert (episode.spent, day.spent) == (0, 0)
    assert escalate(0.7, 0, episode, day, MORNING)
    assert (episode.spent, day.spent) == (1, 1)


def test_a_day_by_hand() -> None:
    """10 calls for 40 decisions: a quarter, so the 0.75 quantile of 0.00 … 1.00; at noon with all 10 left, half."""
    past = (np.arange(101) / 100).tolist()
    day = DayBudget(10, 0.2, 40, past)
    assert day.threshold_at(MORNING) == 0.75
    assert day.threshold_at(MORNING + timedelta(hours=12)) == 0.5
    assert day.threshold_at(MORNING + timedelta(hours=20)) == 0.2  # 10 calls for some 7 decisions
    day.spent = 5
    assert day.threshold_at(MORNING + timedelta(hours=12)) == 0.75
    day.spent = 10
    assert day.threshold_at(MORNING + timedelta(hours=12)) == math.inf


def test_a_new_day_has_a_new_budget_and_a_clock_set_back_does_not() -> None:
    day = DayBudget(1, 0.0, 10)
    noon = MORNING + timedelta(hours=12)
    assert escalate(1.0, 0, EpisodeBudget(9, 0.0, 9), day, noon)
    assert not escalate(1.0, 0, EpisodeBudget(9, 0.0, 9), day, noon + timedelta(hours=11))
    assert not escalate(1.0, 0, EpisodeBudget(9, 0.0, 9), day, noon - timedelta(days=1))
    assert escalate(1.0, 0, EpisodeBudget(9, 0.0, 9), day, noon + timedelta(days=1))


def test_a_day_with_twice_the_traffic_keeps_its_budget_and_one_with_the_expected_traffic_uses_it() -> None:
    rng = np.random.default_rng(1)
    past = rng.random(1000).tolist()
    for traffic, least in ((1, 40), (2, 50)):
        day = DayBudget(50, 0.1, 500, past)
        for i in range(500 * traffic):
            now = MORNING + timedelta(days=1) * (i / (500 * traffic))
            escalate(float(rng.random()), 0, EpisodeBudget(1, 0.0, 1), day, now)
        assert least <= day.spent <= 50


def test_threads_share_the_last_call() -> None:
    day = DayBudget(20, 0.0, 100)
    start, yes = threading.Barrier(8), []

    def agent() -> None:
        start.wait()
        for _ in range(50):
            if escalate(1.0, 0, EpisodeBudget(1, 0.0, 1), day, MORNING):
                yes.append(1)

    threads = [threading.Thread(target=agent) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(yes) == day.spent == 20


@pytest.mark.parametrize("calls", [-1, 2.5, True, None])
def test_bad_budgets_are_refused(calls: object) -> None:
    with pytest.raises(BadInput, match="budget"):
        EpisodeBudget(calls, 0.5, 5)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="budget"):
        DayBudget(calls, 0.5, 5)  # type: ignore[arg-type]


def test_bad_decisions_are_refused() -> None:
    with pytest.raises(BadInput, match="decisions"):
        DayBudget(1, 0.5, 0)
    with pytest.raises(BadInput, match="benefit"):
        escalate(math.nan, 0, EpisodeBudget(1, 0.5, 5))
    with pytest.raises(BadInput, match="now"):
        escalate(0.9, 0, EpisodeBudget(1, 0.5, 5), DayBudget(1, 0.5, 5))
