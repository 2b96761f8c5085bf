"""Honest baselines: the same queries, outcomes, seeds and threshold fitting as the routers they stand beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from routewright.pools.pool import Pool, document_text
from routewright.pools.search import BM25Index, tokenize
from routewright.search_router.examples import Example
from routewright.search_router.judges import pool_documents

REGULARISATION = (1.0, 10.0, 100.0)  # C, chosen on dev by the NDCG@10 of the first agent
UNION_DEPTH = 10


def first_agent_ndcg(scores: np.ndarray, examples: Sequence[Example], names: Sequence[str]) -> float:
    """Mean NDCG@10 of the best-scored agent alone, with the raw query."""
    return float(np.mean([e.outcome[names[i]] for e, i in zip(examples, scores.argmax(axis=1), strict=True)]))


@dataclass
class LinearRouter:
    """TF-IDF (uni- and bigrams) and multinomial logistic regression; P(agent | query)."""

    names: list[str]
    vectorizer: TfidfVectorizer
    classifier: LogisticRegression

    def probabilities(self, queries: Sequence[str]) -> np.ndarray:
        """float (len(queries), N) in pool order; an agent that was never a label has probability 0."""
        out = np.zeros((len(queries), len(self.names)))
        columns = [self.names.index(name) for name in self.classifier.classes_]
        out[:, columns] = self.classifier.predict_proba(self.vectorizer.transform(queries))
        return out


def fit_linear(
    train: Sequence[Example], labels: Sequence[str], dev: Sequence[Example], names: list[str]
) -> LinearRouter | None:
    """Fit on one label a query; C is chosen on dev. None where all labels are the same agent."""
    if len(set(labels)) < 2:
        return None
    queries = [example.query for example in train]
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True).fit(queries)
    features = vectorizer.transform(queries)
    fitted = [
        LinearRouter(names, vectorizer, LogisticRegression(C=c, max_iter=3000).fit(features, labels))
        for c in REGULARISATION
    ]
    texts = [example.query for example in dev]
    return max(fitted, key=lambda router: first_agent_ndcg(router.probabilities(texts), dev, names))


def outcome_labels(train: Sequence[Example]) -> tuple[list[Example], list[str]]:
    """The training queries that some agent answers, each with its best agent (first in pool order among equals)."""
    answered = [example for example in train if example.best > 0]
    return answered, [max(example.outcome, key=lambda name: example.outcome[name]) for example in answered]


def best_single_agent(train: Sequence[Example], names: Sequence[str]) -> str:
    """The agent with the highest mean outcome on the training queries; of a log's, those that know its outcome count."""
    known = {name: [example.outcome[name] for example in train if name in example.outcome] for name in names}
    return max(names, key=lambda name: float(np.mean(known[name])) if known[name] else 0.0)


class UnionVote:
    """One BM25 index over all agents' documents: an agent's score is how many of the top ten documents it holds.

    Votes are weighted 1/(60 + rank) so that ties are rare; an agent without a document in the top ten has no vote.
    """

    def __init__(self, pool: Pool) -> None:
        self.names = pool.names
        documents = pool_documents(pool)
        fields = {
            (pool.corpus_name(agent.name), agent.name): getattr(agent.search, "fields", ["title", "text"])
            for agent in pool.agents
        }
        self.holders: dict[tuple[str, str], list[int]] = {}
        for i, name in enumerate(pool.names):
            for document in pool.documents(name):
                self.holders.setdefault((pool.corpus_name(name), document["_id"]), []).append(i)
        self.keys = list(documents)
        rows = []
        for row, (key, document) in enumerate(documents.items()):
            # a document is indexed as its fullest holder indexes it
            holder = max(self.holders[key], key=lambda i: len(document_text(document, fields[key[0], self.names[i]])))
            rows.append({"_id": str(row), "text": document_text(document, fields[key[0], self.names[holder]])})
        self.index = BM25Index(rows, ["text"], pool.name)

    def probabilities(self, queries: Sequence[str]) -> np.ndarray:
        """Shares of the vote, float (len(queries), N); all zero where nothing matches."""
        found = self.index.search(tokenize(list(queries)), [None] * len(queries), UNION_DEPTH)
        out = np.zeros((len(queries), len(self.names)))
        for row, hits in enumerate(found):
            for rank, hit in enumerate(hits, 1):
                for agent in self.holders[self.keys[int(hit.doc_id)]]:
                    out[row, agent] += 1 / (60 + rank)
        return out / np.maximum(out.sum(axis=1, keepdims=True), 1e-12)
