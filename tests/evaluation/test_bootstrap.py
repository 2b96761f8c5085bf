"""Bootstrap intervals: coverage on simulated data, pairing, macro averages, bad input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import ArrayLike

from routewright.evaluation.bootstrap import (
    Estimate,
    macro_interval,
    mean_interval,
    paired_difference,
    percentile_interval,
    std_interval,
)


def test_mean_interval_covers_the_truth_at_its_nominal_rate() -> None:
    rng = np.random.default_rng(11)
    trials = 400
    covered = 0
    for trial in range(trials):
        estimate = mean_interval(rng.normal(2.0, 1.0, 80), seed=trial, resamples=500)
        covered += estimate.low <= 2.0 <= estimate.high
    # Three standard errors of a 95 % rate over 400 trials are 3.3 points; the percentile method falls a little short.
    assert 0.91 <= covered / trials <= 0.98


def test_mean_interval_matches_the_normal_width() -> None:
    values = np.random.default_rng(0).normal(0, 1, 1000)
    estimate = mean_interval(values, seed=0)
    assert estimate.mean == pytest.approx(values.mean())
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(1000), rel=0.06)
    assert estimate.n == 1000


def test_same_seed_same_interval_other_seed_another() -> None:
    values = np.random.default_rng(0).normal(size=60)
    assert mean_interval(values, seed=4) == mean_interval(values, seed=4)
    assert mean_interval(values, seed=4) != mean_interval(values, seed=5)


def test_large_input_is_resampled_in_pieces_with_the_same_meaning() -> None:
    values = np.random.default_rng(0).normal(size=30_000)
    estimate = mean_interval(values, seed=0, resamples=300)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 / np.sqrt(30_000), rel=0.25)


@pytest.mark.parametrize("place", [0, 4, 9])
def test_every_value_is_drawn_equally_often(place: int) -> None:
    values = np.zeros(10)
    values[place] = 1.0
    # The count of one value in a resample is binomial(10, 0.1): 97.5 % of them are 3 or fewer.
    assert mean_interval(values, seed=0) == Estimate(mean=0.1, low=0.0, high=0.3, n=10)


def test_constant_values_have_no_width() -> None:
    assert mean_interval([0.5] * 9, seed=0) == Estimate(mean=0.5, low=0.5, high=0.5, n=9)


def test_paired_is_narrower_than_unpaired_on_correlated_rows() -> None:
    rng = np.random.default_rng(5)
    difficulty = rng.normal(0, 1, 300)
    a, b = difficulty + rng.normal(0.1, 0.1, 300), difficulty + rng.normal(0, 0.1, 300)
    paired = paired_difference(a, b, seed=0)
    alone_a, alone_b = mean_interval(a, seed=0), mean_interval(b, seed=0)
    unpaired = np.hypot(alone_a.high - alone_a.low, alone_b.high - alone_b.low)
    assert paired.high - paired.low < 0.2 * unpaired
    assert paired.low > 0.05
    assert paired.mean == pytest.approx(a.mean() - b.mean())


def test_rows_with_one_seed_are_resampled_together() -> None:
    values = np.random.default_rng(2).normal(size=50)
    shifted, plain = mean_interval(values + 1, seed=3), mean_interval(values, seed=3)
    assert shifted.low - plain.low == pytest.approx(1.0)
    assert shifted.high - plain.high == pytest.approx(1.0)


def test_macro_weighs_groups_equally() -> None:
    values, groups = [1.0] * 90 + [0.0] * 10, ["big"] * 90 + ["small"] * 10
    assert macro_interval(values, groups, seed=0) == Estimate(mean=0.5, low=0.5, high=0.5, n=100)
    assert mean_interval(values, seed=0).mean == pytest.approx(0.9)


def test_macro_width_is_that_of_the_group_means() -> None:
    rng = np.random.default_rng(1)
    values, groups = rng.normal(0, 1, 400), ["x"] * 360 + ["y"] * 40
    estimate = macro_interval(values, groups, seed=0)
    error = 0.5 * np.sqrt(values[:360].var() / 360 + values[360:].var() / 40)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_std_and_percentiles() -> None:
    values = np.random.default_rng(9).exponential(10, 2000)
    spread, median, tail = (
        std_interval(values, seed=0),
        percentile_interval(values, 50, seed=0),
        percentile_interval(values, 99, seed=0),
    )
    assert spread.mean == pytest.approx(values.std())
    assert spread.low < 10 < spread.high
    assert median.low < 10 * np.log(2) < median.high
    assert tail.low < 10 * np.log(100) < tail.high
    assert tail.mean == pytest.approx(np.percentile(values, 99))


@pytest.mark.parametrize(
    "interval",
    [
        lambda v: mean_interval(v, 0),
        lambda v: std_interval(v, 0),
        lambda v: percentile_interval(v, 50, 0),
        lambda v: paired_difference(v, v, 0),
        lambda v: macro_interval(v, ["g"] * len(v), 0),
    ],
)
@pytest.mark.parametrize(
    ("values", "message"),
    [([], "non-empty"), ([1.0, float("nan")], "value 1 of 2 is nan"), ([float("inf")], "is inf")],
)
def test_bad_values(interval: Callable[[ArrayLike], Estimate], values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interval(values)


def test_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        paired_difference([1.0, 2.0], [1.0], seed=0)
    with pytest.raises(ValueError, match="2 values but 1 group"):
        macro_interval([1.0, 2.0], ["g"], seed=0)
