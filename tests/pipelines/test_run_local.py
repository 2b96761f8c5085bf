"""The local runner on a toy pipeline: failure sentences, resume, results, what a person sees."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.run_local import locked, publish_results, run_local
from routewright.errors import BadInput, StageFailed


@pytest.fixture
def wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that tells the second stage what to do, in a folder where all else of the test lies too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs/mlflow.db")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    # The stages of the toy are not tracked: the parent run alone costs its share of a second.
    file = tmp_path / "wish"
    file.write_text("work")
    return file


def run_toy(wish: Path) -> tuple[dict[str, Path], str]:
    from toy import toy

    seen = io.StringIO()
    folder = wish.parent
    arguments = {"count": str(folder / "count"), "wish": str(wish)}
    folders = run_local(toy, "toy", {**arguments}, folder / "out", Console(file=seen, width=100))
    return folders, seen.getvalue()


def test_each_failure_names_its_stage_and_a_repeated_run_continues(wish: Path) -> None:
    out = wish.parent / "out"
    ours = {name: value for name, value in os.environ.items() if name.startswith("ROUTEWRIGHT_")}

    wish.write_text("bad input")
    with pytest.raises(BadInput, match=r"^corpus.jsonl, line 7: field text: expected a string$"):
        run_toy(wish)
    wish.write_text("bug")
    with pytest.raises(StageFailed, match=r"^stage evaluate failed: ZeroDivisionError: .* \(details in .*run\.log"):
        run_toy(wish)
    assert "ZeroDivisionError" in (out / "run.log").read_text()
    wish.write_text("killed")
    with pytest.raises(StageFailed, match=r"^stage evaluate failed: its process ended without a message"):
        run_toy(wish)
    wish.write_text("work")
    folders, seen = run_toy(wish)

    assert (wish.parent / "count").read_text() == "x", "the first stage finished once and is not repeated"
    summary = publish_results(folders, out)
    assert summary["found"] == "half way", "the killed stage goes on where it was"
    assert (out / "report.html").read_text() == "made"
    assert (out / summary["artifacts"]["first"] / "made.txt").exists()
    assert summary["wall_s"] >= 0
    assert "second continues half way" in seen
    assert "finished earlier" in seen
    assert "KFP Executor" not in seen
    assert "Executing task" in (out / "run.log").read_text(), "the log keeps what KFP prints"
    assert {name: value for name, value in os.environ.items() if name.startswith("ROUTEWRIGHT_")} == ours

    artifact = next((out / "kfp").rglob("first/made"))
    assert [file.name for file in artifact.iterdir()] == ["made.txt"], "checkpoints stay out of artifacts"
    assert "first works" in next((out / "kfp").rglob("first/log")).read_text()


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(BadInput, match="another run is working there"), locked(tmp_path):
        pass


@pytest.mark.parametrize("name", ["kfp", "model", "report.html", "run.log", "summary.json"])
def test_files_that_are_not_from_a_run_are_neither_deleted_nor_written_over(wish: Path, name: str) -> None:
    own = wish.parent / "out" / name
    (own / "mine.py").mkdir(parents=True)
    with pytest.raises(BadInput, match=rf"^--out \S+out: {name} is there and not from a run; choose another folder"):
        run_toy(wish)
    assert [path.relative_to(own.parent).as_posix() for path in own.parent.rglob("*")] == [name, f"{name}/mine.py"]


def test_a_start_that_is_refused_keeps_the_results_of_the_run_before_and_a_failure_does_not(
    wish: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = wish.parent / "out"
    publish_results(run_toy(wish)[0], out)
    (out / "kfp" / "mine.py").write_text("")
    with monkeypatch.context() as mistyped:
        mistyped.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
        with pytest.raises(BadInput, match="MLflow keeps no runs at nonsense://"):
            run_toy(wish)
    assert (out / "report.html").read_text() == "made"
    assert (out / "summary.json").exists()
    (first,) = (out / "kfp").glob("toy-*")

    publish_results(run_toy(wish)[0], out)
    (second,) = (out / "kfp").glob("toy-*")
    assert first != second, "the artifacts of the last run alone are kept"
    assert (out / "kfp" / "mine.py").exists()

    wish.write_text("bug")
    shutil.rmtree(out / "stages")
    with pytest.raises(StageFailed):
        run_toy(wish)
    assert not (out / "report.html").exists()
    assert not (out / "summary.json").exists()


def test_a_start_that_is_refused_in_an_empty_folder_does_not_make_it_a_runs(
    wish: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = wish.parent / "out"
    with monkeypatch.context() as mistyped:
        mistyped.setenv("MLFLOW_TRACKING_URI", "nonsense://x")
        with pytest.raises(BadInput):
            run_toy(wish)
    (out / "summary.json").write_text("mine")
    with pytest.raises(BadInput, match=r"summary\.json is there and not from a run"):
        run_toy(wish)
    assert (out / "summary.json").read_text() == "mine"


def test_an_output_folder_that_is_a_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write there"), locked(tmp_path / "file"):
        pass


@pytest.mark.parametrize("stage", ["rl", "calibrate"])
def test_the_trained_router_is_linked_as_model(tmp_path: Path, stage: str) -> None:
    folders = {name: tmp_path / "stages" / f"{name}-0" for name in ("synthesize", stage, "evaluate")}
    for seconds, folder in enumerate(folders.values()):
        folder.mkdir(parents=True)
        folder.with_name(folder.name + ".json").write_text(json.dumps({"seconds": seconds}))
    (folders[stage] / "weights").write_text("0")
    (folders["evaluate"] / "report.html").write_text("report")
    (folders["evaluate"] / "summary.json").write_text(json.dumps({"wall_s": 0, "artifacts": {}}))
    for _ in range(2):
        summary = publish_results(folders, tmp_path)
    assert (tmp_path / "model" / "weights").read_text() == "0"
    assert summary["artifacts"] == {
        **{name: f"stages/{name}-0" for name in folders}, "report": "report.html", "model": "model"
    }  # fmt: skip
    assert summary["wall_s"] == 3
