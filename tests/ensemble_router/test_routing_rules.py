"""Routing rules: LinUCB by hand, the others on histories with a known best agent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from routewright.ensemble_router.baselines import (
    BestAgentClassifier,
    Everybody,
    InContextExamples,
    LinUCB,
    RewardRegression,
    SingleBest,
    check_history,
    routes,
    top_k,
)
from routewright.errors import BadInput

NAN = math.nan


def history(n: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States, rewards of three agents and the best agent: the sign of the first coordinate, the third never."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(n, 6)) * 2 + 1
    best = (states[:, 0] > 1).astype(int)
    rewards = np.clip(np.eye(3)[best] * 0.7 + rng.random((n, 3)) * 0.3, 0, 1)
    rewards[rng.random((n, 3)) < 0.2] = NAN
    rewards[:, 2] = 0.1
    return states, rewards, best


def test_linucb_by_hand() -> None:
    """One agent updated with x = (1, 2), r = 1: A = [[2, 2], [2, 5]], A⁻¹ = [[5, −2], [−2, 2]]/6, θ = (1/6, 2/6).

    At x = (1, 0): θᵀx = 1/6, width √(5/6); the other agent: 0, width 1.
    """
    rule = LinUCB(2, 2, alpha=0.5)
    assert rule.bounds(np.array([3.0, 4.0])).tolist() == pytest.approx([2.5, 2.5])
    assert rule.route(np.array([3.0, 4.0])) == [0]
    rule.update(np.array([1.0, 2.0]), 0, 1.0)
    assert rule.inverse[0] == pytest.approx(np.array([[5, -2], [-2, 2]]) / 6)
    assert rule.bounds(np.array([1.0, 0.0])).tolist() == pytest.approx([1 / 6 + 0.5 * math.sqrt(5 / 6), 0.5])
    rule.update(np.array([1.0, 0.0]), 1, 1.0)  # A = [[2, 0], [0, 1]], θ = (1/2, 0)
    assert rule.bounds(np.array([1.0, 0.0]))[1] == pytest.approx(0.5 + 0.5 * math.sqrt(0.5))


def test_linucb_stays_the_inverse() -> None:
    rng = np.random.default_rng(1)
    rule, a = LinUCB(1, 5, 1.0), np.eye(5)
    for _ in range(300):
        x = rng.normal(size=5)
        rule.update(x, 0, float(rng.random()))
        a += np.outer(x, x)
    assert np.allclose(rule.inverse[0] @ a, np.eye(5), atol=1e-9)


def test_linucb_learns_who_is_best() -> None:
    states, rewards, best = history()
    rule = LinUCB(3, 7, alpha=0.5)
    x = np.c_[(states - states.mean(axis=0)) / states.std(axis=0), np.ones(len(states))]
    full = np.nan_to_num(rewards, nan=0.5)
    for row in range(len(x)):
        agent = rule.route(x[row])[0]
        rule.update(x[row], agent, full[row, agent])
    rule.alpha = 0.0
    assert np.mean([rule.route(row) == [b] for row, b in zip(x, best, strict=True)]) > 0.85


@pytest.mark.parametrize("kind", [RewardRegression, BestAgentClassifier, InContextExamples])
def test_fitted_rules_find_the_best_agent_of_unseen_queries(kind: type) -> None:
    states, rewards, _ = history()
    unseen, _, best = history(seed=1)
    found = routes(kind(states, rewards), list(unseen))
    assert np.mean([agents == [b] for agents, b in zip(found, best, strict=True)]) > 0.8


def test_simple_rules() -> None:
    rewards = np.array([[0.2, 0.9, NAN], [0.4, NAN, 0.7]])
    state = np.zeros(2)
    assert SingleBest(rewards).route(state) == [1]
    assert Everybody(3).route(state) == [0, 1, 2]
    f = np.array([0.1, 0.5, 0.3, 0.5])
    assert [top_k(f, k) for k in (1, 2, 3)] == [[1], [1, 3], [1, 3, 2]]


def test_nearest_examples_by_hand() -> None:
    """Nearest two to (1, 0.1): rows 0 and 1. Agent 0: (1 + 0)/2, agent 1: 0.8; agent 2 has none there, its mean is 0.3."""
    states = np.array([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0]])
    rewards = np.array([[1.0, NAN, NAN], [0.0, 0.8, NAN], [0.5, 0.2, 0.3]])
    rule = InContextExamples(states, rewards, k=2)
    assert rule.expected(np.array([1.0, 0.1])).tolist() == pytest.approx([0.5, 0.8, 0.3])
    assert rule.route(np.array([1.0, 0.1])) == [1]


def test_a_classifier_with_nothing_to_tell_apart() -> None:
    states = np.random.default_rng(0).normal(size=(4, 2))
    equal = np.full((4, 2), 0.5)
    assert BestAgentClassifier(states, equal).route(states[0]) == [0]
    equal[2] = [0.1, 0.9]
    assert BestAgentClassifier(states, equal).route(states[0]) == [1]


@pytest.mark.parametrize(
    ("states", "rewards", "told"),
    [
        (np.ones((2, 2)), np.ones((3, 2)), r"found \(2, 2\) and \(3, 2\)"),
        (np.ones((0, 2)), np.ones((0, 2)), "expected states"),
        (np.ones((2, 2)), np.ones((2, 1)), "at least two agents, found 1"),
        (np.array([[1.0, NAN]]), np.ones((1, 2)), "finite query states"),
        (np.ones((2, 2)), np.array([[1.0, 2.0]] * 2), r"rewards in \[0, 1\]"),
        (np.ones((2, 2)), np.array([[1.0, NAN]] * 2), "agent 1 has no reward"),
    ],
)
def test_histories_that_cannot_be_learnt_from(states: np.ndarray, rewards: np.ndarray, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        check_history(states, rewards)
