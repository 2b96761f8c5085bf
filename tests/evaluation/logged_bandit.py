"""A simulated router with known outcomes: what a candidate is really worth is known for every estimate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

AGENTS = ("north", "south", "west")


@dataclass(frozen=True)
class LoggedBandit:
    """``n`` decisions of an ε-greedy policy over three agents; all probabilities are (n, 3), one row a query."""

    actions: np.ndarray
    rewards: np.ndarray
    logging: np.ndarray
    candidate: np.ndarray
    outcome: np.ndarray
    """P(reward = 1) of every agent."""

    @property
    def propensities(self) -> np.ndarray:
        return self.logging[np.arange(len(self.actions)), self.actions]

    @property
    def candidate_probabilities(self) -> np.ndarray:
        return self.candidate[np.arange(len(self.actions)), self.actions]

    def model(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predicted outcome of the logged actions, and the expected one under the candidate."""
        return q[np.arange(len(self.actions)), self.actions], (self.candidate * q).sum(axis=1)


def simulate(rng: np.random.Generator, n: int, epsilon: float = 0.3) -> LoggedBandit:
    """Queries of three kinds; the logging policy prefers agent 0, the candidate mostly the agent of the query's kind."""
    kind = rng.integers(3, size=n)
    outcome = np.where(np.arange(3) == kind[:, None], 0.8, 0.3)
    logging = np.full((n, 3), epsilon / 3)
    logging[:, 0] += 1 - epsilon
    candidate = np.where(np.arange(3) == kind[:, None], 0.9, 0.05)
    actions = (rng.random(n)[:, None] > logging.cumsum(axis=1)).sum(axis=1).clip(0, 2)
    rewards = (rng.random(n) < outcome[np.arange(n), actions]).astype(float)
    return LoggedBandit(actions, rewards, logging, candidate, outcome)


TRUTH = 0.9 * 0.8 + 0.1 * 0.3
"""The candidate's expected reward, the same for every kind of query."""
