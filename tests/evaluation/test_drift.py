"""Drift: hand-worked statistics, false alarms as often as stated, and changes that are found."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from routewright.errors import BadInput
from routewright.evaluation.drift import (
    detect_drift,
    gaussian_kernel,
    maximum_mean_discrepancy,
    median_bandwidth,
    population_stability_index,
)

ROUTES = np.array(["a", "b", "c"])


def traffic(rng: np.random.Generator, n: int, shares: tuple[float, ...] = (0.6, 0.3, 0.1), shift: float = 0.0) -> Any:
    """Routes and eight-dimensional embeddings that belong to them."""
    kinds = rng.choice(3, size=n, p=shares)
    return list(ROUTES[kinds]), rng.normal(size=(n, 8)) + kinds[:, None] + shift


def test_the_stability_index_by_hand() -> None:
    # Smoothed counts 9.5 of 11 and 1.5 of 11 against 4.5 of 11 and 6.5 of 11.
    p, q = np.array([9.5, 1.5]) / 11, np.array([4.5, 6.5]) / 11
    by_hand = (p[0] - q[0]) * np.log(p[0] / q[0]) + (p[1] - q[1]) * np.log(p[1] / q[1])
    assert population_stability_index([9, 1], [4, 6]) == pytest.approx(by_hand)
    assert population_stability_index([5, 5], [50, 50]) == pytest.approx(0)
    assert 0 < population_stability_index([10, 0], [0, 10]) < np.inf


@pytest.mark.parametrize("counts", [([1, 2], [1]), ([], []), ([1, -1], [1, 1]), ([0, 0], [1, 1]), ([np.nan], [1])])
def test_counts_that_are_none(counts: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="count"):
        population_stability_index(*counts)


def test_the_discrepancy_by_hand() -> None:
    points = np.array([[0.0], [1.0], [2.0]])
    assert median_bandwidth(points) == 1.0
    assert median_bandwidth(np.zeros((3, 2))) == 1.0
    kernel = gaussian_kernel(points, 1.0)
    near, far = np.exp(-0.5), np.exp(-2.0)
    # {0, 1} against {2}: (2 + 2·near)/4 + 1 − 2·(near + far)/2
    assert maximum_mean_discrepancy(kernel, [True, True, False]) == pytest.approx((1 + near) / 2 + 1 - near - far)


@pytest.mark.parametrize("sizes", [(300, 100), (150, 400)])
def test_unchanged_traffic_alarms_as_often_as_stated(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    repetitions, stated = 200, 0.1
    alarms = {"psi": 0, "mmd": 0, "either": 0}
    for repetition in range(repetitions):
        (old, before), (new, now) = traffic(rng, sizes[0]), traffic(rng, sizes[1])
        found = detect_drift(old, new, before, now, stated, resamples=100, seed=repetition)
        assert found.psi is not None
        assert found.mmd is not None
        alarms["psi"] += found.psi > (found.psi_threshold or 0)
        alarms["mmd"] += found.mmd > (found.mmd_threshold or 0)
        alarms["either"] += found.drifted
    # Two tests at half the rate each; 200 repetitions of 0.1 have a standard error of 0.021.
    assert 0.04 <= alarms["either"] / repetitions <= 0.15
    for statistic in ("psi", "mmd"):
        assert 0.01 <= alarms[statistic] / repetitions <= 0.095


def test_moved_route_shares_are_found_and_named() -> None:
    rng = np.random.default_rng(1)
    found = detect_drift(traffic(rng, 400)[0], traffic(rng, 200, (0.3, 0.3, 0.4))[0])
    assert found.drifted
    assert found.reason.startswith("route shares moved")
    assert (found.mmd, found.mmd_threshold) == (None, None)
    assert found.shares["c"][1] > 0.3 > found.shares["c"][0]
    assert json.loads(json.dumps(asdict(found)))["drifted"] is True


def test_changed_queries_on_unchanged_routes_are_found() -> None:
    rng = np.random.default_rng(2)
    (old, before), (new, now) = traffic(rng, 400), traffic(rng, 200, shift=0.5)
    found = detect_drift(old, new, before, now)
    assert found.drifted
    assert "queries changed" in found.reason
    assert not detect_drift(old, new).drifted


def test_a_route_that_is_new_counts() -> None:
    rng = np.random.default_rng(3)
    new = traffic(rng, 200)[0]
    found = detect_drift(traffic(rng, 400)[0], new[:150] + ["d"] * 50)
    assert found.drifted
    assert found.shares["d"] == (0.0, 0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference_routes": ["a"] * 49}, "reference traffic: expected at least 50 queries, got 49"),
        ({"current_routes": []}, "current traffic: expected at least 50 queries, got 0"),
        ({"false_alarm_rate": 0.0}, "false alarm rate: expected a number"),
        ({"reference_embeddings": np.zeros((60, 2))}, "got one of them"),
        (
            {"reference_embeddings": np.zeros((59, 2)), "current_embeddings": np.zeros((60, 2))},
            "reference embeddings: expected one row for each of 60 queries",
        ),
        (
            {"reference_embeddings": np.zeros((60, 2)), "current_embeddings": np.full((60, 2), np.nan)},
            "current embeddings: row 0 is not finite",
        ),
        ({"reference_embeddings": np.zeros((60, 2)), "current_embeddings": np.zeros((60, 3))}, "expected one size, got 2"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"reference_routes": ["a"] * 60, "current_routes": ["a"] * 60, **change}
    with pytest.raises(BadInput, match=message):
        detect_drift(**given)
