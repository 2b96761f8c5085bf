"""Thresholds against hand-worked numbers, and the stated guarantees over 200 calibrations with known risk."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binom

from routewright.errors import BadInput
from routewright.step_router.thresholds import (
    bayes_threshold,
    binomial_p_value,
    calls_at,
    conformal_risk_control,
    hoeffding_bentkus_p_value,
    learn_then_test,
    threshold_for_calls,
)

GRID = np.linspace(0.0, 1.0, 21)
RESAMPLES = 200
TARGET = 0.1


def test_bayes_threshold_by_hand() -> None:
    assert bayes_threshold(1, 50, 100) == pytest.approx(0.49)
    assert bayes_threshold(1, 50, 10) > 1  # a failure costs less than the call: never


def test_calls_at_by_hand() -> None:
    found = calls_at([0.2, 0.9, 0.5, 0.6], [0, 0, 1, 1], [0.0, 0.5, 0.9])
    assert found.tolist() == [[2, 1, 0], [2, 1, 0]]  # p > τ: 0.5 at 0.5 does not call


def test_threshold_for_calls_by_hand() -> None:
    calls = [[4, 2, 0], [2, 1, 1]]
    grid = [0.1, 0.5, 0.9]
    assert threshold_for_calls(calls, grid, 3) == 0.1
    assert threshold_for_calls(calls, grid, 1.5) == 0.5
    assert threshold_for_calls(calls, grid, 1) == 0.9
    assert threshold_for_calls(calls, grid, 0.4) == math.inf
    assert threshold_for_calls([[1, 0]], [0.1, 0.2], 0) == math.inf


def test_p_values_by_hand() -> None:
    assert binomial_p_value(0, 10, 0.1) == pytest.approx(0.9**10)
    assert binomial_p_value(1, 10, 0.1) == pytest.approx(0.9**10 + 10 * 0.1 * 0.9**9)
    # No loss in 100 at r = 0.1: Hoeffding exp(100 ln 0.9) = 0.9¹⁰⁰, Bentkus e times the same.
    assert hoeffding_bentkus_p_value(0.0, 100, 0.1) == pytest.approx(0.9**100)
    # R̂ = r: Hoeffding says 1, Bentkus e·P(Bin ≤ 10) > 1.
    assert hoeffding_bentkus_p_value(0.1, 100, 0.1) == 1
    # R̂ = 0.05 at n = 100: h = 0.05 ln 0.5 + 0.95 ln(0.95/0.9).
    h = 0.05 * math.log(0.5) + 0.95 * math.log(0.95 / 0.9)
    expected = min(math.exp(-100 * h), math.e * binom.cdf(5, 100, 0.1))
    assert hoeffding_bentkus_p_value(0.05, 100, 0.1) == pytest.approx(expected)
    assert hoeffding_bentkus_p_value(0.9, 100, 0.1) == 1


def columns(*failures: int, n: int = 60) -> np.ndarray:
    """Losses of n units with so many failures at each threshold."""
    return np.stack([(np.arange(n) < k).astype(float) for k in failures], axis=1)


def test_learn_then_test_by_hand() -> None:
    """At n = 60, r = 0.1: P(Bin ≤ 1) = 0.0138, P(Bin ≤ 2) = 0.0530, so 1 failure passes at δ = 0.05 and 2 do not."""
    grid = [0.1, 0.2, 0.3, 0.4]
    assert binom.cdf([1, 2], 60, 0.1) == pytest.approx([0.0138, 0.0530], abs=1e-4)
    assert learn_then_test(columns(0, 1, 2, 3), grid, 0.1) == 0.2
    assert learn_then_test(columns(0, 1, 1, 1), grid, 0.1) == 0.4
    assert learn_then_test(columns(2, 0, 0, 0), grid, 0.1) is None  # a fixed sequence stops at its first test
    # Bonferroni looks at all four at 0.0125: only 0 failures (0.0018) pass.
    assert learn_then_test(columns(2, 0, 0, 1), grid, 0.1, correction="bonferroni") == 0.3
    assert learn_then_test(columns(1, 1, 1, 1), grid, 0.1, correction="bonferroni") is None


def test_shares_need_hoeffding_bentkus() -> None:
    shares = np.full((200, 2), 0.02)
    with pytest.raises(BadInput, match="hoeffding-bentkus"):
        learn_then_test(shares, [0.1, 0.2], 0.1)
    assert learn_then_test(shares, [0.1, 0.2], 0.1, p_value="hoeffding-bentkus") == 0.2


def test_conformal_risk_control_by_hand() -> None:
    """n = 19, target 0.25: (failures + 1)/20 ≤ 0.25 lets 4 failures pass and 5 not."""
    grid = [0.1, 0.2, 0.3]
    assert conformal_risk_control(columns(0, 4, 5, n=19), grid, 0.25) == 0.2
    assert conformal_risk_control(columns(5, 5, 5, n=19), grid, 0.25) is None
    assert conformal_risk_control(columns(0, 0, 0, n=2), grid, 0.25) is None  # 1/3: two units are too few


def test_conformal_risk_control_does_not_profit_from_a_loss_that_falls() -> None:
    """Failures 0, 5, 0: no unit fails at 0.3, but five did at 0.2, on the way there."""
    assert conformal_risk_control(columns(0, 5, 0, n=19), [0.1, 0.2, 0.3], 0.25) == 0.1


def episodes(rng: np.random.Generator, n: int) -> np.ndarray:
    """Losses of n episodes: U uniform, the episode fails at τ where U < true_risk(τ)."""
    return (rng.random((n, 1)) < true_risk(GRID)).astype(float)


def true_risk(tau: float | np.ndarray) -> np.ndarray:
    """Failure rate at a threshold: 2 % when everything is escalated, 42 % when nothing is."""
    return 0.02 + 0.4 * np.asarray(tau) ** 2


def games(rng: np.random.Generator, n: int, seeds: int = 4) -> np.ndarray:
    """Losses of n games, each the share of four episodes that differ and share the game's difficulty."""
    game = rng.random((n, 1))
    own = np.where(
        rng.random((n, seeds)) < 0.6, game, rng.random((n, seeds))
    )  # 60 % of the seeds repeat the game's luck
    return (own[:, :, None] < true_risk(GRID)).mean(axis=1)


def naive(losses: np.ndarray) -> float:
    """The largest threshold whose sample risk keeps the target."""
    return float(GRID[np.flatnonzero(losses.mean(axis=0) <= TARGET)[-1]])


def calibrations(
    choose: Callable[[np.ndarray], float | None], draw: Callable[..., np.ndarray], n: int, seed: int
) -> np.ndarray:
    """True risk at the chosen threshold in each of 200 calibrations; 0 where none was chosen."""
    rng = np.random.default_rng(seed)
    chosen = [choose(draw(rng, n)) for _ in range(RESAMPLES)]
    return np.array([0.0 if tau is None else float(true_risk(tau)) for tau in chosen])


# At a true violation rate of 5 %, 200 calibrations show more violations than this once in a thousand.
ALLOWED = int(binom.ppf(0.999, RESAMPLES, 0.05))


def test_a_threshold_that_keeps_the_target_in_the_sample_breaks_it_far_too_often() -> None:
    assert (calibrations(naive, episodes, 150, seed=0) > TARGET).sum() > 2 * ALLOWED


@pytest.mark.parametrize("correction", ["fixed-sequence", "bonferroni"])
@pytest.mark.parametrize("p_value", ["binomial", "hoeffding-bentkus"])
def test_learn_then_test_holds_as_often_as_stated(p_value: str, correction: str) -> None:
    risks = calibrations(
        lambda losses: learn_then_test(losses, GRID, TARGET, 0.05, p_value, correction), episodes, 150, seed=0
    )
    assert (risks > TARGET).sum() <= ALLOWED
    assert (risks > 0).mean() > 0.7  # and it certifies something


def test_learn_then_test_holds_for_games() -> None:
    risks = calibrations(
        lambda losses: learn_then_test(losses, GRID, TARGET, 0.05, "hoeffding-bentkus"), games, 150, seed=1
    )
    assert (risks > TARGET).sum() <= ALLOWED
    assert (risks > 0).mean() > 0.9


def test_learn_then_test_holds_where_the_risk_is_not_monotone() -> None:
    """Every threshold fails at 0.101, independently: certifying any of them is an error."""
    rng = np.random.default_rng(2)
    draws = [(rng.random((150, GRID.size)) < TARGET + 1e-3).astype(float) for _ in range(RESAMPLES)]
    for correction in ("fixed-sequence", "bonferroni"):
        wrong = sum(learn_then_test(losses, GRID, TARGET, 0.05, "binomial", correction) is not None for losses in draws)
        assert wrong <= ALLOWED
    best_of_all = sum((binomial_p_value(losses.sum(axis=0), 150, TARGET) <= 0.05).any() for losses in draws)
    assert best_of_all > 2 * ALLOWED  # testing all of them at 0.05 without a correction


def test_conformal_risk_control_bounds_the_mean_and_only_the_mean() -> None:
    risks = calibrations(lambda losses: conformal_risk_control(losses, GRID, TARGET), episodes, 60, seed=3)
    assert risks.mean() <= TARGET + 3 * risks.std() / math.sqrt(RESAMPLES)
    assert risks.mean() > 0.6 * TARGET  # without wasting the allowance
    assert (risks > TARGET).sum() > 2 * ALLOWED  # it is no high-probability statement


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bayes_threshold(1, 50, 0), "kappa"),
        (lambda: bayes_threshold(50, 1, 10), "c_llm"),
        (lambda: threshold_for_calls([[1.0]], [0.5], -1), "budget"),
        (lambda: threshold_for_calls([[1.0]], [0.5], math.nan), "budget"),
        (lambda: learn_then_test([[0.0]], [0.5], 0.0), "target"),
        (lambda: learn_then_test([[0.0]], [0.5], 0.1, delta=1.0), "delta"),
        (lambda: learn_then_test([[0.0, 0.0]], [0.5, 0.1], 0.1), "ascending"),
        (lambda: learn_then_test([[0.0, 0.0]], [0.5], 0.1), "losses"),
        (lambda: learn_then_test([[2.0]], [0.5], 0.1), r"\[0, 1\]"),
        (lambda: conformal_risk_control([[math.nan]], [0.5], 0.1), "finite"),
    ],
)
def test_bad_input_names_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call()


def test_a_guarantee_under_new_seeds_needs_units_with_seeds_of_their_own() -> None:
    """A threshold that fails at 0.102 where seeds are very unequal: 1,000 games on 20 of them tell little of the others."""
    rng = np.random.default_rng(0)

    def certified(seeds: int) -> float:
        found = []
        for _ in range(400):
            rate = rng.beta(0.6, 0.6 * (1 / 0.102 - 1), seeds)
            losses = (rng.random(1000) < rate[np.arange(1000) % seeds])[:, None]
            found.append(learn_then_test(losses, [0.5], 0.1, 0.05, p_value="hoeffding-bentkus") is not None)
        return float(np.mean(found))

    assert certified(1000) <= 0.05
    assert certified(20) > 0.1, "which is why the statement is about the calibration's seeds"
