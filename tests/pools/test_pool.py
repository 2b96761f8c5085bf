from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_pool import BIRDS, BOATS, write_jsonl, write_qrels

from routewright.errors import BadInput
from routewright.pools.pool import check_pool, document_period, load_pool, read_corpus, read_qrels, read_queries

WritePool = Callable[[Any], Path]


def fault(path: Path) -> str:
    """The sentence with which a pool is refused, its folder left out."""
    with pytest.raises(BadInput) as caught:
        check_pool(load_pool(path))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence.replace(f"{path.parent}/", "")


def test_a_valid_pool(write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path) -> None:
    pool = load_pool(write_pool(pool_content))
    check_pool(pool)
    assert pool.names == ["birds", "boats"]
    assert pool.fallback == "boats"
    assert pool.documents("birds") == BIRDS
    assert pool.queries("birds") == [{"_id": "q1", "text": "which bird swims"}]
    assert pool.qrels("birds", "dev") == {"q1": {"3": 1}}
    assert pool.qrels("birds", "train") == pool.qrels("boats", "dev") == {}
    assert pool.corpus_name("birds") == "birds/corpus.jsonl.gz"
    search = pool.agent("boats").search
    assert search.kind == "bm25"
    assert search.corpus == tmp_path / "boats.jsonl"


@pytest.mark.parametrize("count", [1, 65])
def test_two_to_sixty_four_agents(write_pool: WritePool, pool_content: dict[str, Any], count: int) -> None:
    agent = pool_content["agents"][1]
    pool_content["agents"] = [{**agent, "name": f"boats{i}" if i else "boats"} for i in range(count)]
    assert fault(write_pool(pool_content)) == f"pool.yaml, line 3: agents: a pool has 2 to 64 agents, found {count}"


def test_sixty_four_agents_are_fine(write_pool: WritePool, pool_content: dict[str, Any]) -> None:
    agent = pool_content["agents"][1]
    pool_content["agents"] = [{**agent, "name": f"boats{i}" if i else "boats"} for i in range(64)]
    assert len(load_pool(write_pool(pool_content)).agents) == 64


YAML = """name: tiny
fallback: boats
agents:
  - name: birds
    card: Birds.
    search: {kind: bm25, corpus: birds/corpus.jsonl.gz}
  - name: boats
    card: Boats.
    search: {kind: bm25, corpus: boats.jsonl}
"""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("fallback: boats", "fallback: boats\nextra: 1",
         "pool.yaml, line 3: extra: unknown key, expected one of name, agents, fallback"),
        ("card: Boats.", "crad: Boats.",
         "pool.yaml, line 8: agents[1].crad: unknown key, expected one of name, card, search, queries"),
        ("boats.jsonl}", "boats.jsonl, k1: 2}",
         "pool.yaml, line 9: agents[1].search.k1: unknown key, expected one of kind, corpus, include, fields"),
        ("    card: Boats.\n", "",
         "pool.yaml, line 7: agents[1].card: missing key, expected a description of what the agent answers"),
        ("card: Boats.", "card: '  '",
         "pool.yaml, line 8: agents[1].card: expected a description of what the agent answers, found an empty card"),
        ("card: Boats.", "card: 7", "pool.yaml, line 8: agents[1].card: expected a text, found 7"),
        ("name: birds", "name: boats",
         "pool.yaml, line 7: agents[1].name: duplicate agent name 'boats', expected each name once"),
        ("name: boats", "name: ../boats",
         'pool.yaml, line 7: agents[1].name: expected 1 to 64 letters, digits, spaces, dots, dashes or underscores, '
         'found "../boats"'),
        ("fallback: boats", "fallback: cars",
         "pool.yaml, line 2: fallback: 'cars' is not an agent, expected one of birds, boats"),
        ("boats.jsonl}", "ships.jsonl}", "pool.yaml, line 9: agents[1].search.corpus: no such file ships.jsonl"),
        ("boats.jsonl}", "birds}", "pool.yaml, line 9: agents[1].search.corpus: birds is a folder, expected a file"),
        ("corpus: boats.jsonl}", "corpus: 7}", "pool.yaml, line 9: agents[1].search.corpus: expected a path, found 7"),
        ("kind: bm25, corpus: boats", "kind: bm52, corpus: boats",
         "pool.yaml, line 9: agents[1].search.kind: expected bm25 or http"),
        ("card: Boats.", "card: Boats: wooden", "pool.yaml, line 8, column 16: expected YAML, mapping values are not "
         "allowed here"),
        ("card: Boats.", "card: Boats.\n    card: Ships.",
         "pool.yaml, line 9: duplicate key 'card', expected each key once"),
        ("boats.jsonl}", "boats.jsonl, include: ['1', '99']}",
         "pool.yaml: agent boats: search.include names '99', which is not an _id of the corpus"),
        ("boats.jsonl}", "boats.jsonl, include: {kind: [air]}}",
         "pool.yaml: agent boats: search.include selects none of the 3 documents of boats.jsonl, expected at "
         "least one"),
        ("boats.jsonl}", "boats.jsonl, include: 3}",
         "pool.yaml, line 9: agents[1].search.include: expected a list of ids or a mapping of fields to values, all "
         "plain text or numbers, found 3"),
        ("boats.jsonl}", "boats.jsonl, fields: [title, txt]}",
         "pool.yaml: agent boats: search.fields names 'txt', which no document of boats.jsonl has"),
        ("{kind: bm25, corpus: boats.jsonl}", "{kind: http, url: 'http://me:secret@host/'}",
         "pool.yaml, line 9: agents[1].search.url: expected a URL without user name and password, pool files hold no "
         "secrets"),
        ("{kind: bm25, corpus: boats.jsonl}", "{kind: http, url: 'file:///etc/passwd'}",
         "pool.yaml, line 9: agents[1].search.url: expected an http:// or https:// URL"),
        ("{kind: bm25, corpus: boats.jsonl}", "{kind: http, url: 'http://host/', timeout_s: -1}",
         "pool.yaml, line 9: agents[1].search.timeout_s: expected greater than 0, found -1"),
        ("card: Boats.", "card: Boats.\n    queries: {file: boats.jsonl, qrels: {val: x.tsv}}",
         "pool.yaml, line 9: agents[1].queries.qrels.val: unknown key, expected one of train, dev, test"),
        ("card: Boats.", "card: Boats.\n    queries: {file: boats.jsonl, qrels: {dev: x.tsv}}",
         "pool.yaml, line 9: agents[1].queries.qrels.dev: no such file x.tsv"),
        ("  - name: birds\n", "  - birds\n  - name: birds\n", "pool.yaml, line 4: agents[0]: expected a mapping, found "
         '"birds"'),
    ],
)
def test_a_faulty_pool_file(write_pool: WritePool, old: str, new: str, sentence: str) -> None:
    assert YAML.count(old) == 1
    assert fault(write_pool(YAML.replace(old, new))) == sentence


def test_the_password_in_a_url_is_not_repeated(write_pool: WritePool) -> None:
    text = YAML.replace("{kind: bm25, corpus: boats.jsonl}", "{kind: http, url: 'http://me:secret@host/'}")
    assert "me:secret" not in fault(write_pool(text))


@pytest.mark.parametrize(
    "text", ["", "- 1", "just text", "name: 2024-02-31", "[" * 1000, "a: &a [*a]", "x: !!python/name:os.system"]
)
def test_what_is_no_pool_file_at_all(write_pool: WritePool, text: str) -> None:
    assert fault(write_pool(text)).startswith("pool.yaml")


KEYS = st.sampled_from(["name", "fallback", "agents", "card", "search", "kind", "x"])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=12,
    )
)
def test_any_yaml_is_read_or_refused_in_one_sentence(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"^[^\n]*any\.yaml[^\n]*$"):
        load_pool(path)


def test_a_missing_pool_file(tmp_path: Path) -> None:
    assert fault(tmp_path / "none.yaml") == "none.yaml: the pool file cannot be read, no such file or directory"


def test_include_by_ids_and_by_field(write_pool: WritePool, pool_content: dict[str, Any]) -> None:
    corpus = pool_content["agents"][1]["search"]
    pool_content["agents"] += [
        {"name": "ids", "card": "x", "search": {**corpus, "include": [2, "3"]}},
        {"name": "one", "card": "x", "search": {**corpus, "include": {"kind": "river"}}},
        {"name": "any", "card": "x", "search": {**corpus, "include": {"kind": ["lake", "sea"]}}},
        {"name": "both", "card": "x", "search": {**corpus, "include": {"kind": ["lake", "sea"], "decks": "3"}}},
        {"name": "top", "card": "x", "search": {**corpus, "include": {"title": "Canoe"}}},
    ]
    pool = load_pool(write_pool(pool_content))
    chosen = {name: [d["_id"] for d in pool.documents(name)] for name in pool.names[2:]}
    assert chosen == {"ids": ["2", "3"], "one": ["1", "3"], "any": ["1", "2"], "both": ["2"], "top": ["1"]}


def test_agents_share_the_documents_of_one_file(write_pool: WritePool, pool_content: dict[str, Any]) -> None:
    pool_content["agents"].append({"name": "river", "card": "x", "search": {
        "kind": "bm25", "corpus": "./birds/../boats.jsonl", "include": {"kind": "river"}}})
    pool = load_pool(write_pool(pool_content))
    assert pool.documents("river")[0] is pool.documents("boats")[0]
    assert pool.corpus_name("river") == pool.corpus_name("boats") == "boats.jsonl"


def test_the_digest_follows_content_not_place(
    write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path
) -> None:
    path = write_pool(pool_content)
    before = load_pool(path).digest
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("birds", "boats.jsonl", "pool.yaml"):
        (tmp_path / name).rename(moved / name)
    assert load_pool(moved / "pool.yaml").digest == before
    write_jsonl(moved / "boats.jsonl", BOATS[:2])
    changed = load_pool(moved / "pool.yaml").digest
    assert changed != before
    (moved / "pool.yaml").write_text((moved / "pool.yaml").read_text().replace("Boats.", "Ships."))
    assert load_pool(moved / "pool.yaml").digest not in (before, changed)


def test_broken_line_1234(tmp_path: Path) -> None:
    rows = [json.dumps({"_id": str(i), "text": "x"}) for i in range(2000)]
    rows[1233] = '{"_id": "1233", "text": '
    for name in ("corpus.jsonl", "corpus.jsonl.gz"):
        text = "\n".join(rows).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
        with pytest.raises(BadInput, match=rf"{name}, line 1234: expected one JSON object"):
            read_corpus(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]", "line 2: expected one JSON object, found [1]"),
        ('{"text": "x"}', "line 2: _id: expected a text that is not empty, found nothing"),
        ('{"_id": 5, "text": "x"}', "line 2: _id: expected a text that is not empty, found 5"),
        ('{"_id": "1", "text": "x"}', "line 2: _id: duplicate id '1', expected each id once"),
        ('{"_id": "2", "text": 5}', "line 2: text: expected a text, found 5"),
        ('{"_id": "2", "metadata": "x"}', 'line 2: metadata: expected an object, found "x"'),
        ('{"_id": "2", "metadata": {"date": "1.2.2003"}}',
         "line 2: metadata.date: expected YYYY, YYYY-MM or YYYY-MM-DD, found '1.2.2003'"),
        ('{"_id": "2", "metadata": {"date": "2023-02-29"}}',
         "line 2: metadata.date: expected a day of the calendar, found '2023-02-29'"),
        ("[" * 100_000, "line 2: expected one JSON object, found one nested too deeply"),
        ('{"_id": ' + "9" * 5000 + "}", "line 2: expected one JSON object, found a number that is too long"),
        ('{"_id": "\\u00e9', "line 2: expected one JSON object, found a syntax error at column 11"),
    ],
)
def test_a_faulty_corpus_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"_id": "1", "text": "x"}\n' + line + "\n")
    with pytest.raises(BadInput) as caught:
        read_corpus(path)
    assert reason in str(caught.value)


def test_other_faults_of_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("\n\n")
    with pytest.raises(BadInput, match=r"c\.jsonl: the corpus is empty"):
        read_corpus(path)
    path.write_bytes(b'{"_id": "1", "text": "\xff"}\n')
    with pytest.raises(BadInput, match=r"c\.jsonl, line 1: expected UTF-8"):
        read_corpus(path)
    with pytest.raises(BadInput, match=r"none\.jsonl: the file cannot be read, no such file"):
        read_corpus(tmp_path / "none.jsonl")
    whole = gzip.compress(b"".join(b'{"_id": "%d", "text": "%d"}\n' % (i, i * i * 7919) for i in range(5000)))
    broken = tmp_path / "c.jsonl.gz"
    for content in (whole[: len(whole) // 2], b"no gzip", whole[:100] + b"\0" * 50 + whole[150:]):
        broken.write_bytes(content)
        with pytest.raises(BadInput, match=r"c\.jsonl\.gz, (after )?line \d+: "):
            read_corpus(broken)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"_id": "1", "text": "x"}\n')
    assert read_corpus(path) == [{"_id": "1", "text": "x"}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("q9\t1\t1", "line 3: query-id: unknown query 'q9', expected an _id of the query file"),
        ("q1\t99\t1", "line 3: corpus-id: unknown document '99', expected an _id of the corpus"),
        ("q1\t1", "line 3: expected 3 columns separated by tabs, found 2"),
        ("q1 1 1", "line 3: expected 3 columns separated by tabs, found 1"),
        ("q1\t0\t1\t1", "line 3: expected 3 columns separated by tabs, found 4"),
        ("q1\t1\t0.5", "line 3: score: expected a whole number >= 0, found '0.5'"),
        ("q1\t1\t-1", "line 3: score: expected a whole number >= 0, found '-1'"),
        ("q1\t3\t2", "line 3: score: a second grade for query 'q1' and document '3'"),
    ],
)
def test_faulty_qrels(
    write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path, line: str, reason: str
) -> None:
    path = write_pool(pool_content)
    write_qrels(tmp_path / "birds/qrels/dev.tsv", [("q1", "3", 1)]).open("a").write(line + "\n")
    assert fault(path) == f"birds/qrels/dev.tsv, {reason}"


def test_qrels_need_their_header(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("q1\t3\t1\n")
    with pytest.raises(BadInput, match=r"dev\.tsv, line 1: expected the header query-id, corpus-id, score"):
        read_qrels(tmp_path / "dev.tsv")


def test_faulty_queries(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl.gz", [{"_id": "1", "text": "x"}, {"_id": "2"}])
    with pytest.raises(BadInput, match=r"q\.jsonl\.gz, line 2: text: expected a text, found nothing"):
        read_queries(path)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"_id": "2", "text": "a boat \ud83d"}, ""),
        ({"_id": "2", "text": "a boat", "metadata": {"style": "\ude00"}}, ""),
        ({"_id": "\ud83d", "text": "a boat"}, " _id:"),
    ],
)
def test_half_a_character_in_a_query(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"_id": "1", "text": "whole 😀"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=rf"q\.jsonl, line 2:{field} expected whole characters, found half a surrogate pair$"):
        read_queries(path)


def test_half_a_character_in_a_card(write_pool: WritePool, pool_content: dict[str, Any]) -> None:
    pool_content["agents"][1]["card"] = "Boats \ud83d"
    path = write_pool(pool_content)
    path.write_text(json.dumps(pool_content))  # also YAML
    assert fault(path).endswith("agents[1].card: expected whole characters, found half a surrogate pair")


def test_document_period() -> None:
    assert document_period("1960") == (date(1960, 1, 1), date(1960, 12, 31))
    assert document_period("2024-02") == (date(2024, 2, 1), date(2024, 2, 29))
    assert document_period("1958-12-03") == (date(1958, 12, 3), date(1958, 12, 3))
    for text in ("60", "1960-1", "0000", "1960-13", "1960-00", "1960-01-01T00:00", "", "١٩٦٠"):
        with pytest.raises(ValueError, match="expected"):
            document_period(text)


def test_the_shared_pool_is_sound(shared_pool_path: Path) -> None:
    pool = load_pool(shared_pool_path)
    check_pool(pool)
    assert sum(len(pool.documents(name)) for name in pool.names) > 30_000
