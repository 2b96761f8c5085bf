"""A new agent for a trained router: one more head, trained alone on logged queries; all that was there stays as it is.

The logged outcomes stand for rewards: the gain of the new agent is its outcome minus the mean over all agents that the log
has an outcome of, and the loss is the router's push and pull of its distance alone (arXiv 2609.18779).
"""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from routewright.ensemble_router.activation import gains, push_and_pull
from routewright.ensemble_router.agents import check_names, load_adapters
from routewright.ensemble_router.familiarity import (
    FamiliarityHeads,
    familiarity,
    load_heads,
    warn_of_margin,
)
from routewright.ensemble_router.router import ADAPTERS, EnsembleRouter, load_ensemble_router, save_whole
from routewright.ensemble_router.tasks import fault
from routewright.errors import BadInput
from routewright.evaluation.drift import ROUTES
from routewright.pools.decision_log import read_decisions
from routewright.pools.query_log import QueryLogEntry

STEPS, BATCH, LR, WEIGHT_DECAY, MARGIN = 300, 16, 1e-3, 1e-3, 1.0
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Logged:
    """A query with an outcome of the new agent: where it stands, its text, and the gain of the new agent in [−1, 1]."""

    where: str
    query: str
    gain: float


def add_agent(model: Path, log: Path, out: Path, name: str, adapter: Path | None, seed: int) -> dict[str, Any]:
    """Write the router of ``model`` with a head (and the LoRA adapter) for agent ``name`` to the new folder ``out``.

    Returns how many queries counted, and the mean familiarity before and after training of those where the agent was at
    least as good as the average (``above``) and of the others (``below``; None where there are none). BadInput: a name that
    is taken, a log without an outcome of the agent or without a difference to learn from, an adapter that does not fit.
    """
    if out.exists():
        raise BadInput(f"--out {out}: it is there already, expected a new folder")
    heads, description = load_heads(model)
    heads.add(name, seed)
    check_names(heads.agents)
    logged = read_outcomes(log, name)
    router = load_ensemble_router(model)
    states = query_states_of(router, logged)  # before an adapter changes the base model in memory
    warn_of_margin(len(heads.agents), router.lam, router.tau, MARGIN)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(model, partial)
        if adapter is not None:
            attach_adapter(router.model, partial / ADAPTERS, adapter, name)
        told = train_head(heads, states, torch.tensor([one.gain for one in logged]), router.lam, seed)
        (partial / ROUTES).unlink(missing_ok=True)  # it counts first choices among the old agents
        save_whole(heads, partial, {**description, "added": [*description.get("added", []), name]})
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return told


def read_outcomes(log: Path, agent: str) -> list[Logged]:
    """The queries of a query log, or of a served router's decision log, with an outcome of the agent, and its gain there.

    Redacted queries and other routers' are left out. BadInput names what is broken, and a log that says nothing of it.
    """
    found = []
    for number, row in enumerate(read_decisions(log), 1):
        if row.get("router", "ensemble-router") != "ensemble-router" or "redacted" in row:
            continue
        where = f"{log}, query {number}"
        try:
            entry = QueryLogEntry.model_validate_json(json.dumps(row))
        except ValidationError as error:
            raise BadInput(f"{where}: {fault(error)}") from None
        if agent in entry.outcome:
            names = list(entry.outcome)
            gain = gains(list(entry.outcome.values()))[names.index(agent)]
            found.append(Logged(where, entry.query, float(gain)))
    if not found:
        raise BadInput(
            f"{log}: outcome: no query has one of agent {agent!r}, expected lines such as "
            f'{{"query": "…", "outcome": {{"{agent}": 1, "another agent": 0}}}}'
        )
    if not any(one.gain for one in found):
        raise BadInput(f"{log}: outcome: agent {agent!r} is never better or worse than the others, nothing to learn from")
    return found


def query_states_of(router: EnsembleRouter, logged: list[Logged]) -> torch.Tensor:
    """h(q) of each logged query, (B, 2H), one backbone pass each; BadInput names a query that has none."""
    states = []
    for one in logged:
        try:
            states.append(router.state(one.query))
        except BadInput as error:
            raise BadInput(f"{one.where}: {error}") from None
    return torch.stack(states)


def train_head(heads: FamiliarityHeads, states: torch.Tensor, gain: torch.Tensor, lam: float, seed: int) -> dict[str, Any]:
    """Train the last agent's predictor, in place and alone, on states (B, 2H) and gains (B,)."""
    heads.requires_grad_(False)
    predictor = heads.predictors[-1].requires_grad_(True)
    optimiser = torch.optim.AdamW(predictor.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(seed)
    before = known(heads, states, lam)
    for _ in range(STEPS):
        rows = torch.randint(len(states), (min(BATCH, len(states)),), generator=generator)
        push_and_pull(heads(states[rows])[:, -1], gain[rows], MARGIN).mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    after = known(heads, states, lam)
    groups = {"above": gain >= 0, "below": gain < 0}
    return {"queries": len(states), "steps": STEPS} | {
        group: {"queries": int(rows.sum()), "before": float(before[rows].mean()), "after": float(after[rows].mean())}
        if rows.any()
        else None
        for group, rows in groups.items()
    }


@torch.no_grad()
def known(heads: FamiliarityHeads, states: torch.Tensor, lam: float) -> torch.Tensor:
    """The last agent's familiarity with each query, (B,)."""
    return familiarity(heads(states)[:, -1], lam)


def attach_adapter(base: Any, adapters: Path, adapter: Path, name: str) -> None:
    """Copy a LoRA adapter beside the others as ``name``; BadInput where it is not one of this base model."""
    from peft import get_peft_model_state_dict

    for file in ADAPTER_FILES:
        if not (adapter / file).is_file():
            raise BadInput(f"adapter {adapter}: {file} is missing, expected a LoRA adapter's folder as PEFT writes it")
    (adapters / name).mkdir()
    for file in ADAPTER_FILES:
        shutil.copyfile(adapter / file, adapters / name / file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT and transformers talk of their own future
            loaded = load_adapters(base, adapters, [name])
    except BadInput as error:
        raise BadInput(str(error).replace(str(adapters / name), str(adapter))) from None
    # PEFT skips what it finds no place for
    shapes = [
        {key: value.shape for key, value in state.items()}
        for state in (get_peft_model_state_dict(loaded, adapter_name=name), load_file(adapter / ADAPTER_FILES[1]))
    ]
    wrong = sorted(key for key in {*shapes[0], *shapes[1]} if shapes[0].get(key) != shapes[1].get(key))
    if wrong:
        raise BadInput(f"adapter {adapter}: it does not fit the base model ({wrong[0]} has no counterpart)")
