"""Tasks from files in other people's layouts, told apart by their fields.

Own rows; GSM8K and AIME (question/problem and a number); MATH and OlympiadBench (problem and solution or final_answer);
MBPP, HumanEval, HumanEval+ and TACO-style code; IFEval (instruction_id_list and kwargs); multiple choice of ARC
({text, label} choices), AGIEval (passage, options, label), LogicBench (choices by name) and BBH ("(A)" targets).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from routewright.ensemble_router.answers import choice_letter, final_answer, number
from routewright.ensemble_router.tasks import Task, fault
from routewright.errors import BadInput
from routewright.pools.pool import numbered_lines
from routewright.step_router.environments.code_env import Problem, load_problems

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROMPTS = ("prompt", "question", "problem", "input", "text")
ANSWERS = ("answer", "final_answer", "target", "answerKey", "label", "gold", "solution")
FUNCTIONS = ("tests", "test", "test_list", "base_input")
CASES = ("input_output", "test_cases")
MAX_CASES = 30
"""Input-output cases of a TACO-style problem that are run; some have hundreds."""


def load_tasks(path: Path, domain: str | None = None) -> list[Task]:
    """All tasks of a JSON-lines file (.gz or not), in file order.

    ``domain`` names the tasks' domain where the rows do not; the file's name without it. BadInput names file, line and
    field: a layout that is not recognised, a row without an answer, an instruction without a check.
    """
    path = Path(path)
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    problems: list[Problem] | None = None
    tasks: dict[str, Task] = {}
    for row_number, (line_number, line) in enumerate(numbered_lines(path)):
        where = f"{path}, line {line_number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise BadInput(f"{where}: expected one JSON object") from None
        if not isinstance(row, dict):
            raise BadInput(f"{where}: expected one JSON object, found {type(row).__name__}")
        try:
            if _own(row) or not any(row.get(name) for name in FUNCTIONS):
                task = task_of(row, where, f"{stem}-{line_number}", domain or stem)
            else:
                problems = problems if problems is not None else load_problems(path)
                task = _code(problems[row_number], _told(row, problems[row_number].id, domain or stem))
        except ValidationError as error:
            raise BadInput(f"{where}: {fault(error)}") from None
        if task.id in tasks:
            raise BadInput(f"{where}: id: {task.id!r} occurs twice")
        tasks[task.id] = task
    if not tasks:
        raise BadInput(f"{path}: expected at least one task, the file holds none")
    return list(tasks.values())


def task_of(row: dict[str, Any], where: str, default_id: str, domain: str) -> Task:
    """One row, unless it is a function to write, as a task; `where` names it in errors."""
    if _own(row):
        return Task.model_validate(row)
    told = _told(row, default_id, domain)
    if row.get("instruction_id_list"):
        return _instructions(row, where, told)
    if any(row.get(name) for name in CASES):
        return _program(row, where, told)
    prompt = _first(row, PROMPTS)
    if isinstance(prompt, dict) and "stem" in prompt:  # ARC's first layout
        row = {**row, **prompt}
        prompt = prompt["stem"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadInput(f"{where}: prompt: expected text, found none in {', '.join(PROMPTS)}")
    if row.get("passage"):
        prompt = f"{row['passage']}\n\n{prompt}"
    options = _options(row, where)
    if options:
        return _choice(row, where, told, prompt, options)
    answer = _answer(row)
    if not answer:
        raise BadInput(f"{where}: answer: expected text, the row has none in {', '.join(ANSWERS)}")
    told["check"] = _check_of(row, answer)
    return Task.model_validate({**told, "prompt": prompt, "answer": answer})


def _own(row: dict[str, Any]) -> bool:
    """Whether `write_tasks` wrote it."""
    return bool(row.get("generator") or row.get("instructions") or row.get("check") == "code")


def _told(row: dict[str, Any], default_id: str, domain: str) -> dict[str, Any]:
    name = _first(row, ("id", "task_id", "key", "unique_id"))
    told = {"id": str(default_id if name is None else name), "domain": row.get("domain") or domain}
    return {**told, "split": row["split"]} if row.get("split") in ("train", "dev", "test") else told


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "", [])), None)


def _answer(row: dict[str, Any]) -> str:
    """The answer as text: of a list its first, of a solution what follows #### or stands in \\boxed{}."""
    value = _first(row, ANSWERS)
    if isinstance(value, list):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = str(value).strip()
    if "####" in text or "\\boxed{" in text:
        text = final_answer(text)
    return text.replace(",", "") if number(text) is not None else text


def _check_of(row: dict[str, Any], answer: str) -> str:
    if row.get("check") in ("exact", "number", "math", "choice"):
        named = str(row["check"])
        return "choice" if named == "exact" and _lettered(row, answer) else named
    if _lettered(row, answer):
        return "choice"
    if "target" in row and number(answer) is None:  # BBH: words
        return "exact"
    mathematical = any(name in row for name in ("final_answer", "problem", "solution", "level", "subject"))
    if mathematical:
        return "math"
    return "number" if number(answer) is not None else "exact"


def _lettered(row: dict[str, Any], answer: str) -> bool:
    prompt = _first(row, PROMPTS)
    return re.fullmatch(r"\([A-Z]\)", answer) is not None and isinstance(prompt, str) and f"{answer} " in prompt


def _options(row: dict[str, Any], where: str) -> list[tuple[str, str]]:
    """(letter, text) of each option, [] where the row has none."""
    choices = _first(row, ("choices", "options"))
    if choices is None:
        return []
    if isinstance(choices, dict) and isinstance(choices.get("text"), list) and isinstance(choices.get("label"), list):
        pairs = list(zip(choices["label"], choices["text"], strict=False))
    elif isinstance(choices, dict):
        pairs = list(choices.items())
    elif isinstance(choices, list) and all(isinstance(one, dict) for one in choices):
        pairs = [(one.get("label"), one.get("text")) for one in choices]
    elif isinstance(choices, list):
        pairs = [(None, one) for one in choices]
    else:
        raise BadInput(f"{where}: choices: expected a list or a mapping of options, found {type(choices).__name__}")
    if not 2 <= len(pairs) <= len(LETTERS) or not all(isinstance(text, str) and text.strip() for _, text in pairs):
        raise BadInput(f"{where}: choices: expected 2 to {len(LETTERS)} options as text")
    return [(str(label) if label is not None else "", re.sub(r"^\(?[A-Z]\)\s*", "", text)) for label, text in pairs]


def _choice(row: dict[str, Any], where: str, told: dict[str, Any], prompt: str, options: list[tuple[str, str]]) -> Task:
    value = _first(row, ("answer", "answerKey", "label", "gold", "target"))
    value = value[0] if isinstance(value, list) and value else value
    labels, texts = [label for label, _ in options], [text for _, text in options]
    place = None
    if isinstance(value, int) and not isinstance(value, bool):
        place = value if 0 <= value < len(options) else None
    elif isinstance(value, str) and value.strip() in labels:
        place = labels.index(value.strip())
    elif isinstance(value, str) and value.strip() in texts:
        place = texts.index(value.strip())
    elif isinstance(value, str) and choice_letter(value):
        place = LETTERS.index(choice_letter(value))
    if place is None or place >= len(options):
        raise BadInput(
            f"{where}: answer: expected the label, number or text of one of {len(options)} options, found {value!r}"
        )
    listed = "\n".join(f"({letter}) {text}" for letter, text in zip(LETTERS, texts, strict=False))
    return Task.model_validate(
        {**told, "prompt": f"{prompt}\nOptions:\n{listed}", "answer": LETTERS[place], "check": "choice"}
    )


def _instructions(row: dict[str, Any], where: str, told: dict[str, Any]) -> Task:
    kinds, arguments = row["instruction_id_list"], row.get("kwargs")
    if not isinstance(arguments, list) or len(arguments) != len(kinds):
        raise BadInput(f"{where}: kwargs: expected one mapping for each of {len(kinds)} instructions")
    instructions = [
        {"kind": kind, "arguments": {name: value for name, value in (some or {}).items() if value is not None}}
        for kind, some in zip(kinds, arguments, strict=True)
    ]
    return Task.model_validate({**told, "prompt": row.get("prompt"), "check": "instructions", "instructions": instructions})


def _code(problem: Problem, told: dict[str, Any]) -> Task:
    return Task.model_validate(
        {
            **told, "prompt": problem.prompt, "answer": problem.solution, "check": "code", "preamble": problem.preamble,
            "entry_point": problem.entry_point, "tests": problem.tests or None, "inputs": problem.inputs,
            "atol": problem.atol,
        }
    )  # fmt: skip


def _program(row: dict[str, Any], where: str, told: dict[str, Any]) -> Task:
    tests, standard_input = _case_tests(_first(row, CASES), where)
    prompt = _first(row, PROMPTS)
    return Task.model_validate({**told, "prompt": prompt, "tests": tests, "check": "code", "standard_input": standard_input})


# Each case runs the whole program anew over standard input.
_RUN_PROGRAM = """
import io, sys
def lines(text):
    return [" ".join(line.split()) for line in text.strip().splitlines()]
for given, expected in CASES:
    real, printed = sys.stdout, io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    sys.stdin, sys.stdout = io.TextIOWrapper(io.BytesIO(given.encode())), printed
    try:
        exec(compile(SOLUTION, "solution.py", "exec"), {"__name__": "__main__", "exit": sys.exit, "quit": sys.exit})
    except SystemExit:
        pass
    finally:
        printed.flush()
        sys.stdout = real
    assert lines(printed.buffer.getvalue().decode(errors="replace")) == lines(expected), "other output than expected"
"""
_RUN_FUNCTION = """
for given, expected in CASES:
    target = globals().get(NAME) or getattr(Solution(), NAME)
    got = target(*given)
    got = list(got) if isinstance(got, tuple) else got
    assert got == expected or [got] == expected, f"{NAME}{tuple(given)!r} gave {got!r}"[:500]
"""


def _case_tests(cases: Any, where: str) -> tuple[str, bool]:
    """The tests as a program, and whether it runs the solution over standard input."""
    if isinstance(cases, str):
        try:
            cases = json.loads(cases)
        except (ValueError, RecursionError):
            raise BadInput(f"{where}: input_output: expected JSON with inputs and outputs") from None
    if isinstance(cases, list):  # Eurus: [{input, output}]
        if not all(isinstance(case, dict) and "input" in case and "output" in case for case in cases):
            raise BadInput(f"{where}: test_cases: expected a list of {{input, output}}")
        inputs, outputs, name = [case["input"] for case in cases], [case["output"] for case in cases], None
    else:
        inputs, outputs, name = cases.get("inputs"), cases.get("outputs"), cases.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise BadInput(f"{where}: input_output: expected as many outputs as inputs, at least one")
    pairs = list(zip(inputs, outputs, strict=True))[:MAX_CASES]
    if name:
        return f"CASES = {pairs!r}\nNAME = {name!r}\n{_RUN_FUNCTION}", False
    pairs = [(_standard(given), _standard(expected)) for given, expected in pairs]
    return f"CASES = {pairs!r}\n{_RUN_PROGRAM}", True


def _standard(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)
