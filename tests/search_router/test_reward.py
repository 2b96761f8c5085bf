from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest

from routewright.pools.pool import Pool
from routewright.pools.search import Hit, PoolSearch, fuse
from routewright.search_router.decision import Interval
from routewright.search_router.examples import Example
from routewright.search_router.judges import JudgeItem, QrelsJudge
from routewright.search_router.reward import (
    Action,
    HierarchicalReward,
    merged_results,
    source_reward,
    usual_outcomes,
)

from household import profile_with  # isort: skip

SETTINGS = profile_with(rl={"lambda_src": 0.1, "lambda_con": 1.0, "floor": -0.5}).rl
YEAR = Interval(date(2021, 1, 1), date(2021, 12, 31))


def example(**changes: Any) -> Example:
    fields: dict[str, Any] = {
        "id": "1", "query": "the red kettle", "home": "office", "group": "g", "qrels": {"office": {"kettle-red": 1}},
        "reference_date": "2025-06-15", "intent_agents": ["kitchen"], "keywords": ["kettle"],
    }  # fmt: skip
    return Example(**{**fields, **changes})


class SpySearch(PoolSearch):
    """A pool's search that remembers what it was asked."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.asked: list[tuple[str, str, Interval | None]] = []

    def search_many(self, requests: list[tuple[str, str, Interval | None]], k: int = 10) -> list[list[Hit]]:
        self.asked += requests
        return super().search_many(requests, k)


class FixedJudge:
    """Gives every item the same grade and remembers the items."""

    def __init__(self, grade: float) -> None:
        self.grade = grade
        self.items: list[JudgeItem] = []

    def score(self, items: Sequence[JudgeItem]) -> list[float]:
        self.items += items
        return [self.grade] * len(items)


@pytest.fixture
def search(pool: Pool) -> SpySearch:
    return SpySearch(pool)


def test_source_reward_by_hand() -> None:
    """Mean of agent F1, keyword precision and interval overlap."""
    e = example(intent_agents=["kitchen", "garden"], keywords=["kettle", "red"], start="2021-01-01", end="2021-12-31")
    half_year = Interval(date(2021, 1, 1), date(2021, 7, 1))  # 182 of 365 days
    found = source_reward(Action(("kitchen",), ("kettle", "the", "lid"), half_year), e)
    assert found == pytest.approx((2 * 1 / (1 + 2) + 1 / 3 + 182 / 365) / 3)
    assert source_reward(Action(("garden", "kitchen"), ("red",), YEAR), e) == pytest.approx(1.0)
    assert source_reward(Action(("office",), ("lid",), None), e) == 0.0
    assert source_reward(Action(("office",), ("lid",), YEAR), example()) == 0.0, "an interval where none is asked for"
    assert source_reward(Action(("kitchen",), (), None), example(keywords=[])) == pytest.approx(1.0)


def test_no_agent_gets_the_floor_and_nothing_is_computed(pool: Pool, search: SpySearch) -> None:
    judge = FixedJudge(1.0)
    reward = HierarchicalReward(pool, search, judge, SETTINGS, {})
    assert reward([(example(), Action((), ("kettle",), YEAR)), (example(), Action((), (), None))]) == [-0.5, -0.5]
    assert search.asked == []
    assert judge.items == []


def test_the_weighted_sum(pool: Pool, search: SpySearch) -> None:
    settings = SETTINGS.model_copy(update={"lambda_src": 0.3, "lambda_con": 0.7})
    reward = HierarchicalReward(pool, search, FixedJudge(0.5), settings, {})
    action = Action(("kitchen",), ("kettle",), None)
    assert reward([(example(), action)]) == [pytest.approx(0.3 * source_reward(action, example()) + 0.7 * 0.5)]


def test_outcomes_count_more_than_intent(pool: Pool, search: SpySearch) -> None:
    """The kettle looks like the kitchen's; the office has its page."""
    reward = HierarchicalReward(pool, search, QrelsJudge(), SETTINGS, {})
    intended, right = reward([(example(), Action((name,), (), None)) for name in ("kitchen", "office")])
    # F1 1 or 0; no keyword where one is labelled gives 0, no interval where none is gives 1
    assert intended == pytest.approx(0.1 * (1 + 0 + 1) / 3 + 0.0)
    assert right == pytest.approx(0.1 * (0 + 0 + 1) / 3 + 1.0)


def logged(outcome: dict[str, float], id: str = "1") -> Example:
    return example(id=id, qrels={}, outcome=outcome)


def test_what_a_log_says_counts_more_than_intent(pool: Pool, search: SpySearch) -> None:
    """The kettle looks like the kitchen's; the log says that the office answered. Nothing is searched or judged."""
    judge = FixedJudge(0.0)
    reward = HierarchicalReward(pool, search, judge, SETTINGS, dict.fromkeys(pool.names, 0.5))
    e = logged({"kitchen": 0.0, "garden": 0.25, "office": 1.0})
    groups = [("kitchen",), ("office",), ("office", "garden"), ("office", "kitchen", "garden")]
    intended, right, two, everyone = reward([(e, Action(agents, (), None)) for agents in groups])
    # F1 of the one intended agent: 1, 0, 0, 2 / (3 + 1); no interval where none is asked for gives 1
    assert intended == pytest.approx(0.1 * 2 / 3)
    assert right == pytest.approx(0.1 * 1 / 3 + 1.0)
    assert two == pytest.approx(0.1 * 1 / 3 + 1.25 / 2)
    assert everyone == pytest.approx(0.1 * 1.5 / 3 + 1.25 / 3)
    assert search.asked == []
    assert judge.items == []


def test_an_unknown_outcome_counts_as_the_agents_usual_one(pool: Pool, search: SpySearch) -> None:
    log = [logged({"kitchen": 0.5}), logged({"kitchen": 1.0, "office": 0.0}, "2"), example(outcome={"garden": 1.0})]
    usual = usual_outcomes(log, pool.names)
    assert usual == {"kitchen": 0.75, "garden": 0.5, "office": 0.0}, "of the garden's nothing was logged: all outcomes' mean"
    reward = HierarchicalReward(pool, search, QrelsJudge(), SETTINGS, usual)
    e = logged({"kitchen": 1.0})
    groups = [("kitchen",), ("kitchen", "garden"), ("garden",), ("office",)]
    found = [reward([(e, a)])[0] - 0.1 * source_reward(a, e) for a in (Action(agents, (), None) for agents in groups)]
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.0])
    assert usual_outcomes([], ["a"]) == {"a": 0.0}


def test_equal_actions_are_searched_and_judged_once(pool: Pool, search: SpySearch) -> None:
    judge = FixedJudge(0.5)
    reward = HierarchicalReward(pool, search, judge, SETTINGS, {})
    other = example(id="2", query="the red rose")
    office = Action(("office",), (), None)
    batch = [(example(), office), (other, office), (example(), office), (example(), Action((), (), None)), (other, office)]
    first = reward(batch)
    assert search.asked == [("office", "the red kettle", None), ("office", "the red rose", None)]
    assert [item.query for item in judge.items] == ["the red kettle", "the red rose"]
    assert first == [first[0], first[1], first[0], -0.5, first[1]]
    assert reward(batch) == first
    assert len(search.asked) == 2, "nor again in a later update"
    reward([(example(), Action(("office",), ("red",), None))])
    assert len(search.asked) == 3, "another decision is another search"


def test_keywords_and_interval_reach_the_search(pool: Pool, search: SpySearch) -> None:
    action = Action(("kitchen", "office"), ("kettle", "lid"), YEAR)
    merged_results([(example(), action)], search)
    assert search.asked == [("kitchen", "the red kettle kettle lid", YEAR), ("office", "the red kettle kettle lid", YEAR)]


def test_the_interval_filters_what_is_dated(pool: Pool, search: SpySearch) -> None:
    e = example(query="oven volume", qrels={"kitchen": {"oven-broken": 1}})
    (everything, of_2021) = merged_results(
        [(e, Action(("kitchen",), (), None)), (e, Action(("kitchen",), (), YEAR))], search
    )
    assert len({hit.date for hit in everything}) > 1
    assert {hit.date for hit in of_2021} == {"2021"}


def test_lists_are_fused_in_the_order_of_the_agents(pool: Pool, search: SpySearch) -> None:
    e = example()
    lists = search.search_many([("garden", e.query, None), ("office", e.query, None)])
    one, other, empty = merged_results(
        [
            (e, Action(("garden", "office"), (), None)),
            (e, Action(("office", "garden"), (), None)),
            (e, Action((), (), None)),
        ],
        search,
    )
    assert one == fuse(lists)
    assert other == fuse(lists[::-1])
    assert one != other, "the most probable agent's documents lead"
    assert empty == []


def test_the_judge_sees_the_relevant_documents_of_all_agents(pool: Pool, search: SpySearch) -> None:
    judge = FixedJudge(0.0)
    e = example(qrels={"office": {"kettle-red": 1}, "garden": {"rose-red": 2}})
    HierarchicalReward(pool, search, judge, SETTINGS, {})([(e, Action(("kitchen",), (), None))])
    corpora = pool.corpus_name("office"), pool.corpus_name("garden")
    assert judge.items[0].qrels == {(corpora[0], "kettle-red"): 1, (corpora[1], "rose-red"): 2}
