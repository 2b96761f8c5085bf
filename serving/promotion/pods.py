"""What the pods of pipelines and those of predictors have in common: amounts, threads, tolerations."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Annotated, Literal

from kubernetes.utils.quantity import parse_quantity
from pydantic import BaseModel, ConfigDict, Field, model_validator

THREADS = "OMP_NUM_THREADS"

Cpu = Annotated[str, Field(pattern=r"^([0-9]+|[0-9]+m|[0-9]*\.[0-9]+)$")]
Memory = Annotated[str, Field(pattern=r"^[0-9]+([EPTGMK]i?)?$")]


class Toleration(BaseModel):
    """A taint of nodes that a pod may run on, as Kubernetes has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None

    @model_validator(mode="after")
    def _as_the_scheduler_reads_it(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("expected no value with operator Exists")
        if self.key is None and self.operator != "Exists":
            raise ValueError("expected a key, or operator Exists for all taints")
        return self


def quantity(text: str) -> Decimal:
    """A Kubernetes quantity as a number."""
    return Decimal(parse_quantity(text))


def threads_within(cpu_limit: str, processes: int = 1) -> int:
    """Threads of each process of a pod: by itself torch takes one for each core of the node, and a limit stops them."""
    return max(1, math.ceil(quantity(cpu_limit) / processes))
