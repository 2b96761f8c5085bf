"""The deployment file: where and how a router is served, and how a new version takes over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from routewright.errors import BadInput
from routewright.validation import fault
from serving.promotion.pods import Cpu, Memory, Toleration

Mode = Literal["Knative", "Standard"]
LOG_KEY = "ROUTEWRIGHT_LOG_KEY"
_GIB = 1 << 30
_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Prometheus(_Strict):
    """PromQL whose ``{revision}`` is the Knative revision, or in Standard mode the name of the predictor's service."""

    url: Annotated[str, Field(pattern=r"^https?://")]
    requests: str = Field(description="how many requests came in since the step began, over {window} seconds")
    error_rate: str = Field(description="share of them that failed, 0..1")
    p95: str = Field(description="95th percentile of their latency, seconds")


class MetricPages(_Strict):
    """The /metrics pages of one candidate and one champion server, in Prometheus' text format."""

    candidate: Annotated[str, Field(pattern=r"^https?://")]
    champion: Annotated[str, Field(pattern=r"^https?://")]


class Canary(_Strict):
    """How a new version takes over the traffic, and what stops it."""

    steps: tuple[Annotated[int, Field(ge=1, le=100)], ...] = (5, 25, 100)
    ready_s: float = Field(default=600.0, gt=0, description="a step that is not ready after so long is taken back")
    hold_s: float = Field(default=300.0, ge=0, description="how long every step is watched")
    poll_s: float = Field(default=5.0, gt=0)
    min_requests: int = Field(default=50, ge=1, description="a step with fewer requests says nothing and is taken back")
    error_rate_rise: float = Field(default=0.01, ge=0, le=1, description="error rate above the champion's")
    p95_ratio: float = Field(default=1.5, gt=0, description="p95 latency / the champion's")
    pages: MetricPages | None = None
    prometheus: Prometheus | None = None

    @model_validator(mode="after")
    def _steps_rise_to_all(self) -> Canary:
        if not self.steps or list(self.steps) != sorted(set(self.steps)) or self.steps[-1] != 100:
            raise ValueError(f"expected steps that rise to 100, found {list(self.steps)}")
        if self.pages is not None and self.prometheus is not None:
            raise ValueError("expected pages or prometheus, found both")
        return self


class Log(_Strict):
    """Where replicas log decisions, each in a file named after its pod: a network volume mixes lines of several writers."""

    claim: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
    path: Annotated[str, Field(pattern=r"^[^/.][^:]*$")] = Field(description="folder of the claim, of this router alone")
    key: Annotated[str, Field(pattern=r"^[^/]+/[^/]+$")] = Field(
        description="Secret/key with ROUTEWRIGHT_LOG_KEY, by which each replica knows the request ids of the others"
    )


class Deployment(_Strict):
    """Where and how a router is served (deploy.yaml); secrets belong to the service account."""

    namespace: Annotated[str, Field(pattern=rf"^{_NAME}$")]
    service: Annotated[str, Field(pattern=rf"^{_NAME}$", max_length=32, description="part of pod labels")]
    mode: Mode
    image: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}$")]
    service_account: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cpu: Cpu = "1"
    memory: Memory = "2Gi"
    home: Memory = Field(default="1Gi", description="size of the folder that it writes caches to")
    gpus: int = Field(default=0, ge=0, description="nvidia.com/gpu of each replica")
    secret_env: dict[str, Annotated[str, Field(pattern=r"^[^/]+/[^/]+$")]] = Field(
        default={}, description="{variable: name of a Secret/key in it}"
    )
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    log: Log | None = None
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=3, ge=1)
    timeout_s: int = Field(default=60, ge=1)
    storage_initializer_gib: float = Field(default=1.0, gt=0, description="its memory limit; a larger model is not deployed")
    volumes: dict[str, str] = Field(default={}, description="{folder of MLflow's artifacts: persistent volume claim}")
    canary: Canary = Canary()

    @model_validator(mode="after")
    def _variables_have_one_value(self) -> Deployment:
        if "STORAGE_URI" in {*self.env, *self.secret_env}:
            raise ValueError("expected no STORAGE_URI in env or secret_env, the promotion sets it")
        if self.log and (taken := {"POD_NAME", LOG_KEY} & {*self.env, *self.secret_env}):
            raise ValueError(f"expected no {min(taken)} in env or secret_env, log sets it")
        if "--log" in self.args and (self.log or LOG_KEY not in self.secret_env):
            raise ValueError(f"expected log instead of --log in args, or for a collector {LOG_KEY} in secret_env")
        if both := sorted(set(self.env) & set(self.secret_env)):
            raise ValueError(f"expected {both[0]} in env or in secret_env, found it in both")
        return self


def load_deployment(path: Path) -> Deployment:
    """The deployment in a YAML file; BadInput names file and field."""
    try:
        given = yaml.safe_load(path.read_bytes())
        return Deployment.model_validate(given)
    except OSError as error:
        raise BadInput(
            f"{path}: cannot be read ({error.strerror}), expected a YAML file with namespace, service, …"
        ) from None
    except ValidationError as error:
        raise BadInput(f"{path}: {fault(error, Deployment)}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path}: not YAML ({' '.join(str(error).split())})") from None


def check_size(size: int, deployment: Deployment) -> None:
    """BadInput for a model that KServe's storage initializer would be killed over; ``size`` in bytes."""
    if size > deployment.storage_initializer_gib * _GIB:
        raise BadInput(
            f"the model has {size / _GIB:.1f} GiB, more than the storage initializer's memory of "
            f"{deployment.storage_initializer_gib:g} GiB: raise that limit in KServe's ClusterStorageContainer and "
            "storage_initializer_gib in the deployment file"
        )
