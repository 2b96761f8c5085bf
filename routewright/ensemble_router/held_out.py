"""What agents answer to held-out questions, generated once and kept, and what a routing rule makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from routewright.ensemble_router.agents import Base, generate
from routewright.ensemble_router.familiarity import FusedHeads, familiarity
from routewright.ensemble_router.learned_rules import LearnedRouter
from routewright.ensemble_router.profile import AgentsSection
from routewright.ensemble_router.prompts import completion_text, encode_prompt
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.verify import check_sandbox, verify
from routewright.ensemble_router.voting import vote

Decide = Callable[[np.ndarray], tuple[list[int], np.ndarray]]
"""A routing rule: a query state (2H,) in; the agents that answer, the preferred first, and the votes' weights (N,) out."""


@dataclass(frozen=True)
class Held:
    """Every agent's answer to every question: ``texts`` [question][agent]; ``rewards`` and ``tokens`` (n, N)."""

    texts: list[list[str]]
    rewards: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class Outcome:
    """What a rule makes of each question, (n,): reward of the ensemble's answer, generated tokens, agents asked.

    ``chosen``: the agents asked, the preferred first.
    """

    reward: np.ndarray
    tokens: np.ndarray
    agents: np.ndarray
    chosen: list[list[int]]


def held_answers(
    file: Path,
    bases: Sequence[Base],
    tasks: Sequence[Task],
    settings: AgentsSection,
    title: str,
) -> Held:
    """Greedy answers (temperature 0) of the agents of ``bases``, kept in ``file`` (JSON lines, a line a question)."""
    if file.is_file():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        if [row["id"] for row in rows] == [task.id for task in tasks]:
            return _held(rows)
    check_sandbox(tasks)
    prompts = [[encode_prompt(base.tokenizer, task.prompt) for task in tasks] for base in bases]
    found: list[dict[str, Any]] = [{"id": task.id, "texts": [], "rewards": [], "tokens": []} for task in tasks]
    work = []
    homes = {name: pair for pair in zip(bases, prompts, strict=True) for name in pair[0].names}
    for name in [name for name in settings.names if name in homes]:
        base, asked = homes[name]
        order = sorted(range(len(tasks)), key=[len(prompt) for prompt in asked].__getitem__)  # little padding in a batch
        work += [(name, base, asked, order[at : at + settings.rows]) for at in range(0, len(order), settings.rows)]
    for name, base, asked, piece in track(work, description=title):
        made = generate(
            base.model, [asked[place] for place in piece], [name] * len(piece), samples=1, temperature=0,
            max_new_tokens=settings.max_new_tokens, pad=base.pad, ends=base.ends, generator=torch.Generator(),
        )  # fmt: skip
        for place, tokens, mask in zip(piece, made.tokens.tolist(), made.mask.tolist(), strict=True):
            text = completion_text(base.tokenizer, tokens, mask)
            found[place]["texts"].append(text)
            found[place]["rewards"].append(verify(tasks[place], text))
            found[place]["tokens"].append(sum(mask))
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found), encoding="utf-8")
    os.replace(partial, file)
    return _held(found)


def _held(rows: Sequence[dict[str, Any]]) -> Held:
    return Held(
        [row["texts"] for row in rows], np.array([r["rewards"] for r in rows]), np.array([r["tokens"] for r in rows])
    )


def by_familiarity(heads: FusedHeads, lam: float, choose: Callable[[np.ndarray], list[int]]) -> Decide:
    """A rule on familiarities: `choose` maps f (N,) to agents; votes weigh f."""

    def decide(state: np.ndarray) -> tuple[list[int], np.ndarray]:
        f = familiarity(heads(torch.from_numpy(state)), lam).numpy()
        return choose(f), f

    return decide


def by_learned(router: LearnedRouter) -> Decide:
    """A learnt rule, which asks one agent."""
    return lambda state: (router.route(state), np.ones(router.agents))


def always(agents: Sequence[int], count: int) -> Decide:
    """The same agents for every question, with equal votes."""
    return lambda state: (list(agents), np.ones(count))


def at_random(count: int, seed: int) -> Decide:
    """One agent, drawn for each question in turn."""
    generator = np.random.default_rng(seed)
    return lambda state: ([int(generator.integers(count))], np.ones(count))


def outcome(tasks: Sequence[Task], held: Held, states: np.ndarray, decide: Decide) -> Outcome:
    """The rule on every question: the vote's winning completion is scored, 0 where all abstained; all tokens are counted."""
    n = len(tasks)
    reward, tokens, agents = (np.zeros(n) for _ in range(3))
    chosen: list[list[int]] = []
    for row in range(n):
        asked, weights = decide(states[row])
        winner = 0
        if len(asked) > 1:
            winner = vote(tasks[row], [held.texts[row][a] for a in asked], [float(weights[a]) for a in asked]).winner
        reward[row] = held.rewards[row, asked[winner]] if winner >= 0 else 0.0
        tokens[row] = held.tokens[row, asked].sum()
        agents[row] = len(asked)
        chosen.append(asked)
    return Outcome(reward, tokens, agents, chosen)
