from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

from routewright.evaluation.ranking import ndcg_at_10
from routewright.pools.pool import Pool
from routewright.pools.search import PoolSearch
from routewright.search_router.decision import Interval
from routewright.search_router.examples import Example
from routewright.search_router.reward import Action
from routewright.search_router.router import load_router
from routewright.search_router.selection import (
    ABSTAIN_QUANTILES,
    SECOND_SHARES,
    Answers,
    decision_ndcg,
    fit_router,
    fit_thresholds,
    routed,
    router_answers,
)

YEAR = Interval(date(2021, 1, 1), date(2021, 12, 31))


@pytest.fixture
def search(pool: Pool) -> PoolSearch:
    return PoolSearch(pool)


def one_hot(examples: list[Example], pool: Pool) -> np.ndarray:
    """1 for the agent that answers."""
    return np.array([[float(name == example.home) for name in pool.names] for example in examples])


def test_decisions_are_what_scores_and_thresholds_make(pool: Pool) -> None:
    scores = np.array([[0.9, 0.5, 0.1], [0.1, 0.2, 0.3], [0.3, 0.3, 0.29]])
    answers = Answers(scores, [("a",), ("b",), ()], [None, YEAR, None])
    assert routed(answers, 0.5, 0.0, pool) == [
        Action(("kitchen", "garden"), ("a",), None),
        Action(("office", "garden"), ("b",), YEAR),
        Action(("kitchen", "garden", "office"), (), None),
    ]
    assert [action.agents for action in routed(answers, 1.01, 0.4, pool)] == [("kitchen",), ("office",), ("office",)]
    bare = Answers(scores)
    assert routed(bare, 1.01, 0.0, pool)[0] == Action(("kitchen",), (), None), "no keywords, no interval"


def test_ndcg_of_a_decision_by_hand(pool: Pool, search: PoolSearch) -> None:
    example = Example("1", "red kettle volume", "office", "g", {"office": {"kettle-red": 1}, "garden": {"rose-red": 1}})
    alone, both, wrong, dated = decision_ndcg(
        [example] * 4,
        [
            Action(("office",), (), None),
            Action(("office", "garden"), ("rose",), None),
            Action(("kitchen",), (), None),
            Action(("kitchen",), (), YEAR),
        ],
        pool,
        search,
    )
    ideal = 1 + 1 / np.log2(3)
    assert alone == pytest.approx(1 / ideal), "the ideal is taken over all agents' relevant documents"
    assert both == pytest.approx(1.0), "each agent's first hit leads the fused list"
    assert wrong == dated == 0.0
    hits = search.search("office", "red kettle volume")
    assert alone == ndcg_at_10([(hit.corpus, hit.doc_id) for hit in hits], example.relevant(pool))


def test_sure_and_right_scores_ask_one_agent(pool: Pool, search: PoolSearch, splits: dict[str, list[Example]]) -> None:
    dev = splits["dev"]
    second, abstain = fit_thresholds(Answers(one_hot(dev, pool)), dev, pool, search)
    assert second == max(SECOND_SHARES), "the cheaper among equals"
    assert abstain == 0.0


def test_a_second_agent_is_asked_where_it_helps(pool: Pool, search: PoolSearch, splits: dict[str, list[Example]]) -> None:
    """The right agent is always second, at 0.75 of the first."""
    dev = splits["dev"]
    scores = np.zeros((len(dev), 3))
    for row, example in zip(scores, dev, strict=True):
        right = pool.names.index(example.home)
        row[right], row[(right + 1) % 3], row[(right + 2) % 3] = 0.6, 0.8, 0.05
    second, _ = fit_thresholds(Answers(scores), dev, pool, search)
    assert second == 0.7, "the largest share that lets it in"


def test_abstaining_is_learned_where_the_fallback_is_better(
    pool: Pool, search: PoolSearch, splits: dict[str, list[Example]]
) -> None:
    """The office's queries get low and wrong scores, the others' high and right ones."""
    dev = splits["dev"]
    scores = one_hot(dev, pool) * 0.9
    office = np.array([example.home == "office" for example in dev])
    # enough of the rows are unsure for a quantile on offer to part them
    assert office.mean() >= max(ABSTAIN_QUANTILES)
    scores[office] = [0.2, 0.0, 0.0]
    unsure = np.flatnonzero(office)
    scores[unsure, 0] -= np.linspace(0, 0.1, len(unsure))
    second, abstain = fit_thresholds(Answers(scores), dev, pool, search)
    assert abstain > 0.1
    actions = routed(Answers(scores), second, abstain, pool)
    assert sum(actions[i].agents == ("office",) for i in unsure) > 0.7 * len(unsure)


def test_thresholds_are_fitted_on_the_given_examples_alone(
    pool: Pool, search: PoolSearch, splits: dict[str, list[Example]]
) -> None:
    dev = splits["dev"]
    rng = np.random.default_rng(0)
    answers = Answers(rng.random((len(dev), 3)))
    fitted = fit_thresholds(answers, dev, pool, search)
    assert fitted == fit_thresholds(answers, dev, pool, PoolSearch(pool))
    turned = [replace(example, qrels={"kitchen": {"oven-red": 1}}) for example in dev]
    assert fit_thresholds(Answers(np.tile([0.1, 0.9, 0.8], (len(dev), 1))), turned, pool, search)[0] <= 0.9


def test_a_routers_answers_are_its_decisions(sft_folder: Path, pool: Pool, splits: dict[str, list[Example]]) -> None:
    router = load_router(sft_folder, torch.float32)
    test = splits["test"]
    answers, valid = router_answers(router, test)
    assert answers.scores.shape == (len(test), 3)
    assert valid.dtype == bool
    assert valid.shape == (len(test),)
    assert answers.keywords is not None
    assert answers.intervals is not None
    actions = routed(answers, router.description["second"], router.description["abstain"], pool)
    for i, example in enumerate(test):
        decision = router.decide(example.query, example.reference)
        assert list(actions[i].agents) == decision.agents
        assert list(answers.keywords[i]) == decision.keywords
        assert answers.scores[i] == pytest.approx(list(decision.scores.values()), abs=1e-4)
        start, end = (answers.intervals[i].start, answers.intervals[i].end) if answers.intervals[i] else (None, None)
        assert (start, end) == (decision.start, decision.end)


def test_a_saved_router_is_given_its_thresholds(
    rl_folder: Path, pool: Pool, search: PoolSearch, splits: dict[str, list[Example]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(rl_folder, tmp_path / "router"))
    description = json.loads((folder / "router.json").read_text())
    fit_router(folder, splits["dev"], pool, search)
    assert json.loads((folder / "router.json").read_text()) == description, "as its own stage fitted them"
    router = load_router(folder)
    first = Counter(router.decide(e.query, e.reference).agents[0] for e in splits["dev"])
    assert json.loads((folder / "routes.json").read_text()) == {name: first[name] for name in pool.names}
    only_office = [replace(e, qrels={"office": {"desk-red": 1}}, query="red desk") for e in splits["dev"]]
    fit_router(folder, only_office, pool, search)
    after = json.loads((folder / "router.json").read_text())
    assert {k: v for k, v in after.items() if k not in ("second", "abstain")} == {
        k: v for k, v in description.items() if k not in ("second", "abstain")
    }
