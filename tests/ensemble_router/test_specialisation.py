"""Information of agent and domain by hand; tests that pass for specialised agents and not for a collapse or equal ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from routewright.ensemble_router.specialisation import (
    information_gain,
    interaction,
    interaction_p,
    mutual_information,
    shares,
)

DOMAINS = np.repeat(["a", "b"], 60)


def test_information_by_hand() -> None:
    """Agent = domain of two equal ones: 1 bit. Counts (3, 1; 1, 3)/8: 2·(3/8)·log₂(3/2) + 2·(1/8)·log₂(1/2) = 0.1887."""
    assert mutual_information(np.repeat([0, 1], 60), DOMAINS) == pytest.approx(1.0)
    first, second = np.array([0, 0, 0, 1, 0, 1, 1, 1]), np.repeat(["a", "b"], 4)
    assert mutual_information(first, second) == pytest.approx(0.75 * math.log2(1.5) - 0.25)
    assert mutual_information(np.zeros(120), DOMAINS) == 0.0


def test_a_sorting_router_is_told_from_the_untrained_one() -> None:
    initial = np.random.default_rng(0).integers(2, size=120)
    found, before, p = information_gain(np.repeat([0, 1], 60), initial, DOMAINS, seed=0, permutations=200)
    assert found == pytest.approx(1.0)
    assert before < 0.1
    assert p == pytest.approx(1 / 201)


def test_a_collapse_onto_one_agent_does_not_pass() -> None:
    initial = np.random.default_rng(0).integers(2, size=120)
    found, before, p = information_gain(np.zeros(120, dtype=int), initial, DOMAINS, seed=0, permutations=200)
    assert found == 0.0 < before
    assert p > 0.5


def test_interaction_by_hand() -> None:
    """Accuracies (1, 0; 0, 1): every agent and domain has 1/2, so all four deviate by 1/2: Σ over two agents 2·(1/2)²."""
    rewards = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert interaction(rewards, np.array(["a", "b"])) == pytest.approx(0.5)
    better = np.array([[1.0, 0.0], [1.0, 0.0]])  # one agent better everywhere is no interaction
    assert interaction(better, np.array(["a", "b"])) == 0.0


def test_agents_that_differ_by_domain_are_told_from_equal_ones() -> None:
    rng = np.random.default_rng(0)
    right = np.where((DOMAINS == "a")[:, None], [0.9, 0.4], [0.4, 0.9])
    assert interaction_p((rng.random((120, 2)) < right).astype(float), DOMAINS, 0, 200) < 0.05
    equal = [interaction_p((rng.random((120, 2)) < 0.6).astype(float), DOMAINS, seed, 100) for seed in range(20)]
    assert np.mean(np.array(equal) < 0.05) < 0.2


def test_shares_count_every_agent_that_is_asked() -> None:
    assert shares([[0], [0, 1], [1]], ["a", "a", "b"], 3) == {"a": [1.0, 0.5, 0.0], "b": [0.0, 1.0, 0.0]}
