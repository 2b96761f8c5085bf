"""The bootstrap over groups: coverage where episodes of one task resemble each other, and numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest

from routewright.evaluation.clustered import clustered_difference, clustered_macro, clustered_mean, crossed_draws


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


def test_crossed_draws_by_hand() -> None:
    """Both groups and both seeds, drawn twice each: counts 2 and 0, 1 and 1, or 0 and 2 with chances 1/4, 1/2, 1/4."""
    group, other = ["a", "a", "b", "b"], [0, 1, 0, 1]
    draws = crossed_draws(group, other, seed=0, resamples=20_000)
    assert {tuple(draw) for draw in draws.tolist()} == {
        (4, 0, 0, 0), (0, 4, 0, 0), (0, 0, 4, 0), (0, 0, 0, 4), (2, 2, 0, 0), (0, 0, 2, 2), (2, 0, 2, 0), (0, 2, 0, 2),
        (1, 1, 1, 1),
    }  # fmt: skip
    assert (draws == 1).all(axis=1).mean() == pytest.approx(1 / 4, abs=0.01), "1/2 by groups times 1/2 by seeds"
    assert (draws == [4, 0, 0, 0]).all(axis=1).mean() == pytest.approx(1 / 16, abs=0.01)
    # One episode of each group, under different seeds: 1/8 of the resamples miss both.
    alone = crossed_draws(["a", "b"], [0, 1], seed=0, resamples=20_000)
    assert alone.any(axis=1).all()
    assert len(alone) / 20_000 == pytest.approx(1 - 2 / 16, abs=0.01)


def test_crossed_draws_against_copies_of_the_table() -> None:
    """An independent resampling: rows and columns of a half-filled table are chosen by index and laid out anew."""
    rng = np.random.default_rng(0)
    groups, seeds = 12, 5
    table = rng.normal(size=(groups, 1)) + 2 * rng.normal(size=(1, seeds)) + rng.normal(size=(groups, seeds))
    filled = rng.random((groups, seeds)) < 0.6
    at, under = np.nonzero(filled)
    draws = crossed_draws(at.tolist(), under.tolist(), seed=0, resamples=20_000)
    found = draws @ table[filled] / draws.sum(axis=1)
    copies = []
    for _ in range(20_000):
        rows, columns = rng.integers(groups, size=groups), rng.integers(seeds, size=seeds)
        chosen = filled[np.ix_(rows, columns)]
        copies.append(table[np.ix_(rows, columns)][chosen].mean())
    assert np.quantile(found, [0.025, 0.5, 0.975]) == pytest.approx(np.quantile(copies, [0.025, 0.5, 0.975]), abs=0.06)


def test_crossed_intervals_cover_under_new_seeds_and_those_of_games_alone_do_not() -> None:
    """Sixty games share ten seeds of unequal harshness."""
    rng = np.random.default_rng(4)
    games, seeds, trials = 60, 10, 150
    group, other = np.repeat(np.arange(games), 2), np.arange(games * 2) % seeds
    covered = naive = 0
    for trial in range(trials):
        values = rng.normal(0, 0.5, games)[group] + rng.normal(0, 1, seeds)[other] + rng.normal(0, 0.5, games * 2)
        draws = crossed_draws(group.tolist(), other.tolist(), seed=trial, resamples=300)
        low, high = np.quantile(draws @ values / draws.sum(axis=1), [0.025, 0.975])
        covered += low <= 0 <= high
        single = clustered_mean(values, group.tolist(), seed=trial, resamples=300)
        naive += single.low <= 0 <= single.high
    assert covered / trials >= 0.86
    assert naive / trials < 0.6
