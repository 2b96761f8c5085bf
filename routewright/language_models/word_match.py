"""Qwen3 with word-match attention: for small models that are trained from nothing on texts full of names.

To follow "open the <name>" a model must find where else that name stands. Pretrained models have heads for it (induction
heads, Olsson et al. 2022, arXiv 2209.11895); training them from nothing takes more examples than a laptop run has. So
three heads of four get a constant added to their attention scores where the key's word is the query's own, where it
follows the query's word, and where it stands before it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)


class WordMatchConfig(Qwen3Config):
    """Qwen3's configuration and the constant."""

    model_type = "qwen3_word_match"

    match_bias: float = 6.0


def match_bias(
    tokens: torch.Tensor, positions: torch.Tensor, allowed: torch.Tensor, heads: int, strength: float
) -> torch.Tensor:
    """What is added to attention scores, (B, heads, L, L), for tokens and their positions (B, L).

    ``allowed`` (B, L, L): which keys a query sees; their positions differ. Head 0, 4, … : where the key's token is the
    query's; 1, 5, … : where the token before the key is; 2, 6, … : where the token after the key is (and is not the query
    itself); 3, 7, … : nothing. Neighbours are those in the text that the query sees, by position: several continuations
    may lie side by side in one row.
    """
    batch, length = tokens.shape
    keys = tokens[:, None, :].expand(batch, length, length)
    places = positions[:, None, :].expand(batch, length, length) + 1
    last = int(places.max()) + 2
    unseen = torch.where(allowed, places, last)  # a place beyond the text, where nobody looks
    text = torch.full((batch, length, last + 1), -1, dtype=tokens.dtype, device=tokens.device)
    text = text.scatter(2, unseen, keys)
    text[:, :, last] = -1
    query = tokens[:, :, None]
    inside = places < positions[:, :, None]  # the key's right neighbour comes before the query
    kinds = [query == keys, query == text.gather(2, places - 1), (query == text.gather(2, places + 1)) & inside]
    kinds.append(torch.zeros_like(kinds[0]))
    return torch.stack([kinds[head % 4] for head in range(heads)], dim=1) * strength


class WordMatchModel(Qwen3Model):
    """Qwen3's layers under the biased attention scores."""

    config_class = WordMatchConfig
    config: WordMatchConfig

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As Qwen3; needs all tokens at once, so no cache (ValueError). A 4-D mask holds what is added to the scores."""
        if input_ids is None or cache is not None:
            raise ValueError("word-match attention compares tokens: expected input_ids of the whole text and no cache")
        lowest = torch.finfo(self.dtype).min
        batch, length = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device)[None].expand(batch, length)
        if attention_mask is not None and attention_mask.dim() == 4:
            mask = attention_mask.to(self.dtype)
            allowed = mask[:, 0] > lowest / 2
        else:
            allowed = torch.ones((length, length), dtype=torch.bool, device=input_ids.device).tril()[None]
            if attention_mask is not None:
                allowed = allowed & attention_mask.bool()[:, None, :]
            allowed = (allowed | torch.eye(length, dtype=torch.bool, device=input_ids.device)).expand(batch, -1, -1)
            mask = torch.zeros(allowed[:, None].shape, dtype=self.dtype, device=input_ids.device)
            mask = mask.masked_fill(~allowed[:, None], lowest)
        config = self.config
        bias = match_bias(input_ids, position_ids, allowed, config.num_attention_heads, config.match_bias)
        biased = torch.where(allowed[:, None], mask + bias.to(self.dtype), mask)
        return super().forward(
            input_ids=input_ids, attention_mask=biased, position_ids=position_ids, use_cache=False, **kwargs
        )


class WordMatchForCausalLM(Qwen3ForCausalLM):
    """The language model."""

    config_class = WordMatchConfig

    def __init__(self, config: WordMatchConfig) -> None:
        super().__init__(config)
        self.model = WordMatchModel(config)
        self.post_init()


class WordMatchForSequenceClassification(Qwen3ForSequenceClassification):
    """The classifier."""

    config_class = WordMatchConfig

    def __init__(self, config: WordMatchConfig) -> None:
        super().__init__(config)
        self.model = WordMatchModel(config)
        self.post_init()


AutoConfig.register(WordMatchConfig.model_type, WordMatchConfig)
AutoModel.register(WordMatchConfig, WordMatchModel)
AutoModelForCausalLM.register(WordMatchConfig, WordMatchForCausalLM)
AutoModelForSequenceClassification.register(WordMatchConfig, WordMatchForSequenceClassification)
