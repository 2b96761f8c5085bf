from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from household import MISLEADING, documents, profile_with, read_lines, read_splits, write_household, write_lines

from routewright.config import Profile
from routewright.errors import BadInput
from routewright.pools.fetch import fetch_dataset
from routewright.pools.pool import Pool, document_text, load_pool
from routewright.search_router import synthesis
from routewright.search_router.baselines import best_single_agent
from routewright.search_router.examples import Example
from routewright.search_router.synthesis import (
    DATED_SHARE,
    STYLES,
    assign_splits,
    known_item_query,
    logged_queries,
    near_duplicates,
    pool_queries,
    split_by_group,
    synthesize,
)
from routewright.search_router.time_expressions import resolve_interval

Splits = dict[str, list[Example]]
Make = Callable[..., Splits]


@pytest.fixture(autouse=True)
def _no_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BASE_URL", "MODEL"):
        monkeypatch.delenv(f"ROUTEWRIGHT_LLM_{name}", raising=False)


def fetched(source: Path, out: Path) -> Path:
    fetch_dataset(str(source), out)
    return out


def made(dataset: Path, out: Path, profile: Profile, seed: int = 0, query_log: Path | None = None) -> Splits:
    synthesize(dataset, out, profile, seed, query_log)
    return read_splits(out)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The household without any queries."""
    folder = tmp_path_factory.mktemp("bare")
    return fetched(write_household(folder / "source", with_queries=False), folder / "dataset")


@pytest.fixture(scope="module")
def synthetic(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Splits:
    return made(bare, tmp_path_factory.mktemp("synthetic"), profile_with(synthesis={"queries_per_agent": 60}))


@pytest.fixture
def write_log(tmp_path: Path) -> Callable[..., Path]:
    def write(*entries: dict[str, Any]) -> Path:
        write_lines(tmp_path / "log.jsonl", list(entries))
        return tmp_path / "log.jsonl"

    return write


def texts(splits: Splits) -> dict[str, list[str]]:
    return {split: [example.query for example in examples] for split, examples in splits.items()}


def everything(splits: Splits) -> list[Example]:
    return [example for examples in splits.values() for example in examples]


# --- Splits


def test_shares_of_groups() -> None:
    counts = Counter(split_by_group(f"group {i}", seed=0) for i in range(4000))
    assert counts["train"] / 4000 == pytest.approx(0.70, abs=0.03)
    assert counts["dev"] / 4000 == pytest.approx(0.15, abs=0.02)
    assert counts["test"] / 4000 == pytest.approx(0.15, abs=0.02)
    assert split_by_group("a", 0) == split_by_group("a", 0)
    assert [split_by_group(f"{i}", 0) for i in range(50)] != [split_by_group(f"{i}", 1) for i in range(50)]


def test_no_group_is_on_two_sides(synthetic: Splits) -> None:
    groups = {split: {example.group for example in examples} for split, examples in synthetic.items()}
    assert not groups["train"] & groups["dev"]
    assert not groups["train"] & groups["test"]
    assert not groups["dev"] & groups["test"]
    assert all(groups.values())


def test_no_document_is_on_two_sides_whoever_searches_it(tmp_path: Path) -> None:
    """Two agents share a corpus: a query for a document by way of either belongs to one group."""
    source = write_household(tmp_path / "source", with_queries=False)
    content = yaml.safe_load(source.read_text())
    content["agents"].append({"name": "cellar", "card": "Old things.", "search": {"kind": "bm25", "corpus": "office.jsonl"}})
    source.write_text(yaml.safe_dump(content))
    dataset = fetched(source, tmp_path / "dataset")
    profile = profile_with(synthesis={"queries_per_agent": 80, "max_train": None, "max_eval": None})
    splits = made(dataset, tmp_path / "out", profile)
    pool = load_pool(dataset / "pool.yaml")
    keys = {split: {key for e in examples for key in e.relevant(pool)} for split, examples in splits.items()}
    assert not keys["train"] & keys["dev"]
    assert not keys["train"] & keys["test"]
    assert not keys["dev"] & keys["test"]


def test_given_splits_are_kept(splits: Splits, dataset: Path) -> None:
    given = pool_queries(load_pool(dataset / "pool.yaml"))
    for split in ("train", "dev", "test"):
        assert {e.id for e in splits[split]} == {e.id for e in given[split]}
        assert [e.id for e in splits[split]] != [e.id for e in given[split]], "shuffled: any first n are a fair sample"


def test_without_test_dev_is_the_test_and_train_gives_the_dev(tmp_path: Path) -> None:
    """Evaluation uses dev then, and selection train only."""
    source = write_household(tmp_path / "source", splits=("train", "dev"))
    found = made(fetched(source, tmp_path / "dataset"), tmp_path / "out", profile_with(synthesis={"queries_per_agent": 0}))
    given = pool_queries(load_pool(source))
    assert {e.id for e in found["test"]} == {e.id for e in given["dev"]}
    assert {e.id for e in found["dev"]} | {e.id for e in found["train"]} == {e.id for e in given["train"]}
    assert 8 <= len(found["dev"]) <= 30
    assert not {e.id for e in found["dev"]} & {e.id for e in found["train"]}


def test_synthetic_queries_beside_human_ones_are_for_training_only(tmp_path: Path, dataset: Path) -> None:
    """And only as many as human ones are missing: each agent has 40, of 50 wanted; none on a held-out document."""
    profile = profile_with(synthesis={"queries_per_agent": 50, "max_train": None, "max_eval": None})
    found = made(dataset, tmp_path, profile)
    assert all("/synthetic-" not in e.id for e in found["dev"] + found["test"])
    added = [e for e in found["train"] if "/synthetic-" in e.id]
    assert 0 < len(added) <= 30
    held_out = {(e.home, document) for e in found["dev"] + found["test"] for document in e.qrels[e.home]}
    assert not held_out & {(e.home, document) for e in added for document in e.qrels[e.home]}


def test_dev_never_comes_from_the_log() -> None:
    def example(i: int, source: str) -> Example:
        return Example(f"{source}{i}", f"query {source} {i}", "a", f"{source}{i}", {"a": {"d": 1}}, source=source)

    human = {"train": [example(i, "human") for i in range(100)], "dev": [], "test": [example(i, "test") for i in range(20)]}
    found = assign_splits(human, [example(i, "log") for i in range(200)], seed=0)
    assert {e.source for e in found["dev"]} == {"human"}
    assert Counter(e.source for e in found["train"])["log"] == 200
    assert len(found["test"]) == 20
    again = assign_splits(human, [example(i, "log") for i in range(200)], seed=0)
    assert texts(found) == texts(again)
    assert texts(found) != texts(assign_splits(human, [example(i, "log") for i in range(200)], seed=1))


def test_limits(bare: Path, tmp_path: Path) -> None:
    found = made(bare, tmp_path, profile_with(synthesis={"queries_per_agent": 60, "max_train": 30, "max_eval": 7}))
    assert [len(found[split]) for split in ("train", "dev", "test")] == [30, 7, 7]


# --- Near duplicates


def test_near_duplicates_by_hand() -> None:
    held_out = ["how do I clean the red oven", "שלום עולם", "?!"]
    found = near_duplicates(
        [
            "how do I clean the red oven",
            "The RED oven: how do I clean?",  # the same words
            "how do I clean the red oven today",  # 7 of 8
            "how do I clean the red pan now",  # 6 of 9
            "how do I clean",  # 4 of 7
            "שלום עולם",
            "עולם",
            " ?! ",  # no word, equal as a text
            "!!",
            "",
        ],
        held_out,
    )
    assert found.tolist() == [True, True, True, False, False, True, False, True, False, False]
    assert near_duplicates([], held_out).shape == (0,)
    assert near_duplicates(["a"], []).tolist() == [False]


def test_near_duplicates_equal_the_definition() -> None:
    rng = random.Random(0)
    words = [f"w{i}" for i in range(12)]
    queries = [" ".join(rng.choices(words, k=rng.randint(1, 7))) for _ in range(700)]
    held_out = [" ".join(rng.choices(words, k=rng.randint(1, 7))) for _ in range(60)]

    def jaccard(a: str, b: str) -> float:
        one, other = set(a.split()), set(b.split())
        return len(one & other) / len(one | other)

    expected = [any(jaccard(query, other) >= 0.8 for other in held_out) for query in queries]
    assert near_duplicates(queries, held_out).tolist() == expected
    assert 0 < sum(expected) < 700


def test_copies_of_held_out_queries_are_not_trained_on(tmp_path: Path) -> None:
    source = write_household(tmp_path / "source")
    rows = read_lines(source.parent / "kitchen-queries.jsonl")
    ids = {split: [line.split("\t")[0] for line in (source.parent / f"kitchen-{split}.tsv").read_text().splitlines()[1:]]
           for split in ("train", "dev", "test")}  # fmt: skip
    by_id = {row["_id"]: row for row in rows}
    test_query, dev_query = by_id[ids["test"][0]]["text"], by_id[ids["dev"][1]]["text"]
    by_id[ids["train"][0]]["text"] = f"{test_query.upper()}?"
    by_id[ids["train"][1]]["text"] = dev_query
    by_id[ids["dev"][0]]["text"] = by_id[ids["test"][1]]["text"]
    write_lines(source.parent / "kitchen-queries.jsonl", rows)
    dataset = fetched(source, tmp_path / "dataset")
    found = made(dataset, tmp_path / "out", profile_with(synthesis={"queries_per_agent": 0}))
    gone = {f"kitchen/{ids['train'][0]}", f"kitchen/{ids['train'][1]}", f"kitchen/{ids['dev'][0]}"}
    assert not gone & {e.id for e in everything(found)}
    assert [len(found[split]) for split in ("train", "dev", "test")] == [118, 29, 30]
    assert json.loads((tmp_path / "out" / "stats.json").read_text())["near_duplicates_removed"] == 3
    held_out = [e.query for e in found["test"] + found["dev"]]
    assert not near_duplicates([e.query for e in found["train"]], held_out).any()


# --- The pool's own queries


def test_a_query_that_several_agents_judge_is_one_example(tmp_path: Path) -> None:
    write_lines(tmp_path / "all.jsonl", [{"_id": "d1", "text": "red rose"}, {"_id": "d2", "text": "red spade"}])
    write_lines(tmp_path / "queries.jsonl", [{"_id": "q", "text": "red"}, {"_id": "nothing", "text": "blue"}])
    agents = []
    for name, rows in (("a", "q\td1\t2\nnothing\td1\t0\n"), ("b", "q\td1\t2\nq\td2\t1\n")):
        (tmp_path / f"{name}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
        agents.append({"name": name, "card": name, "search": {"kind": "bm25", "corpus": "all.jsonl"},
                       "queries": {"file": "queries.jsonl", "qrels": {"test": f"{name}.tsv"}}})  # fmt: skip
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"name": "p", "fallback": "a", "agents": agents}))
    (example,) = pool_queries(load_pool(tmp_path / "pool.yaml"))["test"]
    assert (example.query, example.home) == ("red", "a")
    assert example.qrels == {"a": {"d1": 2}, "b": {"d1": 2, "d2": 1}}


def test_queries_of_two_files_are_never_mixed(tmp_path: Path) -> None:
    """Each agent's folder has a queries.jsonl of its own, and both have a query q1."""
    agents = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "corpus.jsonl", [{"_id": "d1", "text": f"about {name}"}])
        write_lines(tmp_path / name / "queries.jsonl", [{"_id": "q1", "text": f"query for {name}"}])
        (tmp_path / name / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
        agents.append({"name": name, "card": name, "search": {"kind": "bm25", "corpus": f"{name}/corpus.jsonl"},
                       "queries": {"file": f"{name}/queries.jsonl", "qrels": {"dev": f"{name}/dev.tsv"}}})  # fmt: skip
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"name": "p", "fallback": "a", "agents": agents}))
    found = pool_queries(load_pool(tmp_path / "pool.yaml"))["dev"]
    assert [(e.query, e.home, e.qrels) for e in found] == [
        ("query for a", "a", {"a": {"d1": 1}}), ("query for b", "b", {"b": {"d1": 1}}),
    ]  # fmt: skip


def test_ids_are_unique(splits: Splits, synthetic: Splits) -> None:
    for found in (splits, synthetic):
        assert max(Counter(e.id for e in everything(found)).values()) == 1


# --- Labels


def test_intent_does_not_depend_on_where_the_answer_lives(splits: Splits, tmp_path: Path) -> None:
    """The same queries with the agents' documents and judgements passed around get the same labels."""
    source = write_household(tmp_path / "source")
    content = yaml.safe_load(source.read_text())
    moved = [(agent["search"], agent["queries"]) for agent in content["agents"]]
    for agent, (search, queries) in zip(content["agents"], moved[1:] + moved[:1], strict=True):
        agent["search"], agent["queries"] = search, queries
    source.write_text(yaml.safe_dump(content, sort_keys=False))
    turned = made(fetched(source, tmp_path / "dataset"), tmp_path / "out", profile_with(synthesis={"queries_per_agent": 0}))
    before, after = ({e.query: e for e in everything(found)} for found in (splits, turned))
    assert before.keys() == after.keys()
    for query, example in before.items():
        other = after[query]
        assert other.home != example.home
        assert other.intent_agents == example.intent_agents
        assert other.intent == pytest.approx(example.intent, abs=2e-4)
        assert (other.keywords, other.start, other.end) == (example.keywords, example.start, example.end)


def test_labels_are_whole(splits: Splits, pool: Pool) -> None:
    for example in everything(splits):
        assert 1 <= len(example.intent_agents) <= 2
        assert sum(example.intent) == pytest.approx(1, abs=1e-3)
        assert example.intent_agents[0] == pool.names[int(np.argmax(example.intent))]
        assert list(example.outcome) == pool.names
        assert all(word in example.query.lower() for word in example.keywords)


def test_misleading_queries_are_the_mismatches(splits: Splits) -> None:
    for example in everything(splits):
        (thing,) = {document.split("-")[0] for document in example.qrels[example.home]}
        assert example.intent_agents[0] == MISLEADING.get(thing, example.home), example.query
        assert example.mismatch() == (thing in MISLEADING)


def test_time_expressions_of_human_queries_are_resolved(splits: Splits) -> None:
    timed = [e for e in everything(splits) if "since" in e.query]
    assert len(timed) == 30
    for example in everything(splits):
        year = re.search(r"since (\d{4})", example.query)
        assert (example.start, example.end) == (f"{year[1]}-01-01" if year else None, None)


def test_what_the_folder_says_about_itself(examples: Path, splits: Splits, pool: Pool) -> None:
    stats = json.loads((examples / "stats.json").read_text())
    for split, found in splits.items():
        told = stats[split]
        assert told["queries"] == len(found)
        assert told["homes"] == Counter(e.home for e in found)
        assert told["mismatch"] == pytest.approx(np.mean([e.mismatch() for e in found]))
        assert told["with_interval"] == sum(e.interval is not None for e in found)
        for name in pool.names:
            assert told["ndcg@10"][name] == pytest.approx(np.mean([e.outcome[name] for e in found]))
        assert told["ndcg@10"]["oracle"] == pytest.approx(np.mean([max(e.outcome.values()) for e in found]))
    labeller = json.loads((examples / "labeller.json").read_text())
    assert labeller["agents"] == pool.names
    assert "MiniLM" in labeller["labels"]


# --- Synthetic queries


def test_a_known_item_query_is_made_of_its_document() -> None:
    document = documents("kitchen")[3]
    words = set(re.findall(r"\w+", document_text(document, ["title", "text"]).lower()))
    rng = random.Random(0)
    plain = [known_item_query(document, ["title", "text"], "keywords", rng) for _ in range(30)]
    assert all(set(query.split()) <= words for query in plain)
    assert len(set(plain)) > 3
    assert all(len(query.split()) <= 9 for query in plain)
    how = {known_item_query(document, ["title"], "how-to", rng) for _ in range(30)}
    assert all(query.startswith(("how", "what", "papers", "explain")) for query in how)
    fault = {known_item_query(document, ["text"], "fault report", rng) for _ in range(9)}
    assert all(query.startswith(("problem", "error", "why")) for query in fault)
    assert known_item_query({"_id": "1", "text": ""}, ["text"], "keywords", rng) == ""


def test_synthetic_queries_find_their_documents(synthetic: Splits) -> None:
    found = everything(synthetic)
    assert {e.style for e in found} == set(STYLES)
    assert all(e.source == "synthetic" for e in found)
    assert np.mean([e.outcome[e.home] for e in found]) > 0.3
    assert np.mean([max(e.outcome, key=e.outcome.__getitem__) == e.home for e in found]) > 0.8


def test_dated_documents_get_dated_queries_before_the_reference(synthetic: Splits) -> None:
    """Only the kitchen's documents carry a year; the interval is the document's, and the words say it."""
    kitchen = [e for e in everything(synthetic) if e.home == "kitchen"]
    timed = [e for e in kitchen if e.interval]
    assert len(timed) / len(kitchen) == pytest.approx(DATED_SHARE, abs=0.2)
    assert not [e for e in everything(synthetic) if e.home != "kitchen" and e.interval]
    years = {document["_id"]: document["metadata"]["date"] for document in documents("kitchen")}
    for example in timed:
        (document,) = example.qrels["kitchen"]
        assert (example.start, example.end) == (f"{years[document]}-01-01", f"{years[document]}-12-31")
        assert example.end < str(example.reference_date)
        assert resolve_interval(example.query, date.fromisoformat(str(example.reference_date))) == example.interval


def test_the_same_seed_gives_the_same_bytes(bare: Path, tmp_path: Path) -> None:
    profile = profile_with(synthesis={"queries_per_agent": 15})
    made(bare, tmp_path / "a", profile)
    made(bare, tmp_path / "b", profile)
    other = made(bare, tmp_path / "c", profile, seed=1)
    for name in ("train.jsonl", "dev.jsonl", "test.jsonl", "stats.json", "labeller.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert texts(other)["train"] != [row["query"] for row in read_lines(tmp_path / "a" / "train.jsonl")]


def test_a_finished_folder_is_left_as_it_is(
    examples: Path, dataset: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesis, "load_pool", lambda _: pytest.fail("made again"))
    synthesize(dataset, examples, profile, 0)


def test_a_folder_without_its_stats_is_finished(bare: Path, tmp_path: Path) -> None:
    profile = profile_with(synthesis={"queries_per_agent": 15})
    expected = made(bare, tmp_path / "whole", profile)
    half = Path(shutil.copytree(tmp_path / "whole", tmp_path / "half"))
    (half / "stats.json").unlink()
    (half / "dev.jsonl").write_text("{half")
    assert made(bare, half, profile) == expected


# --- Query logs


def test_logged_entries_are_trained_on(dataset: Path, write_log: Callable[..., Path], tmp_path: Path) -> None:
    log = write_log(
        {"query": "descale a teakettle", "outcome": {"office": 0.9, "kitchen": 0.1}, "request_id": "r1",
         "reference_date": "2025-06-15", "agents": ["kitchen"], "model_version": "old"},
        {"query": "boil water since 2021", "qrels": {"kitchen": {"pan-red": 1}}, "reference_date": "2025-06-15"},
        {"query": "which one", "agents": ["garden"]},
        {"query": "tulips last spring", "outcome": {"garden": 1.0}, "start": "2025-03-01", "end": "2025-05-31"},
    )  # fmt: skip
    found = made(dataset, tmp_path / "out", profile_with(synthesis={"queries_per_agent": 0}), query_log=log)
    logged = {e.query: e for e in found["train"] if e.source == "log"}
    assert logged.keys() == {"descale a teakettle", "boil water since 2021", "tulips last spring"}
    assert all(e.source != "log" for e in found["dev"] + found["test"])
    kettle = logged["descale a teakettle"]
    assert kettle.home == "office"
    assert kettle.outcome == {"kitchen": 0.1, "garden": 0.0, "office": 0.9}, "measured in production, not searched again"
    assert kettle.intent_agents == ["kitchen"], "the label is the query's look"
    water = logged["boil water since 2021"]
    assert water.home == "kitchen"
    assert water.outcome.keys() == {"kitchen", "garden", "office"}
    assert (water.start, water.end) == ("2021-01-01", None)
    tulips = logged["tulips last spring"]
    assert (tulips.start, tulips.end) == ("2025-03-01", "2025-05-31"), "as it was logged"


def test_a_request_that_is_logged_twice_is_two_examples(pool: Pool, write_log: Callable[..., Path]) -> None:
    entry = {"query": "a", "outcome": {"office": 0.9}, "request_id": "r1"}
    found = logged_queries(write_log(entry, {**entry, "query": "b"}), pool)
    assert len({e.id for e in found}) == 2


def test_what_a_served_router_logged_is_learnt_from(pool: Pool, write_log: Callable[..., Path]) -> None:
    log = write_log(
        {"query": "a kettle", "request_id": "r1", "router": "search-router", "propensity": 1.0},
        {"query": "a lawn", "request_id": "r2", "router": "search-router", "propensity": 1.0},
        {"query": "", "request_id": "r3", "router": "search-router", "propensity": 1.0, "redacted": "drop"},
        {"query": "open the door", "request_id": "r4", "router": "ensemble-router", "propensity": 1.0},
        *({"request_id": f"r{i}", "outcome": {"kitchen": 0.5}} for i in (1, 3, 4)),
        {"request_id": "r1", "outcome": {"kitchen": 1.0}},
    )
    found = logged_queries(log, pool)
    assert [(e.query, e.outcome) for e in found] == [("a kettle", {"kitchen": 1.0, "garden": 0.0, "office": 0.0})]


def test_an_agent_that_was_not_asked_is_unknown(pool: Pool, write_log: Callable[..., Path]) -> None:
    """What was asked and is left out counts as 0; of the rest, the log cannot say how it would have done."""
    asked = {"decision": {"agents": ["garden", "office"]}}
    found = logged_queries(
        write_log({"query": "a", "outcome": {"office": 0.9}, **asked}, {"query": "b", "outcome": {"kitchen": 0.5}, **asked}),
        pool,
    )
    assert [e.outcome for e in found] == [{"garden": 0.0, "office": 0.9}, {"kitchen": 0.5, "garden": 0.0, "office": 0.0}]
    found[0].intent_agents = ["kitchen"]
    assert not found[0].mismatch()
    assert best_single_agent(found, pool.names) == "kitchen"


def test_qrels_come_before_outcomes_and_grades_of_0_are_none(pool: Pool, write_log: Callable[..., Path]) -> None:
    nothing = {"kitchen": {"pan-red": 0}, "garden": {}}
    both, outcome = logged_queries(
        write_log(
            {"query": "a", "outcome": {"office": 0.9}, "qrels": {**nothing, "garden": {"rose-red": 2, "hedge-red": 0}}},
            {"query": "b", "outcome": {"office": 0.9}, "qrels": nothing},
            {"query": "c", "qrels": nothing},
        ),
        pool,
    )
    assert (both.qrels, both.outcome) == ({"garden": {"rose-red": 2}}, {}), "measured like any other"
    assert (outcome.qrels, outcome.outcome["office"]) == ({}, 0.9)


def test_what_has_no_qrels_is_never_held_out(bare: Path, write_log: Callable[..., Path], tmp_path: Path) -> None:
    """No row could answer it: nothing that is searched would be relevant."""
    entries = [{"query": f"number {i} of the log", "outcome": {"office": 1.0}} for i in range(40)]
    found = made(bare, tmp_path / "out", profile_with(synthesis={"queries_per_agent": 15}), query_log=write_log(*entries))
    assert Counter(e.source for e in found["train"])["log"] == 40
    assert all(e.qrels for e in found["dev"] + found["test"])
    stats = json.loads((tmp_path / "out" / "stats.json").read_text())["train"]
    measured = [e for e in found["train"] if e.qrels]
    assert stats["queries"] == len(measured) + 40
    assert stats["ndcg@10"]["oracle"] == pytest.approx(np.mean([e.best for e in measured])), "outcomes are no NDCG"


def test_equal_logged_queries_are_one_group(pool: Pool, write_log: Callable[..., Path]) -> None:
    one, other = logged_queries(
        write_log({"query": "Red Rose", "outcome": {"office": 1}}, {"query": "red rose", "outcome": {"office": 1}}), pool
    )
    assert one.group == other.group


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"query": "a", "outcome": {"attic": 1.0}}, "unknown agent 'attic', expected one of kitchen, garden, office"),
        ({"query": "a", "qrels": {"attic": {"d": 1}}}, "unknown agent 'attic'"),
        ({"query": 5}, "line 2: query"),
        ({"query": "a", "outcome": {"office": 1.5}}, "line 2: outcome.office"),
        ({"query": "a", "start": "2024-02-02", "end": "2024-02-01"}, "line 2: expected an end not before the start"),
        ({"query": "a", "reference_date": "soon"}, "line 2: reference_date"),
    ],
)
def test_a_bad_query_log(
    dataset: Path, write_log: Callable[..., Path], tmp_path: Path, line: dict[str, Any], sentence: str
) -> None:
    log = write_log({"query": "fine", "outcome": {"office": 1.0}}, line)
    with pytest.raises(BadInput) as caught:
        made(dataset, tmp_path / "out", profile_with(), query_log=log)
    assert str(log) in str(caught.value)
    assert sentence in str(caught.value)
    assert not (tmp_path / "out" / "stats.json").exists()


def test_a_log_that_is_not_there(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.jsonl"):
        made(dataset, tmp_path / "out", profile_with(), query_log=tmp_path / "nowhere.jsonl")


# --- Bad input


def test_a_pool_without_queries_and_none_to_be_written(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="pool 'household' has no train queries: expected human queries with qrels"):
        made(bare, tmp_path, profile_with(synthesis={"queries_per_agent": 0}))
    assert not (tmp_path / "stats.json").exists()


@pytest.mark.parametrize(
    "metadata",
    [
        {"reference_date": "soon"},
        {"reference_date": 2024},
        {"start": "2024-02-02", "end": "2024-02-01"},
        {"start": "2024-02-31"},
    ],
)
def test_metadata_that_means_nothing(tmp_path: Path, metadata: dict[str, Any]) -> None:
    source = write_household(tmp_path / "source")
    rows = read_lines(source.parent / "garden-queries.jsonl")
    rows[2]["metadata"] = metadata
    write_lines(source.parent / "garden-queries.jsonl", rows)
    with pytest.raises(BadInput) as caught:
        made(fetched(source, tmp_path / "dataset"), tmp_path / "out", profile_with(synthesis={"queries_per_agent": 0}))
    assert "garden-queries.jsonl" in str(caught.value)
    assert "q2" in str(caught.value)
    assert "metadata" in str(caught.value)


def test_queries_in_any_script_and_of_any_length(tmp_path: Path) -> None:
    source = write_household(tmp_path / "source")
    rows = read_lines(source.parent / "office-queries.jsonl")
    odd = ["שלום מה שלומך", "🚣🚣🚣", "x" * 100_000, "?", " ", "a\u2028b \u0085 c", "كيف أصلح since 2020"]
    for row, text in zip(rows, odd, strict=False):
        row["text"] = text
    write_lines(source.parent / "office-queries.jsonl", rows)
    found = made(fetched(source, tmp_path / "dataset"), tmp_path / "out", profile_with(synthesis={"queries_per_agent": 0}))
    assert set(odd) <= {e.query for e in everything(found)}


def test_a_teacher_labels_where_one_is_configured(
    dataset: Path, chat_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the garden for everything; half of a batch it leaves out keeps the offline label."""
    monkeypatch.setenv("ROUTEWRIGHT_LLM_BASE_URL", chat_server.url)
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "stand-in")

    def answer(request: dict[str, Any]) -> str:
        lines = request["messages"][1]["content"].split("\n")[1:-1]
        rows = [json.loads(line) for line in lines if line.startswith("{")]
        label = {"agents": ["garden"], "keywords": ["The"]}
        return json.dumps({"labels": [{"number": row["number"], **label} for row in rows if row["number"] % 2]})

    chat_server.answer = answer
    found = made(dataset, tmp_path / "out", profile_with(synthesis={"queries_per_agent": 0}))
    told = [e for e in everything(found) if e.keywords == ["the"]]
    assert len(told) == 90
    assert all(e.intent_agents == ["garden"] and e.intent == [0.0, 1.0, 0.0] for e in told)
    assert {e.intent_agents[0] for e in everything(found) if e not in told} == {"kitchen", "garden", "office"}
    assert json.loads((tmp_path / "out" / "labeller.json").read_text())["labels"] == "teacher"
    for request in chat_server.requests:
        assert "oven-red" not in json.dumps(request), "no document is shown"
