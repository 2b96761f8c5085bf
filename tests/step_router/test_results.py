"""Rows, frontiers, comparisons, targets and tables of a handful of episodes against hand-worked numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from routewright.evaluation.calibration import expected_calibration_error, reliability_bins
from routewright.evaluation.clustered import clustered_mean
from routewright.evaluation.summary import STEP_ROWS, Row, Summary
from routewright.step_router.client import Calls, StepRouter
from routewright.step_router.episodes import Episode, Turn
from routewright.step_router.features import NAMES
from routewright.step_router.frontier import Sweep, matched_success, success_at
from routewright.step_router.results import (
    StepResults,
    build_results,
    first_reaching,
    interpolation_weights,
    permutation_importance,
    proposals,
    weighted_auc,
)
from routewright.step_router.risk import RiskModel

PAIRS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
STRUCK = [(), ("stale",), (), ("stale", "injection")]


def run(row: str, threshold: float | None, success: list[int], calls: list[int], steps: list[int]) -> list[Episode]:
    """One setting of a row over the four pairs; task a is a quest, b a cooking game."""
    by = "llm" if row == "llm" else "slm"
    return [
        Episode(
            row=row,
            threshold=threshold,
            task=task,
            kind="quest" if task == "a" else "cooking",
            seed=seed,
            success=bool(won),
            steps=count,
            llm_calls=llm,
            turns=tuple(Turn("go", by, (0.0,) * len(NAMES), struck) for _ in range(count)),  # type: ignore[arg-type]
        )
        for (task, seed), won, llm, count, struck in zip(PAIRS, success, calls, steps, STRUCK, strict=True)
    ]


SLM = run("slm", None, [1, 0, 1, 0], [0, 0, 0, 0], [2, 6, 2, 6])
LLM = run("llm", None, [1, 1, 1, 1], [4, 4, 4, 4], [4, 4, 4, 4])
RISK = run("risk", 0.5, [1, 1, 1, 0], [0, 3, 0, 1], [2, 6, 2, 6])
ENTROPY = run("entropy", 0.3, [1, 1, 1, 0], [4, 4, 0, 0], [4, 4, 2, 6])
EPISODES = SLM + LLM + RISK + ENTROPY
RISKS = {"risk": [[0.0, 0.5], [1.0] * 6, [0.0, 0.0], [0.5] * 6]}


def built(episodes: list[Episode] = EPISODES, **changes: Any) -> StepResults:
    arguments: dict[str, Any] = {"operating": {"risk": 0.5}, "risks": RISKS, "c_slm": 1.0, "c_llm": 10.0, "alpha": 0.2,
                                 "seed": 0, "resamples": 200}  # fmt: skip
    return build_results(episodes, **(arguments | changes))


@pytest.fixture(scope="module")
def results() -> StepResults:
    return built()


def means(row: Row) -> dict[str, float]:
    return {metric: estimate.mean for metric, estimate in row.metrics.items()}


def row(results: StepResults, name: str) -> Row:
    return next(row for row in results.rows if row.name == name)


def test_rows_at_their_own_setting_by_hand(results: StepResults) -> None:
    assert [row.name for row in results.rows] == ["slm", "llm", "entropy", "risk", "oracle"]
    assert means(row(results, "slm")) == pytest.approx(
        {"success": 0.5, "escalation": 0, "llm_calls_per_episode": 0, "cost": 4, "escalated_episodes": 0,
         "worst_seed_success": 0, "cvar": 1}
    )  # fmt: skip
    assert means(row(results, "llm")) == pytest.approx(
        {"success": 1, "escalation": 1, "llm_calls_per_episode": 4, "cost": 40, "escalated_episodes": 1,
         "worst_seed_success": 1, "cvar": 0}
    )  # fmt: skip
    # The small model proposes at all 16 steps, of which 4 are escalated: (16 · 1 + 4 · 10)/4, as a live router counts.
    assert means(row(results, "risk")) == pytest.approx(
        {"success": 0.75, "escalation": 4 / 16, "llm_calls_per_episode": 1, "cost": 14, "escalated_episodes": 0.5,
         "worst_seed_success": 0.5, "cvar": 0.5, "brier": 0.09375, "ece": 0.0625}
    )  # fmt: skip
    # The LLM runs the two episodes that the small model fails: 8 calls of 12 steps.
    assert means(row(results, "oracle")) == pytest.approx(
        {"success": 1, "escalation": 8 / 12, "llm_calls_per_episode": 2, "cost": 21, "escalated_episodes": 0.5,
         "worst_seed_success": 1, "cvar": 0}
    )  # fmt: skip
    assert (results.matched_rate, results.oracle_rate) == (pytest.approx(0.25), pytest.approx(2 / 3))


def test_a_row_without_threshold_is_read_at_the_rate_of_risk_by_hand(results: StepResults) -> None:
    """entropy has escalation 0 and 1/2 around 1/4: the mean of never and of its setting, seed by seed."""
    assert means(row(results, "entropy")) == pytest.approx(
        {"success": (0.5 + 0.75) / 2, "escalation": 0.25, "llm_calls_per_episode": (0 + 2) / 2, "cost": (4 + 24) / 2,
         "escalated_episodes": (0 + 0.5) / 2, "worst_seed_success": (0 + 0.5) / 2, "cvar": (1 + 0.5) / 2}
    )  # fmt: skip
    escalation = row(results, "entropy").metrics["escalation"]
    assert (escalation.low, escalation.high) == (pytest.approx(0.25), pytest.approx(0.25))


def test_only_rules_that_look_at_the_small_models_proposals_pay_for_them_where_they_escalate() -> None:
    """Steps [2, 6, 2, 6], calls [0, 3, 0, 1]: 12, 16 or, one for each of two escalated episodes, 14 proposals."""
    calls, steps = np.array([0.0, 3, 0, 1]), np.array([2.0, 6, 2, 6])
    asked = {name: proposals(name, calls, steps).sum() for name in STEP_ROWS}
    assert {name for name, count in asked.items() if count == 12} == {"llm", "oracle", "random-matched", "time"}
    assert {name for name, count in asked.items() if count == 14} == {"query-level"}
    assert set(asked.values()) == {12, 14, 16}


def test_a_live_router_counts_the_same_money(results: StepResults) -> None:
    live = StepRouter(RiskModel(), "v", 0.5, 6, 1.0, 10.0)
    risk = row(results, "risk").metrics
    calls = Calls(sum(e.steps for e in RISK), sum(e.llm_calls for e in RISK))
    assert live._cost(calls) / len(RISK) == pytest.approx(risk["cost"].mean)


def test_cvar_averages_the_worst_share_of_seeds() -> None:
    """With α = 1 both seeds of risk count: (0 + 0.5)/2."""
    assert row(built(alpha=1.0), "risk").metrics["cvar"].mean == pytest.approx(0.25)


def test_intervals_are_those_of_the_frontier_module(results: StepResults) -> None:
    success = [float(e.success) for e in RISK]
    group = [e.task for e in RISK]
    assert row(results, "risk").metrics["success"] == clustered_mean(success, group, 0, resamples=200)
    runs = [SLM, ENTROPY, LLM]
    sweep = Sweep(
        np.array([[float(e.success) for e in r] for r in runs]),
        np.array([[float(e.llm_calls) for e in r] for r in runs]),
        np.array([[float(e.steps) for e in r] for r in runs]),
        group,
    )
    expected = matched_success(sweep, 0.25, 0, resamples=200)
    found = row(results, "entropy").metrics["success"]
    assert (found.mean, found.low, found.high) == pytest.approx((expected.mean, expected.low, expected.high))


def test_comparisons_by_hand(results: StepResults) -> None:
    found = {c.at: c.difference.mean for c in results.comparisons if (c.a, c.b) == ("risk", "entropy")}
    # risk: (0, 0.5), (0.25, 0.75), (1, 1); entropy: (0, 0.5), (0.5, 0.75), (1, 1).
    assert found == pytest.approx(
        {
            "oracle rate": (0.75 + 0.25 * (2 / 3 - 1 / 4) / 0.75) - (0.75 + 0.25 * (2 / 3 - 1 / 2) / 0.5),
            "own rate": 0.75 - 0.625,
            "cvar at own rate": 0.5 - 0.75,
            "area": 0.8125 - 0.75,
        }
    )
    assert len(results.comparisons) == 4


def test_frontiers_start_at_never_and_end_at_always(results: StepResults) -> None:
    risk = next(frontier for frontier in results.frontiers if frontier.row == "risk")
    assert [(p.rule, p.threshold, p.operating) for p in risk.points] == [
        ("never", None, False), ("threshold", 0.5, True), ("always", None, False)
    ]  # fmt: skip
    assert [(p.escalation, p.success) for p in risk.points] == [(0, 0.5), (0.25, 0.75), (1, 1)]
    assert risk.area.mean == pytest.approx(0.8125)


def test_targets_by_hand(results: StepResults) -> None:
    risk, entropy = sorted(results.targets, key=lambda target: target.row, reverse=True)
    assert risk.success_share is not None
    assert risk.escalation_at_share is not None
    assert risk.oracle_ratio is not None
    assert entropy.escalation_at_share is not None
    assert risk.success_share.mean == pytest.approx(0.75)
    assert risk.escalation_at_share.mean == pytest.approx(0.25 + 0.75 * (0.97 - 0.75) / 0.25)
    assert entropy.escalation_at_share.mean == pytest.approx(0.5 + 0.5 * (0.97 - 0.75) / 0.25)
    assert risk.oracle_ratio.mean == pytest.approx(risk.escalation_at_share.mean / (2 / 3))
    assert risk.operating_ratio is not None
    assert risk.operating_ratio.mean == pytest.approx(0.25 / (2 / 3)), "of its own threshold"
    assert risk.operating_ratio.low < risk.operating_ratio.mean < risk.operating_ratio.high


def test_calibration_by_hand(results: StepResults) -> None:
    """Episode Brier scores 0.125, 0, 0, 0.25 against a base rate of 1/2; weights of an episode's steps sum to 1."""
    (risk,) = results.calibration
    assert risk.brier.mean == pytest.approx(0.09375)
    assert risk.base_rate == 0.5
    assert risk.skill is not None
    assert risk.skill.mean == pytest.approx(1 - 0.09375 / 0.25)
    assert [(b.n, b.probability, b.frequency) for b in risk.bins] == [
        (3, 0.0, 0.0), (7, 0.5, pytest.approx(2 / 3)), (6, 1.0, 1.0)
    ]  # fmt: skip
    assert risk.ece.mean == pytest.approx((1.5 * (2 / 3 - 0.5)) / 4)
    # Failed: 1 and 0.5, weight 1 each; not: 0 with weight 1.5 and 0.5 with weight 0.5. Step 2: only failures get there.
    assert [(auc.step, auc.n) for auc in risk.auc] == [(None, 4), (0, 4), (1, 4), (2, 2)]
    assert [auc.auc for auc in risk.auc] == [pytest.approx((2 + 1.5 + 0.25) / 4), 1.0, pytest.approx(3.5 / 4), None]


def test_reliability_with_one_step_an_episode_is_that_of_the_calibration_module() -> None:
    rng = np.random.default_rng(0)
    pairs = [(f"t{i}", s) for i in range(15) for s in range(4)]
    p = rng.random(len(pairs))
    won = rng.random(len(pairs)) > p

    def one(name: str, threshold: float | None, success: Any, calls: int) -> list[Episode]:
        turn = (Turn("go", "slm", (0.0,) * len(NAMES), ()),)
        return [
            Episode(name, threshold, task, "quest", seed, bool(ok), 1, calls, turn)
            for (task, seed), ok in zip(pairs, success, strict=True)
        ]

    always = np.ones(len(pairs))
    episodes = one("slm", None, won, 0) + one("llm", None, always, 1) + one("risk", 0.5, won, 0)
    (found,) = built(episodes, risks={"risk": p[:, None].tolist()}).calibration
    assert found.ece.mean == pytest.approx(expected_calibration_error(p, ~won))
    expected = reliability_bins(p, ~won)
    assert [(b.n, b.probability, b.frequency) for b in found.bins] == [
        (b.n, pytest.approx(b.probability), pytest.approx(b.frequency)) for b in expected
    ]


def test_groups_by_hand(results: StepResults) -> None:
    quest, cooking = results.by_environment
    assert (quest.name, quest.n, quest.success["slm"].mean, quest.success["risk"].mean) == ("quest", 2, 0.5, 1)
    assert (cooking.name, cooking.n, cooking.success["risk"].mean, cooking.success["llm"].mean) == ("cooking", 2, 0.5, 1)
    assert quest.escalation.mean == pytest.approx(3 / 8)
    assert [(g.name, g.n, g.success["slm"].mean) for g in results.by_perturbation] == [
        ("injection", 1, 0), ("stale", 2, 0), ("none", 2, 1)
    ]  # fmt: skip
    assert [(g.name, g.success["risk"].mean) for g in results.by_seed] == [("1", 0.5), ("0", 1)]


def test_an_ablated_policy_has_its_own_small_model() -> None:
    other = run("slm-no-jsd", None, [0, 0, 1, 0], [0] * 4, [6, 6, 2, 6])
    without = run("risk-no-jsd", 0.4, [1, 0, 1, 0], [3, 0, 0, 0], [6, 6, 2, 6])
    found = built([*EPISODES, *other, *without], operating={"risk": 0.5, "risk-no-jsd": 0.4})
    assert [row.name for row in found.rows] == ["slm", "llm", "entropy", "risk", "risk-no-jsd", "oracle"]
    points = next(f for f in found.frontiers if f.row == "risk-no-jsd").points
    assert [(p.escalation, p.success) for p in points] == [(0, 0.25), (pytest.approx(3 / 20), 0.5), (1, 1)]
    assert row(found, "risk-no-jsd").metrics["escalation"].mean == pytest.approx(3 / 20)
    assert [(p.name, p.metrics["success"].mean) for p in found.policies] == [("slm", 0.5), ("slm-no-jsd", 0.25)]
    alone = [c for c in found.comparisons if c.at == "small model alone"]
    assert [(c.a, c.b, c.difference.mean) for c in alone] == [("slm", "slm-no-jsd", 0.25)]
    with pytest.raises(ValueError, match="'slm-no-jsd' needs episodes"):
        built([*EPISODES, *without])


def test_order_of_episodes_does_not_matter(results: StepResults) -> None:
    order = [3, 1, 0, 2]
    shuffled = [SLM[i] for i in order] + LLM[::-1] + ENTROPY + RISK[::-1]
    assert built(shuffled, risks={"risk": [RISKS["risk"][i] for i in order]}) == results


def test_results_and_summary_survive_json(results: StepResults) -> None:
    assert StepResults.model_validate_json(results.model_dump_json()) == results
    summary = Summary(pipeline="step-router", profile="smoke", seed=0, wall_s=1.0, rows=results.rows)
    assert Summary.model_validate_json(summary.model_dump_json()).rows == results.rows


def test_a_threshold_that_never_or_always_escalates_stands_at_the_end() -> None:
    never = built(operating={"risk": float("inf")})
    assert never.matched_rate == 0
    assert row(never, "risk").metrics["success"].mean == 0.5
    always = built(operating={"risk": float("-inf")})
    assert row(always, "entropy").metrics["success"].mean == 1
    assert StepResults.model_validate_json(never.model_dump_json()) == never


def test_where_nothing_fails_there_is_no_skill_and_no_oracle_to_compare_with() -> None:
    won = [replace(e, success=True) for e in EPISODES]
    found = built(won, predict=lambda rows: np.full(len(rows), 0.5))
    assert found.calibration[0].skill is None
    assert all(auc.auc is None for auc in found.calibration[0].auc)
    assert found.importance == []
    assert found.oracle_rate == 0
    (risk,) = [t for t in found.targets if t.row == "risk"]
    assert risk.oracle_ratio is None
    assert risk.escalation_at_share is not None
    assert risk.escalation_at_share.mean == 0
    lost = [replace(e, success=False) for e in EPISODES]
    assert all(target.success_share is None for target in built(lost).targets)


@pytest.mark.parametrize(
    ("episodes", "changes", "message"),
    [
        (EPISODES[:-1], {}, r"row 'entropy' at threshold 0.3 and row 'slm' .* task 'b' with seed 1"),
        ([*EPISODES, replace(RISK[0], task="c")], {}, "task 'c'"),
        ([*EPISODES, RISK[0]], {}, "task 'a' with seed 0 twice"),
        ([*EPISODES[:-1], replace(EPISODES[-1], kind="quest")], {}, "is quest, not cooking"),
        (SLM + RISK, {}, "'llm' needs episodes at exactly one setting, found 0"),
        (SLM + LLM + ENTROPY, {}, "'risk' needs episodes"),
        (EPISODES, {"operating": {}}, "'risk' needs episodes and an operating threshold"),
        (EPISODES, {"operating": {"risk": 0.4}}, r"not run at its operating threshold 0.4, only at .*0.5"),
        ([replace(e, threshold=None) for e in RISK] + SLM + LLM, {}, "'risk' has an episode without a threshold"),
        ([*EPISODES, *(replace(e, row="random") for e in ENTROPY)], {}, "'random' is none of slm, llm"),
        ([*EPISODES, *(replace(e, row="oracle") for e in ENTROPY)], {}, "'oracle' is computed"),
        (EPISODES, {"risks": {"risk": RISKS["risk"][:3]}}, "one list for each of 4 episodes, got 3"),
        (EPISODES, {"risks": {"risk": [[0.1]] * 4}}, "has 2 turns, got 1 risks"),
        (EPISODES, {"risks": {"risk": [[0.1, 1.1], *RISKS["risk"][1:]]}}, "outside"),
        (EPISODES, {"c_llm": 0.5}, "c_slm <= c_llm"),
    ],
)
def test_what_does_not_fit_is_refused(episodes: list[Episode], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(episodes, **changes)


def test_interpolation_weights_agree_with_success_at() -> None:
    x, y = np.array([1.0, 0.0, 0.25, 0.25, 0.6]), np.array([1.0, 0.5, 0.7, 0.8, 0.9])
    for rate in (0.0, 0.1, 0.25, 0.5, 0.6, 0.99, 1.0):
        weights = interpolation_weights(rate, x)
        assert weights.sum() == pytest.approx(1)
        assert weights @ y == pytest.approx(success_at(rate, x, y))
        assert weights @ x == pytest.approx(rate)
    assert interpolation_weights(0.9, np.array([0.2, 0.6])) @ [0.5, 0.9] == pytest.approx(0.9)  # held level beyond


def test_first_reaching_takes_the_first_of_several_crossings() -> None:
    x, y = np.array([0.0, 0.2, 0.4, 1.0]), np.array([0.5, 0.9, 0.7, 1.0])
    assert first_reaching(0.7, x, y) == pytest.approx(0.1)
    assert first_reaching(0.5, x, y) == 0
    assert np.isnan(first_reaching(1.1, x, y))


def test_weighted_auc_by_hand() -> None:
    p, failed = np.array([0.9, 0.2, 0.5]), np.array([1.0, 1.0, 0.0])
    assert weighted_auc(p, failed, np.array([3.0, 1.0, 1.0])) == pytest.approx(0.75)
    assert weighted_auc(p, np.ones(3), np.ones(3)) is None


def test_importance_finds_the_feature_that_counts() -> None:
    rng = np.random.default_rng(0)
    failed = rng.integers(0, 2, 60).astype(float)
    episode = np.repeat(np.arange(60), 3)
    features = rng.random((180, len(NAMES)))
    features[:, 10] = failed[episode]
    found = permutation_importance(features, episode, failed, lambda rows: 0.1 + 0.8 * rows[:, 10], seed=0)
    assert [i.feature for i in found] == list(NAMES)
    for i, importance in enumerate(found):
        if i == 10:  # shuffled: half of the steps are wrong, so Brier rises to about 0.41 and the AUC falls to about 0.5
            assert importance.brier == pytest.approx(0.4, abs=0.08)
            assert importance.auc == pytest.approx(0.5, abs=0.08)
            assert importance.auc_std > 0
        else:
            assert (importance.brier, importance.auc, importance.auc_std) == (0, 0, 0)


def test_importance_needs_turns() -> None:
    bare = [replace(e, turns=()) for e in EPISODES]
    with pytest.raises(ValueError, match="turns of every slm episode"):
        built(bare, risks={}, predict=lambda rows: rows[:, 0])
    assert built(bare, risks={}).by_perturbation == []


def test_intervals_under_new_seeds_by_hand() -> None:
    """The small model wins under seed 0 and loses under seed 1: by tasks it is 1/2 in every resample, by seeds anything."""
    found = built()
    slm = row(found, "slm").metrics["success"]
    assert (slm.mean, slm.low, slm.high) == (0.5, 0.5, 0.5)
    new = found.success_new_seeds["slm"]
    assert (new.mean, new.low, new.high) == (0.5, 0.0, 1.0)
    skill = next(c for c in found.calibration if c.row == "risk")
    assert skill.skill is not None
    assert skill.skill_new_seeds is not None
    assert skill.skill.mean == skill.skill_new_seeds.mean
    for compared in found.comparisons:
        assert (compared.new_seeds is None) == (compared.at == "cvar at own rate")
        if compared.new_seeds is not None:
            assert compared.new_seeds.mean == pytest.approx(compared.difference.mean)
    target = next(t for t in found.targets if t.row == "risk")
    assert list(target.new_seeds) == ["success_share", "operating_ratio", "escalation_at_share", "oracle_ratio"]
    for name, estimate in target.new_seeds.items():
        assert estimate is not None
        assert estimate.mean == pytest.approx(getattr(target, name).mean)


@pytest.mark.parametrize(
    ("threshold", "success", "escalation"),
    [
        (0.5, (0.75, 0.75), (0.25, 0.25)),  # where risk was measured
        (0.7, (0.5, 0.75), (0.0, 0.25)),  # between it and never
        (0.1, (0.75, 1.0), (0.25, 1.0)),  # between it and always
        (1.0, (0.5, 0.5), (0.0, 0.0)),
        (-1.0, (1.0, 1.0), (1.0, 1.0)),
        (None, (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_thresholds_between_measured_settings_by_hand(
    threshold: float | None, success: tuple[float, float], escalation: tuple[float, float]
) -> None:
    (found,) = built(thresholds={"bayes": threshold}).thresholds
    assert (found.name, found.value, found.success, found.escalation) == ("bayes", threshold, success, escalation)
