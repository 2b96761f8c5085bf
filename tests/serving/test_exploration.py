"""Exploration: propensities by hand and by counting, and what it may cost."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from routewright.errors import BadInput
from serving.exploration import (
    Draw,
    Exploration,
    drawn_share,
    escalation_propensity,
    set_propensity,
)


@pytest.mark.parametrize(
    ("taken", "greedy", "expected"),
    [
        # from {0}: three added, none removed, three exchanged; any set of at most two: (1/2)(1/4) or (1/2)(1/6)
        ([0], [0], 1 / 8),
        ([1], [0], 1 / 6 + 1 / 8),
        ([0, 1], [0], 1 / 6 + 1 / 12),
        ([1, 2], [0], 1 / 12),
        ([0, 1, 2], [0], 0),
        # from {0, 1}: none added, two removed, four exchanged
        ([0, 1], [1, 0], 1 / 12),
        ([0, 2], [0, 1], 1 / 6 + 1 / 12),
        ([0], [0, 1], 1 / 6 + 1 / 8),
        ([2], [0, 1], 1 / 8),
        ([2, 3], [0, 1], 1 / 12),
    ],
)
def test_the_share_of_a_drawn_set_by_hand(taken: list[int], greedy: list[int], expected: float) -> None:
    assert drawn_share(taken, greedy, 4, 2) == pytest.approx(expected / 2)


def all_sets(agents: int, largest: int) -> list[tuple[int, ...]]:
    return [taken for size in range(1, largest + 1) for taken in itertools.combinations(range(agents), size)]


@pytest.mark.parametrize("agents", [2, 3, 5])
def test_the_shares_of_all_sets_sum_to_one_and_none_is_without_support(agents: int) -> None:
    for largest in range(1, agents + 1):
        for greedy in all_sets(agents, largest):
            shares = [drawn_share(taken, greedy, agents, largest) for taken in all_sets(agents, largest)]
            assert sum(shares) == pytest.approx(1)
            assert min(shares) > 0
            total = sum(set_propensity(taken, greedy, agents, largest, 0.3) for taken in all_sets(agents, largest))
            assert total == pytest.approx(1)


@pytest.mark.parametrize(("greedy", "largest"), [([2], 1), ([2], 2), ([1, 3], 3), ([0, 1, 2, 3], 2)])
def test_sets_come_as_often_as_their_propensity_says(greedy: list[int], largest: int) -> None:
    exploration, n = Exploration(0.6, largest=largest, seed=3), 6_000
    draws = [exploration.draw_agents(greedy, 4) for _ in range(n)]
    told = {tuple(sorted(draw.taken)): draw.propensity for draw in draws}
    counts = Counter(tuple(sorted(draw.taken)) for draw in draws)
    assert {draw.largest for draw in draws} == {max(largest, len(greedy))}
    assert set(told) == set(all_sets(4, max(largest, len(greedy))))
    assert sum(told.values()) == pytest.approx(1)
    for taken, propensity in told.items():
        assert counts[taken] / n == pytest.approx(propensity, abs=4 * math.sqrt(propensity / n)), taken
    assert all(draw.taken == greedy for draw in draws if not draw.explore)


def test_without_exploration_the_choice_stands_for_certain() -> None:
    draw = Exploration(0.0).draw_agents([4, 1], 6)
    assert (draw.taken, draw.explore, draw.epsilon, draw.propensity, draw.largest) == ([4, 1], False, 0.0, 1.0, None)
    spent = Exploration(1.0, cap=0.01, window=100, seed=0)
    assert [spent.draw_agents([0], 6).propensity for _ in range(3)][1:] == [1.0, 1.0]


def test_propensity_of_an_escalation() -> None:
    assert [escalation_propensity(a, b, 0.2) for a, b in ((True, True), (False, True))] == pytest.approx([0.9, 0.1])


def test_off_by_default_values_nothing_is_drawn() -> None:
    exploration = Exploration(0.0)
    assert {exploration.draw() for _ in range(100)} == {Draw(False, 0.0)}


def test_the_cap_ends_a_window_s_exploration_and_says_so() -> None:
    exploration = Exploration(0.5, cap=0.1, window=100, seed=1)
    for _ in range(20):
        draws = [exploration.draw() for _ in range(100)]
        explored = [i for i, draw in enumerate(draws) if draw.explore]
        assert len(explored) == 10  # half of a hundred would be far more
        # what was drawn while there was something left has ε in its propensity, what came after is certain
        assert [draw.epsilon for draw in draws] == [0.5] * (explored[-1] + 1) + [0.0] * (99 - explored[-1])


def test_a_cap_of_nothing() -> None:
    assert Exploration(1.0, cap=0.0).draw() == Draw(False, 0.0)


def test_the_share_drawn_is_epsilon() -> None:
    exploration = Exploration(0.3, seed=2)
    counts = Counter(exploration.draw().explore for _ in range(20_000))
    assert counts[True] / 20_000 == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 20_000) ** 0.5)


@pytest.mark.parametrize(
    ("epsilon", "cap", "field"), [(1.5, 1, "epsilon"), (float("nan"), 1, "epsilon"), (0.1, -1, "epsilon-cap")]
)
def test_values_that_are_no_probabilities(epsilon: float, cap: float, field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field}: expected"):
        Exploration(epsilon, cap)


def test_a_largest_set_of_nobody() -> None:
    with pytest.raises(BadInput, match=r"^epsilon-agents: expected at least 1 agent, found 0$"):
        Exploration(0.1, largest=0)
