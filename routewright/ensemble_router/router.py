"""The trained router in service: a folder with heads, backbone and adapters; a query in, the agents that answer out."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from routewright.config import BackboneSection
from routewright.ensemble_router.activation import activated, check_cut_off
from routewright.ensemble_router.familiarity import (
    DESCRIPTION,
    FusedHeads,
    familiarity,
    load_heads,
    query_states,
    save_heads,
)
from routewright.ensemble_router.prompts import encode_prompt
from routewright.errors import BadInput
from routewright.language_models.backbone import load_backbone, resolve_dtype

BASE, ADAPTERS = "base", "adapters"


@dataclass(frozen=True)
class EnsembleDecision:
    """Who answers a query.

    ``agents``: names, the most familiar first. ``familiarity``: f of every agent, in (0, 1]. ``cumulative``: Σ f of those
    that answer; below τ all of them do.
    """

    agents: list[str]
    familiarity: dict[str, float]
    cumulative: float
    model_version: str


class EnsembleRouter:
    """The frozen backbone and the familiarity heads on it; exploration is off."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, heads: FusedHeads, description: dict[str, Any]
    ) -> None:
        self.model, self.tokenizer, self.heads, self.description = model, tokenizer, heads, description
        self.lam, self.tau = float(description["lambda"]), float(description["tau"])
        self.longest = int(getattr(model.config, "max_position_embeddings", 4096))
        check_cut_off(len(heads.agents), self.tau)

    @property
    def agents(self) -> list[str]:
        """Names of all agents."""
        return list(self.heads.agents)

    def state(self, query: str) -> torch.Tensor:
        """h(q), (2H,), of one backbone pass. BadInput for an empty query or one longer than the backbone reads."""
        if not query.strip():
            raise BadInput("query: expected a text, found an empty one")
        tokens = encode_prompt(self.tokenizer, query.encode("utf-8", "replace").decode())  # lone surrogates go
        if len(tokens) > self.longest:
            raise BadInput(f"query: expected at most {self.longest} tokens, found {len(tokens)}")
        device = next(self.model.parameters()).device
        ids = torch.tensor([tokens], device=device)
        return query_states(self.model, ids, torch.ones_like(ids, dtype=torch.bool))[0].cpu()

    def route(self, state: torch.Tensor) -> EnsembleDecision:
        """The decision on a query state (2H,)."""
        f = familiarity(self.heads(state), self.lam).numpy()
        chosen = activated(f, f, self.tau)
        return EnsembleDecision(
            agents=[self.heads.agents[agent] for agent in chosen],
            familiarity={name: float(value) for name, value in zip(self.heads.agents, f, strict=True)},
            cumulative=float(f[chosen].sum()),
            model_version=str(self.description["model_version"]),
        )

    def decide(self, query: str) -> EnsembleDecision:
        """The agents that answer the query; errors as `state`."""
        return self.route(self.state(query))


def save_ensemble_router(folder: Path, run: Path, base: Path, backbone: BackboneSection) -> None:
    """Put a trained rule's heads and adapters, and the backbone where the run pretrained it, into one folder.

    ``run``: folder of the rule (`coevolve`); ``base``: the pretrained backbone's. familiarity.json, written last, says which
    backbone it is.
    """
    heads, description = load_heads(run / "router")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run / "adapters", folder / ADAPTERS)
    if backbone.source == "architecture":
        shutil.copytree(base, folder / BASE)
        backbone = BackboneSection(source="path", name=BASE, frozen_layers=0, dtype=backbone.dtype)
    save_heads(heads, folder, {**description, "backbone": backbone.model_dump(mode="json")})


def load_ensemble_router(folder: Path) -> EnsembleRouter:
    """What `save_ensemble_router` wrote, ready to decide; BadInput names what is missing, unreadable or does not fit."""
    folder = Path(folder)
    heads, description = load_heads(folder)
    where = f"ensemble router {folder}: {DESCRIPTION}"
    try:
        backbone = BackboneSection.model_validate(description["backbone"])
        lam, tau = float(description["lambda"]), float(description["tau"])
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{where} is unreadable ({' '.join(str(error).split())})") from None
    if not lam > 0:
        raise BadInput(f"{where}: lambda: expected more than 0, found {lam:g}")
    check_cut_off(len(heads.agents), tau)
    if backbone.source == "path" and not Path(backbone.name).is_absolute():
        backbone = backbone.model_copy(update={"name": str(folder / backbone.name)})
    model, tokenizer = load_backbone(backbone, [], 0)
    model = model.to(resolve_dtype(backbone.dtype)).eval().requires_grad_(False)
    if torch.cuda.is_available():
        model = model.cuda()
    if 2 * model.config.hidden_size != heads.width:
        raise BadInput(
            f"{where}: the heads read {heads.width} numbers, the backbone's states are {2 * model.config.hidden_size}"
        )
    return EnsembleRouter(model, tokenizer, FusedHeads(heads), description)
