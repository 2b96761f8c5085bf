"""The InferenceServices are what promotion would write, and the image has one place in an overlay."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rendering import MANIFESTS, OVERLAYS, ROOT, ROUTERS, Object, of_kind, overlay, render

from serving.promotion.inference_service import (
    DIGEST,
    MODE,
    VERSION,
    Deployment,
    load_deployment,
    predictor,
)

ROUTES = [(name, router) for name in OVERLAYS for router in ROUTERS]


def deployment_of(resources: list[Object], router: str, folder: Path) -> Deployment:
    """The deployment file that the stage promote is given for a router."""
    file = folder / f"{router}.yaml"
    file.write_text(of_kind(resources, "ConfigMap")["routewright-deploy"]["data"][file.name])
    return load_deployment(file)


def lacking(found: Any, wanted: Any, path: str = "") -> list[str]:
    """Where ``found`` does not hold all of ``wanted``; lists of named objects by name, other lists as they are."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [line for key in wanted for line in lacking(found.get(key), wanted[key], f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and all(isinstance(v, dict) and "name" in v for v in wanted):
        named = {value["name"]: value for value in found}
        return [line for value in wanted for line in lacking(named.get(value["name"]), value, f"{path}.{value['name']}")]
    return [] if found == wanted else [f"{path}: {found!r}, promotion writes {wanted!r}"]


@pytest.mark.parametrize(("name", "router"), ROUTES)
def test_the_manifest_is_what_promotion_writes(name: str, router: str, tmp_path: Path) -> None:
    resources = overlay(name)
    deployment = deployment_of(resources, router, tmp_path)
    service = of_kind(resources, "InferenceService")[router]
    found = service["spec"]["predictor"]
    uri = next(v["value"] for v in found["containers"][0]["env"] if v["name"] == "STORAGE_URI")
    wanted = predictor(deployment, router, "1", "0" * 64, uri)
    # A model version has a name and labels of its own.
    assert wanted.pop("name") == "v1"
    assert wanted.pop("labels").keys() == {VERSION, DIGEST}
    for mark in (VERSION, DIGEST):
        del wanted["annotations"][mark]
    given = {"cpu", "memory"}
    for kind in ("requests", "limits"):
        held = found["containers"][0]["resources"][kind]
        if held.keys() > given:  # a deployment file knows no GPU yet, nor the memory that goes with it
            wanted["containers"][0]["resources"].pop(kind)
    assert lacking(found, wanted) == []
    assert found.keys() - wanted.keys() <= {
        "volumes", "automountServiceAccountToken", "tolerations", "topologySpreadConstraints",
    }  # fmt: skip
    assert service["metadata"]["annotations"][MODE] == deployment.mode == "Standard"
    assert (deployment.service, deployment.namespace) == (router, service["metadata"]["namespace"])


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_label_leaves_out_what_promotion_owns(name: str) -> None:
    labels = {
        (resource["kind"], resource["metadata"]["name"]): resource["metadata"]
        .get("labels", {})
        .get("app.kubernetes.io/component")
        for resource in overlay(name)
    }
    assert sorted(key for key, value in labels.items() if value == "router") == [("InferenceService", r) for r in ROUTERS]


def test_a_difference_would_be_seen() -> None:
    assert lacking({"a": [{"name": "x", "b": 1}]}, {"a": [{"name": "x", "b": 2}]}) == [".a.x.b: 1, promotion writes 2"]
    assert lacking({"args": ["a"]}, {"args": ["a", "b"]}) == [".args: ['a'], promotion writes ['a', 'b']"]
    assert lacking({"a": 1, "more": 2}, {"a": 1}) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_serving_runtime_runs_the_same_container(name: str) -> None:
    resources = overlay(name)
    (runtime,) = of_kind(resources, "ServingRuntime").values()
    service = of_kind(resources, "InferenceService")["search-router"]["spec"]["predictor"]
    own, other = dict(runtime["spec"]["containers"][0]), dict(service["containers"][0])
    assert own.pop("args") == ["{{.Name}}" if part == "search-router" else part for part in other.pop("args")]
    del other["env"]
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
    (image,) = images
    assert image.endswith(f"/routewright-serve@{digest}")
