"""DAPO and GSPO by hand, and what must not change them: padding, accumulation, equal rewards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from routewright.ensemble_router.policy_loss import (
    clipped_surrogate,
    group_advantages,
    overlong_penalty,
    policy_loss,
    sequence_ratio,
    telling_groups,
    token_ratio,
)

MASK = torch.tensor([[True, True, True], [True, False, False]])


def batch(seed: int = 0, rows: int = 6, length: int = 5) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (rows,), generator=g)
    mask = torch.arange(length) < lengths[:, None]
    log_p = torch.randn(rows, length, generator=g).double() * 0.3 - 1
    return {
        "log_p": log_p, "log_old": log_p + torch.randn(rows, length, generator=g) * 0.2,
        "log_ref": log_p + torch.randn(rows, length, generator=g) * 0.2,
        "advantages": torch.randn(rows, generator=g).double(), "mask": mask,
    }  # fmt: skip


def test_group_advantages_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean ½, std ½. 1, 0, 0, 0: mean ¼, std √3/4, Â = √3 and −1/√3."""
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3]]))
    assert found[0].tolist() == pytest.approx([1, -1, -1, 1])
    assert found[1].tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)
    assert found[2].tolist() == [0, 0, 0, 0]  # all rewards equal
    with pytest.raises(ValueError, match="a group of one"):
        group_advantages(torch.ones(3, 1))


def test_groups_without_variance_are_dropped() -> None:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert telling_groups(rewards).tolist() == [False, True, False]


def test_overlong_penalty_by_hand() -> None:
    """L = 20, c = 4: nothing up to 16, −¼ at 17, −1 at 20 and beyond."""
    assert overlong_penalty(torch.tensor([3, 16, 17, 18, 20, 25]), 20, 4).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ValueError, match="expected 1 to 20, found 0"):
        overlong_penalty(torch.tensor([3]), 20, 0)


def test_ratios_by_hand() -> None:
    """log ρ = 0.3, −0.1, 0.1: s = e^0.1. One token of 0.2: s = e^0.2, its padding not counted."""
    old = torch.zeros(2, 3)
    log_p = torch.tensor([[0.3, -0.1, 0.1], [0.2, 9.0, math.nan]])
    assert sequence_ratio(log_p, old, MASK)[:, 0].tolist() == pytest.approx([math.exp(0.1), math.exp(0.2)])
    found = token_ratio(log_p, old, MASK)
    assert found[0].tolist() == pytest.approx([math.exp(0.3), math.exp(-0.1), math.exp(0.1)])
    assert found[1].tolist() == pytest.approx([math.exp(0.2), 1.0, 1.0])


def test_clip_by_hand() -> None:
    """ε_low 0.2, ε_high 0.28: Â > 0 is held at 1.28, Â < 0 at 0.8; the other sides pass."""
    ratio = torch.tensor([[1.5], [0.5], [1.5], [0.5]])
    advantages = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    found = clipped_surrogate(ratio, advantages, 0.2, 0.28)
    assert found[:, 0].tolist() == pytest.approx([1.28, 0.5, -1.5, -0.8])


def test_loss_by_hand() -> None:
    """ρ = 1, Â = 2 and −1, 3 and 1 tokens, no KL. Over 4 tokens: −(3·2 − 1)/4; over 2 sequences: −(2 − 1)/2."""
    log_p = torch.full((2, 3), -1.0)
    arguments = {"advantages": torch.tensor([2.0, -1.0]), "mask": MASK, "tokens": 4, "sequences": 2, "beta": 0.0}
    assert policy_loss(log_p, log_p, log_p, **arguments).item() == pytest.approx(-1.25)
    assert policy_loss(log_p, log_p, log_p, **arguments, normaliser="sequences").item() == pytest.approx(-0.5)
    # k3 with log(π_ref/π) = 0.5 at every one of 4 tokens: e^½ − 1 − ½
    arguments |= {"advantages": torch.zeros(2), "beta": 0.1}
    assert policy_loss(log_p, log_p, log_p + 0.5, **arguments).item() == pytest.approx(0.1 * (math.exp(0.5) - 1.5))


def test_the_gradient_of_a_sequence_ratio_is_shared_by_its_tokens() -> None:
    """∂s/∂log p_t = s/|y|; with 3 tokens of the same s summed: Â·s a sequence, /tokens."""
    log_p = torch.full((2, 3), -1.0, requires_grad=True)
    arguments = {"advantages": torch.tensor([2.0, -1.0]), "mask": MASK, "tokens": 4, "sequences": 2, "beta": 0.0}
    policy_loss(log_p, log_p.detach(), log_p.detach(), **arguments).backward()
    assert log_p.grad is not None
    assert log_p.grad[0].tolist() == pytest.approx([-2 / 4] * 3)
    assert log_p.grad[1].tolist() == pytest.approx([1 / 4, 0, 0])


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("normaliser", ["tokens", "sequences"])
def test_padding_and_accumulation_change_nothing(ratio: Any, normaliser: Any) -> None:
    whole = batch()
    counts = {"tokens": int(whole["mask"].sum()), "sequences": 6, "beta": 0.05, "ratio": ratio, "normaliser": normaliser}
    expected = policy_loss(**whole, **counts).item()
    padded = {key: value if key == "advantages" else torch.nn.functional.pad(value, (0, 3)) for key, value in whole.items()}
    padded["log_ref"][:, 5:] = math.nan
    padded["log_p"][:, 5:] = 50.0
    assert policy_loss(**padded, **counts).item() == pytest.approx(expected)
    parts = [{key: value[rows] for key, value in whole.items()} for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert sum(policy_loss(**part, **counts).item() for part in parts) == pytest.approx(expected)


def test_equal_rewards_leave_the_agent_as_it_is() -> None:
    some = batch()
    log_p = some["log_p"].clone().requires_grad_(True)
    some["advantages"] = group_advantages(torch.full((2, 3), 0.7)).double().flatten()
    loss = policy_loss(**{**some, "log_p": log_p}, tokens=10, sequences=6, beta=0.0)
    loss.backward()
    assert loss.item() == 0.0
    assert log_p.grad is not None
    assert log_p.grad.abs().max().item() == 0.0
