from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from household import write_lines

from routewright.pools.pool import Pool, load_pool
from routewright.search_router.baselines import (
    REGULARISATION,
    UnionVote,
    best_single_agent,
    first_agent_ndcg,
    fit_linear,
    outcome_labels,
)
from routewright.search_router.examples import Example


def example(outcome: dict[str, float], query: str = "q") -> Example:
    return Example("1", query, "a", "g", {}, outcome=outcome)


def test_outcome_labels_are_the_best_agents_of_answered_queries() -> None:
    rows = [example({"a": 0.2, "b": 0.7}), example({"a": 0.0, "b": 0.0}), example({"a": 0.5, "b": 0.5})]
    answered, labels = outcome_labels(rows)
    assert answered == [rows[0], rows[2]]
    assert labels == ["b", "a"]


def test_the_best_single_agent() -> None:
    rows = [example({"a": 1.0, "b": 0.4, "c": 0.4}), example({"a": 0.0, "b": 0.7, "c": 0.7})]
    assert best_single_agent(rows, ["a", "b", "c"]) == "b"


def test_first_agent_ndcg_by_hand() -> None:
    rows = [example({"a": 1.0, "b": 0.4}), example({"a": 0.0, "b": 0.7})]
    assert first_agent_ndcg(np.array([[0.9, 0.1], [0.2, 0.3]]), rows, ["a", "b"]) == pytest.approx((1.0 + 0.7) / 2)


def test_a_linear_router_learns_its_labels(splits: dict[str, list[Example]], pool: Pool) -> None:
    train, labels = outcome_labels(splits["train"])
    router = fit_linear(train, labels, splits["dev"], pool.names)
    assert router is not None
    found = router.probabilities([e.query for e in splits["test"]])
    assert found.shape == (len(splits["test"]), 3)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert first_agent_ndcg(found, splits["test"], pool.names) > 0.8


def test_columns_are_in_pool_order_and_an_unseen_agent_has_no_chance(splits: dict[str, list[Example]]) -> None:
    some, dev = ([e for e in splits[split] if e.home != "garden"] for split in ("train", "dev"))
    router = fit_linear(some, [e.home for e in some], dev, ["office", "garden", "kitchen"])
    assert router is not None
    found = router.probabilities(["repair the oven", "sell the stapler", "🚣", ""])
    assert found[0].argmax() == 2
    assert found[1].argmax() == 0
    assert (found[:, 1] == 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_one_label_only_is_no_router(splits: dict[str, list[Example]], pool: Pool) -> None:
    assert fit_linear(splits["train"], ["office"] * len(splits["train"]), splits["dev"], pool.names) is None


def test_the_regularisation_is_chosen_on_dev(splits: dict[str, list[Example]], pool: Pool) -> None:
    train, labels = outcome_labels(splits["train"])
    chosen = fit_linear(train, labels, splits["dev"], pool.names)
    assert chosen is not None
    assert chosen.classifier.C in REGULARISATION
    # dev on which the opposite of every label is right: the weakest fit does least harm, or all do the same
    worst = [replace(e, outcome={name: 1 - value for name, value in e.outcome.items()}) for e in splits["dev"]]
    other = fit_linear(train, labels, worst, pool.names)
    assert other is not None
    texts = [e.query for e in worst]
    assert first_agent_ndcg(other.probabilities(texts), worst, pool.names) >= first_agent_ndcg(
        chosen.probabilities(texts), worst, pool.names
    )


def test_the_union_vote_by_hand(pool: Pool) -> None:
    """One index over all: the red kettle's page and others with a word of the query, weighted 1 / (60 + rank)."""
    vote = UnionVote(pool)
    found = vote.probabilities(["kettle", "xylophone"])
    assert found[0].tolist() == [0.0, 0.0, 1.0]
    assert found[1].tolist() == [0.0, 0.0, 0.0], "nothing matches, nobody votes"
    mixed = vote.probabilities(["antique kettle rose"])[0]
    hits = vote.index.search([["antiqu", "kettl", "rose"]], [None], 10)[0]
    votes = np.zeros(3)
    for rank, hit in enumerate(hits, 1):
        corpus = vote.keys[int(hit.doc_id)][0]
        votes[[pool.corpus_name(name) for name in pool.names].index(corpus)] += 1 / (60 + rank)
    np.testing.assert_allclose(mixed, votes / votes.sum())
    assert mixed[0] < mixed[1]


def test_agents_that_share_a_document_share_its_vote(tmp_path: Path) -> None:
    rows = [
        {"_id": "1", "title": "Rose", "text": "thorn", "summary": "x"},
        {"_id": "2", "title": "Spade", "text": "iron", "summary": "x"},
    ]
    write_lines(tmp_path / "all.jsonl", rows)
    (tmp_path / "pool.yaml").write_text(
        "name: p\nfallback: shallow\nagents:\n"
        "  - {name: deep, card: Everything., search: {kind: bm25, corpus: all.jsonl}}\n"
        "  - {name: shallow, card: At a glance., "
        "search: {kind: bm25, corpus: all.jsonl, fields: [summary], include: ['1']}}\n"
    )
    vote = UnionVote(load_pool(tmp_path / "pool.yaml"))
    assert vote.probabilities(["thorn", "spade"]).tolist() == [[0.5, 0.5], [1.0, 0.0]], "as its fullest holder indexes it"
