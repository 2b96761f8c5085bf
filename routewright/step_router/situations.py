"""A decision that is due, and whoever proposes actions for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from routewright.step_router.environments.protocol import Observation
from routewright.step_router.features import Candidate


@dataclass(frozen=True)
class Situation:
    """What the small model sees: the observation as shown, and the actions sent so far, oldest first."""

    observation: Observation
    actions: tuple[str, ...] = ()


class Proposer(Protocol):
    """A small model with its verifier."""

    def propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        """Candidates of each situation, the best first, each with log-probabilities and a verifier score.

        A pure function of the situation: what else is in the batch does not matter. At least one candidate each.
        """
