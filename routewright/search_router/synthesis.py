"""Make training and evaluation examples for any pool: from its human queries, its corpora and its query logs.

A teacher behind an OpenAI-compatible URL writes and labels queries where one is configured (see teacher.py);
otherwise the offline generator below writes known-item queries and the card-only labeller labels them. Intent labels never
depend on where the answer lives.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from scipy import sparse
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, CountVectorizer

from routewright.config import Profile
from routewright.errors import BadInput
from routewright.evaluation.off_policy import action_of
from routewright.language_models.chat import ChatClient, chat_client_from_environment
from routewright.pools.pool import SPLITS, BM25Search, Document, Pool, document_period, document_text, load_pool
from routewright.pools.query_log import read_query_log
from routewright.pools.search import PoolSearch
from routewright.search_router.examples import Example, measure_outcomes, write_examples
from routewright.search_router.intent import fit_labeller
from routewright.search_router.keywords import label_keywords, title_shares
from routewright.search_router.teacher import label_queries, write_queries
from routewright.search_router.time_expressions import resolve_interval

NEAR_DUPLICATE = 0.8  # Jaccard similarity of word sets above which a training query is dropped
SHARES = (("train", 0.70), ("dev", 0.15), ("test", 0.15))
STYLES = ("how-to", "keywords", "fault report")
DATED_SHARE = 0.3  # share of synthetic queries for dated documents that name the document's year or month
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_WORD = re.compile(r"[^\W\d_][\w'-]*")


def split_by_group(group: str, seed: int) -> str:
    """train, dev or test (70/15/15) from the hash of seed and document group."""
    position = int(hashlib.sha256(f"{seed}:{group}".encode()).hexdigest()[:8], 16) / 2**32
    for name, share in SHARES:
        if position < share:
            return name
        position -= share
    return SHARES[-1][0]


def pool_queries(pool: Pool) -> dict[str, list[Example]]:
    """The pool's own queries by split; a query that several agents judge is one example with all their qrels."""
    by_key: dict[tuple[str, str], tuple[str, Example]] = {}
    for agent in pool.agents:
        texts = {row["_id"]: row for row in pool.queries(agent.name)}
        file = str(agent.queries.file) if agent.queries else ""
        for split in SPLITS:
            for query_id, grades in pool.qrels(agent.name, split).items():
                positive = {document: grade for document, grade in grades.items() if grade > 0}
                if not positive:
                    continue
                row = texts[query_id]
                metadata = row.get("metadata") or {}
                if (file, query_id) not in by_key:
                    by_key[file, query_id] = (
                        split,
                        Example(
                            id=f"{agent.name}/{query_id}",
                            query=row["text"],
                            home=agent.name,
                            group=metadata.get("group") or f"{agent.name}/{query_id}",
                            qrels={},
                            reference_date=metadata.get("reference_date"),
                            style=metadata.get("style") or "human",
                            source="synthetic" if metadata.get("style") else "human",
                            start=metadata.get("start"),
                            end=metadata.get("end"),
                        ),
                    )
                    _check_metadata(by_key[file, query_id][1], file)
                by_key[file, query_id][1].qrels[agent.name] = positive
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
    for name, example in by_key.values():
        splits[name].append(example)
    return splits


def _check_metadata(example: Example, file: str) -> None:
    try:
        _ = example.reference, example.interval
    except (ValueError, TypeError) as error:
        raise BadInput(
            f"{file}, query {example.id}: metadata.reference_date, start, end: expected ISO dates in order, got {error}"
        ) from None


def _content_words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text) if len(word) > 2 and word.lower() not in ENGLISH_STOP_WORDS]


def _dated(document: Document, rng: random.Random) -> tuple[str, date, date] | None:
    """A phrase for the document's own period, and that period; None for an undated document."""
    text = (document.get("metadata") or {}).get("date")
    if not text:
        return None
    first, last = document_period(str(text))
    if first.year == last.year and first.month == last.month and rng.random() < 0.5:
        days = calendar.monthrange(first.year, first.month)[1]
        return f"in {first:%B} {first.year}", first.replace(day=1), first.replace(day=days)
    return f"from {first.year}", date(first.year, 1, 1), date(first.year, 12, 31)


def known_item_query(document: Document, fields: Sequence[str], style: str, rng: random.Random) -> str:
    """An offline query that the document answers: words of one of its sentences, shortened as people type them."""
    text = document_text(document, list(fields))
    sentences = [sentence for sentence in _SENTENCE.split(text) if len(_content_words(sentence)) >= 4] or [text]
    words = _content_words(rng.choice(sentences[:8]))
    length = rng.randint(4, 9)
    start = rng.randint(0, max(0, len(words) - length))
    picked = " ".join(words[start : start + length]).lower()
    if style == "how-to":
        return f"{rng.choice(['how to', 'how do I', 'what is known about', 'papers on', 'explain'])} {picked}"
    if style == "fault report":
        return f"{rng.choice(['problem with', 'error', 'why does it fail:'])} {picked}"
    return picked


def corpus_queries(
    pool: Pool, human: Sequence[Example], at_least: int, client: ChatClient | None, seed: int
) -> list[Example]:
    """Synthetic queries for each agent with a local corpus that has fewer than `at_least` human training queries.

    They are written by the teacher, or offline, and fill the agent's training queries up to that number.
    """
    given = Counter(example.home for example in human)
    examples = []
    for agent in pool.agents:
        per_agent = at_least - given[agent.name]
        if not isinstance(agent.search, BM25Search) or per_agent <= 0:
            continue
        rng = random.Random(f"{seed}:{agent.name}")
        documents = pool.documents(agent.name)
        chosen = [rng.choice(documents) for _ in range(per_agent)]
        if client is None:
            styles = [rng.choice(STYLES) for _ in chosen]
            written = [
                (document, style, known_item_query(document, agent.search.fields, style, rng))
                for document, style in zip(chosen, styles, strict=True)
            ]
        else:
            unique = list({document["_id"]: document for document in chosen}.values())[
                : max(1, per_agent // len(STYLES))
            ]
            by_id = {document["_id"]: document for document in unique}
            written = [(by_id[row.doc_id], row.style, row.query) for row in write_queries(client, unique, STYLES, 1)]
        for number, (document, style, text) in enumerate(written):
            period = _dated(document, rng) if rng.random() < DATED_SHARE else None
            reference = (period[2] if period else date(2026, 1, 1)) + timedelta(rng.randint(1, 700))
            examples.append(
                Example(
                    id=f"{agent.name}/synthetic-{number}",
                    query=f"{text} {period[0]}" if period else text,
                    home=agent.name,
                    group=f"{pool.corpus_name(agent.name)}:{document['_id']}",
                    qrels={agent.name: {document["_id"]: 1}},
                    reference_date=reference.isoformat(),
                    style=style,
                    start=period[1].isoformat() if period else None,
                    end=period[2].isoformat() if period else None,
                )
            )
    return examples


def logged_queries(path: Path, pool: Pool) -> list[Example]:
    """Training examples from a query log: entries with qrels, which every agent is searched for, or else with outcomes.

    An agent that an outcome leaves out counts as 0, unless the entry's decision says that it was not asked: its outcome is
    not known then.
    """
    examples = []
    for number, entry in enumerate(read_query_log(path), 1):
        unknown = [name for name in [*entry.qrels, *entry.outcome] if name not in pool.names]
        if unknown:
            raise BadInput(
                f"{path}, entry {number}: unknown agent '{unknown[0]}', expected one of {', '.join(pool.names)}"
            )
        positive = {agent: {document: grade for document, grade in grades.items() if grade > 0}
                    for agent, grades in entry.qrels.items()}  # fmt: skip
        qrels = {agent: grades for agent, grades in positive.items() if grades}
        if not entry.learnable or not (qrels or entry.outcome):
            continue
        best = max(entry.outcome, key=lambda name: entry.outcome[name]) if entry.outcome else next(iter(qrels))
        asked = {*(action_of(entry) or pool.names), *entry.outcome}
        outcome = {name: entry.outcome.get(name, 0.0) for name in pool.names if name in asked}
        examples.append(
            Example(
                id=f"log/{number}",  # a request may be logged twice
                query=entry.query,
                home=best,
                group=f"log:{entry.query.casefold()}",
                qrels=qrels,
                reference_date=entry.reference_date.isoformat() if entry.reference_date else None,
                style="log",
                source="log",
                start=entry.start.isoformat() if entry.start else None,
                end=entry.end.isoformat() if entry.end else None,
                outcome={} if qrels else outcome,
            )
        )
    return examples


def assign_splits(human: dict[str, list[Example]], extra: Iterable[Example], seed: int) -> dict[str, list[Example]]:
    """train, dev and test: given splits are kept; where no test is given, dev becomes test and dev comes out of train.

    Extra (synthetic, logged) examples go to train where the pool has held-out human queries, else by group 70/15/15; those
    without qrels always go to train, since nothing that is searched for them could be judged.
    """
    splits: dict[str, list[Example]] = {split: list(human[split]) for split in SPLITS}
    held_out = bool(splits["dev"] or splits["test"])
    for example in extra:
        to_train = held_out or not example.qrels
        splits["train" if to_train else split_by_group(example.group, seed)].append(example)
    if splits["dev"] and not splits["test"]:
        splits["test"], splits["dev"] = splits["dev"], []
    if not splits["dev"]:
        selection = [e for e in splits["train"] if e.source != "log" and split_by_group(e.group, seed) == "dev"]
        chosen = {id(example) for example in selection}
        splits["dev"] = selection
        splits["train"] = [example for example in splits["train"] if id(example) not in chosen]
    for split in splits:
        random.Random(f"{seed}:{split}").shuffle(splits[split])
    return splits


def near_duplicates(queries: Sequence[str], held_out: Sequence[str]) -> np.ndarray:
    """Which `queries` share at least `NEAR_DUPLICATE` of their words (Jaccard) with a held-out one; bool (len(queries),)."""
    if not queries or not held_out:
        return np.zeros(len(queries), dtype=bool)
    vectorizer = CountVectorizer(binary=True, token_pattern=r"(?u)\b\w+\b").fit([*queries, *held_out, "word"])
    a, b = vectorizer.transform(queries).astype(np.float32), vectorizer.transform(held_out).astype(np.float32)
    size_a, size_b = np.asarray(a.sum(axis=1)).ravel(), np.asarray(b.sum(axis=1)).ravel()
    flags = np.zeros(len(queries), dtype=bool)
    for start in range(0, len(queries), 512):
        shared = sparse.coo_matrix(a[start : start + 512] @ b.T)
        union = size_a[start + shared.row] + size_b[shared.col] - shared.data
        flags[start + shared.row[shared.data >= NEAR_DUPLICATE * union]] = True
    same = {query.casefold().strip() for query in held_out}
    return flags | np.array([query.casefold().strip() in same for query in queries])


def label(examples: list[Example], pool: Pool, client: ChatClient | None) -> None:
    """Fill intent, keywords and interval labels of examples, from the queries and the cards alone."""
    labeller = fit_labeller({agent.name: agent.card for agent in pool.agents})
    probabilities = labeller.probabilities([example.query for example in examples])
    shares = title_shares(pool)
    for example, row, intended in zip(examples, probabilities, labeller.label(probabilities), strict=True):
        example.intent = [round(float(p), 4) for p in row]
        example.intent_agents = intended
        example.keywords = label_keywords(example.query, example.reference, shares)
        if example.source in ("human", "log") and example.reference and example.interval is None:
            interval = resolve_interval(example.query, example.reference)
            if interval:
                example.start = interval.start.isoformat() if interval.start else None
                example.end = interval.end.isoformat() if interval.end else None
    if client is not None:
        cards = {agent.name: agent.card for agent in pool.agents}
        for example, told in zip(examples, label_queries(client, [e.query for e in examples], cards), strict=True):
            if told is not None:
                example.intent_agents, example.keywords = told.intent_agents, [word.lower() for word in told.keywords]
                example.intent = [float(name in told.intent_agents) / len(told.intent_agents) for name in pool.names]


def describe(splits: dict[str, list[Example]], pool: Pool) -> dict[str, Any]:
    """Counts, each agent's own NDCG@10, the oracle's, the labeller's and the mismatch share of what has qrels, per split."""
    stats: dict[str, Any] = {}
    for split, examples in splits.items():
        if not examples:
            stats[split] = {"queries": 0}
            continue
        homes: dict[str, int] = defaultdict(int)
        for example in examples:
            homes[example.home] += 1
        stats[split] = {
            "queries": len(examples),
            "homes": dict(homes),
            "with_interval": sum(example.interval is not None for example in examples),
        }
        judged = [example for example in examples if example.qrels]
        if judged:
            stats[split]["mismatch"] = float(np.mean([example.mismatch() for example in judged]))
            stats[split]["ndcg@10"] = {
                **{name: float(np.mean([e.outcome[name] for e in judged])) for name in pool.names},
                "labeller": float(np.mean([e.outcome[e.intent_agents[0]] for e in judged])),
                "oracle": float(np.mean([e.best for e in judged])),
            }
    return stats


def synthesize(dataset: Path, out: Path, profile: Profile, seed: int, query_log: Path | None = None) -> None:
    """Write train/dev/test.jsonl, stats.json and labeller.json into `out`; a finished folder is left as it is."""
    if (out / "stats.json").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    pool = load_pool(dataset / "pool.yaml")
    client = chat_client_from_environment(out / "teacher-cache", out / "checkpoints" / "llm-spent")
    human = pool_queries(pool)
    extra = corpus_queries(pool, human["train"], profile.synthesis.queries_per_agent, client, seed)
    if query_log is not None:
        extra += logged_queries(query_log, pool)
    splits = assign_splits(human, extra, seed)
    # what was written from a document that answers a held-out query would give its answer away
    answers = {key for split in ("dev", "test") for example in splits[split] for key in example.relevant(pool)}
    written = {id(example) for example in extra if example.source == "synthetic"}
    splits["train"] = [e for e in splits["train"] if id(e) not in written or not answers & e.relevant(pool).keys()]
    held_out = [example.query for split in ("dev", "test") for example in splits[split]]
    duplicate = near_duplicates([example.query for example in splits["train"]], held_out)
    splits["train"] = [e for e, is_copy in zip(splits["train"], duplicate, strict=True) if not is_copy]
    copies_in_dev = near_duplicates([e.query for e in splits["dev"]], [e.query for e in splits["test"]])
    splits["dev"] = [e for e, is_copy in zip(splits["dev"], copies_in_dev, strict=True) if not is_copy]
    limits = {
        "train": profile.synthesis.max_train,
        "dev": profile.synthesis.max_eval,
        "test": profile.synthesis.max_eval,
    }
    splits = {split: examples[: limits[split]] for split, examples in splits.items()}
    for split in SPLITS:
        if not splits[split]:
            raise BadInput(
                f"pool '{pool.name}' has no {split} queries: expected human queries with qrels in the pool file, "
                "synthesis.queries_per_agent above 0 in the profile, or a query log with qrels"
            )
    everything = [example for examples in splits.values() for example in examples]
    label(everything, pool, client)
    search = PoolSearch(pool, out / "search-cache")
    step = 500
    unmeasured = [example for example in everything if not example.outcome]
    for start in track(range(0, len(unmeasured), step), description="searching every agent"):
        measure_outcomes(unmeasured[start : start + step], pool, search)
    for name, examples in splits.items():
        write_examples(out / f"{name}.jsonl", examples)
    stats = describe(splits, pool) | {"near_duplicates_removed": int(duplicate.sum() + copies_in_dev.sum())}
    (out / "labeller.json").write_text(
        json.dumps(
            {"labels": "teacher" if client else "nearest card phrase (TF-IDF + MiniLM)", "agents": pool.names}, indent=1
        )
    )
    shutil.rmtree(out / "search-cache", ignore_errors=True)  # outcomes are in the examples now
    partial = out / "stats.partial"
    partial.write_text(json.dumps(stats, indent=1), encoding="utf-8")
    partial.rename(out / "stats.json")
