"""Rules that learn whom to ask from rewards alone, each with agents of its own: LinUCB and three that are fitted anew.

All read the query state whitened to at most 64 directions (PCA over training queries), and ask one agent. LinUCB explores by
its bonus. The fitted ones need queries that all agents answered: those of the router's head start, then every eighth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA

from routewright.described_weights import read_described, save_described
from routewright.ensemble_router.baselines import (
    BestAgentClassifier,
    InContextExamples,
    LinUCB,
    RewardRegression,
    Rule,
    SingleBest,
)
from routewright.errors import BadInput

FITTED: dict[str, type[RewardRegression] | type[BestAgentClassifier] | type[InContextExamples]] = {
    "reward-regression": RewardRegression,
    "classifier": BestAgentClassifier,
    "icl": InContextExamples,
}
LEARNED = ("linucb", *FITTED)
DIRECTIONS, WINDOW, ALPHA = 64, 4096, 1.0
EVERYBODY_EVERY = 8
"""Of the fitted rules' training queries, one in so many is asked of all agents, whose rewards the agents' learning ages."""
WEIGHTS, DESCRIPTION = "learned.safetensors", "learned.json"


class LearnedRouter:
    """One learnt rule: its whitening, and what it knows (LinUCB: A⁻¹ and b; the others: the latest 4,096 queries)."""

    def __init__(self, rule: str, agents: int, sample: np.ndarray) -> None:
        """``sample`` (m, D): states of training queries, which the whitening is fitted on. BadInput for an unknown rule."""
        if rule not in LEARNED:
            raise BadInput(f"rule {rule!r}: expected one of {', '.join(LEARNED)}")
        self.rule, self.agents = rule, agents
        # m centred samples span m − 1 directions: along another one, whitening would blow up what is unseen
        size = max(1, min(DIRECTIONS, len(sample) - 1, sample.shape[1]))
        whitening = PCA(size, whiten=True, svd_solver="full").fit(sample)
        scale = np.sqrt(np.maximum(whitening.explained_variance_, 1e-12))
        self.mean = whitening.mean_.astype(np.float64)
        directions = whitening.components_ / scale[:, None] / np.sqrt(len(scale))
        self.directions = np.ascontiguousarray(directions, dtype=np.float64)  # as it is read back: layout changes last bits
        self.states = np.zeros((0, len(scale)))
        self.rewards = np.zeros((0, agents))
        self.linucb = LinUCB(agents, len(scale) + 1, ALPHA)
        self.fitted: Rule | None = None

    def reduced(self, states: np.ndarray) -> np.ndarray:
        """Whitened states (n, ≤ 64), of length about 1, from states (n, D)."""
        out: np.ndarray = (np.asarray(states, dtype=np.float64) - self.mean) @ self.directions.T
        return out

    def route(self, state: np.ndarray) -> list[int]:
        """The one agent for a state (D,); before anything is learnt the first."""
        x = self.reduced(state[None])[0]
        if self.rule == "linucb":
            return self.linucb.route(np.append(x, 1.0))
        return [0] if self.fitted is None else self.fitted.route(x)

    def learn(self, states: np.ndarray, rewards: np.ndarray) -> None:
        """From states (n, D) and rewards (n, N), NaN where an agent did not answer."""
        reduced = self.reduced(states)
        if self.rule == "linucb":
            for x, row in zip(reduced, rewards, strict=True):
                for agent in np.flatnonzero(~np.isnan(row)):
                    self.linucb.update(np.append(x, 1.0), int(agent), float(row[agent]))
            return
        self.states = np.concatenate([self.states, reduced])[-WINDOW:]
        self.rewards = np.concatenate([self.rewards, rewards])[-WINDOW:]
        self._fit()

    def _fit(self) -> None:
        known = ~np.isnan(self.rewards)
        if known.any(axis=0).all():
            self.fitted = FITTED[self.rule](self.states, self.rewards)
        elif known.any():
            self.fitted = SingleBest(np.where(known, self.rewards, 0.0))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it knows; `restore` takes it back."""
        known = {"mean": self.mean, "directions": self.directions, "states": self.states, "rewards": self.rewards}
        if self.rule == "linucb":
            known |= {"inverse": self.linucb.inverse, "b": self.linucb.b}
        return {name: torch.tensor(value) for name, value in known.items()}

    def restore(self, stored: dict[str, torch.Tensor]) -> None:
        """Go back to what `tensors` gave."""
        self.mean, self.directions, self.states, self.rewards = (
            stored[name].numpy().copy() for name in ("mean", "directions", "states", "rewards")
        )
        if self.rule == "linucb":
            self.linucb.inverse, self.linucb.b = stored["inverse"].numpy().copy(), stored["b"].numpy().copy()
        else:
            self._fit()


def save_learned(router: LearnedRouter, folder: Path, facts: dict[str, Any]) -> None:
    """Write learned.safetensors and learned.json."""
    told = {**facts, "router": "learned rule", "rule": router.rule, "agents": router.agents}
    save_described(router.tensors(), folder, WEIGHTS, DESCRIPTION, told)


def load_learned(folder: Path) -> LearnedRouter:
    """A saved rule, without exploration; BadInput names what is missing, unreadable or changed since."""
    stored, description = read_described(Path(folder), "learned rule", WEIGHTS, DESCRIPTION, "coevolve")
    router = LearnedRouter(str(description["rule"]), int(description["agents"]), np.eye(2))
    router.restore(stored)
    router.linucb.alpha = 0.0
    return router
