"""Everything that the evaluation of the step router shows, from its re-executed episodes.

All rows hold the same (task, perturbation seed) pairs. A row with an operating threshold stands at it. The other routers
are read off their frontier at the escalation rate of `risk` at its operating point: linear between the two neighbouring
measured settings, for every metric; a coin tossed between the two attains it, but for the difference in their episodes'
lengths. Per-seed success is read that way first, the worst seeds are taken afterwards. Every frontier starts at the small
model alone and ends at the LLM alone. Intervals are 95 % over tasks (`evaluation/clustered.py`), the same resamples for
all rows: they speak of new tasks under these perturbation seeds. What strikes an episode depends on its seed alone, which
many tasks share, so fields named ``new_seeds`` hold a second interval, over tasks and perturbation seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from sklearn.metrics import roc_auc_score

from routewright.evaluation.bootstrap import RESAMPLES, Estimate
from routewright.evaluation.clustered import (
    clustered_difference,
    clustered_mean,
    codes,
    crossed_draws,
    group_draws,
    percentiles,
)
from routewright.evaluation.summary import STEP_METRICS, STEP_ROWS, Row, row_order
from routewright.step_router.episodes import Episode
from routewright.step_router.features import NAMES, check_features
from routewright.step_router.frontier import (
    Sweep,
    _curve,
    area_difference,
    area_interval,
    brier_skill,
    cvar,
    frontier,
    matched_difference,
    post_hoc_oracle,
)

UNSEEN = ("llm", "oracle", "random-matched", "time")
"""Rows that decide without the small model's proposals: a call costs them c_LLM alone, the others c_SLM + c_LLM."""
TARGET_SHARE = 0.97
"""Share of the LLM's success that a router has to reach."""
EARLY_STEPS = (0, 1, 2)
"""Steps whose AUC is reported alone: later ones are reached by long episodes only, which fail more often."""
BINS = 15
SEEDS_LISTED = 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class FrontierPoint(_Strict):
    """One measured setting; ``threshold`` is None where the rule is never or always to call the LLM."""

    rule: Literal["never", "threshold", "always"]
    threshold: float | None
    operating: bool
    escalation: float
    success: float
    llm_calls_per_episode: float
    escalated_episodes: float


class Frontier(_Strict):
    """A router's settings by rising escalation, and the area under its success-escalation curve."""

    row: str
    area: Estimate
    points: list[FrontierPoint]


class Comparison(_Strict):
    """Row ``a`` minus row ``b``, paired over the same episodes.

    ``at``: success at the oracle's escalation rate, success at the rate of `risk` at its operating point, CVaR of the
    seeds' failure rates at that same rate (negative is better), area under the frontier, or success of two small models
    alone. ``rate`` is the escalation, None for the last two. ``new_seeds``: the difference with its interval over tasks and
    seeds, None for the CVaR, which is about the seeds as they are.
    """

    a: str
    b: str
    at: Literal["oracle rate", "own rate", "cvar at own rate", "area", "small model alone"]
    rate: float | None
    difference: Estimate
    new_seeds: Estimate | None


class Target(_Strict):
    """How a router does against the LLM and the oracle; None where the denominator is 0 or the share is never reached.

    ``success_share`` is success (as in the summary's row) / the LLM's, ``operating_ratio`` that row's escalation / the
    oracle's. With hindsight, off the frontier of the test episodes: ``escalation_at_share``, the smallest escalation with
    0.97 of the LLM's success, and ``oracle_ratio``, that / the oracle's.
    """

    row: str
    success_share: Estimate | None
    operating_ratio: Estimate | None
    escalation_at_share: Estimate | None
    oracle_ratio: Estimate | None
    new_seeds: dict[str, Estimate | None]
    """The four with their intervals over tasks and seeds, by name."""


class Threshold(_Strict):
    """A threshold of `risk` that calibration chose, read off the frontier.

    ``success`` and ``escalation`` are those of the measured settings next to it, the lower and the upper one; twice the same
    where it was measured. ``value`` is None where nothing was certified, which leaves every step to the LLM.
    """

    name: str
    value: float | None
    success: tuple[float, float]
    escalation: tuple[float, float]


class Bin(_Strict):
    """Steps with low < risk ≤ high (the first bin holds 0 too); means weigh every episode the same."""

    low: float
    high: float
    n: int
    probability: float
    frequency: float


class StepAuc(_Strict):
    """AUC of the risk at one step (counted from 0) over the ``n`` episodes that reach it; None: all steps together.

    ``auc`` is None where those episodes all end alike.
    """

    step: int | None
    auc: float | None
    n: int


class Calibration(_Strict):
    """Risk against outcome on the small model's own episodes; ``skill`` is None where these all end alike."""

    row: str
    base_rate: float
    brier: Estimate
    skill: Estimate | None
    skill_new_seeds: Estimate | None
    ece: Estimate
    bins: list[Bin]
    auc: list[StepAuc]


class Group(_Strict):
    """Success of slm, risk and llm over some of the episodes, and the escalation of risk there."""

    name: str
    n: int
    success: dict[str, Estimate]
    escalation: Estimate


class Importance(_Strict):
    """What permuting one feature costs: rise of the Brier score and drop of the AUC, mean and deviation of repeats."""

    feature: str
    brier: float
    brier_std: float
    auc: float
    auc_std: float


class Ablation(_Strict):
    """A router refitted without a feature or group of features."""

    brier: float
    auc: float


class StepResults(_Strict):
    """``results.json``: the data behind the report."""

    rows: list[Row]
    success_new_seeds: dict[str, Estimate]
    """Success of each row with its interval over tasks and seeds."""
    policies: list[Row]
    """The small models alone: `slm`, and `slm-no-jsd` where it was run."""
    tasks: int
    seeds: int
    episodes: int
    c_slm: float
    c_llm: float
    alpha: float
    bootstrap_seed: int
    matched_rate: float
    """Escalation of `risk` at its operating point, where the rows without one are read."""
    oracle_rate: float
    frontiers: list[Frontier]
    thresholds: list[Threshold]
    comparisons: list[Comparison]
    targets: list[Target]
    calibration: list[Calibration]
    by_environment: list[Group]
    by_perturbation: list[Group]
    """Episodes in which the kind struck at least once while the small model ran alone; ``none``: in which none did."""
    by_seed: list[Group]
    """The perturbation seeds with the lowest success of risk, worst first."""
    importance: list[Importance]
    ablation: dict[str, Ablation]


@dataclass(frozen=True)
class _Sample:
    """What the rows share: the n (task, seed) pairs in order, and the resamples, the sample itself first.

    Drawn are units: the tasks, or single episodes where seeds are resampled too.
    """

    tasks: list[str]
    seeds: np.ndarray  # (n,) 0 … Z − 1
    member: np.ndarray  # (n, units) 1 where the episode is of the unit
    draws: np.ndarray  # (1 + resamples, units)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Mean over episodes of values (m, n) in every resample, (1 + resamples, m)."""
        return (self.draws @ (values @ self.member).T) / (self.draws @ self.member.sum(axis=0))[:, None]

    def estimate(self, replicates: np.ndarray) -> Estimate:
        return percentiles(float(replicates[0]), replicates[1:], len(self.tasks))


@dataclass(frozen=True)
class _Settings:
    """A row's episodes at each of its settings, as arrays (m, n), and its own threshold's place among them."""

    points: list[tuple[Literal["never", "threshold", "always"], float | None]]
    sweep: Sweep
    operating: int | None


Setting = dict[tuple[str, int], Episode]  # by (task, perturbation seed)


def build_results(
    episodes: Sequence[Episode],
    operating: Mapping[str, float],
    risks: Mapping[str, Sequence[Sequence[float]]],
    c_slm: float,
    c_llm: float,
    alpha: float,
    seed: int,
    resamples: int = RESAMPLES,
    predict: Callable[[np.ndarray], np.ndarray] | None = None,
    ablation: Mapping[str, Mapping[str, float]] | None = None,
    thresholds: Mapping[str, float | None] | None = None,
) -> StepResults:
    """Rows, frontiers, comparisons and tables of one evaluation.

    ``episodes`` of all rows and thresholds, among them `slm`, `llm` and `risk`; a row that ends in ``-no-jsd`` belongs to
    another small model, whose own episodes are the row `slm-no-jsd`. ``operating``: the threshold at which a row stands,
    `risk` at least. ``risks``: by row, P(failure) at each turn of each episode of its small model alone, in the order in
    which those episodes come. ``predict`` maps features (n, 15) to the risks (n,) of `risk`, for the permutation
    importance. ``ablation``: {feature or group: {"brier", "auc"}} of routers refitted without it. ``thresholds`` of `risk`
    by name, None where nothing was certified. ValueError where rows do not hold the same episodes, a row is missing, or an
    argument does not fit the episodes.
    """
    if not 0 <= c_slm <= c_llm:
        raise ValueError(f"costs must satisfy 0 <= c_slm <= c_llm, got {c_slm} and {c_llm}")
    by_row = _by_row(episodes)
    pairs = sorted(_alone(by_row, "slm"))
    sample = _sample(pairs, seed, resamples)
    routers = {
        name: _settings(name, by_row, pairs, operating.get(name))
        for name in row_order(by_row)
        if name not in ("slm", "llm", "slm-no-jsd")
    }
    for name in ("risk", *operating):
        if name not in routers or name not in operating:
            raise ValueError(f"row {name!r} needs episodes and an operating threshold")
    slm, llm = (_run([_alone(by_row, name)], pairs) for name in ("slm", "llm"))
    success, calls, steps = post_hoc_oracle(slm.success[0], slm.steps[0], llm.success[0], llm.steps[0])
    oracle = Sweep(success[None, :], calls[None, :], steps[None, :], sample.tasks)
    one = np.ones((len(sample.draws), 1))
    rate, oracle_rate = (float(s.llm_steps.sum() / s.steps.sum()) for s in (_at_operating(routers["risk"]), oracle))
    weights = {name: _weights(sample, settings, rate) for name, settings in routers.items()}
    measured = {"slm": (slm, one), "llm": (llm, one)}
    measured |= {name: (settings.sweep, weights[name]) for name, settings in routers.items()}
    measured["oracle"] = (oracle, one)
    replicates = {name: _metrics(sample, name, sweep, w, c_slm, c_llm, alpha) for name, (sweep, w) in measured.items()}
    crossed = _crossed(sample, seed, resamples)
    both = {name: _success_and_escalation(crossed, sweep, routers.get(name), rate) for name, (sweep, _) in measured.items()}
    calibration = [_calibration(name, by_row, pairs, sample, risks[name], seed) for name in row_order(risks)]
    rows = [_row(sample, name, replicates[name], calibration) for name in row_order(replicates)]

    policies = [rows[0]]
    comparisons = _comparisons(sample, routers, rate, oracle_rate, alpha, seed, resamples)
    if "slm-no-jsd" in by_row:
        other = _run([_alone(by_row, "slm-no-jsd")], pairs)
        policies.append(_row(sample, "slm-no-jsd", _metrics(sample, "slm", other, one, c_slm, c_llm, alpha), []))
        gain = clustered_difference(slm.success[0], other.success[0], sample.tasks, seed)
        over_both = crossed.estimate(crossed.means(slm.success - other.success)[:, 0])
        comparisons.append(
            Comparison(a="slm", b="slm-no-jsd", at="small model alone", rate=None, difference=gain, new_seeds=over_both)
        )
    shown = {"slm": slm, "risk": _at_operating(routers["risk"]), "llm": llm}
    by_environment, by_perturbation, by_seed = _groups(_alone(by_row, "slm"), pairs, shown, seed)
    return StepResults(
        rows=rows,
        success_new_seeds={name: crossed.estimate(both[name]["success"]) for name in row_order(both)},
        policies=policies,
        tasks=len(set(sample.tasks)),
        seeds=int(sample.seeds.max()) + 1,
        episodes=len(pairs),
        c_slm=c_slm,
        c_llm=c_llm,
        alpha=alpha,
        bootstrap_seed=seed,
        matched_rate=rate,
        oracle_rate=oracle_rate,
        frontiers=[_frontier(name, settings, seed, resamples) for name, settings in routers.items()],
        thresholds=_thresholds(routers["risk"], thresholds or {}),
        comparisons=comparisons,
        targets=_targets(sample, crossed, routers, replicates, both, llm, oracle),
        calibration=calibration,
        by_environment=by_environment,
        by_perturbation=by_perturbation,
        by_seed=by_seed,
        importance=_importance(_alone(by_row, "slm"), pairs, predict, seed) if predict else [],
        ablation={name: Ablation(**scores) for name, scores in (ablation or {}).items()},
    )


def _by_row(episodes: Sequence[Episode]) -> dict[str, dict[float | None, Setting]]:
    """{row: {threshold: setting}}; ValueError unless all hold the same pairs, each once and of one kind."""
    by_row: dict[str, dict[float | None, Setting]] = {}
    kinds: dict[str, str] = {}
    for episode in episodes:
        where = f"row {episode.row!r} at threshold {episode.threshold}"
        setting = by_row.setdefault(episode.row, {}).setdefault(episode.threshold, {})
        if (episode.task, episode.seed) in setting:
            raise ValueError(f"{where} holds task {episode.task!r} with seed {episode.seed} twice")
        if kinds.setdefault(episode.task, episode.kind) != episode.kind:
            raise ValueError(f"{where} says that task {episode.task!r} is {episode.kind}, not {kinds[episode.task]}")
        setting[(episode.task, episode.seed)] = episode
    pairs = set(_alone(by_row, "slm"))
    _alone(by_row, "llm")
    for name, settings in by_row.items():
        if name not in STEP_ROWS and name != "slm-no-jsd":
            raise ValueError(f"row {name!r} is none of {', '.join(STEP_ROWS)}")
        if name == "oracle":
            raise ValueError("row 'oracle' is computed from slm and llm, expected no episodes of it")
        if name not in ("slm", "llm", "slm-no-jsd") and None in settings:
            raise ValueError(f"row {name!r} has an episode without a threshold")
        for threshold, setting in settings.items():
            if odd := sorted(pairs.symmetric_difference(setting)):
                task, perturbation = odd[0]
                raise ValueError(
                    f"row {name!r} at threshold {threshold} and row 'slm' do not hold the same episodes: "
                    f"only one has task {task!r} with seed {perturbation}"
                )
    return by_row


def _alone(by_row: Mapping[str, Mapping[float | None, Setting]], name: str) -> Setting:
    """The episodes of a row that has one setting."""
    settings = by_row.get(name, {})
    if len(settings) != 1:
        raise ValueError(f"row {name!r} needs episodes at exactly one setting, found {len(settings)}")
    return next(iter(settings.values()))


def _policy(name: str) -> str:
    """The row of the small model alone that a row's router works with."""
    return "slm-no-jsd" if name.endswith("-no-jsd") else "slm"


def _sample(pairs: Sequence[tuple[str, int]], seed: int, resamples: int) -> _Sample:
    tasks = [task for task, _ in pairs]
    count, index = codes(tasks, len(pairs))
    member = np.zeros((len(pairs), count))
    member[np.arange(len(pairs)), index] = 1.0
    draws = np.concatenate([np.ones((1, count)), group_draws(count, seed, resamples)])
    return _Sample(tasks, np.unique([number for _, number in pairs], return_inverse=True)[1], member, draws)


def _crossed(sample: _Sample, seed: int, resamples: int) -> _Sample:
    """The same episodes with resamples over tasks and perturbation seeds."""
    n = len(sample.tasks)
    draws = crossed_draws(sample.tasks, sample.seeds.tolist(), seed, resamples)
    return _Sample(sample.tasks, sample.seeds, np.eye(n), np.concatenate([np.ones((1, n)), draws]))


def _run(settings: Sequence[Setting], pairs: Sequence[tuple[str, int]]) -> Sweep:
    ordered = [[setting[pair] for pair in pairs] for setting in settings]
    return Sweep(
        success=np.array([[float(e.success) for e in run] for run in ordered]),
        llm_steps=np.array([[float(e.llm_calls) for e in run] for run in ordered]),
        steps=np.array([[float(e.steps) for e in run] for run in ordered]),
        group=[task for task, _ in pairs],
    )


def _settings(
    name: str,
    by_row: Mapping[str, Mapping[float | None, Setting]],
    pairs: Sequence[tuple[str, int]],
    operating: float | None,
) -> _Settings:
    """All settings of a router, from never to always; ValueError where the operating threshold was not measured."""
    found = {threshold: setting for threshold, setting in by_row[name].items() if threshold is not None}
    found.setdefault(float("inf"), _alone(by_row, _policy(name)))
    found.setdefault(float("-inf"), _alone(by_row, "llm"))
    if operating is not None and operating not in found:
        raise ValueError(f"row {name!r} was not run at its operating threshold {operating}, only at {sorted(found)}")
    order = sorted(found, reverse=True)
    return _Settings(
        points=[("threshold", t) if np.isfinite(t) else ("never" if t > 0 else "always", None) for t in order],
        sweep=_run([found[threshold] for threshold in order], pairs),
        operating=None if operating is None else order.index(operating),
    )


def _at_operating(settings: _Settings) -> Sweep:
    assert settings.operating is not None
    sweep, own = settings.sweep, slice(settings.operating, settings.operating + 1)
    return Sweep(sweep.success[own], sweep.llm_steps[own], sweep.steps[own], sweep.group)


def _escalations(sample: _Sample, sweep: Sweep) -> np.ndarray:
    """Escalation share of each setting in each resample, (1 + resamples, m)."""
    return sample.means(sweep.llm_steps) / sample.means(sweep.steps)


def interpolation_weights(rate: float, escalations: np.ndarray) -> np.ndarray:
    """Weights (m,) with which settings at ``escalations`` (m,) mix at a rate, so that weights · success is `success_at`."""
    distinct, index, counts = np.unique(escalations, return_inverse=True, return_counts=True)
    weights = np.zeros(distinct.size)
    right = int(np.searchsorted(distinct, rate))
    if right in (0, distinct.size):
        weights[min(right, distinct.size - 1)] = 1.0
    else:
        share = (rate - distinct[right - 1]) / (distinct[right] - distinct[right - 1])
        weights[right - 1 : right + 1] = 1 - share, share
    return weights[index] / counts[index]


def _weights(sample: _Sample, settings: _Settings, rate: float, at_rate: bool = False) -> np.ndarray:
    """Each setting's weight in each resample, (1 + resamples, m): the operating one's 1, else those of the rate."""
    if settings.operating is None or at_rate:
        return np.array([interpolation_weights(rate, x) for x in _escalations(sample, settings.sweep)])
    weights = np.zeros((len(sample.draws), len(settings.points)))
    weights[:, settings.operating] = 1.0
    return weights


def _failure_rates(sample: _Sample, sweep: Sweep, weights: np.ndarray) -> np.ndarray:
    """F_z of each resample, (1 + resamples, Z), the settings mixed; NaN for a seed that a resample does not hold."""
    one_hot = np.eye(int(sample.seeds.max()) + 1)[sample.seeds]  # (n, Z)
    counts = sample.draws @ (sample.member.T @ one_hot)
    failures = np.stack([sample.member.T @ (one_hot * (1 - success)[:, None]) for success in sweep.success])  # (m, tasks, Z)
    # One resample at a time: all of them times settings times seeds would not fit for thousands of seeds.
    mixed = np.array([w @ (draw @ failures) for w, draw in zip(weights, sample.draws, strict=True)])
    return np.divide(mixed, counts, out=np.full(counts.shape, np.nan), where=counts > 0)


def _cvars(rates: np.ndarray, alpha: float) -> np.ndarray:
    return np.array([cvar(line[~np.isnan(line)], alpha) for line in rates])


def proposals(name: str, llm_steps: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """How often a row's small model proposes in each episode: at every step that its rule looks at, as in `client.py`."""
    if name in UNSEEN:
        return steps - llm_steps
    if name == "query-level":  # looks at the first step only
        return steps - llm_steps + (llm_steps > 0)
    return steps


def _metrics(
    sample: _Sample, name: str, sweep: Sweep, weights: np.ndarray, c_slm: float, c_llm: float, alpha: float
) -> dict[str, np.ndarray]:
    """The metrics of one row in every resample, each (1 + resamples,)."""
    cost = c_slm * proposals(name, sweep.llm_steps, sweep.steps) + c_llm * sweep.llm_steps
    rates = _failure_rates(sample, sweep, weights)
    settings = {
        "success": sample.means(sweep.success),
        "escalation": _escalations(sample, sweep),
        "llm_calls_per_episode": sample.means(sweep.llm_steps),
        "cost": sample.means(cost),
        "escalated_episodes": sample.means((sweep.llm_steps > 0).astype(float)),
    }
    values = {metric: (weights * each).sum(axis=1) for metric, each in settings.items()}
    return values | {"worst_seed_success": 1 - np.nanmax(rates, axis=1), "cvar": _cvars(rates, alpha)}


def _success_and_escalation(sample: _Sample, sweep: Sweep, settings: _Settings | None, rate: float) -> dict[str, np.ndarray]:
    """These two of `_metrics` in every resample, without what is about the seeds as they are."""
    success, escalations = sample.means(sweep.success), _escalations(sample, sweep)
    weights = np.ones_like(success) if settings is None else _weights(sample, settings, rate)
    return {"success": (weights * success).sum(axis=1), "escalation": (weights * escalations).sum(axis=1)}


def _row(sample: _Sample, name: str, replicates: Mapping[str, np.ndarray], calibration: Sequence[Calibration]) -> Row:
    metrics = {metric: sample.estimate(values) for metric, values in replicates.items()}
    for predicted in calibration:
        if predicted.row == name:
            metrics |= {"brier": predicted.brier, "ece": predicted.ece}
    return Row(name=name, metrics={metric: metrics[metric] for metric in STEP_METRICS if metric in metrics})


def _frontier(name: str, settings: _Settings, seed: int, resamples: int) -> Frontier:
    points = [
        FrontierPoint(
            rule=settings.points[point.setting][0],
            threshold=settings.points[point.setting][1],
            operating=point.setting == settings.operating,
            escalation=point.escalation,
            success=point.success,
            llm_calls_per_episode=point.llm_calls_per_episode,
            escalated_episodes=point.escalated_episodes,
        )
        for point in frontier(settings.sweep)
    ]
    return Frontier(row=name, area=area_interval(settings.sweep, seed, resamples), points=points)


def _thresholds(risk: _Settings, thresholds: Mapping[str, float | None]) -> list[Threshold]:
    """Each between the measured settings next to it; no benefit exceeds 1 and every one exceeds −1."""
    ends = {"never": 1.0, "always": -1.0}
    measured = np.array([t if t is not None else ends[rule] for rule, t in risk.points])  # descending
    points = {point.setting: point for point in frontier(risk.sweep)}
    found = []
    for name, value in thresholds.items():
        at = min(max(-1.0 if value is None else value, -1.0), 1.0)
        next_to = [int(np.flatnonzero(measured >= at)[-1]), int(np.flatnonzero(measured <= at)[0])]
        success, escalated = ([getattr(points[i], of) for i in next_to] for of in ("success", "escalation"))
        found.append(
            Threshold(
                name=name, value=value, success=(min(success), max(success)), escalation=(min(escalated), max(escalated))
            )
        )
    return found


def _comparisons(
    sample: _Sample,
    routers: Mapping[str, _Settings],
    rate: float,
    oracle_rate: float,
    alpha: float,
    seed: int,
    resamples: int,
) -> list[Comparison]:
    """`risk` minus each other router, and `failure-risk` minus the one without the CVaR term, which acts there."""
    pairs = [("risk", name) for name in routers if name != "risk"]
    if "failure-risk" in routers and "failure-no-cvar" in routers:
        pairs.append(("failure-risk", "failure-no-cvar"))

    def worst(settings: _Settings) -> np.ndarray:
        weights = _weights(sample, settings, rate, at_rate=True)
        return _cvars(_failure_rates(sample, settings.sweep, weights), alpha)

    tails = {name: worst(settings) for name, settings in routers.items()}
    seeds = sample.seeds.tolist()
    found = []
    for a, b in pairs:
        one, other = routers[a].sweep, routers[b].sweep
        found += [
            Comparison(a=a, b=b, at="oracle rate", rate=oracle_rate,
                       difference=matched_difference(one, other, oracle_rate, seed, resamples),
                       new_seeds=matched_difference(one, other, oracle_rate, seed, resamples, seeds)),
            Comparison(a=a, b=b, at="own rate", rate=rate,
                       difference=matched_difference(one, other, rate, seed, resamples),
                       new_seeds=matched_difference(one, other, rate, seed, resamples, seeds)),
            Comparison(a=a, b=b, at="cvar at own rate", rate=rate,
                       difference=sample.estimate(tails[a] - tails[b]), new_seeds=None),
            Comparison(a=a, b=b, at="area", rate=None,
                       difference=area_difference(one, other, seed, resamples),
                       new_seeds=area_difference(one, other, seed, resamples, seeds)),
        ]  # fmt: skip
    return found


def first_reaching(level: float, escalations: np.ndarray, successes: np.ndarray) -> float:
    """Smallest escalation at which the piecewise linear curve has a success of ``level``; NaN where it never has."""
    x, y = _curve(escalations, successes)
    above = np.flatnonzero(y >= level)
    if not above.size:
        return float("nan")
    i = int(above[0])
    if i == 0:
        return float(x[0])
    return float(x[i - 1] + (x[i] - x[i - 1]) * (level - y[i - 1]) / (y[i] - y[i - 1]))


def _ratio(sample: _Sample, above: np.ndarray, below: np.ndarray) -> Estimate | None:
    """above / below (1 + resamples,) over the resamples in which it exists; None where the sample itself has none."""
    exists = np.isfinite(above) & (below > 0)
    if not exists[0] or not exists[1:].any():
        return None
    return sample.estimate(above[exists] / below[exists])


def _targets(
    sample: _Sample,
    crossed: _Sample,
    routers: Mapping[str, _Settings],
    replicates: Mapping[str, Mapping[str, np.ndarray]],
    both: Mapping[str, Mapping[str, np.ndarray]],
    llm: Sweep,
    oracle: Sweep,
) -> list[Target]:
    """``replicates`` by row are of ``sample``, ``both`` of ``crossed``."""
    return [
        Target(
            row=name,
            **_shares(sample, settings.sweep, replicates[name], llm, oracle),
            new_seeds=_shares(crossed, settings.sweep, both[name], llm, oracle),
        )
        for name, settings in routers.items()
    ]


def _shares(sample: _Sample, sweep: Sweep, row: Mapping[str, np.ndarray], llm: Sweep, oracle: Sweep) -> dict[str, Any]:
    """The four estimates of a `Target`, from the row's success and escalation in every resample."""
    best, oracle_rates = sample.means(llm.success)[:, 0], _escalations(sample, oracle)[:, 0]
    x, y = _escalations(sample, sweep), sample.means(sweep.success)
    # 1e-12: a curve that reaches the share exactly must not miss it by the last digit.
    reached = np.array([first_reaching(*each) for each in zip(TARGET_SHARE * best - 1e-12, x, y, strict=True)])
    return {
        "success_share": _ratio(sample, row["success"], best),
        "operating_ratio": _ratio(sample, row["escalation"], oracle_rates),
        "escalation_at_share": _ratio(sample, reached, np.ones_like(reached)),
        "oracle_ratio": _ratio(sample, reached, oracle_rates),
    }


def weighted_auc(risk: np.ndarray, failed: np.ndarray, weight: np.ndarray) -> float | None:
    """AUC of ``risk`` (n,) for ``failed`` (n,) 0 or 1 with weights (n,); None where all end alike."""
    if failed.min() == failed.max():
        return None
    return float(roc_auc_score(failed, risk, sample_weight=weight))


def _calibration(
    name: str,
    by_row: Mapping[str, Mapping[float | None, Setting]],
    pairs: Sequence[tuple[str, int]],
    sample: _Sample,
    risks: Sequence[Sequence[float]],
    seed: int,
) -> Calibration:
    policy = _policy(name)
    setting = _alone(by_row, policy)
    if len(risks) != len(setting):
        raise ValueError(f"risks of {name!r}: expected one list for each of {len(setting)} episodes, got {len(risks)}")
    # A setting keeps the order in which its episodes came, the order of `risks`.
    given = dict(zip(setting, risks, strict=True))
    for pair, values in given.items():
        if len(values) != len(setting[pair].turns) or not len(values):
            raise ValueError(
                f"risks of {name!r}: {policy} episode {pair} has {len(setting[pair].turns)} turns, got {len(values)} risks"
            )
    lengths = np.array([len(given[pair]) for pair in pairs])
    episode = np.repeat(np.arange(len(pairs)), lengths)
    p = np.concatenate([np.asarray(given[pair], dtype=float) for pair in pairs])
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"risks of {name!r}: a risk lies outside [0, 1] or is NaN")
    failed = np.array([float(not setting[pair].success) for pair in pairs])
    happened, weight = failed[episode], 1 / lengths[episode]
    own = np.bincount(episode, weight * (p - happened) ** 2)
    bins, ece = _reliability(sample, p, happened, weight, episode)
    step = np.concatenate([np.arange(length) for length in lengths])
    auc = [StepAuc(step=None, auc=weighted_auc(p, happened, weight), n=len(pairs))]
    for early in EARLY_STEPS:
        at = step == early
        if at.any():
            auc.append(StepAuc(step=early, auc=weighted_auc(p[at], happened[at], weight[at] * 0 + 1), n=int(at.sum())))
    mixed = failed.min() < failed.max()
    return Calibration(
        row=name,
        base_rate=float(failed.mean()),
        brier=clustered_mean(own, sample.tasks, seed, resamples=len(sample.draws) - 1),
        skill=brier_skill(p, failed, episode, sample.tasks, seed) if mixed else None,
        skill_new_seeds=brier_skill(p, failed, episode, sample.tasks, seed, sample.seeds.tolist()) if mixed else None,
        ece=ece,
        bins=bins,
        auc=auc,
    )


def _reliability(
    sample: _Sample, p: np.ndarray, happened: np.ndarray, weight: np.ndarray, episode: np.ndarray
) -> tuple[list[Bin], Estimate]:
    """`calibration.reliability_bins` and ECE with weights: the steps of an episode share its weight of 1."""
    edges = np.linspace(0.0, 1.0, BINS + 1)
    index = np.searchsorted(edges[1:-1], p, side="left")

    def sums(values: np.ndarray) -> np.ndarray:
        """Σ values by episode and bin, (BINS, n)."""
        cells = np.bincount(episode * BINS + index, values, len(sample.tasks) * BINS)
        return cells.reshape(-1, BINS).T

    size, predicted, observed = sums(weight), sums(weight * p), sums(weight * happened)
    ece = np.abs(sample.means(observed) - sample.means(predicted)).sum(axis=1)
    total, count = size.sum(axis=1), np.bincount(index, minlength=BINS)
    bins = [
        Bin(
            low=float(edges[i]),
            high=float(edges[i + 1]),
            n=int(count[i]),
            probability=float(predicted[i].sum() / total[i]),
            frequency=float(observed[i].sum() / total[i]),
        )
        for i in range(BINS)
        if count[i]
    ]
    return bins, sample.estimate(ece)


def _groups(
    slm: Setting, pairs: Sequence[tuple[str, int]], shown: Mapping[str, Sweep], seed: int
) -> tuple[list[Group], list[Group], list[Group]]:
    """Tables by environment, by perturbation that struck, and of the worst seeds."""
    episodes = [slm[pair] for pair in pairs]

    def group(name: str, chosen: Sequence[bool]) -> Group:
        at = np.flatnonzero(chosen)
        tasks = [episodes[i].task for i in at]
        risk = shown["risk"]
        return Group(
            name=name,
            n=at.size,
            success={row: clustered_mean(sweep.success[0][at], tasks, seed) for row, sweep in shown.items()},
            escalation=clustered_mean(risk.llm_steps[0][at], tasks, seed, risk.steps[0][at]),
        )

    kinds = dict.fromkeys(e.kind for e in episodes)
    environments = [group(kind, [e.kind == kind for e in episodes]) for kind in kinds]
    struck = [{kind for turn in e.turns for kind in turn.struck} for e in episodes]
    perturbations = [group(kind, [kind in each for each in struck]) for kind in sorted(set().union(*struck))]
    if perturbations and not all(struck):
        perturbations.append(group("none", [not each for each in struck]))
    success = shown["risk"].success[0]
    numbers = np.array([e.seed for e in episodes])
    worst = sorted(set(numbers.tolist()), key=lambda number: (success[numbers == number].mean(), number))
    seeds = [group(str(number), (numbers == number).tolist()) for number in worst[:SEEDS_LISTED]]
    return environments, perturbations, seeds


def _importance(
    slm: Setting, pairs: Sequence[tuple[str, int]], predict: Callable[[np.ndarray], np.ndarray], seed: int
) -> list[Importance]:
    episodes = [slm[pair] for pair in pairs]
    lengths = np.array([len(e.turns) for e in episodes])
    if not lengths.all():
        raise ValueError("the permutation importance needs the turns of every slm episode")
    features = check_features(np.array([turn.features for e in episodes for turn in e.turns]))
    episode = np.repeat(np.arange(len(episodes)), lengths)
    failed = np.array([float(not e.success) for e in episodes])
    return permutation_importance(features, episode, failed, predict, seed)


def permutation_importance(
    features: np.ndarray,
    episode: np.ndarray,
    failed: np.ndarray,
    predict: Callable[[np.ndarray], np.ndarray],
    seed: int,
    repeats: int = 5,
) -> list[Importance]:
    """Rise of the Brier score and drop of the AUC when one feature is permuted over all steps (Breiman 2001).

    ``features`` (n, 15), ``episode`` (n,) the index of each step's episode, ``failed`` (E,) 0 or 1; every episode weighs
    the same. Features that carry the same information hide one another. Empty where all episodes end alike.
    """
    weight = 1 / np.bincount(episode)[episode]
    happened = failed[episode]

    def scores(rows: np.ndarray) -> tuple[float, float] | None:
        p = predict(rows)
        auc = weighted_auc(p, happened, weight)
        return None if auc is None else (float(np.average((p - happened) ** 2, weights=weight)), auc)

    whole = scores(features)
    if whole is None:
        return []
    generator = np.random.default_rng(seed)
    found = []
    for column, name in enumerate(NAMES):
        changes = []
        for _ in range(repeats):
            rows = features.copy()
            rows[:, column] = generator.permutation(rows[:, column])
            permuted = scores(rows)
            assert permuted is not None
            changes.append((permuted[0] - whole[0], whole[1] - permuted[1]))
        (brier, auc), (brier_std, auc_std) = np.mean(changes, axis=0), np.std(changes, axis=0)
        found.append(
            Importance(feature=name, brier=float(brier), brier_std=float(brier_std), auc=float(auc), auc_std=float(auc_std))
        )
    return found
