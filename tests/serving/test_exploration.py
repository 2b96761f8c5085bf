"""Exploration: propensities by hand and by counting, and what it may cost."""

from __future__ import annotations

from collections import Counter

import pytest

from routewright.errors import BadInput
from serving.exploration import Draw, Exploration, agents_propensity, escalation_propensity


@pytest.mark.parametrize(
    ("taken", "greedy", "epsilon", "expected"),
    [
        ([0], [0], 0.0, 1.0),
        ([0], [0], 0.2, 0.8 + 0.05),  # it stands, or is drawn
        ([1], [0], 0.2, 0.05),
        ([0, 1], [1, 0], 0.2, 0.8),  # several agents are never drawn
        ([0], [0, 1], 0.2, 0.05),
        ([0], [0], 1.0, 0.25),
    ],
)
def test_propensity_of_agents_by_hand(taken: list[int], greedy: list[int], epsilon: float, expected: float) -> None:
    assert agents_propensity(taken, greedy, 4, epsilon) == pytest.approx(expected)


@pytest.mark.parametrize("greedy", [[2], [0, 2]])
def test_propensities_of_all_actions_sum_to_one(greedy: list[int]) -> None:
    actions = [[i] for i in range(5)] + ([greedy] if len(greedy) > 1 else [])
    assert sum(agents_propensity(action, greedy, 5, 0.3) for action in actions) == pytest.approx(1)


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
