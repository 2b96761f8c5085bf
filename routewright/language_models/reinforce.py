"""REINFORCE++ (arXiv 2501.03262, as in OpenRLHF), formula by formula. Tensors are (B, T) unless said; masks are boolean."""

from __future__ import annotations

import torch


def k1(log_p: torch.Tensor, log_ref: torch.Tensor) -> torch.Tensor:
    """k1 = log π − log π_ref. As a reward it penalises the KL; as a loss its expected gradient is zero."""
    return log_p - log_ref


def k2(log_p: torch.Tensor, log_ref: torch.Tensor) -> torch.Tensor:
    """k2 = ½ (log π − log π_ref)²; on samples of π its expected gradient is ∇KL(π‖ref)."""
    return 0.5 * (log_p - log_ref) ** 2


def k3(log_p: torch.Tensor, log_ref: torch.Tensor) -> torch.Tensor:
    """k3 = r − 1 − log r with r = π_ref/π; on samples of π its expected gradient is ∇KL(ref‖π)."""
    log_ratio = log_ref - log_p
    return torch.exp(log_ratio) - 1 - log_ratio


def token_rewards(reward: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, beta: float) -> torch.Tensor:
    """r_t = 1[t = last valid]·R − β·k1_t; `reward` (B,), no gradient passes through `kl`."""
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).max(dim=1).values
    at_last = (steps == last.unsqueeze(1)) & mask
    zero = torch.zeros_like(kl)
    return torch.where(at_last, reward.unsqueeze(1), zero) - beta * torch.where(mask, kl.detach(), zero)


def returns(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """G_t = Σ_{s ≥ t} r_s over valid tokens (γ = 1); 0 where masked."""
    kept = torch.where(mask, rewards, torch.zeros_like(rewards))
    return torch.where(mask, kept.flip(1).cumsum(1).flip(1), torch.zeros_like(rewards))


def subtract_group_mean(reward: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """R − mean of its group (no division by the std: that would be GRPO). ValueError for a group of one."""
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    if int(counts.min()) < 2:
        raise ValueError("a group of one sample has no baseline: sample at least two decisions a query")
    sums = torch.zeros(len(counts), dtype=reward.dtype, device=reward.device).index_add_(0, index, reward)
    return reward - (sums / counts)[index]


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Â = (G − μ)/√max(σ², 1e-8), μ and σ² (population) over all valid tokens of the global batch; 0 where masked."""
    kept = values[mask]
    variance = kept.var(correction=0).clamp(min=1e-8)
    return torch.where(mask, (values - kept.mean()) / variance.sqrt(), torch.zeros_like(values))


def clipped_loss(
    log_p: torch.Tensor, log_old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip: float, tokens: float
) -> torch.Tensor:
    """−Σ min(ρÂ, clip(ρ, 1−ε, 1+ε)Â) / tokens over valid tokens; `tokens` is the count of the whole (global) batch.

    Dividing by the global count makes the sum over micro-batches the mean over all tokens.
    """
    ratio = torch.exp(torch.where(mask, log_p - log_old, torch.zeros_like(log_p)))
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -torch.where(mask, surrogate, torch.zeros_like(surrogate)).sum() / tokens
