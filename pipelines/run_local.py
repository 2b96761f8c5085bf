"""Run a pipeline on this machine through ``kfp.local``, each stage in a process of its own.

Under the output folder: ``stages/`` (where stages work; a repeated run continues there), ``kfp/`` (the artifacts of the
last run as KFP lays them out, hard-linked), ``run.log`` (all that stages and KFP print), and what the pipeline is run
for: ``summary.json`` and ``report.html``.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from kfp import local
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from components.console import EVENT, PlainLines
from components.stage import link_or_copy, write_atomically
from routewright import tracking
from routewright.errors import BadInput, StageFailed

RESULTS = ("summary.json", "report.html")
# What a run writes beside them; two of the first three show that a folder is a run's.
WRITTEN = (".lock", "run.log", "stages", "kfp", "model")
# A pipeline's name and the time it started.
KFP_FOLDER = "*-20??-??-??-??-??-??-??????"
# The stages that train a router, and where in their folder it is.
ROUTER_STAGES = {"rl": "", "calibrate": "", "coevolve": "router"}


def run_local(
    pipeline: Callable[..., Any], name: str, arguments: Mapping[str, Any], out: Path, console: Console
) -> dict[str, Path]:
    """Run the pipeline with its output under ``out`` and return the folder of each stage by name.

    A run that was killed continues where it was when it is repeated with the same ``out``. Raises BadInput with the
    sentence of a stage that met bad input, when another run uses ``out`` or when files there are not a run's;
    StageFailed naming a stage that failed.
    """
    key = tracking.settings_hash({"out": str(out.resolve()), "pipeline": name, **arguments})
    with (
        locked(out),
        tracking.pipeline_run(name, key, arguments) as parent,
        (out / "run.log").open("a", encoding="utf-8") as log,
        stage_environment(out, parent, console),
    ):
        # Only now, as a start that was refused leaves the results of the run before; and none outlives a failure.
        for result in RESULTS:
            (out / result).unlink(missing_ok=True)
        for earlier in (out / "kfp").glob(KFP_FOLDER):
            shutil.rmtree(earlier, ignore_errors=True)
        events = StageEvents(console, log)
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(out / "kfp"), raise_on_error=True)
        try:
            # SubprocessRunner takes an image without "python" in its name for a mistake.
            with warnings.catch_warnings(), contextlib.redirect_stdout(events):
                warnings.simplefilter("ignore", RuntimeWarning)
                pipeline(**arguments)
        except RuntimeError as error:
            # KFP's own message says only that a task failed; the stage has told why.
            events.raise_failure(error)
        finally:
            events.close()
        return events.folders


def publish_results(folders: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Copy what ``evaluate`` wrote to ``out`` and return the summary.

    ``wall_s`` becomes the time of all stages (of the attempts that finished them), ``artifacts`` paths from ``out``.
    """
    judged = folders["evaluate"]
    summary: dict[str, Any] = json.loads((judged / "summary.json").read_text(encoding="utf-8"))
    markers = [folder.with_name(folder.name + ".json") for folder in folders.values()]
    summary["wall_s"] = round(sum(json.loads(marker.read_text())["seconds"] for marker in markers), 1)
    files = {name: judged / path for name, path in summary["artifacts"].items()}
    places = {name: os.path.relpath(path, out) for name, path in {**files, **folders}.items()}
    summary["artifacts"] = {**places, "report": "report.html"}
    for stage in folders.keys() & ROUTER_STAGES.keys():
        link = out / "model.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.normpath(os.path.join(places[stage], ROUTER_STAGES[stage])))
        link.replace(out / "model")
        summary["artifacts"]["model"] = "model"
    fresh = out / "report.html.tmp"
    fresh.unlink(missing_ok=True)
    link_or_copy(str(judged / "report.html"), str(fresh))
    fresh.replace(out / "report.html")
    write_atomically(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make ``out`` and hold it for one run; BadInput, and nothing written, where a run would write over somebody's files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = {file.name for file in out.iterdir()}
        if len(there.intersection(WRITTEN[:3])) < 2:
            # Not for stages alone: a run keeps to folders of its own there, and takes finished ones up.
            for name in sorted(there.intersection((*RESULTS, "run.log", "kfp", "model"))):
                raise BadInput(f"--out {out}: {name} is there and not from a run; choose another folder, or move it away")
        lock = (out / ".lock").open("a")
    except OSError as error:
        raise BadInput(f"--out {out}: cannot write there ({error.strerror})") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"--out {out}: another run is working there; wait for it or choose another folder") from None
        yield


@contextlib.contextmanager
def stage_environment(out: Path, parent: str, console: Console) -> Iterator[None]:
    """Tell the stages, which inherit the environment, where to work, whom they belong to and who listens."""
    before = dict(os.environ)
    # MLFLOW_RUN_ID names the pipeline's run here; a stage would take it for its own.
    os.environ.pop("MLFLOW_RUN_ID", None)
    os.environ |= {
        "ROUTEWRIGHT_WORK": str((out / "stages").resolve()),
        "ROUTEWRIGHT_EVENTS": "tty" if console.is_terminal else "plain",
        tracking.PARENT: parent,
        "MLFLOW_TRACKING_URI": tracking.tracking_uri(),
        "COLUMNS": str(console.width),
        # A checkout that is not installed is found by the stages as well.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))),
    }
    # What a library says of its own future or of each file it writes hides what a stage says.
    for name, value in (("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("PYTHONWARNINGS", "ignore::FutureWarning")):
        os.environ.setdefault(name, value)
    if console.is_terminal:
        os.environ |= {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class StageEvents(io.TextIOBase):
    """Reads what KFP prints: events of the stages are shown to the person, all else goes to the log alone."""

    def __init__(self, console: Console, log: TextIO) -> None:
        self.folders: dict[str, Path] = {}
        self._console, self._log, self._lines, self._rest = console, log, PlainLines(log), ""
        self._stage = self._bad_input = self._failed = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            _, mark, event = line.partition(EVENT)
            if mark:
                self._show(json.loads(event))
            else:
                self._lines.write(line + "\n")
        return len(text)

    def close(self) -> None:
        self._lines.close()

    def raise_failure(self, error: RuntimeError) -> None:
        """BadInput or StageFailed for what the stages told before KFP raised ``error``."""
        if self._bad_input:
            raise BadInput(self._bad_input) from None
        if self._stage:
            why = self._failed or "its process ended without a message, as it does when memory runs out"
        else:
            why = "it could not be started"
        stage = self._stage or Text.from_ansi(str(error)).plain.rpartition("task failed: ")[2].strip("'.")
        raise StageFailed(f"stage {stage} failed: {why} (details in {self._log.name})") from None

    def _show(self, event: dict[str, Any]) -> None:
        match event:
            case {"text": str(text)}:
                self._console.file.write(text)
                self._console.file.flush()
                self._lines.write(text)
            case {"stage": stage, "status": "started"}:
                self._stage = stage
                self._say(f"[bold cyan]▸ {escape(stage)}[/]")
            case {"stage": stage, "status": status, "folder": folder}:
                self.folders[stage] = Path(folder)
                seconds = json.loads(Path(folder + ".json").read_text())["seconds"]
                note = f"{seconds:.0f} s" if status == "finished" else f"finished earlier, in {seconds:.0f} s"
                self._say(f"[bold green]✓ {escape(stage)}[/] [dim]{note}[/]")
                self._stage = ""
            case {"bad_input": sentence}:
                self._bad_input = sentence
            case {"failed": sentence}:
                self._failed = sentence

    def _say(self, markup: str) -> None:
        self._console.print(markup, highlight=False)
        self._lines.write(Text.from_markup(markup).plain + "\n")
