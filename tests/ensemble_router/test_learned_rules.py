"""Learnt rules find the better agent from rewards, keep what they know, and refuse other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from routewright.ensemble_router.learned_rules import LEARNED, WINDOW, LearnedRouter, load_learned, save_learned
from routewright.errors import BadInput


def history(n: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States, rewards of two agents and the better one: the sign of the first coordinate."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(n, 6)).astype(np.float32) * [3, 1, 1, 1, 1, 1] + 5
    best = (states[:, 0] > 5).astype(int)
    return states, np.eye(2)[best] * 0.8 + 0.1, best


@pytest.mark.parametrize("rule", LEARNED)
def test_a_rule_learns_whom_to_ask_and_is_read_back(tmp_path: Path, rule: str) -> None:
    states, rewards, _ = history()
    unseen, _, best = history(seed=1)
    router = LearnedRouter(rule, 2, states)
    assert router.route(states[0]) == [0]
    for begin in range(0, len(states), 40):
        router.learn(states[begin : begin + 40], rewards[begin : begin + 40])
    save_learned(router, tmp_path, {"seed": 0})
    again = load_learned(tmp_path)
    assert again.linucb.alpha == 0.0
    router.linucb.alpha = 0.0
    found = [again.route(state) for state in unseen]
    assert found == [router.route(state) for state in unseen]
    assert np.mean([agents == [b] for agents, b in zip(found, best, strict=True)]) > 0.85


def test_whitened_states_have_about_unit_length() -> None:
    states, _, _ = history()
    reduced = LearnedRouter("linucb", 2, states).reduced(states)
    assert np.mean((reduced**2).sum(axis=1)) == pytest.approx(1.0, abs=0.01)
    assert np.cov(reduced.T) * reduced.shape[1] == pytest.approx(np.eye(6), abs=0.02)


@pytest.mark.parametrize("m", [2, 40, 64, 65])
def test_unseen_states_stay_small_whatever_the_number_of_samples(m: int) -> None:
    """m centred samples span m − 1 directions; dividing by what is left of the next one gave lengths of 100,000."""
    samples, unseen = np.random.default_rng(0).normal(size=(m, 200)), np.random.default_rng(1).normal(size=(50, 200))
    router = LearnedRouter("icl", 2, samples)
    assert router.reduced(unseen).shape[1] == min(64, m - 1)
    assert np.linalg.norm(router.reduced(unseen), axis=1).max() < 5


def test_linucb_explores_an_agent_that_it_never_asked() -> None:
    """Agent 0 paid little so far: the bonus of the other one wins; without the bonus it stays."""
    states, _, _ = history()
    router = LearnedRouter("linucb", 2, states)
    rewards = np.full((40, 2), np.nan)
    rewards[:, 0] = 0.1
    router.learn(states[:40], rewards)
    assert router.route(states[0]) == [1]
    router.linucb.alpha = 0.0
    assert router.route(states[0]) == [0]


def test_fitted_rules_forget_the_oldest_queries() -> None:
    states, rewards, _ = history(WINDOW // 4)
    router = LearnedRouter("icl", 2, states)
    for _ in range(5):
        router.learn(states, rewards)
    assert router.states.shape == (WINDOW, 6)


def test_an_agent_without_a_reward_is_not_asked_yet() -> None:
    states, rewards, _ = history()
    router = LearnedRouter("reward-regression", 2, states)
    rewards[:, 1] = np.nan
    router.learn(states, rewards)
    assert router.route(states[0]) == [0]


def test_unknown_rules_and_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected one of linucb"):
        LearnedRouter("best", 2, np.eye(3))
    with pytest.raises(BadInput, match=r"learned\.safetensors is missing"):
        load_learned(tmp_path)
