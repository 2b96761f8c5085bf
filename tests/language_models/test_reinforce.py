"""REINFORCE++ against hand-worked numbers, an independent slow implementation, and exact enumeration of small policies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from routewright.language_models.reinforce import (
    clipped_loss,
    k1,
    k2,
    k3,
    returns,
    subtract_group_mean,
    token_rewards,
    whiten,
)

NAN = float("nan")


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def ragged(seed: int, rows: int = 5, width: int = 6) -> dict[str, torch.Tensor]:
    """Random log-probabilities and a mask of prefixes, the first of them full and no row empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    return {
        "log_p": -torch.rand(rows, width, generator=generator) * 3,
        "log_old": -torch.rand(rows, width, generator=generator) * 3,
        "log_ref": -torch.rand(rows, width, generator=generator) * 3,
        "reward": torch.randn(rows, generator=generator),
        "mask": torch.arange(width) < lengths.unsqueeze(1),
    }


# --- An implementation of its own: python floats, one token at a time.


def slow_advantages(reward: list[float], kl: list[list[float]], mask: list[list[bool]], beta: float) -> list[list[float]]:
    gains = []
    for row, (r, k, m) in enumerate(zip(reward, kl, mask, strict=True)):
        valid = [t for t in range(len(m)) if m[t]]
        for t in valid:
            after = [s for s in valid if s >= t]
            gains.append((row, t, sum((r if s == valid[-1] else 0.0) - beta * k[s] for s in after)))
    mean = sum(g for _, _, g in gains) / len(gains)
    variance = sum((g - mean) ** 2 for _, _, g in gains) / len(gains)
    out = [[0.0] * len(m) for m in mask]
    for row, t, g in gains:
        out[row][t] = (g - mean) / math.sqrt(max(variance, 1e-8))
    return out


def slow_loss(p: list, old: list, advantage: list, mask: list, clip: float) -> float:
    terms = []
    for row in range(len(mask)):
        for t in range(len(mask[row])):
            if mask[row][t]:
                ratio = math.exp(p[row][t] - old[row][t])
                clipped = min(max(ratio, 1 - clip), 1 + clip)
                terms.append(min(ratio * advantage[row][t], clipped * advantage[row][t]))
    return -sum(terms) / len(terms)


# --- Numbers worked by hand


def test_the_three_estimators_by_hand() -> None:
    log_p, log_ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(log_p, log_ref).item() == pytest.approx(math.log(2))
    assert k2(log_p, log_ref).item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert k3(log_p, log_ref).item() == pytest.approx(0.5 - 1 + math.log(2))


def test_token_rewards_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False], [False, True, True]])
    kl = torch.tensor([[0.1, 0.2, 0.3], [1.0, -1.0, 99.0], [99.0, 0.5, 0.0]])
    found = token_rewards(torch.tensor([1.0, 2.0, -3.0]), kl, mask, beta=0.5)
    expected = torch.tensor([[-0.05, -0.1, 1 - 0.15], [-0.5, 2 + 0.5, 0.0], [0.0, -0.25, -3.0]])
    torch.testing.assert_close(found, expected)


def test_the_reward_of_a_hole_in_the_mask_goes_to_the_last_valid_token() -> None:
    """A query's slots have holes: keyword candidates that only other queries of the batch have."""
    mask = torch.tensor([[True, False, True, False, True], [True, True, False, False, False]])
    found = token_rewards(torch.tensor([1.0, 2.0]), torch.zeros(2, 5), mask, beta=1.0)
    assert found.tolist() == [[0, 0, 0, 0, 1], [0, 2, 0, 0, 0]]
    assert returns(found, mask).tolist() == [[1, 0, 1, 0, 1], [2, 2, 0, 0, 0]]


def test_no_gradient_passes_through_the_kl_reward() -> None:
    kl = torch.tensor([[0.1, 0.2]], requires_grad=True)
    assert not token_rewards(torch.tensor([1.0]), kl, torch.ones(1, 2, dtype=torch.bool), 0.5).requires_grad


def test_returns_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    found = returns(torch.tensor([[1.0, 2.0, 3.0], [1.0, -2.0, 50.0]]), mask)
    assert found.tolist() == [[6, 5, 3], [-1, -2, 0]]


def test_whiten_by_hand() -> None:
    """Values 1, 2, 3, 6: mean 3, population variance 14 / 4 (the sample variance would be 14 / 3)."""
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    found = whiten(torch.tensor([[1.0, 2.0], [3.0, 6.0], [100.0, 7.0]]), mask)
    scale = math.sqrt(3.5)
    torch.testing.assert_close(found, torch.tensor([[-2 / scale, -1 / scale], [0.0, 3 / scale], [0.0, 0.0]]))


def test_clipped_loss_by_hand() -> None:
    """Ratios 2 and 0.5 at ε = 0.2, advantages of both signs: min(2, 1.2), min(-2, -1.2), min(0.5, 0.8), min(-0.5, -0.8)."""
    log_p = torch.log(torch.tensor([[2.0, 2.0, 0.5, 0.5]]))
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss = clipped_loss(log_p, torch.zeros(1, 4), advantages, torch.ones(1, 4, dtype=torch.bool), 0.2, tokens=4)
    assert loss.item() == pytest.approx(-(1.2 - 2 + 0.5 - 0.8) / 4)


def test_group_means_by_hand() -> None:
    reward = torch.tensor([1.0, 10.0, 3.0, 20.0, 5.0])
    assert subtract_group_mean(reward, torch.tensor([7, 2, 7, 2, 7])).tolist() == [-2, -5, 0, 5, 2]


def test_a_group_of_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="group of one"):
        subtract_group_mean(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]))


# --- Against the slow implementation


@given(seed=st.integers(0, 10_000), beta=st.sampled_from([0.0, 0.15, 2.0]), clip=st.sampled_from([0.05, 0.2]))
@settings(max_examples=50, deadline=None)
def test_all_of_it_equals_a_slow_implementation(seed: int, beta: float, clip: float) -> None:
    torch.set_default_dtype(torch.float64)
    x = ragged(seed)
    kl = k1(x["log_old"], x["log_ref"])
    advantages = whiten(returns(token_rewards(x["reward"], kl, x["mask"], beta), x["mask"]), x["mask"])
    slow = slow_advantages(x["reward"].tolist(), kl.tolist(), x["mask"].tolist(), beta)
    np.testing.assert_allclose(advantages.numpy(), slow, rtol=1e-9, atol=1e-9)
    loss = clipped_loss(x["log_p"], x["log_old"], advantages, x["mask"], clip, float(x["mask"].sum()))
    expected = slow_loss(x["log_p"].tolist(), x["log_old"].tolist(), slow, x["mask"].tolist(), clip)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


# --- What must hold


def test_equal_rewards_without_kl_give_finite_zeros() -> None:
    x = ragged(1)
    log_p = x["log_p"].clone().requires_grad_()
    rewards = token_rewards(torch.full((5,), 0.7), k1(x["log_old"], x["log_ref"]), x["mask"], beta=0.0)
    advantages = whiten(returns(rewards, x["mask"]), x["mask"])
    assert torch.isfinite(advantages).all()
    torch.testing.assert_close(advantages, torch.zeros_like(advantages), atol=1e-9, rtol=0)
    clipped_loss(log_p, x["log_old"], advantages, x["mask"], 0.2, float(x["mask"].sum())).backward()
    assert log_p.grad.abs().max().item() < 1e-9


def test_no_reward_but_a_kl_gives_a_gradient() -> None:
    x = ragged(2)
    log_p = x["log_old"].clone().requires_grad_()
    rewards = token_rewards(torch.zeros(5), k1(x["log_old"], x["log_ref"]), x["mask"], beta=0.1)
    advantages = whiten(returns(rewards, x["mask"]), x["mask"])
    clipped_loss(log_p, x["log_old"], advantages, x["mask"], 0.2, float(x["mask"].sum())).backward()
    assert log_p.grad.abs().max().item() > 1e-3
    assert (log_p.grad[~x["mask"]] == 0).all()


def test_nan_where_masked_does_not_leak() -> None:
    x = ragged(3)
    masked = ~x["mask"]
    assert masked.any()

    def loss_and_gradient(fill: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        filled = {name: torch.where(masked, torch.tensor(fill), x[name]) for name in ("log_p", "log_old", "log_ref")}
        log_p = filled["log_p"].requires_grad_()
        kl = k1(filled["log_old"], filled["log_ref"])
        rewards = token_rewards(x["reward"], kl, x["mask"], 0.15)
        advantages = whiten(returns(torch.where(masked, torch.tensor(fill), rewards), x["mask"]), x["mask"])
        loss = clipped_loss(log_p, filled["log_old"], advantages, x["mask"], 0.2, float(x["mask"].sum()))
        loss.backward()
        return loss.detach(), log_p.grad, advantages

    for clean, dirty in zip(loss_and_gradient(0.0), loss_and_gradient(NAN), strict=True):
        assert torch.isfinite(dirty).all()
        torch.testing.assert_close(clean, dirty)


def test_padding_changes_nothing() -> None:
    x = ragged(4)
    kl = k1(x["log_old"], x["log_ref"])

    def loss(padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        pad = [torch.nn.functional.pad(t, (0, padding), value=-5.0) for t in (x["log_p"], x["log_old"], kl)]
        mask = torch.nn.functional.pad(x["mask"], (0, padding), value=False)
        advantages = whiten(returns(token_rewards(x["reward"], pad[2], mask, 0.15), mask), mask)
        return clipped_loss(pad[0], pad[1], advantages, mask, 0.2, float(mask.sum())), advantages[:, :6]

    for short, long in zip(loss(0), loss(7), strict=True):
        torch.testing.assert_close(short, long)


@pytest.mark.parametrize("parts", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_micro_batches_add_up_to_the_whole(parts: list[int]) -> None:
    """Sharding and gradient accumulation: the sums over parts, each over the global token count, are loss and gradient."""
    x = ragged(5)
    advantages = whiten(returns(token_rewards(x["reward"], k1(x["log_old"], x["log_ref"]), x["mask"], 0.15), x["mask"]),
                        x["mask"])  # fmt: skip
    tokens = float(x["mask"].sum())
    whole = x["log_p"].clone().requires_grad_()
    expected = clipped_loss(whole, x["log_old"], advantages, x["mask"], 0.2, tokens)
    expected.backward()
    sharded = x["log_p"].clone().requires_grad_()
    total = torch.zeros(())
    for rows in torch.arange(5).split(parts):
        loss = clipped_loss(sharded[rows], x["log_old"][rows], advantages[rows], x["mask"][rows], 0.2, tokens)
        loss.backward()  # accumulates into sharded.grad
        total += loss.detach()
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(sharded.grad, whole.grad)
    means = []
    for rows in torch.arange(5).split(parts):
        own = float(x["mask"][rows].sum())
        means.append(clipped_loss(x["log_p"][rows], x["log_old"][rows], advantages[rows], x["mask"][rows], 0.2, own))
    if len(parts) > 1:  # the mean of micro-batch means is something else: the parts have different token counts
        assert abs(torch.stack(means).mean().item() - expected.item()) > 1e-6


def test_it_is_not_grpo() -> None:
    """Dividing by a group's std would undo a change of scale of that group's rewards; here it shows."""
    groups, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4, 1, dtype=torch.bool)

    def advantages(scale: float) -> torch.Tensor:
        reward = subtract_group_mean(torch.tensor([scale * 1.0, scale * 3.0, 2.0, 4.0]), groups)
        return whiten(returns(token_rewards(reward, torch.zeros(4, 1), mask, 0.0), mask), mask).squeeze(1)

    torch.testing.assert_close(advantages(1.0), torch.tensor([-1.0, 1.0, -1.0, 1.0]))
    ten = advantages(10.0)
    assert ten[1].item() == pytest.approx(10 / math.sqrt(50.5))
    assert ten[3].item() == pytest.approx(1 / math.sqrt(50.5))


# --- Expected gradients, by enumeration


def categorical(parameters: torch.Tensor) -> torch.Tensor:
    """log P of each of the outcomes."""
    return torch.log_softmax(parameters, dim=0)


def bernoulli_vector(parameters: torch.Tensor) -> torch.Tensor:
    """log P of each of the 2^n bit vectors, the policy of the router: a sum over bits."""
    bits = torch.tensor(list(itertools.product([0.0, 1.0], repeat=len(parameters))))
    return -torch.nn.functional.softplus(torch.where(bits > 0, -parameters, parameters)).sum(1)


@pytest.mark.parametrize("policy", [categorical, bernoulli_vector])
def test_expected_gradients_of_the_estimators(policy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """E∇k1 = 0, E∇k2 = ∇KL(π‖ref), E∇k3 = ∇KL(ref‖π), under samples of π that carry no gradient."""
    reference = policy(torch.tensor([0.1, 0.4, -0.7, 0.2]))
    start = torch.tensor([0.5, -1.0, 0.3, 0.9])

    def gradient(loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        parameters = start.clone().requires_grad_()
        loss(policy(parameters)).backward()
        return parameters.grad

    def expectation(estimator: Callable[..., torch.Tensor]) -> torch.Tensor:
        return gradient(lambda log_p: (log_p.detach().exp() * estimator(log_p, reference)).sum())

    reverse = gradient(lambda log_p: (log_p.exp() * (log_p - reference)).sum())
    forward = gradient(lambda log_p: (reference.exp() * (reference - log_p)).sum())
    assert reverse.abs().max() > 0.05
    assert (reverse - forward).abs().max() > 0.01
    torch.testing.assert_close(expectation(k1), torch.zeros(4), atol=1e-12, rtol=0)
    torch.testing.assert_close(expectation(k2), reverse)
    torch.testing.assert_close(expectation(k3), forward)


def test_k1_as_a_reward_is_the_gradient_of_the_kl() -> None:
    """What k1 cannot do as a loss it does as a reward: E[k1 ∇ log π] = ∇KL(π‖ref)."""
    reference = categorical(torch.tensor([0.1, 0.4, -0.7]))
    parameters = torch.tensor([0.5, -1.0, 0.3], requires_grad=True)
    log_p = categorical(parameters)
    kl = (log_p.exp() * (log_p - reference)).sum()
    (expected,) = torch.autograd.grad(kl, parameters, retain_graph=True)
    mask = torch.ones(3, 1, dtype=torch.bool)
    rewards = token_rewards(torch.zeros(3), k1(log_p, reference).unsqueeze(1), mask, beta=1.0)
    weighted = (log_p.detach().exp() * -returns(rewards, mask).squeeze(1) * log_p).sum()
    (found,) = torch.autograd.grad(weighted, parameters)
    torch.testing.assert_close(found, expected)


def test_on_policy_the_loss_is_the_policy_gradient() -> None:
    """At ρ = 1 the gradient of the clipped loss is −mean(Â ∇ log π)."""
    x = ragged(6)
    advantages = torch.where(x["mask"], torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(5, 6))
    log_p = x["log_old"].clone().requires_grad_()
    tokens = float(x["mask"].sum())
    clipped_loss(log_p, x["log_old"], advantages, x["mask"], 0.2, tokens).backward()
    torch.testing.assert_close(log_p.grad, -advantages / tokens)
