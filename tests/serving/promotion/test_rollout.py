"""Canary, abort and rollback through the real clients, against an API server that plays the controller."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from api_server import ApiServer
from quick_deployment import deployment_with

from routewright.errors import BadInput, StageFailed
from serving.promotion.inference_service import inference_service, predictor
from serving.promotion.kserve_api import annotation, connect_cluster, deployed
from serving.promotion.live import canary_percent
from serving.promotion.rollback import restore
from serving.promotion.rollout import Rollout, roll_out

MODES = ["Knative", "Standard"]
DIGEST = "0123456789abcdef" * 4


def promote(api: Any, mode: str, version: str, **canary: Any) -> Rollout:
    deployment = deployment_with(mode, **canary)
    spec = predictor(deployment, "search-router", version, DIGEST, f"s3://b/{version}")
    return roll_out(api, deployment, inference_service(deployment, spec), lambda line: None)


def serving(api: Any, mode: str) -> tuple[str, int | None]:
    live = deployed(api, deployment_with(mode))
    assert live is not None
    uri = next(e["value"] for e in live["spec"]["predictor"]["containers"][0]["env"] if e["name"] == "STORAGE_URI")
    return uri, canary_percent(live, mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_first_version_takes_all_traffic_and_the_second_in_steps(cluster: ApiServer, api: Any, mode: str) -> None:
    assert promote(api, mode, "1").outcome == "deployed"
    found = promote(api, mode, "2")
    assert found.outcome == "rolled-out"
    assert [step.percent for step in found.steps] == [5, 25, 100]
    assert serving(api, mode) == ("s3://b/2", None)
    shares = [dict(part.split() for part in state) for state in cluster.history]
    assert [share.get("s3://b/2", "0") for share in shares] == ["0", "5", "25", "100", "100"]
    assert [share.get("s3://b/1", "0") for share in shares][:3] == ["100", "95", "75"]
    writes = len(cluster.writes)
    assert promote(api, mode, "2").outcome == "unchanged"
    assert len(cluster.writes) == writes, "promoting twice changes nothing"


@pytest.mark.parametrize("mode", MODES)
def test_a_rollback_restores_the_previous_version_and_can_be_repeated(cluster: ApiServer, api: Any, mode: str) -> None:
    promote(api, mode, "1")
    before = deployed(api, deployment_with(mode))
    promote(api, mode, "2")
    cluster.history.clear()
    assert restore(api, deployment_with(mode), lambda line: None) == "1"
    assert serving(api, mode) == ("s3://b/1", None)
    for state in cluster.history:
        assert "s3://b/1 100" in state, "all traffic is back at once and stays"
    after = deployed(api, deployment_with(mode))
    assert before is not None
    assert after is not None
    assert annotation(after, "routewright/predictor") == annotation(before, "routewright/predictor")
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    assert annotation(after, "routewright/rolled-back-from") == "2"
    writes = len(cluster.writes)
    assert restore(api, deployment_with(mode), lambda line: None) == ""
    assert len(cluster.writes) == writes
    assert promote(api, mode, "2").outcome == "rolled-out"


@pytest.mark.parametrize("mode", MODES)
def test_a_version_that_never_becomes_ready_is_taken_back(cluster: ApiServer, api: Any, mode: str) -> None:
    promote(api, mode, "1")
    cluster.broken.add("s3://b/2")
    found = promote(api, mode, "2")
    assert (found.outcome, found.gate) == ("aborted", False)
    assert "not ready" in found.reason
    assert serving(api, mode) == ("s3://b/1", None)
    assert cluster.history[-1] == ("s3://b/1 100",)
    cluster.broken.clear()
    assert promote(api, mode, "2").outcome == "rolled-out"


def test_a_model_that_cannot_be_loaded_is_not_waited_for(cluster: ApiServer, api: Any) -> None:
    promote(api, "Knative", "1")
    cluster.broken.add("s3://b/2")
    cluster.load_error = "digest does not match"
    found = promote(api, "Knative", "2", ready_s=60)
    assert found.outcome == "aborted"
    assert found.reason == "the new version cannot be loaded (BlockedByFailedLoad: digest does not match)"


@pytest.mark.parametrize("mode", MODES)
def test_a_first_version_that_never_becomes_ready_has_no_way_back(cluster: ApiServer, api: Any, mode: str) -> None:
    cluster.broken.add("s3://b/1")
    found = promote(api, mode, "1")
    assert found.outcome == "aborted"
    assert "no earlier version" in found.reason
    with pytest.raises(BadInput, match="no previous version to go back to"):
        restore(api, deployment_with(mode), lambda line: None)


class Killed(Exception):
    pass


class KilledAfter:
    """An API client whose process dies after the n-th write has reached the server."""

    def __init__(self, api: Any, writes: int) -> None:
        self._api, self._left = api, writes

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)
        if not name.startswith(("create", "replace")):
            return method

        def write(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            self._left -= 1
            if self._left == 0:
                raise Killed
            return answer

        return write


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writes", range(1, 5))
def test_a_killed_rollout_is_finished_by_the_next(cluster: ApiServer, api: Any, mode: str, writes: int) -> None:
    promote(api, mode, "1")
    with pytest.raises(Killed):
        promote(KilledAfter(api, writes), mode, "2")
    found = promote(api, mode, "2")
    assert found.outcome == ("unchanged" if writes == 4 else "rolled-out")
    assert serving(api, mode) == ("s3://b/2", None)
    assert restore(api, deployment_with(mode), lambda line: None) == "1"


@pytest.mark.parametrize(("mode", "writes"), [("Knative", 1), ("Knative", 2), ("Standard", 1)])
def test_a_killed_rollback_is_finished_by_the_next(cluster: ApiServer, api: Any, mode: str, writes: int) -> None:
    promote(api, mode, "1")
    promote(api, mode, "2")
    with pytest.raises(Killed):
        restore(KilledAfter(api, writes), deployment_with(mode), lambda line: None)
    if mode == "Knative":
        with pytest.raises(BadInput, match="a rollback is not finished"):
            promote(api, mode, "3")
    assert restore(api, deployment_with(mode), lambda line: None) == "1"
    assert serving(api, mode) == ("s3://b/1", None)


@pytest.mark.parametrize("mode", MODES)
def test_another_versions_rollout_is_not_overrun_but_can_be_taken_back(cluster: ApiServer, api: Any, mode: str) -> None:
    promote(api, mode, "1")
    with pytest.raises(Killed):
        promote(KilledAfter(api, 1), mode, "2")
    with pytest.raises(BadInput, match="another version is being rolled out"):
        promote(api, mode, "3")
    restore(api, deployment_with(mode), lambda line: None)
    assert serving(api, mode) == ("s3://b/1", None)
    assert promote(api, mode, "3").outcome == "rolled-out"


def test_conflicting_writes_are_done_again(cluster: ApiServer, api: Any) -> None:
    promote(api, "Knative", "1")
    cluster.touch = 3
    assert promote(api, "Knative", "2").outcome == "rolled-out"
    cluster.touch = 100
    with pytest.raises(StageFailed, match="changed by others 5 times"):
        promote(api, "Knative", "3")


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (403, BadInput, r"the account may not create inferenceservices in namespace models \(403"),
        (404, BadInput, "no such namespace, or KServe is not installed"),
        (422, StageFailed, "refused to create search-router: as the test wants it"),
        (503, BadInput, "the API server answers 503"),
        (409, StageFailed, "created by another promotion"),
    ],
)
def test_what_the_server_refuses(cluster: ApiServer, api: Any, status: int, kind: type[Exception], message: str) -> None:
    cluster.failures = [status]
    with pytest.raises(kind, match=message) as caught:
        promote(api, "Knative", "1")
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda made: made["spec"]["predictor"]["containers"][0].update(imagePullPolice="Always"), "'imagePullPolice' was"),
        (
            lambda made: made["spec"]["predictor"]["containers"][0]["env"].append(
                {"name": "STORAGE_URI", "value": "s3://x"}
            ),
            r"\.spec\.predictor\.containers\[0\]\.env: \('STORAGE_URI',\) is there twice",
        ),
        (lambda made: made.update(kind="InferenceGraph"), "kind: 'InferenceGraph' is not 'InferenceService'"),
        (lambda made: made["metadata"].update(namespace="other"), "metadata.namespace"),
        (lambda made: made["metadata"]["labels"].update(bad="with blanks"), "metadata.labels: 'with blanks'"),
    ],
)
def test_a_faulty_object_is_refused_by_name(cluster: ApiServer, api: Any, fault: Any, message: str) -> None:
    deployment = deployment_with()
    made = inference_service(deployment, predictor(deployment, "search-router", "1", DIGEST, "s3://b/1"))
    fault(made)
    with pytest.raises(StageFailed, match=rf"refused to create search-router: InferenceService is invalid: .*{message}"):
        roll_out(api, deployment, made, lambda line: None)
    assert cluster.writes == []


def test_an_account_without_its_token(cluster: ApiServer) -> None:
    from kubernetes import client

    configuration = client.Configuration(host=cluster.url)
    with pytest.raises(BadInput, match=r"may not get inferenceservices in namespace models \(401 Unauthorized\)"):
        promote(client.CustomObjectsApi(client.ApiClient(configuration)), "Knative", "1")


def test_a_server_that_is_down() -> None:
    from kubernetes import client

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        configuration = client.Configuration(host=f"http://127.0.0.1:{listener.getsockname()[1]}")
        configuration.retries = False
        api = client.CustomObjectsApi(client.ApiClient(configuration))
        with pytest.raises(BadInput, match="Kubernetes: no API server answers"):
            promote(api, "Knative", "1")
        with pytest.raises(StageFailed, match="start the rollback again"):
            restore(api, deployment_with(), lambda line: None)


def test_a_server_that_goes_down_in_a_rollout_leaves_it_to_be_continued(cluster: ApiServer, api: Any) -> None:
    promote(api, "Knative", "1")

    def down_at_25(line: str) -> None:
        if line.startswith("25 %") and "waiting" in line:
            cluster.failures = [503] * 100

    deployment = deployment_with()
    spec = predictor(deployment, "search-router", "2", DIGEST, "s3://b/2")
    with pytest.raises(StageFailed, match="the rollout stands at its last step, start it again"):
        roll_out(api, deployment, inference_service(deployment, spec), down_at_25)
    cluster.failures = []
    found = promote(api, "Knative", "2")
    assert [step.percent for step in found.steps] == [25, 100]


def test_a_changed_mode_is_refused(cluster: ApiServer, api: Any) -> None:
    promote(api, "Knative", "1")
    with pytest.raises(
        BadInput, match=r"runs with serving\.kserve\.io/deploymentMode Knative, the deployment file says Standard"
    ):
        promote(api, "Standard", "2")


def test_nothing_deployed_and_no_cluster(
    cluster: ApiServer, api: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with pytest.raises(BadInput, match="not deployed in namespace models"):
        restore(api, deployment_with(), lambda line: None)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(BadInput, match="KUBECONFIG: no cluster is configured"):
        connect_cluster()
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BadInput, match="KUBECONFIG: no cluster is configured"):
        connect_cluster()
