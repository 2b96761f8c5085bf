"""The benchmark's tables where the small model never succeeds: intervals of rows that all end alike, no skill."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("trl", reason="trl is in the train extra")

from routewright.errors import BadInput
from routewright.evaluation.bootstrap import Estimate
from routewright.step_router.episodes import Episode, Turn
from routewright.step_router.features import NAMES
from routewright.step_router.results import StepResults, build_results

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_router.py"
TASKS = 4


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def run(row: str, threshold: float | None, success: bool, calls: int) -> list[Episode]:
    """Three steps of each task under one seed."""
    turn = Turn("go", "slm", (0.5,) * len(NAMES), ())
    return [Episode(row, threshold, f"t{i}", "code", 7, success, 3, calls, (turn,) * 3) for i in range(TASKS)]


@pytest.fixture(scope="module")
def results() -> StepResults:
    episodes = [*run("slm", None, False, 0), *run("llm", None, True, 3), *run("risk", -1.0, True, 3),
                *run("time", 0.5, True, 2)]  # fmt: skip
    risks = {"risk": [[5 / 6] * 3] * TASKS}
    return build_results(episodes, {"risk": -1.0}, risks, 1.0, 50.0, 0.2, 0, 200)


def test_all_failures_make_a_whole_table(benchmark: ModuleType, results: StepResults) -> None:
    """0 of 4 tasks: at most 1 − 0.025^(1/4) = 0.602, and 4 of 4 at least 0.398, by Clopper and Pearson."""
    text = benchmark.tables([(0, results, [])])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "4 episodes of 4 test tasks, 1 perturbation seeds" in text
    assert lines["slm"].startswith("| slm | 0.000 [0.000, 0.602] | 0.000 [0.000, 0.000] |")
    assert lines["llm"].startswith("| llm | 1.000 [0.398, 1.000] | 1.000 [1.000, 1.000] |")
    one, part = "1.000 [1.000, 1.000] [1.000, 1.000]", "0.970 [0.970, 0.970] [0.970, 0.970]"
    assert f"| 0 | {one} | {one} | {part} | {part} | – |\n" in text, "over tasks, over tasks and seeds, no Brier skill"
    assert "is read with hindsight" in text.split("**Targets of risk**")[1].split("| seed |")[0]


def test_differences_stand_beside_their_interval_under_new_seeds(benchmark: ModuleType, results: StepResults) -> None:
    text = benchmark.tables([(0, results, [])])
    assert "known to be conservative" in text
    area = next(c for c in results.comparisons if (c.b, c.at) == ("time", "area"))
    d, new = area.difference, area.new_seeds
    assert new is not None
    assert f"| area | {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}] | [{new.low:+.3f}, {new.high:+.3f}] |" in text
    worst = next(line for line in text.splitlines() if "cvar at own rate" in line)
    assert worst.endswith("|  |"), "which is about the seeds as they are"


def test_a_folder_of_another_profile_is_refused(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_seed(*_: object) -> None:
        raise AssertionError("a stage began")

    monkeypatch.setattr(benchmark, "run_seed", run_seed)
    for profile in ("smoke", "laptop"):
        monkeypatch.setattr(sys, "argv", ["x", "--environment", "shell", "--profile", profile, "--out", str(tmp_path)])
        with pytest.raises(AssertionError if profile == "smoke" else BadInput, match=r"began|was made with another tasks"):
            benchmark.main()


def test_several_seeds_show_their_range(benchmark: ModuleType, results: StepResults) -> None:
    text = benchmark.tables([(0, results, []), (1, results, [])])
    assert "| slm | 0.000 (0.000–0.000) |" in text


@pytest.mark.parametrize(
    ("metric", "estimate", "shown"),
    [
        ("success", (0.5, 0.25, 0.75), "0.500 [0.250, 0.750]"),
        ("success", (1.0, 1.0, 1.0), "1.000 [0.832, 1.000]"),
        ("success", (0.0, 0.0, 0.0), "0.000 [0.000, 0.168]"),
        ("escalation", (1.0, 1.0, 1.0), "1.000 [1.000, 1.000]"),
    ],
)
def test_an_interval_of_twenty_tasks(
    benchmark: ModuleType, metric: str, estimate: tuple[float, float, float], shown: str
) -> None:
    mean, low, high = estimate
    assert benchmark.with_interval(metric, Estimate(mean=mean, low=low, high=high, n=20), 20) == shown
