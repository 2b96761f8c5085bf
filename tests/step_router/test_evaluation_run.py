"""Which rules the evaluation plays, what it leaves out in the ablation, and its gates."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import tiny_profile

from routewright.step_router import evaluation_run
from routewright.step_router.episodes import Episode, Rule, Turn
from routewright.step_router.escalation import ALWAYS, NEVER, Risk
from routewright.step_router.evaluation_run import GROUPS, ablated, gates_of, quantile_grid, rules_of
from routewright.step_router.features import NAMES
from routewright.step_router.results import StepResults, build_results
from routewright.step_router.risk import RiskModel, RiskSettings, Rollouts, load_risk, save_risk, stack
from routewright.step_router.rollouts import with_logprobs

PAIRS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_quantile_grid_by_hand() -> None:
    assert quantile_grid(np.arange(101.0), 3) == [10.0, 50.0, 90.0]
    assert quantile_grid(np.arange(101.0)[::-1], 2) == [10.0, 90.0]
    assert quantile_grid(np.full(5, 0.25), 7) == [0.25]


def rollouts(episodes: int = 12, steps: int = 5, seed: int = 0) -> Rollouts:
    features = np.random.default_rng(seed).normal(size=(episodes * steps, len(NAMES)))
    features[:, NAMES.index("evidence")] = 0.0
    features[:, NAMES.index("step")] = np.tile(np.arange(steps), episodes)
    episode = np.repeat(np.arange(episodes), steps)
    return Rollouts(features, episode, (np.arange(episodes) % 3 == 0).astype(float), np.arange(episodes) % 2)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router's folder with untrained models, and the rollouts that it was fitted on."""
    folder = tmp_path_factory.mktemp("router")
    known = rollouts()
    torch.manual_seed(0)
    for name in (".", "no-cvar", "query-level"):
        model = RiskModel()
        model.standardise(known.features)
        save_risk(model, folder / name, RiskSettings(), {})
    parts = {"train": rollouts(seed=1), "holdout": known}
    np.savez(
        folder / "rollouts.npz",
        **{f"{name}_{field}": getattr(part, field) for name, part in parts.items()
           for field in ("features", "episode", "failed", "seed")},
    )  # fmt: skip
    return folder


def by_row(rules: list[Rule]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for rule in rules:
        found.setdefault(rule.row, []).append(rule.threshold)
    return found


def test_every_row_has_its_thresholds_once(router: Path) -> None:
    rules, models = rules_of(router, rollouts(), 4, {"risk": 0.123})
    found = by_row(rules)
    assert list(found) == [
        "slm", "llm", "random-matched", "entropy", "verifier", "time", "repeat", "query-level", "failure-risk",
        "failure-no-cvar", "risk", "risk-no-cvar",
    ]  # fmt: skip
    assert (found["slm"], found["llm"]) == ([NEVER], [ALWAYS])
    assert [rule.row for rule in rules if rule.keep] == ["slm"], "only its turns are needed"
    assert set(Counter((rule.row, rule.recorded) for rule in rules).values()) == {1}
    assert 0.123 in found["risk"]
    assert len(found["risk"]) == 5
    assert 0.123 not in found["risk-no-cvar"]
    assert found["time"] == [0.5, 1.5, 2.5, 3.5], "the LLM takes over from step 1, 2, 3 or 4 on"
    assert found["random-matched"] == pytest.approx([0.1, 0.1 + 0.8 / 3, 0.1 + 1.6 / 3, 0.9])
    assert set(models) == {"risk", "risk-no-cvar"}


def test_an_operating_threshold_of_the_grid_is_played_once(router: Path) -> None:
    own = by_row(rules_of(router, rollouts(), 4, {})[0])["risk"]
    again = by_row(rules_of(router, rollouts(), 4, {"risk": own[1]})[0])["risk"]
    assert again == own


def test_thresholds_lie_where_the_signals_are(router: Path) -> None:
    """Of the verifier: minus the first candidate's score, which is the best one's here (no negative margin)."""
    data = rollouts()
    margin, best = NAMES.index("verifier_margin"), NAMES.index("verifier_best")
    data.features[:, margin] = 0.5
    found = by_row(rules_of(router, data, 3, {})[0])
    assert found["verifier"] == pytest.approx(np.quantile(-data.features[:, best], [0.1, 0.5, 0.9]).tolist(), abs=1e-6)
    entropy = data.features[:, NAMES.index("entropy")]
    assert found["entropy"] == pytest.approx(np.quantile(entropy, [0.1, 0.5, 0.9]).tolist(), abs=1e-6)


def test_thresholds_are_of_what_is_played_not_of_episodes_without_log_probabilities(router: Path) -> None:
    """Pseudo-entropies on another scale, as the calibrate stage keeps beside the others, move no threshold."""
    told, untold = rollouts(), rollouts(seed=3)
    untold.features[:, NAMES.index("evidence")] = 1.0
    untold.features[:, NAMES.index("entropy")] += 100.0
    assert with_logprobs(stack([untold, told])).failed.tolist() == told.failed.tolist()
    assert by_row(rules_of(router, stack([told, untold]), 4, {})[0]) == by_row(rules_of(router, told, 4, {})[0])


def test_the_cvar_term_is_ablated_on_the_output_that_it_acts_on(router: Path) -> None:
    data = rollouts()
    rules = {rule.row: rule.signal for rule in rules_of(router, data, 4, {})[0]}
    without = load_risk(router / "no-cvar")[0]
    signal = rules["failure-no-cvar"]
    assert isinstance(signal, Risk)
    assert np.array_equal(signal.model.risks(data.features), without.risks(data.features))
    found = by_row(rules_of(router, data, 3, {})[0])["failure-no-cvar"]
    assert found == quantile_grid(without.risks(data.features), 3)


def test_short_episodes_leave_fewer_time_thresholds(router: Path) -> None:
    found = by_row(rules_of(router, rollouts(episodes=30, steps=2), 7, {})[0])
    assert found["time"] == [0.5]


def test_the_groups_hold_every_feature_once() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(NAMES)


class Half:
    """A router that always says a half, and notes what it is shown."""

    def risks(self, features: np.ndarray) -> np.ndarray:
        self.features = features
        return np.full(len(features), 0.5)


def test_an_ablated_group_is_constant_everywhere(router: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[np.ndarray, np.ndarray, Half]] = []

    def fitted(
        train: Rollouts, explored: None, holdout: Rollouts, settings: RiskSettings, seed: int
    ) -> tuple[Half, list[Any]]:
        seen.append((train.features, holdout.features, Half()))
        assert (settings.steps, seed) == (3, 5)
        return seen[-1][2], []

    monkeypatch.setattr(evaluation_run, "fit", fitted)
    test = rollouts(seed=2)
    test.features[:, NAMES.index("evidence")] = 1.0
    found = ablated(router, test, tiny_profile(router={"steps": 3}), 5)
    assert list(found) == ["nothing", *GROUPS]
    assert all(scores == pytest.approx({"brier": 0.25, "auc": 0.5}) for scores in found.values())
    for (train, holdout, model), names in zip(seen, [(), *GROUPS.values()], strict=True):
        held = [NAMES.index(name) for name in names if name != "evidence"]
        for shown, true in ((train, rollouts(seed=1)), (holdout, rollouts()), (model.features, test)):
            expected = true.features.copy()
            expected[:, held] = 0.0
            assert np.array_equal(shown, expected)
        assert (model.features[:, NAMES.index("evidence")] == 1.0).all(), "the flag says how to read the others"


def test_a_refitted_router_scores_by_hand(router: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two episodes of 1 and 3 steps weigh the same: Brier = (0.2² + (0.4² + 0.6² + 0.1²)/3)/2, AUC over weighted pairs."""

    class Given:
        def risks(self, features: np.ndarray) -> np.ndarray:
            return np.array([0.8, 0.4, 0.6, 0.9])

    monkeypatch.setattr(evaluation_run, "fit", lambda *arguments: (Given(), []))
    test = Rollouts(rollouts().features[:4], np.array([0, 1, 1, 1]), np.array([1.0, 0.0]), np.array([0, 1]))
    found = ablated(router, test, tiny_profile(), 0)["nothing"]
    assert found["brier"] == pytest.approx((0.04 + (0.16 + 0.36 + 0.81) / 3) / 2)
    assert found["auc"] == pytest.approx(2 / 3)


def setting(row: str, threshold: float | None, success: list[int], calls: list[int], steps: list[int]) -> list[Episode]:
    return [
        Episode(row, threshold, task, "quest", seed, bool(won), count, llm,
                tuple(Turn("go", "slm", (0.0,) * len(NAMES), ()) for _ in range(count)))
        for (task, seed), won, llm, count in zip(PAIRS, success, calls, steps, strict=True)
    ]  # fmt: skip


SLM = setting("slm", None, [1, 0, 1, 0], [0, 0, 0, 0], [2, 6, 2, 6])
LLM = setting("llm", None, [1, 1, 1, 1], [4, 4, 4, 4], [4, 4, 4, 4])


def results(risk: list[Episode], risks: list[float], slm: list[Episode] = SLM) -> StepResults:
    rows = [[value] * episode.steps for value, episode in zip(risks, slm, strict=True)]
    return build_results(slm + LLM + risk, {"risk": 0.5}, {"risk": rows}, 1.0, 10.0, 0.2, 0, 200)


def test_gates_of_a_good_router_by_hand() -> None:
    """Escalation 6/16 at success 1, 0.97 reached at (0.97 − 0.5)/0.5 of it; the oracle needs 8/12."""
    risk = setting("risk", 0.5, [1, 1, 1, 1], [0, 3, 0, 3], [2, 6, 2, 6])
    share, escalation, skill = gates_of(results(risk, [0.0, 1.0, 0.0, 1.0]))
    assert (share.passed, share.value, share.bound) == (True, pytest.approx(1.0), 0.97)
    assert (escalation.passed, escalation.bound) == (True, 1.0)
    assert escalation.value == pytest.approx(0.94 * 6 / 16 / (8 / 12))
    assert (skill.passed, skill.value, skill.bound) == (True, pytest.approx(1.0), 0.0)


def test_gates_of_a_bad_router_by_hand() -> None:
    """Success 0.5 at escalation 6/16: only the LLM alone reaches 0.97, at 6/16 + 0.94·10/16. Risks that say the opposite."""
    risk = setting("risk", 0.5, [1, 0, 1, 0], [0, 3, 0, 3], [2, 6, 2, 6])
    share, escalation, skill = gates_of(results(risk, [1.0, 0.0, 1.0, 0.0]))
    assert (share.passed, share.value) == (False, pytest.approx(0.5))
    assert not escalation.passed
    assert escalation.value == pytest.approx((6 / 16 + 0.94 * 10 / 16) / (8 / 12))
    assert not skill.passed
    assert skill.value is not None
    assert skill.value < 0


def test_the_skill_is_judged_by_the_interval_over_seeds_too() -> None:
    """Every task is lost under seeds 0 and 1: the base rate is 1/2 whatever the tasks, 1/4 or 3/4 under other seeds."""
    made = [
        Episode(row, threshold, task, "quest", seed, seed > 1 or row != "slm", 2, 0 if row == "slm" else 2,
                (Turn("go", "slm", (0.0,) * len(NAMES), ()),) * 2)
        for row, threshold in (("slm", None), ("llm", None), ("risk", 0.5)) for task in "abc" for seed in range(4)
    ]  # fmt: skip
    risks = [[0.6] * 2, [0.6] * 2, [0.4] * 2, [0.4] * 2] * 3
    found = build_results(made, {"risk": 0.5}, {"risk": risks}, 1.0, 10.0, 0.2, 0, 200)
    skill = found.calibration[0].skill
    assert skill is not None
    assert (skill.low, skill.high) == (pytest.approx(1 - 0.16 / 0.25), pytest.approx(1 - 0.16 / 0.25))
    gate = gates_of(found)[2]
    assert (gate.name, gate.value) == ("brier skill under new seeds, lower end", pytest.approx(1 - 0.16 / 0.1875))


def test_a_number_that_does_not_exist_does_not_pass() -> None:
    """A small model that never fails: the oracle calls nobody and there is nothing to predict."""
    slm = setting("slm", None, [1, 1, 1, 1], [0, 0, 0, 0], [2, 2, 2, 2])
    risk = setting("risk", 0.5, [1, 1, 1, 1], [0, 0, 0, 0], [2, 2, 2, 2])
    share, escalation, skill = gates_of(results(risk, [0.0] * 4, slm))
    assert share.passed
    assert (escalation.passed, escalation.value) == (False, None)
    assert (skill.passed, skill.value) == (False, None)
