"""Verifiers under what a model may write: right, wrong, empty, endless, hostile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from routewright.ensemble_router import scoring_process
from routewright.ensemble_router.tasks import Generator, Instruction, Task
from routewright.ensemble_router.verify import check_sandbox, equal_expressions, verify
from routewright.errors import BadInput
from routewright.sandbox import Limits, NoWalls, Sandbox, check_walls

QUICK = Limits(wall_s=3, cpu_s=1, memory_bytes=300 << 20, file_bytes=1 << 20, disk_bytes=4 << 20, processes=8)


def task(check: str, answer: str | None = "4", **more: object) -> Task:
    return Task.model_validate({"id": "t", "prompt": "2 + 2 =", "answer": answer, "domain": "d", "check": check, **more})


TASKS = [
    task("exact", "four"),
    task("number"),
    task("choice", "B"),
    task("math", r"\frac{1}{2}"),
    task("code", None, tests="assert f(1) == 2"),
    task("instructions", None, instructions=[Instruction(kind="keywords:existence", arguments={"keywords": ["zebra"]})]),
    task("instructions", None, instructions=[Instruction(kind="detectable_format:json_format")]),
]
HOSTILE = {
    "empty": "",
    "blank": " \n\t",
    "nul": "\0" * 50,
    "long": "9" * 10_000_000,
    "long words": "the answer is " * 700_000,
    "deep latex": "\\boxed{" + "\\frac{" * 4000,
    "nested": "\\boxed{" + "{" * 900 + "1" + "}" * 900 + "}",
    "brackets": "[" * 100_000,
    "stars": "*" * 100_000,
    "unicode digits": "٣ ³ ④ ½ 𝟜𝟜",
    "surrogate": "\ud800 answer: \udfff",
    "many numbers": "1 " * 50_000,
    "controls": "".join(map(chr, range(32))) * 100,
    "right to left": "\u202e5\u202c",
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_no_completion_crashes_a_check_or_passes_it(kind: str) -> None:
    pytest.importorskip("math_verify", reason="math-verify is in the ensemble extra")
    for one in TASKS:
        assert verify(one, HOSTILE[kind], timeout_s=3, limits=QUICK) == 0.0, one.check


def test_right_answers() -> None:
    assert verify(task("exact", "Paris"), "The answer is  paris.") == 1.0
    assert verify(task("number", "1024"), "so $1,024.00") == 1.0
    assert verify(task("choice", "B"), "(B) blue") == 1.0
    assert (
        verify(task("code", None, tests="assert f(1) == 2"), "```python\ndef f(x):\n    return x + 1\n```", limits=QUICK)
        == 1.0
    )


@pytest.mark.parametrize(
    ("answer", "found", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", "1/2", True),
        ("2\\sqrt{3}", "\\sqrt{12}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("$\\{1,2\\}$", "\\{2, 1\\}", True),
        ("3.0", "3", True),
        (r"\frac{1}{2}", "0.51", False),
        ("x+1", "x+2", False),
        ("3,5,7", "3, 5, 7", True),
        ("3,5,7", "357", False),
        ("1,2", "12", False),
        ("-1,7", "-17", False),
        ("1,234", "1234", True),
        ("1", "", False),
    ],
)
def test_equal_expressions(answer: str, found: str, same: bool) -> None:
    pytest.importorskip("math_verify", reason="math-verify is in the ensemble extra")
    assert equal_expressions(answer, found) is same


def test_a_late_score_is_none_and_the_next_one_comes() -> None:
    """9**9**9**9 takes for ever in C code; the child is killed and another answers."""
    pytest.importorskip("math_verify", reason="math-verify is in the ensemble extra")
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is in the ensemble extra")
    assert equal_expressions("1/2", "2/4")
    generator = Generator(family="countdown", seed=1, index=0)
    one = task("reasoning-gym", None, generator=generator)
    start = time.monotonic()
    assert verify(one, "9**9**9**9**9", timeout_s=1) == 0.0
    assert time.monotonic() - start < 60  # it ends at all
    assert equal_expressions("1/2", "3/6")


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("raise ModuleNotFoundError(\"No module named 'math_verify'\")", "No module named 'math_verify'"),
        ("import os; os._exit(3)", "it ended or was not ready after 120 s"),
    ],
)
def test_a_scorer_that_cannot_start_is_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, reason: str
) -> None:
    (tmp_path / "math_verify.py").write_text(library)
    monkeypatch.syspath_prepend(tmp_path)
    scoring_process.stop()
    for _ in range(2):
        with pytest.raises(BadInput, match=rf"did not start, {reason}: expected `pip install 'routewright\[ensemble\]'`$"):
            verify(task("math", r"\frac{1}{2}"), "0.5")
    assert verify(task("math", "3"), "3") == 1.0  # needs none


@pytest.mark.parametrize(
    ("family", "answer", "allowed"),
    [
        ("spiral_matrix", "[1, 2, 3]", True),
        ("spiral_matrix", "__import__('os').system('id')", False),
        ("spiral_matrix", "[x for x in y]", False),
        ("countdown", "(3 + 4) * 2", True),
        ("countdown", "().__class__", False),
        ("countdown", "open('x')", False),
        ("simple_integration", "x**2/2 + sin(x) + C", True),
        ("simple_integration", "exec('1')", False),
        ("polynomial_multiplication", "x.free_symbols", False),
        ("spell_backward", "__import__('os')", True),  # its scorer evaluates nothing
    ],
)
def test_what_may_reach_a_scorer_that_evaluates(family: str, answer: str, allowed: bool) -> None:
    assert scoring_process.harmless(family, answer) is allowed


def test_reasoning_gym_scores() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is in the ensemble extra")
    entry = reasoning_gym.create_dataset("countdown", seed=3, size=9)[2]
    one = task("reasoning-gym", None, generator=Generator(family="countdown", seed=3, index=2))
    assert verify(one, entry["answer"], timeout_s=120) == 1.0  # the scoring process begins here, slowly on a busy machine
    assert verify(one, f"<answer>{entry['metadata']['expression']}</answer>") == 1.0
    assert verify(one, "1 + 1") < 0.1
    plain = task("reasoning-gym", "12", generator=Generator(family="gcd", seed=1, index=0))
    assert [verify(plain, text) for text in ("12", "<answer>12</answer>", "11 12", "2", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_code_that_forks_or_never_ends() -> None:
    one = task("code", None, tests="assert f(1) == 2")
    assert verify(one, "import os\nwhile True:\n    os.fork()", limits=QUICK) == 0.0
    assert verify(one, "while True:\n    pass", limits=QUICK) == 0.0
    assert verify(one, "x = 'a' * (1 << 40)", limits=QUICK) == 0.0


def test_code_is_refused_at_the_start_where_the_sandbox_has_no_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROUTEWRIGHT_SANDBOX", raising=False)
    monkeypatch.setattr(Sandbox.__init__, "__defaults__", (None, False))
    check_walls.cache_clear()
    check_sandbox([one for one in TASKS if one.check != "code"])
    with pytest.raises(NoWalls, match="ROUTEWRIGHT_SANDBOX=open"):
        check_sandbox(TASKS)
    with pytest.raises(NoWalls):
        verify(task("code", None, tests="assert f(2) == 3"), "def f(x):\n    return x + 1", limits=QUICK)
    check_walls.cache_clear()
