"""The bootstrap over groups: coverage where episodes of one task resemble each other, and numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest

from routewright.evaluation.clustered import clustered_difference, clustered_macro, clustered_mean


def test_clustered_intervals_cover_and_those_of_single_episodes_do_not() -> None:
    """Ten seeds of one game share its difficulty: resampling episodes would claim far too much."""
    rng = np.random.default_rng(3)
    games, seeds, trials = 40, 10, 200
    covered = naive = 0
    group = np.repeat(np.arange(games), seeds).tolist()
    for trial in range(trials):
        values = (rng.random(games * seeds) < np.repeat(rng.beta(0.5, 0.5, games), seeds)).astype(float)
        estimate = clustered_mean(values, group, seed=trial, resamples=300)
        single = clustered_mean(values, list(range(games * seeds)), seed=trial, resamples=300)
        covered += estimate.low <= 0.5 <= estimate.high
        naive += single.low <= 0.5 <= single.high
    assert 0.88 <= covered / trials <= 0.99
    assert naive / trials < 0.75


def test_ratio_and_difference_by_hand() -> None:
    share = clustered_mean([1, 9], ["a", "b"], seed=0, weights=[1, 99])
    assert share.mean == pytest.approx(0.1)
    assert (share.low, share.high) == (pytest.approx(1 / 11), 1.0)  # resamples: both a, one each, both b
    difference = clustered_difference([1, 1, 0], [0, 1, 0], ["a", "b", "c"], seed=0)
    assert (difference.mean, difference.low, difference.n) == (pytest.approx(1 / 3), 0.0, 3)
    with pytest.raises(ValueError, match="same episodes"):
        clustered_difference([1, 1], [1], ["a", "b"], seed=0)


def test_macro_by_hand_and_by_whole_groups() -> None:
    # Home x holds groups a and b, home y group c: means 0.25 and 1.
    found = clustered_macro([0, 0, 1, 0, 1], ["x", "x", "x", "x", "y"], ["a", "a", "b", "a", "c"], seed=0)
    assert found.mean == pytest.approx((0.25 + 1) / 2)
    # Without x in a resample only y is left (1), without y only x; without b the mean is (0 + 1) / 2 or 0.
    assert (found.low, found.high, found.n) == (0.0, 1.0, 5)


def test_macro_of_single_groups_is_as_wide_as_the_normal_one() -> None:
    rng = np.random.default_rng(0)
    values, home = rng.normal(0, 1, 400), ["x"] * 200 + ["y"] * 200
    found = clustered_macro(values, home, list(range(400)), seed=0)
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
