"""Killing a training in the middle, and comparing what two trainings left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from household import read_lines
from safetensors.torch import load_file

from routewright.language_models.training import History


class Killed(Exception):
    """Stands for a kill in the middle of a training."""


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training stops right after it logged this step."""
    log = History.on_log

    def dying(self: History, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        log(self, args, state, control, logs, **more)
        if state.global_step == step:
            raise Killed

    monkeypatch.setattr(History, "on_log", dying)


def killed_before_thresholds(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's module stops once the router is saved, before its thresholds are fitted."""

    def dying(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(stage, "fit_router", dying)


def logged_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that a training really takes, as it takes them."""
    steps: list[int] = []
    log = History.on_log

    def noting(self: History, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        log(self, args, state, control, logs, **more)
        if self.shown in (logs or {}):
            steps.append(state.global_step)

    monkeypatch.setattr(History, "on_log", noting)
    return steps


def same_result(a: Path, b: Path) -> None:
    """Equal weights, equal history but for its clocks, equal thresholds and first choices."""
    weights, others = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    histories = [
        [{key: value for key, value in row.items() if "time" not in key} for row in read_lines(folder / "history.jsonl")]
        for folder in (a, b)
    ]
    assert [row["step"] for row in histories[0]] == [row["step"] for row in histories[1]]
    for one, other in zip(*histories, strict=True):
        assert one == pytest.approx(other, abs=1e-4, rel=1e-4)
    descriptions = [json.loads((x / "router.json").read_text()) for x in (a, b)]
    assert (a / "routes.json").read_text() == (b / "routes.json").read_text()
    for key in ("second", "abstain"):
        assert descriptions[0][key] == pytest.approx(descriptions[1][key], abs=1e-5)
