"""Teacher episodes under perturbation: the states that behaviour cloning, the verifier and DPO learn from."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from routewright.errors import BadInput
from routewright.language_models.chat import named_model
from routewright.step_router.dataset import Tasks, read_tasks
from routewright.step_router.environments.protocol import Observation
from routewright.step_router.environments.textworld_env import PASSIVE
from routewright.step_router.identity import RESUMING, check_stage
from routewright.step_router.perturbations import Perturbed, perturbation_seeds, without
from routewright.step_router.profile import StepRouterProfile, SynthesisSection
from routewright.step_router.situations import Situation
from routewright.step_router.taught import SPENT, taught_environment

STATES = "states.jsonl"


@dataclass(frozen=True)
class State:
    """One state of a teacher episode: two perturbed views of it, and what the teacher does there."""

    task: str
    seed: int
    situation: Situation
    other: Situation  # the same state under another perturbation seed
    teacher: str

    def to_json(self) -> str:
        """One line of states.jsonl."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> State:
        """The inverse; KeyError or TypeError for anything else."""
        row: dict[str, Any] = json.loads(line)
        row |= {name: _situation(row[name]) for name in ("situation", "other")}
        return State(**row)


def _situation(row: dict[str, Any]) -> Situation:
    shown = row["observation"]
    if shown["admissible"] is not None:
        shown["admissible"] = tuple(shown["admissible"])
    return Situation(Observation(**shown), tuple(row["actions"]))


def read_states(examples: Path) -> list[State]:
    """The states of a folder; BadInput names the line that is damaged."""
    file = examples / STATES
    if not file.is_file():
        raise BadInput(f"{file}: no such file, expected the states that the synthesize stage writes")
    states = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            states.append(State.from_json(line))
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{file}, line {number}: expected a state as JSON, the line is damaged") from None
    return states


def teacher_episode(
    tasks: Tasks, environment: Perturbed, task: str, seed: int, other_seed: int, random_moves: float
) -> list[State]:
    """One episode in which a share of the teacher's moves is replaced by random admissible ones; labels stay the teacher's.

    The episode is seen under perturbation ``seed``; every state is also shown as under ``other_seed``. A state in which
    neither the teacher's move nor one that looks again is shown is left out: it has no right answer.
    """
    rng = random.Random(f"teacher/{task}/{seed}")
    share = rng.uniform(0.0, random_moves)
    observation = environment.reset(task, seed)
    states: list[State] = []
    actions: list[str] = []
    while True:
        teacher = environment.teacher()
        shown = Situation(observation, tuple(actions))
        other = replace(shown, observation=environment.shown_under(other_seed))
        label = shown_move(teacher, observation.admissible)
        if label is not None:
            states.append(State(task, seed, shown, other, label))
        wander = observation.admissible and rng.random() < share
        action = rng.choice(observation.admissible) if wander and observation.admissible else teacher
        outcome = environment.step(action)
        actions.append(action)
        observation = outcome.observation
        if outcome.done:
            return states


def shown_move(teacher: str, admissible: Sequence[str] | None) -> str | None:
    """The teacher's move if it is shown, else one that changes nothing and shows the state again; None without either.

    A small model can only take what is shown: cloning a hidden move would teach it nothing for the states it is in.
    """
    if admissible is None or teacher in admissible:
        return teacher
    return next((action for action in PASSIVE if action in admissible), None)


def synthesize(dataset: Path, out: Path, profile: StepRouterProfile, seed: int) -> None:
    """Play teacher episodes on the policy split; writes states.jsonl and stats.json.

    BadInput where `out` is of another profile, seed or dataset.
    """
    if check_stage(out, "stats.json", profile, seed, dataset=dataset):
        return
    tasks = read_tasks(dataset)
    names = tasks.splits["policy"]
    with Progress() as progress, ProcessPoolExecutor(profile.workers) as pool:
        bar = progress.add_task("teacher episodes", total=len(names))
        states: list[State] = []
        for some in pool.map(partial(_task_states, tasks, profile.synthesis, seed, out / RESUMING / SPENT), names):
            states += some
            progress.advance(bar)
    lines = "".join(f"{state.to_json()}\n" for state in states)
    partial_file = out / f"{STATES}.partial"
    partial_file.write_text(lines, encoding="utf-8")
    os.replace(partial_file, out / STATES)
    stats = {
        "states": len(states),
        "tasks": len(names),
        "episodes": len(names) * profile.synthesis.episodes_per_task,
        "teacher": named_model() or "expert",
    }
    (out / "stats.json").write_text(json.dumps(stats, indent=1))


def _task_states(tasks: Tasks, settings: SynthesisSection, seed: int, spent: Path, task: str) -> list[State]:
    seeds = perturbation_seeds("policy", settings.seeds)
    rng = random.Random(f"synthesis/{seed}/{task}")
    environment = taught_environment(tasks, without(settings.unseen), spent)
    try:
        states = []
        for _ in range(settings.episodes_per_task):
            first, other = rng.sample(seeds, 2) if len(seeds) > 1 else (seeds[0], seeds[0])
            states += teacher_episode(tasks, environment, task, first, other, settings.random_moves)
        return states
    finally:
        environment.close()


def unique(states: Iterable[State]) -> Sequence[State]:
    """States that differ in what is shown or wanted, in their order."""
    return list({(state.situation, state.teacher): state for state in states}.values())
