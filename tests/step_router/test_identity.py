"""A stage's folder belongs to one profile, seed and content of its inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_policy import tiny_profile

from routewright.errors import BadInput
from routewright.step_router.dataset import fetch_tasks
from routewright.step_router.identity import IDENTITY, check_stage, folder_digest


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "examples"
    (folder / "deep").mkdir(parents=True)
    (folder / "states.jsonl").write_text("{}\n")
    (folder / "deep" / "weights").write_bytes(b"1")
    return folder


def test_a_finished_folder_is_reused_by_its_own_run_only(tmp_path: Path, inputs: Path) -> None:
    out, profile = tmp_path / "out", tiny_profile()
    assert not check_stage(out, "done", profile, 0, examples=inputs)
    assert not check_stage(out, "done", profile, 0, examples=inputs), "a killed one goes on"
    (out / "done").touch()
    assert check_stage(out, "done", profile, 0, examples=inputs)
    assert check_stage(out, "done", tiny_profile(workers=7), 0, examples=inputs), "as a run that lacked memory is told"
    with pytest.raises(BadInput, match=r"out: was made with another seed: expected another folder, or this one emptied$"):
        check_stage(out, "done", profile, 1, examples=inputs)
    with pytest.raises(BadInput, match="was made with another profile, seed:"):
        check_stage(out, "done", tiny_profile(router={"alpha": 0.5}), 1, examples=inputs)
    (inputs / "states.jsonl").write_text("{} \n")
    with pytest.raises(BadInput, match="was made with another examples:"):
        check_stage(out, "done", profile, 0, examples=inputs)
    with pytest.raises(BadInput, match="was made with another bc, examples:"):
        check_stage(out, "done", profile, 0, bc=inputs)


def test_a_finished_folder_that_does_not_say_what_it_is_made_of_is_refused(tmp_path: Path, inputs: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "done").touch()
    with pytest.raises(BadInput, match=f"out: holds a finished done but no {IDENTITY}") as told:
        check_stage(out, "done", tiny_profile(), 0, examples=inputs)
    assert "\n" not in str(told.value)
    assert [file.name for file in out.iterdir()] == ["done"]
    (out / IDENTITY).write_text("{")
    with pytest.raises(BadInput, match=f"{IDENTITY}: expected what the folder was made of"):
        check_stage(out, "done", tiny_profile(), 0, examples=inputs)


def test_the_teacher_counts_where_one_is_asked(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, taught, learnt = tmp_path / "plain", tmp_path / "taught", tmp_path / "learnt"
    check_stage(plain, "done", tiny_profile(), 0, dataset=inputs)
    assert "teacher" not in json.loads((plain / IDENTITY).read_text())
    monkeypatch.setenv("ROUTEWRIGHT_LLM_BASE_URL", "http://localhost:1/v1")
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "big")
    check_stage(taught, "done", tiny_profile(), 0, dataset=inputs)
    check_stage(learnt, "done", tiny_profile(), 0, examples=inputs)
    with pytest.raises(BadInput, match="plain: was made with another teacher:"):
        check_stage(plain, "done", tiny_profile(), 0, dataset=inputs)
    assert json.loads((taught / IDENTITY).read_text())["teacher"] == "big at http://localhost:1/v1"
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "bigger")
    with pytest.raises(BadInput, match="taught: was made with another teacher:"):
        check_stage(taught, "done", tiny_profile(), 0, dataset=inputs)
    check_stage(learnt, "done", tiny_profile(), 0, examples=inputs)


def test_a_source_counts_with_all_that_it_holds(inputs: Path) -> None:
    """A task may be called what a stage calls its folder for resuming."""
    before = folder_digest(inputs, ())
    (inputs / "checkpoints").mkdir()
    (inputs / "checkpoints" / "task.toml").write_text("")
    assert folder_digest(inputs, ()) != before


def test_a_digest_follows_names_and_contents_but_not_what_is_for_resuming(inputs: Path) -> None:
    before = folder_digest(inputs)
    for name in ("checkpoints", "proposals", "deep/__pycache__"):
        (inputs / name).mkdir()
        (inputs / name / "file").write_text("x")
    assert folder_digest(inputs) == before
    (inputs / "deep" / "weights").write_bytes(b"2")
    changed = folder_digest(inputs)
    (inputs / "deep" / "weights").rename(inputs / "deep" / "weight")
    assert len({before, changed, folder_digest(inputs)}) == 3


def test_a_folder_of_tasks_is_not_filled_with_those_of_another_source_or_profile(tmp_path: Path) -> None:
    problem = {"id": "p", "prompt": "Add.", "answer": "def f(x): return x", "tests": "assert f(1) == 1"}
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps(problem | {"id": f"p{i}"}) + "\n" for i in range(6)))
    out, profile = tmp_path / "data", tiny_profile()
    fetch_tasks("shell", out, profile)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    fetch_tasks("shell", out, tiny_profile(evaluation={"seeds": 1}))
    for other, sections in ((str(source), {}), ("shell", {"tasks": {"policy": 3}})):
        with pytest.raises(BadInput, match=r"data: was made with another (environment|tasks): expected another folder"):
            fetch_tasks(other, out, tiny_profile(**sections))
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
