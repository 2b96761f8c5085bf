"""The untrained backbone as a router: it reads the cards as a lettered list and names a letter."""

from __future__ import annotations

import copy
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from routewright.config import BackboneSection
from routewright.language_models.backbone import load_backbone, resolve_dtype
from routewright.pools.pool import Pool

LABELS = string.ascii_uppercase + string.ascii_lowercase + "0123456789#%"  # 64, one a possible agent
CARD_CHARACTERS = 200
QUERY = "<<query>>"  # where the query goes in the prompt


@dataclass
class ZeroShot:
    """P(agent) over the letters, and whether the unconstrained next token was a letter; latency in milliseconds."""

    probabilities: np.ndarray
    valid: bool
    latency_ms: float


@torch.inference_mode()
def zero_shot_route(pool: Pool, queries: Sequence[str], config: BackboneSection, seed: int) -> list[ZeroShot]:
    """Route queries with the whole backbone as it was pretrained: all layers, no training, one pass a query.

    The letters' next-token probabilities, renormalised, are the agents'. The cards' keys and values are computed once.
    """
    whole = config.model_copy(update={"layers": None})
    cards = [agent.card[:CARD_CHARACTERS] for agent in pool.agents]
    model, tokenizer = load_backbone(whole, [*cards, *queries], seed)
    model = model.to(resolve_dtype(config.dtype)).eval()
    lines = "\n".join(
        f"{LABELS[i]}: {agent.name}. {card}" for i, (agent, card) in enumerate(zip(pool.agents, cards, strict=True))
    )
    asked = f"Which agent should answer the query? Reply with one letter.\n\nAgents:\n{lines}\n\nQuery: {QUERY}"
    if tokenizer.chat_template:
        message = [{"role": "user", "content": asked}]
        text, space = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)), ""
    else:
        text, space = f"{asked}\nAnswer:", " "
    head, tail = text.split(QUERY)
    prefix = tokenizer(head, return_tensors="pt", add_special_tokens=False)["input_ids"]
    read = model(input_ids=prefix, use_cache=True).past_key_values
    labels = [tokenizer(f"{space}{LABELS[i]}", add_special_tokens=False)["input_ids"][-1] for i in range(len(cards))]
    answers = []
    for query in queries:
        start = time.perf_counter()
        ids = tokenizer(query[:2000] + tail, return_tensors="pt", add_special_tokens=False)["input_ids"]
        mask = torch.ones(1, prefix.shape[1] + ids.shape[1], dtype=torch.long)
        logits = model(input_ids=ids, attention_mask=mask, cache=copy.deepcopy(read), logits_to_keep=1).logits[0, -1]
        letters = torch.softmax(logits[labels].float(), dim=0).numpy()
        valid = int(logits.argmax()) in labels
        answers.append(ZeroShot(letters, valid, 1000 * (time.perf_counter() - start)))
    return answers
