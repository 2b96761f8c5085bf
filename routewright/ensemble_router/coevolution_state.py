"""Everything that changes while agents and router co-evolve, and its checkpoint: one file, replaced as a whole."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from routewright.ensemble_router.agents import Base, adapter_parameters
from routewright.ensemble_router.familiarity import FamiliarityHeads
from routewright.ensemble_router.learned_rules import LearnedRouter
from routewright.ensemble_router.profile import EnsembleProfile
from routewright.errors import BadInput


@dataclass(frozen=True)
class Kept:
    """One buffered query of an agent: its number, completions, mask, log-probabilities (G, T), rewards and gains (G,)."""

    query: int
    tensors: dict[str, torch.Tensor]


class CoevolutionState:
    """Adapters (those of ``bases``, in place), heads, an optimiser for each, buffers, counters and the sampling's RNG.

    ``home``: the base that each agent stands on. ``width``: numbers of a query state. ``learned``: the router of a rule that
    learns from rewards; the heads then stay as they began. ``n``, ``nats`` and ``tokens`` (N,): queries routed to each
    agent, and the entropy and number of its generated tokens.
    """

    def __init__(
        self, profile: EnsembleProfile, bases: Sequence[Base], seed: int, width: int, learned: LearnedRouter | None = None
    ) -> None:
        a, r = profile.agents, profile.router
        self.names, self.bases, self.learned = a.names, list(bases), learned
        self.home = {name: number for number, base in enumerate(bases) for name in base.names}
        self.heads = FamiliarityHeads(width, self.names, seed)
        self.heads.to(next(bases[0].model.parameters()).device)
        self.parameters = {name: adapter_parameters(bases[self.home[name]].model, name) for name in self.names}
        self.optimisers = {
            name: torch.optim.AdamW(own, lr=a.lr, betas=(0.9, 0.95), weight_decay=a.weight_decay)
            for name, own in self.parameters.items()
        }
        self.routers = [
            torch.optim.AdamW(predictor.parameters(), lr=r.lr, betas=(0.9, 0.95), weight_decay=r.weight_decay)
            for predictor in self.heads.predictors
        ]
        self.buffers: dict[str, deque[Kept]] = {name: deque(maxlen=a.buffer) for name in self.names}
        self.generator = torch.Generator().manual_seed(seed)
        self.n, self.nats, self.tokens = (np.zeros(len(self.names)) for _ in range(3))
        self.count = {"step": 0, "routed": 0, "answers": 0, **{f"updates.{name}": 0 for name in self.names}}

    def mean_entropy(self) -> np.ndarray:
        """H̄ (N,): nats per generated token so far, 0 for an agent that generated none."""
        return np.divide(self.nats, self.tokens, out=np.zeros_like(self.nats), where=self.tokens > 0)

    def save(self, file: Path, identity: dict[str, Any]) -> None:
        """Write the checkpoint; ``identity`` says which run it belongs to."""
        out = {key: value.detach().clone() for key, value in self._weights().items()}
        for key, optimiser in self._all_optimisers():
            for place, values in optimiser.state_dict()["state"].items():
                out |= {f"optimiser/{key}/{place}/{kind}": value.clone() for kind, value in values.items()}
        for name, buffer in self.buffers.items():
            for place, kept in enumerate(buffer):
                out |= {f"buffer/{name}/{place}/{kind}": value.clone() for kind, value in kept.tensors.items()}
        out |= {key: torch.tensor(values) for key, values in self._counters().items()}
        if self.learned is not None:
            out |= {f"learned/{key}": value for key, value in self.learned.tensors().items()}
        out["rng"] = self.generator.get_state()
        queries = {name: [kept.query for kept in buffer] for name, buffer in self.buffers.items()}
        partial = file.with_name(f"{file.name}.partial")
        save_file(out, partial, metadata={"state": json.dumps({**identity, "count": self.count, "queries": queries})})
        os.replace(partial, file)

    def load(self, file: Path, identity: dict[str, Any]) -> None:
        """Go back to the checkpoint; BadInput where it belongs to another run."""
        with safe_open(file, framework="pt") as stored_file:
            facts = json.loads(stored_file.metadata()["state"])
            stored = {key: stored_file.get_tensor(key) for key in stored_file.keys()}  # noqa: SIM118
        if {key: facts[key] for key in identity} != identity:
            raise BadInput(f"{file}: it is of another rule, seed or profile, expected {identity}")
        with torch.no_grad():
            for key, value in self._weights().items():
                value.copy_(stored[key])
        for key, optimiser in self._all_optimisers():
            state: dict[int, dict[str, torch.Tensor]] = {}
            for full, value in stored.items():
                if full.startswith(f"optimiser/{key}/"):
                    place, kind = full.split("/")[2:]
                    state.setdefault(int(place), {})[kind] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
        for name, queries in facts["queries"].items():
            for place, query in enumerate(queries):
                head = f"buffer/{name}/{place}/"
                kept = {key.removeprefix(head): value for key, value in stored.items() if key.startswith(head)}
                self.buffers[name].append(Kept(query, kept))
        for key, values in self._counters().items():
            values[:] = stored[key].numpy()
        if self.learned is not None:
            head = "learned/"
            self.learned.restore({key.removeprefix(head): value for key, value in stored.items() if key.startswith(head)})
        self.generator.set_state(stored["rng"])
        self.count.update(facts["count"])

    def _weights(self) -> dict[str, torch.Tensor]:
        adapters = {
            f"model/{key}": value
            for name in self.names
            for key, value in self.bases[self.home[name]].model.named_parameters()
            if f".{name}." in key
        }
        return {**adapters, **{f"heads/{key}": value for key, value in self.heads.state_dict().items()}}

    def _all_optimisers(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        yield from self.optimisers.items()
        yield from ((f"router-{number}", optimiser) for number, optimiser in enumerate(self.routers))

    def _counters(self) -> dict[str, np.ndarray]:
        return {"n": self.n, "nats": self.nats, "tokens": self.tokens}
