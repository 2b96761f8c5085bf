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
from serving.promotion.inference_service import (
    check_size,
    hash_of,
    inference_service,
    load_deployment,
    manifest_diff,
    predictor,
    standard_canary,
)

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
    assert spec["name"] == "v3"
    assert "name" not in manifest("Knative")["spec"]["predictor"]


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
        ({"image": "serve:latest"}, "deploy.yaml: image: String should match"),
        ({"mode": "RawDeployment"}, "deploy.yaml: mode: Input should be 'Knative' or 'Standard'"),
        ({"namespace": "Models"}, "deploy.yaml: namespace: "),
        ({"replicas": 3}, "deploy.yaml: replicas: Extra inputs"),
        ({"canary": {"steps": [5, 25]}}, r"deploy.yaml: canary: expected steps that rise to 100, found \[5, 25\]"),
        ({"canary": {"steps": [50, 5, 100]}}, "deploy.yaml: canary: expected steps that rise to 100"),
        ({"env": {"STORAGE_URI": "s3://other"}}, "deploy.yaml: content: expected no STORAGE_URI in env or secret_env, the"),
        ({"secret_env": {"STORAGE_URI": "a/b"}}, "deploy.yaml: content: expected no STORAGE_URI in env or secret_env"),
        (
            {"env": {"HF_TOKEN": "x", "A": "y"}, "secret_env": {"HF_TOKEN": "hub/token"}},
            "deploy.yaml: content: expected HF_TOKEN in env or in secret_env, found it in both",
        ),
        (
            {"canary": {"pages": {"candidate": "ftp://x", "champion": "http://y"}}},
            "deploy.yaml: canary.pages.candidate: String should match",
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
