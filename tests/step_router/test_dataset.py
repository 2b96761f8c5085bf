"""The tasks of a step router: disjoint splits, laid out as one folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from tiny_policy import tiny_profile

from routewright.errors import BadInput
from routewright.step_router import dataset as module
from routewright.step_router.calibration import held_out_tasks
from routewright.step_router.dataset import fetch_tasks, make_environment, read_tasks, split_tasks
from routewright.step_router.environments.code_env import CodeEnvironment
from routewright.step_router.environments.shell_env import OWN_TASKS, ShellEnvironment
from routewright.step_router.environments.textworld_env import SPLITS, TextWorldEnvironment
from routewright.step_router.fetch import fetch_dataset
from routewright.step_router.profile import TasksSection

WANTED = TasksSection(policy=50, router=20, threshold=10, test=20)


def sizes(splits: dict[str, list[str]]) -> list[int]:
    return [len(splits[split]) for split in ("policy", "router", "threshold", "test")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(100, [50, 20, 10, 20]), (300, [50, 20, 10, 20]), (50, [25, 10, 5, 10]), (10, [5, 2, 1, 2]), (5, [1, 2, 1, 1])],
)
def test_splits_are_disjoint_and_in_proportion(count: int, expected: list[int]) -> None:
    names = [f"task {i}" for i in range(count)]
    splits = split_tasks(names, WANTED)
    assert list(splits) == list(SPLITS)
    assert sizes(splits) == expected
    everything = [name for some in splits.values() for name in some]
    assert len(set(everything)) == len(everything)
    assert set(everything) <= set(names)


def test_the_largest_split_gives_way_where_each_must_have_a_task() -> None:
    """Of 6 tasks in the proportions 800 : 100 : 60 : 150 the first split would get 4, and the router's none."""
    laptop = TasksSection(policy=800, router=100, threshold=60, test=150)
    assert sizes(split_tasks("abcdef", laptop)) == [2, 2, 1, 1]
    assert sizes(split_tasks("abcdefghij", laptop)) == [6, 2, 1, 1]
    assert sizes(split_tasks("abcde", TasksSection(policy=1, router=2, threshold=1, test=50))) == [1, 2, 1, 1]


def test_a_router_of_one_task_could_not_be_calibrated() -> None:
    """One task to fit on and one for the temperature."""
    for count in range(5, 40):
        names = [f"task {i}" for i in range(count)]
        chosen = split_tasks(names, TasksSection(policy=800, router=100, threshold=60, test=150))["router"]
        held_out = held_out_tasks(chosen, 0)
        assert held_out
        assert set(chosen) - held_out
    with pytest.raises(ValidationError, match="router"):
        TasksSection(policy=1, router=1, threshold=1, test=1)


def test_splits_do_not_follow_the_order_of_the_tasks() -> None:
    names = [f"{i:03d}" for i in range(100)]
    assert split_tasks(names, WANTED) == split_tasks(names[::-1], WANTED)
    assert split_tasks(names, WANTED)["policy"] != names[:50], "shuffled: neighbours are often alike"


def test_fewer_tasks_than_splits_are_refused() -> None:
    with pytest.raises(BadInput, match="expected at least 5 tasks, 2 for the router split and one for each other, found 4"):
        split_tasks("abcd", WANTED)


def problems(count: int) -> str:
    rows = [
        {
            "task_id": f"add/{i}", "prompt": f"def add(x):\n    '''Add {i}.'''\n", "answer": f"    return x + {i}\n",
            "entry_point": "add", "tests": f"assert add(1) == {i + 1}",
        }
        for i in range(count)
    ]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("packed", [False, True])
def test_problems_are_copied_and_split(tmp_path: Path, packed: bool) -> None:
    source = tmp_path / ("mine.jsonl.gz" if packed else "mine.jsonl")
    source.write_bytes(gzip.compress(problems(8).encode()) if packed else problems(8).encode())
    even = {"policy": 4, "router": 4, "threshold": 4, "test": 4}
    fetch_tasks(str(source), tmp_path / "out", tiny_profile(tasks=even))
    source.unlink()  # the folder needs nothing else
    tasks = read_tasks(tmp_path / "out")
    assert (tasks.environment, tasks.folder) == ("code", tmp_path / "out")
    assert sizes(tasks.splits) == [2, 2, 2, 2]
    environment = make_environment(tasks)
    assert isinstance(environment, CodeEnvironment)
    name = tasks.splits["test"][0]
    assert f"Add {name.removeprefix('add/')}." in environment.reset(name, 0).objective
    assert not list((tmp_path / "out").glob("*.partial"))


def test_too_few_problems_and_broken_ones_leave_no_tasks(tmp_path: Path) -> None:
    for text, told in ((problems(4), "at least 5 tasks"), (problems(5) + "{\n", "line 6")):
        source = tmp_path / "mine.jsonl"
        source.write_text(text)
        with pytest.raises(BadInput, match=told):
            fetch_tasks(str(source), tmp_path / "out", tiny_profile())
        assert not (tmp_path / "out" / "tasks.json").exists()


def test_our_own_shell_tasks(tmp_path: Path) -> None:
    fetch_tasks("shell", tmp_path, tiny_profile(tasks={"policy": 2, "router": 2, "threshold": 1, "test": 1}))
    tasks = read_tasks(tmp_path)
    assert tasks.environment == "shell"
    assert sizes(tasks.splits) == [2, 2, 1, 1]
    environment = make_environment(tasks)
    assert isinstance(environment, ShellEnvironment)
    own = {folder.name for folder in OWN_TASKS.iterdir()}
    assert {name for some in tasks.splits.values() for name in some} <= own
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_version_with_a_single_task_for_the_router_is_refused(tmp_path: Path) -> None:
    made, profile = tmp_path / "made", tiny_profile(tasks={"policy": 2, "router": 2, "threshold": 1, "test": 1})
    fetch_tasks("shell", made, profile)
    content = json.loads((made / "tasks.json").read_text())
    fetch_dataset(made.as_uri(), tmp_path / "again", profile)
    assert read_tasks(tmp_path / "again").splits == content["splits"]
    del content["splits"]["router"][1:]
    (made / "tasks.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"tasks\.json: splits\.router: expected at least 2 tasks, found 1$"):
        fetch_dataset(made.as_uri(), tmp_path / "out", profile)
    assert not (tmp_path / "out").exists()


def test_an_unknown_source_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"environment 'nonsense': expected textworld, shell, a \.jsonl file") as told:
        fetch_tasks("nonsense", tmp_path, tiny_profile())
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        "{}",
        json.dumps({"environment": "code", "splits": {"policy": []}}),
        json.dumps({"splits": {split: [] for split in SPLITS}}),
    ],
)
def test_a_folder_that_holds_no_tasks_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tasks.json").write_text(content)
    with pytest.raises(BadInput, match=r"tasks\.json: expected the tasks that the fetch-dataset stage writes"):
        read_tasks(tmp_path)


def test_text_games_are_made_and_can_be_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    monkeypatch.setenv("ROUTEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SPLITS", ("policy", "test"))
    profile = tiny_profile(tasks={"policy": 1, "test": 1, "cooking": 0.0}, workers=1)
    fetch_tasks("textworld", tmp_path / "out", profile)
    tasks = read_tasks(tmp_path / "out")
    assert tasks.environment == "textworld"
    (first,), (second,) = tasks.splits["policy"], tasks.splits["test"]
    assert first != second
    environment = make_environment(tasks)
    assert isinstance(environment, TextWorldEnvironment)
    observation = environment.reset(second, 0)
    assert observation.admissible
    assert environment.teacher() in observation.admissible
    environment.close()
