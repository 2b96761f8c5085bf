"""What all trainings share: the history of metrics, a progress bar, the newest checkpoint."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging as transformers_logging

HISTORY = "history.jsonl"

# A person watching a run wants the run's own progress, not a bar for every map over a dataset.
datasets.disable_progress_bars()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' warnings, where what they warn of is meant."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


class History(TrainerCallback):
    """Appends each step's metrics to history.jsonl and moves a progress bar."""

    def __init__(self, folder: Path, title: str, shown: str) -> None:
        self.file, self.title, self.shown = folder / HISTORY, title, shown
        self.progress: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kept = []
        if self.file.is_file():  # a resumed run drops what was logged after its checkpoint
            kept = [
                line for line in self.file.read_text().splitlines() if json.loads(line)["step"] <= state.global_step
            ]
        self.file.write_text("".join(f"{line}\n" for line in kept))
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
        )
        self.progress.start()
        self.task = self.progress.add_task(self.title, total=state.max_steps, completed=state.global_step, told="")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        values = {key: value for key, value in (logs or {}).items() if isinstance(value, int | float)}
        if self.shown not in values:
            return
        with self.file.open("a") as file:
            file.write(json.dumps({"step": state.global_step, **values}) + "\n")
        if self.progress:
            self.progress.update(self.task, completed=state.global_step, told=f"{self.shown} {values[self.shown]:.3f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress:
            self.progress.update(self.task, completed=state.global_step)
            self.progress.stop()


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint of an interrupted training; half-written ones are removed."""
    if not folder.is_dir():
        return None
    for checkpoint in folder.glob("checkpoint-*"):
        if not (checkpoint / "trainer_state.json").is_file():  # written last
            shutil.rmtree(checkpoint)
    return get_last_checkpoint(str(folder))
