"""The ensemble router on the command line: options that are another router's, and what a run ends with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from routewright import cli
from routewright.ensemble_router.profile import PROFILES

pytest.importorskip("reasoning_gym", reason="needs pip install 'routewright[ensemble]'")

RUN = ["run", "ensemble-router", "--profile", "smoke", "--out", "out"]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``routewright ARGUMENTS``, run in this process."""
    monkeypatch.setattr(sys, "argv", ["routewright", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*RUN, "--pool", "aws-docs"], "--pool aws-docs: only search-router has a pool, ensemble-router takes its tasks"),
        ([*RUN, "--environment", "shell"], "--environment shell: only step-router has an environment"),
        ([*RUN, "--query-log", "log.jsonl"], "--query-log log.jsonl: only search-router learns from a query log"),
        (["run", "ensemble-router", "--profile", "huge", "--out", "out"], "profile 'huge' does not exist: expected one of"),
        (["run", "ensemble-router", "--profile", "mine.yaml", "--out", "out"], "nowhere.jsonl: no such file"),
        (["serve", "ensemble-router", "--model", "nowhere"], "ensemble router nowhere: no such folder"),
        (["serve", "ensemble-router", "--model", "nowhere", "--epsilon-cap", "2"], "--epsilon-cap"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load((PROFILES / "smoke.yaml").read_text(encoding="utf-8"))
    content["tasks"]["files"] = [{"path": "nowhere.jsonl"}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_run_shows_its_rows_and_how_to_serve_its_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = {}

    def run_local(pipeline, name, arguments, out, console):  # type: ignore[no-untyped-def]
        ran.update(name=name, arguments=arguments)
        return {}

    estimate = {"mean": 0.625, "low": 0.5, "high": 0.75, "n": 8}
    rows = [{"name": name, "metrics": {"accuracy": estimate, "tokens": estimate}} for name in ("top-1", "familiarity")]
    summary = {"pipeline": "ensemble-router", "profile": "smoke", "seed": 3, "wall_s": 1.0, "rows": rows}
    monkeypatch.setattr("pipelines.run_local.run_local", run_local)
    monkeypatch.setattr("pipelines.run_local.publish_results", lambda folders, out: summary)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert call(monkeypatch, *RUN, "--seed", "3") == 0
    assert ran == {"name": "ensemble-router", "arguments": {"profile": "smoke", "seed": 3}}
    shown = capsys.readouterr().out
    for part in ("0.625", "familiarity", "out/report.html", "routewright serve ensemble-router --model out/model"):
        assert part in shown


def test_help_names_what_can_be_done_to_an_ensemble(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert call(monkeypatch, "--help") == 0
    assert " ensemble " in capsys.readouterr().out
    assert call(monkeypatch, "ensemble", "--help") == 0
    assert "add-agent" in capsys.readouterr().out
