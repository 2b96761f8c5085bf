"""``routewright rollback`` beside what else is going on: a running promotion, a waiting challenger, a service that lags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from evaluated_run import write_search_run
from promotion_commands import call
from test_promote import NAME, deploy_file, same_run

from routewright import model_registry as registry
from routewright.evaluation.gates import GateBounds
from serving.promotion import rollout
from serving.promotion.deployment import load_deployment
from serving.promotion.promote import candidate_of_run, roll_back
from serving.promotion.promote import promote as decide

MODES = ["Knative", "Standard"]


class Killed(Exception):
    pass


def kill(*given: Any) -> None:
    raise Killed


@pytest.fixture(params=MODES)
def deploy(request: Any, cluster: ApiServer, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The deployment file of version 2, the champion after version 1."""
    same_run(monkeypatch)
    file = deploy_file(tmp_path, mode=request.param)
    for version in ("m1", "m2"):
        run = write_search_run(tmp_path / version, version)
        assert call(monkeypatch, "promote", NAME, "--run", run, "--deploy", file) == 0
    return file


def leave_challenger(tmp_path: Path, version: str) -> None:
    """What the pipeline retrain does at its end."""
    made = candidate_of_run(NAME, write_search_run(tmp_path / version, version))
    assert decide(made, None, GateBounds(), tmp_path / "stage", print, challenger=True).outcome == "challenger"


def served(cluster: ApiServer) -> str:
    live = cluster.objects[NAME]
    assert "canary" not in live["spec"]
    assert "canaryTrafficPercent" not in live["spec"]["predictor"]
    return str(live["metadata"]["annotations"]["routewright/model-version"])


def test_a_rollback_in_a_running_promotion_is_the_last_word(
    cluster: ApiServer, store, deploy, tmp_path, monkeypatch, capsys
) -> None:
    known = rollout._watch

    def take_back_at_the_end(*given: Any) -> Any:
        found = known(*given)
        if found.percent == 100:
            told = roll_back(NAME, load_deployment(deploy), print)
            assert told == "version 2 is the champion and has all traffic"
        return found

    monkeypatch.setattr(rollout, "_watch", take_back_at_the_end)
    assert call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / "m3", "m3"), "--deploy", deploy) == 1
    assert "rolled back or out by someone else meanwhile" in capsys.readouterr().err
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    assert served(cluster) == "2"


def test_a_challenger_that_waits_is_not_taken_for_a_rollout(
    cluster: ApiServer, store, deploy, tmp_path, monkeypatch, capsys
) -> None:
    three = write_search_run(tmp_path / "m3", "m3")
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "_ready", lambda spec: spec["labels"]["routewright/model-version"] != "3")
        assert call(monkeypatch, "promote", NAME, "--run", three, "--deploy", deploy) == 1
    leave_challenger(tmp_path, "m4")
    for told in ("version 1 is the champion again", "version 1 is the champion and has all traffic"):
        assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
        assert told in capsys.readouterr().out
        assert registry.aliases(store, NAME) == {"champion": "1", "challenger": "4"}
        assert served(cluster) == "1"


def test_closing_a_canary_leaves_the_challenger_of_another_version(
    cluster: ApiServer, store, deploy, tmp_path, monkeypatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_watch", kill)
        call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / "m3", "m3"), "--deploy", deploy)
    leave_challenger(tmp_path, "m4")
    assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1", "challenger": "4"}
    assert served(cluster) == "2"


@pytest.mark.parametrize("deploy", ["Knative"], indirect=True)
def test_a_rollback_killed_before_the_aliases_goes_no_further_when_repeated(
    cluster: ApiServer, store, deploy, tmp_path, monkeypatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_watch", kill)
        call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / "m3", "m3"), "--deploy", deploy)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "drop_challenger", kill)
        assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 1
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1", "challenger": "3"}
    assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    assert served(cluster) == "2"


def test_a_rollback_killed_between_its_aliases_is_finished_by_the_next(
    cluster: ApiServer, store, deploy, monkeypatch
) -> None:
    import mlflow

    with monkeypatch.context() as patched:
        patched.setattr(mlflow.MlflowClient, "delete_registered_model_alias", kill)
        assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 1
    assert registry.aliases(store, NAME) == {"champion": "1", "previous": "1"}
    writes = len(cluster.writes)
    assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "1"}
    assert len(cluster.writes) == writes
    assert served(cluster) == "1"


def test_a_rollback_of_a_service_that_lags_behind_the_registry_ends_on_one_version(
    cluster: ApiServer, store, deploy, tmp_path, monkeypatch, capsys
) -> None:
    assert call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / "m3", "m3")) == 0
    assert registry.aliases(store, NAME) == {"champion": "3", "previous": "2"}
    assert served(cluster) == "2"
    for told in ("version 1 is the champion again", "version 1 is the champion and has all traffic"):
        assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
        assert told in capsys.readouterr().out
        assert registry.aliases(store, NAME) == {"champion": "1"}
        assert served(cluster) == "1"
