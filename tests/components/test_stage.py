"""Stages resume by the content of what they depend on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components import stage as stage_module
from components.stage import digest_of, pool_digest, stage, stage_key
from routewright.errors import BadInput


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
            (current.folder / "checkpoint-7").mkdir(exist_ok=True)
            if fail:
                raise RuntimeError("killed")
        return found

    with pytest.raises(RuntimeError):
        attempt(fail=True)
    assert not (work / "out").exists()
    assert attempt(fail=False) == ["checkpoint-7"]
    assert list((work / "out").iterdir()) == [], "checkpoints are not part of the artifact"


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
