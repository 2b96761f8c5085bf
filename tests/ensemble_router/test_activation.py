"""Order, cut-off, gains and the router's loss against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from routewright.ensemble_router.activation import (
    activated,
    check_cut_off,
    gains,
    push_and_pull,
    rank_scores,
    router_loss,
    running_mean,
)
from routewright.ensemble_router.familiarity import familiarity
from routewright.errors import BadInput


def test_rank_scores_by_hand() -> None:
    """T = e²: √(2/1) and √(2/2) of agents that answered 0 and 1 queries; f 0.1 and 0.3; H̄ 0.5 and 0."""
    f, n, h = np.array([0.1, 0.3]), np.array([0, 1]), np.array([0.5, 0.0])
    routed = 7  # log 7 = 1.9459
    found = rank_scores(f, n, h, routed, c_ucb=2, w_ent=2)
    assert found == pytest.approx([0.1 + 2 * math.sqrt(1.945910) + 1.0, 0.3 + 2 * math.sqrt(1.945910 / 2)], abs=1e-6)
    assert rank_scores(f, n, h, 1, 2, 2) == pytest.approx([1.1, 0.3])  # log 1 = 0: no UCB at the first query
    assert rank_scores(f, n, h, 100, 0, 0).tolist() == f.tolist()  # inference
    with pytest.raises(ValueError, match="from 1"):
        rank_scores(f, n, h, 0, 2, 2)


def test_the_cut_off_counts_raw_familiarity_in_the_order_of_the_scores() -> None:
    """Order by s: agents 2, 0, 1. Σ f = 0.1, 0.6 (short of 0.7), 0.9."""
    f, s = np.array([0.5, 0.3, 0.1]), np.array([2.0, 1.0, 3.0])
    assert activated(f, s, 0.7) == [2, 0, 1]
    assert activated(f, s, 0.6) == [2, 0]
    assert activated(f, s, 0.05) == [2]
    assert activated(f, f, 0.7) == [0, 1]  # inference: fewest agents
    assert activated(f, f, 2.0) == [0, 1, 2]  # the sum falls short: everybody
    assert activated(np.array([0.2, 0.2]), np.array([1.0, 1.0]), 0.1) == [0]
    assert activated(np.array([0.1, 0.2]), np.array([2.0, 1.0]), 0.3) == [0, 1]  # 0.1 + 0.2 ≥ 0.3 despite rounding


def test_sanity_values_of_the_paper() -> None:
    """λ 2, τ 0.7: unrelated heads have f = exp(−2√2) = 0.0591, so four all fire; a lone agent needs d ≤ 0.178."""
    f = familiarity(torch.tensor([math.sqrt(2)] * 4, dtype=torch.float64), 2.0).numpy()
    assert f == pytest.approx([0.0591] * 4, abs=5e-5)
    assert activated(f, f, 0.7) == [0, 1, 2, 3]
    limit = -math.log(0.7) / 2
    assert limit == pytest.approx(0.178, abs=5e-4)
    for d, count in ((0.178, 1), (0.179, 4)):
        f = familiarity(torch.tensor([d, 1.5, 1.5, 1.5], dtype=torch.float64), 2.0).numpy()
        assert len(activated(f, f, 0.7)) == (1 if count == 1 else 2)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1.0, 0.5, 0.0], [0.5, 0.0, -0.5]), ([0.25], [0.25]), ([0.0], [0.0]), ([0.6, 0.6], [0.0, 0.0])],
)
def test_gains_by_hand(rewards: list[float], expected: list[float]) -> None:
    assert gains(rewards).tolist() == pytest.approx(expected)


def test_push_and_pull_by_hand() -> None:
    """A = 0.5 at d 1.2: 0.6. A = −0.5 at d 0.4: 0.5·0.6 = 0.3; beyond the margin 1: 0."""
    d = torch.tensor([1.2, 0.4, 1.3], requires_grad=True)
    loss = push_and_pull(d, torch.tensor([0.5, -0.5, -0.5]), 1.0)
    assert loss.tolist() == pytest.approx([0.6, 0.3, 0.0])
    loss.sum().backward()
    assert d.grad is not None
    assert d.grad.tolist() == pytest.approx([0.5, -0.5, 0.0])  # pulled nearer, pushed away, left alone


def test_router_loss_counts_activated_agents_only() -> None:
    d = torch.tensor([[1.2, 0.4, 0.1], [0.9, 0.2, 0.3]], requires_grad=True)
    gain = torch.tensor([[0.5, -0.5, 9.0], [9.0, 0.2, 9.0]])
    active = torch.tensor([[True, True, False], [False, True, False]])
    loss = router_loss(d, gain, active, 1.0)
    assert loss.item() == pytest.approx((0.6 + 0.3 + 0.04) / 3)
    loss.backward()
    assert d.grad is not None
    assert (d.grad[~active] == 0).all()
    assert (d.grad[active] != 0).all()
    with pytest.raises(ValueError, match="at least one"):
        router_loss(d, gain, torch.zeros_like(active), 1.0)


def test_equal_rewards_teach_nothing() -> None:
    d = torch.tensor([[0.3, 0.6, 1.4]], requires_grad=True)
    gain = torch.tensor(gains([0.4, 0.4, 0.4]), dtype=torch.float32)[None]
    loss = router_loss(d, gain, torch.ones(1, 3, dtype=torch.bool), 1.0)
    loss.backward()
    assert d.grad is not None
    assert loss.item() == pytest.approx(0.0, abs=1e-7)
    assert d.grad.abs().max().item() == pytest.approx(0.0, abs=1e-7)


def test_running_mean() -> None:
    mean = 0.0
    for count, value in enumerate([1.0, 2.0, 6.0]):
        mean = running_mean(mean, count, value)
    assert mean == pytest.approx(3.0)


def test_what_cannot_be_routed() -> None:
    check_cut_off(4, 0.7)
    with pytest.raises(BadInput, match="at least two to route between, found 1"):
        check_cut_off(1, 0.7)
    with pytest.raises(BadInput, match=r"tau: expected more than 0 and at most the number of agents 4, found 4\.5"):
        check_cut_off(4, 4.5)
    with pytest.raises(BadInput, match="found nan"):
        check_cut_off(4, math.nan)
