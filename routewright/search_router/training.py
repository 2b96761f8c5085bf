"""What both trainings of the policy share: optimiser groups and features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from routewright.search_router.examples import Example
from routewright.search_router.features import Features, Featurizer

KINDS = {"word_rows": "word", "keyword_rows": "word", "match_weight": "scale", "collection_weight": "scale"}


def parameter_groups(
    model: torch.nn.Module, lr: float, head_lr: float, word_lr: float, scale_lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups with their learning rates: the language model's trained layers, heads, words, evidence scales."""
    groups: dict[str, list[torch.nn.Parameter]] = {"top": [], "head": [], "word": [], "scale": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "top" if name.startswith("top.") else KINDS.get(name, "head")
            groups[kind].append(parameter)
    return [
        {"params": groups["top"], "lr": lr, "weight_decay": weight_decay},
        {"params": groups["head"], "lr": head_lr, "weight_decay": weight_decay},
        {"params": groups["word"], "lr": word_lr, "weight_decay": 0.0},
        {"params": groups["scale"], "lr": scale_lr, "weight_decay": 0.0},
    ]


def featurize(featurizer: Featurizer, examples: Sequence[Example]) -> list[Features]:
    """Features of all examples, in order."""
    return [featurizer(example.query, example.reference) for example in examples]
