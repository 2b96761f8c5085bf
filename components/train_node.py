"""One process of a distributed training: ``torchrun -m components.train_node CALL.json`` on every node of a TrainJob."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.stage import write_atomically
from components.train_job import MODEL, PATH, VALUE
from routewright.errors import BadInput, StageFailed


def main(call: Path) -> int:
    """Make the call; its exit code. What a person has to know of a failure goes beside the call."""
    from accelerate import PartialState
    from torch.cuda import is_available

    told = json.loads(call.read_text(encoding="utf-8"))
    function = found(told["function"])
    arguments = {name: argument(given) for name, given in told["arguments"].items()}
    state = PartialState(cpu=not is_available())
    with contextlib.ExitStack() as stack:
        if not state.is_main_process:
            # All processes go on from the same checkpoint, and only the first one writes to the shared folder.
            own = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "out"
            if arguments["out"].is_dir():
                shutil.copytree(arguments["out"], own)
            arguments["out"] = own
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        state.wait_for_everyone()
        try:
            function(**arguments)
        except (BadInput, StageFailed) as error:
            if state.is_main_process:
                sentence = json.dumps({"bad_input": isinstance(error, BadInput), "sentence": str(error)})
                write_atomically(call.with_name(call.name.replace(".call.json", ".error.json")), sentence)
            print(error, file=sys.stderr)
            return 2 if isinstance(error, BadInput) else 1
    state.destroy_process_group()
    return 0


def found(name: str) -> Any:
    """What "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def argument(given: Mapping[str, Any]) -> Any:
    """An argument as the stage gave it: a path, a profile or a JSON value."""
    if PATH in given:
        return Path(given[PATH])
    return found(given[MODEL]).model_validate(given[VALUE]) if MODEL in given else given[VALUE]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
