"""Judges of R_con (arXiv 2608.00030): how good is what the chosen agents returned, in [0, 1]."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

from pydantic import BaseModel, Field

from routewright.errors import BadInput, StageFailed
from routewright.evaluation.ranking import DocumentKey, ndcg_at_10
from routewright.language_models.chat import DATA_RULE, ChatClient, Message, ask_each, delimited
from routewright.pools.pool import Document, Pool
from routewright.pools.search import BM25Index, Hit, tokenize

FIELDS = ["title", "text"]
DEPTH = 10
GRADED = 50  # documents that the offline judge grades

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JudgeItem:
    """One query and the merged list of its chosen agents, best first; qrels map (corpus, doc id) to grades."""

    query: str
    hits: Sequence[Hit]
    qrels: Mapping[DocumentKey, int] | None = None


class Judge(Protocol):
    """What RL asks for R_con."""

    def score(self, items: Sequence[JudgeItem]) -> list[float]:
        """One value in [0, 1] an item, in their order; higher is better."""


class QrelsJudge:
    """NDCG@10 of the merged list by relevance judgements: the judge for pools that have them."""

    def score(self, items: Sequence[JudgeItem]) -> list[float]:
        """NDCG@10 an item; ValueError for an item without qrels."""
        scores = []
        for item in items:
            if item.qrels is None:
                raise ValueError("the qrels judge needs qrels with every item")
            scores.append(ndcg_at_10(_keys(item.hits), item.qrels))
        return scores


class OfflineJudge:
    """NDCG@10 by pseudo-judgements: the fifty best documents by one BM25 index over all the pool, graded by their lead.

    A grade is how far the document's score lies above the fiftieth's. Agents' own scores cannot be compared, for each
    has its own term statistics; one index over the pool can. It sees no qrels and no agents. Measured against NDCG@10
    on seven human-judged collections and on aws-docs: plain BM25 sums agree less in value, ten documents of equal
    grade lose on aws-docs, term coverage loses, and re-ranking with MiniLM gained little for minutes of embedding.
    """

    def __init__(self, pool: Pool) -> None:
        """Indexes the pool; BadInput where an agent's documents are not at hand (HTTP)."""
        for name in pool.names:
            if pool.corpus(name) is None:
                raise BadInput(
                    f"{pool.path}: agent {name} searches over HTTP, but the offline judge needs every agent's corpus"
                )
        documents = pool_documents(pool)
        self._keys = list(documents)
        # two corpora may share ids, so the pool-wide index numbers its documents
        rows = [{**document, "_id": str(row)} for row, document in enumerate(documents.values())]
        self._index = BM25Index(rows, FIELDS, str(pool.path))
        self._grades: dict[str, dict[DocumentKey, float]] = {}

    def grades(self, queries: Sequence[str]) -> list[dict[DocumentKey, float]]:
        """The pseudo-judgements of each query; remembered, so RL searches once."""
        new = [query for query in dict.fromkeys(queries) if query not in self._grades]
        if new:
            found = self._index.search(tokenize(new), [None] * len(new), GRADED)
            for query, hits in zip(new, found, strict=True):
                # with fewer documents every match counts
                floor = hits[-1].score if len(hits) == GRADED else 0.0
                self._grades[query] = {self._keys[int(hit.doc_id)]: hit.score - floor for hit in hits}
        return [self._grades[query] for query in queries]

    def score(self, items: Sequence[JudgeItem]) -> list[float]:
        """NDCG@10 by the pseudo-judgements; 0 where no document of the pool shares a word with the query."""
        judged = self.grades([item.query for item in items])
        return [ndcg_at_10(_keys(item.hits), grades) for item, grades in zip(items, judged, strict=True)]


class Verdict(BaseModel):
    """The five criteria of arXiv 2608.00030, 1 (worst) to 5."""

    answerability: int = Field(ge=1, le=5)
    completeness: int = Field(ge=1, le=5)
    semantic_alignment: int = Field(ge=1, le=5)
    grounding: int = Field(ge=1, le=5)
    source_trust: int = Field(ge=1, le=5)


class LLMJudge:
    """A language model grades results by five criteria; it reads titles, dates and texts, no agents and no qrels."""

    RULE = (
        f"You grade search results. {DATA_RULE} Grade from 1 (worst) to 5 how well the results, best first, serve the "
        "query. answerability: can the query be answered from them; completeness: do they cover all it asks; "
        "semantic_alignment: do they mean what the query means, beyond shared words; grounding: is there concrete "
        "evidence in them to cite; source_trust: do they read as reliable, fitting sources for it."
    )

    def __init__(self, client: ChatClient, documents: Mapping[DocumentKey, Document]) -> None:
        """``documents`` as from `pool_documents`; hits that are not in it (HTTP agents) are graded by their titles."""
        self._client = client
        self._documents = documents

    def score(self, items: Sequence[JudgeItem]) -> list[float]:
        """(mean of the five grades - 1) / 4; 0 for an empty list.

        One question an item, so that the client's cache serves RL, which meets the same results again. An item whose
        question failed gets the mean of the others, since an error must not read as a bad answer, and is counted in a
        warning. Raises what failed if nothing could be judged, and BadInput for a wrong URL or key.
        """
        asked = [self._question(item) if item.hits else None for item in items]
        questions = {repr(messages): messages for messages in asked if messages}
        verdicts = dict(zip(questions, ask_each(self._client, list(questions.values()), Verdict), strict=True))
        grades: dict[str, float] = {}
        errors: list[StageFailed] = []
        for key, answer in verdicts.items():
            if isinstance(answer, StageFailed):
                errors.append(answer)
            else:
                grades[key] = (mean(answer.value.model_dump().values()) - 1) / 4
        if errors and not grades:
            raise errors[0]
        if errors:
            _log.warning("%d of %d result lists were not judged and get the mean: %s", len(errors), len(verdicts), errors[0])
        middle = mean(grades.values()) if grades else 0.0
        return [grades.get(repr(messages), middle) if messages else 0.0 for messages in asked]

    def _question(self, item: JudgeItem) -> list[Message]:
        results = []
        for rank, hit in enumerate(item.hits[:DEPTH], 1):
            text = (self._documents.get((hit.corpus, hit.doc_id)) or {}).get("text") or ""
            results.append(delimited("result", f"{rank}. {hit.title} ({hit.date or 'undated'})\n{text}", limit=600))
        content = "\n".join([delimited("query", item.query, limit=1_000), *results])
        return [{"role": "system", "content": self.RULE}, {"role": "user", "content": content}]


def pool_documents(pool: Pool) -> dict[DocumentKey, Document]:
    """Every document that some agent of the pool searches, once, by (corpus, id) as in hits; HTTP agents add none."""
    return {
        (pool.corpus_name(name), document["_id"]): document for name in pool.names for document in pool.documents(name)
    }


def _keys(hits: Sequence[Hit]) -> list[DocumentKey]:
    return [(hit.corpus, hit.doc_id) for hit in hits]
