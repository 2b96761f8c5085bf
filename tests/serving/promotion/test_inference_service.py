"""Manifests against the CRD's schema in which unknown fields are errors, and the deployment file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from api_server import CRD, ROOT, inference_service_schema
from quick_deployment import DEPLOY, IMAGE, deployment_with

from routewright.errors import BadInput
from serving import decision_log, server
from serving.promotion.deployment import LOG_KEY, Deployment, check_size, load_deployment
from serving.promotion.inference_service import hash_of, inference_service, manifest_diff, predictor, standard_canary

DIGEST = "0123456789abcdef" * 4


def manifest(mode: str, version: str = "3") -> dict[str, Any]:
    deployment = deployment_with(mode)
    spec = predictor(deployment, "search-router", version, DIGEST, f"s3://bucket/{version}/data/router")
    return inference_service(deployment, spec)


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    if not CRD.is_file():
        pytest.skip("../shared/crds is not there: the InferenceService's schema is needed")
    return jsonschema.Draft202012Validator(inference_service_schema())


@pytest.mark.parametrize("mode", ["Knative", "Standard"])
def test_a_manifest_passes_a_strict_server(validator: jsonschema.Draft202012Validator, mode: str) -> None:
    made = manifest(mode)
    assert list(validator.iter_errors(made)) == []
    if mode == "Knative":
        made["spec"]["predictor"]["canaryTrafficPercent"] = 5
    else:
        made["spec"]["canary"] = [standard_canary(manifest(mode, "4")["spec"]["predictor"], 5)]
    assert list(validator.iter_errors(made)) == []


def test_the_strict_schema_sees_an_unknown_field(validator: jsonschema.Draft202012Validator) -> None:
    made = manifest("Knative")
    made["spec"]["predictor"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="imagePullPolice"):
        validator.validate(made)


def test_the_manifest_says_which_model_and_in_which_mode() -> None:
    made = manifest("Standard")
    metadata, spec = made["metadata"], made["spec"]["predictor"]
    assert metadata["annotations"]["serving.kserve.io/deploymentMode"] == "Standard"
    assert metadata["annotations"]["routewright/model-digest"] == DIGEST
    assert metadata["annotations"]["routewright/predictor"] == hash_of(spec)
    assert metadata["labels"]["routewright/model-version"] == spec["labels"]["routewright/model-version"] == "3"
    assert metadata["labels"]["routewright/model-digest"] == DIGEST[:16]
    (container,) = spec["containers"]
    assert container["image"] == IMAGE
    assert {"name": "STORAGE_URI", "value": "s3://bucket/3/data/router"} in container["env"]
    assert container["args"] == ["serve", "search-router", "--model", "/mnt/models", "--host", "0.0.0.0", "--port", "8080"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert container["securityContext"]["runAsNonRoot"] is True
    unnamed = {field: value for field, value in spec.items() if field != "name"}
    assert spec["name"] == f"v3-{hash_of(unnamed)[:6]}"
    assert "name" not in manifest("Knative")["spec"]["predictor"]


LOG = {"claim": "routewright-work", "path": "traffic/search-router", "key": "routewright-log/key"}


def pod_of(**fields: Any) -> dict[str, Any]:
    """The predictor of a deployment file with these fields."""
    deployment = Deployment.model_validate({**DEPLOY, "mode": "Standard", **fields})
    return predictor(deployment, "search-router", "3", DIGEST, "s3://bucket/3")


def test_a_server_that_hangs_is_restarted_and_one_that_warms_up_is_not() -> None:
    for mode in ("Standard", "Knative"):
        (container,) = pod_of(mode=mode)["containers"]
        probe = container["livenessProbe"]
        assert probe["httpGet"] == {"path": "/v2/health/live", "port": 8080}
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60


def test_a_pod_that_is_told_to_stop_has_time_to() -> None:
    pod = pod_of()
    (container,) = pod["containers"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before >= 5
    collector_s = 11  # serving.decision_log.CollectorLog.close
    drained = getattr(server, "DRAIN_S", 0) + 2 * server.GRACE_S + collector_s  # REST's and gRPC's grace, one after another
    assert pod["terminationGracePeriodSeconds"] >= before + drained
    knative = pod_of(mode="Knative")
    assert not {"terminationGracePeriodSeconds", "topologySpreadConstraints"} & knative.keys()
    assert "lifecycle" not in knative["containers"][0]


@pytest.mark.parametrize(("cpu", "threads"), [("500m", "1"), ("1", "1"), ("1500m", "2"), ("2", "2"), ("8", "8")])
def test_torch_has_as_many_threads_as_the_pod_has_cpus(cpu: str, threads: str) -> None:
    (container,) = pod_of(cpu=cpu)["containers"]
    assert {variable["name"]: variable.get("value") for variable in container["env"]}["OMP_NUM_THREADS"] == threads
    (container,) = pod_of(cpu=cpu, env={"OMP_NUM_THREADS": "3"})["containers"]
    assert [v["value"] for v in container["env"] if v["name"] == "OMP_NUM_THREADS"] == ["3"]


def test_replicas_are_spread_and_go_where_the_file_says() -> None:
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    pod = pod_of(gpus=1, home="20Gi", node_selector={"pool": "gpu"}, tolerations=[toleration])
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"pool": "gpu"}, [toleration])
    assert pod["volumes"] == [{"name": "home", "emptyDir": {"sizeLimit": "20Gi"}}]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {spread["topologyKey"] for spread in pod["topologySpreadConstraints"]} == {
        "topology.kubernetes.io/zone", "kubernetes.io/hostname"
    }  # fmt: skip
    for spread in pod["topologySpreadConstraints"]:
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
        assert spread["labelSelector"]["matchLabels"]["serving.kserve.io/inferenceservice"] == DEPLOY["service"]
    assert not {"nodeSelector", "tolerations"} & pod_of().keys()


def test_no_sidecar_and_no_token() -> None:
    pod = pod_of()
    assert pod["labels"]["sidecar.istio.io/inject"] == "false"
    assert pod["automountServiceAccountToken"] is False


def test_every_replica_logs_to_a_file_of_its_own_that_outlives_it(validator: jsonschema.Draft202012Validator) -> None:
    exploring = ["serve", "search-router", "--model", "/mnt/models", "--epsilon", "0.05"]
    pod = pod_of(log=LOG, args=exploring)
    (container,) = pod["containers"]
    assert container["args"] == [*exploring, "--log", "/var/log/routewright/$(POD_NAME).jsonl"]
    env = {variable["name"]: variable.get("valueFrom") for variable in container["env"]}
    assert env["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert env["ROUTEWRIGHT_LOG_KEY"] == {"secretKeyRef": {"name": "routewright-log", "key": "key"}}
    mount = {"name": "log", "mountPath": "/var/log/routewright", "subPath": "traffic/search-router"}
    assert mount in container["volumeMounts"]
    assert {"name": "log", "persistentVolumeClaim": {"claimName": "routewright-work"}} in pod["volumes"]
    assert pod["securityContext"] == {"fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch"}, "root's on block storage"
    assert "securityContext" not in pod_of()
    assert "securityContext" not in pod_of(log=LOG, mode="Knative")
    deployment = Deployment.model_validate({**DEPLOY, "mode": "Standard", "log": LOG})
    validator.validate(inference_service(deployment, pod))
    assert "--log" not in pod_of()["containers"][0]["args"]


def test_the_log_s_key_is_the_one_that_the_server_reads() -> None:
    assert LOG_KEY == decision_log.KEY_VARIABLE


def test_importing_the_sdk_leaves_the_command_line_alone() -> None:
    # KServe takes --model for a short form of two options of its own and would stop the program.
    program = (
        "import sys; sys.argv = ['routewright', 'promote', '--model', 'x', '--log', 'y']\n"
        "from serving.promotion.inference_service import kserve_sdk\n"
        "print(kserve_sdk().V1beta1InferenceService.__name__, sys.argv)"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "V1beta1InferenceService ['routewright', 'promote', '--model', 'x', '--log', 'y']"


def test_the_diff_shows_what_changes_and_nothing_else() -> None:
    live = manifest("Knative", "3")
    live["metadata"] |= {"uid": "u", "resourceVersion": "7", "generation": 2}
    live["status"] = {"conditions": []}
    assert manifest_diff(live, manifest("Knative", "3")) == ""
    shown = manifest_diff(live, manifest("Knative", "4"))
    changed = {line[1:].strip().removeprefix("- ") for line in shown.splitlines()[2:] if line[0] in "+-"}
    assert {"value: s3://bucket/3/data/router", "value: s3://bucket/4/data/router"} <= changed
    assert not [line for line in changed if not line.startswith(("value:", "routewright/"))]
    assert manifest_diff(None, live).startswith("--- deployed: nothing")


def test_a_model_too_large_for_the_storage_initializer_is_not_deployed() -> None:
    check_size(1 << 30, deployment_with())
    with pytest.raises(BadInput, match=r"the model has 1\.5 GiB, more than the storage initializer's memory of 1 GiB"):
        check_size(3 << 29, deployment_with())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "serve:latest"}, "deploy.yaml: image: expected a text that matches"),
        ({"mode": "RawDeployment"}, "deploy.yaml: mode: expected 'Knative' or 'Standard'"),
        ({"namespace": "Models"}, "deploy.yaml: namespace: "),
        ({"replicas": 3}, "deploy.yaml: replicas: unknown key, expected one of"),
        ({"canary": {"steps": [5, 25]}}, r"deploy.yaml: canary: expected steps that rise to 100, found \[5, 25\]"),
        ({"canary": {"steps": [50, 5, 100]}}, "deploy.yaml: canary: expected steps that rise to 100"),
        ({"env": {"STORAGE_URI": "s3://other"}}, "deploy.yaml: content: expected no STORAGE_URI in env or secret_env, the"),
        ({"secret_env": {"STORAGE_URI": "a/b"}}, "deploy.yaml: content: expected no STORAGE_URI in env or secret_env"),
        (
            {"env": {"HF_TOKEN": "x", "A": "y"}, "secret_env": {"HF_TOKEN": "hub/token"}},
            "deploy.yaml: content: expected HF_TOKEN in env or in secret_env, found it in both",
        ),
        ({"log": {"claim": "work", "path": "t"}}, "deploy.yaml: log.key: missing key"),
        ({"log": {**LOG, "path": "/t"}}, "deploy.yaml: log.path: expected a text that matches"),
        (
            {"log": LOG, "secret_env": {LOG_KEY: "a/b"}},
            "deploy.yaml: content: expected no ROUTEWRIGHT_LOG_KEY in env or secret_env, log sets it",
        ),
        ({"args": ["--log", "x"]}, "deploy.yaml: content: expected log instead of --log in args, or for a collector ROUTEW"),
        ({"args": ["--log", "x"], "log": LOG}, "deploy.yaml: content: expected log instead of --log in args"),
        ({"tolerations": [{"opertor": "Exists"}]}, "deploy.yaml: tolerations.0.opertor: unknown key, expected one of"),
        (
            {"canary": {"pages": {"candidate": "ftp://x", "champion": "http://y"}}},
            "deploy.yaml: canary.pages.candidate: expected a text that matches",
        ),
    ],
)
def test_a_bad_deployment_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({**DEPLOY, **change}))
    with pytest.raises(BadInput, match=message):
        load_deployment(file)


@pytest.mark.parametrize(("text", "message"), [(None, "cannot be read"), ("a: [", "not YAML"), ("", "content: ")])
def test_a_deployment_file_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "deploy.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput, match=message):
        load_deployment(file)


def test_the_deployment_file_needs_four_lines(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(DEPLOY))
    assert load_deployment(file).canary.steps == (5, 25, 100)


def test_a_deployment_file_that_is_not_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_bytes(b"namespace: caf\xe9\n")
    with pytest.raises(BadInput, match="not YAML"):
        load_deployment(file)
