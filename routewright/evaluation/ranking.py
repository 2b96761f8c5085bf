"""Ranking and decision metrics of the search router: NDCG@10, agent sets, keywords."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from operator import mul

DocumentKey = tuple[str, str]
"""A document: (corpus, doc id); two corpora may use the same id for different documents."""

_DEPTH = 10
_DISCOUNT = tuple(1.0 / math.log2(rank + 2) for rank in range(_DEPTH))


def ndcg_at_10(ranked: Sequence[DocumentKey], relevant: Mapping[DocumentKey, float]) -> float:
    """NDCG@10 of one ranked list, in [0, 1]: DCG = Σ grade / log2(rank + 1), over the ideal DCG of ``relevant``.

    ``ranked`` is best first and holds a document once (else ValueError). ``relevant`` maps the documents of all agents
    to grades; grades of 0 and below gain nothing. Without any relevant document the value is 0, as in trec_eval.
    Linear gain (Järvelin and Kekäläinen 2002, as trec_eval's ``ndcg_cut``); our own because a reward calls it for every
    sample, which is too often for ir_measures; a test holds it to that.
    """
    top = ranked[:_DEPTH]
    if len(set(top)) < len(top):
        raise ValueError("a ranked list must not hold the same (corpus, document) twice")
    grades = sorted((grade for grade in relevant.values() if grade > 0), reverse=True)
    if not grades:
        return 0.0
    gains = (max(relevant.get(document, 0), 0) for document in top)
    return sum(map(mul, gains, _DISCOUNT)) / sum(map(mul, grades, _DISCOUNT))


def agent_f1(chosen: Collection[str], best: Collection[str]) -> float:
    """F1 of the chosen agents against the agents within 0.05 NDCG of the best, in [0, 1]; ``best`` is never empty."""
    if not best:
        raise ValueError("the set of best agents is empty; it holds at least the best agent")
    hits = len(set(chosen) & set(best))
    return 2.0 * hits / (len(set(chosen)) + len(set(best)))


def exact_set(chosen: Collection[str], best: Collection[str]) -> int:
    """1 where the chosen agents are exactly the agents within 0.05 NDCG of the best, else 0."""
    return int(set(chosen) == set(best))


def keyword_precision(chosen: Collection[str], gold: Collection[str]) -> float:
    """Share of the chosen keywords that are gold keywords, in [0, 1], ignoring case and outer blanks.

    No keyword chosen counts 1 where there is none to find and 0 otherwise, so silence is not rewarded.
    """
    found = {keyword.strip().casefold() for keyword in chosen}
    wanted = {keyword.strip().casefold() for keyword in gold}
    if not found:
        return float(not wanted)
    return len(found & wanted) / len(found)
