"""The trained router in service: a folder with heads, backbone and adapters; a query in, the agents that answer out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from routewright.config import BackboneSection
from routewright.ensemble_router.activation import activated, check_cut_off
from routewright.ensemble_router.familiarity import (
    DESCRIPTION,
    FamiliarityHeads,
    FusedHeads,
    familiarity,
    load_heads,
    query_states,
    save_heads,
)
from routewright.ensemble_router.prompts import encode_prompt
from routewright.errors import BadInput
from routewright.evaluation.drift import write_routes
from routewright.language_models.backbone import load_backbone, resolve_dtype

if TYPE_CHECKING:  # a served router has no use for profiles
    from routewright.ensemble_router.profile import EnsembleProfile

ADAPTERS = "adapters"
MAX_QUERY_TOKENS = 2048
"""A query may have so many, where the backbone reads as many: a pass over its whole context would take minutes."""


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
        self.longest = min(MAX_QUERY_TOKENS, int(getattr(model.config, "max_position_embeddings", MAX_QUERY_TOKENS)))
        check_cut_off(len(heads.agents), self.tau)

    @property
    def agents(self) -> list[str]:
        """Names of all agents."""
        return list(self.heads.agents)

    def tokens(self, query: str) -> list[int]:
        """The query as the backbone reads it. BadInput for an empty one or one of more than `longest` tokens."""
        if not query.strip():
            raise BadInput("query: expected a text, found an empty one")
        tokens = encode_prompt(self.tokenizer, query.encode("utf-8", "replace").decode())  # lone surrogates go
        if len(tokens) > self.longest:
            raise BadInput(f"query: expected at most {self.longest} tokens, found {len(tokens)}")
        return tokens

    def state(self, query: str) -> torch.Tensor:
        """h(q), (2H,), of one backbone pass; errors as `tokens`."""
        device = next(self.model.parameters()).device
        ids = torch.tensor([self.tokens(query)], device=device)
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


def save_ensemble_router(
    folder: Path, run: Path, bases: Sequence[Path], profile: EnsembleProfile, routes: dict[str, int]
) -> None:
    """Put a trained rule's heads and adapters, and the base models that the run pretrained, into one folder, as a whole.

    ``run``: folder of the rule (`coevolve`); ``bases``: those of the profile's base models. familiarity.json says which they
    are, and with several which agents stand on the further ones; ``routes``, the first choices that drift is measured from,
    becomes routes.json.
    """
    heads, description = load_heads(run / "router")
    partial = folder.with_name(f"{folder.name}.partial")
    for begun in (partial, folder):
        shutil.rmtree(begun, ignore_errors=True)
    shutil.copytree(run / "adapters", partial / ADAPTERS)
    told = []
    for backbone, base in zip(profile.backbones, bases, strict=True):
        if backbone.source == "architecture":
            shutil.copytree(base, partial / base.name)
            backbone = BackboneSection(source="path", name=base.name, frozen_layers=0, dtype=backbone.dtype)
        told.append(backbone.model_dump(mode="json"))
    description["backbone"] = told[0]
    if told[1:]:
        description["more_backbones"] = [
            {**backbone, "agents": profile.names_on(number)} for number, backbone in enumerate(told[1:], 1)
        ]
    write_routes(partial, routes)
    save_whole(heads, partial, description)
    partial.rename(folder)


def save_whole(heads: FamiliarityHeads, folder: Path, description: dict[str, Any]) -> None:
    """Write the heads into a folder that holds all else; its version is of what decides and answers, wherever it lies.

    That is heads, adapters and base models with their tokenizers, λ, τ and which base models they are.
    """
    save_heads(heads, folder, description)
    path = folder / DESCRIPTION
    described = json.loads(path.read_text(encoding="utf-8"))
    content = hashlib.sha256()
    for file in sorted(path for name in ("*.safetensors", "tokenizer.json") for path in folder.rglob(name)):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        content.update(f"{file.relative_to(folder).as_posix()} {digest}\n".encode())
    facts = {name: described.get(name) for name in ("agents", "lambda", "tau", "backbone", "more_backbones")}
    content.update(json.dumps(facts, sort_keys=True).encode())
    described["model_version"] = content.hexdigest()[:12]
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(described, indent=1), encoding="utf-8")
    os.replace(partial, path)


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
    model, tokenizer = load_backbone(backbone, [], 0, resolve_dtype(backbone.dtype))
    model = model.eval().requires_grad_(False)
    if torch.cuda.is_available():
        model = model.cuda()
    if 2 * model.config.hidden_size != heads.width:
        raise BadInput(
            f"{where}: the heads read {heads.width} numbers, the backbone's states are {2 * model.config.hidden_size}"
        )
    return EnsembleRouter(model, tokenizer, FusedHeads(heads), description)
