"""An ensemble router's evaluation made up: rows with a skill each, on 300 questions and 60 out of distribution."""

from __future__ import annotations

from functools import cache

import numpy as np

from routewright.ensemble_router.held_out import Outcome
from routewright.ensemble_router.results import (
    EnsembleResults,
    MapPoint,
    Specialisation,
    TauPoint,
    compared,
    gates_of,
    row_of,
)
from routewright.evaluation.bootstrap import mean_interval
from routewright.evaluation.summary import Row, Summary

AGENTS = ["agent-0", "agent-1", "agent-2"]
# Accuracy, agents asked of each simulated row.
SKILL = {"warm": (0.5, 3), "single-best": (0.6, 1), "top-1": (0.6, 1), "top-2": (0.7, 2), "all": (0.76, 3),
         "frozen-router": (0.55, 2),
         "familiarity": (0.75, 1), "warm:routed": (0.55, 1), "co-evolved:all": (0.74, 3),
         "co-evolved:top-2": (0.7, 2)}  # fmt: skip


def simulate(n: int, seed: int) -> dict[str, Outcome]:
    """Every row on n questions."""
    rng = np.random.default_rng(seed)
    hard = rng.random(n)
    return {
        name: Outcome(
            (hard < skill).astype(float), rng.integers(4, 9, n) * float(asked), np.full(n, float(asked)), [[0]] * n
        )
        for name, (skill, asked) in SKILL.items()
    }  # fmt: skip


@cache
def small() -> tuple[EnsembleResults, Summary]:
    """What an evaluation of `simulate` found."""
    domains, ood = ["gcd", "spell_backward"] * 150, ["gcd-large"] * 60
    inside, beyond = simulate(300, 0), simulate(60, 1)
    rows = [row_of(name, domains, inside[name], ood, beyond[name], [0.2, 0.3], 0, 50) for name in SKILL]
    rows.insert(0, Row(name="majority", metrics={"accuracy": mean_interval([0.0, 1.0], 0, 50)}))
    others = [name for name in SKILL if name != "familiarity"]
    comparisons = [compared("familiarity", b, found, found is beyond, 0, 50) for found in (inside, beyond) for b in others]
    share = {"gcd": [1.0, 0.2, 0.0], "spell_backward": [0.0, 0.9, 0.3]}
    results = EnsembleResults(
        agents=AGENTS, domains=["gcd", "spell_backward"], ood_domains=["gcd-large"], questions=300, ood_questions=60,
        rows=rows, own=["top-1", "top-2", "all", "frozen-router", "familiarity"], tau=0.5,
        answers={"top-1": 9600, "familiarity": 9616},
        comparisons=comparisons,
        curve=[
            TauPoint(tau=t, accuracy=mean_interval([0.0, 1.0], 0, 50), tokens=6 + 9 * t, agents=1 + t) for t in (0.1, 1.0)
        ],
        specialisation=Specialisation(
            asked=share, first=share, accuracy=share, warm_accuracy=share, information=0.8, initial=0.1, p=0.001,
            interaction_p=0.002,
        ),
        map=[MapPoint(x=float(k), y=float(-k), domain=d, agent=AGENTS[k % 3]) for k, d in enumerate(domains)],
        map_variance=[0.6, 0.2],
    )  # fmt: skip
    summary = Summary(pipeline="ensemble-router", profile="smoke", seed=0, wall_s=9.0, rows=rows, gates=gates_of(results))
    return results, summary
