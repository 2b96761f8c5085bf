"""Pool files: who can be routed to, over which BEIR corpora, with which human queries."""

from __future__ import annotations

import calendar
import codecs
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from routewright.errors import BadInput
from routewright.validation import first_fault, quoted, reason, shown

Document = dict[str, Any]
Query = dict[str, Any]
Qrels = dict[str, dict[str, int]]
Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")

QRELS_HEADER = ["query-id", "corpus-id", "score"]
MIN_AGENTS, MAX_AGENTS = 2, 64

Scalar = str | int | float | bool
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which JSON can say and UTF-8 cannot
_NO_HALVES = "expected whole characters, found half a surrogate pair"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BM25Search(_Strict):
    """BM25 over a BEIR corpus, or over the part of it that ``include`` selects.

    ``include`` is a list of document ids, or a mapping field -> value or list of values: a document is in when, for
    every field, its value is one of them (any element, for list-valued fields). Fields, also those of ``fields``
    (what is indexed), are looked up at the top level of the document, then in its ``metadata``.
    """

    kind: Literal["bm25"]
    corpus: Path
    include: dict[str, Scalar | list[Scalar]] | list[str | int] | None = None
    fields: list[str] = Field(default=["title", "text"], min_length=1)


class HTTPSearch(_Strict):
    """A search endpoint: POST ``{"query", "k", "start", "end"}`` -> ``{"hits": [{"id", "score", "title", "date"}]}``.

    ``timeout_s`` (seconds) bounds one search, its retries included.
    """

    kind: Literal["http"]
    url: str
    timeout_s: float = Field(default=2.0, gt=0, le=600, allow_inf_nan=False)

    @field_validator("url")
    @classmethod
    def _plain_http(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError("expected an http:// or https:// URL")
        if parts.username is not None or parts.password is not None:
            raise ValueError("expected a URL without user name and password, pool files hold no secrets")
        return url


class QrelsFiles(_Strict):
    """Judgement files by split; any may be absent."""

    train: Path | None = None
    dev: Path | None = None
    test: Path | None = None


class Queries(_Strict):
    """Human queries in BEIR layout and their judgements."""

    file: Path
    qrels: QrelsFiles = QrelsFiles()


class Agent(_Strict):
    """One agent: its name, the capability card that routers read, its search backend and its human queries.

    Paths are absolute after :func:`load_pool`.
    """

    name: str = Field(pattern=r"^\w[\w .-]{0,63}$")
    card: str
    search: Annotated[BM25Search | HTTPSearch, Field(discriminator="kind")]
    queries: Queries | None = None

    @field_validator("card")
    @classmethod
    def _not_blank(cls, card: str) -> str:
        if not card.strip():
            raise ValueError("expected a description of what the agent answers, found an empty card")
        if _HALF_CHARACTER.search(card):
            raise ValueError(_NO_HALVES)
        return card.strip()


class _PoolFile(_Strict):
    name: str = Field(min_length=1)
    agents: list[Agent]
    fallback: str

    @field_validator("agents")
    @classmethod
    def _two_to_sixty_four(cls, agents: list[Agent]) -> list[Agent]:
        if not MIN_AGENTS <= len(agents) <= MAX_AGENTS:
            raise ValueError(f"a pool has {MIN_AGENTS} to {MAX_AGENTS} agents, found {len(agents)}")
        return agents

    @field_validator("fallback")
    @classmethod
    def _is_an_agent(cls, fallback: str, info: ValidationInfo) -> str:
        names = [agent.name for agent in info.data.get("agents", [])]
        if names and fallback not in names:
            raise ValueError(f"{fallback!r} is not an agent, expected one of {', '.join(names)}")
        return fallback


@dataclass(frozen=True)
class Corpus:
    """The documents of one BEIR corpus file and the sha256 of its (uncompressed) content."""

    documents: list[Document]
    digest: str


@dataclass
class Pool:
    """A validated pool file; corpora and queries are read when first asked for, each corpus file once."""

    name: str
    fallback: str
    agents: list[Agent]
    path: Path
    _corpora: dict[Path, Corpus] = field(default_factory=dict, repr=False)
    _queries: dict[Path, list[Query]] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> list[str]:
        """Agent names in pool order (the order of the bitmask)."""
        return [agent.name for agent in self.agents]

    def agent(self, name: str) -> Agent:
        """The agent of that name; BadInput names the known ones."""
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise BadInput(f"{self.path}: no agent {name!r}, expected one of {', '.join(self.names)}")

    def corpus_name(self, name: str) -> str:
        """What identifies an agent's collection: its corpus file relative to the pool file, or its URL.

        A hash stands for what follows a "?" in the URL, as that may name the collection and hold a token.
        """
        search = self.agent(name).search
        if isinstance(search, HTTPSearch):
            address, _, query = search.url.partition("?")
            return f"{address}#{hashlib.sha256(query.encode('utf-8', 'replace')).hexdigest()[:8]}" if query else address
        return _relative(search.corpus, self.path.parent)

    def corpus(self, name: str) -> Corpus | None:
        """The whole corpus file behind an agent, shared between agents that name the same file; None over HTTP."""
        search = self.agent(name).search
        if isinstance(search, HTTPSearch):
            return None
        key = Path(os.path.realpath(search.corpus))
        if key not in self._corpora:
            self._corpora[key] = load_corpus(search.corpus)
        return self._corpora[key]

    def documents(self, name: str) -> list[Document]:
        """The documents an agent searches, in corpus order, after ``include``; [] over HTTP."""
        corpus, search = self.corpus(name), self.agent(name).search
        if corpus is None or isinstance(search, HTTPSearch):
            return []
        chosen = _included(corpus.documents, search.include, f"{self.path}: agent {name}: search.include")
        if not chosen:
            raise BadInput(f"{self.path}: agent {name}: search.include selects none of the "
                           f"{len(corpus.documents)} documents of {search.corpus}, expected at least one")
        if "fields" in search.model_fields_set:
            for key in search.fields:
                if all(lookup(document, key) is None for document in chosen):
                    raise BadInput(f"{self.path}: agent {name}: search.fields names {key!r}, "
                                   f"which no document of {search.corpus} has")
        return chosen

    def queries(self, name: str) -> list[Query]:
        """An agent's human queries (all splits), [] where the pool file names none."""
        queries = self.agent(name).queries
        if queries is None:
            return []
        if queries.file not in self._queries:
            self._queries[queries.file] = read_queries(queries.file)
        return self._queries[queries.file]

    def qrels(self, name: str, split: Split) -> Qrels:
        """Judgements {query: {document: grade}} of one split, checked against queries and corpus; {} if absent."""
        queries = self.agent(name).queries
        path = getattr(queries.qrels, split) if queries else None
        if path is None:
            return {}
        corpus = self.corpus(name)
        documents = None if corpus is None else {d["_id"] for d in corpus.documents}
        return read_qrels(path, {q["_id"] for q in self.queries(name)}, documents)

    @cached_property
    def digest(self) -> str:
        """sha256 over the normalised pool content and the content of its corpora (reads them)."""
        content = [_relative_paths(agent.model_dump(mode="python"), self.path.parent) for agent in self.agents]
        corpora = {self.corpus_name(n): c.digest for n in self.names if (c := self.corpus(n)) is not None}
        text = json.dumps([self.name, self.fallback, content, corpora], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def load_pool(path: Path) -> Pool:
    """Read and validate a pool file: keys, values, and that every file it names exists.

    The files' content is checked when it is read (``Pool.documents``, ``Pool.qrels``) or at once by
    :func:`check_pool`. Raises BadInput naming file, line, field and expectation.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path}: the pool file cannot be read, {_os_fault(error)}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: byte {error.start} is not UTF-8, expected a YAML text") from None
    content, node = _parse_yaml(text, path)
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a mapping with the keys {', '.join(_PoolFile.model_fields)}")
    try:
        pool_file = _PoolFile.model_validate(content)
    except ValidationError as error:
        raise BadInput(_sentence(error, node, path)) from None
    agents: list[Agent] = []
    for i, agent in enumerate(pool_file.agents):
        if any(other.name == agent.name for other in agents):
            raise BadInput(f"{path}{_line(node, ('agents', i, 'name'))}: agents[{i}].name: duplicate agent name "
                           f"{agent.name!r}, expected each name once")
        agent = _absolute_paths(agent, path.parent)
        for where, file in _files(agent):
            if not file.is_file():
                found = f"{file} is a folder, expected a file" if file.is_dir() else f"no such file {file}"
                raise BadInput(f"{path}{_line(node, ('agents', i, *where.split('.')))}: agents[{i}].{where}: {found}")
        agents.append(agent)
    return Pool(pool_file.name, pool_file.fallback, agents, path)


def check_pool(pool: Pool) -> None:
    """Read every corpus, query and judgement file of the pool; the first fault raises BadInput."""
    for name in pool.names:
        pool.documents(name)
        for split in SPLITS:
            pool.qrels(name, split)
        pool.queries(name)


def lookup(document: Document, key: str) -> Any:
    """A document's field, at the top level or else in its metadata; None where it has neither."""
    if key in document:
        return document[key]
    return (document.get("metadata") or {}).get(key)


def document_text(document: Document, fields: list[str]) -> str:
    """The named fields as one text, list values joined by spaces."""
    values = [lookup(document, key) for key in fields]
    parts = [v for value in values if value is not None for v in (value if isinstance(value, list) else [value])]
    return " ".join(str(part) for part in parts)


def document_period(text: str) -> tuple[date, date]:
    """First and last day of ``YYYY``, ``YYYY-MM`` or ``YYYY-MM-DD``; ValueError for anything else."""
    parts = text.split("-")
    if [len(p) for p in parts] not in ([4], [4, 2], [4, 2, 2]) or not all(p.isascii() and p.isdigit() for p in parts):
        raise ValueError(f"expected YYYY, YYYY-MM or YYYY-MM-DD, found {text!r}")
    numbers = [int(p) for p in parts]
    try:
        if len(numbers) == 3:
            return date(*numbers), date(*numbers)
        year, first, last = numbers[0], *((numbers[1],) * 2 if len(numbers) == 2 else (1, 12))
        return date(year, first, 1), date(year, last, calendar.monthrange(year, last)[1])
    except (ValueError, calendar.IllegalMonthError):
        raise ValueError(f"expected a day of the calendar, found {text!r}") from None


def read_corpus(path: Path) -> list[Document]:
    """The documents ``{_id, title?, text?, metadata?: {date?}}`` of a BEIR corpus, .jsonl or .jsonl.gz."""
    return load_corpus(path).documents


def load_corpus(path: Path) -> Corpus:
    """Read and check a BEIR corpus: JSON objects, a unique text ``_id``, text title and text, a readable date."""
    digest = hashlib.sha256()
    documents = list(_rows(path, digest))
    seen: set[str] = set()
    for number, document in documents:
        where = f"{path}, line {number}"
        _check_id(document, seen, where)
        for key in ("title", "text"):
            if not isinstance(document.get(key, ""), str):
                raise BadInput(f"{where}: {key}: expected a text, found {quoted(document[key])}")
        metadata = document.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise BadInput(f"{where}: metadata: expected an object, found {quoted(metadata)}")
        if metadata and metadata.get("date"):
            try:
                document_period(str(metadata["date"]))
            except ValueError as error:
                raise BadInput(f"{where}: metadata.date: {error}") from None
    if not documents:
        raise BadInput(f"{path}: the corpus is empty, expected at least one document a line")
    return Corpus([document for _, document in documents], digest.hexdigest())


def read_queries(path: Path) -> list[Query]:
    """The queries ``{_id, text, ...}`` of a BEIR query file, .jsonl or .jsonl.gz."""
    queries, seen = [], set[str]()
    for number, query in _rows(path):
        _check_id(query, seen, f"{path}, line {number}")
        if not isinstance(query.get("text"), str):
            raise BadInput(f"{path}, line {number}: text: expected a text, found {quoted(query.get('text'))}")
        if _HALF_CHARACTER.search(json.dumps(query, ensure_ascii=False)):
            raise BadInput(f"{path}, line {number}: {_NO_HALVES}")
        queries.append(query)
    return queries


def read_qrels(
    path: Path, query_ids: Collection[str] | None = None, document_ids: Collection[str] | None = None
) -> Qrels:
    """Judgements {query: {document: grade}} from a tab-separated file with the header query-id, corpus-id, score.

    Grades are whole numbers >= 0. Ids outside ``query_ids`` or ``document_ids`` (where given), a line of other than
    three columns and two grades for one pair raise BadInput with the line.
    """
    qrels: Qrels = {}
    for number, raw in numbered_lines(path):
        where = f"{path}, line {number}"
        try:
            columns = raw.decode("utf-8-sig").rstrip("\r\n").split("\t")
        except UnicodeDecodeError:
            raise BadInput(f"{where}: expected UTF-8 text") from None
        if number == 1:
            if columns != QRELS_HEADER:
                raise BadInput(f"{where}: expected the header query-id, corpus-id, score separated by tabs")
            continue
        if len(columns) != 3:
            raise BadInput(f"{where}: expected 3 columns separated by tabs, found {len(columns)}")
        query, document, grade = columns
        if query_ids is not None and query not in query_ids:
            raise BadInput(f"{where}: query-id: unknown query {query!r}, expected an _id of the query file")
        if document_ids is not None and document not in document_ids:
            raise BadInput(f"{where}: corpus-id: unknown document {document!r}, expected an _id of the corpus")
        if not (grade.isascii() and grade.isdigit() and len(grade) < 10):
            raise BadInput(f"{where}: score: expected a whole number >= 0, found {grade!r}")
        if qrels.setdefault(query, {}).setdefault(document, int(grade)) != int(grade):
            raise BadInput(f"{where}: score: a second grade for query {query!r} and document {document!r}")
    return qrels


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and raw lines of a file, .gz or not, without blank lines and byte order mark.

    BadInput on broken gzip data.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if Path(path).suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise BadInput(f"{path}, after line {number}: broken gzip data, expected a complete .gz file") from None
    except OSError as error:
        raise BadInput(f"{path}: the file cannot be read, {_os_fault(error)}") from None


def _rows(path: Path, digest: Any = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and JSON objects; feeds the raw lines to ``digest`` (a hashlib object)."""
    for number, line in numbered_lines(path):
        if digest is not None:
            digest.update(line)
        try:
            row = json.loads(line.decode("utf-8-sig").rstrip("\r\n"))
        except UnicodeDecodeError:
            raise BadInput(f"{path}, line {number}: expected UTF-8 text") from None
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}, line {number}: expected one JSON object, {_json_fault(error)}") from None
        if not isinstance(row, dict):
            raise BadInput(f"{path}, line {number}: expected one JSON object, found {quoted(row)}")
        yield number, row


def _os_fault(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"found a syntax error at column {error.colno} ({error.msg})"
    return "found one nested too deeply" if isinstance(error, RecursionError) else "found a number that is too long"


def _check_id(row: dict[str, Any], seen: set[str], where: str) -> None:
    """A row's ``_id`` is a text of at least one character that no earlier row had; adds it to ``seen``."""
    identity = row.get("_id")
    if not isinstance(identity, str) or not identity:
        raise BadInput(f"{where}: _id: expected a text that is not empty, found {quoted(identity)}")
    if _HALF_CHARACTER.search(identity):
        raise BadInput(f"{where}: _id: {_NO_HALVES}")
    if identity in seen:
        raise BadInput(f"{where}: _id: duplicate id {identity!r}, expected each id once")
    seen.add(identity)


def _included(documents: list[Document], include: Any, where: str) -> list[Document]:
    if include is None:
        return documents
    if isinstance(include, list):
        ids = {str(identity) for identity in include}
        chosen = [document for document in documents if document["_id"] in ids]
        missing = ids - {document["_id"] for document in chosen}
        if missing:
            raise BadInput(f"{where} names {sorted(missing)[0]!r}, which is not an _id of the corpus")
        return chosen
    # YAML reads 2020 as a number where a corpus may say "2020": values compare as text.
    wanted = {key: {str(v) for v in (value if isinstance(value, list) else [value])} for key, value in include.items()}
    return [document for document in documents if all(_matches(document, key, wanted[key]) for key in wanted)]


def _matches(document: Document, key: str, wanted: set[str]) -> bool:
    value = lookup(document, key)
    return value is not None and any(str(v) in wanted for v in (value if isinstance(value, list) else [value]))


def _files(agent: Agent) -> list[tuple[str, Path]]:
    """The files an agent names, with their place in the agent's part of the pool file."""
    files = [("search.corpus", agent.search.corpus)] if isinstance(agent.search, BM25Search) else []
    if agent.queries:
        files.append(("queries.file", agent.queries.file))
        named = [(split, getattr(agent.queries.qrels, split)) for split in SPLITS]
        files += [(f"queries.qrels.{split}", file) for split, file in named if file is not None]
    return files


def _absolute_paths(agent: Agent, folder: Path) -> Agent:
    def absolute(path: Path) -> Path:
        return Path(os.path.abspath(folder / path))

    changes: dict[str, Any] = {}
    if isinstance(agent.search, BM25Search):
        changes["search"] = agent.search.model_copy(update={"corpus": absolute(agent.search.corpus)})
    if agent.queries:
        named = {split: getattr(agent.queries.qrels, split) for split in SPLITS}
        qrels = agent.queries.qrels.model_copy(update={s: absolute(p) for s, p in named.items() if p is not None})
        changes["queries"] = agent.queries.model_copy(update={"file": absolute(agent.queries.file), "qrels": qrels})
    return agent.model_copy(update=changes)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _relative_paths(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _relative_paths(v, folder) for key, v in value.items()}
    if isinstance(value, list):
        return [_relative_paths(v, folder) for v in value]
    return _relative(value, folder) if isinstance(value, Path) else value


def _parse_yaml(text: str, path: Path) -> tuple[Any, yaml.Node | None]:
    """The content and the node tree (which knows lines); duplicate keys and syntax errors raise BadInput."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _refuse_duplicate_keys(node, path)
        return yaml.safe_load(text), node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadInput(f"{path}{line}: expected YAML, {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: expected YAML, {' '.join(str(error).split())}") from None
    except (RecursionError, ValueError) as error:
        # ValueError: a date such as 2024-02-31 that only looks like one.
        raise BadInput(f"{path}: expected YAML, {error}") from None


def _refuse_duplicate_keys(root: yaml.Node, path: Path) -> None:
    seen_nodes, todo = set[int](), [root]
    while todo:
        node = todo.pop()
        if id(node) in seen_nodes:
            continue
        seen_nodes.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            keys = set[str]()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in keys:
                        raise BadInput(f"{path}, line {key.start_mark.line + 1}: duplicate key {key.value!r}, "
                                       "expected each key once")
                    keys.add(key.value)
                todo.append(value)


def _walk(node: yaml.Node | None, location: tuple[str | int, ...]) -> tuple[list[str | int], yaml.Node | None]:
    """Follow a pydantic location through the YAML nodes; names that pydantic adds for unions are skipped."""
    found: list[str | int] = []
    mark = node
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = mark = node.value[part]
            found.append(part)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                    node, mark = value, key
                    found.append(part)
                    break
    return found, mark


def _line(node: yaml.Node | None, location: tuple[str | int, ...]) -> str:
    mark = _walk(node, location)[1]
    return f", line {mark.start_mark.line + 1}" if mark is not None else ""


def _sentence(error: ValidationError, node: yaml.Node | None, path: Path) -> str:
    """One sentence for the first fault pydantic found: file, line, dotted field, expectation."""
    fault = first_fault(error)
    location, kind = fault["loc"], fault["type"]
    parts, _ = _walk(node, location)
    if kind == "missing":
        parts.append(location[-1])
    elif kind.startswith("union_tag"):
        parts.append("kind")
    dotted = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")
    told = reason(fault, _PoolFile)
    if kind == "missing" and location[-1] == "card":
        told += ", expected a description of what the agent answers"
    elif kind.startswith("union_tag"):
        told = "expected bm25 or http"
    elif kind == "string_pattern_mismatch":
        told = f"expected 1 to 64 letters, digits, spaces, dots, dashes or underscores, found {shown(fault['input'])}"
    elif kind in ("too_short", "string_too_short"):
        told = "expected at least one"
    elif "include" in location:
        told = (
            "expected a list of ids or a mapping of fields to values, all plain text or numbers, found "
            f"{shown(fault['input'])}"
        )
    return f"{path}{_line(node, location)}: {dotted + ': ' if dotted else ''}{told}"
