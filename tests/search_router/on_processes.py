"""What torchrun starts for a test: a node's process of `components.train_node` on the CPU, perhaps killed at a step.

Accelerate gives FSDP to processes with GPUs alone, though it runs on gloo as well: told that they have one, they get it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState

from components import train_node
from routewright.language_models.training import History


def as_on_gpus(create: Any) -> Any:
    def created(self: AcceleratorState, *arguments: Any, **named: Any) -> None:
        known = PartialState._shared_state
        if os.environ.get("ACCELERATE_USE_FSDP") and known.get("distributed_type") == DistributedType.MULTI_CPU:
            known["distributed_type"] = DistributedType.MULTI_GPU
        create(self, *arguments, **named)

    return created


def dies(self: History, args: Any, state: Any, *_: Any, **__: Any) -> None:
    if state.global_step == int(os.environ["DIES_AT"]):
        os._exit(9)


if __name__ == "__main__":
    AcceleratorState.__init__ = as_on_gpus(AcceleratorState.__init__)  # type: ignore[method-assign]
    if "DIES_AT" in os.environ:
        History.on_step_begin = dies  # type: ignore[method-assign]
    sys.exit(train_node.main(Path(sys.argv[1])))
