"""The InferenceServices are what promotion would write, and the image has one place in an overlay."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from kubernetes.utils.quantity import parse_quantity
from rendering import MANIFESTS, OVERLAYS, ROOT, ROUTERS, Object, of_kind, overlay, render

from serving.promotion.deployment import Deployment, check_size, load_deployment
from serving.promotion.inference_service import DIGEST, MODE, VERSION, inference_service, predictor

ROUTES = [(name, router) for name in OVERLAYS for router in ROUTERS]


def deployment_of(resources: list[Object], router: str, folder: Path) -> Deployment:
    """The deployment file that the stage promote is given for a router."""
    file = folder / f"{router}.yaml"
    file.write_text(of_kind(resources, "ConfigMap")["routewright-deploy"]["data"][file.name])
    return load_deployment(file)


def by_name(value: Any) -> Any:
    """The value with lists of named objects as mappings: their order means nothing."""
    if isinstance(value, dict):
        return {key: by_name(inner) for key, inner in value.items()}
    if isinstance(value, list) and all(isinstance(inner, dict) and "name" in inner for inner in value):
        return {inner["name"]: by_name(inner) for inner in value}
    return value


@pytest.mark.parametrize(("name", "router"), ROUTES)
def test_the_manifest_is_what_promotion_writes_and_no_more(name: str, router: str, tmp_path: Path) -> None:
    resources = overlay(name)
    deployment = deployment_of(resources, router, tmp_path)
    service = of_kind(resources, "InferenceService")[router]
    found = service["spec"]["predictor"]
    uri = next(v["value"] for v in found["containers"][0]["env"] if v["name"] == "STORAGE_URI")
    wanted = inference_service(deployment, predictor(deployment, router, "1", "0" * 64, uri))
    # A model version has a name and marks of its own.
    assert wanted["spec"]["predictor"].pop("name").startswith("v1-")
    for marked in (wanted["spec"]["predictor"]["labels"], wanted["spec"]["predictor"]["annotations"]):
        for mark in (VERSION, DIGEST):
            del marked[mark]
    assert by_name(found) == by_name(wanted["spec"]["predictor"])
    assert service["metadata"]["annotations"].items() <= wanted["metadata"]["annotations"].items()
    assert service["metadata"]["annotations"][MODE] == deployment.mode == "Standard"
    assert (deployment.service, deployment.namespace) == (router, service["metadata"]["namespace"])


def test_the_ensemble_s_backbone_has_a_gpu_and_cuda_in_production(tmp_path: Path) -> None:
    deployment = deployment_of(overlay("production"), "ensemble-router", tmp_path)
    assert (deployment.gpus, deployment.memory) == (1, "24Gi")
    assert [(t.key, t.effect) for t in deployment.tolerations] == [("nvidia.com/gpu", "NoSchedule")]
    assert "/routewright-train@" in deployment.image
    build = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert "FROM build-cpu AS build-serve" in build, "the image that serves has no CUDA"
    assert deployment_of(overlay("staging"), "ensemble-router", tmp_path).gpus == 0


@pytest.mark.parametrize("name", ["staging", "production"])
def test_the_files_deploy_what_the_profile_gpu_trains(name: str, tmp_path: Path) -> None:
    resources = overlay(name)
    search = deployment_of(resources, "search-router", tmp_path)
    saved = 1.7 * 2**30  # Qwen3-0.6B with its heads
    check_size(int(saved), search)
    assert parse_quantity(search.memory) >= 3 * saved, "read as saved, then turned into float32 where that is faster"
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (limit,) = re.findall(r"patch clusterstoragecontainer default .*\n.*\"limits\": {\"memory\": \"(\w+)\"}", page)
    assert parse_quantity(limit) == search.storage_initializer_gib * 2**30
    if name == "production":
        ensemble = of_kind(resources, "InferenceService")["ensemble-router"]["spec"]["predictor"]
        (home,) = ensemble["volumes"]
        assert parse_quantity(home["emptyDir"]["sizeLimit"]) >= 2 * 8e9, "Qwen3-4B is fetched to it"
        assert deployment_of(resources, "ensemble-router", tmp_path).home == home["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_label_leaves_out_what_promotion_owns(name: str) -> None:
    labels = {
        (resource["kind"], resource["metadata"]["name"]): resource["metadata"]
        .get("labels", {})
        .get("app.kubernetes.io/component")
        for resource in overlay(name)
    }
    assert sorted(key for key, value in labels.items() if value == "router") == [("InferenceService", r) for r in ROUTERS]


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_serving_runtime_runs_the_same_container(name: str) -> None:
    resources = overlay(name)
    (runtime,) = of_kind(resources, "ServingRuntime").values()
    service = of_kind(resources, "InferenceService")["search-router"]["spec"]["predictor"]
    own, other = dict(runtime["spec"]["containers"][0]), dict(service["containers"][0])
    assert own.pop("args") == ["{{.Name}}" if part == "search-router" else part for part in other.pop("args")]
    assert own.pop("env") == [variable for variable in other.pop("env") if variable["name"] != "STORAGE_URI"]
    assert own.pop("resources").keys() == other.pop("resources").keys()
    assert own == other
    assert runtime["spec"]["volumes"] == service["volumes"]
    assert sorted(known["name"] for known in runtime["spec"]["supportedModelFormats"]) == ROUTERS


def test_the_server_knows_these_routers() -> None:
    source = (ROOT / "serving" / "server.py").read_text(encoding="utf-8")
    assert sorted(re.findall(r'if router == "([a-z-]+)":', source)) == ROUTERS


@pytest.mark.parametrize("name", OVERLAYS)
def test_one_line_sets_the_image_everywhere(name: str, tmp_path: Path) -> None:
    copied = tmp_path / "manifests"
    shutil.copytree(MANIFESTS, copied)
    file = copied / "overlays" / name / "kustomization.yaml"
    digest = "sha256:" + "ab" * 32
    text, count = re.subn(
        r"(name: ghcr\.io/routewright/serve,.* digest: )sha256:[0-9a-f]{64}", rf"\g<1>{digest}", file.read_text()
    )
    assert count == 1
    file.write_text(text)
    resources = render(file.parent)
    images = {deployment_of(resources, router, tmp_path).image for router in ROUTERS}
    for kind, spec in (("InferenceService", "predictor"), ("ServingRuntime", None)):
        for resource in of_kind(resources, kind).values():
            inside = resource["spec"][spec] if spec else resource["spec"]
            images |= {container["image"] for container in inside["containers"]}
    if name == "production":  # there, the ensemble router's has CUDA
        assert len({image for image in images if "/routewright-train@" in image}) == 1
        images = {image for image in images if "/routewright-train@" not in image}
    (image,) = images
    assert image.endswith(f"/routewright-serve@{digest}")
