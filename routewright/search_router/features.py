"""What the policy reads of a query: tokens, hashed words, match with the cards, keyword candidates, resolved interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from routewright.search_router.decision import Interval
from routewright.search_router.intent import card_phrases
from routewright.search_router.keywords import candidates
from routewright.search_router.time_expressions import resolve_interval
from routewright.search_router.words import bucket, tfidf

PROMPT_HEAD, PROMPT_TAIL = "Query: ", "\nAgent:"
MAX_QUERY_TOKENS = 128
MAX_QUERY_CHARACTERS = 4000


@dataclass
class Features:
    """One query, as the policy reads it; `match` and `collection` have one value an agent."""

    tokens: list[int]
    words: list[int]
    weights: list[float]
    match: np.ndarray
    collection: np.ndarray
    candidates: list[str]
    positions: list[int]  # index of each candidate's last token
    rarity: list[float]
    interval: Interval | None


@dataclass
class Batch:
    """Features of several queries, right-padded. B queries, T tokens, W words, N agents, K candidates."""

    input_ids: torch.Tensor  # (B, T)
    attention_mask: torch.Tensor  # (B, T)
    words: torch.Tensor  # (B, W)
    weights: torch.Tensor  # (B, W), 0 where padded
    match: torch.Tensor  # (B, N)
    collection: torch.Tensor  # (B, N)
    positions: torch.Tensor  # (B, K)
    keyword_words: torch.Tensor  # (B, K) buckets
    rarity: torch.Tensor  # (B, K)
    keyword_mask: torch.Tensor  # (B, K) bool
    interval_mask: torch.Tensor  # (B,) bool

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        return Batch(**moved)


class Featurizer:
    """Turns queries into `Features`; holds the tokenizer, IDF (BUCKETS,) and beliefs (BUCKETS, N), and the cards."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, idf: np.ndarray, beliefs: np.ndarray, cards: Mapping[str, str]
    ) -> None:
        self.tokenizer, self.idf, self.beliefs, self.cards = tokenizer, idf, beliefs, dict(cards)
        self._tail = tokenizer(PROMPT_TAIL, add_special_tokens=False)["input_ids"]
        self._head_length = len(PROMPT_HEAD)
        # inverted index over card phrases: bucket -> [(phrase, weight)]
        self._postings: dict[int, list[tuple[int, float]]] = {}
        self._owner: list[int] = []
        for agent, (name, card) in enumerate(self.cards.items()):
            for phrase in [name.replace("-", " "), *card_phrases(card)[:-1]]:
                for term, weight in zip(*tfidf(phrase, idf), strict=True):
                    self._postings.setdefault(term, []).append((len(self._owner), weight))
                self._owner.append(agent)

    def match(self, words: Sequence[int], weights: Sequence[float]) -> np.ndarray:
        """Largest TF-IDF cosine of the query with a phrase of each agent's card, float32 (N,)."""
        phrases = np.zeros(len(self._owner) + 1, dtype=np.float32)
        for term, weight in zip(words, weights, strict=True):
            for phrase, other in self._postings.get(term, ()):
                phrases[phrase] += weight * other
        best = np.zeros(len(self.cards), dtype=np.float32)
        np.maximum.at(best, self._owner, phrases[:-1])
        return best

    def collection(self, words: Sequence[int]) -> np.ndarray:
        """Mean belief of the query's terms in each agent's collection, its mean over agents subtracted, float32 (N,)."""
        belief = self.beliefs[list(words)].sum(axis=0) / max(1, len(words))
        return (belief - belief.mean()).astype(np.float32)

    def __call__(self, query: str, reference: date | None) -> Features:
        """Read one query; only its first 4,000 characters and 128 tokens count."""
        # a lone surrogate (half an emoji) has no UTF-8 form, and no tokenizer takes it
        query = query[:MAX_QUERY_CHARACTERS].encode("utf-8", "replace").decode()
        encoded = self.tokenizer(PROMPT_HEAD + query, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = encoded["input_ids"][:MAX_QUERY_TOKENS], encoded["offset_mapping"][:MAX_QUERY_TOKENS]
        words, weights = tfidf(query, self.idf)
        found, positions = [], []
        ends = np.array([end for _, end in offsets])
        for candidate in candidates(query, reference):
            position = int(np.searchsorted(ends, candidate.end + self._head_length))
            if position < len(tokens):
                found.append(candidate.word)
                positions.append(position)
        return Features(
            tokens=tokens + self._tail,
            words=words,
            weights=weights,
            match=self.match(words, weights),
            collection=self.collection(words),
            candidates=found,
            positions=positions,
            rarity=[float(self.idf[bucket(word)]) / 8 for word in found],
            interval=resolve_interval(query, reference) if reference else None,
        )

    def card_tokens(self) -> list[list[int]]:
        """Token ids of every card, in pool order, at most 128 each."""
        texts = [f"{name}: {card}" for name, card in self.cards.items()]
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"][:MAX_QUERY_TOKENS] for text in texts]


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, value: float = 0) -> torch.Tensor:
    width = max(1, max(len(row) for row in rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype)


def collate(features: Sequence[Features], pad_token: int) -> Batch:
    """Pad the features of several queries into one batch."""
    lengths = _pad([[1] * len(f.tokens) for f in features], torch.long)
    return Batch(
        input_ids=_pad([f.tokens for f in features], torch.long, pad_token),
        attention_mask=lengths,
        words=_pad([f.words for f in features], torch.long),
        weights=_pad([f.weights for f in features], torch.float32),
        match=torch.from_numpy(np.stack([f.match for f in features])),
        collection=torch.from_numpy(np.stack([f.collection for f in features])),
        positions=_pad([f.positions for f in features], torch.long),
        keyword_words=_pad([[bucket(word) for word in f.candidates] for f in features], torch.long),
        rarity=_pad([f.rarity for f in features], torch.float32),
        keyword_mask=_pad([[1] * len(f.candidates) for f in features], torch.long).bool(),
        interval_mask=torch.tensor([f.interval is not None for f in features]),
    )
