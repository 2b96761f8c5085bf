"""The frozen intent labeller: which agents a query *looks* meant for, from the query and the agents' cards alone.

It never sees where the answer lives. Its labels are what SFT learns; the queries that it sends at least 0.2 NDCG@10 below
the best agent are the mismatch subset (methods: arXiv 2608.00030).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.special import softmax
from sklearn.feature_extraction.text import TfidfVectorizer

from routewright.language_models.embedding import embed

EMBEDDING_WEIGHT = 2.0  # TF-IDF rows and embeddings have length 1; meaning counts twice as much as shared words
TEMPERATURE = 0.1
SECOND_AGENT = 0.6  # a second agent is intended too when its probability is at least this share of the first's
_PHRASE = re.compile(r"[.,;:()\n]+")


def card_phrases(card: str) -> list[str]:
    """The phrases of a card, split at punctuation, then the card itself."""
    phrases = [phrase.strip() for phrase in _PHRASE.split(card)]
    return [phrase for phrase in phrases if len(phrase) > 2] + [card]


@dataclass
class IntentLabeller:
    """An agent's score is the similarity of the query to the nearest phrase of its card."""

    names: list[str]
    vectorizer: TfidfVectorizer
    phrases: sparse.csr_matrix  # TF-IDF of every phrase, length-1 rows
    embeddings: np.ndarray  # MiniLM of every phrase
    owner: np.ndarray  # index of the agent whose card holds the phrase

    def probabilities(self, queries: list[str]) -> np.ndarray:
        """P(agent | query), float (len(queries), N), rows sum to 1, columns in pool order."""
        lexical = (self.vectorizer.transform(queries) @ self.phrases.T).toarray()
        similarity = lexical + EMBEDDING_WEIGHT * embed(queries) @ self.embeddings.T
        scores = np.stack([similarity[:, self.owner == i].max(axis=1) for i in range(len(self.names))], axis=1)
        return softmax(scores / TEMPERATURE, axis=1)

    def label(self, probabilities: np.ndarray) -> list[list[str]]:
        """Intended agents, most probable first: the best, and a second one within `SECOND_AGENT` of it."""
        labels = []
        for row in probabilities:
            order = np.argsort(-row, kind="stable")[:2]
            labels.append([self.names[i] for i in order if row[i] >= SECOND_AGENT * row[order[0]]])
        return labels


def fit_labeller(cards: dict[str, str]) -> IntentLabeller:
    """The labeller of these cards (agent name to card text); deterministic, nothing but the cards goes in."""
    names = list(cards)
    phrases = [
        (phrase, i) for i, name in enumerate(names) for phrase in [name.replace("-", " "), *card_phrases(cards[name])]
    ]
    texts = [phrase for phrase, _ in phrases]
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, stop_words="english").fit(texts)
    return IntentLabeller(
        names, vectorizer, vectorizer.transform(texts).tocsr(), embed(texts), np.array([owner for _, owner in phrases])
    )
