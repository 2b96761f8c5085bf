"""What an agent sees of an environment, and what an environment offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Observation:
    """What the agent knows before its next action.

    ``admissible``: the actions that would do something, in the episode's order; None where any text is an action.
    ``step`` counts the steps taken, from 0 to ``max_steps``.
    """

    objective: str
    text: str
    inventory: str
    admissible: tuple[str, ...] | None
    step: int
    max_steps: int


@dataclass(frozen=True)
class Outcome:
    """What a step led to. ``cost`` is in environment steps (1, more where time was lost); ``success`` implies ``done``."""

    observation: Observation
    success: bool
    done: bool
    cost: float = 1.0


class Environment(Protocol):
    """One episode at a time; the same task, seed and actions give the same observations."""

    def reset(self, task: str, seed: int) -> Observation:
        """Begin an episode. BadInput for a task that does not exist."""

    def step(self, action: str | None) -> Outcome:
        """Take an action; None lets a step pass (an action that got lost). ValueError after the episode's end."""

    def teacher(self) -> str:
        """The expert's action in the present state, from the state itself and not from what was observed."""

    def close(self) -> None:
        """Give back what the episode holds."""
