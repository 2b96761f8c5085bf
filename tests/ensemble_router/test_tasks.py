"""Task rows: what they must hold, and what is said when they do not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from routewright.ensemble_router.tasks import Task, read_tasks, write_tasks
from routewright.errors import BadInput

ROW = {"id": "a", "prompt": "2 + 2 =", "answer": "4", "domain": "sums", "check": "number"}
GENERATOR = {"family": "chain_sum", "seed": 1, "index": 0, "parameters": {"max_digits": 1}}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    tasks = [
        Task.model_validate(ROW),
        Task(id="b", prompt="Say it.", domain="if", check="instructions", instructions=[{"kind": "punctuation:no_comma"}]),
        Task(id="c", prompt="Add 1.", tests="assert f(1) == 2", domain="code", check="code", split="test"),
    ]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    assert read_tasks(tmp_path / "tasks.jsonl") == tasks
    (tmp_path / "tasks.jsonl.gz").write_bytes(gzip.compress((tmp_path / "tasks.jsonl").read_bytes()))
    assert read_tasks(tmp_path / "tasks.jsonl.gz") == tasks


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({**ROW, "answer": None}, "line 2: answer: expected text, the number task has none"),
        ({**ROW, "answer": "  "}, "line 2: answer: expected text, the number task has none"),
        ({**ROW, "answer": "four"}, "line 2: answer: expected a plain number, found 'four'"),
        ({**ROW, "answer": "four", "check": "choice"}, "line 2: answer: expected an option letter"),
        ({**ROW, "answer": None, "check": "code"}, "line 2: tests: expected a program"),
        ({**ROW, "check": "code"}, "line 2: tests: expected a program"),
        ({**ROW, "check": "instructions"}, "line 2: instructions: expected at least one"),
        ({**ROW, "check": "reasoning-gym"}, "line 2: generator: expected family, seed"),
        (
            {**ROW, "check": "reasoning-gym", "answer": None, "generator": {**GENERATOR, "family": "gcd"}},
            "line 2: answer: expected text, gcd",
        ),
        (
            {**ROW, "check": "reasoning-gym", "generator": {**GENERATOR, "family": "sums"}},
            "line 2: generator.family: reasoning-gym has no family 'sums', expected one of ab, ",
        ),
        ({**ROW, "check": "instructions", "instructions": [{"kind": "x:y"}]}, "line 2: instructions.0: instruction 'x:y'"),
        ({**ROW, "check": "vibes"}, "line 2: check: expected 'exact', 'number'"),
        ({**ROW, "anwser": "4"}, "line 2: anwser: Extra inputs are not permitted"),
        ({**ROW, "prompt": ""}, "line 2: prompt: "),
        ({**ROW, "answer": 4}, "line 2: answer: "),
        ({"id": "b"}, "line 2: prompt: Field required"),
        ({**ROW, "id": "first"}, "line 2: id: 'first' occurs twice"),
        ("{", "line 2: "),
        ("[1]", "line 2: "),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, row: Any, told: str) -> None:
    file = write(tmp_path / "tasks.jsonl", {**ROW, "id": "first"}, row)
    with pytest.raises(BadInput) as error:
        read_tasks(file)
    assert told in str(error.value)
    assert str(error.value).startswith(str(file))


def test_a_family_with_its_own_scorer_needs_no_answer() -> None:
    generator = {"family": "graph_color", "seed": 1, "index": 0, "parameters": {}}
    task = Task.model_validate({**ROW, "answer": None, "check": "reasoning-gym", "generator": generator})
    assert task.answer is None


def test_a_file_without_tasks(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds none"):
        read_tasks(write(tmp_path / "tasks.jsonl", ""))
    with pytest.raises(BadInput, match="cannot be read"):
        read_tasks(tmp_path / "missing.jsonl")
