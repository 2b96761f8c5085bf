"""Tasks with a verifier each: one JSON line `{id, prompt, answer | tests, domain, check}` and what its check needs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from routewright.ensemble_router.answers import choice_letter, number
from routewright.ensemble_router.instructions import check_instruction
from routewright.errors import BadInput
from routewright.pools.pool import numbered_lines

Check = Literal["exact", "number", "math", "choice", "code", "instructions", "reasoning-gym"]
Split = Literal["train", "dev", "test"]
Text = Annotated[str, Field(min_length=1)]


def known_family(family: str) -> str:
    """The family itself; ValueError where reasoning-gym has none of that name, BadInput where it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise BadInput("reasoning-gym is not installed: expected `pip install 'routewright[ensemble]'`") from None
    if family not in DATASETS:
        raise ValueError(f"reasoning-gym has no family {family!r}, expected one of {', '.join(sorted(DATASETS))}")
    return family


Family = Annotated[str, AfterValidator(known_family)]


class Instruction(BaseModel):
    """One IFEval constraint: ``kind`` such as "punctuation:no_comma" and its arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Text
    arguments: dict[str, Any] = {}

    @model_validator(mode="after")
    def _known(self) -> Instruction:
        try:
            check_instruction(self.kind, self.arguments)
        except BadInput as error:
            raise ValueError(str(error)) from None
        return self


class Generator(BaseModel):
    """Where a reasoning-gym question comes from: the same four values give the same entry, which its scorer needs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    family: Family
    seed: int
    index: Annotated[int, Field(ge=0)]
    parameters: dict[str, Any] = {}


class Task(BaseModel):
    """One question. Which of ``answer``, ``tests``, ``instructions`` and ``generator`` must be there depends on ``check``:

    - exact: ``answer``, compared after normalisation (`answers.normalised`)
    - number: ``answer``, a plain number; the last number of the completion counts
    - math: ``answer``, LaTeX or plain; equal as an expression (math-verify)
    - choice: ``answer``, an option letter
    - code: ``tests``, a program that raises where the solution is wrong; or ``inputs`` (argument lists as one Python
      literal) with ``entry_point`` and a reference solution as ``answer``. ``preamble`` stands before the completion.
      ``standard_input``: the tests run the solution, the text `SOLUTION`, as a program, instead of having it imported.
    - instructions: ``instructions``, each checked alone
    - reasoning-gym: ``generator``, and ``answer`` where the family has one
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Text
    prompt: Text
    answer: str | None = None
    tests: str | None = None
    domain: Text
    check: Check
    split: Split | None = None
    instructions: list[Instruction] = []
    generator: Generator | None = None
    entry_point: str = ""
    preamble: str = ""
    inputs: str = ""
    standard_input: bool = False
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _answerable(self) -> Task:
        answer = (self.answer or "").strip()
        if self.check in ("exact", "number", "math", "choice") and not answer:
            raise ValueError(f"answer: expected text, the {self.check} task has none")
        if self.check == "number" and number(answer) is None:
            raise ValueError(f"answer: expected a plain number, found {answer[:40]!r}")
        if self.check == "choice" and not choice_letter(answer):
            raise ValueError(f"answer: expected an option letter, found {answer[:40]!r}")
        if self.check == "code" and not (self.tests or "").strip() and not (self.inputs and self.entry_point and answer):
            raise ValueError("tests: expected a program, or inputs with entry_point and a reference answer")
        if self.check == "instructions" and not self.instructions:
            raise ValueError("instructions: expected at least one, the task has none")
        if self.check == "reasoning-gym":
            if self.generator is None:
                raise ValueError("generator: expected family, seed, index and parameters of the question")
            if not own_scorer(self.generator.family) and not answer:
                raise ValueError(f"answer: expected text, {self.generator.family} scores by comparison with it")
        return self


def own_scorer(family: str) -> bool:
    """Whether a reasoning-gym family scores by a rule of its own (several answers may be right)."""
    known_family(family)
    from reasoning_gym.factory import DATASETS, ProceduralDataset

    return DATASETS[family][0].score_answer is not ProceduralDataset.score_answer


def fault(error: ValidationError) -> str:
    """The first fault as `field: what was expected`."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{field}: {reason}" if field else reason


def read_tasks(path: Path) -> list[Task]:
    """All tasks of a JSONL file (.gz or not), in file order; BadInput names file, line and field of the first broken row."""
    tasks: dict[str, Task] = {}
    for line_number, line in numbered_lines(path):
        try:
            task = Task.model_validate_json(line)
        except ValidationError as error:
            raise BadInput(f"{path}, line {line_number}: {fault(error)}") from None
        if task.id in tasks:
            raise BadInput(f"{path}, line {line_number}: id: {task.id!r} occurs twice")
        tasks[task.id] = task
    if not tasks:
        raise BadInput(f"{path}: expected at least one task, the file holds none")
    return list(tasks.values())


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """One JSON line a task, written atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for task in tasks:
            file.write(json.dumps(task.model_dump(exclude_defaults=True), ensure_ascii=False) + "\n")
    os.replace(partial, path)
