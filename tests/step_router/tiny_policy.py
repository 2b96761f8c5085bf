"""A small model of a few thousand weights, made-up states that it can learn, and killing its training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from routewright.language_models.training import History
from routewright.step_router.bc import new_policy
from routewright.step_router.environments.protocol import Observation, Outcome
from routewright.step_router.policy import Policy, Reader, load_policy, save_model
from routewright.step_router.profile import StepRouterProfile, load_step_profile
from routewright.step_router.situations import Situation
from routewright.step_router.synthesis import STATES, State

NAMED = 120  # made-up states that a tiny policy got its words from: a captain occurs in less than 2 % of them
ACTIONS = ("press green", "press red", "wait", "look around")


def tiny_profile(**sections: Any) -> StepRouterProfile:
    """The smoke profile with some fields of its sections changed."""
    content = load_step_profile("smoke").model_dump()
    for name, values in sections.items():
        content[name] = content[name] | values if isinstance(values, dict) else values
    return StepRouterProfile.model_validate(content)


def situation(number: int, listed: bool = True, calm: bool = True, done: tuple[str, ...] = ()) -> Situation:
    """A light to answer, for somebody whose name occurs in one task only."""
    text = f"The light is {'calm' if calm else 'alarmed'} on deck {number % 3}."
    shown = ACTIONS[number % 4 :] + ACTIONS[: number % 4]
    observation = Observation(
        f"Answer the light for captain zorb{number}.", text, "a lamp" if number % 2 else "",
        shown if listed else None, len(done), 9,
    )  # fmt: skip
    return Situation(observation, done)


def made_states(count: int, listed: bool = True) -> list[State]:
    """States in which the teacher presses green where all is calm, else red."""
    states = []
    for number in range(count):
        calm = number // 4 % 2 == 0
        view = situation(number, listed, calm, ("look around",) * (number % 4))
        states.append(State(f"task {number}", number, view, view, "press green" if calm else "press red"))
    return states


def write_states(states: list[State], folder: Path) -> Path:
    """The folder of examples that the synthesize stage would have left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATES).write_text("".join(f"{state.to_json()}\n" for state in states), encoding="utf-8")
    return folder


def spread(model: Any, scale: float, seed: int = 0) -> Any:
    """Weights far apart, so that an untrained model prefers some tokens clearly to others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, scale, generator=generator)
    return model.eval()


def tiny_policy(scale: float | None = None, limit: int = 512) -> Policy:
    """An untrained policy in memory; ``scale`` spreads its weights."""
    model, reader = new_policy(load_step_profile("smoke").backbone, made_states(NAMED), limit, 0)
    return Policy(spread(model, scale) if scale else model.eval(), reader)


def save_policy(folder: Path, scale: float | None = None) -> Path:
    """An untrained policy on disk, as behaviour cloning would leave it."""
    policy = tiny_policy(scale)
    save_model(policy.model, policy.reader, folder, {"stage": "bc"})
    return folder


def save_verifier(bc: Path, folder: Path, scale: float = 0.1) -> Path:
    """An untrained verifier on disk, of a policy's folder."""
    reader: Reader = load_policy(bc).reader
    model = AutoModelForSequenceClassification.from_pretrained(bc, num_labels=1, use_safetensors=True)
    model.config.pad_token_id = reader.tokenizer.pad_token_id
    save_model(spread(model, scale, 1), reader, folder, {"stage": "verifier"})
    return folder


class Climb:
    """From 0 to the height in the task's name within 6 steps; the teacher looks at the true height."""

    def reset(self, task: str, seed: int) -> Observation:
        self.goal, self.height, self.steps = int(task.split()[-1]), 0, 0
        return self._observe()

    def step(self, action: str | None) -> Outcome:
        self.steps += 1
        self.height += {"up": 1, "down": -1}.get(action or "", 0)
        won = self.height == self.goal
        return Outcome(self._observe(), won, won or self.steps >= 6)

    def teacher(self) -> str:
        return "up" if self.height < self.goal else "down"

    def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        text = f"You stand at {self.height}."
        return Observation(f"Reach {self.goal}.", text, "a rope", ("up", "down", "wait", "look"), self.steps, 6)


class Killed(Exception):
    """Stands for a kill in the middle of a training."""


def watch_steps(monkeypatch: pytest.MonkeyPatch, kill_at: int | None = None) -> list[int]:
    """The steps that trainings really take from now on, as they take them; the training ends right after ``kill_at``."""
    steps: list[int] = []
    log = History.on_log

    def noting(self: History, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        log(self, args, state, control, logs, **more)
        if self.shown in (logs or {}):
            steps.append(state.global_step)
            if state.global_step == kill_at:
                raise Killed

    monkeypatch.setattr(History, "on_log", noting)
    return steps


def history(folder: Path) -> list[dict[str, float]]:
    """The rows of a training's history.jsonl."""
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
