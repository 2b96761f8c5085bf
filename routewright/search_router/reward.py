"""The hierarchical reward of a decision: format floor, then R = λ_src·R_src + λ_con·R_con (arXiv 2608.00030)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from routewright.config import RlSection
from routewright.evaluation.ranking import agent_f1, keyword_precision
from routewright.pools.pool import Pool
from routewright.pools.search import Hit, PoolSearch, fuse
from routewright.search_router.decision import Interval
from routewright.search_router.examples import Example
from routewright.search_router.judges import Judge, JudgeItem
from routewright.search_router.router import search_query
from routewright.search_router.time_expressions import interval_iou


@dataclass(frozen=True)
class Action:
    """One sampled decision: agents in descending probability, keywords, interval."""

    agents: tuple[str, ...]
    keywords: tuple[str, ...]
    interval: Interval | None


def source_reward(action: Action, example: Example) -> float:
    """R_src in [0, 1]: mean of agent F1 against the query's intent, keyword precision and interval overlap (IoU).

    The paper names the three parts without weights; equal weights are our choice.
    """
    today = example.reference or date.today()
    return (
        agent_f1(action.agents, example.intent_agents)
        + keyword_precision(action.keywords, example.keywords)
        + interval_iou(action.interval, example.interval, today)
    ) / 3


def merged_results(actions: Sequence[tuple[Example, Action]], search: PoolSearch) -> list[list[Hit]]:
    """What each decision returns: its agents' lists for query plus keywords in its interval, fused by reciprocal rank."""
    requests = [
        (agent, search_query(example.query, action.keywords), action.interval)
        for example, action in actions
        for agent in action.agents
    ]
    lists = iter(search.search_many(requests))
    return [fuse([next(lists) for _ in action.agents]) for _, action in actions]


class HierarchicalReward:
    """Scores sampled decisions; equal decisions are searched and judged once."""

    def __init__(self, pool: Pool, search: PoolSearch, judge: Judge, settings: RlSection) -> None:
        self.pool, self.search, self.judge, self.settings = pool, search, judge, settings
        self._relevant: dict[str, dict[tuple[str, str], int]] = {}
        self._seen: dict[tuple[str, Action], float] = {}

    def __call__(self, actions: Sequence[tuple[Example, Action]]) -> list[float]:
        """R of each decision. One that names no agent is no answer: it gets the floor and nothing else is computed."""
        new = [
            (example, action)
            for (_, action), example in {(e.id, a): e for e, a in actions}.items()
            if action.agents and (example.id, action) not in self._seen
        ]
        if new:
            items = []
            for (example, _), hits in zip(new, merged_results(new, self.search), strict=True):
                if example.id not in self._relevant:
                    self._relevant[example.id] = example.relevant(self.pool)
                items.append(JudgeItem(example.query, hits, self._relevant[example.id]))
            for (example, action), con in zip(new, self.judge.score(items), strict=True):
                self._seen[example.id, action] = (
                    self.settings.lambda_src * source_reward(action, example) + self.settings.lambda_con * con
                )
        return [self._seen[e.id, a] if a.agents else self.settings.floor for e, a in actions]
