"""The teacher: a language model that writes queries for documents and labels queries with their intent."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from rich.progress import track

from routewright.errors import StageFailed
from routewright.language_models.chat import DATA_RULE, Answer, ChatClient, Message, ask_each, delimited

QUERIES_A_CALL = 20
QUERY_CHARACTERS = 500  # what the labeller reads of a query

_log = logging.getLogger(__name__)


class StyledQuery(BaseModel):
    style: str
    query: str


class StyledQueries(BaseModel):
    queries: list[StyledQuery]


class IntentLabel(BaseModel):
    number: int
    agents: list[str]
    keywords: list[str]


class IntentLabels(BaseModel):
    labels: list[IntentLabel]


@dataclass(frozen=True)
class WrittenQuery:
    """A query that the document ``doc_id`` answers."""

    doc_id: str
    style: str
    query: str


@dataclass(frozen=True)
class Label:
    """What a query asks for on its surface: agents, most fitting first, and words of the query."""

    intent_agents: list[str]
    keywords: list[str]


def write_queries(
    client: ChatClient, documents: Sequence[Mapping[str, Any]], styles: Sequence[str], n: int
) -> list[WrittenQuery]:
    """``n`` queries in each style for each BEIR document, in document order; fewer where the answer was unusable.

    Queries that repeat the title or each other are dropped. Documents whose question failed are counted in a warning
    and get none. Raises BadInput for a wrong URL or key.
    """
    rule = (
        f"You write search queries as people type them. {DATA_RULE} For the document given, write {n} queries in each "
        f"of these styles: {'; '.join(styles)}. The document must answer every query. Never copy its title, and use "
        "other words than the document where a person would. Name the style of each query exactly as listed."
    )
    questions: list[list[Message]] = [
        [
            {"role": "system", "content": rule},
            {"role": "user", "content": delimited("document", f"{row.get('title') or ''}\n\n{row.get('text') or ''}")},
        ]
        for row in documents
    ]
    answers = ask_each(client, questions, StyledQueries)
    written: list[WrittenQuery] = []
    errors: list[StageFailed] = []
    for row, answer in zip(documents, track(answers, "writing queries", len(questions)), strict=True):
        if isinstance(answer, StageFailed):
            errors.append(answer)
            continue
        left = dict.fromkeys(styles, n)
        seen = {""}
        for item in answer.value.queries:
            query, plain = " ".join(item.query.split()), _words(item.query)
            if left.get(item.style, 0) and plain not in seen and not _copies(plain, _words(row.get("title") or "")):
                seen.add(plain)
                left[item.style] -= 1
                written.append(WrittenQuery(row["_id"], item.style, query))
    _warn(errors, len(questions), "documents", "no queries")
    return written


def label_queries(client: ChatClient, queries: Sequence[str], cards: Mapping[str, str]) -> list[Label | None]:
    """Intent labels from the queries and the agents' cards (name to card) alone, in the order of the queries.

    None where the model failed, named no known agent or left the query out; their number goes into a warning. Raises
    BadInput for a wrong URL or key.
    """
    rule = (
        f"You label search queries for a router. {DATA_RULE} The agents are:\n"
        + "\n".join(f"- {json.dumps(name)}: {' '.join(card.split())}" for name, card in cards.items())
        + "\nThe data holds numbered queries, one JSON object a line. For each number give: agents, the names of the "
        "agents that the query seems meant for, judged by the cards alone, one or at most two, most fitting first; "
        "keywords, up to five words or phrases copied from the query that say what is sought."
    )
    batches = [queries[start : start + QUERIES_A_CALL] for start in range(0, len(queries), QUERIES_A_CALL)]
    questions: list[list[Message]] = []
    for batch in batches:
        lines = [json.dumps({"number": i, "query": query[:QUERY_CHARACTERS]}) for i, query in enumerate(batch, 1)]
        data = delimited("queries", "\n".join(lines), limit=1_000_000)
        questions.append([{"role": "system", "content": rule}, {"role": "user", "content": data}])
    answers = ask_each(client, questions, IntentLabels)
    errors: list[StageFailed] = []
    labels: list[Label | None] = []
    for batch, answer in zip(batches, track(answers, "labelling queries", len(questions)), strict=True):
        if isinstance(answer, StageFailed):
            errors.append(answer)
            labels += [None] * len(batch)
            continue
        labels += _labels(batch, answer, cards)
    _warn(errors, len(questions), "batches", "no labels")
    if labels.count(None):
        _log.warning("%d of %d queries stay unlabelled", labels.count(None), len(labels))
    return labels


def _labels(batch: Sequence[str], answer: Answer[IntentLabels], cards: Mapping[str, str]) -> list[Label | None]:
    given = {label.number: label for label in answer.value.labels}
    labels: list[Label | None] = []
    for number, query in enumerate(batch, 1):
        label = given.get(number)
        agents = [name for name in dict.fromkeys(label.agents) if name in cards] if label else []
        if label is None or not agents:
            labels.append(None)
            continue
        folded = query.casefold()
        keywords = [word.strip() for word in label.keywords if word.strip() and word.strip().casefold() in folded]
        labels.append(Label(agents, list(dict.fromkeys(keywords))))
    return labels


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _copies(query: str, title: str) -> bool:
    """Whether a query is the title, or holds a title of three words or more; shorter ones are often plain terms."""
    return bool(title) and (query == title or (title.count(" ") >= 2 and f" {title} " in f" {query} "))


def _warn(errors: Sequence[StageFailed], asked: int, what: str, result: str) -> None:
    if errors:
        reasons = "; ".join(dict.fromkeys(str(error) for error in errors))
        _log.warning("%d of %d %s got %s: %s", len(errors), asked, what, result, reasons)
