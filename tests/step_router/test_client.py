"""The live client: features over an episode by hand, hard budgets, exact propensities, the feedback log."""

from __future__ import annotations

import json
import math
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from routewright.errors import BadInput
from routewright.step_router.client import (
    Calls,
    Decision,
    Episode,
    StepRouter,
    Totals,
    _append,
    parse_candidates,
    read_feedback,
)
from routewright.step_router.features import NAMES, Candidate
from routewright.step_router.risk import RiskModel, RiskSettings, save_risk

BEST = NAMES.index("verifier_best")
FACTS: dict[str, Any] = {
    "thresholds": {"bayes": 0.4, "budget": 0.6, "guaranteed": None},
    "operating": "bayes",
    "benefits": [0.1, 0.5],
    "c_slm": 1.0,
    "c_llm": 50.0,
    "max_steps": 10,
}


class OneMinusBest:
    """A risk and benefit that a test can set: 1 − the best verifier score, if the LLM never fails."""

    def predict(self, rows: np.ndarray) -> np.ndarray:
        alone = 1 - rows[:, BEST]
        return np.stack([alone, alone, np.zeros(len(rows))], axis=1)


def router(**settings: Any) -> StepRouter:
    model: Any = OneMinusBest()
    return StepRouter(model, "v1", 0.5, 10, 1.0, 50.0, **settings)


def step(episode: Episode, risk: float, action: str = "look") -> Decision:
    decision = episode.decide("a room", [{"action": action, "verifier_score": 1 - risk}])
    episode.acted("ask" if decision.take is None else decision.take)
    return decision


def folder(tmp_path: Path, **facts: Any) -> Path:
    """A saved router whose risk and benefit are 1/2 whatever the features: P(failure) 3/4 against the LLM's 1/4."""
    model = RiskModel()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        model.layers[-1].bias += torch.tensor([0.0, math.log(3), -math.log(3)])
    model.evidence = torch.ones(3)
    save_risk(model, tmp_path / "router", RiskSettings(), {**FACTS, **facts})
    return tmp_path / "router"


# --- Features over the steps of an episode


def test_history_features_by_hand_whoever_acted() -> None:
    episode = router().episode("light the lamp", max_steps=4)
    first = episode.decide(
        "a dark room",
        [Candidate("go east", [-0.5], 0.8), {"action": "go west", "token_logprobs": [-0.5], "verifier_score": 0.4}],
    )
    assert (first.escalate, first.take, first.risk, first.threshold) == (False, "go east", pytest.approx(0.2), 0.5)
    names = ("entropy", "entropy_history", "repeats", "time", "step", "observation_novelty", "verifier_margin")
    assert [first.features[name] for name in names] == pytest.approx([1, 1, 0, 0, 0, 1, 0.4])
    assert episode.acted("go east") == "go east"

    second = episode.decide("a dark cellar", [Candidate("go  east", [-0.1], 0.1)])
    assert (second.escalate, second.take, second.risk) == (True, None, pytest.approx(0.9))
    # one action: entropy 0; {a, dark} of {a, dark, room, cellar} were seen
    assert [second.features[name] for name in names] == pytest.approx([0, 0.5, 1, 0.25, 1, 0.5, 0])
    episode.acted("open door")  # the LLM's

    third = episode.decide("a dark room", [Candidate("open door", [-0.1], 0.9)])
    assert [third.features[name] for name in names] == pytest.approx([0, 1 / 3, 1, 0.5, 2, 0, 0])
    assert list(third.features) == list(NAMES)
    assert len({first.request_id, second.request_id, third.request_id}) == 3


def test_calls_and_money() -> None:
    shared = router()
    one, two = shared.episode("x"), shared.episode("x")
    for risk in (0.2, 0.9, 0.9):
        step(one, risk)
    step(two, 0.1)
    assert (one.calls, one.cost) == (Calls(3, 2), 103.0)
    assert (two.calls, two.cost) == (Calls(1, 0), 1.0)
    assert shared.totals == Totals(2, Calls(4, 2), 104.0)


def test_order_of_calls() -> None:
    episode = router().episode("x")
    with pytest.raises(BadInput, match=r"^acted: expected a decision before"):
        episode.acted("look")
    episode.decide("a room", [Candidate("look", verifier_score=0.9)])
    with pytest.raises(BadInput, match=r"^decide: the last decision led to no action"):
        episode.decide("a room", [Candidate("look", verifier_score=0.9)])
    with pytest.raises(BadInput, match=r"^action: expected a text, found NoneType"):
        episode.acted(None)  # type: ignore[arg-type]
    episode.acted("look")
    with pytest.raises(BadInput, match=r"^success: expected true or false, found float"):
        episode.finished(0.5)  # type: ignore[arg-type]
    episode.finished(np.bool_(True))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^decide: the episode is finished"):
        step(episode, 0.1)
    with pytest.raises(BadInput, match="finished already"):
        episode.finished(True)


def test_more_steps_than_announced_do_not_stop_the_agent() -> None:
    episode = router().episode("x", max_steps=1)
    decisions = [step(episode, 0.9) for _ in range(4)]
    assert [decision.escalate for decision in decisions] == [True] * 4
    assert [decision.features["time"] for decision in decisions] == [0, 1, 1, 1]
    assert [decision.features["step"] for decision in decisions] == [0, 1, 2, 3]


# --- Bad input


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ("look", r"^candidates: expected a list, found str$"),
        ({"action": "look"}, r"^candidates: expected a list, found dict$"),
        ([], r"^candidates: expected at least one candidate action"),
        (["look"], r"^candidates\[0\]: expected a Candidate or a mapping, found str$"),
        ([{"verifier_score": 0.1}], r"^candidates\[0\]\.action: missing, expected a text$"),
        ([{"action": 7, "verifier_score": 0.1}], r"^candidates\[0\]\.action: expected a text, found int$"),
        ([{"action": "a", "score": 1}], r"^candidates\[0\]\.score: unknown, expected only action, token_logprobs, verifier"),
        ([{"action": "a", "verifier_score": "1"}], r"^candidates\[0\]\.verifier_score: expected a number, found str$"),
        ([{"action": "a", "verifier_score": True}], r"^candidates\[0\]\.verifier_score: expected a number, found bool$"),
        ([{"action": "a", "verifier_score": 10**400}], r"^candidates\[0\]\.verifier_score: .* too large$"),
        ([{"action": "a", "verifier_score": math.nan}], r"^candidates\[0\]\.verifier_score: expected a finite number"),
        ([{"action": "a", "token_logprobs": "-1"}], r"^candidates\[0\]\.token_logprobs: expected a list of numbers"),
        ([{"action": "a", "token_logprobs": [None]}], r"^candidates\[0\]\.token_logprobs\[0\]: expected a number, found"),
        ([{"action": "a", "token_logprobs": [0.5]}], r"^candidates\[0\]\.token_logprobs\[0\]: expected a number of at"),
        ([{"action": "a"}], r"^candidates: expected token_logprobs on every candidate or verifier_score"),
    ],
)
def test_bad_candidates_are_named_and_cost_nothing(candidates: Any, message: str) -> None:
    shared = router(calls_per_day=1, decisions_per_day=10)
    episode = shared.episode("x", calls=1)
    with pytest.raises(BadInput, match=message):
        episode.decide("a room", candidates)
    assert shared.totals.calls == Calls(0, 0)
    assert step(episode, 0.9).escalate


def test_numbers_of_numpy_are_numbers() -> None:
    (candidate,) = parse_candidates(
        [{"action": "a", "token_logprobs": np.array([-1.0], np.float32), "verifier_score": np.float32(0.5)}]
    )
    assert candidate == Candidate("a", [-1.0], 0.5)


def test_bad_settings() -> None:
    for settings, message in (
        ({"epsilon": 1.5}, "^epsilon: expected a probability, found 1.5"),
        ({"calls_per_day": 3}, "^decisions_per_day: missing"),
        ({"calls_per_day": -1, "decisions_per_day": 5}, "^budget: expected a whole number of calls"),
    ):
        with pytest.raises(BadInput, match=message):
            router(**settings)
    with pytest.raises(BadInput, match=r"^budget: expected a whole number"):
        router().episode("x", calls=-1)
    with pytest.raises(BadInput, match=r"^max_steps: expected a whole number of at least 1, found 0"):
        router().episode("x", max_steps=0)
    with pytest.raises(BadInput, match=r"^objective: expected a text, found NoneType"):
        router().episode(None)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^observation: expected a text, found bytes"):
        router().episode("x").decide(b"a room", [Candidate("look", verifier_score=0.9)])  # type: ignore[arg-type]


# --- Budgets


def test_an_episode_spends_its_budget_and_no_more() -> None:
    episode = router().episode("x", max_steps=5, calls=2)
    decisions = [step(episode, 0.9) for _ in range(5)]
    assert [d.escalate for d in decisions] == [True, True, False, False, False]
    assert [d.threshold for d in decisions] == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert [d.take for d in decisions] == [None, None, "look", "look", "look"]


def test_an_episode_is_paced_by_past_benefits() -> None:
    """One call, four steps, past benefits 0.1 … 0.9: the level falls 0.7, 0.7, 0.5, τ, as in `budget.py`."""
    episode = router(benefits=[0.1, 0.3, 0.5, 0.7, 0.9]).episode("x", max_steps=4, calls=1)
    decisions = [step(episode, risk) for risk in (0.6, 0.65, 0.55, 0.95)]
    assert [d.escalate for d in decisions] == [False, False, True, False]
    assert [d.threshold for d in decisions] == [0.7, 0.7, 0.5, 1.0]


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_a_budget_of_0_never_escalates(epsilon: float) -> None:
    """Not even to explore, and then the decision is certain."""
    by_episode = router(epsilon=epsilon).episode("x", calls=0)
    by_day = router(epsilon=epsilon, calls_per_day=0, decisions_per_day=10).episode("x")
    for episode in (by_episode, by_day):
        decisions = [step(episode, 0.99) for _ in range(8)]
        assert not any(d.escalate or d.explored for d in decisions)
        assert {d.propensity for d in decisions} == {1.0}
        assert episode.calls == Calls(8, 0)


def test_the_day_is_shared_by_episodes_and_begins_anew() -> None:
    now = [datetime(2026, 3, 2, 12, tzinfo=UTC)]
    shared = router(calls_per_day=3, decisions_per_day=10, clock=lambda: now[0])
    first = [step(shared.episode("x", calls=2), 0.9).escalate for _ in range(2)]
    one = shared.episode("x", calls=2)
    assert first == [True, True]
    assert [step(one, 0.9).escalate for _ in range(3)] == [True, False, False]
    now[0] += timedelta(hours=12)
    assert [step(one, 0.9).escalate for _ in range(2)] == [True, False]  # now its own budget is used up
    assert step(shared.episode("x"), 0.9).escalate


def test_threads_never_overspend_the_day() -> None:
    shared = router(calls_per_day=10, decisions_per_day=80, clock=lambda: datetime(2026, 3, 2, 12, tzinfo=UTC))

    def run(_: int) -> int:
        episode = shared.episode("x")
        for _ in range(10):
            step(episode, 0.9)
        return episode.calls.llm

    with ThreadPoolExecutor(8) as threads:
        spent = sum(threads.map(run, range(8)))
    assert spent == 10
    assert shared.totals == Totals(8, Calls(80, 10), 80 + 500.0)


# --- Exploration


def test_propensities_are_exact() -> None:
    """ε = 0.2: the threshold's answer has 0.8 + 0.1, the other 0.1, whether the coin was tossed or not."""
    shared = router(epsilon=0.2, seed=1)
    decisions = [step(shared.episode("x"), 0.9 if i % 2 else 0.1) for i in range(4000)]
    for i, decision in enumerate(decisions):
        assert decision.propensity == pytest.approx(0.9 if decision.escalate == bool(i % 2) else 0.1)
    taken_against = np.mean([d.propensity < 0.5 for d in decisions])
    assert taken_against == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 4000))
    assert np.mean([d.explored for d in decisions]) == pytest.approx(0.2, abs=4 * math.sqrt(0.16 / 4000))
    # inverse propensities recover the rate of a policy that always escalates
    assert np.mean([d.escalate / d.propensity for d in decisions]) == pytest.approx(1, abs=0.15)


def test_exploration_spends_from_the_budget_and_ends_with_it() -> None:
    episode = router(epsilon=1.0, seed=0).episode("x", max_steps=30, calls=3)
    decisions = [step(episode, 0.1) for _ in range(30)]
    assert episode.calls.llm == 3
    last = max(i for i, d in enumerate(decisions) if d.escalate)
    assert {d.propensity for d in decisions[: last + 1]} == {0.5}
    assert {(d.propensity, d.explored) for d in decisions[last + 1 :]} == {(1.0, False)}


def test_without_exploration_decisions_are_certain() -> None:
    episode = router().episode("x")
    assert {(d.propensity, d.explored) for d in (step(episode, 0.9), step(episode, 0.1))} == {(1.0, False)}


def test_steps_that_a_timeout_cost_count_as_in_training() -> None:
    episode = router().episode("x", max_steps=4)
    episode.decide("a room", [{"action": "look", "verifier_score": 0.9}])
    episode.acted("look", steps=2)
    assert step(episode, 0.1).features["step"] == 2
    assert step(episode, 0.1).features["time"] == pytest.approx(3 / 4)
    episode.decide("a room", [{"action": "look", "verifier_score": 0.9}])
    for wrong in (0, True, 1.5):
        with pytest.raises(BadInput, match=rf"^steps: expected a whole number of at least 1, found {wrong}$"):
            episode.acted("look", steps=wrong)  # type: ignore[arg-type]


# --- The calibrated router on disk


def test_load(tmp_path: Path) -> None:
    shared = StepRouter.load(folder(tmp_path))
    episode = shared.episode("x")
    decision = step(episode, 0.1)
    assert (decision.risk, decision.threshold, decision.escalate) == (pytest.approx(0.5), 0.4, True)
    assert (episode.cost, shared.max_steps) == (51.0, 10)
    assert len(shared.model_version) == 12
    assert not step(StepRouter.load(folder(tmp_path, operating="budget")).episode("x"), 0.1).escalate
    assert StepRouter.load(folder(tmp_path), c_slm=0.0, c_llm=0.02).c_llm == 0.02


def test_load_at_another_threshold_of_the_folder(tmp_path: Path) -> None:
    made = folder(tmp_path)
    assert StepRouter.load(made).threshold == 0.4
    assert StepRouter.load(made, operating="budget").threshold == 0.6
    assert StepRouter.load(made, operating="guaranteed").threshold == -1.0
    with pytest.raises(BadInput, match=r"risk\.json: operating: expected one of bayes, budget, guaranteed, found 'parity'$"):
        StepRouter.load(made, operating="parity")


def test_no_certified_threshold_leaves_every_step_to_the_llm(tmp_path: Path) -> None:
    """Within the budget."""
    shared = StepRouter.load(folder(tmp_path, operating="guaranteed", benefits=[]))
    episode = shared.episode("x", max_steps=5, calls=2)
    decisions = [step(episode, 0.1) for _ in range(3)]
    assert [(d.escalate, d.threshold) for d in decisions] == [(True, -1.0), (True, -1.0), (False, 1.0)]


def test_a_threshold_beyond_every_benefit_never_escalates(tmp_path: Path) -> None:
    thresholds = {"bayes": math.inf}
    decision = step(StepRouter.load(folder(tmp_path, thresholds=thresholds)).episode("x"), 0.1)
    assert (decision.escalate, decision.threshold) == (False, 1.0)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"operating": "best"}, r"risk\.json: operating: expected one of bayes, budget, guaranteed, found 'best'$"),
        ({"thresholds": {"bayes": "0.4"}}, r"risk\.json: thresholds\.bayes: expected a valid number$"),
        ({"thresholds": {"bayes": math.nan}}, r"^threshold: expected a number, found NaN$"),
        ({"c_llm": -1.0}, r"risk\.json: c_llm: expected greater than or equal to 0$"),
        ({"benefits": [0.1, 2.0]}, r"risk\.json: benefits\.1: expected less than or equal to 1$"),
        ({"max_steps": None}, r"risk\.json: max_steps: expected a valid integer$"),
    ],
)
def test_load_names_a_wrong_field(tmp_path: Path, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        StepRouter.load(folder(tmp_path, **facts))


def test_load_needs_a_folder_of_the_calibrate_stage(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model\.safetensors is missing, expected a folder written by the calibrate stage"):
        StepRouter.load(tmp_path)


# --- The feedback log


def logged(tmp_path: Path) -> tuple[Path, list[Decision]]:
    log = tmp_path / "logs" / "feedback.jsonl"
    shared = router(log=log, epsilon=0.5, seed=3)
    episode, other = shared.episode("x", calls=1), shared.episode("x")
    decisions = [step(episode, 0.9), step(episode, 0.2)]
    episode.finished(success=True)
    decisions.append(step(other, 0.9))
    other.finished(success=False)
    return log, decisions


def test_feedback_comes_back_as_it_was(tmp_path: Path) -> None:
    log, decisions = logged(tmp_path)
    entries = read_feedback(log)
    told = ("request_id", "features", "risk", "benefit", "threshold", "escalate", "explored", "propensity", "timestamp")
    for name in told:
        assert [getattr(e, name) for e in entries] == [getattr(d, name) for d in decisions]
    assert [e.outcome for e in entries] == [1.0, 1.0, 0.0]
    assert [e.step for e in entries] == [0, 1, 0]
    assert entries[0].episode == entries[1].episode != entries[2].episode
    assert {(e.router, e.model_version) for e in entries} == {("step-router", "v1")}
    assert log.stat().st_mode & 0o077 == 0


def test_an_episode_that_never_finished_leaves_no_line(tmp_path: Path) -> None:
    log = tmp_path / "feedback.jsonl"
    shared = router(log=log)
    step(shared.episode("x"), 0.9)
    shared.episode("x").finished(success=True)  # and neither does one without decisions
    assert not log.exists()


def test_a_log_cut_in_half_is_refused(tmp_path: Path) -> None:
    log, _ = logged(tmp_path)
    log.write_bytes(log.read_bytes()[:-40])
    with pytest.raises(BadInput, match=rf"^{log}, line 3: Invalid JSON: EOF"):
        read_feedback(log)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("features", {"entropy": math.nan}, r"line 2: features\.entropy: expected a finite number, found nan$"),
        ("features", {"entropy": "0.5"}, r"line 2: features\.entropy: expected a valid number$"),
        ("features", {"budget": 0.5}, r"line 2: features\.budget: unknown"),
        ("propensity", 0.0, r"line 2: propensity: expected greater than 0$"),
        ("propensity", None, r"line 2: propensity: expected a valid number$"),
        ("outcome", math.nan, r"line 2: outcome: expected a finite number$"),
        ("router", "search-router", r"line 2: router: expected 'step-router'$"),
        ("timestamp", "2026-03-02T12:00:00", r"line 2: timestamp: expected timezone info$"),
    ],
)
def test_damaged_fields_are_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    log, _ = logged(tmp_path)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[1][field] = {**rows[1][field], **value} if isinstance(value, dict) else value
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(BadInput, match=message) as caught:
        read_feedback(log)
    assert str(caught.value).startswith(f"{log}, line 2: ")


def test_a_missing_feature_is_named(tmp_path: Path) -> None:
    log, _ = logged(tmp_path)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    del rows[2]["features"]["repeats"]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(BadInput, match=r"line 3: features\.repeats: missing, expected a number$"):
        read_feedback(log)


def _append_many(path: Path, letter: str) -> None:
    for _ in range(100):
        _append(path, f"{letter * 20_000}\n")


def test_processes_that_append_do_not_interleave(tmp_path: Path) -> None:
    log = tmp_path / "feedback.jsonl"
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_append_many, args=(log, letter)) for letter in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = log.read_text().splitlines()
    assert sorted(lines) == ["a" * 20_000] * 100 + ["b" * 20_000] * 100
