"""Routing rules to compare with, on one interface: query states in, the agents that answer out.

A rule is fitted on logged queries: states (n, D), rewards (n, N), NaN where an agent did not answer. `route` maps a
state (D,) to agent numbers, the preferred first. The co-evolved router itself is `activation.activated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from routewright.errors import BadInput


class Rule(Protocol):
    """What the evaluation asks of a routing rule."""

    def route(self, state: np.ndarray) -> list[int]: ...


def check_history(states: np.ndarray, rewards: np.ndarray) -> None:
    """BadInput unless states (n, D) are finite, rewards (n, N ≥ 2) lie in [0, 1] or are NaN, and every agent has some."""
    if states.ndim != 2 or rewards.ndim != 2 or len(states) != len(rewards) or len(states) == 0:
        raise BadInput(f"history: expected states (n, D) and rewards (n, N), found {states.shape} and {rewards.shape}")
    if rewards.shape[1] < 2:
        raise BadInput(f"history: expected rewards of at least two agents, found {rewards.shape[1]}")
    if not np.isfinite(states).all():
        raise BadInput("history: expected finite query states, found NaN or infinity")
    known = ~np.isnan(rewards)
    if ((rewards[known] < 0) | (rewards[known] > 1)).any():
        raise BadInput("history: expected rewards in [0, 1]")
    if not known.any(axis=0).all():
        raise BadInput(f"history: agent {int(np.flatnonzero(~known.any(axis=0))[0])} has no reward, expected some of each")


class SingleBest:
    """Always the agent with the best mean reward (ties: the lower number)."""

    def __init__(self, rewards: np.ndarray) -> None:
        self.agent = int(np.argmax(np.nanmean(rewards, axis=0)))

    def route(self, state: np.ndarray) -> list[int]:
        return [self.agent]


class Everybody:
    """All agents."""

    def __init__(self, agents: int) -> None:
        self.agents = agents

    def route(self, state: np.ndarray) -> list[int]:
        return list(range(self.agents))


def top_k(familiarities: np.ndarray, k: int) -> list[int]:
    """The k most familiar agents (ties: the lower number): the rules `top-1` and `top-2`."""
    return [int(agent) for agent in np.argsort(-familiarities, kind="stable")[:k]]


class LinUCB:
    """Disjoint LinUCB (Li et al. 2010, arXiv 1003.0146, algorithm 1).

    A_a = I + Σ x xᵀ, b_a = Σ r x, θ̂_a = A_a⁻¹ b_a; the agent with the largest θ̂_aᵀx + α·√(xᵀA_a⁻¹x). A⁻¹ is kept by
    Sherman–Morrison. α = 0 exploits only: use it at evaluation.
    """

    def __init__(self, agents: int, width: int, alpha: float) -> None:
        self.inverse = np.stack([np.eye(width)] * agents)
        self.b = np.zeros((agents, width))
        self.alpha = alpha

    def bounds(self, state: np.ndarray) -> np.ndarray:
        """The upper confidence bound of each agent, (N,)."""
        x = np.asarray(state, dtype=float)
        theta = np.einsum("aij,aj->ai", self.inverse, self.b)
        width = np.sqrt(np.maximum(np.einsum("i,aij,j->a", x, self.inverse, x), 0.0))
        return theta @ x + self.alpha * width

    def route(self, state: np.ndarray) -> list[int]:
        return [int(np.argmax(self.bounds(state)))]

    def update(self, state: np.ndarray, agent: int, reward: float) -> None:
        """Learn the reward of the agent that answered."""
        x = np.asarray(state, dtype=float)
        inverse = self.inverse[agent]
        column = inverse @ x
        inverse -= np.outer(column, column) / (1.0 + x @ column)
        self.b[agent] += reward * x


class RewardRegression:
    """Ridge regression of each agent's reward on the standardised state; the agent with the largest prediction."""

    def __init__(self, states: np.ndarray, rewards: np.ndarray, strength: float = 1.0) -> None:
        check_history(states, rewards)
        self.models = []
        for agent in range(rewards.shape[1]):
            known = ~np.isnan(rewards[:, agent])
            model = make_pipeline(StandardScaler(), Ridge(alpha=strength))
            self.models.append(model.fit(states[known], rewards[known, agent]))

    def predicted(self, state: np.ndarray) -> np.ndarray:
        """Each agent's predicted reward, (N,)."""
        return np.array([float(model.predict(state[None])[0]) for model in self.models])

    def route(self, state: np.ndarray) -> list[int]:
        return [int(np.argmax(self.predicted(state)))]


class BestAgentClassifier:
    """Multinomial logistic regression of the best agent on the standardised state.

    Queries on which all answering agents earned the same teach nothing and are left out; where several are best the label is
    the lowest of them. If every query says the same agent (or none says any), it is always that one.
    """

    def __init__(self, states: np.ndarray, rewards: np.ndarray, strength: float = 1.0) -> None:
        check_history(states, rewards)
        telling = np.nanmax(rewards, axis=1) > np.nanmin(rewards, axis=1)
        labels = np.nanargmax(rewards[telling], axis=1) if telling.any() else np.array([SingleBest(rewards).agent])
        self.only = int(labels[0])
        self.model = None
        if len(np.unique(labels)) > 1:
            model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000))
            self.model = model.fit(states[telling], labels)

    def route(self, state: np.ndarray) -> list[int]:
        return [self.only if self.model is None else int(self.model.predict(state[None])[0])]


class InContextExamples:
    """The k logged queries nearest in cosine; the agent with the best mean reward on them.

    An agent without a reward among them counts with its mean over the whole history.
    """

    def __init__(self, states: np.ndarray, rewards: np.ndarray, k: int = 16) -> None:
        check_history(states, rewards)
        self.rewards, self.means = rewards, np.nanmean(rewards, axis=0)
        self.nearest = NearestNeighbors(n_neighbors=min(k, len(states)), metric="cosine").fit(states)

    def expected(self, state: np.ndarray) -> np.ndarray:
        """Each agent's mean reward on the nearest queries, (N,)."""
        rows = self.rewards[self.nearest.kneighbors(state[None], return_distance=False)[0]]
        known = ~np.isnan(rows)
        sums, counts = np.where(known, rows, 0.0).sum(axis=0), known.sum(axis=0)
        return np.where(counts > 0, sums / np.maximum(counts, 1), self.means)

    def route(self, state: np.ndarray) -> list[int]:
        return [int(np.argmax(self.expected(state)))]


def routes(rule: Rule, states: Sequence[np.ndarray]) -> list[list[int]]:
    """The rule on each state, in order."""
    return [rule.route(np.asarray(state)) for state in states]
