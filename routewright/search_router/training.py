"""What both trainings of the policy share: optimiser groups, history, progress, checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from routewright.search_router.examples import Example
from routewright.search_router.features import Features, Featurizer

HISTORY = "history.jsonl"
KINDS = {"word_rows": "word", "keyword_rows": "word", "match_weight": "scale", "collection_weight": "scale"}


def parameter_groups(
    model: torch.nn.Module, lr: float, head_lr: float, word_lr: float, scale_lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups with their learning rates: the language model's trained layers, heads, words, evidence scales."""
    groups: dict[str, list[torch.nn.Parameter]] = {"top": [], "head": [], "word": [], "scale": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "top" if name.startswith("top.") else KINDS.get(name, "head")
            groups[kind].append(parameter)
    return [
        {"params": groups["top"], "lr": lr, "weight_decay": weight_decay},
        {"params": groups["head"], "lr": head_lr, "weight_decay": weight_decay},
        {"params": groups["word"], "lr": word_lr, "weight_decay": 0.0},
        {"params": groups["scale"], "lr": scale_lr, "weight_decay": 0.0},
    ]


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


def featurize(featurizer: Featurizer, examples: Sequence[Example]) -> list[Features]:
    """Features of all examples, in order."""
    return [featurizer(example.query, example.reference) for example in examples]
