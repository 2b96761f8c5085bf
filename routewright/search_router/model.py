"""The search router's policy: a small language model that answers all its decision slots from one forward pass.

Slots are N Bernoulli agent bits, one Bernoulli keyword bit a candidate word, and one Bernoulli bit for the resolved date
interval; log π is their sum. An agent is an output token whose embedding is read from its card (after ToolkenGPT, Hao et
al. 2023), so a pool of any size works and an agent that joins later has a logit before any training. Beside the language
model stand linear terms over hashed words (wide and deep, Cheng et al. 2016): learned weights, the match with each card, and
how strongly the words speak for each agent's collection (CORI).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from routewright.config import LoraSection
from routewright.language_models.backbone import split_backbone
from routewright.search_router.features import Batch
from routewright.search_router.words import BUCKETS

COLLECTION_WEIGHT = 1.0  # initial weight of the collection belief, which has deviation 1
MATCH_WEIGHT = 4.0  # initial weight of the word match between query and card
ANSWER_OFFSET = 25.0  # agent tokens start level with the likeliest words of the vocabulary
_MEMO_ROWS = 20_000


class RouterConfig(PretrainedConfig):
    """Sizes of the policy and the cards it reads; the backbone's two parts carry their own configs."""

    model_type = "routewright-search-router"

    def __init__(
        self,
        trunk: dict[str, Any] | None = None,
        top: dict[str, Any] | None = None,
        agents: list[str] | None = None,
        cards: list[str] | None = None,
        width: int = 256,
        **kwargs: Any,
    ) -> None:
        self.trunk = trunk or {}
        self.top = top or {}
        self.agents = agents or []  # two lists: saved configs sort the keys of a mapping, and pool order counts
        self.cards = cards or []
        self.width = width
        super().__init__(**kwargs)


@dataclass
class Slots:
    """Logits of the decision slots of B queries: agents, then keyword candidates, then the interval.

    ``logits`` float32 (B, N + K + 1), P(slot = 1) = σ(logit); ``mask`` bool, which slots exist; ``answer`` next-token logits
    (B, vocabulary + N) over the vocabulary and the agent tokens, where asked for.
    """

    logits: torch.Tensor
    mask: torch.Tensor
    agents: int
    answer: torch.Tensor | None = None


class SearchRouterModel(PreTrainedModel):
    """Policy network; build one with `new_model`, load a trained one with `from_pretrained`."""

    config_class = RouterConfig
    base_model_prefix = "router"

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        trunk, top = AutoConfig.for_model(**config.trunk), AutoConfig.for_model(**config.top)
        self.trunk = AutoModel.from_config(trunk)
        self.trunk.norm = nn.Identity()
        self.top = AutoModel.from_config(top)
        self.top.embed_tokens = nn.Embedding(1, trunk.hidden_size)  # never used: its inputs are the trunk's states
        hidden, agents = trunk.hidden_size, len(config.agents)
        self.norm = nn.LayerNorm(hidden)
        self.mean_norm = nn.LayerNorm(hidden)
        self.query_projection = nn.Linear(2 * hidden, config.width)
        self.card_projection = nn.Linear(hidden, config.width)
        self.agent_rows = nn.Parameter(torch.zeros(agents, 2 * hidden))  # what training adds to the card's reading
        self.agent_bias = nn.Parameter(torch.zeros(agents))
        self.word_rows = nn.Parameter(torch.zeros(BUCKETS, agents))
        self.match_weight = nn.Parameter(torch.tensor(MATCH_WEIGHT))
        self.collection_weight = nn.Parameter(torch.tensor(COLLECTION_WEIGHT))
        self.answer_offset = nn.Linear(2 * hidden, 1)
        nn.init.constant_(self.answer_offset.bias, ANSWER_OFFSET)
        self.keyword_hidden = nn.Linear(3 * hidden + 1, config.width)
        self.keyword_out = nn.Linear(config.width, 1)
        self.keyword_rows = nn.Parameter(torch.zeros(BUCKETS))
        self.interval_head = nn.Linear(2 * hidden, 1)
        self.register_buffer("card_states", torch.zeros(agents, hidden))  # read once by the frozen trunk
        self.register_buffer("idf", torch.ones(BUCKETS))
        self.register_buffer("beliefs", torch.zeros(BUCKETS, agents))
        self.card_states: torch.Tensor
        self.idf: torch.Tensor
        self.beliefs: torch.Tensor
        self.remember_trunk = False
        self._memo: dict[tuple[int, ...], torch.Tensor] = {}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the backbone's weights come from its checkpoint, the heads keep torch's initialisation."""

    def trunk_states(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """States of the frozen layers, (B, T, H); trainers have each query's computed once and remembered."""
        with torch.no_grad():
            if not self.remember_trunk:
                return self.trunk(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
            lengths = attention_mask.sum(1).tolist()
            keys = [tuple(row[:length]) for row, length in zip(input_ids.tolist(), lengths, strict=True)]
            new = [i for i, key in enumerate(keys) if key not in self._memo]
            if new:
                if len(self._memo) + len(new) > _MEMO_ROWS:
                    self._memo.clear()
                    new = list(range(len(keys)))
                states = self.trunk(
                    input_ids=input_ids[new], attention_mask=attention_mask[new], use_cache=False
                ).last_hidden_state
                for row, i in enumerate(new):
                    self._memo[keys[i]] = states[row, : lengths[i]].to(torch.bfloat16).clone()
            return nn.utils.rnn.pad_sequence([self._memo[key] for key in keys], batch_first=True).float()

    def forward(self, batch: Batch, with_answer: bool = False, **_: Any) -> Slots:
        """One pass over B queries (see `Slots`)."""
        inputs = self.trunk_states(batch.input_ids, batch.attention_mask).to(self.top.dtype)
        states = self.top(inputs_embeds=inputs, attention_mask=batch.attention_mask, use_cache=False).last_hidden_state
        rows = torch.arange(len(states), device=states.device)
        last = states[rows, batch.attention_mask.sum(1) - 1]
        # the last state has read everything, the mean keeps the words themselves
        padding = batch.attention_mask.unsqueeze(-1)
        mean = (states * padding).sum(1) / padding.sum(1)
        dtype = self.norm.weight.dtype
        query = torch.cat([self.norm(last.to(dtype)), self.mean_norm(mean.to(dtype))], dim=-1)
        cards = self.card_projection(self.card_states.to(query.dtype))
        agents = (self.query_projection(query) @ cards.T / math.sqrt(self.config.width)).float()
        agents = agents + (query @ self.agent_rows.T).float() + self.agent_bias.float()
        agents = agents + (self.word_rows[batch.words] * batch.weights.unsqueeze(-1)).sum(1).float()
        agents = agents + self.match_weight.float() * batch.match
        agents = agents + self.collection_weight.float() * batch.collection - 2.0  # few agents are right: start below zero
        at = states[rows.unsqueeze(1), batch.positions].to(query.dtype)
        paired = torch.cat(
            [self.norm(at), query.unsqueeze(1).expand(-1, at.shape[1], -1), batch.rarity.unsqueeze(-1).to(query.dtype)],
            dim=-1,
        )
        keywords = self.keyword_out(nn.functional.silu(self.keyword_hidden(paired))).squeeze(-1).float()
        keywords = keywords + self.keyword_rows[batch.keyword_words].float()
        interval = self.interval_head(query).float()
        mask = torch.cat(
            [torch.ones_like(agents, dtype=torch.bool), batch.keyword_mask, batch.interval_mask.unsqueeze(1)], dim=1
        )
        answer = None
        if with_answer:
            vocabulary = nn.functional.linear(last, self.trunk.embed_tokens.weight.to(last.dtype)).float()
            answer = torch.cat([vocabulary, agents + self.answer_offset(query).float()], dim=1)
        return Slots(torch.cat([agents, keywords, interval], dim=1), mask, agents.shape[1], answer)

    @property
    def cards(self) -> dict[str, str]:
        """Agent name to card, in pool order."""
        return dict(zip(self.config.agents, self.config.cards, strict=True))

    def floating_point_ops(self, *_: Any, **__: Any) -> int:
        """Not counted: batches are not plain token matrices."""
        return 0

    @torch.no_grad()
    def read_cards(self, tokens: Sequence[Sequence[int]]) -> None:
        """Fill `card_states`: the mean over a card's tokens of the frozen trunk's states, at unit variance."""
        self.trunk.eval()
        for i, ids in enumerate(tokens):
            row = torch.tensor([ids])
            states = self.trunk(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).last_hidden_state
            mean = states[0].float().mean(0)
            self.card_states[i] = (mean - mean.mean()) / (mean.std() + 1e-6)
        # what all cards share says nothing about which agent to ask
        if len(tokens) > 2:
            self.card_states -= self.card_states.mean(0, keepdim=True)

    def freeze_trunk(self) -> None:
        """The trunk never trains: cards were read from it, and its states are remembered."""
        self.trunk.requires_grad_(False)
        self.top.embed_tokens.requires_grad_(False)


def decide_dtype(model: SearchRouterModel, dtype: torch.dtype) -> None:
    """Cast the language model to `dtype`; the heads stay in float32."""
    model.trunk.to(dtype)
    model.top.to(dtype)


def new_model(backbone: Any, frozen_layers: int, cards: dict[str, str], width: int = 256) -> SearchRouterModel:
    """An untrained policy over a causal LM; tied embeddings serve as its output vocabulary."""
    trunk, top = split_backbone(backbone, frozen_layers)
    config = RouterConfig(
        trunk=trunk.config.to_dict(),
        top=top.config.to_dict(),
        agents=list(cards),
        cards=list(cards.values()),
        width=width,
    )
    model = SearchRouterModel(config)
    model.trunk.load_state_dict(trunk.state_dict())
    model.top.load_state_dict({**top.state_dict(), "embed_tokens.weight": model.top.embed_tokens.weight})
    model.freeze_trunk()
    return model


def add_lora(model: SearchRouterModel, lora: LoraSection) -> None:
    """Train low-rank adapters of the top layers instead of their weights (PEFT); `merge_lora` folds them in."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules="all-linear")
    model.top = get_peft_model(model.top, config)


def merge_lora(model: SearchRouterModel) -> None:
    """Fold the adapters into the top layers, so that the saved model needs no PEFT."""
    if hasattr(model.top, "merge_and_unload"):
        model.top = model.top.merge_and_unload()
