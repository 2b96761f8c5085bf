"""Every overlay renders, and a strict API server would take all of it: an unknown field is an error."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubernetes.utils.quantity import parse_quantity
from rendering import MANIFESTS, OVERLAYS, ROOT, Object, of_kind, overlay, pods, render, selects

CRDS = ROOT.parent / "shared" / "crds"
SERVERS = ("1.30", "1.37")
STRINGS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
MATCH = {
    "type": "object",
    "properties": {"matchLabels": STRINGS, "matchExpressions": {"type": "array", "items": {"type": "object"}}},
}
ENDPOINT = {name: {"type": "string"} for name in ("path", "interval", "scrapeTimeout", "port")}
RULE = {name: {"type": "string"} for name in ("alert", "record", "expr", "for")}
ANNOTATIONS = {"type": "object", "additionalProperties": {"type": "string"}}
# The fields that are used of the Prometheus operator's; its CRDs come with no package.
OPERATOR = {
    "ServiceMonitor": {
        "selector": MATCH,
        "targetLabels": {"type": "array", "items": {"type": "string"}},
        "endpoints": {
            "type": "array",
            "items": {"type": "object", "properties": {**ENDPOINT, "targetPort": {"type": "integer"}}},
        },
    },
    "PrometheusRule": {
        "groups": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "properties": {
                    "name": {"type": "string"},
                    "interval": {"type": "string"},
                    "rules": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["expr"],
                            "properties": {**RULE, "labels": STRINGS, "annotations": ANNOTATIONS},
                        },
                    },
                },
            },
        }
    },
}


def strict(schema: Any) -> Any:
    """A CRD's schema in which a field that it does not know is an error."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(part) for name, part in schema.items()}
    if isinstance(made.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return made


@functools.cache
def crd(group: str) -> dict[tuple[str, str], Object]:
    """{(version, kind): strict schema of the spec} of a group."""
    found = [json.loads(gzip.decompress(file.read_bytes())) for file in CRDS.glob(f"*.{group}.json.gz")]
    return {
        (version, made["kind"]): strict(schema["properties"]["spec"])
        for made in found
        for version, schema in made["versions"].items()
    }


def custom_schema(resource: Object) -> Object | None:
    """The strict schema of a custom resource's spec; None where it is not at hand."""
    group, _, version = resource["apiVersion"].partition("/")
    if group == "monitoring.coreos.com":
        return strict({"type": "object", "properties": OPERATOR[resource["kind"]]})
    return crd(group).get((version, resource["kind"]))


def is_custom(resource: Object) -> bool:
    return resource["apiVersion"].partition("/")[0] in ("serving.kserve.io", "monitoring.coreos.com")


def metadata_complaints(resource: Object) -> list[str]:
    """What an API server refuses in names, labels and annotations."""
    metadata = resource["metadata"]
    found = [f"metadata.{name}: unknown" for name in metadata.keys() - {"name", "namespace", "labels", "annotations"}]
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"]):
        found.append(f"name {metadata['name']}")
    for key, value in metadata.get("labels", {}).items():
        if not re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", value) or len(value) > 63:
            found.append(f"label {key}: {value}")
    return found


@pytest.mark.parametrize("version", SERVERS)
def test_a_strict_server_takes_the_core_resources(version: str) -> None:
    # most are the same in every overlay
    different = {json.dumps(resource): resource for name in OVERLAYS for resource in overlay(name)}.values()
    core = [resource for resource in different if not is_custom(resource)]
    assert len(core) > 30
    for resource in core:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_strict_server_takes_names_and_labels(name: str) -> None:
    for resource in overlay(name):
        assert metadata_complaints(resource) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_strict_server_takes_the_custom_resources(name: str) -> None:
    if not CRDS.is_dir():
        pytest.skip("../shared/crds is not there: KServe's schemas are needed")
    kinds = set()
    for resource in filter(is_custom, overlay(name)):
        schema = custom_schema(resource)
        assert schema is not None, f"no schema of {resource['apiVersion']} {resource['kind']}"
        jsonschema.Draft202012Validator(schema).validate(resource["spec"])
        assert resource.keys() == {"apiVersion", "kind", "metadata", "spec"}
        kinds.add(resource["kind"])
    assert kinds >= {"InferenceService", "ServingRuntime"}


def test_the_checks_see_an_unknown_field() -> None:
    if not CRDS.is_dir():
        pytest.skip("../shared/crds is not there: KServe's schemas are needed")
    resources = overlay("production")
    for kind, where in (("InferenceService", ["spec", "predictor"]), ("PrometheusRule", ["spec"])):
        broken = copy.deepcopy(next(iter(of_kind(resources, kind).values())))
        inner = broken
        for part in where:
            inner = inner[part]
        inner["minReplica"] = 1
        with pytest.raises(jsonschema.ValidationError, match="minReplica"):
            jsonschema.Draft202012Validator(custom_schema(broken)).validate(broken["spec"])
    deployment = copy.deepcopy(of_kind(resources, "Deployment")["mlflow"])
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePullpolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullpolicy"):
        kubernetes_validate.validate(deployment, SERVERS[-1], strict=True)
    assert metadata_complaints({"metadata": {"name": "A_b", "labels": {"x": "a b"}, "uid": "1"}}) == [
        "metadata.uid: unknown", "name A_b", "label x: a b",
    ]  # fmt: skip


@pytest.mark.parametrize("name", OVERLAYS)
def test_everything_lies_in_the_namespace_once(name: str) -> None:
    resources = overlay(name)
    keys = [(resource["kind"], resource["metadata"]["name"]) for resource in resources]
    assert len(keys) == len(set(keys))
    for resource in resources:
        if resource["kind"] != "Namespace":
            assert resource["metadata"]["namespace"] == "routewright"


def references(spec: Object) -> set[tuple[str, str]]:
    """(kind, name) of what a pod needs: config maps, claims, its account; Secrets are made by hand."""
    found = {("ServiceAccount", spec["serviceAccountName"])} if "serviceAccountName" in spec else set()
    for volume in spec.get("volumes", []):
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        if "configMap" in volume:
            found.add(("ConfigMap", volume["configMap"]["name"]))
    for container in spec["containers"]:
        for variable in container.get("env", []):
            given = variable.get("valueFrom", {}).get("configMapKeyRef")
            if given and not given.get("optional"):
                found.add(("ConfigMap", f"{given['name']}/{given['key']}"))
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_is_named_is_there(name: str) -> None:
    resources = overlay(name)
    there = {(resource["kind"], resource["metadata"]["name"]) for resource in resources}
    for config in of_kind(resources, "ConfigMap").values():
        there |= {("ConfigMap", f"{config['metadata']['name']}/{key}") for key in config["data"]}
    running = list(pods(resources))
    for who, _, spec in running:
        assert references(spec) <= there, who
    for binding in of_kind(resources, "RoleBinding").values():
        assert ("Role", binding["roleRef"]["name"]) in there
        for subject in binding["subjects"]:
            assert (subject["kind"], subject["name"]) in there
            assert subject["namespace"] == "routewright"
    for scaler in of_kind(resources, "HorizontalPodAutoscaler").values():
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in there
    for budget in of_kind(resources, "PodDisruptionBudget").values():
        taken = [who for who, labels, _ in running if selects(budget["spec"]["selector"], labels)]
        assert len(taken) == 1, budget["metadata"]["name"]
        assert not budget["metadata"]["name"].endswith("-predictor"), "KServe deletes a budget of this name"
    for service in of_kind(resources, "Service").values():
        ports = {
            port["name"] for _, labels, spec in running for container in spec["containers"]
            for port in container.get("ports", []) if selects({"matchLabels": service["spec"]["selector"]}, labels)
        }  # fmt: skip
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_a_limit_is_at_least_the_request() -> None:
    for name in OVERLAYS:
        for who, _, spec in pods(overlay(name)):
            for container in spec["containers"]:
                given = container["resources"]
                for resource, amount in given["requests"].items():
                    assert parse_quantity(amount) <= parse_quantity(given["limits"][resource]), (name, who)


def test_the_base_alone_renders() -> None:
    assert {resource["kind"] for resource in render(MANIFESTS / "base")} >= {"InferenceService", "NetworkPolicy", "Role"}
