"""What an evaluation of the ensemble router found, as one document, and the statistics that fill it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from routewright.ensemble_router.held_out import Outcome
from routewright.evaluation.bootstrap import Estimate, mean_interval, percentile_interval
from routewright.evaluation.summary import Gate, Row

SAME_AGENTS = "co-evolved:"
"""Prefix of rows that apply another rule to the agents that co-evolved with the familiarity router."""
ALPHA = 0.05
NEAR, SAVED = 0.01, 0.4
"""Adaptive activation's target: so near the better vote's accuracy, with so much fewer of its tokens."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Comparison(_Strict):
    """Accuracy of row ``a`` minus row ``b`` on the same questions.

    ``ood``: on the out-of-distribution ones. ``questions``: how many of this kind would bring the interval off 0 if mean and
    spread stayed; None where it is off already, or the rows never differ on the whole.
    """

    a: str
    b: str
    ood: bool
    difference: Estimate
    questions: int | None


class TauPoint(_Strict):
    """The co-evolved pair with another cut-off."""

    tau: float
    accuracy: Estimate
    tokens: float
    agents: float


class Specialisation(_Strict):
    """Agents and domains of the co-evolved pair on the test questions.

    ``asked`` … ``warm_accuracy``: {domain: value of each agent}. ``information`` and ``initial``: bits between the most
    familiar agent and the domain, now and with the untrained heads; ``p`` that the two are alike. ``interaction_p``: that
    the agents do not differ by domain.
    """

    asked: dict[str, list[float]]
    first: dict[str, list[float]]
    accuracy: dict[str, list[float]]
    warm_accuracy: dict[str, list[float]]
    information: float
    initial: float
    p: float
    interaction_p: float


class MapPoint(_Strict):
    """A test question on the first two principal axes of the query states; ``agent``: the most familiar one."""

    x: float
    y: float
    domain: str
    agent: str


class EnsembleResults(_Strict):
    """All that the report shows; ``own``: names of rows whose rule trained agents of its own."""

    agents: list[str]
    domains: list[str]
    ood_domains: list[str]
    questions: int
    ood_questions: int
    tau: float
    rows: list[Row]
    own: list[str]
    answers: dict[str, int]
    comparisons: list[Comparison]
    curve: list[TauPoint]
    specialisation: Specialisation
    map: list[MapPoint]
    map_variance: list[float]


def row_of(
    name: str,
    domains: Sequence[str],
    inside: Outcome,
    ood_domains: Sequence[str],
    outside: Outcome | None,
    latency: Sequence[float],
    seed: int,
    resamples: int,
) -> Row:
    """A row's metrics with 95 % intervals over questions; `latency`: milliseconds of decisions, empty: none is taken."""

    def mean(values: np.ndarray) -> Estimate:
        return mean_interval(values, seed, resamples)

    metrics = {"accuracy": mean(inside.reward)}
    if outside is not None:
        metrics["accuracy/ood"] = mean(outside.reward)
    metrics["tokens"], metrics["agents_per_query"] = mean(inside.tokens), mean(inside.agents)
    if outside is not None:
        metrics["tokens/ood"], metrics["agents_per_query/ood"] = mean(outside.tokens), mean(outside.agents)
    if len(latency):
        metrics["latency_ms/p50"] = percentile_interval(latency, 50, seed)
    for labels, found in ((domains, inside), (ood_domains, outside)):
        for domain in sorted(set(labels)):
            assert found is not None
            metrics[f"accuracy/{domain}"] = mean(found.reward[np.array(labels) == domain])
    return Row(name=name, metrics=metrics)


def separating(difference: np.ndarray, estimate: Estimate) -> int | None:
    """Questions n at which 1.96·sd/√n = |mean|; None where the interval leaves out 0, or the mean is 0."""
    if estimate.low > 0 or estimate.high < 0 or estimate.mean == 0:
        return None
    return math.ceil((1.96 * float(difference.std()) / abs(estimate.mean)) ** 2)


def compared(a: str, b: str, found: Mapping[str, Outcome], ood: bool, seed: int, resamples: int) -> Comparison:
    """Two rows on the same questions, which are resampled together."""
    difference = found[a].reward - found[b].reward
    estimate = mean_interval(difference, seed, resamples)
    return Comparison(a=a, b=b, ood=ood, difference=estimate, questions=separating(difference, estimate))


def better_vote(accuracy: Mapping[str, float]) -> str:
    """The row of the better of `top-2` and `all`, with agents of their own where they have them, by {row: accuracy}."""
    votes = [name if name in accuracy else SAME_AGENTS + name for name in ("top-2", "all")]
    return max(votes, key=lambda name: accuracy[name])


def gates_of(results: EnsembleResults) -> list[Gate]:
    """What the co-evolved router promises: near the better vote, with fewer tokens, above the others and its start.

    A rule that trained no agents of its own is compared on the co-evolved agents; where it cannot be, as a router that was
    not frozen, the gate says so and has not passed.
    """
    rows = {row.name: row.metrics for row in results.rows}
    own = rows["familiarity"]
    better = better_vote({name: metrics["accuracy"].mean for name, metrics in rows.items()})
    behind = own["accuracy"].mean - rows[better]["accuracy"].mean
    share = own["tokens"].mean / max(rows[better]["tokens"].mean, 1e-9)
    near = behind >= -NEAR - 1e-9
    gates = [
        Gate(name=f"accuracy − {better}'s, the better of top-2 and all", passed=near, value=behind, bound=-NEAR),
        Gate(name=f"tokens ÷ {better}'s", passed=share <= 1 - SAVED, value=share, bound=1 - SAVED),
    ]
    for b in ("top-1", "linucb", "reward-regression", "classifier", "frozen-router", "warm"):
        b = b if b in rows else SAME_AGENTS + b
        found = next((c for c in results.comparisons if c.b == b and not c.ood), None)
        if found is None:
            b = b.removeprefix(SAME_AGENTS)
            told = f"accuracy − {b}'s, lower end: not measured, no agents were trained with {b}"
            gates.append(Gate(name=told, passed=False, value=None, bound=0.0))
        else:
            low = found.difference.low
            gates.append(Gate(name=f"accuracy − {b}'s, lower end", passed=low > 0, value=low, bound=0.0))
    s = results.specialisation
    more = s.information - s.initial
    special = more > 0 and s.p < ALPHA and s.interaction_p < ALPHA
    gates.append(Gate(name="bits of agent and domain − untrained router's", passed=special, value=more, bound=0.0))
    return gates
