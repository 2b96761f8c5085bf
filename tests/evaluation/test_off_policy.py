"""Off-policy estimates against hand-worked numbers and a simulator whose truth is known."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from logged_bandit import AGENTS, TRUTH, simulate

from routewright.errors import BadInput
from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.off_policy import (
    doubly_robust,
    effective_sample_size,
    estimate_from_log,
    importance_weights,
    ips,
    off_policy_estimate,
    outcome_predictions,
    snips,
)
from routewright.pools.query_log import QueryLogEntry

REPLICATIONS, DECISIONS = 1000, 600


def inside(estimate: Estimate, truth: float = TRUTH) -> bool:
    return estimate.low <= truth <= estimate.high


def test_the_estimates_by_hand() -> None:
    weights = importance_weights([0.5, 0.2, 1.0], [0.25, 0.4, 0.5])
    assert weights.tolist() == [2.0, 0.5, 2.0]
    rewards = [1.0, 1.0, 0.0]
    assert effective_sample_size(weights) == pytest.approx(4.5**2 / 8.25)
    assert ips(rewards, weights).mean == pytest.approx(2.5 / 3)
    # Contributions 2, 0.5, 0 have standard deviation 1.0408.
    assert ips(rewards, weights).high == pytest.approx(2.5 / 3 + 1.959964 * 1.040833 / np.sqrt(3))
    assert snips(rewards, weights).mean == pytest.approx(2.5 / 4.5)
    predicted, expected = [0.5, 1.0, 0.25], [0.6, 0.4, 0.3]
    # 0.6 + 2·0.5, 0.4 + 0, 0.3 − 2·0.25
    assert doubly_robust(rewards, weights, predicted, expected).mean == pytest.approx((1.6 + 0.4 - 0.2) / 3)


def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    hits = {"ips": 0, "snips": 0, "dr": 0}
    spread: dict[str, list[float]] = {name: [] for name in hits}
    gains = 0
    for _ in range(REPLICATIONS):
        bandit = simulate(rng, DECISIONS)
        found = off_policy_estimate(
            bandit.rewards, bandit.propensities, bandit.candidate_probabilities, *bandit.model(bandit.outcome)
        )
        for name in hits:
            estimate = getattr(found, name)
            hits[name] += inside(estimate)
            spread[name].append(estimate.mean)
        logged = (bandit.logging * bandit.outcome).sum(axis=1).mean()
        gains += found.gain is not None and inside(found.gain, TRUTH - logged)
    # Binomial(1000, 0.95) has a standard deviation of 0.7 points; weights up to 9 cost a little coverage.
    for count in (*hits.values(), gains):
        assert 0.925 <= count / REPLICATIONS <= 0.97
    for values in spread.values():
        assert np.mean(values) == pytest.approx(TRUTH, abs=0.01)
    assert np.var(spread["dr"]) < np.var(spread["snips"]) < np.var(spread["ips"])
    assert np.var(spread["dr"]) < 0.7 * np.var(spread["ips"])


@pytest.mark.parametrize("wrong", ["model", "propensities", "both"])
def test_doubly_robust_needs_only_one_of_the_two_parts(wrong: str) -> None:
    rng = np.random.default_rng(1)
    values = []
    for _ in range(100):
        bandit = simulate(rng, DECISIONS)
        q = bandit.outcome if wrong == "propensities" else np.tile([0.9, 0.1, 0.5], (DECISIONS, 1))
        propensities = bandit.propensities if wrong == "model" else np.full(DECISIONS, 1 / 3)
        weights = importance_weights(bandit.candidate_probabilities, propensities)
        values.append(doubly_robust(bandit.rewards, weights, *bandit.model(q)).mean)
    error = abs(np.mean(values) - TRUTH)
    assert error > 0.05 if wrong == "both" else error < 0.01


def test_a_log_without_exploration_is_refused() -> None:
    found = off_policy_estimate([1.0, 0.0] * 200, [1.0] * 400, [0.5] * 400)
    assert not found.conclusive
    assert "without exploration (epsilon = 0)" in found.reason
    assert (found.ips, found.snips, found.gain) == (None, None, None)
    assert found.logged.mean == 0.5


def test_too_few_decisions_are_refused_but_shown() -> None:
    bandit = simulate(np.random.default_rng(2), 150)
    found = off_policy_estimate(bandit.rewards, bandit.propensities, bandit.candidate_probabilities)
    assert not found.conclusive
    assert found.reason == "only 150 decisions with an outcome, expected at least 200"
    assert found.snips is not None
    assert off_policy_estimate(
        bandit.rewards, bandit.propensities, bandit.candidate_probabilities, min_decisions=100, min_effective=20
    ).conclusive


def test_a_small_effective_sample_is_refused() -> None:
    bandit = simulate(np.random.default_rng(3), 1000, epsilon=0.01)
    found = off_policy_estimate(bandit.rewards, bandit.propensities, bandit.candidate_probabilities)
    assert not found.conclusive
    assert found.effective_sample_size < 100
    assert "effective sample size" in found.reason


def test_traffic_that_was_not_explored_is_refused() -> None:
    bandit = simulate(np.random.default_rng(4), 2000)
    propensities = bandit.propensities.copy()
    propensities[:100] = 1.0
    found = off_policy_estimate(bandit.rewards, propensities, bandit.candidate_probabilities)
    assert not found.conclusive
    assert "without exploration, expected at most 1%" in found.reason
    assert found.unsupported == pytest.approx((1 - bandit.candidate_probabilities[:100]).sum() / 2000)


def test_actions_that_exploration_never_tries_are_noticed_by_the_mean_weight() -> None:
    bandit = simulate(np.random.default_rng(5), 2000)
    # Half of the candidate's decisions go to pairs of agents, which are in no log.
    found = off_policy_estimate(bandit.rewards, bandit.propensities, 0.5 * bandit.candidate_probabilities)
    assert not found.conclusive
    assert "the mean weight is 0.5" in found.reason


def test_a_candidate_that_takes_no_logged_action_is_refused() -> None:
    found = off_policy_estimate([1.0] * 300, [0.5] * 300, [0.0] * 300)
    assert not found.conclusive
    assert "takes none of the 300 logged actions" in found.reason


@pytest.mark.parametrize(
    ("rewards", "propensities", "candidate", "message"),
    [
        ([1.5, 0], [0.5, 0.5], [1, 1], "reward 0 of 2 is 1.5"),
        ([1, 0], [0.5, 0.0], [1, 1], "propensity 1 of 2 is 0"),
        ([1, 0], [0.5, 0.5], [1, -0.1], "candidate probability 1 of 2"),
        ([1, float("nan")], [0.5, 0.5], [1, 1], "reward 1 of 2 is nan"),
        ([1], [0.5, 0.5], [1, 1], "expected a non-empty vector of 2"),
        ([], [], [], "expected a non-empty vector"),
    ],
)
def test_malformed_vectors(rewards: list[float], propensities: list[float], candidate: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        off_policy_estimate(rewards, propensities, candidate)
    with pytest.raises(ValueError, match="got one of them"):
        off_policy_estimate([1.0], [0.5], [1.0], predicted=[0.5])


def entry(number: int, agents: list[str], outcome: dict[str, float], **more: Any) -> QueryLogEntry:
    told = {"request_id": f"r{number}", "propensity": 0.5, "decision": {"agents": agents}, **more}
    return QueryLogEntry(query="q", outcome=outcome, **told)


def test_a_query_log_becomes_an_estimate() -> None:
    a, b, both = frozenset({"a"}), frozenset({"b"}), frozenset({"a", "b"})
    entries = [
        entry(0, ["a"], {"a": 1.0}),
        entry(1, ["b", "a"], {"a": 0.25, "b": 0.75}),
        entry(2, ["a"], {"b": 1.0}),  # no outcome of the agent asked
        entry(3, ["a"], {"a": 1.0}, propensity=None),
        entry(4, ["a"], {"a": 1.0}, propensity=1.0),  # exploration paused
    ]
    candidate = {"r0": {a: 0.25, b: 0.75}, "r1": {both: 1.0}}
    found = estimate_from_log(entries, candidate, {"r0": {a: 0.5, b: 0.5}, "r1": {both: 0.5}})
    assert found.n == 2
    assert found.ips is not None
    assert found.ips.mean == pytest.approx((0.5 * 1 + 2 * 0.75) / 2)
    assert found.dr is not None
    assert found.dr.mean == pytest.approx((0.5 + 0.5 * 0.5 + 0.5 + 2 * 0.25) / 2)
    assert json.loads(found.model_dump_json())["conclusive"] is False


def test_a_query_log_without_exploration_is_refused() -> None:
    entries = [entry(i, ["a"], {"a": 1.0}, propensity=1.0) for i in range(300)]
    found = estimate_from_log(entries, {f"r{i}": {frozenset({"a"}): 1.0} for i in range(300)})
    assert (found.conclusive, found.n) == (False, 300)
    assert "epsilon = 0" in found.reason


@pytest.mark.parametrize(
    ("candidate", "model", "message"),
    [
        ({}, None, "request_id r0: expected the candidate's action probabilities"),
        (
            {"r0": {frozenset({"a"}): 0.5}},
            None,
            "request_id r0: .* that sum to 1, found 0.5",
        ),
        ({"r0": {frozenset({"a"}): 1.0}}, {}, "request_id r0: expected a predicted outcome for a"),
    ],
)
def test_a_log_and_a_candidate_that_do_not_fit(candidate: Any, model: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        estimate_from_log([entry(0, ["a"], {"a": 1.0})], candidate, model)
    with pytest.raises(BadInput, match="found none among 0"):
        estimate_from_log([], candidate)


def test_cross_fitted_outcomes_follow_words_and_agents() -> None:
    rng = np.random.default_rng(6)
    bandit = simulate(rng, 1500)
    kinds = bandit.outcome.argmax(axis=1)
    texts = [f"{AGENTS[kind]} question number {rng.integers(10)}" for kind in kinds]
    actions = [frozenset({AGENTS[action]}) for action in bandit.actions]
    q = outcome_predictions(texts, actions, bandit.rewards, AGENTS, seed=0)
    assert (q.argmax(axis=1) == kinds).mean() > 0.9
    # A model that knows no words is off by 0.22 at its best.
    assert np.abs(q - bandit.outcome).mean() < 0.17
    memorised = outcome_predictions([str(i) for i in range(1500)], actions, bandit.rewards, AGENTS, seed=0)
    # Every text is new to the model that judges it: it cannot repeat the rewards it was given.
    assert abs(np.corrcoef(memorised[np.arange(1500), bandit.actions], bandit.rewards)[0, 1]) < 0.25
