"""Preflight: what a pipeline with its placement needs, looked up where it should be, before a run fails over it.

Each finding says how it is mended. What this account may not look at is told as not checked, and does not fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.placement import Placement, StagePlacement
from pipelines.trainjob import GROUP, WORK_VOLUME
from routewright.errors import BadInput
from serving.promotion.pods import quantity

if TYPE_CHECKING:
    from kubernetes.client import V1Node, V1PersistentVolumeClaim

REQUEST_S = 15
_DOCKER = ".dockerconfigjson"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``passed`` is None where it could not be looked at, ``mend`` says what helps."""

    what: str
    passed: bool | None
    found: str
    mend: str = ""

    def __str__(self) -> str:
        mark = {True: "✓", False: "✗", None: "?"}[self.passed]
        return f"{mark} {self.what}: {self.found}" + (f"; {self.mend}" if self.mend else "")


def check_endpoint(connect: Callable[[], Any]) -> Finding:
    """KFP's API answers and takes the token."""
    try:
        connect()
    except BadInput as error:
        return Finding("KFP endpoint", False, str(error))
    return Finding("KFP endpoint", True, "answers and takes the token")


def check_cluster(
    connect: Callable[[], Any], namespace: str, placement: Placement, stages: Collection[str], autoscaled: bool
) -> Iterator[Finding]:
    """What the namespace and the nodes hold of what the stages ask for; ``autoscaled``: GPU pools may be empty now."""
    from kubernetes import client
    from urllib3.exceptions import HTTPError

    asked = {stage: placement.of(stage) for stage in sorted(stages)}
    try:
        connect()
        core, storage = client.CoreV1Api(), client.StorageV1Api()
        yield from check_namespace(core, namespace, placement.service_account, placement.promotion_account)
        yield from check_names(core, namespace, asked.values())
        yield from check_claims(core, storage, namespace, placement, asked.values())
        yield from check_work_volumes(client.BatchV1Api(), namespace, asked.values())
        yield from check_quota(core, namespace, asked)
        yield from check_nodes(core, asked, autoscaled)
    except BadInput as error:
        yield Finding("cluster", False, str(error), "kubectl config use-context chooses another")
    except HTTPError as error:
        cause = type(getattr(error, "reason", None) or error).__name__
        yield Finding("cluster", False, f"the API server does not answer ({cause})", "kubectl cluster-info shows why")


def look(what: str, read: Callable[..., Any], *names: str) -> Any:
    """What the API server answers, None for 404, a Finding for what this account may not see or what fails."""
    from kubernetes.client.exceptions import ApiException

    try:
        return read(*names, _request_timeout=REQUEST_S)
    except ApiException as error:
        if error.status == 404:
            return None
        if error.status == 401:
            raise BadInput("the API server does not take the credentials (401), log in to the cluster again") from None
        if error.status == 403:
            return Finding(what, None, "not checked, this account may not look at it (403)")
        return Finding(what, None, f"not checked, the API server answers {error.status} {error.reason}")


def check_namespace(core: Any, namespace: str, *accounts: str | None) -> Iterator[Finding]:
    """The namespace and the runs' service accounts."""
    readers: dict[str, tuple[Callable[..., Any], tuple[str, ...], str]] = {
        f"namespace {namespace}": (core.read_namespace, (namespace,), f"kubectl create namespace {namespace}")
    }
    for account in filter(None, accounts):
        readers[f"service account {account}"] = (
            core.read_namespaced_service_account, (account, namespace),
            f"kubectl -n {namespace} create serviceaccount {account}",
        )  # fmt: skip
    for what, (read, names, mend) in readers.items():
        found = look(what, read, *names)
        if found is None:
            yield Finding(what, False, "is not there", mend)
        else:
            yield found if isinstance(found, Finding) else Finding(what, True, "is there")


def check_names(core: Any, namespace: str, asked: Iterable[StagePlacement]) -> Iterator[Finding]:
    """Secrets and config maps are there with the keys that become variables; values are not shown."""
    wanted: dict[tuple[str, str, bool], set[str]] = {}
    for stage in asked:
        for kind, sources in (("secret", stage.secrets), ("configmap", stage.config_maps)):
            for source in sources:
                wanted.setdefault((kind, source.name, source.optional), set()).update(source.env.values())
        for name in stage.image_pull_secrets:
            wanted.setdefault(("secret", name, False), set()).add(_DOCKER)
    readers = {"secret": core.read_namespaced_secret, "configmap": core.read_namespaced_config_map}
    for (kind, name, optional), keys in sorted(wanted.items()):
        what = f"{kind} {name}"
        found = look(what, readers[kind], name, namespace)
        if isinstance(found, Finding):
            yield found
            continue
        missing = sorted(keys - ((found and found.data) or {}).keys())
        if found is not None and not missing:
            yield Finding(what, True, f"is there with {', '.join(sorted(keys))}" if keys else "is there")
            continue
        lack = f"namespace {namespace} has none of that name" if found is None else f"has no key {', '.join(missing)}"
        if optional:
            yield Finding(what, None, f"{lack}, and stages start without it")
        else:
            yield Finding(what, False, lack, f"kubectl -n {namespace} {making(kind, name, keys)}")


def making(kind: str, name: str, keys: Collection[str]) -> str:
    """The kubectl command that makes a secret or a config map with these keys."""
    if _DOCKER in keys:
        return f"create secret docker-registry {name} --docker-server=… --docker-username=… --docker-password=…"
    pairs = "".join(f" --from-literal={key}=…" for key in sorted(keys)) or " --from-file=…"
    return f"create {'secret generic' if kind == 'secret' else kind} {name}{pairs}"


def check_claims(
    core: Any, storage: Any, namespace: str, placement: Placement, asked: Iterable[StagePlacement]
) -> Iterator[Finding]:
    """Persistent volume claims and their storage classes."""
    used = {volume.claim for stage in asked for volume in (stage.work, *stage.volumes) if volume}
    for name in sorted(used):
        want = placement.claims[name]
        what = f"storage class {want.storage_class}"
        kind = look(what, storage.read_storage_class, want.storage_class)
        if kind is None:
            yield Finding(
                what, False, "the cluster has none of that name",
                f"name one that kubectl get storageclass lists under claims.{name}.storage_class",
            )  # fmt: skip
        else:
            yield kind if isinstance(kind, Finding) else Finding(what, True, "is there")
        found = look(f"claim {name}", core.read_namespaced_persistent_volume_claim, name, namespace)
        if found is None:
            mend = f"routewright compile --placement … writes gitops/claims.yaml, kubectl -n {namespace} apply -f it"
            yield Finding(f"claim {name}", False, f"namespace {namespace} has none of that name", mend)
        elif isinstance(found, Finding):
            yield found
        else:
            waits = getattr(kind, "volume_binding_mode", None) == "WaitForFirstConsumer"
            yield claim_finding(f"claim {name}", found, want.storage_class, want.size, want.access_modes, waits)


def claim_finding(
    what: str, found: V1PersistentVolumeClaim, storage_class: str, size: str, modes: Collection[str], waits: bool
) -> Finding:
    """How a claim that is there differs from the placement; ``waits``: its class binds when the first pod comes."""
    held = found.spec.resources.requests["storage"]
    again = "make it again, or change the placement"
    if found.spec.storage_class_name != storage_class:
        return Finding(what, False, f"has storage class {found.spec.storage_class_name}, expected {storage_class}", again)
    if quantity(held) < quantity(size):
        return Finding(what, False, f"holds {held}, expected {size}", "enlarge it with kubectl edit pvc")
    if lacking := sorted(set(modes) - set(found.spec.access_modes)):
        return Finding(what, False, f"does not allow {', '.join(lacking)}", again)
    if found.status.phase != "Bound" and not (found.status.phase == "Pending" and waits):
        return Finding(what, False, f"is {found.status.phase}", "kubectl describe pvc tells why")
    return Finding(what, True, f"{held}, class {storage_class}")


def check_work_volumes(batch: Any, namespace: str, asked: Iterable[StagePlacement]) -> Iterator[Finding]:
    """What the Job that the compiler writes for each work volume found: whether the steps' group can write to it."""
    found = look("work volumes", batch.list_namespaced_job, namespace)
    if isinstance(found, Finding):
        yield found
        return
    for claim in sorted({stage.work.claim for stage in asked if stage.work}):
        what = f"volume {claim}"
        jobs = [job for job in found.items if (job.metadata.labels or {}).get(WORK_VOLUME) == claim[:63]] if found else []
        if not jobs:
            yield Finding(what, None, "not tried, no Job of gitops/claims.yaml is there")
            continue
        job = max(jobs, key=lambda job: job.metadata.creation_timestamp)
        ended = {condition.type for condition in job.status.conditions or () if condition.status == "True"}
        if "Complete" in ended:
            yield Finding(what, True, "can be written to")
        elif "Failed" in ended:
            mend = f"chown {GROUP}:{GROUP} its folder there, or see kubectl -n {namespace} describe job {job.metadata.name}"
            yield Finding(what, False, f"cannot be written to by group {GROUP}", mend)
        else:
            yield Finding(what, None, f"not tried yet, job {job.metadata.name} has not ended")


def check_quota(core: Any, namespace: str, asked: Mapping[str, StagePlacement]) -> Iterator[Finding]:
    """GPUs that the namespace's quotas leave, against the stage that asks for most."""
    for kind, (count, stage) in sorted(most_gpus(asked).items()):
        what = f"quota of {kind}"
        found = look(what, core.list_namespaced_resource_quota, namespace)
        if isinstance(found, Finding):
            yield found
            continue
        rests = []
        for quota in found.items if found else []:
            hard, used = quota.status.hard or {}, quota.status.used or {}
            if f"requests.{kind}" in hard:
                rests.append(int(quantity(hard[f"requests.{kind}"]) - quantity(used.get(f"requests.{kind}", "0"))))
        if rests and min(rests) < count:
            mend = "wait until other runs end, raise the quota, or lower gpu.count"
            yield Finding(what, False, f"{min(rests)} left, stage {stage} asks for {count}", mend)
        else:
            yield Finding(what, True, f"{min(rests)} left, {count} asked" if rests else "none set")


def most_gpus(asked: Mapping[str, StagePlacement]) -> dict[str, tuple[int, str]]:
    """{resource: (largest number that one stage asks for on all its nodes, that stage)}."""
    found: dict[str, tuple[int, str]] = {}
    for stage, where in asked.items():
        if where.gpu:
            count = where.gpu.count * (where.distributed or 1)
            found[where.gpu.type] = max(found.get(where.gpu.type, (0, "")), (count, stage))
    return found


def check_nodes(core: Any, asked: Mapping[str, StagePlacement], autoscaled: bool) -> Iterator[Finding]:
    """Nodes that a GPU stage may run on have as many GPUs as it asks for."""
    gpu_stages = [(stage, where, where.gpu) for stage, where in asked.items() if where.gpu]
    if not gpu_stages:
        return
    found = look("GPU nodes", core.list_node)
    if isinstance(found, Finding) or found is None:
        yield found or Finding("GPU nodes", None, "not checked, the API server lists no nodes")
        return
    for stage, where, gpu in gpu_stages:
        what, need = f"nodes for {stage}", where.distributed or 1
        labels = ", ".join(f"{key}={value}" for key, value in where.node_selector.items()) or "any label"
        fitting = [node for node in found.items if takes(node, where)]
        sizes = sorted((int(quantity((n.status.allocatable or {}).get(gpu.type, "0"))) for n in fitting), reverse=True)
        enough = sum(size >= gpu.count for size in sizes)
        if not fitting and autoscaled:
            yield Finding(what, None, f"none with {labels} now, the autoscaler has to add {need}")
        elif enough < need:
            have = ", ".join(map(str, sizes)) or "none"
            yield Finding(
                what, False, f"{need} with {gpu.count} × {gpu.type} asked, those with {labels} have {have}",
                "label or add nodes, tolerate their taints, or lower gpu.count; --autoscaled where a pool may be empty",
            )  # fmt: skip
        else:
            yield Finding(what, True, f"{enough} with {gpu.count} or more {gpu.type}")


def takes(node: V1Node, where: StagePlacement) -> bool:
    """Whether the scheduler may put the stage on a node, by label and taint."""
    if node.spec.unschedulable or not where.node_selector.items() <= (node.metadata.labels or {}).items():
        return False
    return all(
        taint.effect == "PreferNoSchedule"
        or any(
            (t.key is None or t.key == taint.key)
            and (t.operator == "Exists" or (t.value or "") == (taint.value or ""))
            and t.effect in (None, taint.effect)
            for t in where.tolerations
        )
        for taint in node.spec.taints or []
    )


def tracking_uri(connect: Callable[[], Any], namespace: str, asked: Iterable[StagePlacement], name: str) -> str | None:
    """The value that stages see of variable ``name``, from the placement or a config map that it names."""
    from kubernetes import client
    from urllib3.exceptions import HTTPError

    for stage in asked:
        if name in stage.env:
            return stage.env[name]
        for source in stage.config_maps:
            if name not in source.env:
                continue
            try:
                connect()
                found = look(source.name, client.CoreV1Api().read_namespaced_config_map, source.name, namespace)
            except (BadInput, HTTPError):
                return None
            data: dict[str, str] = getattr(found, "data", None) or {}
            return data.get(source.env[name])
    return None
