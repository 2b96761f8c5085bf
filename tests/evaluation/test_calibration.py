"""Brier score, ECE and reliability bins against hand-worked numbers."""

from __future__ import annotations

import numpy as np
import pytest

from routewright.evaluation.calibration import brier_score, expected_calibration_error, reliability_bins


def test_brier_by_hand() -> None:
    assert brier_score([0.9, 0.2, 0.5], [1, 0, 0]) == pytest.approx((0.01 + 0.04 + 0.25) / 3)


def test_ece_by_hand() -> None:
    # Two bins: (0, .5] holds .2 and .4 with outcomes 0, 1; (.5, 1] holds .8 with outcome 1.
    assert expected_calibration_error([0.2, 0.4, 0.8], [0, 1, 1], bins=2) == pytest.approx(2 / 3 * 0.2 + 1 / 3 * 0.2)


def test_bins_by_hand() -> None:
    bins = reliability_bins([0.0, 0.5, 0.6, 1.0], [0, 1, 0, 1], bins=2)
    assert [(b.low, b.high, b.n) for b in bins] == [(0.0, 0.5, 2), (0.5, 1.0, 2)]
    assert [(b.probability, b.frequency) for b in bins] == [(0.25, 0.5), (0.8, 0.5)]


def test_empty_bins_are_left_out_and_fifteen_is_the_default() -> None:
    bins = reliability_bins([0.01, 0.99], [0, 1])
    assert [b.high for b in bins] == pytest.approx([1 / 15, 1.0])


def test_calibrated_probabilities_have_small_ece_and_overconfident_ones_do_not() -> None:
    rng = np.random.default_rng(3)
    truth = rng.random(20_000)
    happened = (rng.random(20_000) < truth).astype(int)
    assert expected_calibration_error(truth, happened) < 0.02
    assert expected_calibration_error((truth > 0.5).astype(float), happened) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("probabilities", "outcomes", "message"),
    [
        ([], [], "non-empty"),
        ([0.1], [0, 1], "one length"),
        ([1.1], [1], "outside"),
        ([float("nan")], [1], "NaN"),
        ([0.5], [2], "neither 0 nor 1"),
    ],
)
def test_bad_input(probabilities: list[float], outcomes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        brier_score(probabilities, outcomes)
