"""Write, run tests, read the failure, repair; and files that are not what they should be."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from routewright.errors import BadInput
from routewright.sandbox import Limits, NoWalls
from routewright.step_router.environments.code_env import CodeEnvironment, Problem, load_problems, program

DATA = Path(__file__).parents[4] / "shared" / "data" / "verifiable"
QUICK = Limits(wall_s=5, cpu_s=1, memory_bytes=300 << 20, file_bytes=1 << 20, disk_bytes=4 << 20, processes=8)

HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'BASE = 10\n\n\ndef add(a, b):\n    """Add BASE and two numbers."""\n',
    "canonical_solution": "    return BASE + a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 13\n    assert candidate(0, -1) == 9\n",
    "entry_point": "add",
}
PLUS = {
    "id": "HumanEval/901", "prompt": HUMANEVAL["prompt"], "entry_point": "add",
    "answer": "    return [(BASE + a + b) / 3, 'x']\n",
    "base_input": "[[1, 2]]", "plus_input": "[[5, 5], [0, 0.25]]", "atol": 1e-4,
}  # fmt: skip
MBPP = {
    "task_id": 902, "text": "Write a function to double a number.", "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(2) == 4", "assert double(EIGHT) == 16"], "test_setup_code": "EIGHT = 8",
}  # fmt: skip


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def problems(tmp_path: Path) -> list[Problem]:
    return load_problems(write(tmp_path / "problems.jsonl", HUMANEVAL, "", PLUS, MBPP))


@pytest.fixture
def environment(problems: list[Problem]) -> CodeEnvironment:
    return CodeEnvironment(problems, limits=QUICK)


@pytest.mark.parametrize("task", ["HumanEval/900", "HumanEval/901", "902"])
def test_the_reference_passes(environment: CodeEnvironment, task: str) -> None:
    environment.reset(task, 0)
    outcome = environment.step(environment.teacher())
    assert (outcome.success, outcome.done, outcome.observation.text) == (True, True, "All tests passed.")


def test_write_read_the_failure_repair(environment: CodeEnvironment) -> None:
    start = environment.reset("HumanEval/900", 0)
    assert start.objective == HUMANEVAL["prompt"]
    assert start.admissible is None
    wrong = environment.step("    return a + b\n")
    assert not wrong.done
    assert "assert candidate(1, 2) == 13" in wrong.observation.text
    assert "harness" not in wrong.observation.text
    assert "return a + b" in wrong.observation.inventory
    repaired = environment.step("    return BASE + a + b\n")
    assert repaired.success
    assert repaired.observation.step == 2
    with pytest.raises(ValueError, match="over"):
        environment.step("again")


def test_attempts_run_out(environment: CodeEnvironment) -> None:
    environment.reset("902", 0)
    outcomes = [environment.step("def double(x):\n    return x"), environment.step(None), environment.step("")]
    assert [outcome.done for outcome in outcomes] == [False, False, True]
    assert not any(outcome.success for outcome in outcomes)
    assert outcomes[1].observation.text == "Nothing ran."


def test_expected_outputs_come_from_the_reference(environment: CodeEnvironment) -> None:
    verdicts = []
    for value in ("[(BASE + a + b) / 3 + 1e-6, 'x']", "[(BASE + a + b) / 3 + 1e-2, 'x']", "((BASE + a + b) / 3, 'x')"):
        environment.reset("HumanEval/901", 0)
        outcome = environment.step(f"    return {value}")
        verdicts.append(outcome.success)
    assert verdicts == [True, False, False]
    assert "gave" in outcome.observation.text


def test_an_action_is_a_body_a_function_or_fenced_text(problems: list[Problem]) -> None:
    human = problems[0]
    assert program(human, "    return 1\n") == human.prompt + "    return 1\n"
    whole = program(human, "Here you are:\n```python\ndef add(a, b):\n    return 7\n```\nDone.")
    assert whole.startswith("BASE = 10")
    assert whole.endswith("def add(a, b):\n    return 7\n")
    compile(whole, "whole", "exec")
    assert program(problems[2], "```\nx = 1\n```") == "x = 1\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os\nos._exit(0)", "exit code 0 before the last test"),
        ("raise SystemExit(0)", "SystemExit"),
        ("while True: pass", "exit code 137|within 5 seconds"),
        ("def double(x):\n    return bytearray(500 << 20)", "MemoryError"),
        ("def double(x:\n", "SyntaxError"),
        ("print('x' * (80 << 20))", "output limit"),
        ("print('x' * 40000)\ndef double(x): return None", "AssertionError"),
        ("import os\nprint(os.listdir('.'), open('case.json').read())", "FileNotFoundError"),
    ],
)
def test_programs_that_are_no_solution(environment: CodeEnvironment, code: str, told: str) -> None:
    environment.reset("902", 0)
    outcome = environment.step(code)
    assert not outcome.success
    assert re.search(told, outcome.observation.text), outcome.observation.text
    assert len(outcome.observation.text) < 2_000


def test_failures_do_not_differ_from_run_to_run(problems: list[Problem]) -> None:
    told = set()
    for _ in range(2):
        environment = CodeEnvironment(problems, limits=QUICK)
        environment.reset("902", 0)
        told.add(environment.step("def double(x):\n    raise ValueError(object())").observation.text)
    assert len(told) == 1


def test_the_order_of_sets_is_the_same_in_every_run(problems: list[Problem]) -> None:
    """One of 40 words, by set order: nine more runs agree by chance once in 40⁹."""
    code = "def double(x):\n    raise ValueError(list({f'word{i}' for i in range(40)})[0])"
    told = set()
    for _ in range(10):
        environment = CodeEnvironment(problems, limits=QUICK)
        environment.reset("902", 0)
        told.add(environment.step(code).observation.text)
    assert len(told) == 1


def test_files_in_the_folder_and_variables_of_this_process_do_not_reach_python(
    environment: CodeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONHASHSEED", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "7")
    environment.reset("902", 0)
    code = (
        "import os, sys\nwith open('math.py', 'w') as file: file.write('1 / 0')\nimport random\n"
        "def double(x): raise ValueError(sorted(e for e in os.environ.items() if e[0].startswith('PYTHON')), '' in sys.path)"
    )
    told = environment.step(code).observation.text
    assert "([('PYTHONDONTWRITEBYTECODE', '1'), ('PYTHONHASHSEED', '0')], False)" in told


def test_without_walls_nothing_begins(problems: list[Problem], refused: None) -> None:
    with pytest.raises(NoWalls, match="ROUTEWRIGHT_SANDBOX=open"):
        CodeEnvironment(problems)


def test_same_code_runs_once(environment: CodeEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    environment.reset("902", 0)
    first = environment.step(environment.teacher())
    monkeypatch.setattr(environment, "_run", lambda *a, **b: pytest.fail("ran again"))
    environment.reset("902", 1)
    assert environment.step(environment.teacher()) == first


def test_mbpp_shows_one_test(environment: CodeEnvironment) -> None:
    objective = environment.reset("902", 0).objective
    assert "Example: assert double(2) == 4" in objective
    assert "16" not in objective


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([HUMANEVAL, {**MBPP, "test_list": []}], r"line 2: field tests: the problem 902 has no tests"),
        ([{**HUMANEVAL, "test": " "}], r"line 1: field tests: .*no tests"),
        ([HUMANEVAL, '{"task_id": "half'], r"line 2: expected a JSON object, got Unterminated"),
        (["[1, 2]"], r"line 1: expected a JSON object, got list"),
        ([{**MBPP, "text": None}], r"line 1: field prompt"),
        ([{**MBPP, "code": ""}], r"line 1: field answer"),
        ([{**MBPP, "text": 5}], r"line 1: field text: expected text, got int"),
        ([MBPP, MBPP], r"line 2: field task_id: '902' occurs twice"),
        ([{**PLUS, "base_input": "[[1, __import__('os')]]"}], r"line 1: field base_input"),
        ([{**PLUS, "entry_point": ""}], r"line 1: field entry_point"),
        ([MBPP, {**PLUS, "atol": "abc"}], r"line 2: field atol: expected a number that is not negative, got 'abc'$"),
        ([{**PLUS, "atol": -1}], r"line 1: field atol: .* got -1$"),
        ([{**PLUS, "atol": True}], r"line 1: field atol: .* got True$"),
        ([{**PLUS, "atol": float("nan")}], r"line 1: field atol: .* got nan$"),
        ([], "holds no problem"),
    ],
)
def test_bad_files(tmp_path: Path, rows: list[Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        load_problems(write(tmp_path / "problems.jsonl", *rows))


def test_a_byte_order_mark_is_no_part_of_the_first_problem(tmp_path: Path) -> None:
    plain = write(tmp_path / "problems.jsonl", MBPP)
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    (tmp_path / "marked.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain.read_bytes()))
    assert load_problems(tmp_path / "marked.jsonl") == load_problems(tmp_path / "marked.jsonl.gz") == load_problems(plain)


def test_a_line_may_hold_other_line_separators(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    text = json.dumps({**MBPP, "text": "Double\u2028a\x85number."}, ensure_ascii=False)
    path.write_bytes(f"{text}\r\n{json.dumps(PLUS)}\n".encode())
    assert [problem.prompt for problem in load_problems(path)] == ["Double\u2028a\x85number.", PLUS["prompt"]]


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        load_problems(tmp_path / "none.jsonl")
    whole = gzip.compress(b'{"task_id": "x"}\n' * 50)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-12])
    with pytest.raises(BadInput, match=r"cut.jsonl.gz: not readable"):
        load_problems(tmp_path / "cut.jsonl.gz")
    (tmp_path / "plain.jsonl.gz").write_text("{}")
    with pytest.raises(BadInput, match="not readable"):
        load_problems(tmp_path / "plain.jsonl.gz")


def test_unknown_problem(environment: CodeEnvironment) -> None:
    with pytest.raises(BadInput, match="no such problem"):
        environment.reset("HumanEval/1", 0)


def test_reference_without_plain_values(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {**PLUS, "answer": "    return object()\n"})
    environment = CodeEnvironment(load_problems(path), limits=QUICK)
    environment.reset("HumanEval/901", 0)
    with pytest.raises(BadInput, match="reference solution gives no plain values"):
        environment.step("    return 1")


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data sets are not here")
@pytest.mark.parametrize("name", ["humaneval", "humanevalplus_mini", "mbpp_sanitized"])
def test_published_files(name: str) -> None:
    problems = load_problems(DATA / f"{name}.jsonl.gz")
    assert len(problems) >= 80
    environment = CodeEnvironment(problems)
    for problem in problems[:2]:
        environment.reset(problem.id, 0)
        assert environment.step(environment.teacher()).success
