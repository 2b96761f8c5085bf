"""Signals of escalation, against numbers computed by hand."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from routewright.errors import BadInput
from routewright.step_router import escalation
from routewright.step_router.escalation import BLOCK, Benefit, Coin, Decision, QueryLevel, Risk
from routewright.step_router.features import NAMES, Candidate, Context, PastStep, compute_features
from routewright.step_router.risk import RiskModel

ROWS = np.random.default_rng(0).normal(size=(200, len(NAMES)))
ROWS[:, NAMES.index("evidence")] = 0.0


def decided(step: int = 2, score: float | None = 0.75, task: str = "quest", seed: int = 7) -> Decision:
    """Two candidates with p 0.8 and 0.2; the first has been taken twice before."""
    candidates = [
        Candidate("go north", [math.log(0.8)], score),
        Candidate("look", [math.log(0.2)], None if score is None else 0.5),
    ]
    history = [PastStep("go north", "a hall", 0.5), PastStep("go  north", "a hall", 0.5)]
    context = Context("go home", "a hall", candidates, step, 9, history)
    return Decision(task, seed, context, compute_features(context), ROWS[0])


@pytest.fixture(scope="module")
def model() -> RiskModel:
    model = RiskModel()
    model.standardise(ROWS)
    return model.eval()


def test_signals_of_one_decision() -> None:
    decision = decided()
    bits = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2)) / math.log(2)
    assert escalation.entropy(decision) == pytest.approx(bits)
    assert escalation.verifier(decision) == -0.75
    assert escalation.time(decision) == 2.0
    assert escalation.repeat(decision) == 2.0


def test_the_verifier_signal_needs_a_score() -> None:
    with pytest.raises(BadInput, match=r"candidates\[0\]\.verifier_score: missing"):
        escalation.verifier(decided(score=None))


def test_random_is_uniform_and_a_function_of_task_seed_and_step() -> None:
    draws = [escalation.random(decided(step, task=task, seed=seed))
             for task in ("a", "b") for seed in range(20) for step in range(10)]  # fmt: skip
    assert len(set(draws)) == 400
    assert all(0 <= draw < 1 for draw in draws)
    # the standard error of the share below 0.3 is 0.023
    assert np.mean(np.array(draws) < 0.3) == pytest.approx(0.3, abs=0.07)
    assert escalation.random(decided(score=0.1)) == escalation.random(decided(score=0.9))


def test_risk_reads_this_step_and_query_level_the_first(model: RiskModel) -> None:
    decision = decided()
    assert Risk(model)(decision) == pytest.approx(model.risk(decision.features), abs=1e-6)
    assert Benefit(model)(decision) == pytest.approx(model.benefits(decision.features[None])[0], abs=1e-6)
    assert QueryLevel(model)(decision) == pytest.approx(model.risk(ROWS[0]), abs=1e-6)
    assert abs(model.risk(ROWS[0]) - model.risk(decision.features)) > 1e-4


def test_risks_are_the_same_bits_whatever_else_is_asked(model: RiskModel) -> None:
    """A threshold is often one of the risks: a rounding that depends on the batch would flip decisions."""
    decisions = [Decision("t", 0, decided().context, row, row) for row in ROWS]
    alone = [Risk(model)(decision) for decision in decisions]
    assert len(set(alone)) == len(ROWS)
    assert Risk(model).many(decisions).tolist() == alone
    order = np.random.default_rng(1).permutation(len(ROWS))[: BLOCK + 3]
    assert QueryLevel(model).many([decisions[i] for i in order]).tolist() == [alone[i] for i in order]
    assert Risk(model).many([]).shape == (0,)


def test_signals_travel_to_other_processes(model: RiskModel) -> None:
    for signal in (escalation.random, escalation.time, Risk(model), Benefit(model), QueryLevel(model), Coin(2)):
        assert pickle.loads(pickle.dumps(signal))(decided()) == signal(decided())


def test_coins_are_independent_of_each_other_and_of_the_random_row() -> None:
    decisions = [decided(step, seed=seed) for seed in range(50) for step in range(10)]
    draws = np.array([[signal(decision) for decision in decisions] for signal in (Coin(0), Coin(1), escalation.random)])
    assert (draws >= 0).all()
    assert (draws < 1).all()
    # standard errors: 0.02 of a share of 500, 0.045 of a correlation
    assert (draws > 0.65).mean(axis=1) == pytest.approx([0.35] * 3, abs=0.07)
    assert np.abs(np.corrcoef(draws) - np.eye(3)).max() < 0.15
    assert Coin(0)(decisions[3]) == Coin(0)(decided(3, score=0.1, seed=0))
