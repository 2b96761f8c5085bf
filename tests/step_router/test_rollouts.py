"""Episodes as the risk router's data."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import save_policy, save_verifier, situation, tiny_profile

from routewright.errors import BadInput
from routewright.step_router.dataset import fetch_tasks
from routewright.step_router.episodes import Episode, Turn
from routewright.step_router.features import NAMES, Candidate, Context, compute_features
from routewright.step_router.perturbations import TABLE, Perturbed
from routewright.step_router.policy import SmallModel
from routewright.step_router.remembered import Remembered
from routewright.step_router.rollouts import (
    WithoutLogprobs,
    as_explored,
    as_rollouts,
    first_scores,
    first_steps,
    player,
    read_rollouts,
    with_logprobs,
    write_rollouts,
)


def episode(seed: int, success: bool, *values: float) -> Episode:
    turns = tuple(Turn("go", "slm", (value,) * len(NAMES), ()) for value in values)
    return Episode("slm", None, "task", "quest", seed, success, len(turns), 0, turns)


EPISODES = [episode(7, True, 1.0, 2.0), episode(3, False, 3.0), episode(7, False, 4.0, 5.0, 6.0)]


def test_as_rollouts_by_hand() -> None:
    rollouts = as_rollouts(EPISODES)
    assert rollouts.features.shape == (6, len(NAMES))
    assert rollouts.features[:, 0].tolist() == rollouts.features[:, -1].tolist() == [1, 2, 3, 4, 5, 6]
    assert rollouts.episode.tolist() == [0, 0, 1, 2, 2, 2]
    assert rollouts.failed.tolist() == [0, 1, 1]
    assert rollouts.seed.tolist() == [7, 3, 7]


def test_as_explored_by_hand() -> None:
    first, second = EPISODES[0].turns
    by_llm = replace(EPISODES[0], turns=(replace(first, agreed=True), replace(second, by="llm", agreed=False)))
    explored = as_explored([by_llm, EPISODES[1]], 0.25)
    assert explored.features[:, 0].tolist() == [1, 2, 3]
    assert explored.by_llm.tolist() == [0, 1, 0]
    assert explored.failed.tolist() == [0, 0, 1]
    assert (explored.agreed.tolist(), explored.rate) == ([1, 0, 0], 0.25)


def test_first_steps_by_hand() -> None:
    told = [episode(7, True, 0.0, 2.0), episode(3, False, 3.0), episode(5, False, 0.0, 5.0, 6.0)]
    first = first_steps(as_rollouts(told))
    assert first.features[:, 0].tolist() == [0, 0], "the second is not told from its beginning"
    assert first.episode.tolist() == [0, 1]
    assert (first.failed.tolist(), first.seed.tolist()) == ([0, 1], [7, 5])


def features(*candidates: tuple[str, float]) -> np.ndarray:
    options = [Candidate(action, [-0.5, -0.1], score) for action, score in candidates]
    return compute_features(Context("win", "a room", options, 1, 5))


def test_first_scores_are_the_scores_of_the_first_candidates() -> None:
    rows = np.array(
        [
            features(("a", 0.75), ("b", 0.5), ("c", 0.25)),  # the best comes first
            features(("a", 0.5), ("b", 0.75), ("c", 0.25)),
            features(("a", 0.25), ("b", 0.5), ("c", 0.75)),  # the worst comes first
            features(("a", 0.375)),
            features(("a", 0.375), ("a", 0.375)),
            features(("a", 0.5), ("b", 0.5)),
        ]
    )
    assert first_scores(rows) == pytest.approx([0.75, 0.5, 0.25, 0.375, 0.375, 0.5])


class Two:
    """Two candidates, the second with the better score."""

    def propose(self, situations: list) -> list[list[Candidate]]:  # type: ignore[type-arg]
        return [[Candidate("a", [-0.1], 0.2), Candidate("b", [-2.0], 0.9)] for _ in situations]


def test_without_log_probabilities_the_candidates_are_the_same() -> None:
    proposed = WithoutLogprobs(Two()).propose([situation(0), situation(1)])
    assert proposed == [[Candidate("a", None, 0.2), Candidate("b", None, 0.9)]] * 2


def test_rollouts_come_back_from_their_file(tmp_path: Path) -> None:
    file, rollouts = tmp_path / "rollouts.npz", as_rollouts(EPISODES)
    write_rollouts(file, train=as_rollouts(EPISODES[:1]), holdout=rollouts)
    found = read_rollouts(file, "holdout")
    for name in ("features", "episode", "failed", "seed"):
        assert np.array_equal(getattr(found, name), getattr(rollouts, name))
    for missing, part in ((file, "test"), (tmp_path / "nothing.npz", "holdout")):
        with pytest.raises(BadInput, match=rf"{missing.name}: expected the rollouts '{part}'"):
            read_rollouts(missing, part)


def test_episodes_without_log_probabilities_are_left_out() -> None:
    rollouts = as_rollouts(EPISODES)
    rollouts.features[:, NAMES.index("evidence")] = [1, 1, 0, -1, -1, -1]
    kept = with_logprobs(rollouts)
    assert kept.features[:, 0].tolist() == [3, 4, 5, 6]
    assert (kept.episode.tolist(), kept.failed.tolist(), kept.seed.tolist()) == ([0, 1, 1, 1], [1, 1], [3, 7])


def test_a_player_travels_to_another_process(tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "prompt": "Say 1.", "answer": "x = 1", "tests": "assert x == 1"} for i in range(5)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fetch_tasks(str(tmp_path / "mine.jsonl"), tmp_path / "data", tiny_profile())
    bc = save_policy(tmp_path / "bc", scale=0.1)
    verifier = save_verifier(bc, tmp_path / "verifier")
    memory = tmp_path / "proposals"
    proposer, environment = pickle.loads(pickle.dumps(player(tmp_path / "data", bc, verifier, 3, memory)))()
    assert isinstance(proposer, Remembered)
    assert (proposer.folder, type(proposer.proposer)) == (memory, SmallModel)
    assert isinstance(environment, Perturbed)
    assert [p.kind for p in environment.perturbations] == list(TABLE), "all kinds, those unseen in training too"
    silent, _ = player(tmp_path / "data", bc, verifier, 3, memory, log_probs=False)()
    views = [situation(0), situation(1, calm=False)]
    for told, untold in zip(proposer.propose(views), silent.propose(views), strict=True):
        assert len(told) == 3
        assert [(c.action, c.verifier_score) for c in told] == [(c.action, c.verifier_score) for c in untold]
        assert all(c.token_logprobs for c in told)
        assert not any(c.token_logprobs for c in untold)
