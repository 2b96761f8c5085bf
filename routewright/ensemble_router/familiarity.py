"""Familiarity of each agent with a query (arXiv 2609.18779): how well its head predicts a frozen random target.

    h(q) = [hidden_states[⌊L/2⌋]; hidden_states[⌊3L/4⌋]] of the frozen backbone at the query's last token
    head: LayerNorm → Linear(2H, 512) → SiLU → Linear(512, 256), a trained g_i and a frozen orthogonal ḡ_i per agent
    d_i = ‖g_i/‖g_i‖ − ḡ_i/‖ḡ_i‖‖₂,  f_i = exp(−λ·d_i)

Heads that share nothing give d ≈ √2: random directions in 256 dimensions are nearly orthogonal.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from routewright.described_weights import fill, read_described, save_described
from routewright.errors import BadInput

INNER, OUT = 512, 256
DESCRIPTION, WEIGHTS = "familiarity.json", "familiarity.safetensors"


def query_states(
    backbone: Any, tokens: torch.Tensor, mask: torch.Tensor, layers: Callable[[int], tuple[int, ...]] | None = None
) -> torch.Tensor:
    """h(q) of each row, float32 (B, 2H), from one pass without gradient; `tokens` and `mask` (B, L), padded on either side.

    ``backbone`` is a causal LM or its decoder (an adapter on it must be off). ``layers``: which are concatenated, of a
    decoder with L; `state_layers` if not given. `hidden_states[0]` are the embeddings. BadInput for a row without a token.
    """
    mask = mask.bool()
    if not mask.any(dim=1).all():
        raise BadInput("query: expected at least one token, found an empty query")
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).max(dim=1).values
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    decoder = backbone.get_decoder() if hasattr(backbone, "get_decoder") else backbone
    with torch.no_grad():
        states = decoder(
            input_ids=tokens, attention_mask=mask.long(), position_ids=positions, output_hidden_states=True, use_cache=False
        ).hidden_states
    rows = torch.arange(len(tokens), device=tokens.device)
    wanted = (layers or state_layers)(len(states) - 1)
    return torch.cat([states[layer][rows, last] for layer in wanted], dim=-1).float()


def state_layers(layers: int) -> tuple[int, int]:
    """⌊L/2⌋ and ⌊3L/4⌋ of a decoder with L layers."""
    return layers // 2, 3 * layers // 4


def last_layer(layers: int) -> tuple[int]:
    """The last layer alone, after the decoder's final norm: the ablation `last-layer`."""
    return (layers,)


def distance(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """d = ‖ĝ − ḡ̂‖₂ of unit vectors over the last dimension, in [0, 2]."""
    return torch.linalg.vector_norm(functional.normalize(predicted, dim=-1) - functional.normalize(target, dim=-1), dim=-1)


def familiarity(d: torch.Tensor, lam: float) -> torch.Tensor:
    """f = exp(−λ·d), in (0, 1]."""
    return torch.exp(-lam * d)


def least_lambda(agents: int, tau: float, margin: float) -> float:
    """λ ≥ ln(N/τ)/m: from there on N agents pushed to d = m stay together below τ."""
    return math.log(agents / tau) / margin


def warn_of_margin(agents: int, lam: float, tau: float, margin: float) -> None:
    """UserWarning where N·e^(−λm) > τ: agents pushed out to the margin would together still reach the cut-off."""
    if agents * math.exp(-lam * margin) > tau:
        warnings.warn(
            f"{agents} agents at the margin {margin:g} sum to a familiarity of {agents * math.exp(-lam * margin):.2f}, "
            f"above tau = {tau:g}: lambda = {lam:g} should be at least {least_lambda(agents, tau, margin):.2f}",
            stacklevel=2,
        )


class Head(nn.Module):
    """LayerNorm → Linear(2H, 512) → SiLU → Linear(512, 256), orthogonal or of the usual start, from a generator."""

    def __init__(self, width: int, orthogonal: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, INNER)
        self.second = nn.Linear(INNER, OUT)
        for layer in (self.first, self.second):
            if orthogonal:
                nn.init.orthogonal_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)
            else:
                bound = 1 / math.sqrt(layer.in_features)
                nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


class FamiliarityHeads(nn.Module):
    """A predictor and a frozen target for each agent, evaluated together.

    Each agent's head has parameters of its own (`predictors[i].parameters()`), so that each has its optimiser and an idle
    agent's momentum moves nothing. A head depends on the seed and the agent's number only.
    """

    def __init__(self, width: int, agents: Sequence[str], seed: int) -> None:
        super().__init__()
        if len(agents) < 2:
            raise BadInput(f"agents: expected at least two to route between, found {len(agents)}")
        if len(set(agents)) < len(agents):
            raise BadInput(f"agents: expected different names, found {list(agents)}")
        self.width, self.agents = width, list(agents)
        self.predictors, self.targets = nn.ModuleList(), nn.ModuleList()
        for number in range(len(agents)):
            self._append(seed, number)

    def _append(self, seed: int, number: int) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        self.targets.append(Head(self.width, True, generator).requires_grad_(False))
        self.predictors.append(Head(self.width, False, generator))

    def add(self, agent: str, seed: int) -> None:
        """Attach a head for a new agent; the others keep their parameters, bit for bit."""
        if agent in self.agents:
            raise BadInput(f"agents: {agent!r} has a head already, expected a new name")
        self._append(seed, len(self.agents))
        self.agents.append(agent)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Distances d (B, N) of query states (B, 2H), with gradients to the predictors."""
        x = functional.layer_norm(states, (self.width,))  # the same for all: only scale and shift are an agent's own
        heads: list[nn.Module] = [*self.predictors, *self.targets]

        def stacked(name: str) -> torch.Tensor:
            return torch.stack([head.get_parameter(name) for head in heads])

        normed = x[None] * stacked("norm.weight")[:, None] + stacked("norm.bias")[:, None]
        inner = torch.baddbmm(stacked("first.bias")[:, None], normed, stacked("first.weight").mT)
        out = torch.baddbmm(stacked("second.bias")[:, None], functional.silu(inner), stacked("second.weight").mT)
        count = len(self.agents)
        return distance(out[:count], out[count:]).T

    def check_finite(self) -> None:
        """BadInput names the first agent whose head holds a NaN or an infinity."""
        for agent, predictor, target in zip(self.agents, self.predictors, self.targets, strict=True):
            for value in [*predictor.parameters(), *target.parameters()]:
                if not torch.isfinite(value).all():
                    raise BadInput(f"familiarity head of agent {agent!r}: expected finite weights, found NaN or infinity")


class FusedHeads:
    """All heads laid out for one query at a time: two matrix products a decision, which reading the weights dominates.

    LayerNorm's scale and shift go into the first layer, all first layers are one matrix, the second ones are stored
    transposed. ``dtype``: float32 gives `FamiliarityHeads`' distances within 1e-5; bfloat16 within 0.005 at half the bytes;
    int8 (the first layers rounded to 8 bits with a scale a row, the rest bfloat16) within 0.01 at fewer still.
    """

    def __init__(self, heads: FamiliarityHeads, dtype: torch.dtype = torch.int8) -> None:
        heads.check_finite()
        self.agents, self.width = list(heads.agents), heads.width
        self.dtype = torch.bfloat16 if dtype == torch.int8 else dtype
        both = [*heads.predictors, *heads.targets]
        with torch.no_grad():
            first = [head.get_parameter("first.weight") for head in both]
            scale = [head.get_parameter("norm.weight") for head in both]
            shift = [head.get_parameter("norm.bias") for head in both]
            bias = [head.get_parameter("first.bias") for head in both]
            folded = torch.cat([w * s for w, s in zip(first, scale, strict=True)])
            self.row_scale: torch.Tensor | None = None
            if dtype == torch.int8:
                self.row_scale = (folded.abs().amax(dim=1) / 127).clamp(min=1e-12).to(self.dtype)
                folded = (folded / self.row_scale.float()[:, None]).round().clamp(-127, 127)
            self.first = folded.to(dtype)
            self.first_bias = torch.cat([b + w @ s for w, s, b in zip(first, shift, bias, strict=True)]).to(self.dtype)
            second = torch.stack([head.get_parameter("second.weight").mT for head in both])
            self.second = second.contiguous().to(self.dtype)
            self.second_bias = torch.stack([head.get_parameter("second.bias") for head in both])

    @torch.inference_mode()
    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        """d (N,), float32, of one query state (2H,). BadInput names an agent whose distance is not finite."""
        x = functional.layer_norm(state.float(), (self.width,)).to(self.dtype)[None]
        if self.row_scale is None:
            inner = functional.linear(x, self.first, self.first_bias)
        else:
            inner = torch.ops.aten._weight_int8pack_mm(x, self.first, self.row_scale) + self.first_bias
        out = torch.bmm(functional.silu(inner).view(-1, 1, INNER), self.second)[:, 0].float() + self.second_bias
        count = len(self.agents)
        d = distance(out[:count], out[count:])
        if not torch.isfinite(d).all():
            bad = int((~torch.isfinite(d)).nonzero()[0])
            raise BadInput(f"familiarity of agent {self.agents[bad]!r}: expected a finite distance, found {d[bad].item()}")
        return d


def nearest(heads: FusedHeads, states: np.ndarray) -> np.ndarray:
    """Number of the most familiar agent of each state, (n,), from states (n, D)."""
    return np.array([int(heads(torch.from_numpy(state)).argmin()) for state in states])


def save_heads(heads: FamiliarityHeads, folder: Path, facts: dict[str, Any]) -> None:
    """Write familiarity.safetensors and, last, familiarity.json: digest, agents, width and `facts` (λ, τ, data, …)."""
    told = {**facts, "router": "ensemble-router", "agents": heads.agents, "width": heads.width}
    save_described(heads.state_dict(), folder, WEIGHTS, DESCRIPTION, told)


def load_heads(folder: Path) -> tuple[FamiliarityHeads, dict[str, Any]]:
    """Saved heads and their familiarity.json; BadInput names what is missing, unreadable, changed since or not finite."""
    folder = Path(folder)
    state, description = read_described(folder, "ensemble router", WEIGHTS, DESCRIPTION, "coevolve")
    try:
        agents, width = list(description["agents"]), int(description["width"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"ensemble router {folder}: {DESCRIPTION} is unreadable ({' '.join(str(error).split())})") from None
    heads = FamiliarityHeads(width, agents, 0)
    fill(heads, state, f"ensemble router {folder}: {WEIGHTS}", "coevolve")
    heads.check_finite()
    return heads, description
