"""The process verifier: its loss by hand, what it compares, and that it learns to rank."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import ACTIONS, history, made_states, save_policy, tiny_policy, tiny_profile, write_states

from routewright.errors import BadInput
from routewright.step_router.policy import SmallModel, load_verifier, pack
from routewright.step_router.verifier import (
    bradley_terry_loss,
    chosen_states,
    last_columns,
    train_verifier,
    verifier_actions,
)


def test_bradley_terry_loss_by_hand() -> None:
    """−log σ(1) = ln(1 + e⁻¹), −log σ(−1) = ln(1 + e), −log σ(0) = ln 2."""
    rewards = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.5, 9.0]])
    present = torch.tensor([[True, True, True], [True, True, False]])
    expected = ((log(1 + exp(-1)) + log(1 + exp(1))) / 2 + log(2)) / 2
    assert bradley_terry_loss(rewards, present).item() == pytest.approx(expected)
    assert bradley_terry_loss(rewards[1:], present[1:]).item() == pytest.approx(log(2)), "what is absent does not count"
    assert bradley_terry_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([[True, True]])).item() == pytest.approx(
        log(1 + exp(-3))
    )


def test_the_loss_raises_the_preferred_and_lowers_the_others() -> None:
    rewards = torch.zeros((2, 3), requires_grad=True)
    bradley_terry_loss(rewards, torch.tensor([[True, True, True], [True, True, False]])).backward()
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [pytest.approx([-0.25, 0.125, 0.125]), pytest.approx([-0.25, 0.25, 0])]


def test_last_columns_by_hand() -> None:
    packed = pack([[7], [8, 9], [5]], [[[3, 1], [4, 5, 1]], [[6, 1]], [[2, 2, 2, 1], [1], [3, 1]]], 0)
    assert last_columns(packed).tolist() == [[1, 4, -1], [1, -1, -1], [3, 4, 6]]


def test_states_without_an_alternative_are_left_out() -> None:
    policy = tiny_policy(scale=0.12)
    states = made_states(4)
    lonely = replace(states[1].situation.observation, admissible=(f" {states[1].teacher} ",))
    states[1] = replace(states[1], situation=replace(states[1].situation, observation=lonely))
    unlisted = replace(states[2], teacher="open the hatch")
    found = verifier_actions([states[0], states[1], unlisted], SmallModel(policy, None, 8))
    assert found[0][0] == states[0].teacher
    assert sorted(found[0]) == sorted(ACTIONS), "the teacher's action once"
    assert found[1] == []
    assert found[2][0] == "open the hatch"
    assert sorted(found[2][1:]) == sorted(ACTIONS)
    (few,) = verifier_actions([states[3]], SmallModel(policy, None, 2))
    assert few[0] == states[3].teacher
    assert len(few) in (2, 3), "the policy's two candidates, with the teacher's action among them or not"


def test_states_are_drawn_by_the_seed(tmp_path: Path) -> None:
    states = made_states(30)
    examples = write_states([*states, states[0]], tmp_path)
    assert chosen_states(examples, 50, 0) == states, "different ones, all where there are fewer"
    some = chosen_states(examples, 10, 0)
    assert len(set(some)) == 10
    assert some == [state for state in states if state in some], "in their order"
    assert some == chosen_states(examples, 10, 0)
    assert some != chosen_states(examples, 10, 1)


@pytest.fixture(scope="module")
def bc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("bc"))


def train(bc: Path, out: Path, made: int, **section: Any) -> Path:
    profile = tiny_profile(verifier={"batch_size": 16, "lr": 3e-3} | section)
    train_verifier(Path("unused"), write_states(made_states(made), out / "examples"), bc, out / "v", profile, 0)
    return out / "v"


def test_it_learns_to_rank_the_teacher_first(bc: Path, tmp_path: Path) -> None:
    out = train(bc, tmp_path, 64, states=64, epochs=8)
    rows = history(out)
    assert len(rows) == 32
    early, late = (sum(row["accuracy"] for row in some) / 4 for some in (rows[:4], rows[-4:]))
    assert late > early + 0.2
    assert late > 0.8
    judge = load_verifier(out)
    fresh = made_states(80)[64:]
    scores = judge.scores(
        [s.situation for s in fresh], [[s.teacher, *(a for a in ACTIONS if a != s.teacher)] for s in fresh]
    )
    assert sum(max(some) == some[0] for some in scores) >= 12
    assert all(0 <= score <= 1 for some in scores for score in some)
    assert not (out / "checkpoints").exists()


def test_lora_is_merged_with_the_score(bc: Path, tmp_path: Path) -> None:
    out = train(bc, tmp_path, 16, states=16, epochs=3, lora={"r": 4, "alpha": 8})
    weights, base = load_file(out / "model.safetensors"), load_file(bc / "model.safetensors")
    assert set(weights) == {*base, "score.weight"}
    assert not list(out.glob("adapter*"))
    assert any(not torch.equal(weights[name], base[name]) for name in base)
    load_verifier(out)


def test_nothing_to_compare_is_refused(bc: Path, tmp_path: Path) -> None:
    states = [
        replace(s, situation=replace(s.situation, observation=replace(s.situation.observation, admissible=(s.teacher,))))
        for s in made_states(4)
    ]
    examples = write_states(states, tmp_path / "examples")
    with pytest.raises(BadInput, match="the policy proposes nothing but the teacher's action"):
        train_verifier(Path("unused"), examples, bc, tmp_path / "out", tiny_profile(), 0)
