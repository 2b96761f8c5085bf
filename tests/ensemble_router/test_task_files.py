"""Files in other people's layouts, and real samples of them where they are there."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from routewright.ensemble_router.task_files import load_tasks
from routewright.ensemble_router.tasks import Task, read_tasks, write_tasks
from routewright.ensemble_router.verify import verify
from routewright.errors import BadInput

DATA = Path(__file__).parents[3] / "shared" / "data" / "verifiable"
REASON = "the sample data sets are not beside the repository"


def load(path: Path, *rows: Any) -> list[Task]:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return load_tasks(path)


LAYOUTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": ({"question": "How many?", "answer": "48/2=24\n#### 1,024"}, "number", "1024"),
    "aime": ({"problem": "Find n.", "answer": 204, "solution": "long"}, "math", "204"),
    "math": ({"problem": "Simplify.", "solution": r"So \boxed{\frac{1}{2}}.", "level": "Level 1"}, "math", r"\frac{1}{2}"),
    "olympiad": ({"question": "Find x.", "final_answer": ["$2\\sqrt{3}$"], "solution": ["long"]}, "math", "$2\\sqrt{3}$"),
    "math-list": ({"problem": "All n?", "solution": r"So \boxed{3,5,7}.", "level": "Level 1"}, "math", "3,5,7"),
    "olympiad-list": ({"question": "All x?", "final_answer": ["-1,7"], "solution": ["long"]}, "math", "-1,7"),
    "list": ({"question": "All n?", "answer": "1,2"}, "exact", "1,2"),
    "arc": ({"id": "q1", "question": "Which?", "choices": {"text": ["red", "blue"], "label": ["1", "2"]}, "answerKey": "2"},
            "choice", "B"),
    "arc-stem": ({"question": {"stem": "Which?", "choices": [{"text": "red", "label": "A"}, {"text": "blue", "label": "B"}]},
                  "answerKey": "A"}, "choice", "A"),
    "agieval": ({"passage": "Text.", "question": "Which?", "options": ["(A)red", "(B)blue"], "label": "B"}, "choice", "B"),
    "logicbench": ({"question": "Then?", "choices": {"choice_1": "he sings", "choice_2": "he cries"}, "answer": "choice_2"},
                   "choice", "B"),
    "mmlu": ({"question": "Which?", "choices": ["red", "blue", "green"], "answer": 2}, "choice", "C"),
    "bbh": ({"input": "Which?\nOptions:\n(A) red\n(B) blue", "target": "(B)"}, "choice", "(B)"),
    "bbh-words": ({"input": "Sort: b a", "target": "a b"}, "exact", "a b"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_layouts_are_told_apart_by_their_fields(tmp_path: Path, name: str) -> None:
    row, check, answer = LAYOUTS[name]
    (task,) = load(tmp_path / f"{name}.jsonl", row)
    assert (task.check, task.answer, task.domain) == (check, answer, name)
    if check == "math":
        pytest.importorskip("math_verify", reason="math-verify is in the ensemble extra")
    assert verify(task, f"Let me see.\nThe answer is {answer.strip('$')}.") == 1.0
    assert verify(task, "The answer is 7777.") == 0.0


def test_options_are_listed_with_letters(tmp_path: Path) -> None:
    (task,) = load(tmp_path / "a.jsonl", LAYOUTS["agieval"][0])
    assert task.prompt == "Text.\n\nWhich?\nOptions:\n(A) red\n(B) blue"


def test_ifeval_rows(tmp_path: Path) -> None:
    row = {
        "key": 1000, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
        "kwargs": [{"num_words": None}, {}],
    }  # fmt: skip
    (task,) = load(tmp_path / "a.jsonl", row)
    assert [verify(task, text) for text in ("<<A>> b", "<<A>>, b", "a, b", "")] == [1.0, 0.5, 0.0, 0.0]
    assert task.id == "1000"


TACO = {
    "question": "Add the numbers of each line.",
    "input_output": {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11"]},
}
CALLED = {"question": "Add.", "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})}
EUREKA = {"prompt": "Add.", "test_cases": [{"input": "1 2", "output": "3"}]}


def test_programs_over_standard_input(tmp_path: Path) -> None:
    one, two, three = load(tmp_path / "a.jsonl", TACO, CALLED, EUREKA)
    program = "```python\nimport sys\na, b = map(int, sys.stdin.buffer.read().split())\nprint(a + b)\n```"
    assert [verify(task, program) for task in (one, three)] == [1.0, 1.0]
    assert verify(one, "print(sum(map(int, input().split())))\nexit()") == 1.0
    assert verify(one, "print(3)") == 0.0
    assert verify(one, "import os\nos._exit(0)") == 0.0
    assert verify(two, "def add(a, b):\n    return a + b") == 1.0
    assert verify(two, "class Solution:\n    def add(self, a, b):\n        return a + b") == 1.0
    assert verify(two, "def add(a, b):\n    return a - b") == 0.0


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "How many?"}, "answer: expected text, the row has none"),
        ({"question": "How many?", "answer": None}, "answer: expected text, the row has none"),
        ({"answer": "4"}, "prompt: expected text"),
        (
            {"question": "Which?", "choices": ["red", "blue"], "answer": "green"},
            "answer: expected the label, number or text",
        ),
        ({"question": "Which?", "choices": ["red", "blue"], "answer": 2}, "answer: expected the label, number or text"),
        ({"question": "Which?", "choices": ["red"], "answer": 0}, "choices: expected 2 to 26 options"),
        (
            {"prompt": "Write.", "instruction_id_list": ["punctuation:no_dots"], "kwargs": [{}]},
            "expected one of the 25 kinds",
        ),
        (
            {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
            "kwargs: expected one mapping",
        ),
        ({"question": "Add.", "input_output": "{"}, "input_output: expected JSON"),
        ({"question": "Add.", "input_output": {"inputs": ["1"], "outputs": []}}, "expected as many outputs as inputs"),
        ({"question": "How?", "answer": "four", "check": "number"}, "answer: expected a plain number"),
        ("[]", "expected one JSON object"),
        ("{", "expected one JSON object"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, row: Any, told: str) -> None:
    with pytest.raises(BadInput) as error:
        load(tmp_path / "a.jsonl", {"question": "How many?", "answer": "4"}, row)
    assert f"{tmp_path / 'a.jsonl'}, line 2: " in str(error.value)
    assert told in str(error.value)


def test_code_without_tests(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="line 1: field entry_point"):
        load(
            tmp_path / "a.jsonl", {"task_id": 1, "text": "Double.", "code": "def f(): 1", "test_list": [], "base_input": [1]}
        )


@pytest.mark.skipif(not DATA.is_dir(), reason=REASON)
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("gsm8k", {"number": 2200}),
        ("ifeval", {"instructions": 270}),
        ("mbpp_sanitized", {"code": 128}),
        ("humaneval", {"code": 82}),
        ("humanevalplus_mini", {"code": 82}),
    ],
)
def test_real_samples(tmp_path: Path, name: str, counts: dict[str, int]) -> None:
    tasks = load_tasks(DATA / f"{name}.jsonl.gz")
    assert Counter(task.check for task in tasks) == counts
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    assert read_tasks(tmp_path / "tasks.jsonl") == tasks
    assert load_tasks(tmp_path / "tasks.jsonl") == tasks


@pytest.mark.skipif(not DATA.is_dir(), reason=REASON)
def test_real_answers_pass_and_wrong_ones_do_not() -> None:
    """GSM8K's worked solutions and BBH's targets score 1; BBH's lettered rows are multiple choice."""
    with gzip.open(DATA / "gsm8k.jsonl.gz", "rt") as file:
        solutions = {row["id"]: row["solution"] for row in map(json.loads, file)}
    grade = load_tasks(DATA / "gsm8k.jsonl.gz")
    assert all(verify(task, solutions[task.id]) == 1.0 for task in grade)
    bbh = load_tasks(DATA / "bbh_sample.jsonl.gz")
    assert all(
        verify(task, f"So the answer is {task.answer}.") == 1.0 for task in bbh if task.domain != "bbh.dyck_languages"
    )
    checks = Counter(task.check for task in bbh)
    assert checks["choice"] > 250
    assert set(checks) == {"choice", "exact"}


@pytest.mark.skipif(not DATA.is_dir(), reason=REASON)
@pytest.mark.parametrize("name", ["mbpp_sanitized", "humaneval", "humanevalplus_mini"])
def test_reference_code_passes(name: str) -> None:
    for task in load_tasks(DATA / f"{name}.jsonl.gz")[:3]:
        assert task.answer is not None
        assert verify(task, task.answer) == 1.0
        assert verify(task, "    pass\n") == 0.0
