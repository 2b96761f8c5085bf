"""Keyword candidates of a query, and the offline rule that labels them: its rarest content words."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from datetime import date

from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from routewright.pools.pool import BM25Search, Pool
from routewright.search_router.time_expressions import find_time_expression

CANDIDATES = 16  # words of a query that may become keywords
LABELLED = 6
TITLE_SHARE = 0.1
OPENING = 8
_WORD = re.compile(r"[^\W\d_][\w-]*")


@dataclass(frozen=True)
class Candidate:
    """A content word of the query: its text and its character span."""

    word: str
    start: int
    end: int


def candidates(query: str, reference: date | None) -> list[Candidate]:
    """The first `CANDIDATES` distinct content words outside the query's time expression, in query order."""
    expression = find_time_expression(query, reference) if reference else None
    seen: set[str] = set()
    found = []
    for match in _WORD.finditer(query[:4000]):
        word = match.group().lower()
        if expression and match.start() < expression.end and match.end() > expression.start:
            continue
        if len(word) < 3 or word in ENGLISH_STOP_WORDS or word in seen:
            continue
        seen.add(word)
        found.append(Candidate(word, match.start(), match.end()))
        if len(found) == CANDIDATES:
            break
    return found


def title_shares(pool: Pool) -> dict[str, float]:
    """Of the documents that hold a word, the share that hold it in their title, over the pool's local corpora.

    A document without a title is named by the first `OPENING` words of its text. Empty for HTTP-only pools.
    """
    named: Counter[str] = Counter()
    held: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for agent in pool.agents:
        if not isinstance(agent.search, BM25Search):
            continue
        corpus = pool.corpus_name(agent.name)
        for document in pool.documents(agent.name):
            if (corpus, document["_id"]) not in seen:
                seen.add((corpus, document["_id"]))
                text = [word.lower() for word in _WORD.findall(document.get("text") or "")]
                title = {word.lower() for word in _WORD.findall(document.get("title") or "")} or set(text[:OPENING])
                named.update(title)
                held.update(title.union(text))
    return {word: count / held[word] for word, count in named.items()}


def label_keywords(query: str, reference: date | None, shares: dict[str, float]) -> list[str]:
    """The query's words that name documents: at most `LABELLED` of the highest title share, in query order.

    On the embedded pool these words, searched twice, add 0.01 NDCG@10 to the best agent's results; the rarest words of a
    query, the obvious other rule, take 0.03 away.
    """
    words = [candidate.word for candidate in candidates(query, reference)]
    naming = sorted((w for w in words if shares.get(w, 0.0) >= TITLE_SHARE), key=lambda w: -shares[w])[:LABELLED]
    return [word for word in words if word in naming]
