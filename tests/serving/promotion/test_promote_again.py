"""Promotions that are repeated: after a refusal, after a canary that was taken back, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from api_server import ApiServer
from evaluated_run import write_search_run
from promotion_commands import call
from test_promote import NAME, deploy_file, same_run

from routewright import model_registry as registry


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
