"""What is kept of a stage's console output."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from components.console import EVENT, PlainLines, console_to


def plain(*texts: str) -> str:
    file = io.StringIO()
    lines = PlainLines(file)
    for text in texts:
        lines.write(text)
    lines.close()
    return file.getvalue()


def test_overwritten_lines_leave_their_last_state() -> None:
    assert plain("step 1\rstep 2\rstep 3\ndone\n") == "step 3\ndone\n"


def test_lines_moved_over_by_the_cursor_are_replaced() -> None:
    assert plain("a 1\nb 1", "\r\x1b[2K\x1b[1A\x1b[2Ka 2\nb 2", "\nend\n") == "a 2\nb 2\nend\n"


def test_colours_are_dropped_and_long_output_is_kept_whole() -> None:
    rows = [f"row {number}" for number in range(500)]
    assert plain(*(f"\x1b[1;32m{row}\x1b[0m\n" for row in rows)) == "\n".join(rows) + "\n"


def test_a_rich_progress_bar_leaves_one_line_and_the_messages_above_it() -> None:
    file = io.StringIO()
    with Progress(console=Console(file=file, force_terminal=True, width=80), auto_refresh=False) as progress:
        task = progress.add_task("training", total=50)
        for step in range(50):
            progress.advance(task)
            progress.refresh()
            if step == 20:
                progress.print("checkpoint written")
    kept = plain(file.getvalue()).splitlines()
    assert [line.split()[0] for line in kept] == ["checkpoint", "training"]
    assert "100%" in kept[1]


def test_a_runner_gets_everything_as_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROUTEWRIGHT_EVENTS", "tty")
    with console_to(tmp_path / "log"):
        assert sys.stdout.isatty()
        print("a\rb")
        print("trouble", file=sys.stderr)
    events = [json.loads(line.removeprefix(EVENT)) for line in capfd.readouterr().out.splitlines()]
    assert "".join(event["text"] for event in events) == "a\rb\ntrouble\n"
    assert (tmp_path / "log").read_text() == "b\ntrouble\n"


def test_a_pod_gets_plain_output_and_the_log_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ROUTEWRIGHT_EVENTS", raising=False)
    for word in ("one", "two"):
        with console_to(tmp_path / "log"):
            assert not sys.stdout.isatty()
            print(word)
    assert capsys.readouterr().out == "one\ntwo\n"
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_stage_ends_when_its_runner_is_gone() -> None:
    program = "import time; from components.console import stop_when_orphaned; stop_when_orphaned(); time.sleep(600)"
    environment = {"ROUTEWRIGHT_EVENTS": "plain", "PYTHONPATH": str(Path(__file__).parents[2])}
    orphan = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert orphan.stdout is not None
    orphan.stdout.close()
    try:
        assert orphan.wait(timeout=60) == 1
    finally:
        orphan.kill()
