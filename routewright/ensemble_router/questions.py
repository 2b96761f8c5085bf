"""The questions of an evaluation, answered once by every set of agents that a routing rule may ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from routewright.ensemble_router.agents import Base
from routewright.ensemble_router.coevolve import states_of
from routewright.ensemble_router.coevolve_rules import (
    BASE,
    GENERALIST,
    RULES_FOLDER,
    SERVED,
    WARM,
    load_agents,
    weights_digest,
)
from routewright.ensemble_router.dataset import OUT_OF_DISTRIBUTION, load_split
from routewright.ensemble_router.familiarity import last_layer, state_layers
from routewright.ensemble_router.held_out import Decide, Held, Outcome, held_answers, outcome
from routewright.ensemble_router.learned_rules import WINDOW
from routewright.ensemble_router.profile import EnsembleProfile
from routewright.ensemble_router.prompts import encode_prompt
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.training_rules import state_width

FIT = "fit"
"""Training questions that the co-evolved agents all answer, for rules to be fitted on as many answers as the router had."""


class Questions:
    """The questions of a split, the backbone's states of them, and every set of agents' answers as they are asked for."""

    def __init__(self, name: str, tasks: list[Task], states: np.ndarray, last: np.ndarray) -> None:
        self.name, self.tasks, self.states, self.last = name, tasks, states, last
        self.domains = [task.domain for task in tasks]
        self.held: dict[str, Held] = {}

    def read_by(self, agents: str) -> np.ndarray:
        """The states that a rule of this name routes by."""
        return self.last if agents == "last-layer" else self.states

    def outcome(self, agents: str, decide: Decide) -> Outcome:
        """A rule on the answers of a set of agents ("warm" or a rule's name)."""
        return outcome(self.tasks, self.held[agents], self.read_by(agents), decide)


def answered_splits(
    dataset: Path, trained: Path, out: Path, rules: Sequence[str], profile: EnsembleProfile, seed: int
) -> dict[str, Questions]:
    """dev, test and, where there is one, the out-of-distribution set, answered by base, warm and every rule's agents.

    The training questions that rules are fitted on are answered by the co-evolved agents alone. Answers are kept with the
    digest of the weights that gave them, and given anew by other weights.
    """
    tasks = {name: load_split(dataset, name) for name in ("dev", "test")}
    train = load_split(dataset, "train")
    size = min(WINDOW, profile.coevolve.budget // profile.agents.count)  # no rule keeps more
    tasks[FIT] = [train[place] for place in np.random.default_rng(seed).permutation(len(train))[:size]]
    if (dataset / f"{OUT_OF_DISTRIBUTION}.jsonl").is_file():
        tasks[OUT_OF_DISTRIBUTION] = load_split(dataset, OUT_OF_DISTRIBUTION)
    splits: dict[str, Questions] = {}
    starts = [start for start in (WARM, GENERALIST) if (trained / start).is_dir()]
    for agents in (*starts, *rules):
        folder = trained / agents if agents in starts else trained / RULES_FOLDER / agents / "adapters"
        bases = load_agents(profile, [], trained, folder, seed)
        _forget_other_weights(out / "answers", agents, weights_digest(trained, [folder]))
        if agents == GENERALIST:
            bases = [Base(bases[0].model, bases[0].tokenizer, bases[0].names[:1])]
        for name, questions in tasks.items():
            if name == FIT and agents != SERVED:
                continue
            if name not in splits:
                prompts = [encode_prompt(bases[0].tokenizer, task.prompt) for task in questions]
                states = states_of(bases[0], prompts, lambda layers: (*state_layers(layers), *last_layer(layers)))
                width = state_width(SERVED, bases[0])
                parts = [np.ascontiguousarray(part) for part in (states[:, :width], states[:, width:])]
                splits[name] = Questions(name, questions, *parts)
            file = out / "answers" / f"{agents}-{name}.jsonl"
            title = f"{agents} agents, {name} questions"
            splits[name].held[agents] = held_answers(file, bases, questions, profile.agents, title)
            if agents == WARM:
                alone = [Base(bases[0].model, bases[0].tokenizer, bases[0].names[:1])]
                file = out / "answers" / f"{BASE}-{name}.jsonl"
                with bases[0].model.disable_adapter():
                    held = held_answers(file, alone, questions, profile.agents, f"base model, {name} questions")
                splits[name].held[BASE] = held
    return splits


def _forget_other_weights(answers: Path, agents: str, digest: str) -> None:
    """Remove what agents of this name answered with other weights."""
    file = answers / f"{agents}.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if kept.get("weights_sha256") == digest:
        return
    for old in [*answers.glob(f"{agents}-*.jsonl"), *(answers.glob(f"{BASE}-*.jsonl") if agents == WARM else ())]:
        old.unlink()
    answers.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"weights_sha256": digest}), encoding="utf-8")
