"""Shell tasks in the layout of Terminal-Bench: an instruction, a working folder, commands, a checker at the end.

A task folder holds ``task.toml`` and ``instruction.md``, or ``task.yaml`` with a field ``instruction``; ``tests/`` with
``test_outputs.py`` (functions ``test_*`` without arguments, standard library only) or ``test.sh`` (exit code 0 is
success); a reference solution ``solution.sh`` or ``solution/solve.sh``; and its files: a Dockerfile, an image's name in
``task.toml`` (``environment.docker_image``) or ``docker-compose.yaml``, or ``setup.py``, which makes them from a seed.
A task with a Dockerfile or an image runs in a container where a Docker engine answers (there a ``test.sh`` may also
write 1 to /logs/verifier/reward.txt); elsewhere, and without one, all runs in the sandbox, and a Dockerfile may only copy.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from routewright.errors import BadInput
from routewright.sandbox import HOME, ISOLATED, MAX_COMMAND, Limits, Sandbox, check_walls
from routewright.step_router.environments.container import Container, engine_answers
from routewright.step_router.environments.protocol import Observation, Outcome

SUBMIT = "submit"  # the action that ends an episode and has the result checked
TOLD = 2_000  # characters of a command's output that are shown
STEP_MARK = re.compile(r"^# step\n", re.MULTILINE)  # between the commands of an own reference solution
LIMITS = Limits(wall_s=10.0, cpu_s=10, memory_bytes=512 << 20, file_bytes=16 << 20, disk_bytes=64 << 20, processes=32)
OWN_TASKS = Path(__file__).parents[1] / "tasks"

# Isolated Python does not import from the working folder, so files left there cannot pose as library modules.
CHECKER = """\
import json, os, pathlib, sys, tempfile, traceback
order = json.loads(sys.argv[1])
space = {"__name__": "test_outputs", "SEED": order["seed"]}
if order["setup"]:
    here, folder = os.getcwd(), tempfile.mkdtemp()
    os.chdir(folder)
    sys.argv = ["setup.py", str(order["seed"])]
    exec(compile(order["setup"], "setup.py", "exec"), {"__name__": "__main__"})
    os.chdir(here)
    space["ORIGINAL"] = pathlib.Path(folder)
exec(compile(order["tests"], "test_outputs.py", "exec"), space)
checks = [value for name, value in space.items() if name.startswith("test_") and callable(value)]
failed = not checks
for check in checks:
    try:
        check()
    except BaseException:
        failed = True
        traceback.print_exc()
sys.stdout.flush()
os._exit(int(failed))
"""
# Terminal-Bench 2 tells the result by a file, not by the exit code.
VERIFIER = """\
rm -rf /logs/verifier; mkdir -p /logs/verifier
bash /tests/test.sh
code=$?
case "$(cat /logs/verifier/reward.txt 2>/dev/null)" in "") exit $code;; 1|1.0) exit 0;; *) exit 1;; esac
"""


@dataclass(frozen=True)
class ShellTask:
    """One task. ``setup`` and ``checks`` are Python sources ("" for none); ``files`` maps places in /app to sources.

    ``image``: the Dockerfile or the name of the image that it runs in; None for the sandbox.
    """

    name: str
    folder: Path
    instruction: str
    solution: tuple[str, ...]
    setup: str
    checks: str
    files: tuple[tuple[str, Path], ...]
    image: str | Path | None


def load_task(folder: Path) -> ShellTask:
    """Read a task folder; BadInput names what is missing, or what only Docker could do where no engine answers."""
    if (folder / "task.toml").is_file():
        description, told = _parsed(folder / "task.toml"), folder / "instruction.md"
        instruction = told.read_text() if told.is_file() else str(description.get("instruction") or "")
        place = f"{told}: no such file"
    elif (folder / "task.yaml").is_file():
        description = _parsed(folder / "task.yaml")
        instruction = str(description.get("instruction") or "")
        place = f"{folder / 'task.yaml'}: field instruction is missing"
    else:
        raise BadInput(f"{folder}: expected a task folder with task.toml or task.yaml, found neither")
    if not instruction.strip():
        raise BadInput(f"{place} or empty, expected what the agent is to do")
    tests = folder / "tests"
    checks = _source(tests / "test_outputs.py")
    if not checks and not (tests / "test.sh").is_file():
        raise BadInput(f"{tests}: expected test_outputs.py or test.sh, found neither")
    solution = _source(folder / "solution.sh") or _source(folder / "solution" / "solve.sh")
    commands = tuple(part.strip() for part in STEP_MARK.split(solution) if part.strip())
    setup = _source(folder / "setup.py")
    if len(json.dumps([setup, checks])) > MAX_COMMAND - 1_000:
        raise BadInput(f"{folder}: setup.py and test_outputs.py are too long, expected less than {MAX_COMMAND} characters")
    files: list[tuple[str, Path]] = []
    image = None if setup else _image(folder, description)
    if image is not None and not engine_answers():
        if isinstance(image, str):
            raise BadInput(f"{folder}: image {image!r} needs Docker, expected a Dockerfile that only copies")
        files, image = _copied(image), None
    return ShellTask(folder.name, folder, instruction.strip(), commands, setup, checks, tuple(files), image)


def load_tasks(folder: Path = OWN_TASKS) -> list[ShellTask]:
    """All task folders below a folder, by name; by default the ten that come with this package."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder, expected a folder of task folders")
    tasks = [load_task(path) for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith((".", "_"))]
    if not tasks:
        raise BadInput(f"{folder}: expected task folders, found none")
    return tasks


def _source(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _parsed(path: Path) -> dict[str, Any]:
    try:
        value = tomllib.loads(path.read_text()) if path.suffix == ".toml" else yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path}: not readable as {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: expected fields and values, got {type(value).__name__}")
    return value


def _image(folder: Path, description: dict[str, Any]) -> str | Path | None:
    """The image's name in task.toml, else the Dockerfile, else the image's name in docker-compose.yaml, else None."""
    section = description.get("environment")
    named = section.get("docker_image") if isinstance(section, dict) else None
    if named is not None and (not isinstance(named, str) or not named):
        raise BadInput(f"{folder / 'task.toml'}: field environment.docker_image: expected an image's name, got {named!r}")
    places = (folder / "environment", folder)
    tagged: str | None = None
    for compose in (place / f"docker-compose.{ending}" for place in places for ending in ("yaml", "yml")):
        if compose.is_file():
            services = _parsed(compose).get("services")
            service = list(services.values()) if isinstance(services, dict) else []
            if len(service) != 1 or not isinstance(service[0], dict):
                raise BadInput(f"{compose}: field services: expected one service, since a task runs in one container")
            image = service[0].get("image")
            tagged = image if isinstance(image, str) and "$" not in image else tagged  # a variable names what is built
    dockerfiles = (place / "Dockerfile" for place in places)
    return named or next((path for path in dockerfiles if path.is_file()), tagged)


def _copied(dockerfile: Path) -> list[tuple[str, Path]]:
    """What a Dockerfile copies into /app; BadInput for instructions that need an image to be built."""
    files: list[tuple[str, Path]] = []
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word or word.startswith("#") or word.upper() in ("FROM", "LABEL", "CMD"):
            continue
        if word.upper() == "WORKDIR" and rest.strip().rstrip("/") == HOME:
            continue
        parts = rest.split()
        if word.upper() != "COPY" or len(parts) < 2 or parts[0].startswith(("--", "[")):
            raise BadInput(f"{dockerfile}: {line.strip()!r} needs Docker, expected only FROM, WORKDIR {HOME} and COPY")
        target = PurePosixPath(HOME) / parts[-1]
        if ".." in target.parts or not target.is_relative_to(HOME):
            raise BadInput(f"{dockerfile}: {line.strip()!r} copies outside {HOME}")
        into_folder = parts[-1].endswith(("/", ".")) or len(parts) > 2 or str(target) == HOME
        for name in parts[:-1]:
            source = (dockerfile.parent / name.lstrip("/")).resolve()
            if not source.exists() or not source.is_relative_to(dockerfile.parent.resolve()):
                raise BadInput(f"{dockerfile}: {name} is not there to copy")
            for path in [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file()):
                below = PurePosixPath(path.relative_to(source)) if source.is_dir() else None
                place = target / below if below else target / source.name if into_folder else target
                files.append((str(place.relative_to(HOME)), path))
    return files


class ShellEnvironment:
    """An action is a command line; ``submit`` ends the episode, and so does the last step; then the checker decides.

    Outcomes are kept by (task, seed, commands), so what has been run once is not run again. `NoWalls` where a task needs
    the sandbox and that refuses to run anything.
    """

    def __init__(self, tasks: Sequence[ShellTask], max_steps: int = 8, limits: Limits = LIMITS) -> None:
        if any(task.image is None for task in tasks):
            check_walls()
        self._tasks = {task.name: task for task in tasks}
        self._max_steps, self._limits = max_steps, limits
        self._outputs: dict[tuple[str, int, tuple[str, ...]], str] = {}
        self._verdicts: dict[tuple[str, int, tuple[str, ...]], bool] = {}
        self._sandbox: Sandbox | Container | None = None
        self._lived: tuple[str, int, tuple[str, ...]] | None = None  # what has been run in it
        self._task: ShellTask | None = None
        self._seed, self._step, self._done = 0, 0, True
        self._commands: tuple[str, ...] = ()

    def reset(self, task: str, seed: int) -> Observation:
        """Begin; the seed makes the task's files (own tasks)."""
        if task not in self._tasks:
            raise BadInput(f"task {task!r}: no such task, expected one of {', '.join(self._tasks)}")
        self._task, self._seed, self._commands, self._step, self._done = self._tasks[task], seed, (), 0, False
        return self._observe("Nothing has run yet.")

    def step(self, action: str | None) -> Outcome:
        """Run a command, or submit."""
        if self._task is None or self._done:
            raise ValueError("the episode is over, reset first")
        self._step += 1
        submitted = action is not None and action.strip() == SUBMIT
        told = "Nothing ran."
        if action is not None and not submitted:
            self._commands = (*self._commands, action)
            told = self._output()
        self._done = submitted or self._step >= self._max_steps
        success = self._done and self._check()
        if submitted:
            told = "The checker accepts the result." if success else "The checker rejects the result."
        return Outcome(self._observe(told), success, self._done)

    def teacher(self) -> str:
        """The first command of the reference solution that has not been run yet, then "submit"."""
        if self._task is None:
            raise ValueError("no episode has begun, reset first")
        if not self._task.solution:
            raise BadInput(f"{self._task.folder}: no solution.sh or solution/solve.sh, expected one for a teacher")
        return next((command for command in self._task.solution if command not in self._commands), SUBMIT)

    def close(self) -> None:
        """Remove the episode's scratch folder or container."""
        if self._sandbox is not None:
            self._sandbox.close()
        self._sandbox, self._lived = None, None

    def _observe(self, told: str) -> Observation:
        assert self._task is not None
        objective = f"{self._task.instruction}\nWhen all is done, answer: {SUBMIT}"
        return Observation(objective, told, "", None, self._step, self._max_steps)

    @property
    def _state(self) -> tuple[str, int, tuple[str, ...]]:
        assert self._task is not None
        return self._task.name, self._seed, self._commands

    def _output(self) -> str:
        if self._state not in self._outputs:
            self._live()
        return self._outputs[self._state]

    def _live(self) -> Sandbox | Container:
        """A sandbox or container in the present state; continued where that is enough, else made anew."""
        name, seed, commands = self._state
        lived = self._lived
        if self._sandbox is None or lived is None or lived[:2] != (name, seed) or lived[2] != commands[: len(lived[2])]:
            self.close()
            self._sandbox, lived = self._begin(), None
        for end in range(len(lived[2]) + 1 if lived else 1, len(commands) + 1):
            result = self._sandbox.run(commands[end - 1])
            ending = f"exit code {result.exit_code}" if result.ended == "exit" else f"stopped at the {result.ended} limit"
            output = result.output.strip()
            if len(output) > TOLD:
                output = f"{output[: TOLD // 2]}\n[...]\n{output[-TOLD // 2 :]}"
            self._outputs[name, seed, commands[:end]] = f"{output}\n[{ending}]".strip()
        self._lived = self._state
        return self._sandbox

    def _begin(self) -> Sandbox | Container:
        assert self._task is not None
        if self._task.image is not None:
            return Container(self._task.image, ["python3" if self._task.checks else "bash"])
        sandbox = Sandbox(self._limits)
        for place, source in self._task.files:
            sandbox.write(place, source.read_bytes(), source.stat().st_mode & 0o777)
        if self._task.setup:
            result = sandbox.run([*ISOLATED, "-S", "-c", self._task.setup, str(self._seed)])
            if not result.ok:
                sandbox.close()
                told = (result.output.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
                raise BadInput(f"{self._task.folder / 'setup.py'}: failed in the sandbox: {told}")
        return sandbox

    def _check(self) -> bool:
        if self._state not in self._verdicts:
            assert self._task is not None
            sandbox, tests = self._live(), {"/tests": self._task.folder / "tests"}
            if self._task.checks:
                order = {"setup": self._task.setup, "tests": self._task.checks, "seed": self._seed}
                # an image's own packages may be used, and its Python may be older than 3.11
                python = ["python3", "-I"] if isinstance(sandbox, Container) else [*ISOLATED, "-S"]
                result = sandbox.run([*python, "-c", CHECKER, json.dumps(order)], readonly=tests)
            elif isinstance(sandbox, Container):
                result = sandbox.run(["bash", "-c", VERIFIER], readonly=tests)
            else:
                result = sandbox.run(["/bin/bash", "/tests/test.sh"], readonly=tests)
            self._lived = None  # a checker may change what it looks at
            self._verdicts[self._state] = result.ok
        return self._verdicts[self._state]
