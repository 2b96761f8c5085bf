"""Model folders made in a second: a search router of random weights, a step router that goes by the best score."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from routewright.config import load_profile
from routewright.language_models.backbone import load_backbone
from routewright.search_router.features import Featurizer
from routewright.search_router.model import decide_dtype, new_model
from routewright.search_router.router import save_router
from routewright.search_router.words import document_frequencies
from routewright.step_router.features import NAMES
from routewright.step_router.risk import RiskModel, RiskSettings, save_risk

CARDS = {
    "kitchen": "Cooking and baking: oven, pan, dough, whisk, skillet, sauce, recipe, flour.",
    "garden": "Plants and garden work: seed, soil, hedge, compost, rose, lawn, spade.",
    "office": "Paper and office machines: printer, stapler, envelope, copier, memo, desk.",
}
QUERIES = [
    "clean the oven", "which soil does a rose like", "the printer eats the memo", "buy flour since 2022",
    "label the heavy envelope in the desk and then bake dough in a skillet", "lawn", "what did the copier cost last year",
]  # fmt: skip
FACTS: dict[str, Any] = {
    "thresholds": {"bayes": 0.4},
    "operating": "bayes",
    "benefits": [0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9],
    "c_slm": 1.0,
    "c_llm": 50.0,
    "max_steps": 10,
}


def save_search_router(folder: Path, second: float = 0.9, abstain: float = 0.05, dtype: str = "float32") -> Path:
    """Untrained, its heads of random weights, so that queries get different agents, keywords and intervals."""
    profile = load_profile("smoke")
    backbone, tokenizer = load_backbone(profile.backbone, [*QUERIES, *CARDS.values()], 0)
    torch.manual_seed(0)
    model = new_model(backbone, profile.backbone.frozen_layers, CARDS)
    model.idf.copy_(torch.from_numpy(document_frequencies([*QUERIES, *CARDS.values()])))
    with torch.no_grad():
        for parameter in (model.agent_rows, model.keyword_out.weight, model.interval_head.weight):
            parameter.normal_(0, 0.3)
    featurizer = Featurizer(tokenizer, model.idf.numpy(), model.beliefs.numpy(), CARDS)
    model.read_cards(featurizer.card_tokens())
    decide_dtype(model, getattr(torch, dtype))
    pool: Any = SimpleNamespace(name="household", digest="0" * 64, names=list(CARDS), fallback="office")
    save_router(model, tokenizer, folder, pool, {"stage": "sft"}, second, abstain)
    return folder


def save_step_router(folder: Path, **facts: Any) -> Path:
    """P(failure) falls with the best verifier score, and the LLM never fails; knows log-probabilities, scores, and both."""
    model = RiskModel()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        first, second, last = (model.layers[i] for i in (0, 3, 6))
        first.weight[0, NAMES.index("verifier_best")] = -1.0  # type: ignore[operator, index]
        first.bias[0] = 3.0  # type: ignore[operator, index]
        second.weight[0, 0] = 4.0  # type: ignore[operator, index]
        last.weight[:2, 0] = 4.0  # type: ignore[operator, index]
        last.bias[:] = -40.0  # type: ignore[operator, index]
    model.evidence = torch.ones(3)
    save_risk(model, folder, RiskSettings(), {**FACTS, **facts})
    return folder
