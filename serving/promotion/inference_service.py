"""The InferenceService of a router, built with the KServe SDK, for Knative and for Standard mode.

The canary depends on the mode: Knative splits traffic between the revisions of one predictor
(``predictor.canaryTrafficPercent``), Standard has named predictors side by side (``spec.canary``), and each silently
ignores the other's field.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from typing import Any, cast

import yaml

from routewright.errors import BadInput
from serving.promotion.deployment import LOG_KEY, Deployment
from serving.promotion.pods import THREADS, threads_within

MODE = "serving.kserve.io/deploymentMode"
VERSION, DIGEST, PREDICTOR, PREVIOUS, ROLLED_BACK = (
    f"routewright/{name}" for name in ("model-version", "model-digest", "predictor", "previous", "rolled-back-from")
)
"""Annotations: the model, the hash of the predictor that was asked for, and what to go back to."""
NO_SIDECAR = "sidecar.istio.io/inject"
"""In a Profile's namespace Istio would add a proxy that needs rights and routes which the namespace does not give."""
MODEL_DIR = "/mnt/models"
CONTAINER = "kserve-container"
HOME = "/var/lib/routewright"
"""The image's home, the one folder it writes to beside its log."""
LOGS = "/var/log/routewright"
GROUP = 10001
"""That of the image's user."""
PRE_STOP_S, STOP_S = 10, 60
"""Seconds for which a pod goes on unchanged while routes to it are taken away, and after which it is killed."""


def kserve_sdk() -> Any:
    """The KServe SDK; importing it parses the command line and stops at options that it takes for its own."""
    given, sys.argv = sys.argv, sys.argv[:1]
    try:
        import kserve
    except ModuleNotFoundError as error:
        raise BadInput(f"--deploy: {error.name} is not installed, pip install 'routewright[serve]' brings it") from None
    finally:
        sys.argv = given
    return kserve


def predictor(deployment: Deployment, router: str, version: str, digest: str, uri: str) -> dict[str, Any]:
    """The predictor of one model version, without any canary field; ``uri`` is where KServe finds the model folder."""
    from kubernetes.client import (
        V1Capabilities,
        V1Container,
        V1ContainerPort,
        V1EmptyDirVolumeSource,
        V1EnvVar,
        V1EnvVarSource,
        V1HTTPGetAction,
        V1Lifecycle,
        V1LifecycleHandler,
        V1ObjectFieldSelector,
        V1PersistentVolumeClaimVolumeSource,
        V1PodSecurityContext,
        V1Probe,
        V1ResourceRequirements,
        V1SeccompProfile,
        V1SecretKeySelector,
        V1SecurityContext,
        V1SleepAction,
        V1Volume,
        V1VolumeMount,
    )

    log, standard = deployment.log, deployment.mode == "Standard"
    args = list(deployment.args) or ["serve", router, "--model", MODEL_DIR, "--host", "0.0.0.0", "--port", "8080"]
    plain = {"STORAGE_URI": uri, THREADS: str(threads_within(deployment.cpu)), **deployment.env}
    variables = [V1EnvVar(name=name, value=value) for name, value in plain.items()]
    for name, place in {**deployment.secret_env, **({LOG_KEY: log.key} if log else {})}.items():
        secret, key = place.split("/")
        reference = V1SecretKeySelector(name=secret, key=key)
        variables.append(V1EnvVar(name=name, value_from=V1EnvVarSource(secret_key_ref=reference)))
    mounts = [V1VolumeMount(name="home", mount_path=HOME)]
    volumes = [V1Volume(name="home", empty_dir=V1EmptyDirVolumeSource(size_limit=deployment.home))]
    if log:
        args += ["--log", f"{LOGS}/$(POD_NAME).jsonl"]
        field = V1ObjectFieldSelector(field_path="metadata.name")
        variables.append(V1EnvVar(name="POD_NAME", value_from=V1EnvVarSource(field_ref=field)))
        mounts.append(V1VolumeMount(name="log", mount_path=LOGS, sub_path=log.path))
        claim = V1PersistentVolumeClaimVolumeSource(claim_name=log.claim)
        volumes.append(V1Volume(name="log", persistent_volume_claim=claim))
    resources = {"cpu": deployment.cpu, "memory": deployment.memory}
    if deployment.gpus:
        resources["nvidia.com/gpu"] = str(deployment.gpus)
    container = V1Container(
        name=CONTAINER,
        image=deployment.image,
        command=list(deployment.command) or None,
        args=args,
        env=variables,
        ports=[V1ContainerPort(container_port=8080, protocol="TCP")],
        readiness_probe=V1Probe(http_get=V1HTTPGetAction(path="/v2/health/ready", port=8080), timeout_seconds=2),
        liveness_probe=V1Probe(
            http_get=V1HTTPGetAction(path="/v2/health/live", port=8080),
            period_seconds=20,
            timeout_seconds=5,
            failure_threshold=6,
        ),
        # Knative takes neither these nor a spread, and drains pods itself.
        lifecycle=V1Lifecycle(pre_stop=V1LifecycleHandler(sleep=V1SleepAction(seconds=PRE_STOP_S))) if standard else None,
        resources=V1ResourceRequirements(requests=resources, limits=resources),
        security_context=V1SecurityContext(
            allow_privilege_escalation=False,
            capabilities=V1Capabilities(drop=["ALL"]),
            read_only_root_filesystem=True,
            run_as_non_root=True,
            seccomp_profile=V1SeccompProfile(type="RuntimeDefault"),
        ),
        volume_mounts=mounts,
    )
    # The log's volume, which is root's on block storage until it is given to a group; Knative takes no such field.
    owner = V1PodSecurityContext(fs_group=GROUP, fs_group_change_policy="OnRootMismatch")
    spec = kserve_sdk().V1beta1PredictorSpec(
        containers=[container],
        volumes=volumes,
        security_context=owner if log and standard else None,
        service_account_name=deployment.service_account,
        automount_service_account_token=False,
        node_selector=deployment.node_selector or None,
        tolerations=[toleration.model_dump(exclude_none=True) for toleration in deployment.tolerations] or None,
        topology_spread_constraints=spread(deployment.service) if standard else None,
        termination_grace_period_seconds=STOP_S if standard else None,
        min_replicas=deployment.min_replicas,
        max_replicas=max(deployment.max_replicas, deployment.min_replicas),
        timeout=deployment.timeout_s,
        labels={**model_labels(version, digest), NO_SIDECAR: "false"},
        annotations=model_annotations(version, digest),
    )
    made = as_json(spec)
    if deployment.mode == "Standard":
        # Standard mode tells the predictors apart by name, and promotes one by naming it: other settings, another name.
        made["name"] = f"v{version}-{hash_of(made)[:6]}"
    return made


def spread(service: str) -> list[dict[str, Any]]:
    """One zone or one node that fails takes not all replicas of a router, where the cluster has several."""
    pods = {"matchLabels": {"serving.kserve.io/inferenceservice": service, "component": "predictor"}}
    return [
        {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": pods}
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]


def model_labels(version: str, digest: str) -> dict[str, str]:
    """Labels that find a model's objects; a label holds 63 characters, so the digest is cut to 16."""
    return {VERSION: version, DIGEST: digest[:16]}


def model_annotations(version: str, digest: str) -> dict[str, str]:
    """The model in full, and what scrapes /metrics."""
    scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": "8080", "prometheus.io/path": "/metrics"}
    return {VERSION: version, DIGEST: digest, **scrape}


def hash_of(spec: Mapping[str, Any]) -> str:
    """16 hex digits over a predictor as it was asked for; what the API server adds later does not count."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def inference_service(deployment: Deployment, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The InferenceService that gives all traffic to the predictor ``spec``."""
    from kubernetes.client import V1ObjectMeta

    annotations = {**spec["annotations"], MODE: deployment.mode, PREDICTOR: hash_of(spec)}
    service = kserve_sdk().V1beta1InferenceService(
        api_version="serving.kserve.io/v1beta1",
        kind="InferenceService",
        metadata=V1ObjectMeta(
            name=deployment.service,
            namespace=deployment.namespace,
            labels={**spec["labels"], "app.kubernetes.io/managed-by": "routewright"},
            annotations=annotations,
        ),
        spec=kserve_sdk().V1beta1InferenceServiceSpec(predictor=dict(spec)),
    )
    return as_json(service)


def standard_canary(spec: Mapping[str, Any], percent: int) -> dict[str, Any]:
    """The entry of ``spec.canary`` for a predictor; what scales is the stable predictor, a canary may not ask for more."""
    alone = {name: value for name, value in spec.items() if name not in ("maxReplicas", "minReplicas")}
    return as_json(kserve_sdk().V1beta1CanarySpec(predictor=alone, traffic_percent=percent))


def as_json(model: Any) -> dict[str, Any]:
    """A model of the SDKs as the API server takes it: camel case, without None."""
    from kubernetes.client import ApiClient

    return cast(dict[str, Any], ApiClient().sanitize_for_serialization(model))


def asked_for(live: Mapping[str, Any]) -> dict[str, Any]:
    """An object without what the API server and the controller wrote into it."""
    metadata = live["metadata"]
    kept = {name: metadata[name] for name in ("name", "namespace", "labels", "annotations") if name in metadata}
    return {**{name: live[name] for name in ("apiVersion", "kind")}, "metadata": kept, "spec": live["spec"]}


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The manifest as YAML."""
    return yaml.safe_dump(dict(manifest), sort_keys=False, allow_unicode=True)


def manifest_diff(live: Mapping[str, Any] | None, manifest: Mapping[str, Any]) -> str:
    """Unified diff from what is deployed to the manifest; empty where they are the same."""
    before = manifest_text(asked_for(live)).splitlines(keepends=True) if live else []
    after = manifest_text(manifest).splitlines(keepends=True)
    if not live:
        return "".join(difflib.unified_diff(before, after, "deployed: nothing", "promoted"))
    # Same order of keys on both sides, else the diff is about nothing.
    before, after = (
        yaml.safe_dump(side, sort_keys=True, allow_unicode=True).splitlines(keepends=True)
        for side in (asked_for(live), dict(manifest))
    )
    return "".join(difflib.unified_diff(before, after, "deployed", "promoted"))


def revision_of(name: str) -> str:
    """A name that is safe inside PromQL; BadInput otherwise."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name):
        raise BadInput(f"revision {name!r}: expected a Kubernetes name")
    return name
