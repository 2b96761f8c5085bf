"""Programming problems: write a function, run its tests, read the failure, repair.

Reads the layouts of HumanEval, HumanEval+ and MBPP (JSON lines, plain or gzip). Code runs in the sandbox only.
"""

from __future__ import annotations

import ast
import gzip
import json
import math
import re
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from routewright.errors import BadInput
from routewright.sandbox import ISOLATED, Limits, Result, Sandbox, check_walls
from routewright.step_router.environments.protocol import Observation, Outcome

TOLD = 1_500  # characters of a failure that are shown, its end
LIMITS = Limits(wall_s=8.0, cpu_s=6, memory_bytes=1 << 30, file_bytes=1 << 20, disk_bytes=96 << 20, processes=8)

# The token is known to this file alone and printed after the last test, so an exit in the middle is no success. It
# stops shortcuts, not a program that searches its own process.
HARNESS = """\
import json, linecache, os, sys, traceback
with open("case.json") as file:
    case = json.load(file)
os.remove("case.json")
os.remove(__file__)
space = {"__name__": "solution"}
try:
    for name in ("solution.py", "tests.py"):
        source = case.pop(name)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), space)
except BaseException:
    sys.stdout.flush()
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
sys.stdout.flush()
os.write(1, ("\\n" + case["token"]).encode())
os._exit(0)
"""

# HumanEval+ gives inputs only: the reference's outputs are what is expected, floats within atol.
COMPARE = """
def _same(a, b, atol):
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(_same(x, y, atol) for x, y in zip(a, b))
    if isinstance(a, float) or isinstance(b, float):
        return a == b or (a != a and b != b) or abs(a - b) <= max(atol, 1e-6)
    return a == b
import copy as _copy
for _input, _expected in zip(_INPUTS, _EXPECTED):
    _got = ENTRY(*_copy.deepcopy(_input))
    assert _same(_got, _expected, ATOL), f"ENTRY{tuple(_input)!r} gave {_got!r}, expected {_expected!r}"[:500]
"""
EXPECTED = "import copy as _copy\nprint(repr([ENTRY(*_copy.deepcopy(_input)) for _input in _INPUTS]))\n"


@dataclass(frozen=True)
class Problem:
    """One problem. ``preamble`` stands before the agent's code (HumanEval: the prompt, a complete stub).

    ``tests`` is a program that raises where the solution is wrong; empty for problems with ``inputs``, whose expected
    outputs come from the reference ``solution`` (a whole program).
    """

    id: str
    prompt: str
    preamble: str
    entry_point: str
    solution: str
    tests: str
    inputs: str = ""
    atol: float = 0.0


def load_problems(path: Path) -> list[Problem]:
    """The problems of a file, in its order. BadInput names file, line and field, as for a problem without tests."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file, expected programming problems as JSON lines")
    try:
        code = "utf-8-sig"
        with gzip.open(path, "rt", encoding=code) if path.suffix == ".gz" else path.open(encoding=code) as file:
            lines = file.read().split("\n")  # splitlines would break at U+2028, which JSON may hold
    except (OSError, UnicodeDecodeError, EOFError, zlib.error):
        raise BadInput(f"{path}: not readable as (gzipped) text, expected JSON lines") from None
    problems: dict[str, Problem] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{where}: expected a JSON object, got {error.msg}") from None
        if not isinstance(row, dict):
            raise BadInput(f"{where}: expected a JSON object, got {type(row).__name__}")
        problem = _problem(row, where)
        if problem.id in problems:
            raise BadInput(f"{where}: field task_id: {problem.id!r} occurs twice")
        problems[problem.id] = problem
    if not problems:
        raise BadInput(f"{path}: holds no problem")
    return list(problems.values())


def _text(row: dict[str, Any], names: Sequence[str], where: str, required: bool = True) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            value = "\n".join(value)
        if isinstance(value, int) and name == "task_id":
            value = str(value)
        if isinstance(value, str) and value.strip():
            return value
        if value not in (None, "", []) and not isinstance(value, str):
            raise BadInput(f"{where}: field {name}: expected text, got {type(value).__name__}")
    if required:
        raise BadInput(f"{where}: field {names[0]}: expected text, the problem has none")
    return ""


def _problem(row: dict[str, Any], where: str) -> Problem:
    name = _text(row, ["id", "task_id"], where)
    prompt = _text(row, ["prompt", "text"], where)
    answer = _text(row, ["answer", "canonical_solution", "code"], where)
    entry = _text(row, ["entry_point"], where, required=False)
    tests = _text(row, ["tests", "test", "test_list"], where, required=False)
    inputs = [part for part in (row.get("base_input"), row.get("plus_input")) if part]
    if not tests and not inputs:
        raise BadInput(f"{where}: field tests: the problem {name} has no tests, expected tests, test_list or base_input")
    stub = entry and re.search(rf"^def {re.escape(entry)}\b", prompt, re.MULTILINE)
    if stub:
        preamble, solution = prompt, prompt + answer
    else:
        preamble, solution = "", answer
    if tests and stub and re.search(r"^def check\b", tests, re.MULTILINE):
        tests = f"{tests}\ncheck({entry})\n"
    setup = _text(row, ["test_setup_code", "test_imports"], where, required=False)
    if tests:
        return Problem(name, prompt, preamble, entry, solution, f"{setup}\n{tests}")
    if not entry:
        raise BadInput(f"{where}: field entry_point: expected the function that base_input is for, the problem has none")
    atol = row.get("atol") or 0.0
    if type(atol) not in (int, float) or not 0 <= atol < math.inf:
        raise BadInput(f"{where}: field atol: expected a number that is not negative, got {atol!r}")
    return Problem(name, prompt, preamble, entry, solution, "", _literals(inputs, where), float(atol))


def _literals(inputs: Sequence[Any], where: str) -> str:
    """The argument lists as one Python literal."""
    rows: list[Any] = []
    for part in inputs:
        try:
            value = ast.literal_eval(part) if isinstance(part, str) else part
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
        if not isinstance(value, list) or not all(isinstance(arguments, list) for arguments in value):
            raise BadInput(f"{where}: field base_input: expected a list of argument lists")
        rows += value
    return repr(rows)


def program(problem: Problem, action: str) -> str:
    """The program that an action makes: fences are stripped; a completion continues the stub, a function replaces it."""
    fenced = re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", action, re.DOTALL)
    code = fenced.group(1) if fenced else action
    if not problem.preamble:
        return code
    if re.search(rf"^(?:async )?def {re.escape(problem.entry_point)}\b", code, re.MULTILINE):
        return f"{problem.preamble.rstrip()}\n    pass\n\n{code}"
    return problem.preamble + code


class CodeEnvironment:
    """An action is Python code, the whole function or its body; a step runs the tests and shows the failure.

    The episode ends when the tests pass or after ``attempts`` steps. The same code for the same problem runs once.
    `NoWalls` where the sandbox refuses to run anything.
    """

    def __init__(self, problems: Sequence[Problem], attempts: int = 3, limits: Limits = LIMITS) -> None:
        check_walls()
        self._problems = {problem.id: problem for problem in problems}
        self._attempts, self._limits = attempts, limits
        self._verdicts: dict[tuple[str, str], tuple[bool, str]] = {}
        self._tests: dict[str, str] = {}
        self._problem: Problem | None = None
        self._step, self._done, self._last = 0, True, ""

    def reset(self, task: str, seed: int) -> Observation:
        """Begin; the seed has no effect here."""
        if task not in self._problems:
            raise BadInput(f"task {task!r}: no such problem in the given files")
        self._problem, self._step, self._done, self._last = self._problems[task], 0, False, ""
        return self._observe("Nothing has run yet.")

    def step(self, action: str | None) -> Outcome:
        """Run the tests on the code."""
        if self._problem is None or self._done:
            raise ValueError("the episode is over, reset first")
        self._step += 1
        success, told = False, "Nothing ran."
        if action is not None:
            self._last = program(self._problem, action)
            success, told = self._verdict(self._problem, self._last)
        self._done = success or self._step >= self._attempts
        return Outcome(self._observe(told), success, self._done)

    def teacher(self) -> str:
        """The reference solution, a whole program."""
        if self._problem is None:
            raise ValueError("no episode has begun, reset first")
        return self._problem.solution

    def close(self) -> None:
        """Nothing is held open: each run has a sandbox of its own."""

    def _observe(self, told: str) -> Observation:
        assert self._problem is not None
        objective = self._problem.prompt
        if not self._problem.preamble and self._problem.tests:
            example = next((line for line in self._problem.tests.splitlines() if line.startswith("assert ")), "")
            objective = f"{objective}\nExample: {example}" if example else objective
        return Observation(objective, told, self._last, None, self._step, self._attempts)

    def _verdict(self, problem: Problem, code: str) -> tuple[bool, str]:
        if (problem.id, code) not in self._verdicts:
            result, passed = self._run(code, self._tests_of(problem))
            self._verdicts[problem.id, code] = (passed, "All tests passed." if passed else _failure(result, self._limits))
        return self._verdicts[problem.id, code]

    def _tests_of(self, problem: Problem) -> str:
        if problem.tests:
            return problem.tests
        if problem.id not in self._tests:
            setup = f"_INPUTS = {problem.inputs}\n"
            result, ran = self._run(problem.solution, setup + EXPECTED.replace("ENTRY", problem.entry_point), whole=True)
            try:
                expected = ast.literal_eval(result.output.splitlines()[-3] if ran else "")
            except (ValueError, SyntaxError, IndexError):
                raise BadInput(
                    f"problem {problem.id}: the reference solution gives no plain values for its inputs, expected literals"
                ) from None
            compare = COMPARE.replace("ENTRY", problem.entry_point).replace("ATOL", repr(problem.atol))
            self._tests[problem.id] = f"{setup}_EXPECTED = {expected!r}\n{compare}"
        return self._tests[problem.id]

    def _run(self, code: str, tests: str, whole: bool = False) -> tuple[Result, bool]:
        token = secrets.token_hex(16)
        limits = Limits(**{**vars(self._limits), "output_bytes": 48 << 20}) if whole else self._limits
        with Sandbox(limits) as sandbox:
            sandbox.write("case.json", json.dumps({"solution.py": code, "tests.py": tests, "token": token}))
            sandbox.write("harness.py", HARNESS)
            result = sandbox.run([*ISOLATED, "-S", "harness.py"])
        return result, result.ok and result.output.endswith("\n" + token)


def _failure(result: Result, limits: Limits) -> str:
    """The end of what was printed, without what differs from run to run."""
    if result.ended == "wall":
        return f"The tests did not end within {limits.wall_s:g} seconds."
    if result.ended != "exit":
        return f"The run was stopped at its {result.ended} limit."
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", result.output)
    text = re.sub(r'  File "[^"]*harness\.py", line \d+, in <module>\n', "", text).strip()
    text = text[-TOLD:]
    return text or f"The program ended with exit code {result.exit_code} before the last test."
