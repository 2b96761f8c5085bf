"""A trained search router as a folder, and its decisions. Nothing here imports a trainer."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from routewright.errors import BadInput
from routewright.language_models.backbone import fastest_dtype
from routewright.pools.pool import Pool
from routewright.search_router.decision import Decision, Interval
from routewright.search_router.features import Features, Featurizer, collate
from routewright.search_router.model import RouterConfig, SearchRouterModel, decide_dtype

DESCRIPTION = "router.json"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", DESCRIPTION)


def choose_agents(probabilities: np.ndarray, second: float, abstain: float, fallback: int) -> tuple[list[int], bool]:
    """Agents of one decision, most probable first, and whether the router abstained.

    Below `abstain` the fallback alone is asked. Otherwise the most probable agent, and every other whose probability is
    at least `second` times the best one's.
    """
    order = np.argsort(-probabilities, kind="stable")
    best = float(probabilities[order[0]])
    if best < abstain:
        return [fallback], True
    others = [int(i) for i in order[1:] if probabilities[i] > 0 and probabilities[i] >= second * best]
    return [int(order[0]), *others], False


def save_router(
    model: SearchRouterModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    pool: Pool,
    facts: dict[str, Any],
    second: float = 1.01,
    abstain: float = 0.0,
) -> None:
    """Write a self-describing folder: config, safetensors, tokenizer and, last, router.json with digests.

    `second` above 1 asks one agent only; `abstain` 0 never abstains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    description = {
        "router": "search-router",
        "model_version": weights[:12],
        "pool": pool.name,
        "pool_digest": pool.digest,
        "agents": pool.names,
        "fallback": pool.fallback,
        "second": second,
        "abstain": abstain,
        "weights_sha256": weights,
        **facts,
    }
    partial = folder / f"{DESCRIPTION}.partial"
    partial.write_text(json.dumps(description, indent=1), encoding="utf-8")
    os.replace(partial, folder / DESCRIPTION)


def set_thresholds(folder: Path, second: float, abstain: float) -> None:
    """Write the thresholds fitted on dev into a router folder."""
    path = folder / DESCRIPTION
    description = json.loads(path.read_text(encoding="utf-8")) | {"second": second, "abstain": abstain}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(description, indent=1), encoding="utf-8")
    os.replace(partial, path)


def load_model(folder: Path) -> tuple[SearchRouterModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Policy in evaluation mode (dtypes as saved), tokenizer and description; BadInput names a missing or changed file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"model folder {folder}: no such folder, expected one written by the sft or rl stage")
    for name in FILES:
        if not (folder / name).is_file():
            raise BadInput(
                f"model folder {folder}: {name} is missing, expected a folder written by the sft or rl stage"
            )
    try:
        description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        config = RouterConfig.from_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        model = SearchRouterModel(config)
        expected = description["weights_sha256"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        told = " ".join(str(error).split())
        raise BadInput(f"model folder {folder}: {DESCRIPTION}, config.json or tokenizer is not readable ({told})") from None
    if hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() != expected:
        raise BadInput(f"model folder {folder}: model.safetensors does not match the digest in {DESCRIPTION}")
    state = load_file(folder / "model.safetensors")
    for part in (model.trunk, model.top):
        prefix = "trunk." if part is model.trunk else "top."
        part.to(next(value.dtype for key, value in state.items() if key.startswith(prefix)))
    try:
        model.load_state_dict(state)
    except RuntimeError:
        raise BadInput(f"model folder {folder}: model.safetensors does not fit config.json") from None
    model.freeze_trunk()
    return model.eval(), tokenizer, description


class Router:
    """Decides which agents search a query; `decide` is one forward pass at batch 1."""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self.model, tokenizer, self.description = load_model(folder)
        decide_dtype(self.model, dtype or fastest_dtype())
        self.names = list(self.model.config.agents)
        for name in ("second", "abstain"):
            value = self.description.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise BadInput(f"model folder {folder}: {DESCRIPTION}: {name}: expected a number")
        if self.description.get("fallback") not in self.names:
            raise BadInput(f"model folder {folder}: {DESCRIPTION}: fallback: expected one of {', '.join(self.names)}")
        self.featurizer = Featurizer(tokenizer, self.model.idf.numpy(), self.model.beliefs.numpy(), self.model.cards)
        self.pad = tokenizer.pad_token_id

    @property
    def model_version(self) -> str:
        return str(self.description["model_version"])

    def probabilities(self, features: Sequence[Features]) -> list[np.ndarray]:
        """P(slot = 1) of every slot of each query: agents, keyword candidates, interval; float32 (N + K + 1,)."""
        return self.answers(features)[0]

    @torch.inference_mode()
    def answers(self, features: Sequence[Features], batch_size: int = 64) -> tuple[list[np.ndarray], np.ndarray]:
        """Slot probabilities, and whether the likeliest token of the whole vocabulary is an agent; bool (n,)."""
        out: list[np.ndarray] = [np.zeros(0)] * len(features)
        valid = np.zeros(len(features), dtype=bool)
        order = sorted(range(len(features)), key=lambda i: len(features[i].tokens))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            slots = self.model(collate([features[i] for i in rows], self.pad), with_answer=True)
            valid[rows] = (slots.answer.argmax(dim=1) >= slots.answer.shape[1] - len(self.names)).numpy()
            for row, i in zip(torch.sigmoid(slots.logits).numpy(), rows, strict=True):
                keywords = row[len(self.names) : len(self.names) + len(features[i].candidates)]
                out[i] = np.concatenate([row[: len(self.names)], keywords, row[-1:]])
        return out, valid

    def decision(self, features: Features, probabilities: np.ndarray) -> Decision:
        """The decision that a query's slot probabilities make."""
        agents = probabilities[: len(self.names)]
        fallback = self.names.index(self.description["fallback"])
        chosen, abstained = choose_agents(agents, self.description["second"], self.description["abstain"], fallback)
        interval = features.interval if features.interval is not None and probabilities[-1] >= 0.5 else None
        return Decision(
            agents=[self.names[i] for i in chosen],
            bitmask="".join("1" if i in chosen else "0" for i in range(len(self.names))),
            keywords=[
                w for w, p in zip(features.candidates, probabilities[len(self.names) :], strict=False) if p >= 0.5
            ],
            start=interval.start if interval else None,
            end=interval.end if interval else None,
            scores={name: round(float(p), 6) for name, p in zip(self.names, agents, strict=True)},
            abstained=abstained,
            model_version=self.model_version,
        )

    def decide(self, query: str, reference_date: date | None = None) -> Decision:
        """Decide one query; relative times resolve against `reference_date` (today by default). BadInput: empty query."""
        if not query.strip():
            raise BadInput("query: expected a text with at least one character that is not a blank, found none")
        features = self.featurizer(query, reference_date or date.today())
        return self.decision(features, self.probabilities([features])[0])


def load_router(folder: Path, dtype: torch.dtype | None = None) -> Router:
    """The router of a model folder; BadInput where a file is missing or does not match its digest."""
    return Router(folder, dtype)


def search_query(query: str, keywords: Sequence[str]) -> str:
    """What the chosen agents search: the query, then the decision's keywords."""
    return " ".join([query, *keywords])


def as_interval(decision: Decision) -> Interval | None:
    """The decision's interval, None where both ends are open."""
    return Interval(decision.start, decision.end) if decision.start or decision.end else None
