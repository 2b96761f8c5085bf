"""Rollouts that someone else takes back while they are under way: they stop, and leave the cluster as it then is."""

from __future__ import annotations

from typing import Any

import pytest
from api_server import ApiServer
from quick_deployment import deployment_with
from test_rollout import DIGEST, MODES, Killed, KilledAfter, promote, serving

from routewright.errors import StageFailed
from serving.promotion import rollout
from serving.promotion.inference_service import inference_service, predictor
from serving.promotion.rollback import restore
from serving.promotion.rollout import roll_out

MOMENTS = [f"{share} % of the traffic: {what}" for share in (5, 100) for what in ("waiting until it is ready", "ready")]


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rollout_that_was_taken_back_meanwhile_touches_nothing(
    cluster: ApiServer, api: Any, mode: str, moment: str
) -> None:
    promote(api, mode, "1")
    promote(api, mode, "2")
    deployment = deployment_with(mode)
    writes = []

    def say(line: str) -> None:
        if line == moment:
            assert restore(api, deployment, quiet) == "2"
            writes.append(len(cluster.writes))

    spec = predictor(deployment, "search-router", "3", DIGEST, "s3://b/3")
    with pytest.raises(StageFailed, match="by someone else meanwhile"):
        roll_out(api, deployment, inference_service(deployment, spec), say)
    assert serving(api, mode) == ("s3://b/2", None)
    assert writes == [len(cluster.writes)]


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_undoes_no_more_than_its_own_rollout(
    cluster: ApiServer, api: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    promote(api, mode, "1")
    promote(api, mode, "2")

    def worse_and_taken_back(*given: Any) -> None:
        restore(api, deployment_with(mode), quiet)
        raise rollout._Worse("at 5 %: error rate 40.0%, champion's 0.0%")

    monkeypatch.setattr(rollout, "_watch", worse_and_taken_back)
    with pytest.raises(StageFailed, match="by someone else meanwhile"):
        promote(api, mode, "3")
    assert serving(api, mode) == ("s3://b/2", None)


@pytest.mark.parametrize("mode", MODES)
def test_of_two_rollouts_that_start_at_once_one_stops(
    cluster: ApiServer, api: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    promote(api, mode, "1")
    known = rollout._served

    def overtaken(*given: Any) -> Any:
        found = known(*given)
        with monkeypatch.context() as patched:
            patched.setattr(rollout, "_served", known)
            with pytest.raises(Killed):
                promote(KilledAfter(api, 1), mode, "2")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_served", overtaken)
        with pytest.raises(StageFailed, match="by someone else meanwhile"):
            promote(api, mode, "3")
    assert promote(api, mode, "2").outcome == "rolled-out"


@pytest.mark.parametrize("mode", MODES)
def test_a_version_without_a_canary_that_was_replaced_meanwhile_is_not_called_deployed(
    cluster: ApiServer, api: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    cluster.broken.add("s3://b/1")
    promote(api, mode, "1")
    known = rollout.replace_predictor

    def overtaken(*given: Any) -> Any:
        found = known(*given)
        with monkeypatch.context() as patched:
            patched.setattr(rollout, "replace_predictor", known)
            promote(api, mode, "3")
        return found

    monkeypatch.setattr(rollout, "replace_predictor", overtaken)
    cluster.broken.add("s3://b/2")
    with pytest.raises(StageFailed, match="by someone else meanwhile"):
        promote(api, mode, "2")
    assert serving(api, mode) == ("s3://b/3", None)
