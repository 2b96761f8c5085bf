"""The hierarchical reward of a decision: format floor, then R = λ_src·R_src + λ_con·R_con (arXiv 2608.00030)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import fmean

from routewright.config import RlSection
from routewright.evaluation.ranking import agent_f1, keyword_precision
from routewright.pools.pool import Pool
from routewright.pools.search import Hit, PoolSearch, fuse
from routewright.search_router.decision import Interval
from routewright.search_router.examples import Example, search_all
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
    """What each decision returns: its agents' lists for query plus keywords in its interval, fused by reciprocal rank.

    StageFailed where an agent failed (see `search_all`).
    """
    requests = [
        (agent, search_query(example.query, action.keywords), action.interval)
        for example, action in actions
        for agent in action.agents
    ]
    lists = iter(search_all(requests, search))
    return [fuse([next(lists) for _ in action.agents]) for _, action in actions]


def usual_outcomes(examples: Sequence[Example], names: Sequence[str]) -> dict[str, float]:
    """Each agent's mean logged outcome over the examples without qrels, in [0, 1]; all agents' mean where it has none."""
    logged = [item for example in examples if not example.qrels for item in example.outcome.items()]
    overall = fmean(value for _, value in logged) if logged else 0.0
    own = {name: [value for agent, value in logged if agent == name] for name in names}
    return {name: fmean(values) if values else overall for name, values in own.items()}


def logged_reward(action: Action, example: Example, usual: Mapping[str, float]) -> float:
    """R_con in [0, 1] of an example that has outcomes of a log and no qrels: the mean outcome of the decision's agents.

    The mean, so that asking everyone does not win. An agent whose outcome is unknown counts as it `usual`ly does: a guess
    that favours nobody, where 0 would punish whatever the logged router did not ask.
    """
    return fmean(example.outcome.get(name, usual[name]) for name in action.agents)


class HierarchicalReward:
    """Scores sampled decisions; equal decisions are searched and judged once.

    An example without qrels is scored by its logged outcomes, whatever the judge. ``usual`` as from `usual_outcomes`.
    """

    def __init__(
        self, pool: Pool, search: PoolSearch, judge: Judge, settings: RlSection, usual: Mapping[str, float]
    ) -> None:
        self.pool, self.search, self.judge, self.settings, self.usual = pool, search, judge, settings, usual
        self._relevant: dict[str, dict[tuple[str, str], int]] = {}
        self._seen: dict[tuple[str, Action], float] = {}

    def __call__(self, actions: Sequence[tuple[Example, Action]]) -> list[float]:
        """R of each decision. One that names no agent is no answer: it gets the floor and nothing else is computed."""
        new = [
            (example, action)
            for (_, action), example in {(e.id, a): e for e, a in actions}.items()
            if action.agents and (example.id, action) not in self._seen
        ]
        judged = [(example, action) for example, action in new if example.qrels]
        for example, action in new:
            if not example.qrels:
                self._keep(example, action, logged_reward(action, example, self.usual))
        if judged:
            items = []
            for (example, _), hits in zip(judged, merged_results(judged, self.search), strict=True):
                if example.id not in self._relevant:
                    self._relevant[example.id] = example.relevant(self.pool)
                items.append(JudgeItem(example.query, hits, self._relevant[example.id]))
            for (example, action), con in zip(judged, self.judge.score(items), strict=True):
                self._keep(example, action, con)
        return [self._seen[e.id, a] if a.agents else self.settings.floor for e, a in actions]

    def _keep(self, example: Example, action: Action, con: float) -> None:
        s = self.settings
        self._seen[example.id, action] = s.lambda_src * source_reward(action, example) + s.lambda_con * con
