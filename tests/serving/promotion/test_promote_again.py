"""Promotions that are repeated: after a refusal, after a canary that was taken back, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from evaluated_run import write_search_run
from promotion_commands import call
from test_promote import NAME, deploy_file, same_run

from routewright import model_registry as registry
from routewright.evaluation.gates import Check
from serving.promotion import promote, rollout


class Killed(Exception):
    pass


def recorded(store: Any) -> list[str]:
    """The outcomes that the promotions left in MLflow, the first first."""
    import mlflow

    experiment = store.get_experiment_by_name(NAME).experiment_id
    runs = store.search_runs([experiment], "tags.`routewright.stage` = 'promote'", order_by=["attributes.start_time ASC"])
    assert {run.info.status for run in runs} == {"FINISHED"}
    return [json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/decision.json"))["outcome"] for run in runs]


def test_what_was_refused_once_can_be_promoted(store, tmp_path, monkeypatch) -> None:
    run = write_search_run(tmp_path / "run", latency_ms=500.0)
    assert call(monkeypatch, "promote", NAME, "--run", run) == 3
    assert registry.aliases(store, NAME) == {}
    write_search_run(tmp_path / "run")  # evaluated again, on a quiet machine
    assert call(monkeypatch, "promote", NAME, "--run", run) == 0
    assert registry.aliases(store, NAME) == {"champion": "1"}
    assert recorded(store) == ["refused", "promoted"]


def test_what_was_taken_back_once_can_be_promoted(cluster: ApiServer, store, tmp_path, monkeypatch) -> None:
    same_run(monkeypatch)
    deploy = deploy_file(tmp_path)
    one, two = write_search_run(tmp_path / "one"), write_search_run(tmp_path / "two", "m2")
    assert call(monkeypatch, "promote", NAME, "--run", one, "--deploy", deploy) == 0
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "_ready", lambda spec: spec["labels"]["routewright/model-version"] == "1")
        assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 1
    assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 0
    assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
    assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    assert recorded(store) == ["promoted", "aborted", "promoted", "promoted"]


def test_a_promotion_killed_after_the_registration_leaves_a_version_to_compare_with(
    store, tmp_path: Path, monkeypatch
) -> None:
    same_run(monkeypatch)
    one, two = write_search_run(tmp_path / "one"), write_search_run(tmp_path / "two", "m2")
    known = registry.register

    def register(*given: Any) -> None:
        known(*given)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(registry, "register", register)
        assert call(monkeypatch, "promote", NAME, "--run", one) == 1
    assert call(monkeypatch, "promote", NAME, "--run", one) == 0
    assert registry.aliases(store, NAME) == {"champion": "1"}
    assert recorded(store) == ["promoted"], "the killed attempt goes on in its run"
    assert call(monkeypatch, "promote", NAME, "--run", two) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}


def test_a_champion_that_died_is_replaced_and_can_come_back(
    cluster: ApiServer, store, tmp_path, monkeypatch, capsys
) -> None:
    same_run(monkeypatch)
    deploy = deploy_file(tmp_path, mode="Standard")
    one, two = write_search_run(tmp_path / "one"), write_search_run(tmp_path / "two", "m2")
    assert call(monkeypatch, "promote", NAME, "--run", one, "--deploy", deploy) == 0
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "_ready", lambda spec: spec["labels"]["routewright/model-version"] == "2")
        del cluster.objects[NAME]["status"]["observedGeneration"]  # the controller looks again
        assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 0
    assert "version 1 is not ready, so there was no canary" in capsys.readouterr().out
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    cluster.history.clear()
    for told in ("version 1 is the champion again", "version 1 is the champion and has all traffic"):
        assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
        assert told in capsys.readouterr().out
        assert registry.aliases(store, NAME) == {"champion": "1"}
        assert cluster.objects[NAME]["metadata"]["annotations"]["routewright/model-version"] == "1"
    assert [state[0].split()[-1] for state in cluster.history] == ["100", "100"], "beside the other first, then alone"


def kill(*given: Any) -> None:
    raise Killed


def refuse(*given: Any) -> list[Check]:
    """A busy machine: this time the ratio is above the bound."""
    return [Check(name="p99 latency / champion", passed=False, value=2.0, bound=1.2, why="timed in turn")]


@pytest.mark.parametrize("mode", ["Knative", "Standard"])
@pytest.mark.parametrize("moment", ["in the canary", "before the aliases"])
@pytest.mark.parametrize("arguments", [["--run", "two"], ["--version", "2"]])
def test_a_rollout_that_has_begun_is_finished_without_new_gates(
    cluster: ApiServer, store, tmp_path, monkeypatch, mode: str, moment: str, arguments: list[str]
) -> None:
    same_run(monkeypatch)
    deploy = deploy_file(tmp_path, mode=mode)
    one, two = write_search_run(tmp_path / "one"), write_search_run(tmp_path / "two", "m2")
    assert call(monkeypatch, "promote", NAME, "--run", one, "--deploy", deploy) == 0
    with monkeypatch.context() as patched:
        patched.setattr(*((rollout, "_watch", kill) if moment == "in the canary" else (registry, "set_champion", kill)))
        assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 1
    assert registry.aliases(store, NAME) == {"champion": "1", "challenger": "2"}
    monkeypatch.setattr(promote, "judge", refuse)
    assert call(monkeypatch, "promote", NAME, *arguments, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    live = cluster.objects[NAME]
    assert live["metadata"]["annotations"]["routewright/model-version"] == "2"
    assert "canary" not in live["spec"]
    assert "canaryTrafficPercent" not in live["spec"]["predictor"]
    found = json.loads((tmp_path / ("two" if "--run" in arguments else "") / "promotion" / "decision.json").read_text())
    assert (found["outcome"], found["champion"]) == ("promoted", "1")
    assert [check["name"] for check in found["checks"]][:1] == ["quality − champion, lower end"]


def test_the_gates_that_count_are_those_against_the_present_champion(
    cluster: ApiServer, store, tmp_path, monkeypatch
) -> None:
    same_run(monkeypatch)
    deploy = deploy_file(tmp_path)
    one, two, three = (write_search_run(tmp_path / version, version) for version in ("m1", "m2", "m3"))
    for run in (one, two):
        assert call(monkeypatch, "promote", NAME, "--run", run, "--deploy", deploy) == 0
    assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
    assert call(monkeypatch, "promote", NAME, "--run", three, "--deploy", deploy) == 0
    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_watch", kill)
        assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 1
    monkeypatch.setattr(promote, "judge", refuse)
    assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "3"}
    assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
    assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 3, "not begun: judged like any other"
