"""Rollouts and rollbacks from states that a good day does not leave: taken back, killed, never ready, other settings."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import ApiServer
from quick_deployment import deployment_with
from test_rollout import DIGEST, MODES, Killed, KilledAfter, promote, serving

from routewright.errors import StageFailed
from serving.promotion import rollout
from serving.promotion.inference_service import inference_service, predictor
from serving.promotion.kserve_api import Unreachable, change, deployed
from serving.promotion.rollback import restore
from serving.promotion.rollout import Rollout, roll_out


def rollback(api: Any, mode: str) -> str:
    return restore(api, deployment_with(mode), lambda line: None)


def stop(*given: Any) -> None:
    raise rollout._Worse("at 5 %: error rate 40.0%, champion's 0.0%")


def kill(*given: Any) -> None:
    raise Killed


@pytest.mark.parametrize("mode", MODES)
def test_a_canary_of_the_previous_version_is_taken_back_like_any_other(
    cluster: ApiServer, api: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    promote(api, mode, "1")
    promote(api, mode, "2")
    cluster.history.clear()
    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_watch", stop)
        assert promote(api, mode, "1").outcome == "aborted"
    assert serving(api, mode) == ("s3://b/2", None)
    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_watch", kill)
        with pytest.raises(Killed):
            promote(api, mode, "1")
    assert rollback(api, mode) == "2"
    assert serving(api, mode) == ("s3://b/2", None)
    shares = [dict(part.split() for part in state) for state in cluster.history]
    assert max(int(share.get("s3://b/1", 0)) for share in shares) == 5
    assert promote(api, mode, "1").outcome == "rolled-out"


def test_a_promotion_of_what_a_killed_rollback_went_back_to_is_a_rollout(
    cluster: ApiServer, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(api, "Standard", "1")
    promote(api, "Standard", "2")
    with pytest.raises(Killed):
        restore(KilledAfter(api, 1), deployment_with("Standard"), lambda line: None)
    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_watch", stop)
        assert promote(api, "Standard", "1").outcome == "aborted"
    assert serving(api, "Standard") == ("s3://b/2", None)
    assert rollback(api, "Standard") == "1"


def test_a_killed_rollback_to_a_predictor_without_a_name_is_finished_by_the_next(cluster: ApiServer, api: Any) -> None:
    deployment = deployment_with("Standard")
    applied = inference_service(deployment, predictor(deployment, "search-router", "1", DIGEST, "s3://b/1"))
    del applied["spec"]["predictor"]["name"]
    roll_out(api, deployment, applied, lambda line: None)
    promote(api, "Standard", "2")
    with pytest.raises(Killed):
        restore(KilledAfter(api, 1), deployment, lambda line: None)
    cluster.history.clear()
    assert rollback(api, "Standard") == "1"
    assert serving(api, "Standard") == ("s3://b/1", None)
    assert set(cluster.history) == {("s3://b/1 100",)}
    assert rollback(api, "Standard") == ""


@pytest.mark.parametrize("mode", MODES)
def test_other_settings_of_the_same_model_are_rolled_out_and_back(cluster: ApiServer, api: Any, mode: str) -> None:
    promote(api, mode, "1")
    deployment = deployment_with(mode).model_copy(update={"memory": "4Gi"})
    changed = inference_service(deployment, predictor(deployment, "search-router", "1", DIGEST, "s3://b/1"))

    def memory() -> str:
        live = deployed(api, deployment)
        assert live is not None
        return str(live["spec"]["predictor"]["containers"][0]["resources"]["limits"]["memory"])

    with pytest.raises(Killed):
        roll_out(KilledAfter(api, 1), deployment, changed, lambda line: None)
    found = roll_out(api, deployment, changed, lambda line: None)
    assert (found.outcome, [step.percent for step in found.steps]) == ("rolled-out", [5, 25, 100])
    assert memory() == "4Gi"
    assert roll_out(api, deployment, changed, lambda line: None).outcome == "unchanged"
    assert rollback(api, mode) == "1"
    assert memory() == "2Gi"
    assert rollback(api, mode) == ""


def test_two_predictors_of_one_name_are_refused(cluster: ApiServer, api: Any) -> None:
    promote(api, "Standard", "1")
    live = deployed(api, deployment_with("Standard"))
    assert live is not None
    name = live["spec"]["predictor"]["name"]
    alone = {field: value for field, value in live["spec"]["predictor"].items() if not field.endswith("Replicas")}
    canary = {"predictor": alone, "trafficPercent": 5}
    with pytest.raises(StageFailed, match=f"refused to update search-router: .*name '{name}' is there twice"):
        change(api, deployment_with("Standard"), lambda found: found["spec"].update(canary=[canary]), live)


@pytest.mark.parametrize("mode", MODES)
def test_after_a_first_version_that_never_served_the_next_takes_all_traffic(cluster: ApiServer, api: Any, mode: str) -> None:
    cluster.broken |= {"s3://b/1", "s3://b/2"}
    assert promote(api, mode, "1").outcome == "aborted"
    found = promote(api, mode, "2")
    assert found.outcome == "aborted"
    assert "no earlier version" in found.reason
    found = promote(api, mode, "3")
    assert (found.outcome, found.steps) == ("deployed", [])
    assert "version 2 is not ready, so there was no canary" in found.reason
    assert serving(api, mode) == ("s3://b/3", None)
    assert cluster.history[-1] == ("s3://b/3 100",)
    writes = len(cluster.writes)
    assert rollback(api, mode) == "", "what never served is no way back"
    assert promote(api, mode, "3").outcome == "unchanged"
    assert len(cluster.writes) == writes
    found = promote(api, mode, "4")
    assert [step.percent for step in found.steps] == [5, 25, 100]
    assert rollback(api, mode) == "3"


def test_a_version_that_is_not_ready_any_more_is_replaced_at_once(cluster: ApiServer, api: Any) -> None:
    promote(api, "Standard", "1")
    cluster.broken.add("s3://b/1")
    del cluster.objects["search-router"]["status"]["observedGeneration"]  # the controller looks again
    found: Rollout = promote(api, "Standard", "2")
    assert (found.outcome, found.steps) == ("deployed", [])
    assert serving(api, "Standard") == ("s3://b/2", None)


@pytest.mark.parametrize("mode", MODES)
def test_a_version_that_is_not_ready_any_more_is_rolled_back(cluster: ApiServer, api: Any, mode: str) -> None:
    promote(api, mode, "1")
    promote(api, mode, "2")
    cluster.broken.add("s3://b/2")
    del cluster.objects["search-router"]["status"]["observedGeneration"]
    assert rollback(api, mode) == "1"
    assert serving(api, mode) == ("s3://b/1", None)
    assert cluster.history[-1] == ("s3://b/1 100",)


def test_a_rollout_out_of_a_version_that_never_served_is_freed_by_the_next(cluster: ApiServer, api: Any) -> None:
    # What an older release left: at 0 % of the traffic for ever, as there is no revision to have the rest.
    cluster.broken.add("s3://b/1")
    promote(api, "Knative", "1")
    cluster.objects["search-router"]["spec"]["predictor"]["canaryTrafficPercent"] = 0
    assert promote(api, "Knative", "2").outcome == "deployed"
    assert serving(api, "Knative") == ("s3://b/2", None)


def test_a_first_version_that_is_ready_late_is_the_champion_of_a_canary(
    cluster: ApiServer, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        promote(KilledAfter(api, 1), "Knative", "1")
    late, act, compared = iter([True]), cluster.act, []
    monkeypatch.setattr(cluster, "act", lambda found: None if next(late, False) else act(found))
    monkeypatch.setattr(rollout, "reader", lambda canary, *revisions: compared.append(revisions))
    assert promote(api, "Knative", "2").outcome == "rolled-out"
    assert compared == [("search-router-predictor-00002", "search-router-predictor-00001")] * 3


def test_a_server_that_goes_down_after_the_first_deployment_is_one_sentence(
    cluster: ApiServer, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*given: Any) -> None:
        raise Unreachable("the API server answers 503")

    monkeypatch.setattr(rollout, "wait", down)
    with pytest.raises(StageFailed, match="the API server answers 503; start the promotion again to go on"):
        promote(api, "Knative", "1")
