"""NDCG@10 against hand-worked numbers and ir_measures; agent and keyword metrics."""

from __future__ import annotations

import math

import ir_measures
import numpy as np
import pytest

from routewright.evaluation.ranking import agent_f1, exact_set, keyword_precision, ndcg_at_10

A, B, C = ("a", "1"), ("a", "2"), ("b", "1")


def test_ndcg_by_hand() -> None:
    # DCG = 1/log2(3) + 3/log2(4) for grades 0, 1, 3; ideal = 3/log2(2) + 1/log2(3).
    expected = (1 / math.log2(3) + 3 / 2) / (3 + 1 / math.log2(3))
    assert ndcg_at_10([C, A, B], {A: 1, B: 3}) == pytest.approx(expected)
    assert expected == pytest.approx(0.5868, abs=1e-4)


def test_ndcg_ideal_counts_documents_of_agents_that_were_not_asked() -> None:
    assert ndcg_at_10([A], {A: 1, C: 1}) == pytest.approx(1 / (1 + 1 / math.log2(3)))


def test_ndcg_tells_equal_ids_of_two_corpora_apart() -> None:
    assert ndcg_at_10([("b", "1")], {("a", "1"): 1}) == 0.0


@pytest.mark.parametrize(("ranked", "relevant"), [([], {A: 1}), ([A], {}), ([A], {A: 0}), ([A], {A: -1})])
def test_ndcg_is_zero_without_a_find(ranked: list[tuple[str, str]], relevant: dict[tuple[str, str], int]) -> None:
    assert ndcg_at_10(ranked, relevant) == 0.0


def test_ndcg_ignores_rank_eleven_and_caps_the_ideal_at_ten() -> None:
    documents = [("a", str(i)) for i in range(12)]
    assert ndcg_at_10(documents, {documents[10]: 1}) == 0.0
    assert ndcg_at_10(documents, dict.fromkeys(documents, 2)) == pytest.approx(1.0)


def test_ndcg_refuses_a_document_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        ndcg_at_10([A, A], {A: 1})


def test_ndcg_equals_ir_measures_on_random_lists() -> None:
    rng = np.random.default_rng(7)
    pool = [(f"corpus {c}", f"doc '{d}' ü") for c in range(3) for d in range(20)]
    ranked, relevant = [], []
    for _ in range(400):
        order = rng.permutation(len(pool))[: rng.integers(0, 25)]
        ranked.append([pool[i] for i in order])
        judged = rng.permutation(len(pool))[: rng.integers(0, 15)]
        relevant.append({pool[i]: int(rng.integers(-1, 4)) for i in judged})
    ours = [ndcg_at_10(r, q) for r, q in zip(ranked, relevant, strict=True)]
    assert 0.05 < float(np.mean(ours)) < 0.95
    # trec_eval wants one string a document
    qrels = [ir_measures.Qrel(str(i), repr(d), g) for i, grades in enumerate(relevant) for d, g in grades.items()]
    run = [ir_measures.ScoredDoc(str(i), repr(d), -rank) for i, found in enumerate(ranked) for rank, d in enumerate(found)]
    theirs = np.zeros(len(ranked))  # what it leaves out, an empty list or a query without relevant documents, is 0
    for metric in ir_measures.iter_calc([ir_measures.nDCG @ 10], qrels, run):
        theirs[int(metric.query_id)] = metric.value
    np.testing.assert_allclose(theirs, ours, atol=1e-9)


def test_agent_sets() -> None:
    assert agent_f1(["x", "y"], ["y", "z", "w"]) == pytest.approx(2 * 1 / (2 + 3))
    assert agent_f1([], ["y"]) == 0.0
    assert agent_f1(["y"], ["y"]) == 1.0
    assert (exact_set(["x", "y"], ["y", "x"]), exact_set(["x"], ["x", "y"])) == (1, 0)
    with pytest.raises(ValueError, match="best agents is empty"):
        agent_f1(["x"], [])


def test_keyword_precision() -> None:
    assert keyword_precision(["Subnet ", "zone"], ["subnet", "vpc"]) == 0.5
    assert keyword_precision([], []) == 1.0
    assert keyword_precision([], ["vpc"]) == 0.0
    assert keyword_precision(["vpc"], []) == 0.0
