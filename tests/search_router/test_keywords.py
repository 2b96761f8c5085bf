from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import yaml
from household import write_lines

from routewright.pools.pool import Pool, load_pool
from routewright.search_router.keywords import CANDIDATES, candidates, label_keywords, title_shares

TODAY = date(2025, 6, 15)


def texts(query: str, reference: date | None = TODAY) -> list[str]:
    return [candidate.word for candidate in candidates(query, reference)]


def test_candidates_are_content_words_once_in_query_order() -> None:
    assert texts("How do I repair the Kettle, or a kettle's lid-hinge of 1990s?") == ["repair", "kettle", "lid-hinge"]
    assert texts("the of and it") == []
    assert texts("") == []


def test_spans_are_those_of_the_query() -> None:
    query = "How do I repair the Kettle"
    assert [query[c.start : c.end] for c in candidates(query, None)] == ["repair", "Kettle"]


def test_time_expressions_are_no_keywords() -> None:
    query = "failed logins between March and May 2024 in sydney"
    assert texts(query) == ["failed", "logins", "sydney"]
    assert "march" in texts(query, None), "without a reference date nothing is a time expression"


def test_only_the_first_sixteen_and_only_the_beginning_of_a_long_query() -> None:
    names = ["kilo" + chr(97 + i) + chr(97 + j) for i in range(26) for j in range(26)]
    assert texts(" ".join(names)) == names[:CANDIDATES]
    assert texts(" " * 5000 + "late") == []
    assert texts("ab" * 50_000) == ["ab" * 2000]


def test_other_scripts_are_words_too() -> None:
    assert texts("שלום עולם 🚣 größe") == ["שלום", "עולם", "größe"]


def test_the_words_that_name_documents_are_the_keywords() -> None:
    shares = {"aaa": 0.9, "bbb": 0.8, "ccc": 0.7, "ddd": 0.6, "eee": 0.5, "fff": 0.4, "ggg": 0.3, "low": 0.09, "edge": 0.1}
    query = "ggg fff low eee ddd ccc bbb aaa zzyzx"
    assert label_keywords(query, None, shares) == ["fff", "eee", "ddd", "ccc", "bbb", "aaa"], "six, in query order"
    assert label_keywords("low edge", None, shares) == ["edge"]
    assert label_keywords("zzyzx", None, shares) == [], "a word of no document finds nothing"


def test_title_shares_count_each_document_of_a_shared_corpus_once(tmp_path: Path) -> None:
    untitled = "one two three four five six seven rose spade rose"
    rows = [
        {"_id": "0", "title": "Rose", "text": "the thorn of a rose"},
        {"_id": "1", "title": "Thorn", "text": "rose"},
        {"_id": "2", "title": "", "text": "rose"},
        {"_id": "3", "text": untitled},
    ]
    write_lines(tmp_path / "all.jsonl", rows)
    agents = [
        {"name": "first", "card": "a", "search": {"kind": "bm25", "corpus": "all.jsonl"}},
        {"name": "second", "card": "b", "search": {"kind": "bm25", "corpus": "all.jsonl", "include": ["0", "2"]}},
        {"name": "far", "card": "c", "search": {"kind": "http", "url": "http://127.0.0.1:9"}},
    ]
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"name": "p", "fallback": "first", "agents": agents}))
    shares = title_shares(load_pool(tmp_path / "pool.yaml"))
    assert shares["rose"] == pytest.approx(3 / 4), "a document without a title is named by its first eight words"
    assert shares["thorn"] == pytest.approx(1 / 2)
    assert "spade" not in shares


def test_title_shares_of_the_household(pool: Pool) -> None:
    shares = title_shares(pool)
    assert shares["kettle"] == 1.0
    assert "volume" not in shares
