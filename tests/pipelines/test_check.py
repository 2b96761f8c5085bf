"""routewright check: one finding for everything a run needs, looked up with the real clients on servers of the test."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp_api import KfpApi
from stand_in import StandIn, StandInHandler
from typer.testing import CliRunner

from pipelines import check_services, plan
from pipelines.cli import pipelines_app
from routewright.errors import BadInput, StageFailed

PLACEMENT = """\
service_account: trainer
promotion_account: promoter
claims:
  work: {size: 100Gi, storage_class: fast, access_modes: [ReadWriteMany]}
defaults:
  work: {claim: work, mount: /work}
  config_maps:
    - {name: settings, env: {MLFLOW_TRACKING_URI: mlflow}}
  secrets:
    - {name: store, env: {AWS_ACCESS_KEY_ID: access, AWS_SECRET_ACCESS_KEY: secret}}
    - {name: hub, env: {HF_TOKEN: token}, optional: true}
  image_pull_secrets: [registry]
stages:
  sft: {gpu: {count: 2}, node_selector: {pool: gpu}, tolerations: [{key: nvidia.com/gpu, operator: Exists}]}
  rl: {gpu: {count: 4}, node_selector: {pool: gpu}, tolerations: [{key: nvidia.com/gpu, operator: Exists}]}
"""
NAMESPACE, CORE = "team", "/api/v1/namespaces/team"
QUOTA = f"{CORE}/resourcequotas"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
compiled_once = functools.cache(plan.compiled)


class Cluster(StandIn):
    """A Kubernetes API server that is only read: ``objects`` by path, 403 if in ``forbidden``, 401 when ``expired``."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.forbidden: set[str] = set()
        self.expired = False
        server = self

        class Handler(StandInHandler):
            def do_GET(self) -> None:
                assert self.headers["Authorization"] == "Bearer kube-secret"
                path = self.path.partition("?")[0]
                if server.expired:
                    self.send(401, {"kind": "Status", "message": "Unauthorized", "code": 401})
                elif path in server.forbidden:
                    self.send(403, {"kind": "Status", "message": f"cannot get {path}", "code": 403})
                elif path in server.objects:
                    self.send(200, server.objects[path])
                else:
                    self.send(404, {"kind": "Status", "message": "not found", "code": 404})

        super().__init__(Handler)

    def kubeconfig(self, path: Path) -> Path:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {"token": "kube-secret"}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(config))
        return path


def volume_job(created: str, ended: str | None) -> dict[str, Any]:
    """The Job of claim `work`."""
    conditions = [{"type": ended, "status": "True"}] if ended else []
    name = {"Complete": "work-good", "Failed": "work-bad"}.get(ended or "", "work-new")
    labels = {"routewright/work-volume": "work"}
    return {"metadata": {"name": name, "labels": labels, "creationTimestamp": created}, "status": {"conditions": conditions}}


def everything() -> dict[str, Any]:
    """A namespace with all that PLACEMENT asks for."""

    def object_(name: str, **fields: Any) -> dict[str, Any]:
        return {"apiVersion": "v1", "metadata": {"name": name}, **fields}

    def node(name: str, gpus: str, **labels: str) -> dict[str, Any]:
        taint = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
        return {
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": [taint] if gpus != "0" else []},
            "status": {"allocatable": {"nvidia.com/gpu": gpus}},
        }

    claim = {
        "storageClassName": "fast", "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "200Gi"}}
    }  # fmt: skip
    quota = {"hard": {"requests.nvidia.com/gpu": "8", "pods": "9"}, "used": {"requests.nvidia.com/gpu": "4"}}
    return {
        CORE: object_(NAMESPACE),
        f"{CORE}/serviceaccounts/trainer": object_("trainer"),
        f"{CORE}/serviceaccounts/promoter": object_("promoter"),
        f"{CORE}/secrets/store": object_("store", data={"access": "aGlkZGVu", "secret": "aGlkZGVu"}),
        f"{CORE}/secrets/hub": object_("hub", data={"token": "aGlkZGVu"}),
        f"{CORE}/secrets/registry": object_("registry", data={".dockerconfigjson": "e30="}),
        f"{CORE}/configmaps/settings": object_("settings", data={"mlflow": "http://mlflow:5000"}),
        f"{CORE}/persistentvolumeclaims/work": object_("work", spec=claim, status={"phase": "Bound"}),
        "/apis/storage.k8s.io/v1/storageclasses/fast": object_("fast", provisioner="x", volumeBindingMode="Immediate"),
        JOBS: {"items": [volume_job("2026-01-02T00:00:00Z", "Complete")]},
        QUOTA: {"items": [object_("gpus", spec={}, status=quota)]},
        "/api/v1/nodes": {"items": [node("a", "4", pool="gpu"), node("b", "2", pool="gpu"), node("c", "0", pool="cpu")]},
    }


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    server = Cluster()
    server.objects = everything()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig.yaml")))
    yield server
    server.close()


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("placement") / "pools.yaml"
    file.write_text(PLACEMENT)
    return file


@pytest.fixture
def kfp(monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpApi]:
    server = KfpApi()
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    monkeypatch.setenv("KF_PIPELINES_TOKEN", server.token)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plan, "compiled", compiled_once)
    yield server
    server.close()


def check(placement: Path, *more: str, pipeline: str = "search-router") -> tuple[int, dict[str, str]]:
    """The exit code and {what was looked at: "✓ found; mend"} as printed."""
    arguments = ["check", pipeline, "--placement", str(placement), "--namespace", NAMESPACE, *more]
    result = CliRunner().invoke(pipelines_app, arguments)
    if isinstance(result.exception, BadInput):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, StageFailed), result.exception
    findings = [line.partition(": ") for line in result.stdout.splitlines() if line[0] in "✓✗?"]
    return int(result.exception is not None), {what[2:]: f"{what[0]} {found}" for what, _, found in findings}


def without_image(findings: dict[str, str]) -> dict[str, str]:
    """The compiled image is a placeholder in a checkout."""
    return {what: found for what, found in findings.items() if not what.startswith("image ")}


def test_a_cluster_that_has_everything(cluster: Cluster, kfp: KfpApi, placement: Path) -> None:
    failed, findings = check(placement)
    assert failed, "for the image, which a checkout does not name"
    assert findings.pop(next(what for what in findings if what.startswith("image "))).startswith("✗ is a placeholder; build")
    assert findings.pop("MLflow").startswith("✗ http://mlflow:5000 does not answer (ConnectError); from outside"), (
        "the address is in a config map"
    )
    assert findings.pop("object store") == "? not checked, no address; name it with --store s3://bucket/prefix"
    assert findings == {
        "KFP endpoint": "✓ answers and takes the token",
        "namespace team": "✓ is there",
        "service account trainer": "✓ is there",
        "service account promoter": "✓ is there",
        "configmap settings": "✓ is there with mlflow",
        "secret hub": "✓ is there with token",
        "secret registry": "✓ is there with .dockerconfigjson",
        "secret store": "✓ is there with access, secret",
        "storage class fast": "✓ is there",
        "claim work": "✓ 200Gi, class fast",
        "volume work": "✓ can be written to",
        "quota of nvidia.com/gpu": "✓ 4 left, 4 asked",
        "nodes for rl": "✓ 1 with 4 or more nvidia.com/gpu",
        "nodes for sft": "✓ 2 with 2 or more nvidia.com/gpu",
    }


@pytest.mark.parametrize(
    ("path", "what", "sentence"),
    [
        (CORE, "namespace team", "✗ is not there; kubectl create namespace team"),
        (f"{CORE}/serviceaccounts/trainer", "service account trainer",
         "✗ is not there; kubectl -n team create serviceaccount trainer"),
        (f"{CORE}/serviceaccounts/promoter", "service account promoter",
         "✗ is not there; kubectl -n team create serviceaccount promoter"),
        (f"{CORE}/secrets/store", "secret store",
         "✗ namespace team has none of that name; kubectl -n team create secret generic store "
         "--from-literal=access=… --from-literal=secret=…"),
        (f"{CORE}/secrets/hub", "secret hub", "? namespace team has none of that name, and stages start without it"),
        (f"{CORE}/secrets/registry", "secret registry",
         "✗ namespace team has none of that name; kubectl -n team create secret docker-registry registry "
         "--docker-server=… --docker-username=… --docker-password=…"),
        (f"{CORE}/configmaps/settings", "configmap settings",
         "✗ namespace team has none of that name; kubectl -n team create configmap settings --from-literal=mlflow=…"),
        (f"{CORE}/persistentvolumeclaims/work", "claim work",
         "✗ namespace team has none of that name; routewright compile --placement … writes gitops/claims.yaml, "
         "kubectl -n team apply -f it"),
        ("/apis/storage.k8s.io/v1/storageclasses/fast", "storage class fast",
         "✗ the cluster has none of that name; "
         "name one that kubectl get storageclass lists under claims.work.storage_class"),
        ("/api/v1/nodes", "GPU nodes", "? not checked, the API server lists no nodes"),
    ],
)  # fmt: skip
def test_what_is_missing_is_a_finding_with_its_mend(
    cluster: Cluster, kfp: KfpApi, placement: Path, path: str, what: str, sentence: str
) -> None:
    del cluster.objects[path]
    failed, findings = check(placement)
    assert failed
    assert findings[what] == sentence
    others = {name: found for name, found in without_image(findings).items() if name not in (what, "MLflow", "object store")}
    assert {found[0] for found in others.values()} == {"✓"}


@pytest.mark.parametrize(
    ("path", "keys", "value", "what", "sentence"),
    [
        (f"{CORE}/secrets/store", ["data"], {"access": "aGlkZGVu"}, "secret store", "✗ has no key secret; kubectl -n team"),
        (f"{CORE}/persistentvolumeclaims/work", ["spec", "storageClassName"], "slow", "claim work",
         "✗ has storage class slow, expected fast"),
        (f"{CORE}/persistentvolumeclaims/work", ["spec", "resources", "requests", "storage"], "50Gi", "claim work",
         "✗ holds 50Gi, expected 100Gi"),
        (f"{CORE}/persistentvolumeclaims/work", ["spec", "accessModes"], ["ReadWriteOnce"], "claim work",
         "✗ does not allow ReadWriteMany"),
        (f"{CORE}/persistentvolumeclaims/work", ["status", "phase"], "Pending", "claim work", "✗ is Pending; kubectl"),
        (QUOTA, ["items", 0, "status", "used"], {"requests.nvidia.com/gpu": "5"}, "quota of nvidia.com/gpu",
         "✗ 3 left, stage rl asks for 4; wait"),
        (JOBS, ["items"], [], "volume work", "? not tried, no Job of gitops/claims.yaml is there"),
        (JOBS, ["items", 0, "metadata", "labels"], {"routewright/work-volume": "other"}, "volume work", "? not tried, no"),
        (JOBS, ["items"], [volume_job("2026-01-02T00:00:00Z", "Complete"), volume_job("2026-01-03T00:00:00Z", "Failed")],
         "volume work", "✗ cannot be written to by group 10001; chown 10001:10001 its folder there, or see "
         "kubectl -n team describe job work-bad"),
        (JOBS, ["items", 0], volume_job("2026-01-02T00:00:00Z", None), "volume work",
         "? not tried yet, job work-new has not ended"),
        (QUOTA, ["items"], [], "quota of nvidia.com/gpu", "✓ none set"),
        ("/api/v1/nodes", ["items", 0, "status", "allocatable"], {"nvidia.com/gpu": "3"}, "nodes for rl",
         "✗ 1 with 4 × nvidia.com/gpu asked, those with pool=gpu have 3, 2; label"),
        ("/api/v1/nodes", ["items", 0, "spec", "taints"], [{"key": "mine", "effect": "NoSchedule"}], "nodes for rl",
         "✗ 1 with 4 × nvidia.com/gpu asked, those with pool=gpu have 2;"),
        ("/api/v1/nodes", ["items", 0, "spec", "unschedulable"], True, "nodes for rl", "✗ 1 with 4"),
    ],
)  # fmt: skip
def test_what_differs_is_a_finding(
    cluster: Cluster, kfp: KfpApi, placement: Path, path: str, keys: list[Any], value: Any, what: str, sentence: str
) -> None:
    place = cluster.objects[path]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    assert check(placement)[1][what].startswith(sentence)


def test_a_claim_that_binds_with_its_first_pod_may_be_pending(cluster: Cluster, kfp: KfpApi, placement: Path) -> None:
    cluster.objects["/apis/storage.k8s.io/v1/storageclasses/fast"]["volumeBindingMode"] = "WaitForFirstConsumer"
    cluster.objects[f"{CORE}/persistentvolumeclaims/work"]["status"]["phase"] = "Pending"
    assert check(placement)[1]["claim work"].startswith("✓")


def test_an_empty_pool_is_a_fault_unless_an_autoscaler_fills_it(cluster: Cluster, kfp: KfpApi, placement: Path) -> None:
    cluster.objects["/api/v1/nodes"]["items"] = []
    assert check(placement)[1]["nodes for sft"].startswith(
        "✗ 1 with 2 × nvidia.com/gpu asked, those with pool=gpu have none;"
    )
    assert check(placement, "--autoscaled")[1]["nodes for sft"] == "? none with pool=gpu now, the autoscaler has to add 1"


def test_what_one_may_not_look_at_is_not_checked(cluster: Cluster, kfp: KfpApi, placement: Path) -> None:
    cluster.forbidden = {"/api/v1/nodes", CORE, f"{CORE}/secrets/store", QUOTA}
    findings = check(placement)[1]
    for what in ("GPU nodes", "namespace team", "secret store", "quota of nvidia.com/gpu"):
        assert findings[what] == "? not checked, this account may not look at it (403)"


def test_a_cluster_that_cannot_be_asked_is_one_finding(
    cluster: Cluster, kfp: KfpApi, placement: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.expired = True
    assert check(placement)[1]["cluster"].startswith("✗ the API server does not take the credentials (401), log in")
    cluster.close()
    assert check(placement)[1]["cluster"].startswith("✗ the API server does not answer (NewConnectionError); kubectl")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert check(placement)[1]["cluster"].startswith("✗ KUBECONFIG: no cluster is configured")


def test_an_expired_token_for_kfp_is_a_finding(cluster: Cluster, kfp: KfpApi, placement: Path) -> None:
    kfp.token = "renewed"
    findings = check(placement)[1]
    assert "has expired (401): set KF_PIPELINES_TOKEN to a fresh one" in findings["KFP endpoint"]
    assert "kfp-very-secret" not in str(findings)


def test_faulty_input_is_no_finding(placement: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"^pipeline searcher: expected one of"):
        check(placement, pipeline="searcher")
    with pytest.raises(BadInput, match=r"^placement '.*' does not exist"):
        check(tmp_path / "none.yaml")


def test_all_is_well_ends_with_zero(cluster: Cluster, kfp: KfpApi, placement: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.objects[f"{CORE}/configmaps/settings"]["data"]["mlflow"] = "sqlite:///mlflow.db"
    monkeypatch.setattr(check_services, "check_image", lambda image: check_services.Finding("image", True, "is there"))
    assert check(placement)[1]["MLflow"] == "✗ sqlite is no server; set MLFLOW_TRACKING_URI to an http(s) URL"
    monkeypatch.setattr(check_services, "check_mlflow", lambda uri: check_services.Finding("MLflow", True, uri))
    failed, findings = check(placement, "--mlflow", "http://127.0.0.1:5000")
    assert (failed, findings["MLflow"]) == (0, "✓ http://127.0.0.1:5000")
