"""Exploration with exact propensities and a cap on its cost: without it, off-policy estimates have nothing to go by."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from routewright.errors import BadInput

WINDOW = 1000  # requests over which the cap counts
LARGEST = 3  # agents of the largest set that is drawn, unless the router itself asks more


@dataclass(frozen=True)
class Draw:
    """One request's draw: whether to explore, and the probability with which that happened."""

    explore: bool
    epsilon: float


@dataclass(frozen=True)
class AgentsDraw:
    """Which agents, by number, one request is sent to.

    ``propensity`` is the probability of this very set, whichever way led to it; ``largest`` the number of agents up to
    which every set could have been drawn, None where none could be.
    """

    taken: list[int]
    explore: bool
    epsilon: float
    propensity: float
    largest: int | None


class Exploration:
    """ε-exploration of at most a share ``cap`` of every window of requests; for the worker's thread alone.

    Once a window's share is spent, ε is 0 until the next window begins. That depends on past requests only, so every
    logged propensity is exact; what was logged with ε = 0 says nothing about other actions, and the log says which.
    """

    def __init__(
        self, epsilon: float, cap: float = 1.0, window: int = WINDOW, seed: int | None = None, largest: int = LARGEST
    ) -> None:
        if not 0 <= epsilon <= 1:
            raise BadInput(f"epsilon: expected a probability, found {epsilon}")
        if not 0 <= cap <= 1:
            raise BadInput(f"epsilon-cap: expected a share from 0 to 1, found {cap}")
        if largest < 1:
            raise BadInput(f"epsilon-agents: expected at least 1 agent, found {largest}")
        self.epsilon, self.window, self.largest = epsilon, window, largest
        self.random = random.Random(seed)
        self._allowed = int(cap * window)
        self._seen = self._explored = 0

    def draw(self) -> Draw:
        """The next request's draw."""
        if self._seen == self.window:
            self._seen = self._explored = 0
        self._seen += 1
        epsilon = self.epsilon if self._explored < self._allowed else 0.0
        explore = self.random.random() < epsilon
        self._explored += explore
        return Draw(explore, epsilon)

    def draw_agents(self, greedy: Sequence[int], agents: int) -> AgentsDraw:
        """The next request's agents: the router's own choice ``greedy``, or a set drawn as `drawn_share` says."""
        draw, largest = self.draw(), min(agents, max(self.largest, len(greedy)))
        taken = list(greedy)
        if draw.explore:
            if self.random.random() < 0.5:
                out, into = self.random.choice(_changes(greedy, agents, largest))
                taken = [agent for agent in greedy if agent != out] + ([] if into is None else [into])
            else:
                taken = self.random.sample(range(agents), self.random.randint(1, largest))
        propensity = set_propensity(taken, greedy, agents, largest, draw.epsilon)
        return AgentsDraw(taken, draw.explore, draw.epsilon, propensity, largest if draw.epsilon else None)


def _changes(greedy: Sequence[int], agents: int, largest: int) -> list[tuple[int | None, int | None]]:
    """(agent that goes, agent that comes) of every change by one agent that leaves 1 to ``largest``; None for nobody."""
    others = [agent for agent in range(agents) if agent not in greedy]
    found: list[tuple[int | None, int | None]] = [(out, into) for out in greedy for into in others]
    found += [(None, into) for into in others] if len(greedy) < largest else []
    return found + ([(out, None) for out in greedy] if len(greedy) > 1 else [])


def drawn_share(taken: Collection[int], greedy: Collection[int], agents: int, largest: int) -> float:
    """P(taken) of a drawn set: sets of agent numbers below ``agents``, ``greedy`` of 1 to ``largest`` ≥ 1.

    By even chance it is the router's choice with one agent added, removed or exchanged, each such change alike; or any
    set at all, its size even from 1 to ``largest``, then each set of that size alike. So nothing up to ``largest`` is
    without support, and what is near to the router's choice has the smaller weights.
    """
    size, kept = len(taken), len(set(taken) & set(greedy))
    if not 1 <= size <= largest:
        return 0.0
    anything = 1 / (largest * math.comb(agents, size))
    gone, come, others = len(greedy) - kept, size - kept, agents - len(greedy)
    changed = max(gone, come) == 1
    changes = len(greedy) * others + (others if len(greedy) < largest else 0) + (len(greedy) if len(greedy) > 1 else 0)
    return (anything + (1 / changes if changed else 0.0)) / 2


def set_propensity(
    taken: Collection[int], greedy: Collection[int], agents: int, largest: int, epsilon: float
) -> float:
    """P(taken) = (1 − ε)·[taken = greedy] + ε·P(taken is drawn), see `drawn_share`."""
    stands = (1 - epsilon) if set(taken) == set(greedy) else 0.0
    return stands + epsilon * drawn_share(taken, greedy, agents, largest)


def escalation_propensity(escalate: bool, above: bool, epsilon: float) -> float:
    """P(escalate) where a fair coin decides with probability ε, and otherwise whether the risk is above the threshold."""
    return 1 - epsilon / 2 if escalate == above else epsilon / 2
