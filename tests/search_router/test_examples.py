from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from stand_in import StandIn, StandInHandler

from routewright.errors import BadInput, StageFailed
from routewright.pools.pool import Agent, HTTPSearch, Pool
from routewright.pools.search import PoolSearch
from routewright.search_router.decision import Interval
from routewright.search_router.examples import Example, measure_outcomes, read_examples, write_examples
from routewright.search_router.reward import Action, merged_results


def example(**changes: Any) -> Example:
    fields: dict[str, Any] = {"id": "1", "query": "q", "home": "kitchen", "group": "g", "qrels": {}}
    return Example(**{**fields, **changes})


def test_the_best_agents_are_within_five_hundredths() -> None:
    e = example(outcome={"kitchen": 0.80, "garden": 0.85, "office": 0.79})
    assert e.best == 0.85
    assert e.best_agents() == ["garden", "kitchen"]
    assert example(outcome={"kitchen": 0.0, "garden": 0.0}).best_agents() == ["kitchen", "garden"]


@pytest.mark.parametrize(("own", "expected"), [(1.0, False), (0.81, False), (0.8, True), (0.5, True), (0.0, True)])
def test_a_mismatch_is_two_tenths_below_the_best(own: float, expected: bool) -> None:
    e = example(outcome={"kitchen": own, "garden": 1.0}, intent_agents=["kitchen", "garden"])
    assert e.mismatch() is expected


def test_intervals_and_reference_dates() -> None:
    e = example(reference_date="2024-05-06", start="2024-01-01")
    assert e.reference == date(2024, 5, 6)
    assert e.interval == Interval(date(2024, 1, 1), None)
    assert example().interval is None
    assert example().reference is None
    with pytest.raises(ValueError, match="ends"):
        _ = example(start="2024-01-02", end="2024-01-01").interval


def test_written_examples_are_read_back(tmp_path: Path) -> None:
    examples = [
        example(id=str(i), query=query, qrels={"kitchen": {"d": 2}}, outcome={"kitchen": 0.5}, intent=[0.5, 0.5])
        for i, query in enumerate(["plain", "שלום עולם", "🚣 boat", 'a "quoted"\nline\u2028here'])
    ]
    write_examples(tmp_path / "train.jsonl", examples)
    assert read_examples(tmp_path / "train.jsonl") == examples
    assert [file.name for file in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "1"}', '{"id": "1", "colour": "red"}', "7"])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    write_examples(tmp_path / "dev.jsonl", [example(), example()])
    with (tmp_path / "dev.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BadInput, match=r"dev\.jsonl, line 3: expected an example"):
        read_examples(tmp_path / "dev.jsonl")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"test\.jsonl: no such file, expected examples made by synthesize"):
        read_examples(tmp_path / "test.jsonl")


def test_outcomes_are_each_agents_own_ndcg(pool: Pool) -> None:
    """The red kettle's page is the office's first hit; two relevant documents of which one is found give less than 1."""
    kettle = example(query="red kettle volume", qrels={"office": {"kettle-red": 1}})
    two = example(query="red kettle volume", qrels={"office": {"kettle-red": 1}, "garden": {"rose-small": 1}})
    nothing = example(query="xylophone", qrels={"office": {"kettle-red": 1}})
    measure_outcomes([kettle, two, nothing], pool, PoolSearch(pool))
    assert kettle.outcome == {"kitchen": 0.0, "garden": 0.0, "office": 1.0}
    assert list(kettle.outcome) == pool.names
    # one of two documents, first: 1 / (1 + 1 / log2 3)
    assert two.outcome["office"] == pytest.approx(1 / (1 + 1 / 1.5849625), abs=1e-6)
    assert nothing.outcome == {"kitchen": 0.0, "garden": 0.0, "office": 0.0}


class Flaky(StandInHandler):
    """A search endpoint that is down while ``up`` is not set, and counts what it is asked."""

    up, asked = False, 0

    def do_POST(self) -> None:
        payload = json.loads(self.body())
        type(self).asked += 1
        found = {"hits": [{"id": "rose-red", "score": 1.0}]}
        self.send(200, found) if self.up or "rose" in payload["query"] else self.send(404)


@pytest.fixture
def with_remote(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setattr(Flaky, "up", False)
    monkeypatch.setattr(Flaky, "asked", 0)
    server = StandIn(Flaky)
    remote = Agent(name="remote", card="Roses.", search=HTTPSearch(kind="http", url=server.url, timeout_s=30))
    yield replace(pool, agents=[*pool.agents, remote])
    server.close()


def test_a_dead_agent_becomes_no_label(with_remote: Pool, tmp_path: Path) -> None:
    """And a second try keeps what was answered."""
    rows = [example(query=f"red {thing}", qrels={"remote": {"rose-red": 1}}) for thing in ("rose", "kettle", "pan", "rose")]
    search = PoolSearch(with_remote, tmp_path)
    with pytest.raises(StageFailed, match=r"^agent remote failed on 2 of 3 searches \(status 404, expected 200\): run "):
        measure_outcomes(rows, with_remote, search)
    assert not any(row.outcome for row in rows)
    rose, kettle = (Action(("office", "remote"), (word,), None) for word in ("rose", "kettle"))
    with pytest.raises(StageFailed, match="agent remote failed on 1 of 2 searches"):
        merged_results([(rows[0], rose), (rows[2], kettle)], search)
    Flaky.up, Flaky.asked = True, 0
    measure_outcomes(rows, with_remote, search)
    assert [row.outcome["remote"] for row in rows] == [1.0] * 4
    assert Flaky.asked == 2


def test_relevant_documents_are_known_by_their_corpus(pool: Pool) -> None:
    e = example(qrels={"office": {"kettle-red": 1}, "kitchen": {"kettle-red": 2}})
    corpora = pool.corpus_name("office"), pool.corpus_name("kitchen")
    assert e.relevant(pool) == {(corpora[0], "kettle-red"): 1, (corpora[1], "kettle-red"): 2}
