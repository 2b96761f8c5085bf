"""Every trained rule, and every rule on the co-evolved agents, on the same held-out questions (stage `evaluate`)."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.decomposition import PCA

from routewright.ensemble_router.activation import activated
from routewright.ensemble_router.baselines import SingleBest, top_k
from routewright.ensemble_router.coevolve import DONE, HISTORY
from routewright.ensemble_router.coevolve_rules import (
    BASE,
    GENERALIST,
    ROUTER,
    RULES_FOLDER,
    SERVED,
    WARM,
    check_identity,
    identity_of,
    read_identity,
    weights_digest,
)
from routewright.ensemble_router.dataset import OUT_OF_DISTRIBUTION, load_split
from routewright.ensemble_router.familiarity import (
    FamiliarityHeads,
    FusedHeads,
    load_heads,
    nearest,
)
from routewright.ensemble_router.held_out import (
    Decide,
    Outcome,
    always,
    at_random,
    by_familiarity,
    by_learned,
)
from routewright.ensemble_router.learned_rules import LEARNED, LearnedRouter, load_learned
from routewright.ensemble_router.profile import EnsembleProfile
from routewright.ensemble_router.questions import FIT, Questions, answered_splits
from routewright.ensemble_router.results import (
    SAME_AGENTS,
    EnsembleResults,
    MapPoint,
    Specialisation,
    TauPoint,
    compared,
    gates_of,
    row_of,
)
from routewright.ensemble_router.specialisation import information_gain, interaction_p, shares
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.training_rules import lambda_of
from routewright.errors import BadInput
from routewright.evaluation.bootstrap import mean_interval
from routewright.evaluation.ensemble_report import EnsembleReportExtra, write_ensemble_report
from routewright.evaluation.summary import ENSEMBLE_ROWS, Row, Summary, table_markdown

RECORDS, OOD_RECORDS = "records.jsonl", f"records-{OUT_OF_DISTRIBUTION}.jsonl"
DECISIONS = 200
"""Decisions that a rule's latency is measured on; the backbone's pass, the same for all, is not in it."""


def evaluate_ensemble(dataset: Path, trained: Path, out: Path, profile: EnsembleProfile, seed: int) -> None:
    """Write summary.json, report.html, table.md, results.json and answers/ for whichever rules were trained.

    Agents answer greedily (temperature 0), each question once for every set of agents; the rules differ in whom they ask and
    whose answer counts. A finished evaluation is not repeated. BadInput where a training is missing or another one's.
    """
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    if read_identity(trained) != identity_of(dataset, profile, seed):
        raise BadInput(f"{trained}: expected what the coevolve stage trained with this profile, seed and dataset")
    rules = trained_rules(trained, profile)
    if SERVED not in rules:
        raise BadInput(f"{trained}: expected a finished training of the rule {SERVED}, found {rules}")
    check_identity(out, evaluation_identity(dataset, trained, profile, seed))
    if (out / "summary.json").is_file():
        return
    splits = answered_splits(dataset, trained, out, rules, profile, seed)
    heads = {rule: load_heads(trained / RULES_FOLDER / rule / "router")[0] for rule in rules if rule not in LEARNED}
    initial = FamiliarityHeads(heads[SERVED].width, profile.agents.names, seed)
    decides = _own_rules(trained, rules, heads, profile, seed)
    decides |= _other_rules(heads[SERVED], initial, splits["dev"], splits[FIT], profile, seed)
    test, outside = splits["test"], splits.get(OUT_OF_DISTRIBUTION)
    inside = {name: test.outcome(agents, decide) for name, (agents, decide) in decides.items()}
    beyond = {name: outside.outcome(agents, decide) for name, (agents, decide) in decides.items()} if outside else {}
    _write_records(out / RECORDS, test.tasks, inside)
    _write_records(out / OOD_RECORDS, outside.tasks if outside else [], beyond)
    majority = _majority(load_split(dataset, "train"), test.tasks)
    resamples = profile.evaluation.bootstrap
    ood_domains = outside.domains if outside else []
    rows = [
        row_of(name, test.domains, inside[name], ood_domains if name in beyond else [], beyond.get(name),
               _latency(decide, test.read_by(agents), name), seed, resamples)
        for name, (agents, decide) in decides.items()
    ]  # fmt: skip
    accuracy = {f"accuracy/{d}": majority[np.array(test.domains) == d] for d in sorted(set(test.domains))}
    accuracy = {"accuracy": majority, **accuracy}
    rows.append(Row(name="majority", metrics={m: mean_interval(v, seed, resamples) for m, v in accuracy.items()}))
    place = {name: number for number, name in enumerate(ENSEMBLE_ROWS)}
    rows.sort(key=lambda row: place.get(row.name, len(place)))
    others = [row.name for row in rows if row.name not in (SERVED, "majority")]
    comparisons = [compared(SERVED, b, inside, False, seed, resamples) for b in others]
    comparisons += [compared(SERVED, b, beyond, True, seed, resamples) for b in others if beyond]
    fused = FusedHeads(heads[SERVED])
    taus = sorted({*profile.evaluation.taus, profile.router.tau})
    points, variance = _map(test, fused, profile.agents.names)
    results = EnsembleResults(
        agents=profile.agents.names, domains=sorted(set(test.domains)), ood_domains=sorted(set(ood_domains)),
        questions=len(test.tasks), ood_questions=len(ood_domains), tau=profile.router.tau, rows=rows,
        own=[row.name for row in rows if row.name in rules],
        answers={rule: _done(trained, rule)["answers"] for rule in rules}, comparisons=comparisons,
        curve=[_tau_point(tau, test, fused, profile, seed) for tau in taus],
        specialisation=_specialisation(test, inside[SERVED], fused, FusedHeads(initial), seed),
        map=points, map_variance=variance,
    )  # fmt: skip
    _write(results, dataset, trained, out, profile, seed, started, rules)


def trained_rules(trained: Path, profile: EnsembleProfile) -> list[str]:
    """The profile's rules whose training is finished."""
    return [rule for rule in profile.coevolve.rules if (trained / RULES_FOLDER / rule / DONE).is_file()]


def evaluation_identity(dataset: Path, trained: Path, profile: EnsembleProfile, seed: int) -> dict[str, Any]:
    """What an evaluation depends on, beside the code: the training, with its weights, and the whole profile."""
    rules = [trained / RULES_FOLDER / rule for rule in trained_rules(trained, profile)]
    weights = [trained / WARM, *(folder / part for folder in rules for part in ("adapters", "router"))]
    digests = {"config_sha256": profile.digest, "weights_sha256": weights_digest(trained, weights)}
    return {**identity_of(dataset, profile, seed), **digests}


def _own_rules(
    trained: Path, rules: Sequence[str], heads: Mapping[str, FamiliarityHeads], profile: EnsembleProfile, seed: int
) -> dict[str, tuple[str, Decide]]:
    """Each trained rule with its own agents, exploration off."""
    count = profile.agents.count
    found: dict[str, tuple[str, Decide]] = {}
    for rule in rules:
        if rule in LEARNED:
            decide = by_learned(load_learned(trained / RULES_FOLDER / rule / "router"))
        elif rule == "random":
            decide = at_random(count, seed)
        elif rule == "one-model":
            decide = always([0], count)
        else:
            decide = by_familiarity(FusedHeads(heads[rule]), lambda_of(rule, profile), choice(rule, profile.router.tau))
        found[rule] = (rule, decide)
    return found


def choice(rule: str, tau: float) -> Any:
    """Agents by familiarities (N,): the k most familiar, all, or as many as reach τ."""
    if rule in ("top-1", "top-2"):
        return lambda f: top_k(f, int(rule[-1]))
    if rule == "all":
        return lambda f: top_k(f, len(f))
    return lambda f: activated(f, f, tau)


def _other_rules(
    heads: FamiliarityHeads,
    initial: FamiliarityHeads,
    dev: Questions,
    fit: Questions,
    profile: EnsembleProfile,
    seed: int,
) -> dict[str, tuple[str, Decide]]:
    """The other rules on the co-evolved agents (what is learnt, from training questions), and the agents as they began.

    `warm`: the start of the loop, untrained heads over the warm agents, so all of them vote. `warm:single-best` is their
    best on the dev questions, `warm:routed` the co-evolved router over them: what the router alone is worth.
    `warm:one-model`: one adapter with the warm-up of all.
    """
    count, lam, tau = profile.agents.count, profile.router.lam, profile.router.tau
    now, begun = dev.held[SERVED].rewards, dev.held[WARM].rewards
    fused = FusedHeads(heads)
    found: dict[str, tuple[str, Decide]] = {
        "base": (BASE, always([0], 1)),
        "warm": (WARM, by_familiarity(FusedHeads(initial), lam, choice(SERVED, tau))),
        "single-best": (SERVED, always([SingleBest(now).agent], count)),
        "warm:single-best": (WARM, always([SingleBest(begun).agent], count)),
        "warm:routed": (WARM, by_familiarity(fused, lam, choice(SERVED, tau))),
    }
    if GENERALIST in dev.held:
        found["warm:one-model"] = (GENERALIST, always([0], 1))
    for rule in ("top-1", "top-2", "all"):
        found[SAME_AGENTS + rule] = (SERVED, by_familiarity(fused, lam, choice(rule, tau)))
    found[f"{SAME_AGENTS}random"] = (SERVED, at_random(count, seed))
    for rule in LEARNED:
        router = LearnedRouter(rule, count, fit.states)
        router.learn(fit.states, fit.held[SERVED].rewards)
        router.linucb.alpha = 0.0
        found[SAME_AGENTS + rule] = (SERVED, by_learned(router))
    return found


def _write_records(file: Path, tasks: Sequence[Task], outcomes: Mapping[str, Outcome]) -> None:
    """A line for each row and question: what a promotion compares with another router's."""
    with file.open("w", encoding="utf-8") as lines:
        for row, found in outcomes.items():
            for place, task in enumerate(tasks):
                numbers = {"reward": float(found.reward[place]), "tokens": float(found.tokens[place])}
                lines.write(json.dumps({"row": row, "id": task.id, "domain": task.domain, **numbers}) + "\n")


def _majority(train: Sequence[Task], test: Sequence[Task]) -> np.ndarray:
    """Whether training's most frequent answer of the domain is right, (n,)."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for task in train:
        if task.answer:
            answers[task.domain][task.answer] += 1
    best = {domain: counted.most_common(1)[0][0] for domain, counted in answers.items()}
    return np.array([float(bool(task.answer) and task.answer == best.get(task.domain)) for task in test])


def _latency(decide: Decide, states: np.ndarray, name: str) -> list[float]:
    """Milliseconds of single decisions, after ten that warm up; none where nothing is decided."""
    if name.rpartition(":")[2] in ("base", "single-best", "one-model", "random"):
        return []
    spent = []
    for row in range(min(DECISIONS, len(states)) + 10):
        begin = time.perf_counter()
        decide(states[row % len(states)])
        spent.append((time.perf_counter() - begin) * 1e3)
    return spent[10:]


def _tau_point(tau: float, test: Questions, heads: FusedHeads, profile: EnsembleProfile, seed: int) -> TauPoint:
    found = test.outcome(SERVED, by_familiarity(heads, profile.router.lam, choice(SERVED, tau)))
    accuracy = mean_interval(found.reward, seed, profile.evaluation.bootstrap)
    return TauPoint(tau=tau, accuracy=accuracy, tokens=float(found.tokens.mean()), agents=float(found.agents.mean()))


def _specialisation(test: Questions, found: Outcome, heads: FusedHeads, initial: FusedHeads, seed: int) -> Specialisation:
    domains = np.array(test.domains)
    first = nearest(heads, test.states)
    information, before, p = information_gain(first, nearest(initial, test.states), domains, seed)
    rewards, warm = test.held[SERVED].rewards, test.held[WARM].rewards
    agents = rewards.shape[1]

    def accuracy(values: np.ndarray) -> dict[str, list[float]]:
        return {domain: values[domains == domain].mean(axis=0).tolist() for domain in sorted(set(test.domains))}

    return Specialisation(
        asked=shares(found.chosen, test.domains, agents), first=shares(first[:, None].tolist(), test.domains, agents),
        accuracy=accuracy(rewards), warm_accuracy=accuracy(warm), information=information, initial=before, p=p,
        interaction_p=interaction_p(rewards, domains, seed),
    )  # fmt: skip


def _map(test: Questions, heads: FusedHeads, names: Sequence[str]) -> tuple[list[MapPoint], list[float]]:
    """The questions' states on their first two principal axes, and the share of the variance along each."""
    axes = PCA(2, svd_solver="full")
    places = axes.fit_transform(test.states)
    first = nearest(heads, test.states)
    points = [
        MapPoint(x=float(x), y=float(y), domain=domain, agent=names[agent])
        for (x, y), domain, agent in zip(places, test.domains, first, strict=True)
    ]
    return points, [float(share) for share in axes.explained_variance_ratio_]


def _done(trained: Path, rule: str) -> dict[str, Any]:
    return dict(json.loads((trained / RULES_FOLDER / rule / DONE).read_text(encoding="utf-8")))


def _write(
    results: EnsembleResults,
    dataset: Path,
    trained: Path,
    out: Path,
    profile: EnsembleProfile,
    seed: int,
    started: float,
    rules: Sequence[str],
) -> None:
    (out / "results.json").write_text(results.model_dump_json(indent=1), encoding="utf-8")
    artifacts = {name: name for name in ("report.html", "table.md", "results.json", "answers")}
    summary = Summary(
        pipeline="ensemble-router", profile=profile.name, seed=seed, wall_s=round(time.monotonic() - started, 1),
        rows=results.rows, gates=gates_of(results), artifacts=artifacts,
    )  # fmt: skip
    (out / "table.md").write_text(table_markdown(summary), encoding="utf-8")
    histories = {
        rule: [json.loads(line) for line in (trained / RULES_FOLDER / rule / HISTORY).read_text().splitlines()]
        for rule in rules
    }
    answers = results.answers[SERVED]
    begun = "pretrained in the run on the families, and " if profile.pretrain else ""
    backbones = ", ".join(one.name for one in profile.backbones)
    lead = (
        f"{profile.agents.count} LoRA agents on {backbones} ({begun}warmed each on a mixture of its own) and a "
        f"familiarity router learnt together from {answers:,} verified answers of {profile.agents.samples} samples each. "
        "Every other rule had the same start, tasks and number of answers for agents of its own."
    )
    described = load_heads(trained / ROUTER)[1]
    extra: EnsembleReportExtra = {
        "dataset": ", ".join(results.domains),
        "date": datetime.now(UTC).date().isoformat(),
        "trained": lead,
        "lineage": {
            "profile digest": profile.digest[:12],
            "questions": str(identity_of(dataset, profile, seed)["tasks_sha256"])[:12],
            "ensemble router": str(described["model_version"]),
        },
    }
    write_ensemble_report(results, summary, histories, extra, out / "report.html")
    partial = out / "summary.json.partial"
    partial.write_text(summary.model_dump_json(indent=2), encoding="utf-8")
    os.replace(partial, out / "summary.json")
