"""From agent probabilities to chosen agents: two thresholds, fitted on dev the same way for every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from routewright.evaluation.drift import write_routes
from routewright.evaluation.ranking import ndcg_at_10
from routewright.pools.pool import Pool
from routewright.pools.search import PoolSearch
from routewright.search_router.decision import Interval
from routewright.search_router.examples import Example
from routewright.search_router.reward import Action, merged_results
from routewright.search_router.router import Router, choose_agents, load_router, set_thresholds

SECOND_SHARES = (1.01, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # 1.01: one agent only
ABSTAIN_QUANTILES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)


@dataclass
class Answers:
    """What one row says to a list of queries: P(agent) (n, N), and its keywords and intervals where it makes any."""

    scores: np.ndarray
    keywords: list[tuple[str, ...]] | None = None
    intervals: list[Interval | None] | None = None

    def action(self, row: int, agents: Sequence[str]) -> Action:
        """The decision on query number `row` with these agents."""
        return Action(
            tuple(agents),
            self.keywords[row] if self.keywords else (),
            self.intervals[row] if self.intervals else None,
        )


def decision_ndcg(examples: Sequence[Example], actions: Sequence[Action], pool: Pool, search: PoolSearch) -> np.ndarray:
    """NDCG@10 of the fused results of each decision, the ideal taken over all agents' relevant documents; float (n,)."""
    merged = merged_results(list(zip(examples, actions, strict=True)), search)
    return np.array(
        [
            ndcg_at_10([(hit.corpus, hit.doc_id) for hit in hits], example.relevant(pool))
            for hits, example in zip(merged, examples, strict=True)
        ]
    )


def routed(answers: Answers, second: float, abstain: float, pool: Pool) -> list[Action]:
    """The decisions that scores and thresholds make."""
    fallback = pool.names.index(pool.fallback)
    return [
        answers.action(i, [pool.names[a] for a in choose_agents(row, second, abstain, fallback)[0]])
        for i, row in enumerate(answers.scores)
    ]


def fit_thresholds(
    answers: Answers, examples: Sequence[Example], pool: Pool, search: PoolSearch
) -> tuple[float, float]:
    """`second` and `abstain` (see `choose_agents`) with the best NDCG@10 on these examples; the cheaper among equals."""

    known: dict[tuple[int, Action], float] = {}  # most thresholds make the same decisions

    def value(second: float, abstain: float) -> float:
        decided = list(enumerate(routed(answers, second, abstain, pool)))
        new = [pair for pair in decided if pair not in known]
        if new:
            found = decision_ndcg([examples[i] for i, _ in new], [action for _, action in new], pool, search)
            known.update(zip(new, found.tolist(), strict=True))
        return round(float(np.mean([known[pair] for pair in decided])), 4)

    second = max(SECOND_SHARES, key=lambda share: (value(share, 0.0), share))
    top = answers.scores.max(axis=1)
    thresholds = [float(np.quantile(top, q)) if q else 0.0 for q in ABSTAIN_QUANTILES]
    return second, max(thresholds, key=lambda threshold: (value(second, threshold), -threshold))


def router_answers(router: Router, examples: Sequence[Example]) -> tuple[Answers, np.ndarray]:
    """A trained router's answers, and whether its unconstrained first token would have been an agent; bool (n,)."""
    features = [router.featurizer(example.query, example.reference) for example in examples]
    probabilities, valid = router.answers(features)
    decisions = [router.decision(f, p) for f, p in zip(features, probabilities, strict=True)]
    intervals = [Interval(d.start, d.end) if d.start or d.end else None for d in decisions]
    scores = np.stack([p[: len(router.names)] for p in probabilities])
    return Answers(scores, [tuple(d.keywords) for d in decisions], intervals), valid


def fit_router(folder: Path, dev: Sequence[Example], pool: Pool, search: PoolSearch) -> None:
    """Fit a saved router's thresholds on dev and write them into its folder, then its first choices there.

    The latter, routes.json, is the last file of a trained router: a folder without it is not finished.
    """
    answers, _ = router_answers(load_router(folder), dev)
    second, abstain = fit_thresholds(answers, dev, pool, search)
    first = Counter(action.agents[0] for action in routed(answers, second, abstain, pool))
    set_thresholds(folder, second, abstain)
    write_routes(folder, {name: first[name] for name in pool.names})
