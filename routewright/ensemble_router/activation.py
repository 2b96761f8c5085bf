"""Which agents answer a query, and what the router learns from it (arXiv 2609.18779), formula by formula.

Exploration (UCB and entropy) changes the order only; how many agents fire is decided by raw familiarity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from routewright.errors import BadInput


def check_cut_off(agents: int, tau: float) -> None:
    """BadInput where there is nothing to route between, or no set of agents can reach τ (f ≤ 1 each)."""
    if agents < 2:
        raise BadInput(f"agents: expected at least two to route between, found {agents}")
    if not 0 < tau <= agents:
        raise BadInput(f"tau: expected more than 0 and at most the number of agents {agents}, found {tau:g}")


def rank_scores(
    f: np.ndarray, chosen: np.ndarray, entropy: np.ndarray, routed: int, c_ucb: float, w_ent: float
) -> np.ndarray:
    """s_i = f_i + c_ucb·√(log T/(n_i + 1)) + w_ent·H̄_i, (N,).

    ``f`` familiarity, ``chosen`` n_i the queries each agent has answered, ``entropy`` H̄_i its running mean of nats per
    generated token, ``routed`` T the queries routed, this one included (from 1). Inference: c_ucb = w_ent = 0.
    """
    if routed < 1:
        raise ValueError(f"T counts the routed queries from 1, found {routed}")
    return f + c_ucb * np.sqrt(math.log(routed) / (chosen + 1)) + w_ent * entropy


def activated(f: np.ndarray, scores: np.ndarray, tau: float) -> list[int]:
    """The smallest prefix, in falling order of s (ties: the lower number), with Σ f ≥ τ; all agents where it falls short.

    A sum within 1e-9 of τ has reached it.
    """
    order = np.argsort(-scores, kind="stable")
    reached = np.flatnonzero(np.cumsum(f[order]) >= tau - 1e-9)
    return [int(agent) for agent in (order if len(reached) == 0 else order[: reached[0] + 1])]


def gains(rewards: Sequence[float]) -> np.ndarray:
    """A_i = r̄_i − mean over the activated agents, of their mean rewards r̄; a lone agent has A = r̄."""
    r = np.asarray(rewards, dtype=float)
    return r.copy() if len(r) == 1 else r - r.mean()


def push_and_pull(d: torch.Tensor, gain: torch.Tensor, margin: float) -> torch.Tensor:
    """L_i = A_i·d_i where A_i ≥ 0 (pull towards the query), |A_i|·max(0, m − d_i) where A_i < 0 (push out to the margin).

    Element by element; `gain` carries no gradient. All rewards equal: all gains, hence loss and gradient, are 0.
    """
    return torch.where(gain >= 0, gain * d, -gain * (margin - d).clamp(min=0))


def router_loss(d: torch.Tensor, gain: torch.Tensor, active: torch.Tensor, margin: float) -> torch.Tensor:
    """Mean of `push_and_pull` over the activated agents of a batch: `d`, `gain` and the boolean `active` (B, N).

    The paper's L_router; agents that were not activated get no gradient. ValueError where nobody was.
    """
    if not active.any():
        raise ValueError("router_loss: expected at least one activated agent")
    zero = torch.zeros_like(d)
    return push_and_pull(torch.where(active, d, zero), torch.where(active, gain, zero), margin).sum() / active.sum()


def running_mean(mean: float, count: int, value: float) -> float:
    """The mean after one more value, `count` before it; H̄_i of an agent is kept so, over its generated tokens."""
    return mean + (value - mean) / (count + 1)
