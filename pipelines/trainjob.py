"""The TrainJob of a distributed stage: what its placement says, as Kubeflow Trainer takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.promotion.pods import THREADS, threads_within

if TYPE_CHECKING:
    from pipelines.placement import FromConfigMap, StagePlacement, Volume

# Of the runtime torch-distributed: the job of the training nodes, and the container that trains.
NODE = "node"
# That of the images' user. A volume of block storage is root's until a pod with this fsGroup has mounted it.
GROUP = 10001
# Label of the Job that makes a volume writable for that group: the claim.
WORK_VOLUME = "routewright/work-volume"
# Accelerate's environment for FSDP; checkpoints are gathered, so that one folder holds all of them.
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def train_job(where: StagePlacement, runtime: str, image: str, env: dict[str, str]) -> dict[str, Any]:
    """The TrainJob without name, owner and command, which its step knows when it runs."""
    amounts: dict[str, dict[str, str]] = {"requests": {}, "limits": {}}
    for resource, amount in (("cpu", where.cpu), ("memory", where.memory)):
        for kind, value in (("requests", amount and amount.request), ("limits", amount and amount.limit)):
            if value:
                amounts[kind][resource] = value
    if where.gpu:
        for kind in amounts:
            amounts[kind][where.gpu.type] = str(where.gpu.count)
    processes = where.gpu.count if where.gpu else 1
    if where.cpu and where.cpu.limit:
        env = {THREADS: str(threads_within(where.cpu.limit, processes)), **env}
    spec: dict[str, Any] = {
        "runtimeRef": {"name": runtime},
        "trainer": {
            "image": image,
            "numNodes": where.distributed,
            "numProcPerNode": processes,
            "resourcesPerNode": {kind: found for kind, found in amounts.items() if found},
            "env": variables(where, {**env, **FSDP} if where.sharded else env),
        },
        "runtimePatches": [{"manager": "routewright", "trainingRuntimeSpec": {"template": {"spec": job_set(where)}}}],
    }
    if where.timeout_s:
        spec["activeDeadlineSeconds"] = where.timeout_s
    metadata = {"labels": {**where.labels}}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def variables(where: StagePlacement, env: dict[str, str]) -> list[dict[str, Any]]:
    """The stage's environment on a node."""
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in env.items()]
    for source, kind in [(s, "secretKeyRef") for s in where.secrets] + [(c, "configMapKeyRef") for c in where.config_maps]:
        for name, key in source.env.items():
            reference = {"name": source.name, "key": key, "optional": source.optional}
            found.append({"name": name, "valueFrom": {kind: reference}})
    return found


def job_set(where: StagePlacement) -> dict[str, Any]:
    """Where the nodes' pods run, what they mount and as whom."""
    return {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": pod_template(where, {"name": NODE})}}}]}


def pod_template(where: StagePlacement, container: dict[str, Any]) -> dict[str, Any]:
    """A pod with one container, where the placement says, with what it mounts and as its user."""
    volumes, mounts = volumes_of(where)
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": where.run_as_user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod: dict[str, Any] = {
        "nodeSelector": where.node_selector,
        "tolerations": [toleration.model_dump(exclude_none=True) for toleration in where.tolerations],
        "affinity": affinity(where),
        "imagePullSecrets": [{"name": name} for name in where.image_pull_secrets],
        "securityContext": {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "volumes": volumes,
        "containers": [{**container, "volumeMounts": mounts, "securityContext": restricted}],
    }
    # KFP keeps Istio's proxy, which the restricted standard refuses, off its steps; here nobody else does.
    labels = {"sidecar.istio.io/inject": "false", **where.labels}
    return {"metadata": {"labels": labels}, "spec": {name: value for name, value in pod.items() if value}}


def volumes_of(where: StagePlacement) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes, mounts) of a node's pod."""
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    claims: list[Volume] = [volume for volume in (where.work, *where.volumes) if volume]
    for claim in dict.fromkeys(volume.claim for volume in claims):
        volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    for volume in claims:
        sub_path = {"subPath": volume.sub_path} if volume.sub_path else {}
        mounts.append({"name": volume.claim, "mountPath": volume.mount, **sub_path})
    for folder in where.empty_dirs:
        volumes.append({"name": folder.name, "emptyDir": {"sizeLimit": folder.size}})
        mounts.append({"name": folder.name, "mountPath": folder.mount})
    if where.shm:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": where.shm}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    mounted: list[FromConfigMap] = [config for config in where.config_maps if config.mount]
    for config in mounted:
        volumes.append({"name": config.name, "configMap": {"name": config.name, "optional": config.optional}})
        mounts.append({"name": config.name, "mountPath": config.mount})
    return volumes, mounts


def affinity(where: StagePlacement) -> dict[str, Any]:
    """The node affinity as Kubernetes has it."""
    required = [label.expression() for label in where.node_affinity if label.weight is None]
    preferred = [
        {"weight": label.weight, "preference": {"matchExpressions": [label.expression()]}}
        for label in where.node_affinity
        if label.weight is not None
    ]
    found: dict[str, Any] = {}
    if required:
        found["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": [{"matchExpressions": required}]}
    if preferred:
        found["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    return {"nodeAffinity": found} if found else {}
