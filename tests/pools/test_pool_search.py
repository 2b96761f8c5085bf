from __future__ import annotations

import logging
import math
import pickle
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import bm25s
import ir_measures
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_measures import nDCG
from tiny_pool import Endpoint, hits_body, write_jsonl

from routewright.errors import BadInput
from routewright.pools import search as search_module
from routewright.pools.pool import Pool, load_pool
from routewright.pools.search import CIRCUIT_FAILURES, MAX_QUERY_TERMS, BM25Index, Hit, PoolSearch, fuse, tokenize
from routewright.search_router.decision import Interval

WritePool = Callable[[Any], Path]


@pytest.fixture
def pool(write_pool: WritePool, pool_content: dict[str, Any]) -> Pool:
    return load_pool(write_pool(pool_content))


def ids(hits: list[Hit]) -> list[str]:
    return [hit.doc_id for hit in hits]


def days(start: str | None, end: str | None) -> Interval:
    return Interval(date.fromisoformat(start) if start else None, date.fromisoformat(end) if end else None)


# --- BM25


def test_a_hit_names_its_document(pool: Pool) -> None:
    [hit] = PoolSearch(pool).search("birds", "penguins")
    # idf = ln(1 + (N - n + 0.5) / (n + 0.5)) with N = 4, n = 1; tf / (tf + k1 (1 - b + b l / mean l)) with tf = 1.
    lengths = [len(words) for words in tokenize([f"{d['title']} {d['text']}" for d in pool.documents("birds")])]
    expected = math.log(1 + 3.5 / 1.5) / (1 + 1.5 * (0.25 + 0.75 * lengths[2] / np.mean(lengths)))
    assert hit == Hit("3", hit.score, "birds/corpus.jsonl.gz", "Penguin", "1961-02-28")
    assert hit.score == pytest.approx(expected, rel=1e-5)


def test_scores_are_those_of_bm25s() -> None:
    rng = random.Random(0)
    words = [f"word{i}" for i in range(300)]
    documents = [{"_id": str(i), "text": " ".join(rng.choices(words, k=rng.randint(1, 40)))} for i in range(500)]
    queries = [" ".join(rng.choices(words, k=5)) for _ in range(50)]
    reference = bm25s.BM25()
    reference.index(tokenize([d["text"] for d in documents]), show_progress=False)
    found = BM25Index(documents, ["text"], "c").search(tokenize(queries), [None] * 50, k=20)
    for query, hits in zip(queries, found, strict=True):
        scores = reference.get_scores(tokenize([query])[0])
        best = sorted(range(500), key=lambda i, s=scores: (-round(float(s[i]), 4), i))[:20]
        assert [hit.score for hit in hits] == pytest.approx([scores[i] for i in best if scores[i] > 0], rel=1e-4)
        assert all(hit.score == pytest.approx(scores[int(hit.doc_id)], rel=1e-4) for hit in hits)


def test_ties_keep_document_order_whatever_k() -> None:
    documents = [{"_id": f"{i}", "text": "same words"} for i in range(50)]
    index = BM25Index(documents, ["text"], "c")
    for k in (1, 7, 50, 100):
        [hits] = index.search(tokenize(["same"]), [None], k)
        assert ids(hits) == [str(i) for i in range(min(k, 50))]


def test_the_ranking_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    code = (
        "import random; from routewright.pools.search import BM25Index, tokenize; r = random.Random(0);"
        "docs = [{'_id': str(i), 'text': ' '.join(r.choices('abcdefgh', k=9)).replace(' ', 'x ')} for i in range(200)];"
        "q = tokenize(['ax bx cx dx ex', 'hx gx fx']);"
        "print([(h.doc_id, h.score) for l in BM25Index(docs, ['text'], 'c').search(q, [None] * 2, 100) for h in l])"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                       env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 100


@pytest.mark.parametrize("query", ["", "   ", "the of and", "?!", "zeppelin", "🚣", "x"])
def test_queries_that_find_nothing(pool: Pool, query: str) -> None:
    assert PoolSearch(pool).search("birds", query) == []


def test_right_to_left_and_emoji_text(pool: Pool) -> None:
    searches = PoolSearch(pool)
    assert ids(searches.search("boats", "קיאק")) == ["3"]
    assert ids(searches.search("boats", "🚣 סירה")) == ["3"]
    assert ids(searches.search("boats", "\ud83d canoe \x00")) == ["1"]
    assert ids(searches.search("boats", "‮eonac canoe")) == ["1"]


def test_only_the_first_terms_of_a_long_query_count(pool: Pool) -> None:
    searches = PoolSearch(pool)
    filler = " ".join(f"filler{i}" for i in range(MAX_QUERY_TERMS - 1))
    assert ids(searches.search("boats", f"{filler} canoe")) == ["1"]
    assert ids(searches.search("boats", f"{filler} more canoe")) == []
    assert ids(searches.search("boats", "canoe " + "ferry " * 17_000)) == ["2", "1"]
    assert searches.search("boats", "a" * 100_000) == []
    many = " ".join(f"w{i}" for i in range(20_000))
    assert ids(searches.search("boats", f"canoe {many}"[:100_000])) == ["1"]


def test_a_repeated_word_counts_twice(pool: Pool) -> None:
    searches = PoolSearch(pool)
    [once], [twice] = searches.search("boats", "canoe"), searches.search("boats", "canoe canoe")
    assert twice.score == pytest.approx(2 * once.score)


def test_unknown_agent_and_k(pool: Pool) -> None:
    with pytest.raises(BadInput, match="no agent 'cars', expected one of birds, boats"):
        PoolSearch(pool).search("cars", "x")
    with pytest.raises(BadInput, match="k: expected a number of hits >= 1, found 0"):
        PoolSearch(pool).search("birds", "bird", k=0)


def test_fields_choose_what_is_indexed(write_pool: WritePool, pool_content: dict[str, Any]) -> None:
    pool_content["agents"][1]["search"]["fields"] = ["title", "kind"]
    searches = PoolSearch(load_pool(write_pool(pool_content)))
    assert ids(searches.search("boats", "lake")) == ["1"]
    assert searches.search("boats", "paddles") == []


def test_a_corpus_without_a_word(write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path) -> None:
    path = write_pool(pool_content)
    write_jsonl(tmp_path / "boats.jsonl", [{"_id": "1", "title": "", "text": "the 🚣"}])
    with pytest.raises(BadInput, match=r"boats\.jsonl: no document has a word to index in the fields title, text"):
        PoolSearch(load_pool(path)).search("boats", "boat")


# --- dates


@pytest.mark.parametrize(
    ("interval", "found"),
    [
        (("1958-12-31", "1959-06-01"), {"1"}),
        (("1959-01-01", "1959-12-31"), set()),
        (("1960-06-01", "1960-06-01"), {"2"}),
        (("1960-12-31", "1961-02-28"), {"2", "3"}),
        (("1961-03-01", None), set()),
        ((None, "1960-01-01"), {"1", "2"}),
        ((None, "1958-11-30"), set()),
    ],
)
def test_periods_that_overlap_the_interval(
    pool: Pool, interval: tuple[str | None, str | None], found: set[str]
) -> None:
    assert set(ids(PoolSearch(pool).search("birds", "bird", interval=days(*interval)))) == found


def test_the_interval_is_ignored_where_nothing_is_dated(pool: Pool) -> None:
    searches = PoolSearch(pool)
    assert searches.search("boats", "boat", interval=days("2020-01-01", None)) == searches.search("boats", "boat") != []


def test_the_filter_comes_before_the_cut(pool: Pool) -> None:
    searches = PoolSearch(pool)
    best = ids(searches.search("birds", "bird runs"))
    assert best[0] == "4"
    assert ids(searches.search("birds", "bird runs", k=1, interval=days("1961-01-01", None))) == ["3"]


def test_one_batch_with_many_intervals(pool: Pool) -> None:
    searches = PoolSearch(pool)
    intervals = (None, days("1960-01-01", None), days(None, "1958-12-31"))
    requests = [("birds", query, interval) for query in ("bird", "eagle") for interval in intervals]
    requests.append(("boats", "canoe", None))
    assert searches.search_many(requests) == [searches.search(a, q, interval=i) for a, q, i in requests]


# --- batches and cache


def test_agents_with_one_corpus_share_one_index(write_pool: WritePool, pool_content: dict[str, Any]) -> None:
    pool_content["agents"].append({**pool_content["agents"][1], "name": "ships"})
    pool_content["agents"].append({"name": "river", "card": "x", "search": {
        "kind": "bm25", "corpus": "boats.jsonl", "include": {"kind": "river"}}})
    searches = PoolSearch(load_pool(write_pool(pool_content)))
    assert searches.index("ships") is searches.index("boats")
    assert sorted(ids(searches.search("river", "ferry boat"))) == ["1", "3"]
    assert searches.index("river").documents[0] is searches.index("boats").documents[0]


def test_batches_equal_single_searches(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = ["bird", "boat", "", "the", "canoe ferry", "large city"] * 5
    requests = [(agent, query, None) for query in queries for agent in ("boats", "birds")]
    one_by_one = [PoolSearch(pool).search(*request[:2]) for request in requests]
    monkeypatch.setattr(search_module, "_BATCH", 2)
    assert PoolSearch(pool).search_many(requests) == one_by_one
    assert PoolSearch(pool).search_many([]) == []


def test_the_cache_answers_without_searching(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [("birds", "bird", None), ("birds", "bird", days("1960-01-01", None)), ("boats", "no such thing", None)]
    first = PoolSearch(pool, tmp_path / "cache")
    answers = first.search_many(requests)

    def refuse(*args: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(BM25Index, "search", refuse)
    assert first.search_many(requests) == answers
    assert PoolSearch(load_pool(pool.path), tmp_path / "cache").search_many(requests) == answers
    for other in [("birds", "birds", None), ("boats", "bird", None), ("birds", "bird", days("1961-01-01", None))]:
        with pytest.raises(AssertionError, match="searched again"):
            first.search_many([other])
    with pytest.raises(AssertionError, match="searched again"):
        first.search_many(requests, k=3)


def test_a_changed_corpus_is_searched_again(pool: Pool, tmp_path: Path) -> None:
    PoolSearch(pool, tmp_path / "cache").search("boats", "canoe")
    write_jsonl(tmp_path / "boats.jsonl", [{"_id": "9", "title": "New canoe", "text": ""}])
    assert ids(PoolSearch(load_pool(pool.path), tmp_path / "cache").search("boats", "canoe")) == ["9"]


def test_answers_are_the_callers_own(pool: Pool, tmp_path: Path) -> None:
    searches = PoolSearch(pool, tmp_path / "cache")
    searches.search("boats", "canoe").clear()
    assert ids(searches.search("boats", "canoe")) == ["1"]


def test_a_pickle_in_the_cache_is_not_loaded(pool: Pool, tmp_path: Path) -> None:
    PoolSearch(pool, tmp_path / "cache").search("boats", "canoe")

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    with sqlite3.connect(tmp_path / "cache" / "cache.db") as connection:
        connection.execute("UPDATE Cache SET mode = 4, value = ?", (pickle.dumps(Trap()),))
    assert ids(PoolSearch(pool, tmp_path / "cache").search("boats", "canoe")) == ["1"]
    assert not (tmp_path / "sprung").exists()


def test_a_broken_cache_costs_one_warning(pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cache.db").write_bytes(b"no database" * 1000)
    searches = PoolSearch(pool, tmp_path / "cache")
    assert ids(searches.search("boats", "canoe")) == ["1"]
    assert ids(searches.search("boats", "ferry")) == ["2"]
    assert len([r for r in caplog.records if "search cache" in r.getMessage()]) == 1
    (tmp_path / "file").write_text("")
    assert ids(PoolSearch(pool, tmp_path / "file").search("boats", "canoe")) == ["1"]


def test_a_full_disk_costs_one_warning(pool: Pool, tmp_path: Path) -> None:
    # A file size limit makes SQLite fail as a full disk does; it cannot be lifted again, hence the process.
    code = f"""
import resource
from pathlib import Path
from routewright.pools.pool import load_pool
from routewright.pools.search import PoolSearch
searches = PoolSearch(load_pool(Path({str(pool.path)!r})), Path({str(tmp_path / 'cache')!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for part in range(5):
    lists = searches.search_many([("boats", f"canoe number {{part}} {{i}}", None) for i in range(1000)])
    assert all([hit.doc_id for hit in hits] == ["1"] for hits in lists)
print("answered")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.stdout == "answered\n", done.stderr
    assert done.stderr.count("search cache") == done.stderr.count("\n") == 1


def test_threads_may_search_at_once(pool: Pool, tmp_path: Path) -> None:
    searches = PoolSearch(pool, tmp_path / "cache")
    wrong: list[Any] = []

    def work(number: int) -> None:
        for i in range(20):
            hits = searches.search("boats", f"canoe {number} {i % 7}")
            if ids(hits) != ["1"]:
                wrong.append(hits)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- HTTP


@pytest.fixture
def http_pool(write_pool: WritePool, pool_content: dict[str, Any]) -> Callable[..., Pool]:
    """The tiny pool with one more agent for each URL: remote0, remote1, ..."""

    def build(*urls: str, timeout_s: float = 5.0) -> Pool:
        for i, url in enumerate(urls):
            search = {"kind": "http", "url": url, "timeout_s": timeout_s}
            pool_content["agents"].append({"name": f"remote{i}", "card": "Remote.", "search": search})
        return load_pool(write_pool(pool_content))

    return build


def test_an_endpoint_answers(http_pool: Callable[..., Pool], endpoint: Endpoint) -> None:
    endpoint.answer = lambda payload: (200, hits_body("a", "b", "a", "c"), 0.0)
    searches = PoolSearch(http_pool(endpoint.url))
    hits = searches.search("remote0", "שלום 🚣 \ud83d", k=2, interval=days("2024-01-01", None))
    assert hits == [Hit("a", 1.0, endpoint.url, "title a", "2024"), Hit("b", 0.5, endpoint.url, "title b", "2024")]
    assert endpoint.received == [{"query": "שלום 🚣 ?", "k": 2, "start": "2024-01-01", "end": None}]
    assert searches.failures == {}
    assert searches.search("remote0", "  ") == []
    assert len(endpoint.received) == 1


def test_collections_that_the_url_names_after_a_question_mark(http_pool: Callable[..., Pool], endpoint: Endpoint) -> None:
    """Equal ids of two collections are two documents, and what the URL carries stays out of the hits."""
    endpoint.answer = lambda payload: (200, hits_body("1"), 0.0)
    pool = http_pool(endpoint.url + "?index=a&token=s3cret", endpoint.url + "?index=b&token=s3cret", endpoint.url)
    lists = PoolSearch(pool).search_many([(f"remote{i}", "x", None) for i in range(3)])
    corpora = [hit.corpus for hit in fuse(lists)]
    assert corpora == [pool.corpus_name(f"remote{i}") for i in range(3)]
    assert len(set(corpora)) == 3
    assert corpora[2] == endpoint.url
    assert not any("s3cret" in corpus or "index" in corpus for corpus in corpora)


def test_an_endpoint_is_asked_again_after_a_500(http_pool: Callable[..., Pool], endpoint: Endpoint) -> None:
    statuses = iter([500, 429])
    endpoint.answer = lambda payload: (next(statuses, 200), hits_body("a"), 0.0)
    searches = PoolSearch(http_pool(endpoint.url))
    assert ids(searches.search("remote0", "x")) == ["a"]
    assert len(endpoint.received) == 3
    assert searches.failures == {}


@pytest.mark.parametrize(
    ("status", "body", "attempts", "message"),
    [
        (500, b"", 3, "status 500"),
        (404, b"", 1, "status 404, expected 200"),
        (302, b"", 1, "status 302, expected 200"),
        (200, b"<html>", 1, "unexpected answer: body: Invalid JSON"),
        (200, b"[]", 1, "unexpected answer: body: Input should be"),
        (200, b'{"hits": null}', 1, "unexpected answer: hits: Input should be"),
        (200, b'{"hits": [{"id": "1"}]}', 1, "unexpected answer: hits.0.score: Field required"),
        (200, b'{"hits": [{"id": "1", "score": NaN}]}', 1, "unexpected answer"),
        (200, b'{"hits": "' + b"x" * 9_000_000 + b'"}', 1, "an answer of more than 8388608 bytes"),
    ],
)
def test_answers_that_count_as_failures(
    http_pool: Callable[..., Pool], endpoint: Endpoint, status: int, body: bytes, attempts: int, message: str
) -> None:
    endpoint.answer = lambda payload: (status, body, 0.0)
    searches = PoolSearch(http_pool(endpoint.url))
    lists = searches.search_many([("remote0", "canoe", None), ("boats", "canoe", None)])
    assert [ids(hits) for hits in lists] == [[], ["1"]]
    [sentence] = searches.failures["remote0"]
    assert sentence.startswith(message)
    assert len(endpoint.received) == attempts


def test_slow_and_dead_agents_do_not_sink_a_batch(
    http_pool: Callable[..., Pool], endpoint: Endpoint, dead_url: str
) -> None:
    endpoint.answer = lambda payload: (200, hits_body("a"), 2.0)
    searches = PoolSearch(http_pool(endpoint.url, dead_url, timeout_s=0.3))
    agents = ("remote0", "remote1", "boats")
    lists = searches.search_many([(agent, f"canoe {i}", None) for i in range(40) for agent in agents])
    assert [ids(hits) for hits in lists] == [[], [], ["1"]] * 40
    slow, dead = searches.failures["remote0"], searches.failures["remote1"]
    assert len(slow) == len(dead) == 40
    not_asked = f"not asked after {CIRCUIT_FAILURES} failures in a row"
    assert set(slow) == {"no answer within 0.3 s", not_asked}
    # a loaded machine may not get through the retries of a refused connection in time
    told = {sentence.split(":")[0] for sentence in dead}
    assert {not_asked} < told <= {"ConnectError", "no answer within 0.3 s", not_asked}
    assert len(endpoint.received) < 10
    searches.search("boats", "canoe")
    assert searches.failures == {}


def test_an_answer_that_drips_is_cut_off(http_pool: Callable[..., Pool], endpoint: Endpoint) -> None:
    endpoint.answer = lambda payload: (200, hits_body("a") * 1000, -0.05)
    searches = PoolSearch(http_pool(endpoint.url, timeout_s=0.4))
    assert searches.search("remote0", "x") == []
    assert searches.failures == {"remote0": ["no answer within 0.4 s"]}


def test_the_circuit_closes_with_the_batch_and_counts_in_a_row(
    http_pool: Callable[..., Pool], endpoint: Endpoint
) -> None:
    searches = PoolSearch(http_pool(endpoint.url))
    endpoint.answer = lambda payload: (404 if "bad" in payload["query"] else 200, hits_body("a"), 0.0)
    for _ in range(CIRCUIT_FAILURES + 1):
        assert searches.search("remote0", "bad") == []
    assert ids(searches.search("remote0", "good")) == ["a"]
    mixed = ["bad", "good 1", "good 2", "good 3", "good 4"]
    lists = searches.search_many([("remote0", f"{text} {i}", None) for i in range(8) for text in mixed])
    assert sum(map(bool, lists)) == 32
    assert len(searches.failures["remote0"]) == 8


def test_failures_are_not_cached(http_pool: Callable[..., Pool], endpoint: Endpoint, tmp_path: Path) -> None:
    searches = PoolSearch(http_pool(endpoint.url), tmp_path / "cache")
    endpoint.answer = lambda payload: (404, b"", 0.0)
    assert searches.search("remote0", "x") == []
    endpoint.answer = lambda payload: (200, hits_body("a"), 0.0)
    assert ids(searches.search("remote0", "x")) == ["a"]
    assert ids(searches.search("remote0", "x")) == ["a"]
    assert len(endpoint.received) == 2


def test_a_running_event_loop_is_no_obstacle(http_pool: Callable[..., Pool], endpoint: Endpoint) -> None:
    import asyncio

    endpoint.answer = lambda payload: (200, hits_body("a"), 0.0)
    searches = PoolSearch(http_pool(endpoint.url))

    async def serve() -> list[Hit]:
        return searches.search("remote0", "x")

    assert ids(asyncio.run(serve())) == ["a"]


def test_no_message_repeats_what_the_url_carries(
    http_pool: Callable[..., Pool], dead_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="routewright"):
        searches = PoolSearch(http_pool(dead_url + "?token=s3cret"))
        searches.search("remote0", "x")
    assert "s3cret" not in caplog.text + str(searches.failures)


# --- fusion


def hit(doc: str, corpus: str = "c", score: float = 1.0) -> Hit:
    return Hit(doc, score, corpus, f"title {doc}", None)


def test_reciprocal_rank_fusion_by_hand() -> None:
    fused = fuse([[hit("a"), hit("b")], [hit("b"), hit("c"), hit("a", "other")]])
    assert [(h.doc_id, h.corpus) for h in fused] == [("b", "c"), ("a", "c"), ("c", "c"), ("a", "other")]
    assert [h.score for h in fused] == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62, 1 / 63])
    assert fused[0].title == "title b"


def test_ties_keep_the_order_of_the_lists() -> None:
    one, two = [hit("a"), hit("b")], [hit("c"), hit("d")]
    assert ids(fuse([one, two])) == ["a", "c", "b", "d"]
    assert ids(fuse([two, one])) == ["c", "a", "d", "b"]
    assert ids(fuse([two, one], depth=3)) == ["c", "a", "d"]
    assert fuse([]) == fuse([[], []]) == []


def test_a_document_twice_in_one_list_counts_once() -> None:
    fused = fuse([[hit("a"), hit("a"), hit("b")]])
    assert [(h.doc_id, h.score) for h in fused] == [("a", 1 / 61), ("b", 1 / 62)]


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True), max_size=5), st.integers(1, 8))
def test_fusion_equals_its_definition(lists: list[list[str]], depth: int) -> None:
    fused = fuse([[hit(d) for d in docs] for docs in lists], depth=depth)
    expected = {d: sum(1 / (60 + docs.index(d) + 1) for docs in lists if d in docs) for docs in lists for d in docs}
    assert len(fused) == min(depth, len(expected))
    assert [h.score for h in fused] == pytest.approx(sorted(expected.values(), reverse=True)[:depth])
    assert all(h.score == pytest.approx(expected[h.doc_id]) for h in fused)


def test_fusing_one_list_keeps_its_order(pool: Pool) -> None:
    hits = PoolSearch(pool).search("birds", "small large bird")
    assert ids(fuse([hits])) == ids(hits)
    assert [replace(h, score=0.0) for h in fuse([hits])] == [replace(h, score=0.0) for h in hits]


# --- the shared pool


def test_the_oracle_of_the_shared_pool(shared_pool_path: Path) -> None:
    pool = load_pool(shared_pool_path)
    searches = PoolSearch(pool)
    values: dict[str, list[float]] = {}
    for name in pool.names:
        texts = {query["_id"]: query["text"] for query in pool.queries(name)}
        qrels = pool.qrels(name, "dev")
        lists = searches.search_many([(name, texts[query], None) for query in qrels])
        run = {q: {h.doc_id: h.score for h in hits} for q, hits in zip(qrels, lists, strict=True)}
        values[name] = [metric.value for metric in ir_measures.iter_calc([nDCG @ 10], qrels, run)]
    # The rankings of one public BM25 at its defaults: a changed tokeniser, stop list or parameter moves them.
    assert np.mean([v for vs in values.values() for v in vs]) == pytest.approx(0.479, abs=0.002)
    assert np.mean([np.mean(vs) for vs in values.values()]) == pytest.approx(0.478, abs=0.002)
