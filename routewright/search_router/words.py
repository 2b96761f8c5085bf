"""Hashed word features beside the language model: IDF-weighted uni- and bigrams of the query."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import Stemmer

BUCKETS = 2**15
MAX_WORDS = 96  # words of a query that count: a long query costs no more
_WORD = re.compile(r"[^\W_]{2,}")


def words(text: str) -> list[str]:
    """English stems of the words of two or more letters or digits, the first `MAX_WORDS`."""
    found = []
    for match in _WORD.finditer(text[: 64 * MAX_WORDS].lower()):
        found.append(match.group())
        if len(found) == MAX_WORDS:
            break
    stems: list[str] = Stemmer.Stemmer("english").stemWords(found)  # it keeps state between calls: one a call
    return stems


def bucket(term: str) -> int:
    """Hash bucket of a term (crc32: the same on every machine)."""
    return zlib.crc32(term.encode()) % BUCKETS


def buckets(text: str) -> Counter[int]:
    """Counts of hashed uni- and bigrams."""
    tokens = words(text)
    return Counter(bucket(term) for term in [*tokens, *(f"{a} {b}" for a, b in pairwise(tokens))])


def document_frequencies(texts: Sequence[str]) -> np.ndarray:
    """Smoothed IDF of every bucket, ln((1 + n) / (1 + df)) + 1, float32 (BUCKETS,)."""
    frequency = np.zeros(BUCKETS)
    for text in texts:
        frequency[list(buckets(text))] += 1
    return (np.log((1 + len(texts)) / (1 + frequency)) + 1).astype(np.float32)


def tfidf(text: str, idf: np.ndarray) -> tuple[list[int], list[float]]:
    """Buckets of a text and their TF-IDF weights (1 + ln tf) · idf, of Euclidean length 1; empty for no words."""
    counts = buckets(text)
    weights = [(1 + math.log(count)) * float(idf[index]) for index, count in counts.items()]
    length = math.sqrt(sum(weight * weight for weight in weights))
    return list(counts), [weight / length for weight in weights]


def collection_beliefs(texts: Sequence[Sequence[str]]) -> np.ndarray:
    """How much a term speaks for each agent's collection, float32 (BUCKETS, N); `texts` are each agent's documents.

    CORI (Callan, Lu, Croft 1995): T·I with T = df / (df + 100 + 100·cw/mean cw), cw the collection's words, and I the
    inverse collection frequency. It knows what agents hold, nothing of queries; an agent without local documents gets 0.
    """
    agents = len(texts)
    frequency, size = np.zeros((BUCKETS, agents)), np.zeros(agents)
    for agent, documents in enumerate(texts):
        for document in documents:
            counts = buckets(document)
            frequency[list(counts), agent] += 1
            size[agent] += sum(counts.values())
    holders = (frequency > 0).sum(axis=1)
    rarity = np.log((agents + 0.5) / np.maximum(holders, 1)) / math.log(agents + 1.0)
    share = frequency / (frequency + 100 + 100 * size / max(size.mean(), 1.0))
    return (share * rarity[:, None]).astype(np.float32)
