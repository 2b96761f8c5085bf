"""The two checks around a retraining, on what a served router logs, and their components as a pod runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from served_log import BEFORE, HOMES, NOW, write_served_log

from components.drift_check.component import drift_check
from routewright import retraining
from routewright.errors import BadInput
from routewright.evaluation.off_policy import MIN_DECISIONS
from routewright.pools.query_log import read_query_log
from routewright.retraining import HELD_OUT, check_drift, check_off_policy, held_out


def words(texts: list[str]) -> np.ndarray:
    """Stands for MiniLM: which of the things a query names."""
    things = [thing for home in HOMES.values() for thing in home] + ["kettle", "teapot", "hose", "bucket"]
    return np.array([[float(thing in text) for thing in things] for text in texts])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routewright.language_models.embedding.embed", words)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("ROUTEWRIGHT_WORK", str(tmp_path / "work"))
    for name in ("MLFLOW_RUN_ID", "ROUTEWRIGHT_PARENT_RUN", "ROUTEWRIGHT_EVENTS", "ROUTEWRIGHT_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_changed_traffic_is_drift_and_the_same_traffic_is_none(quick: None, tmp_path: Path) -> None:
    reference = write_served_log(tmp_path / "reference.jsonl", 600, BEFORE, 0)
    same = check_drift(write_served_log(tmp_path / "same.jsonl", 600, BEFORE, 1), reference, tmp_path / "a", 0)
    assert not same.drifted
    moved = check_drift(write_served_log(tmp_path / "now.jsonl", 600, NOW, 2), reference, tmp_path / "b", 0)
    assert moved.drifted
    assert "route shares moved" in moved.reason
    assert "queries changed" in moved.reason
    told = json.loads((tmp_path / "b" / "drift.json").read_text())
    assert (told["drifted"], told["psi"], told["mmd"]) == (True, moved.psi, moved.mmd)
    assert told["psi"] > told["psi_threshold"]
    assert told["mmd"] > told["mmd_threshold"]
    # garden gets its own 1.6 and two of the four mistaken things' 0.7, of 4.0
    assert told["shares"]["garden"][1] == pytest.approx(2.3 / 4, abs=0.07)
    assert told["shares"]["garden"][0] == pytest.approx(1 / 3, abs=0.07)


def test_explored_decisions_are_no_routes(quick: None, tmp_path: Path) -> None:
    log = write_served_log(tmp_path / "log.jsonl", 400, BEFORE, 0, epsilon=0.5)
    found = check_drift(log, log, tmp_path / "out", 0)
    greedy = [line for line in log.read_text().splitlines() if '"explored": false' in line]
    assert 100 < len(greedy) < 300
    assert found.reference == len(greedy)


def test_the_log_is_divided_by_query_and_joined_with_its_outcomes(quick: None, tmp_path: Path) -> None:
    log = write_served_log(tmp_path / "log.jsonl", 900, BEFORE, 0)
    check_drift(log, log, tmp_path, 0)
    learn, kept = read_query_log(tmp_path / "learn.jsonl"), read_query_log(tmp_path / "held-out.jsonl")
    assert len(learn) + len(kept) == 900
    assert len(kept) / 900 == pytest.approx(HELD_OUT, abs=0.05)
    assert not {entry.query for entry in learn} & {entry.query for entry in kept}
    assert all(entry.outcome for entry in [*learn, *kept])
    for number in range(20):
        assert held_out(f"Repair the  OVEN {number} ") == held_out(f"repair the oven {number}")
    assert not list(tmp_path.glob("*.joined"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "no such file, expected the decisions that routewright serve --log wrote"),
        ("nonsense\n", "line 1: Invalid JSON"),
        ("", "expected at least 50 decisions, not explored and with the query in clear text, found 0"),
    ],
)
@pytest.mark.parametrize("side", ["log", "reference"])
def test_a_faulty_log_is_named(quick: None, tmp_path: Path, side: str, content: str | None, sentence: str) -> None:
    good, bad = write_served_log(tmp_path / "good.jsonl", 200, BEFORE, 0), tmp_path / "bad.jsonl"
    if content is not None:
        bad.write_text(content)
    with pytest.raises(BadInput, match=r"bad\.jsonl") as caught:
        check_drift(*((bad, good) if side == "log" else (good, bad)), tmp_path / "out", 0)
    assert sentence in str(caught.value)


def test_redacted_queries_cannot_be_compared(quick: None, tmp_path: Path) -> None:
    log = write_served_log(tmp_path / "log.jsonl", 200, BEFORE, 0)
    hidden = tmp_path / "hidden.jsonl"
    hidden.write_text(log.read_text().replace('"query": ', '"redacted": "hash", "query": '))
    with pytest.raises(BadInput, match="with the query in clear text, found 0"):
        check_drift(hidden, log, tmp_path / "out", 0)


class Stub:
    """A router that asks one agent about each thing."""

    def __init__(self, choose: Callable[[str], str], names: tuple[str, ...] = tuple(HOMES)) -> None:
        self.choose, self.names = choose, list(names)

    def featurizer(self, query: str, day: Any) -> str:
        return query

    def probabilities(self, features: list[str]) -> list[None]:
        return [None] * len(features)

    def decision(self, query: str, probabilities: None) -> SimpleNamespace:
        return SimpleNamespace(agents=[self.choose(query)])


def by_card(query: str) -> str:
    thing = query.rsplit(" ", 1)[1]
    mistaken = {"kettle": "kitchen", "teapot": "kitchen", "hose": "garden", "bucket": "garden"}
    return mistaken.get(thing) or next(home for home, things in HOMES.items() if thing in things)


def by_outcome(query: str) -> str:
    return "office" if query.rsplit(" ", 1)[1] in ("kettle", "teapot", "hose", "bucket") else by_card(query)


def judged(
    monkeypatch: pytest.MonkeyPatch, folder: Path, choose: Callable[[str], str], count: int = 3000, epsilon: float = 0.5
) -> retraining.OffPolicyDecision:
    check_drift(log := write_served_log(folder / "log.jsonl", count, NOW, 3, epsilon), log, folder, 0)
    monkeypatch.setattr("routewright.search_router.router.load_router", lambda _: Stub(choose))
    return check_off_policy(folder, folder / "held-out.jsonl", folder)


def test_a_router_that_learnt_from_outcomes_passes(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, tmp_path, by_outcome)
    assert found.passed, found.reason
    assert found.estimate.gain is not None
    entries = read_query_log(tmp_path / "held-out.jsonl")
    # it is always right, the logged router as often as the outcomes of its own decisions say
    expected = 1 - float(np.mean([max(entry.outcome.values()) for entry in entries if not entry.explored]))
    assert found.estimate.gain.low <= expected <= found.estimate.gain.high
    assert "is at least -0.05" in found.reason
    # its value is 1; with outcomes predicted from words and agents the doubly robust interval is no wider
    dr, ips = found.estimate.dr, found.estimate.ips
    assert dr is not None
    assert ips is not None
    assert dr.low <= 1 <= dr.high
    assert dr.high - dr.low <= ips.high - ips.low
    assert json.loads((tmp_path / "off-policy.json").read_text()) == found.model_dump()


def test_a_worse_router_does_not_pass(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, tmp_path, lambda query: "kitchen")
    assert found.estimate.conclusive
    assert not found.passed
    assert "may be below -0.05" in found.reason


def test_a_router_gains_nothing_by_not_exploring(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, tmp_path, by_card)  # what the logged router does by itself
    assert found.estimate.snips is not None
    assert found.estimate.gain is not None
    assert found.estimate.snips.mean - found.estimate.logged.mean > 0.05
    assert found.estimate.gain.low <= 0 <= found.estimate.gain.high
    found = judged(monkeypatch, tmp_path, lambda query: "garden" if "oven" in query or "pan" in query else by_card(query))
    assert found.estimate.conclusive
    assert not found.passed, "wrong where the logged router is right"


def test_a_log_of_nothing_but_exploration_does_not_judge(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = write_served_log(tmp_path / "drawn.jsonl", 3000, NOW, 3, epsilon=1.0)
    monkeypatch.setattr("routewright.search_router.router.load_router", lambda _: Stub(by_outcome))
    found = check_off_policy(tmp_path, drawn, tmp_path)
    assert not found.passed
    assert "every decision was explored" in found.reason


@pytest.mark.parametrize(
    ("count", "epsilon", "sentence"),
    [(500, 0.5, f"expected at least {MIN_DECISIONS}"), (3000, 0.0, "without exploration")],
)
def test_too_few_decisions_or_none_explored_conclude_nothing(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, epsilon: float, sentence: str
) -> None:
    found = judged(monkeypatch, tmp_path, by_outcome, count, epsilon)
    assert not found.passed
    assert sentence in found.reason


def test_logs_that_cannot_judge_a_router(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_served_log(tmp_path / "log.jsonl", 300, BEFORE, 0, feedback=False)
    check_drift(log, log, tmp_path, 0)
    monkeypatch.setattr("routewright.search_router.router.load_router", lambda _: Stub(by_card))
    with pytest.raises(BadInput, match=r"held-out\.jsonl: found no decision with request_id, propensity and outcome"):
        check_off_policy(tmp_path, tmp_path / "held-out.jsonl", tmp_path)
    monkeypatch.setattr("routewright.search_router.router.load_router", lambda _: Stub(by_card, ("kitchen", "garden")))
    log = write_served_log(tmp_path / "log.jsonl", 300, BEFORE, 0)
    check_drift(log, log, tmp_path, 0)
    with pytest.raises(BadInput, match="unknown agent 'office', expected one of kitchen, garden"):
        check_off_policy(tmp_path, tmp_path / "held-out.jsonl", tmp_path)


def test_a_log_that_grew_is_checked_again(quick: None, work: Path) -> None:
    import mlflow

    reference = write_served_log(work / "reference.jsonl", 600, BEFORE, 0)
    log = write_served_log(work / "decisions.jsonl", 300, BEFORE, 1)

    def run(number: int) -> tuple[Any, Any]:
        made = {
            name: SimpleNamespace(path=str(work / f"{name}{number}"), metadata={}, logged={})
            for name in ("traffic", "table", "metrics", "log")
        }
        path = work / f"path{number}"
        made["metrics"].log_metric = made["metrics"].logged.__setitem__
        given = {"decisions": str(log), "reference": str(reference), "seed": 0, "query_log": str(path)}
        drifted = drift_check.python_func(**given, **made)
        return SimpleNamespace(drifted=drifted, query_log=path.read_text()), made

    first, made = run(1)
    assert first.drifted == 0
    assert Path(first.query_log).is_file()
    assert made["metrics"].logged["psi"] == made["traffic"].metadata["psi"]
    assert Path(made["table"].path).read_text().startswith("**not drifted**: no statistic is above its threshold")
    again, _ = run(2)
    assert again.query_log == first.query_log
    log.rename(work / "decisions.jsonl.000001")
    write_served_log(log, 1200, NOW, 2)
    grown, made = run(3)
    assert grown.drifted == 1
    assert grown.query_log != first.query_log
    assert len(read_query_log(Path(grown.query_log))) > 900
    assert (Path(made["traffic"].path) / "drift.json").is_file()
    client = mlflow.MlflowClient(f"sqlite:///{work}/mlflow.db")
    experiment = client.get_experiment_by_name("search-router")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 2
    assert [file.path for file in client.list_artifacts(runs[0].info.run_id)] == ["drift.json"]
