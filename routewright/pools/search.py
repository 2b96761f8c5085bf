"""Search over the agents of a pool: BM25 or HTTP behind one call, batched, cached, with a date filter; rank fusion."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
import ssl
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import bm25s
import diskcache
import httpx
import numpy as np
import scipy.sparse as sp
import Stemmer
import tenacity
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routewright.errors import BadInput
from routewright.pools.pool import Document, HTTPSearch, Pool, document_period, document_text
from routewright.search_router.decision import Interval

RRF_K = 60
MAX_QUERY_CHARS = 100_000
MAX_QUERY_TERMS = 256
HTTP_ATTEMPTS = 3
HTTP_CONCURRENCY = 4
HTTP_MAX_BYTES = 8 * 2**20
CIRCUIT_FAILURES = 3

# Queries scored at once: at most _BATCH, and at most _BATCH_CELLS (query, document) pairs in memory.
_BATCH, _BATCH_CELLS = 1024, 2**24
_MEMORY_ENTRIES = 100_000
# Part of every cache key: raise it when the tokeniser, the scoring or the stored form changes.
_CACHE_VERSION = f"1/bm25s-{bm25s.__version__}"

_log = logging.getLogger(__name__)
# bm25s sets its logger to DEBUG, which reaches every handler whatever the root's level is.
logging.getLogger("bm25s").setLevel(logging.WARNING)

Request = tuple[str, str, Interval | None]


@dataclass(frozen=True, slots=True)
class Hit:
    """One found document; (corpus, doc_id) identifies it across agents, a higher score is better.

    ``corpus`` is `Pool.corpus_name`; ``date`` is YYYY, YYYY-MM or YYYY-MM-DD as the document carries it.
    """

    doc_id: str
    score: float
    corpus: str
    title: str
    date: str | None


class SearchFailed(Exception):
    """One request to an HTTP agent failed; the message says how."""


class _Unavailable(SearchFailed):
    """A failure that another attempt may mend."""


def fuse(lists: list[list[Hit]], k: int = RRF_K, depth: int = 10) -> list[Hit]:
    """Reciprocal rank fusion, score(d) = sum over lists of 1 / (k + rank(d)), rank from 1; the best ``depth`` hits.

    Source: Cormack, Clarke, Buettcher, SIGIR 2009. A document found by several lists, or twice by one (its better
    rank counts), is one hit by (corpus, doc_id). Ties keep the order of the lists given.
    """
    first: dict[tuple[str, str], Hit] = {}
    scores: dict[tuple[str, str], float] = {}
    for hits in lists:
        ranked = dict.fromkeys((hit.corpus, hit.doc_id) for hit in hits)
        for hit in hits:
            first.setdefault((hit.corpus, hit.doc_id), hit)
        for rank, key in enumerate(ranked, 1):
            scores[key] = scores.get(key, 0.0) + 1.0 / (k + rank)
    best = sorted(scores, key=lambda key: -scores[key])[:depth]
    return [Hit(hit.doc_id, scores[key], hit.corpus, hit.title, hit.date) for key in best if (hit := first[key])]


def tokenize(texts: list[str]) -> list[list[str]]:
    """Lower-cased words of two or more word characters, English stop words out, English stems; one list a text."""
    # A stemmer keeps state between calls and is not thread-safe: one a call.
    return bm25s.tokenize(
        texts, stopwords="en", stemmer=Stemmer.Stemmer("english"), return_ids=False, show_progress=False
    )


class BM25Index:
    """BM25 (Lucene variant, k1 = 1.5, b = 0.75, as bm25s scores it) over documents kept in memory.

    ``documents`` are BEIR rows, ``fields`` what of them is indexed, ``corpus`` their collection's name in hits;
    ``dated`` counts the documents with a date, ``mean_length`` is in tokens a document.
    """

    def __init__(self, documents: list[Document], fields: list[str], corpus: str) -> None:
        self.documents, self.corpus = documents, corpus
        vocabulary: dict[str, int] = {}
        # Ids by first appearance: bm25s numbers words by set order, which changes from process to process.
        rows = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words]
            for words in tokenize([document_text(document, fields) for document in documents])
        ]
        if not vocabulary:
            raise BadInput(f"{corpus}: no document has a word to index in the fields {', '.join(fields)}")
        index = bm25s.BM25()
        index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        self._vocabulary = vocabulary
        self.mean_length = sum(map(len, rows)) / len(rows)
        self._terms = sp.csc_matrix(
            (index.scores["data"], index.scores["indices"], index.scores["indptr"]),
            shape=(len(documents), len(vocabulary)),
        ).T.tocsr()
        periods = [_period(document) for document in documents]
        self.dated = sum(period is not None for period in periods)
        # Undated documents get a period that overlaps nothing.
        self._first = np.array([p[0].toordinal() if p else np.iinfo(np.int32).max for p in periods])
        self._last = np.array([p[1].toordinal() if p else -1 for p in periods])

    def search(self, queries: list[list[str]], intervals: list[Interval | None], k: int) -> list[list[Hit]]:
        """The best ``k`` documents a query (its tokens), best first, ties in document order; only scores > 0.

        An interval keeps the documents whose own period overlaps it, before the cut to k, and drops undated ones;
        where no document at all is dated it is ignored. The first MAX_QUERY_TERMS distinct tokens count.
        """
        found: list[list[Hit]] = []
        masks: dict[Interval, np.ndarray] = {}
        batch = max(1, min(_BATCH, _BATCH_CELLS // len(self.documents)))
        for start in range(0, len(queries), batch):
            chunk = queries[start : start + batch]
            scores = self._weights(chunk) @ self._terms
            for row in range(len(chunk)):
                left, right = scores.indptr[row], scores.indptr[row + 1]
                values, rows = scores.data[left:right], scores.indices[left:right]
                interval = intervals[start + row]
                if interval is not None and self.dated:
                    if interval not in masks:
                        masks[interval] = self._overlaps(interval)
                    kept = masks[interval][rows]
                    values, rows = values[kept], rows[kept]
                found.append(self._top(values, rows, k))
        return found

    def _weights(self, queries: list[list[str]]) -> sp.csr_matrix:
        """(queries, vocabulary) matrix of term counts."""
        ends, columns, counts = [0], list[int](), list[int]()
        for words in queries:
            terms = list(Counter(words).items())[:MAX_QUERY_TERMS]
            known = [(self._vocabulary[word], count) for word, count in terms if word in self._vocabulary]
            columns += [column for column, _ in known]
            counts += [count for _, count in known]
            ends.append(len(columns))
        return sp.csr_matrix(
            (np.array(counts, dtype=np.float32), np.array(columns, dtype=np.int32), np.array(ends, dtype=np.int32)),
            shape=(len(queries), len(self._vocabulary)),
        )

    def _overlaps(self, interval: Interval) -> np.ndarray:
        first = interval.start.toordinal() if interval.start else 0
        last = interval.end.toordinal() if interval.end else date.max.toordinal()
        return (self._first <= last) & (self._last >= first)

    def _top(self, values: np.ndarray, rows: np.ndarray, k: int) -> list[Hit]:
        if len(values) > k:
            # Everything that ties with the k-th value stays in, so that document order decides.
            kept = values >= np.partition(values, -k)[-k]
            values, rows = values[kept], rows[kept]
        order = np.lexsort((rows, -values))[:k]
        return [self._hit(row, score) for row, score in zip(rows[order].tolist(), values[order].tolist(), strict=True)
                if score > 0]

    def _hit(self, row: int, score: float) -> Hit:
        document = self.documents[row]
        return Hit(document["_id"], score, self.corpus, document.get("title") or "", _date(document))


class _HTTPHit(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: Annotated[str, Field(min_length=1)]
    score: Annotated[float, Field(allow_inf_nan=False)]
    title: str | None = None
    date: str | None = None


class _HTTPHits(BaseModel):
    hits: list[_HTTPHit]


class PoolSearch:
    """Search the agents of a pool.

    With ``cache_dir`` answers are kept on disk, with a dict in front, keyed by (agent, index digest, query, k,
    interval); failures are not kept, and an HTTP endpoint whose content changes needs a new folder. None keeps
    nothing. ``failures`` holds the last call's failed requests: {agent: [message, ...]}.
    """

    def __init__(self, pool: Pool, cache_dir: Path | None = None) -> None:
        self.pool = pool
        self.failures: dict[str, list[str]] = {}
        self._indexes: dict[str, BM25Index] = {}
        self._digests: dict[str, str] = {}
        self._memory: dict[str, list[Hit]] = {}
        self._lock = threading.Lock()
        self._remember = cache_dir is not None
        self._disk = _open_cache(cache_dir) if cache_dir is not None else None
        self._verify: ssl.SSLContext | None = None

    def search(self, agent_name: str, query: str, k: int = 10, interval: Interval | None = None) -> list[Hit]:
        """The best ``k`` hits of one agent, best first; [] where nothing matches, the query is empty or it failed."""
        return self.search_many([(agent_name, query, interval)], k)[0]

    def search_many(self, requests: list[Request], k: int = 10) -> list[list[Hit]]:
        """One list of at most ``k`` hits a request (agent, query, interval), in the order of the requests.

        Of a query the first MAX_QUERY_CHARS characters and, for BM25, the first MAX_QUERY_TERMS distinct tokens
        count, so that any query takes bounded time.

        A failed request gets [] and is recorded in ``failures``; after CIRCUIT_FAILURES failures in a row an HTTP
        agent is not asked again in this call. BadInput: an unknown agent, k < 1.
        """
        if k < 1:
            raise BadInput(f"k: expected a number of hits >= 1, found {k}")
        failures: dict[str, list[str]] = {}
        keys = [self._key(agent, query, k, interval) for agent, query, interval in requests]
        # Equal requests of one call are searched once, also without a cache.
        wanted = {key: request for key, request in zip(keys, requests, strict=True) if request[1].strip()}
        answers = self._recall(list(wanted))
        missing: dict[str, list[str]] = {}
        for key, (agent, _, _) in wanted.items():
            if key not in answers:
                missing.setdefault(agent, []).append(key)
        found: dict[str, list[Hit]] = {}
        # Many agents get the same query: each text is tokenised once.
        texts = list({wanted[key][1] for agent_keys in missing.values() for key in agent_keys})
        tokens = dict(zip(texts, tokenize([text[:MAX_QUERY_CHARS] for text in texts]), strict=True))
        remote: dict[str, list[str]] = {}
        for agent, agent_keys in missing.items():
            if isinstance(self.pool.agent(agent).search, HTTPSearch):
                remote[agent] = agent_keys
            else:
                asked = [wanted[key] for key in agent_keys]
                lists = self.index(agent).search([tokens[q] for _, q, _ in asked], [i for _, _, i in asked], k)
                found.update(zip(agent_keys, lists, strict=True))
        if remote:
            found.update(self._ask(remote, wanted, k, failures))
        self._keep(found)
        answers.update(found)
        self.failures = failures
        return [list(answers.get(key, [])) for key in keys]

    def index(self, agent_name: str) -> BM25Index:
        """The BM25 index of an agent, built on first use; agents that index the same share one."""
        search = self.pool.agent(agent_name).search
        if isinstance(search, HTTPSearch):
            raise BadInput(f"{self.pool.path}: agent {agent_name} searches over HTTP, expected kind bm25")
        digest = self._digest(agent_name)
        with self._lock:
            if digest not in self._indexes:
                documents = self.pool.documents(agent_name)
                self._indexes[digest] = BM25Index(documents, search.fields, self.pool.corpus_name(agent_name))
            return self._indexes[digest]

    def _digest(self, agent_name: str) -> str:
        """What an agent's answers depend on: corpus content, include and fields, or the URL."""
        if agent_name not in self._digests:
            search = self.pool.agent(agent_name).search
            if isinstance(search, HTTPSearch):
                content: list[Any] = [search.url]
            else:
                corpus = self.pool.corpus(agent_name)
                content = [corpus.digest if corpus else "", search.include, search.fields]
            content.append(self.pool.corpus_name(agent_name))
            self._digests[agent_name] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return self._digests[agent_name]

    def _key(self, agent: str, query: str, k: int, interval: Interval | None) -> str:
        days = [str(interval.start), str(interval.end)] if interval else None
        text = json.dumps([_CACHE_VERSION, agent, self._digest(agent), query, k, days])
        return hashlib.sha256(text.encode()).hexdigest()

    def _recall(self, keys: list[str]) -> dict[str, list[Hit]]:
        """The remembered answers among ``keys``, from memory, then from disk."""
        with self._lock:
            answers = {key: self._memory[key] for key in keys if key in self._memory}
        missing = [key for key in keys if key not in answers]
        if self._disk is None or not missing:
            return answers
        read: dict[str, list[Hit]] = {}
        try:
            with self._disk.transact():
                for key in missing:
                    text = self._disk.get(key)
                    if text is not None:
                        read[key] = [Hit(*row) for row in json.loads(text)]
        except (OSError, sqlite3.Error, diskcache.Timeout, ValueError, TypeError) as error:
            self._give_up_disk(error)
        self._memorise(read)
        return answers | read

    def _keep(self, found: dict[str, list[Hit]]) -> None:
        if not self._remember or not found:
            return
        self._memorise(found)
        if self._disk is None:
            return
        try:
            with self._disk.transact():
                for key, hits in found.items():
                    rows = [[hit.doc_id, hit.score, hit.corpus, hit.title, hit.date] for hit in hits]
                    self._disk.set(key, json.dumps(rows, separators=(",", ":")))
        except (OSError, sqlite3.Error, diskcache.Timeout) as error:
            self._give_up_disk(error)

    def _memorise(self, found: dict[str, list[Hit]]) -> None:
        with self._lock:
            self._memory.update(found)
            for key in list(self._memory)[: max(0, len(self._memory) - _MEMORY_ENTRIES)]:
                del self._memory[key]

    def _give_up_disk(self, error: Exception) -> None:
        """A full disk or a broken cache costs speed, never an answer: one warning, then no cache on disk."""
        if self._disk is not None:
            _log.warning("search cache %s is not used any more: %s", self._disk.directory, error)
        self._disk = None

    def _ask(
        self, keys: dict[str, list[str]], wanted: dict[str, Request], k: int, failures: dict[str, list[str]]
    ) -> dict[str, list[Hit]]:
        """Ask the HTTP agents, all at once; answers by key, failures noted."""
        searches = {agent: self.pool.agent(agent).search for agent in keys}
        if self._verify is None:
            self._verify = httpx.create_ssl_context()
        verify = self._verify

        async def batch() -> list[dict[str, list[Hit]]]:
            # No limits here: every request has its own deadline and every agent its own concurrency.
            async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(), verify=verify) as client:
                return await asyncio.gather(*(
                    _ask_agent(client, agent, search, self.pool.corpus_name(agent),
                               [(key, wanted[key][1], wanted[key][2]) for key in keys[agent]], k, failures)
                    for agent, search in searches.items() if isinstance(search, HTTPSearch)
                ))

        # A thread of its own: the caller may already run an event loop (the inference server does).
        with ThreadPoolExecutor(1) as executor:
            parts = executor.submit(asyncio.run, batch()).result()
        return {key: hits for part in parts for key, hits in part.items()}


async def _ask_agent(
    client: httpx.AsyncClient, agent: str, search: HTTPSearch, corpus: str,
    asked: list[tuple[str, str, Interval | None]], k: int, failures: dict[str, list[str]],
) -> dict[str, list[Hit]]:
    """All requests (key, query, interval) of one agent, a few at a time, until the circuit opens."""
    answers: dict[str, list[Hit]] = {}
    gate = asyncio.Semaphore(HTTP_CONCURRENCY)
    in_a_row = 0

    async def one(key: str, query: str, interval: Interval | None) -> None:
        nonlocal in_a_row
        async with gate:
            if in_a_row >= CIRCUIT_FAILURES:
                failures.setdefault(agent, []).append(f"not asked after {CIRCUIT_FAILURES} failures in a row")
                return
            try:
                answers[key] = await _search_http(client, search, corpus, query, k, interval)
                in_a_row = 0
            except SearchFailed as error:
                in_a_row += 1
                failures.setdefault(agent, []).append(str(error))

    await asyncio.gather(*(one(*request) for request in asked))
    if agent in failures:
        _log.warning("agent %s failed %d of %d searches, first: %s",
                     agent, len(failures[agent]), len(asked), failures[agent][0])
    return answers


async def _search_http(
    client: httpx.AsyncClient, search: HTTPSearch, corpus: str, query: str, k: int, interval: Interval | None
) -> list[Hit]:
    """One search within ``timeout_s``, retries included; SearchFailed says what went wrong."""
    retrying = tenacity.AsyncRetrying(
        # No wait that the deadline would cut short: the caller hears the fault, not that time ran out.
        stop=tenacity.stop_after_attempt(HTTP_ATTEMPTS) | tenacity.stop_before_delay(search.timeout_s),
        wait=tenacity.wait_exponential_jitter(multiplier=0.05, max=1.0, jitter=0.05),
        retry=tenacity.retry_if_exception_type(_Unavailable),
        reraise=True,
    )
    payload = {
        # A lone surrogate (half an emoji) has no UTF-8 form.
        "query": query[:MAX_QUERY_CHARS].encode("utf-8", "replace").decode(),
        "k": k,
        "start": interval.start.isoformat() if interval and interval.start else None,
        "end": interval.end.isoformat() if interval and interval.end else None,
    }
    try:
        async with asyncio.timeout(search.timeout_s):
            body: bytes = await retrying(_post, client, search.url, payload)
    except TimeoutError:
        raise SearchFailed(f"no answer within {search.timeout_s:g} s") from None
    try:
        hits = _HTTPHits.model_validate_json(body).hits
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "body"
        raise SearchFailed(f"unexpected answer: {where}: {fault['msg']}") from None
    by_id: dict[str, Hit] = {}
    for hit in hits:
        by_id.setdefault(hit.id, Hit(hit.id, hit.score, corpus, hit.title or "", hit.date))
    return list(by_id.values())[:k]


async def _post(client: httpx.AsyncClient, url: str, payload: dict[str, Any]) -> bytes:
    body = bytearray()
    try:
        async with client.stream("POST", url, json=payload) as response:
            if response.status_code == 429 or response.status_code >= 500:
                raise _Unavailable(f"status {response.status_code}")
            if response.status_code != 200:
                raise SearchFailed(f"status {response.status_code}, expected 200")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > HTTP_MAX_BYTES:
                    raise SearchFailed(f"an answer of more than {HTTP_MAX_BYTES} bytes")
    except httpx.TransportError as error:
        raise _Unavailable(f"{type(error).__name__}: {error}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SearchFailed(f"{type(error).__name__}: {error}") from None
    return bytes(body)


class _TextDisk(diskcache.Disk):
    """diskcache's storage for text only: a pickle in the file, which only a stranger can have put there, is refused."""

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
        if mode == diskcache.core.MODE_PICKLE:
            raise ValueError("found a pickle, expected text")
        return super().fetch(mode, filename, value, read)


def _open_cache(folder: Path) -> diskcache.Cache | None:
    try:
        return diskcache.Cache(str(folder), disk=_TextDisk, eviction_policy="none")
    except (OSError, sqlite3.Error, diskcache.Timeout) as error:
        _log.warning("search cache %s is not used: %s", folder, error)
        return None


def _date(document: Document) -> str | None:
    value = (document.get("metadata") or {}).get("date")
    return str(value) if value else None


def _period(document: Document) -> tuple[date, date] | None:
    text = _date(document)
    return document_period(text) if text else None
