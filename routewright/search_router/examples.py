"""Training and evaluation examples: a query, what it looks meant for, and what each agent really returned."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from routewright.errors import BadInput, StageFailed
from routewright.evaluation.ranking import ndcg_at_10
from routewright.pools.pool import Pool
from routewright.pools.search import Hit, PoolSearch, Request
from routewright.search_router.decision import Interval

NEAR_BEST = 0.05  # agents within this NDCG@10 of the best count as best
MISMATCH = 0.2  # the labeller's agent is at least this far below the best


@dataclass
class Example:
    """One line of train/dev/test.jsonl (a superset of the query log)."""

    id: str
    query: str
    home: str  # the agent whose collection the query comes from
    group: str  # document group: never on both sides of a split
    qrels: dict[str, dict[str, int]]  # agent -> document -> grade
    reference_date: str | None = None
    style: str = ""
    source: str = "synthetic"
    intent: list[float] = field(default_factory=list)  # the labeller's P(agent), pool order
    intent_agents: list[str] = field(default_factory=list)
    keywords: list[str] = field(default_factory=list)
    start: str | None = None
    end: str | None = None
    # agent -> NDCG@10 alone, with the raw query; without qrels what a log says came of it, in [0, 1], of the agents known
    outcome: dict[str, float] = field(default_factory=dict)

    @property
    def reference(self) -> date | None:
        return date.fromisoformat(self.reference_date) if self.reference_date else None

    @property
    def interval(self) -> Interval | None:
        if self.start is None and self.end is None:
            return None
        return Interval(
            date.fromisoformat(self.start) if self.start else None, date.fromisoformat(self.end) if self.end else None
        )

    @property
    def best(self) -> float:
        return max(self.outcome.values())

    def best_agents(self) -> list[str]:
        """The agents within 0.05 NDCG@10 of the best, best first; ties in pool order."""
        near = [name for name, value in self.outcome.items() if value >= self.best - NEAR_BEST]
        return sorted(near, key=lambda name: -self.outcome[name])

    def mismatch(self) -> bool:
        """Whether the frozen labeller's agent is known to be at least 0.2 below the best (methods: the mismatch subset)."""
        return self.outcome.get(self.intent_agents[0], self.best) <= self.best - MISMATCH

    def relevant(self, pool: Pool) -> dict[tuple[str, str], int]:
        """Grades by (corpus, document), over all agents."""
        return {
            (pool.corpus_name(agent), document): grade
            for agent, grades in self.qrels.items()
            for document, grade in grades.items()
        }


def write_examples(path: Path, examples: Iterable[Example]) -> None:
    """Write examples as JSONL, atomically."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(asdict(example), ensure_ascii=False) + "\n")
    partial.rename(path)


def read_examples(path: Path) -> list[Example]:
    """Read examples; BadInput names file and line."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file, expected examples made by synthesize")
    examples = []
    # not splitlines: a query may hold other line separators of Unicode
    for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), 1):
        try:
            row: dict[str, Any] = json.loads(line)
            examples.append(Example(**row))
        except (ValueError, TypeError) as error:
            raise BadInput(f"{path}, line {number}: expected an example, got {error}") from None
    return examples


def search_all(requests: list[Request], search: PoolSearch) -> list[list[Hit]]:
    """The hits of each request; StageFailed where an agent failed, since finding nothing would read as a bad answer."""
    hits = search.search_many(requests)
    for agent, messages in search.failures.items():
        asked = len({request for request in requests if request[0] == agent})
        raise StageFailed(
            f"agent {agent} failed on {len(messages)} of {asked} searches ({messages[0]}): run the stage again when it "
            "answers, what was found is kept"
        )
    return hits


def measure_outcomes(examples: list[Example], pool: Pool, search: PoolSearch) -> None:
    """Fill `outcome`: NDCG@10 of every agent alone with the raw query (no keywords, no interval); see `search_all`."""
    requests: list[Request] = [(name, example.query, None) for example in examples for name in pool.names]
    hits = iter(search_all(requests, search))
    for example in examples:
        relevant = example.relevant(pool)
        example.outcome = {
            name: ndcg_at_10([(hit.corpus, hit.doc_id) for hit in next(hits)], relevant) for name in pool.names
        }
