"""Stages resume by the content of what they depend on."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from components import stage as stage_module
from components.stage import content_of, digest_of, environment_digest, pool_digest, profile_of, stage, stage_key
from routewright.errors import BadInput
from routewright.step_router.profile import PROFILES


def artifact(path: Path, **metadata: Any) -> SimpleNamespace:
    return SimpleNamespace(path=str(path), metadata=metadata)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROUTEWRIGHT_WORK", str(tmp_path / "work"))
    monkeypatch.delenv("ROUTEWRIGHT_EVENTS", raising=False)
    return tmp_path


def run(folder: Path, number: int, inputs: dict[str, Any], seed: int = 0) -> tuple[bool, Any]:
    output, log = artifact(folder / f"out{number}"), artifact(folder / f"log{number}")
    with stage("toy", inputs, {"seed": seed}, output, log) as current:
        if not current.done:
            print("working")
            (current.folder / "result").write_text(str(seed))
    return current.done, output


def test_a_finished_stage_is_reused_until_input_or_setting_or_code_changes(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = work / "given"
    given.mkdir()
    (given / "data").write_text("1")
    inputs = {"given": artifact(given)}

    done, first = run(work, 1, inputs)
    assert not done
    done, again = run(work, 2, inputs)
    assert done
    assert again.metadata["digest"] == first.metadata["digest"] == digest_of(Path(first.path))
    assert (Path(again.path) / "result").read_text() == "0"
    assert Path(work / "log2").read_text() == "working\n", "a reused stage shows the log of the run that worked"

    assert not run(work, 3, inputs, seed=1)[0]
    (given / "data").write_text("2")
    assert not run(work, 4, inputs)[0]
    monkeypatch.setattr(stage_module, "digest_of_code", lambda: "other code")
    assert not run(work, 5, inputs)[0]


def test_a_failed_stage_keeps_its_folder_and_is_not_finished(work: Path) -> None:
    def attempt(fail: bool) -> list[str]:
        output, log = artifact(work / "out"), artifact(work / "log")
        with stage("toy", {}, {}, output, log) as current:
            assert not current.done
            found = [file.name for file in current.folder.iterdir()]
            (current.folder / "checkpoints" / "checkpoint-7").mkdir(parents=True, exist_ok=True)
            (current.folder / "checkpoints" / "checkpoint-7" / "weights").touch()
            if fail:
                raise RuntimeError("killed")
        return found

    with pytest.raises(RuntimeError):
        attempt(fail=True)
    assert not (work / "out").exists()
    assert attempt(fail=False) == ["checkpoints"]
    assert list((work / "out").iterdir()) == [], "checkpoints are not part of the artifact"


def test_what_a_dataset_calls_a_checkpoint_is_handed_on(work: Path) -> None:
    """Only what stages themselves keep for resuming stays behind."""
    names = ("tasks/checkpoint-restore/task.toml", "tasks/checkpoints/tests/checkpoint.json", "checkpoint.jsonl")
    own = (
        "checkpoints/rows/0000.jsonl",
        "judge/checkpoints/x",
        "policy/checkpoints/x",
        "rules/no-rl/checkpoint.safetensors",
    )
    output, log = artifact(work / "out"), artifact(work / "log")
    with stage("toy", {}, {}, output, log) as current:
        for name in (*names, *own):
            (current.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (current.folder / name).write_text("1")
    out = work / "out"
    assert {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()} == set(names)
    before = output.metadata["digest"]
    assert before == stage_module.digest_of_artifact(artifact(current.folder)), "nor do they count"
    for name in names:
        fresh = current.folder / name
        fresh.write_text("2")
        assert stage_module.digest_of_artifact(artifact(current.folder)) != before
        before = stage_module.digest_of_artifact(artifact(current.folder))


@pytest.mark.parametrize("name", ["checkpoint-restore", "checkpoints"])
def test_a_task_called_checkpoint_counts(tmp_path: Path, name: str) -> None:
    task = tmp_path / name
    task.mkdir()
    (task / "instruction.md").write_text("Sort the file.")
    before = environment_digest(str(tmp_path))
    (task / "instruction.md").write_text("Sort the files.")
    assert environment_digest(str(tmp_path)) != before


@pytest.mark.parametrize(
    ("router", "name", "asks"),
    [("step-router", "synthesize", True), ("step-router", "calibrate", True), ("step-router", "evaluate", True),
     ("step-router", "distill-bc", False), ("step-router", "fetch-dataset", False), ("search-router", "synthesize", True),
     ("search-router", "rl", True), ("search-router", "evaluate", True), ("search-router", "sft", False),
     ("ensemble-router", "evaluate", False)],
)  # fmt: skip
def test_the_language_model_counts_in_stages_that_ask_it(
    work: Path, monkeypatch: pytest.MonkeyPatch, router: str, name: str, asks: bool
) -> None:
    def key() -> str:
        output, log = artifact(work / "out"), artifact(work / f"log{len(list(work.iterdir()))}")
        with stage(name, {}, {"seed": 0}, output, log, router) as current:
            pass
        return current.key

    for variable in ("BASE_URL", "MODEL"):
        monkeypatch.delenv(f"ROUTEWRIGHT_LLM_{variable}", raising=False)
    without = key()
    assert without == stage_key(name, {}, {"seed": 0}), "no other key than before"
    monkeypatch.setenv("ROUTEWRIGHT_LLM_BASE_URL", "http://localhost:1/v1")
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "big")
    big = key()
    monkeypatch.setenv("ROUTEWRIGHT_LLM_BASE_URL", "http://localhost:2/v1")
    elsewhere = key()
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "bigger")
    assert len({without, big, elsewhere, key()}) == (4 if asks else 1)


def test_the_digest_in_the_metadata_saves_reading_the_files(tmp_path: Path) -> None:
    absent = artifact(tmp_path / "nowhere", digest="abc")
    assert stage_key("toy", {"a": absent}, {}) != stage_key("toy", {"a": artifact(tmp_path, digest="abd")}, {})


def test_a_pool_counts_with_the_content_of_its_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"_id": "1", "title": name, "text": "text"}) + "\n")
    agents = "".join(f"  - {{name: {n}, card: about {n}, search: {{kind: bm25, corpus: {n}.jsonl}}}}\n" for n in "ab")
    pool = tmp_path / "pool.yaml"
    pool.write_text(f"name: p\nfallback: a\nagents:\n{agents}")
    before = pool_digest(str(pool))
    assert pool_digest(str(pool)) == before
    (tmp_path / "b.jsonl").write_text(json.dumps({"_id": "1", "title": "b", "text": "new"}) + "\n")
    assert pool_digest(str(pool)) != before


def test_a_query_log_that_is_not_there_is_bad_input(work: Path) -> None:
    output, log = artifact(work / "out"), artifact(work / "log")
    with pytest.raises(BadInput, match=r"query log nowhere\.jsonl"), stage(
        "toy", {}, {"query_log": "nowhere.jsonl"}, output, log
    ):
        pass


def test_a_query_log_counts_with_what_it_was_rotated_to(tmp_path: Path) -> None:
    log = tmp_path / "d.jsonl"
    log.write_text("new")
    alone = stage_module.content_of("query_log", str(log), "search-router")
    (tmp_path / "d.jsonl.000001").write_text("old")
    both = stage_module.content_of("query_log", str(log), "search-router")
    assert both != alone
    assert stage_module.content_of("query_log", str(tmp_path), "search-router") == both, "a folder of several servers' logs"
    (tmp_path / "d.jsonl.000001").write_text("other")
    assert stage_module.content_of("query_log", str(log), "search-router") != both


def test_an_environment_counts_with_its_package_or_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "version", lambda package: {"textworld": "1.7.0"}[package])
    assert environment_digest("textworld") == "textworld 1.7.0"
    problems = tmp_path / "problems.jsonl"
    problems.write_text("{}\n")
    before = environment_digest(str(problems))
    assert before == content_of("environment", str(problems), "step-router") == environment_digest(str(problems))
    problems.write_text("{}\n{}\n")
    assert environment_digest(str(problems)) != before
    task = tmp_path / "tasks" / "one"
    task.mkdir(parents=True)
    (task / "instruction.md").write_text("Sort the file.")
    before = environment_digest(str(tmp_path / "tasks"))
    (task / "instruction.md").write_text("Sort the files.")
    assert environment_digest(str(tmp_path / "tasks")) != before


def test_the_own_shell_tasks_count_with_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task.toml").write_text("")
    monkeypatch.setattr("routewright.step_router.environments.shell_env.OWN_TASKS", tmp_path)
    before = environment_digest("shell")
    (tmp_path / "task.toml").write_text("version = 1")
    assert environment_digest("shell") != before


def test_an_environment_that_is_not_there_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"environment 'chess': expected textworld, shell, a \.jsonl"):
        environment_digest("chess")

    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(stage_module, "version", missing)
    with pytest.raises(BadInput, match=r"install it with pip install 'routewright\[textworld\]'"):
        environment_digest("textworld")


def test_a_profile_counts_with_its_content_among_its_router_s_profiles(tmp_path: Path) -> None:
    assert type(profile_of("search-router", "smoke")).__name__ == "Profile"
    step = content_of("profile", "smoke", "step-router")
    assert "dpo" in step
    content = yaml.safe_load((PROFILES / "smoke.yaml").read_text())
    mine = tmp_path / "smoke.yaml"
    mine.write_text(yaml.safe_dump(content))
    assert content_of("profile", str(mine), "step-router") == step, "by content, wherever the file lies"
    content["bc"]["lr"] = 0.5
    mine.write_text(yaml.safe_dump(content))
    assert content_of("profile", str(mine), "step-router") != step
    with pytest.raises(BadInput, match="router 'chess-router': expected one of search-router, step-router"):
        profile_of("chess-router", "smoke")
