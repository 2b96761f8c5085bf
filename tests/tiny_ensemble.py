"""An ensemble router's folder made in a second: an untrained backbone, two agents that know a kind of query, and a third."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from routewright.config import BackboneSection
from routewright.ensemble_router.familiarity import FamiliarityHeads, query_states, save_heads
from routewright.ensemble_router.prompts import encode_prompt
from routewright.ensemble_router.warm_up import character_tokenizer
from routewright.language_models.backbone import from_config

AGENTS = ["speller", "adder", "stranger"]
WORDS = ["lamp", "door", "tree", "river", "stone", "cloud", "glass", "paper"]
SPELL, ADD = [f"spell {word}" for word in WORDS], [f"add {number} + {number * 7 % 50}" for number in range(10, 90, 10)]


def save_tiny_ensemble(folder: Path, **facts: Any) -> Path:
    """τ 0.7: a query of a kind that was trained on gets its agent alone, others all three."""
    config = BackboneSection(source="architecture", name="qwen3", frozen_layers=0, hidden_size=32, num_layers=4)
    tokenizer = character_tokenizer([*SPELL, *ADD, "abcdefghijklmnopqrstuvwxyz ="], ["spell", "add"])
    backbone = from_config(config, tokenizer, seed=0).eval()
    states = []
    for query in [*SPELL, *ADD]:
        tokens = torch.tensor([encode_prompt(tokenizer, query)])
        states.append(query_states(backbone, tokens, torch.ones_like(tokens))[0])
    heads = FamiliarityHeads(64, AGENTS, seed=0)
    optimiser = torch.optim.Adam(heads.predictors[:2].parameters(), lr=1e-3)
    gain = torch.tensor([[1.0, -1.0, 0.0]] * len(SPELL) + [[-1.0, 1.0, 0.0]] * len(ADD))
    for _ in range(100):
        d = heads(torch.stack(states))
        (gain.clamp(min=0) * d + (-gain).clamp(min=0) * (1 - d).clamp(min=0)).mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    backbone.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    base = BackboneSection(source="path", name="base", frozen_layers=0)
    save_heads(heads, folder, {"lambda": 2.0, "tau": 0.7, "backbone": base.model_dump(mode="json"), **facts})
    return folder
