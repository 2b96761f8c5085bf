"""The bootstrap over groups: coverage where episodes of one task resemble each other, and numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest

from routewright.evaluation.clustered import clustered_difference, clustered_mean


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
