"""Playing a small model on a split, and what its episodes teach the risk router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from routewright.errors import BadInput
from routewright.step_router.dataset import read_tasks
from routewright.step_router.environments.protocol import Environment
from routewright.step_router.episodes import Episode, Make
from routewright.step_router.features import NAMES, Candidate
from routewright.step_router.identity import RESUMING
from routewright.step_router.perturbations import TABLE
from routewright.step_router.policy import SmallModel, load_policy, load_verifier
from routewright.step_router.remembered import Remembered
from routewright.step_router.risk import EVIDENCE, Explored, Rollouts
from routewright.step_router.situations import Proposer, Situation
from routewright.step_router.taught import SPENT, taught_environment

FIELDS = ("features", "episode", "failed", "seed")
BEST, MARGIN, STEP = NAMES.index("verifier_best"), NAMES.index("verifier_margin"), NAMES.index("step")


@dataclass(frozen=True)
class WithoutLogprobs:
    """The same small model behind an interface that tells no log-probabilities."""

    proposer: Proposer

    def propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        """The same candidates in the same order, without log-probabilities."""
        proposed = self.proposer.propose(situations)
        return [[replace(candidate, token_logprobs=None) for candidate in candidates] for candidates in proposed]


def _player(
    dataset: Path, policy: Path, verifier: Path, candidates: int, memory: Path, log_probs: bool
) -> tuple[Proposer, Environment]:
    proposer: Proposer = Remembered(SmallModel(load_policy(policy), load_verifier(verifier), candidates), memory)
    if not log_probs:
        proposer = WithoutLogprobs(proposer)
    return proposer, taught_environment(read_tasks(dataset), tuple(TABLE.values()), spent_folder(memory))


def spent_folder(memory: Path) -> Path:
    """Where all plays of the stage that keeps a player's ``memory`` count what the LLM costs."""
    return next((folder for folder in memory.parents if folder.name == RESUMING), memory.parent) / SPENT


def player(
    dataset: Path, policy: Path, verifier: Path, candidates: int, memory: Path, log_probs: bool = True
) -> Make:
    """What `play` needs: the small model and the environment under every perturbation.

    ``memory``: a folder of this policy and verifier, for actions that are written (see `Remembered`).
    """
    return partial(_player, dataset, policy, verifier, candidates, memory, log_probs)


def as_rollouts(episodes: Sequence[Episode]) -> Rollouts:
    """Kept episodes of the small model alone as the risk router's data."""
    return Rollouts(
        features=np.array([turn.features for episode in episodes for turn in episode.turns]),
        episode=np.repeat(np.arange(len(episodes)), [len(episode.turns) for episode in episodes]),
        failed=np.array([float(not episode.success) for episode in episodes]),
        seed=np.array([episode.seed for episode in episodes]),
    )


def as_explored(episodes: Sequence[Episode], rate: float) -> Explored:
    """Kept episodes under `escalation.Coin`, calling the LLM at this rate, as what the benefit of a call is learnt from."""
    turns = [(turn, episode) for episode in episodes for turn in episode.turns]
    return Explored(
        features=np.array([turn.features for turn, _ in turns]),
        by_llm=np.array([float(turn.by == "llm") for turn, _ in turns]),
        failed=np.array([float(not episode.success) for _, episode in turns]),
        agreed=np.array([float(turn.agreed is True) for turn, _ in turns]),
        rate=rate,
    )


def write_rollouts(file: Path, **parts: Rollouts) -> None:
    """Keep rollouts by name in an .npz file."""
    np.savez(file, **{f"{name}_{field}": getattr(part, field) for name, part in parts.items() for field in FIELDS})


def read_rollouts(file: Path, part: str) -> Rollouts:
    """Those of that name; BadInput where the calibrate stage has not written them."""
    try:
        with np.load(file, allow_pickle=False) as kept:
            return Rollouts(**{field: kept[f"{part}_{field}"] for field in FIELDS})
    except (OSError, KeyError, ValueError) as error:
        raise BadInput(f"{file}: expected the rollouts '{part}' that the calibrate stage writes ({error})") from None


def with_logprobs(rollouts: Rollouts) -> Rollouts:
    """The episodes that were seen with log-probabilities: elsewhere entropy and surprisal are pseudo, on another scale."""
    told = rollouts.features[:, EVIDENCE] != 1.0
    kept, episode = np.unique(rollouts.episode[told], return_inverse=True)
    return Rollouts(rollouts.features[told], episode, rollouts.failed[kept], rollouts.seed[kept])


def first_steps(rollouts: Rollouts) -> Rollouts:
    """The first decision of each episode that is told from its beginning: what a router of whole episodes sees."""
    first = np.flatnonzero(rollouts.features[:, STEP] == 0)
    whole = rollouts.episode[first]
    return Rollouts(
        features=rollouts.features[first],
        episode=np.arange(len(first)),
        failed=rollouts.failed[whole],
        seed=rollouts.seed[whole],
    )


def first_scores(features: np.ndarray) -> np.ndarray:
    """The verifier's score of the action that the small model would take (n,), from feature rows (n, 15).

    It is the best score, or lies below it by the (negative) margin.
    """
    scores: np.ndarray = features[:, BEST] + np.minimum(features[:, MARGIN], 0.0)
    return scores
