"""Placement: where the stages of a pipeline run on a cluster (configs/placement/*.yaml), put on its tasks as it is compiled.

What is trained is the profile's business, and a stage knows of neither. Secrets are named here and never held: names and
plain values are fixed as a pipeline is compiled, because KFP takes neither from pipeline parameters.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import kfp
import yaml
from kfp import dsl, kubernetes
from kfp.dsl.graph_component import GraphComponent
from kfp.dsl.pipeline_context import Pipeline
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.train_job import NAMESPACE, POD_NAME, POD_UID, TRAIN_JOB
from pipelines.trainjob import GROUP, train_job
from routewright.errors import BadInput
from routewright.validation import fault
from serving.promotion.pods import THREADS, Cpu, Memory, Toleration, quantity, threads_within

PLACEMENTS = Path(__file__).resolve().parent.parent / "configs" / "placement"
WORK = "ROUTEWRIGHT_WORK"
# Other counts reach the pod unchanged since this version of KFP only.
USUAL_GPU_COUNTS, ANY_GPU_COUNT_SINCE = (1, 2, 4, 8, 16), Version("2.17")

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Folder = Annotated[str, Field(pattern=r"^/[^:]*[^:/]$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Amount(_Strict):
    request: str | None = None
    limit: str | None = None

    @model_validator(mode="after")
    def _within_limit(self) -> _Amount:
        if self.request and self.limit and quantity(self.request) > quantity(self.limit):
            raise ValueError(f"expected a request of at most the limit {self.limit}, found {self.request}")
        return self


class CpuAmount(_Amount):
    request: Cpu | None = None
    limit: Cpu | None = None


class MemoryAmount(_Amount):
    request: Memory | None = None
    limit: Memory | None = None


class Gpu(_Strict):
    """Accelerators of one task, or of each node of a distributed one."""

    count: int = Field(strict=True)
    type: str = Field("nvidia.com/gpu", description="the resource that the device plugin offers")

    @model_validator(mode="after")
    def _count_is_possible(self) -> Gpu:
        if self.count < 1:
            raise ValueError(f"expected a count of at least 1, found {self.count}; a stage without GPU has gpu: null")
        if self.count not in USUAL_GPU_COUNTS and Version(kfp.__version__) < ANY_GPU_COUNT_SINCE:
            usual = ", ".join(map(str, USUAL_GPU_COUNTS))
            raise ValueError(f"expected a count of {usual}: {self.count} needs kfp {ANY_GPU_COUNT_SINCE} or newer")
        return self


class NodeLabel(_Strict):
    """One expression of a node affinity; all without ``weight`` must hold, the others are preferences."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = "In"
    values: tuple[str, ...] = ()
    weight: int | None = Field(default=None, ge=1, le=100)

    def expression(self) -> dict[str, Any]:
        """As Kubernetes has it."""
        return {"key": self.key, "operator": self.operator, **({"values": list(self.values)} if self.values else {})}


class Volume(_Strict):
    """A persistent volume claim that exists when the pipeline runs."""

    claim: Name
    mount: Folder
    sub_path: str = ""


class EmptyDir(_Strict):
    """A folder that lives as long as the task."""

    name: Name
    mount: Folder
    size: Memory


class FromSecret(_Strict):
    """Environment variables from keys of a Secret or a ConfigMap: {variable: key}."""

    name: Name
    env: dict[Variable, str] = Field(min_length=1)
    optional: bool = False

    @model_validator(mode="after")
    def _each_key_once(self) -> FromSecret:
        check_keys(self.env)
        return self


class FromConfigMap(_Strict):
    """Environment variables from keys of a ConfigMap, or its files under ``mount``."""

    name: Name
    env: dict[Variable, str] = {}
    mount: Folder | None = None
    optional: bool = False

    @model_validator(mode="after")
    def _is_used(self) -> FromConfigMap:
        if bool(self.env) == bool(self.mount):
            raise ValueError("expected either env or mount")
        check_keys(self.env)
        return self


class Retry(_Strict):
    """Retries of a task that failed or was preempted; it continues from its checkpoint where it has a work volume."""

    count: int = Field(ge=0, le=20)
    backoff_s: int = Field(60, ge=0, description="before the first retry")
    factor: float = Field(2.0, ge=1, description="each wait over the one before")
    max_s: int = Field(3600, ge=0, description="no longer than this in all")


class StagePlacement(_Strict):
    """Where one stage runs. A field that a stage gives replaces the default's; null takes it away."""

    cpu: CpuAmount | None = None
    memory: MemoryAmount | None = None
    gpu: Gpu | None = None
    shm: Memory | None = Field(default=None, description="size of /dev/shm in memory; without it a pod has 64 MB")
    node_selector: dict[str, str] = {}
    node_affinity: tuple[NodeLabel, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    work: Volume | None = Field(default=None, description="where stages keep what a retry or a later run continues from")
    volumes: tuple[Volume, ...] = ()
    empty_dirs: tuple[EmptyDir, ...] = ()
    env: dict[Variable, str] = {}
    secrets: tuple[FromSecret, ...] = ()
    config_maps: tuple[FromConfigMap, ...] = ()
    image_pull_secrets: tuple[Name, ...] = ()
    labels: dict[str, str] = {}
    run_as_user: int = Field(default=10001, ge=1, description="numeric: the kubelet cannot tell that a name is not root")
    timeout_s: int | None = Field(default=None, ge=1, description="of one attempt")
    retry: Retry | None = None
    distributed: int | None = Field(default=None, ge=2, description="nodes of the TrainJob that the stage trains in")
    sharded: bool = Field(default=False, description="FSDP: each process keeps a part of the weights, not all of them")

    @model_validator(mode="after")
    def _is_coherent(self) -> StagePlacement:
        for name in self.env:
            if re.search(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD", name.upper()):
                raise ValueError(f"env.{name}: expected no secret here, name a key of a Secret under secrets")
        asks = [*self.node_selector, *(toleration.key or "" for toleration in self.tolerations)]
        if self.gpu is None and any(key.startswith("nvidia.com/") for key in asks):
            raise ValueError("gpu: expected a count of at least 1, the stage asks for GPU nodes")
        limit = self.memory and self.memory.limit
        if self.shm and limit and quantity(self.shm) >= quantity(limit):
            raise ValueError(f"shm: expected less than the memory limit {limit}, of which it is a part, found {self.shm}")
        if self.distributed and self.work is None:
            raise ValueError("distributed: expected a work volume, which the nodes share")
        if self.sharded and not (self.distributed and self.gpu):
            raise ValueError("sharded: expected distributed and gpu, weights are spread over the GPUs of several nodes")
        return self


class Claim(_Strict):
    """A persistent volume claim that the stages mount."""

    size: Memory
    storage_class: Name = Field(description="always stated: a cluster's default is another one elsewhere")
    access_modes: tuple[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"], ...] = (
        "ReadWriteMany",
    )


class Placement(_Strict):
    """One placement file. The service account is the run's: KFP has one for all tasks, and it is given on submission."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$")]
    service_account: Name
    promotion_account: Name | None = Field(default=None, description="of a run that deploys; it may change what is served")
    train_runtime: Name = "torch-distributed"
    claims: dict[Name, Claim] = {}
    defaults: StagePlacement = StagePlacement()
    stages: dict[str, StagePlacement] = {}

    def of(self, stage: str) -> StagePlacement:
        """Where a stage runs."""
        return self.stages.get(stage, self.defaults)

    def account_for(self, parameters: Mapping[str, Any]) -> str:
        """The service account of a run with these parameters."""
        deploys = parameters.get("promote") and parameters.get("deploy")
        return (self.promotion_account if deploys else None) or self.service_account


def check_keys(env: Mapping[str, str]) -> None:
    """ValueError where two variables take one key: KFP would leave out one of them without a word."""
    for key in env.values():
        if list(env.values()).count(key) > 1:
            raise ValueError(f"env: expected each key for one variable, found {key} for several")


def shipped_placements() -> list[str]:
    """Names of the placements in configs/placement."""
    return sorted(file.stem for file in PLACEMENTS.glob("*.yaml"))


def load_placement(
    name_or_path: str, known_stages: Collection[str], distributed: Collection[str] = (), sharded: Collection[str] = ()
) -> Placement:
    """A shipped placement by name, or any placement file by path; BadInput names file and field.

    ``known_stages`` are the stages of all pipelines, which the file may name, ``distributed`` those of them that can train
    on several nodes, ``sharded`` those that can keep their weights in parts there.
    """
    path = PLACEMENTS / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        raise BadInput(
            f"placement '{name_or_path}' does not exist: expected one of {', '.join(shipped_placements())}, or a file"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path}: expected a YAML placement, got {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a mapping with service_account, defaults and stages")
    defaults, stages = content.get("defaults") or {}, content.get("stages") or {}
    for field, value in (("defaults", defaults), ("stages", stages)):
        if not isinstance(value, dict):
            raise BadInput(f"{path}: field {field}: expected a mapping")
    for stage, given in stages.items():
        if stage not in known_stages:
            expected = ", ".join(sorted(known_stages))
            raise BadInput(f"{path}: field stages.{stage}: no pipeline has that stage, expected one of {expected}")
        if not isinstance(given, dict):
            raise BadInput(f"{path}: field stages.{stage}: expected a mapping")
        for field, able in (("distributed", distributed), ("sharded", sharded)):
            if given.get(field) and stage not in able:
                expected = ", ".join(sorted(able)) or "none"
                raise BadInput(f"{path}: field stages.{stage}.{field}: expected for these stages only: {expected}")
    for field in ("distributed", "sharded"):
        if defaults.get(field):
            raise BadInput(f"{path}: field defaults.{field}: expected under the stages that train on several nodes")
    merged = {stage: without_nulls({**defaults, **given}) for stage, given in stages.items()}
    try:
        placement = Placement.model_validate(
            {"name": path.stem, **content, "defaults": without_nulls(defaults), "stages": merged}
        )
    except ValidationError as error:
        raise BadInput(f"{path}: field {fault(error, Placement)}") from None
    check_claims(path, placement)
    return placement


def without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not null: a stage takes a default away by giving null."""
    return {name: value for name, value in given.items() if value is not None}


def check_claims(path: Path, placement: Placement) -> None:
    """BadInput where a stage mounts a claim that the file does not describe, or several things in one folder."""
    named = {"defaults": placement.defaults, **placement.stages}
    for stage, settings in named.items():
        where = stage if stage == "defaults" else f"stages.{stage}"
        volumes = [volume for volume in (settings.work, *settings.volumes) if volume]
        for volume in volumes:
            if volume.claim not in placement.claims:
                raise BadInput(
                    f"{path}: field {where}: claim {volume.claim} is not under claims, where its storage class is stated"
                )
        mounts = [volume.mount for volume in volumes] + [folder.mount for folder in settings.empty_dirs]
        mounts += [config.mount for config in settings.config_maps if config.mount] + ["/dev/shm"] * bool(settings.shm)
        for mount in mounts:
            if mounts.count(mount) > 1:
                raise BadInput(f"{path}: field {where}: {mount} is mounted more than once")


def placed(pipeline: GraphComponent, placement: Placement) -> GraphComponent:
    """The pipeline with every task, those in conditions too, where the placement puts it."""
    function: Callable[..., Any] = pipeline.pipeline_func

    @functools.wraps(function)
    def with_placement(*arguments: Any, **named: Any) -> Any:
        outputs = function(*arguments, **named)
        for task in Pipeline.get_default_pipeline().tasks.values():
            if task.container_spec is None:
                # The placement of its tasks was settled when it was made: call its function inside this one instead.
                raise ValueError(f"{task.name} is a pipeline, whose tasks cannot be placed from outside")
            where = placement.of(task.component_spec.name)
            if where.distributed:
                where = hand_over(task, where, placement)
            place(task, where)
        return outputs

    made: GraphComponent = dsl.pipeline(with_placement, name=pipeline.name, description=pipeline.description)
    return made


def stages_of(pipeline: GraphComponent) -> set[str]:
    """Names of the stages of a pipeline, those in conditions too."""
    components = pipeline.pipeline_spec.components.items()
    return {name.removeprefix("comp-") for name, component in components if component.executor_label}


def hand_over(task: dsl.PipelineTask, where: StagePlacement, placement: Placement) -> StagePlacement:
    """Tell the task of the TrainJob that it trains in (`components.train_job`); returns where the task itself runs.

    It only lays out inputs and watches, on any node that mounts the work volume.
    """
    env = {**task.container_spec.env, **where.env, WORK: where.work.mount if where.work else ""}
    job = train_job(where, placement.train_runtime, task.container_spec.image, env)
    task.set_env_variable(TRAIN_JOB, json.dumps(job))
    for name, field in ((POD_NAME, "name"), (POD_UID, "uid"), (NAMESPACE, "namespace")):
        kubernetes.use_field_path_as_env(task, name, f"metadata.{field}")
    return StagePlacement(
        **where.model_dump(include={"work", "volumes", "env", "secrets", "config_maps", "image_pull_secrets"}),
        **where.model_dump(include={"labels", "run_as_user", "timeout_s", "retry"}),
        cpu=CpuAmount(request="500m", limit="2"),
        memory=MemoryAmount(request="1Gi", limit="8Gi"),
    )


def place(task: dsl.PipelineTask, where: StagePlacement) -> None:
    """Put one task there, with kfp-kubernetes.

    KFP itself drops all capabilities and sets the seccomp profile RuntimeDefault, which the restricted Pod Security
    standard asks for beside a user that is not root.
    """
    if where.cpu:
        set_amounts(where.cpu, task.set_cpu_request, task.set_cpu_limit)
    if where.memory:
        set_amounts(where.memory, task.set_memory_request, task.set_memory_limit)
    if where.gpu:
        task.set_accelerator_type(where.gpu.type).set_accelerator_limit(where.gpu.count)
    if where.retry:
        task.set_retry(
            num_retries=where.retry.count,
            backoff_duration=f"{where.retry.backoff_s}s",
            backoff_factor=where.retry.factor,
            backoff_max_duration=f"{where.retry.max_s}s",
        )
    if where.cpu and where.cpu.limit:
        task.set_env_variable(THREADS, str(threads_within(where.cpu.limit)))
    for name, value in where.env.items():
        task.set_env_variable(name, value)
    if where.work:
        task.set_env_variable(WORK, where.work.mount)
    # Without a group, one with a user has group 0; the pod's fsGroup, KFP has no field for (`compile.volume_jobs`).
    kubernetes.set_security_context(task, run_as_user=where.run_as_user, run_as_group=GROUP, run_as_non_root=True)
    if where.timeout_s:
        kubernetes.set_timeout(task, where.timeout_s)
    choose_nodes(task, where)
    mount(task, where)
    for secret in where.secrets:
        keys = {key: variable for variable, key in secret.env.items()}
        kubernetes.use_secret_as_env(task, secret.name, keys, secret.optional)
    if where.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(where.image_pull_secrets))
    for key, value in where.labels.items():
        kubernetes.add_pod_label(task, key, value)


def set_amounts(amount: CpuAmount | MemoryAmount, request: Callable[[str], Any], limit: Callable[[str], Any]) -> None:
    """Set what is given of request and limit."""
    if amount.request:
        request(amount.request)
    if amount.limit:
        limit(amount.limit)


def choose_nodes(task: dsl.PipelineTask, where: StagePlacement) -> None:
    """Node selector, affinity and tolerations."""
    for key, value in where.node_selector.items():
        kubernetes.add_node_selector(task, key, value)
    required = [label.expression() for label in where.node_affinity if label.weight is None]
    if required:
        kubernetes.add_node_affinity(task, match_expressions=required)
    for label in where.node_affinity:
        if label.weight is not None:
            kubernetes.add_node_affinity(task, match_expressions=[label.expression()], weight=label.weight)
    for toleration in where.tolerations:
        kubernetes.add_toleration(task, **toleration.model_dump())


def mount(task: dsl.PipelineTask, where: StagePlacement) -> None:
    """Claims, folders of the task's own, shared memory and config maps."""
    for volume in (where.work, *where.volumes):
        if volume:
            kubernetes.mount_pvc(task, volume.claim, volume.mount, volume.sub_path)
    for folder in where.empty_dirs:
        kubernetes.empty_dir_mount(task, folder.name, folder.mount, size_limit=folder.size)
    if where.shm:
        kubernetes.empty_dir_mount(task, "shm", "/dev/shm", medium="Memory", size_limit=where.shm)
    for config in where.config_maps:
        if config.mount:
            kubernetes.use_config_map_as_volume(task, config.name, config.mount, config.optional)
        else:
            keys = {key: variable for variable, key in config.env.items()}
            kubernetes.use_config_map_as_env(task, config.name, keys, config.optional)
