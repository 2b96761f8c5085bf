"""What must hold of every resource on every cluster: images, limits, rights, secrets, the network."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import MANIFESTS, OVERLAYS, ROOT, ROUTERS, Object, of_kind, overlay, pods, render, selects

DIGEST = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|STORE_URI|DATABASE_URI")
SECRET_VALUE = re.compile(
    r"://[^/\s:@]+:[^/\s@]+@|AKIA[0-9A-Z]{16}|-----BEGIN|(?i:password|secret[_-]?key|token)\s*[:=]\s*['\"]?\w"
)


def complaints(container: Object, pod: Object) -> list[str]:
    """What a container lacks of what is asked of all of them."""
    own, shared = container.get("securityContext", {}), pod.get("securityContext", {})
    resources = container.get("resources", {})
    writable = {mount["name"] for mount in container.get("volumeMounts", [])}
    rules = {
        "an image by digest": bool(DIGEST.fullmatch(container["image"])),
        "no root": own.get("runAsNonRoot", shared.get("runAsNonRoot")) is True,
        "no user 0": own.get("runAsUser", shared.get("runAsUser")) != 0,
        "a read-only root file system": own.get("readOnlyRootFilesystem") is True,
        "no capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "no privilege escalation": own.get("allowPrivilegeEscalation") is False and not own.get("privileged"),
        "the seccomp profile": own.get("seccompProfile", shared.get("seccompProfile")) == {"type": "RuntimeDefault"},
        "no token it does not need": pod.get("automountServiceAccountToken") is False or "builtInAdapter" in pod or (
            "supportedModelFormats" in pod
        ),
        "no host": not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(),
        "a place to write": bool(writable),
    }  # fmt: skip
    rules |= {
        f"{kind} of {name}": name in resources.get(kind, {}) for kind in ("requests", "limits") for name in ("cpu", "memory")
    }
    for volume in pod.get("volumes", []):
        rules[f"a size limit of {volume['name']}"] = "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]
        rules[f"no path of the host as {volume['name']}"] = "hostPath" not in volume
    return [rule for rule, holds in rules.items() if not holds]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_container_is_confined(name: str) -> None:
    seen = 0
    for who, _, spec in pods(overlay(name)):
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            seen += 1
            assert complaints(container, spec) == [], who
    assert seen >= 6


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"image": "ghcr.io/routewright/serve:latest"}, "an image by digest"),
        ({"image": "ghcr.io/routewright/serve"}, "an image by digest"),
        ({"resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1"}}}, "limits of memory"),
        ({"securityContext": {}}, "a read-only root file system"),
        ({"securityContext": {"runAsUser": 0}}, "no user 0"),
        ({"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}}}, "no capabilities"),
        ({"volumeMounts": []}, "a place to write"),
    ],
)
def test_the_rules_see_what_they_forbid(change: Object, rule: str) -> None:
    pod = copy.deepcopy(of_kind(overlay("production"), "InferenceService")["search-router"]["spec"]["predictor"])
    container = pod["containers"][0]
    assert complaints(container, pod) == []
    assert rule in complaints(container | change, pod)


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_pod_gets_a_sidecar_that_the_namespace_would_refuse(name: str) -> None:
    # A Profile's namespace asks Istio for one, whose first container wants NET_ADMIN and which has no way to istiod.
    for resource in overlay(name):
        kind, spec = resource["kind"], resource.get("spec", {})
        labels = {
            "Deployment": lambda spec: spec["template"]["metadata"]["labels"],
            "StatefulSet": lambda spec: spec["template"]["metadata"]["labels"],
            "CronJob": lambda spec: spec["jobTemplate"]["spec"]["template"]["metadata"]["labels"],
            "InferenceService": lambda spec: spec["predictor"]["labels"],
            "ServingRuntime": lambda spec: spec["labels"],
        }  # fmt: skip
        if kind in labels:
            assert labels[kind](spec).get("sidecar.istio.io/inject") == "false", f"{kind} {resource['metadata']['name']}"


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_that_is_asked_goes_on_while_routes_to_it_are_taken_away(name: str) -> None:
    asked = [
        container for who, _, spec in pods(overlay(name)) if not who.startswith(("CronJob", "StatefulSet"))
        for container in spec["containers"]
    ]  # fmt: skip
    assert len(asked) == 5
    assert all(container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5 for container in asked)


def strings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every string in a resource."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from strings(inner, f"{path}.{i}")
    elif isinstance(value, str):
        yield path, value


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_secret_has_a_value_here(name: str) -> None:
    resources = overlay(name)
    assert of_kind(resources, "Secret") == {}
    for resource in resources:
        for path, text in strings(resource):
            assert not SECRET_VALUE.search(text), f"{resource['metadata']['name']}{path}"
    referenced = set()
    for who, _, spec in pods(resources):
        for container in spec["containers"]:
            for variable in container.get("env", []):
                if SECRET_NAME.search(variable["name"]):
                    assert "value" not in variable, f"{who}: {variable['name']}"
                    reference = variable["valueFrom"]["secretKeyRef"]
                    referenced.add((reference["name"], reference["key"]))
    assert ("mlflow-database", "uri") in referenced
    operations = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for secret, key in referenced:
        assert re.search(rf"^\| `{secret}` \|[^|]*`{key}`", operations, re.M), (
            f"docs/operations.md tells nothing of {secret}/{key}"
        )


def test_a_secret_would_be_seen() -> None:
    for text in ("postgresql://mlflow:hunter2@db/mlflow", "AKIAABCDEFGHIJKLMNOP", "password: hunter2", "secret-key=x"):
        assert SECRET_VALUE.search(text)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_namespace_is_restricted(name: str) -> None:
    (namespace,) = of_kind(overlay(name), "Namespace").values()
    for mode in ("enforce", "audit", "warn"):
        assert namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] == "restricted"


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_label_of_a_profile_s_namespace_is_left_to_its_controller(name: str) -> None:
    resources = overlay(name)
    account = of_kind(resources, "ServiceAccount")["routewright-pipelines"]
    assert account["metadata"]["labels"]["app.kubernetes.io/part-of"] == "routewright"
    (namespace,) = of_kind(resources, "Namespace").values()
    given = namespace["metadata"]["labels"].get("app.kubernetes.io/part-of")
    # KFP's policy for its object store, which is the local overlay's too, admits these namespaces.
    assert given == ("kubeflow-profile" if name == "local" else None)


def is_named(peer: Object) -> bool:
    """Whether a peer is somebody: an address block, or pods or a namespace with labels."""
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        return block["cidr"] != "0.0.0.0/0" or {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} <= set(block["except"])
    return any(selector.get("matchLabels") or selector.get("matchExpressions") for selector in peer.values())


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_network_is_closed_but_for_what_is_named(name: str) -> None:
    policies = {who: policy["spec"] for who, policy in of_kind(overlay(name), "NetworkPolicy").items()}
    assert policies.pop("default-deny") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert policies.keys() >= {"to-dns", "to-mlflow", "to-object-store", "to-pipelines", "to-kubernetes-api", "to-database"}
    for who, policy in policies.items():
        assert set(policy["policyTypes"]) == {kind.title() for kind in ("ingress", "egress") if kind in policy}
        for direction, peers in (("egress", "to"), ("ingress", "from")):
            for rule in policy.get(direction, []):
                assert rule[peers], f"{who}: to or from everybody"
                assert all(is_named(peer) for peer in rule[peers]), who
                assert rule.get("ports") or who == "between-training-nodes", f"{who}: on every port"
    assert not is_named({"ipBlock": {"cidr": "0.0.0.0/0", "except": []}})
    assert not is_named({"namespaceSelector": {}})


@pytest.mark.parametrize("name", OVERLAYS)
def test_who_may_reach_whom(name: str) -> None:
    policies = of_kind(overlay(name), "NetworkPolicy")
    labels = {who: labels for who, labels, _ in pods(overlay(name))}
    step = {"pipelines.kubeflow.org/v2_component": "true", "app.kubernetes.io/part-of": "routewright"}

    def reached(pod: dict[str, str]) -> set[str]:
        return {
            who.removeprefix("to-") for who, policy in policies.items()
            if who.startswith("to-") and selects(policy["spec"]["podSelector"], pod)
        }  # fmt: skip

    monitored = {"prometheus"} & {"prometheus" for who in policies if who == "to-prometheus"}
    assert reached(step) == {"dns", "mlflow", "object-store", "pipelines", "kubernetes-api", "agents"} | monitored
    assert reached(labels["Deployment mlflow"]) == {"dns", "object-store", "database"}
    assert reached(labels["CronJob mlflow-backup"]) == {"dns", "database"}
    for router in ROUTERS:
        assert reached(labels[f"InferenceService {router}"]) == {"dns", "object-store"}


def test_steps_reach_agents_where_a_label_or_the_overlay_says_so(tmp_path: Path) -> None:
    policy = of_kind(overlay("production"), "NetworkPolicy")["to-agents"]["spec"]
    (peer,) = policy["egress"][0]["to"]
    ((label, value),) = peer["namespaceSelector"]["matchLabels"].items()
    assert f"kubectl label namespace search {label}={value} " in (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    copied = tmp_path / "manifests"
    shutil.copytree(MANIFESTS, copied)
    file = copied / "overlays" / "production" / "kustomization.yaml"
    shown, count = re.subn(r"(?m)^  # ( *)(?=-|patch:|# agents)", r"  \1", file.read_text())
    assert count == 4
    file.write_text(shown)
    (opened,) = of_kind(render(file.parent), "NetworkPolicy")["to-agents"]["spec"]["egress"]
    assert opened["to"] == [peer, {"ipBlock": {"cidr": "10.0.32.0/24"}}]


def verbs_called(code: str, client: str, thing: str) -> set[str]:
    """RBAC's verbs for the calls of the Kubernetes client on a kind of objects."""
    verbs = {"replace": "update", "read": "get"}
    called = re.findall(rf"\b{client}\.(\w+)_namespaced_{thing}\(", code)
    return {verbs.get(verb, verb) for verb in called}


@pytest.mark.parametrize("name", OVERLAYS)
def test_nobody_has_more_rights_than_the_code_uses(name: str) -> None:
    resources = overlay(name)
    assert not of_kind(resources, "ClusterRole")
    assert not of_kind(resources, "ClusterRoleBinding")
    roles = of_kind(resources, "Role")
    for role in roles.values():
        assert "*" not in yaml.safe_dump(role["rules"])
        for rule in role["rules"]:
            if "secrets" in rule["resources"] or "configmaps" in rule["resources"]:
                assert rule["resourceNames"], "only those that KFP's launcher reads"
    (promotion,) = roles["promotion"]["rules"]
    assert (promotion["apiGroups"], promotion["resources"]) == (["serving.kserve.io"], ["inferenceservices"])
    code = "".join(path.read_text() for path in (ROOT / "serving" / "promotion").glob("*.py"))
    assert set(promotion["verbs"]) == verbs_called(code, "api", "custom_object")
    train_job = (ROOT / "components" / "train_job.py").read_text()
    rules = {(*rule["apiGroups"], *rule["resources"]): set(rule["verbs"]) for rule in roles["train-job"]["rules"]}
    assert rules == {
        ("trainer.kubeflow.org", "trainjobs"): verbs_called(train_job, "jobs", "custom_object"),
        ("", "pods"): verbs_called(train_job, "pods", "pod"),
        ("", "pods/log"): {"get"} if "pods.read_namespaced_pod_log" in train_job else set(),
    }
    bound = {
        account: {
            binding["roleRef"]["name"] for binding in of_kind(resources, "RoleBinding").values()
            if account in {subject["name"] for subject in binding["subjects"]}
        } for account in ("routewright-pipelines", "routewright-promotion", "routewright-serving", "mlflow")
    }  # fmt: skip
    steps = {"pipeline-step", "train-job"}
    assert bound == {
        "routewright-pipelines": steps, "routewright-promotion": steps | {"promotion"}, "routewright-serving": set(),
        "mlflow": set(),
    }  # fmt: skip


def test_placements_name_what_is_here() -> None:
    files = sorted((ROOT / "configs" / "placement").glob("*.yaml"))
    accounts = of_kind(overlay("production"), "ServiceAccount")
    data = of_kind(overlay("production"), "ConfigMap")["routewright"]["data"]
    assert files
    for file in files:
        placement = yaml.safe_load(file.read_text())
        assert placement["service_account"] in accounts
        for config in placement["defaults"]["config_maps"]:
            assert config["name"] == "routewright"
            assert config.get("optional") or set(config["env"].values()) <= data.keys()


def test_a_run_that_deploys_may_and_finds_its_deployment_file() -> None:
    resources = overlay("production")
    (subject,) = of_kind(resources, "RoleBinding")["promotion"]["subjects"]
    deployments = of_kind(resources, "ConfigMap")["routewright-deploy"]
    for file in sorted((ROOT / "configs" / "placement").glob("*.yaml")):
        placement = yaml.safe_load(file.read_text())
        assert placement["promotion_account"] == subject["name"]
        *same, mounted = placement["stages"]["promote"]["config_maps"]
        assert same == placement["defaults"]["config_maps"]
        assert mounted["name"] == deployments["metadata"]["name"]
        page = (ROOT / "docs" / "cluster.md").read_text()
        (named,) = set(re.findall(rf"deploy={mounted['mount']}/([\w.-]+)", page))
        assert named in deployments["data"]
