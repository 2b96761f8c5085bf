"""A child process that scores model output: what may hang or swallow memory is killed there, not here.

sympy can spend hours on "9**9**9", in C code that no signal interrupts. One child is kept, its libraries loaded once; a
score that is late costs it its life. It is no sandbox: nothing of a completion is executed (`harmless`).
"""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import selectors
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any

from routewright.errors import BadInput

START_S = 120.0
"""For the child to load its libraries."""
READY = b"ready\n"
MEMORY_BYTES = 4 << 30
MAX_REPLY = 1 << 16

# Families whose scorers hand the answer to `eval`, directly or through sympy, and what of it may reach them.
LITERALS = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}
EXPRESSIONS = {"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"}
_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "pi", "E"}

_lock = threading.Lock()
_child: tuple[int, subprocess.Popen[bytes]] | None = None  # with the process that owns it: a fork must not share it


def harmless(family: str, answer: str) -> bool:
    """Whether an answer may reach the scorer of a family: none that could call or reach anything where it is evaluated."""
    if family in LITERALS:
        return re.fullmatch(r"[A-Za-z0-9\s,'\"\[\]#|\-]*", answer) is not None and not re.search(
            r"\b(?:for|if|in)\b", answer
        )
    if family in EXPRESSIONS:
        names = re.findall(r"[A-Za-z]+", answer)
        plain = re.fullmatch(r"[A-Za-z0-9\s+\-*/^().]*", answer) is not None and not re.search(
            r"\.\s*[A-Za-z]|[A-Za-z]\s*\.", answer
        )
        return plain and all(len(name) == 1 or name in _FUNCTIONS for name in names)
    return True


def score(request: dict[str, Any], timeout_s: float) -> float | None:
    """The child's score in [0, 1] for a request; None where it took too long, died or could not say. BadInput where no child
    can be started, which no answer is to blame for.

    ``request``: {"kind": "math", "answer", "completion"} or {"kind": "reasoning-gym", "family", "seed", "index",
    "parameters", "completion"}.
    """
    with _lock:
        child = _started()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            reply = _line(child, timeout_s)
        except BrokenPipeError:
            reply = None
        if reply is None:
            stop()
            return None
        value = json.loads(reply)
        return None if value is None else min(1.0, max(0.0, float(value)))


def stop() -> None:
    """End the child; the next score starts another."""
    global _child
    if _child is not None and _child[0] == os.getpid():
        _child[1].kill()
        _child[1].wait()
        for pipe in (_child[1].stdin, _child[1].stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
    _child = None


def _started() -> subprocess.Popen[bytes]:
    global _child
    if _child is not None and _child[0] == os.getpid() and _child[1].poll() is None:
        return _child[1]
    stop()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "routewright.ensemble_router.scoring_process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    _child = (os.getpid(), child)
    told = _line(child, START_S)
    if told != READY:
        stop()
        reason = f"it ended or was not ready after {START_S:.0f} s" if told is None else told.decode().strip()
        raise BadInput(f"the scoring process did not start, {reason}: expected `pip install 'routewright[ensemble]'`")
    return child


def _line(child: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    assert child.stdout is not None
    deadline, text = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while not text.endswith(b"\n"):
            if len(text) > MAX_REPLY or not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(child.stdout.fileno(), 1 << 12)
            if not chunk:
                return None
            text += chunk
    return text


atexit.register(stop)


def _serve() -> None:
    """The child: one JSON line in, one out. Only its own end of the pipe is written to; prints of libraries go nowhere."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        import math_verify  # noqa: F401  the slow imports count as the start, not as the first score
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        out.write(f"{error}\n".encode())
        return
    out.write(READY)
    out.flush()
    for line in sys.stdin.buffer:
        try:
            value: float | None = _score(json.loads(line))
        except Exception:  # whatever a library makes of a model's output is no score
            value = None
        out.write(json.dumps(value).encode() + b"\n")
        out.flush()


def _score(request: dict[str, Any]) -> float:
    if request["kind"] == "math":
        return float(_equal_expressions(request["answer"], request["completion"]))
    dataset = _dataset(request["family"], request["seed"], json.dumps(request["parameters"], sort_keys=True))
    return float(dataset.score_answer(request["completion"], dataset[request["index"]]))


def _equal_expressions(answer: str, completion: str) -> bool:
    from math_verify import parse, verify

    gold = parse(f"${answer}$", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    found = parse(completion, parsing_timeout=None)
    return bool(gold) and bool(found) and bool(verify(gold, found, timeout_seconds=None))


@lru_cache(maxsize=64)
def _dataset(family: str, seed: int, parameters: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(family, seed=seed, size=1 << 30, **json.loads(parameters))


if __name__ == "__main__":
    _serve()
