"""What an agent learns from its samples: DAPO (arXiv 2503.14476), GSPO (arXiv 2507.18071) and the paper's mix of both.

DAPO alone: ratio "token", normaliser "tokens". GSPO alone: "sequence" and "sequences", ε of 3e-4 and 4e-4. The mix of
arXiv 2609.18779: "sequence" and "tokens"; its ε = 0.2 hardly ever clips a ratio that is a geometric mean over tokens.
In the terms of TRL's GRPOConfig, whose loss is the same number on the same tokens: DAPO alone is loss_type "dapo" with
importance_sampling_level "token", GSPO alone "grpo" with "sequence", the mix "dapo" with "sequence"; "bnpo" and "dr_grpo"
are "tokens" with the micro-batch's, or B·max_completion_length, for `tokens`. The KL is that of use_bias_correction_kl off
(TRL 1.16 by default weights it by the ratio); TRL's advantages divide by the sample std + 1e-4.
Tensors are (B, T) unless said; masks are boolean, true for completion tokens, the end of sequence included.
"""

from __future__ import annotations

from typing import Literal

import torch

from routewright.language_models.reinforce import k3

Ratio = Literal["token", "sequence"]
Normaliser = Literal["tokens", "sequences"]


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Â = (r − mean)/std of its group (population std); `rewards` (P, G). A group of equal rewards has Â = 0.

    ValueError for groups of one sample.
    """
    if rewards.shape[1] < 2:
        raise ValueError("a group of one sample has no baseline: sample at least two completions a prompt")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = centred.square().mean(dim=1, keepdim=True).sqrt()
    return torch.where(std > 1e-6, centred / std.clamp(min=1e-6), torch.zeros_like(centred))


def telling_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups (P,) have rewards that differ: DAPO's dynamic sampling drops the others and draws new prompts."""
    return rewards.amax(dim=1) - rewards.amin(dim=1) > 1e-6


def overlong_penalty(lengths: torch.Tensor, longest: int, buffer: int) -> torch.Tensor:
    """DAPO's soft penalty, added to the reward: 0 up to L − c tokens, then falling linearly to −1 at L = `longest`.

    R = ((L − c) − |y|)/c for L − c < |y| ≤ L; −1 beyond. ``buffer`` c in 1 … L.
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"buffer: expected 1 to {longest}, found {buffer}")
    return ((longest - buffer - lengths) / buffer).clamp(min=-1.0, max=0.0)


def token_ratio(log_p: torch.Tensor, log_old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """ρ = π/π_old of each token, 1 where masked."""
    return torch.exp(torch.where(mask, log_p - log_old, torch.zeros_like(log_p)))


def sequence_ratio(log_p: torch.Tensor, log_old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """s_i = exp(Σ_t m·log ρ / |y_i|), (B, 1): GSPO's length-normalised sequence ratio (equation 7)."""
    log_ratio = torch.where(mask, log_p - log_old, torch.zeros_like(log_p))
    return torch.exp(log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1))


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(ρÂ, clip(ρ, 1 − ε_low, 1 + ε_high)·Â); `ratio` (B, T) or (B, 1), `advantages` (B, 1)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def policy_loss(
    log_p: torch.Tensor,
    log_old: torch.Tensor,
    log_ref: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    tokens: int,
    sequences: int,
    ratio: Ratio = "sequence",
    normaliser: Normaliser = "tokens",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 1e-4,
) -> torch.Tensor:
    """−Σ_i Σ_t m·(min(ρÂ, clip(ρ)Â) − β·k3(π, π_ref)) · w_i, with w = 1/`tokens` or 1/(|y_i|·`sequences`).

    ``advantages`` (B,). ``tokens`` and ``sequences`` count the active tokens and samples of the whole accumulated batch, so
    that micro-batches of any size add up to the same gradient.
    """
    rho = token_ratio(log_p, log_old, mask) if ratio == "token" else sequence_ratio(log_p, log_old, mask)
    surrogate = clipped_surrogate(rho, advantages[:, None], clip_low, clip_high)
    kept = torch.where(mask, log_p, torch.zeros_like(log_p))
    kl = k3(kept, torch.where(mask, log_ref, torch.zeros_like(log_ref)))
    gain = torch.where(mask, surrogate - beta * kl, torch.zeros_like(log_p))
    if normaliser == "tokens":
        return -gain.sum() / max(1, tokens)
    return -(gain.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / max(1, sequences)
