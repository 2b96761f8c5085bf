"""The risk router from the small model's own failures, calibrated, with its thresholds (stage `calibrate`).

Four disjoint sets of tasks: the policy learnt on the first; of the second, four fifths fit the router and one fifth its
temperature; the third decides the thresholds, re-executed; the fourth is the test.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_curve

from routewright.step_router.dataset import Tasks, make_environment, read_tasks
from routewright.step_router.episodes import Episode, Rule, play
from routewright.step_router.escalation import ALWAYS, NEVER, Benefit, Coin
from routewright.step_router.escalation import random as at_random
from routewright.step_router.identity import check_stage
from routewright.step_router.perturbations import perturbation_seeds
from routewright.step_router.profile import StepRouterProfile
from routewright.step_router.risk import (
    DESCRIPTION,
    Explored,
    RiskModel,
    RiskSettings,
    Rollouts,
    both_outcomes,
    calibrate,
    constant_risk,
    constraint_told,
    fit_risk,
    save_risk,
    stack,
)
from routewright.step_router.rollouts import as_explored, as_rollouts, first_steps, player, write_rollouts
from routewright.step_router.thresholds import (
    bayes_threshold,
    learn_then_test,
    threshold_for_calls,
)

PARITY = 0.98  # of the LLM's success on the threshold split, which the operating threshold keeps
ROLLOUTS = "rollouts.npz"
GRID = 12  # thresholds that are re-executed
EVERY = -1.0  # the threshold that every benefit exceeds
BENEFITS_KEPT = 1000  # past ones for pacing under a budget


def alone(
    row: str, out: Path, make: Any, tasks: Sequence[str], seeds: Sequence[int], each: int, workers: int
) -> list[Episode]:
    """Episodes of the small model alone, with their turns; ``each`` as in `play`."""
    rules = [Rule(row, at_random, NEVER, keep=True)]
    return play(make, rules, tasks, seeds, out, workers, f"small model alone ({out.name})", each)


def held_out_tasks(tasks: Sequence[str], seed: int) -> set[str]:
    """A fifth of the tasks, at least one: for the temperature."""
    shuffled = sorted(tasks)
    random.Random(f"temperature/{seed}").shuffle(shuffled)
    return set(shuffled[: max(1, len(shuffled) // 5)])


def longest_limit(tasks: Tasks, names: Sequence[str]) -> int:
    """The most steps that an episode of any of these tasks may take, however few the small model took."""
    environment = make_environment(tasks)
    try:
        return max(environment.reset(name, 0).max_steps for name in names)
    finally:
        environment.close()


def benefit_grid(model: RiskModel, rollouts: Rollouts) -> list[float]:
    """Ascending thresholds that the benefit exceeds at a share 0.9 … 0.05 of the small model's steps, without repetition."""
    benefits = model.benefits(rollouts.features)
    return sorted({float(np.round(q, 6)) for q in np.quantile(benefits, np.linspace(0.1, 0.95, GRID))})


def fit(
    train: Rollouts, explored: Explored | None, holdout: Rollouts, settings: RiskSettings, seed: int
) -> tuple[RiskModel, list[dict[str, float]]]:
    """A router fitted on the first two and calibrated on ``holdout``; without both outcomes there, on ``train``.

    Without both in either, its risk is constant.
    """
    model, history = fit_risk(train, explored, settings, seed)
    known = next((part for part in (holdout, train) if both_outcomes(part)), None)
    if known is None:
        constant_risk(model, train)
    else:
        calibrate(model, known)
    return model, history


def _split(episodes: Sequence[Episode], held_out: set[str]) -> tuple[list[Episode], list[Episode]]:
    return [e for e in episodes if e.task not in held_out], [e for e in episodes if e.task in held_out]


def calibrate_router(dataset: Path, policy: Path, verifier: Path, out: Path, profile: StepRouterProfile, seed: int) -> None:
    """Fit the risk router and its ablations, and choose thresholds; ``policy`` is the folder that `distill_dpo` wrote.

    Writes a risk router folder ``out`` (with ``no-cvar``, ``query-level`` and, for ablations, ``no-jsd`` beneath),
    ``rollouts.npz``, ``roc.json``, ``thresholds.json`` and ``history.jsonl``. BadInput where ``out`` is of another profile,
    seed, dataset, policy or verifier.
    """
    if check_stage(out, DESCRIPTION, profile, seed, dataset=dataset, policy=policy, verifier=verifier):
        return
    section = profile.router
    settings = RiskSettings(alpha=section.alpha, epsilon=section.epsilon, steps=section.steps)
    unconstrained = RiskSettings(alpha=section.alpha, epsilon=section.epsilon, steps=section.steps, constrained=False)
    if profile.evaluation.ablations:
        other = _one_policy(dataset, policy / "policy-no-jsd", verifier, out, profile, settings, seed, "no-jsd")
        save_risk(other["model"], out / "no-jsd", settings, other["facts"])
        write_rollouts(out / "no-jsd" / ROLLOUTS, holdout=other["holdout"])
    main = _one_policy(dataset, policy / "policy", verifier, out, profile, settings, seed, "risk")
    train, holdout = main["train"], main["holdout"]
    print(constraint_told(main["history"], section.epsilon), flush=True)
    no_cvar, _ = fit(train, main["explored"], holdout, unconstrained, seed)
    query_level, _ = fit(first_steps(train), None, first_steps(holdout), unconstrained, seed)
    for name, model in (("no-cvar", no_cvar), ("query-level", query_level)):
        save_risk(model, out / name, unconstrained, {})
    write_rollouts(out / ROLLOUTS, train=train, holdout=holdout)
    _write(out / "roc.json", main["roc"])
    _write(out / "thresholds.json", main["measured"])
    (out / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in main["history"]))
    save_risk(main["model"], out, settings, main["facts"])


def _one_policy(
    dataset: Path, policy: Path, verifier: Path, out: Path, profile: StepRouterProfile, settings: RiskSettings, seed: int,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    """Rollouts, router and thresholds of one small model."""
    section, tasks = profile.router, read_tasks(dataset).splits
    work = out / "checkpoints" / name  # for resuming; not part of what the stage hands on
    make = player(dataset, policy, verifier, section.candidates, work / "proposals")
    silent = player(dataset, policy, verifier, section.candidates, work / "proposals", log_probs=False)
    seeds, each = perturbation_seeds("router", section.seed_pool), section.seeds
    told = alone("slm", work / "router", make, tasks["router"], seeds, each, profile.workers)
    untold = alone("slm", work / "router-without-logprobs", silent, tasks["router"], seeds, 1, profile.workers)
    coins = [Rule(f"coin-{draw}", Coin(draw), 1 - section.coin_rate, keep=True) for draw in range(section.coins)]
    tossed = play(make, coins, tasks["router"], seeds, work / "coins", profile.workers, "a coin decides", each)
    silently = play(
        silent, coins[:1], tasks["router"], seeds, work / "coins-without-logprobs", profile.workers,
        "a coin, without log-probabilities", min(2, each),
    )  # fmt: skip
    held_out = held_out_tasks(tasks["router"], seed)
    parts = [_split(episodes, held_out) for episodes in (told, untold)]
    train, holdout = (stack([as_rollouts(part[i]) for part in parts]) for i in (0, 1))
    explored = as_explored(_split([*tossed, *silently], held_out)[0], section.coin_rate)
    model, history = fit(train, explored, holdout, settings, seed)

    grid = benefit_grid(model, holdout)
    threshold_seeds = perturbation_seeds("threshold", section.seed_pool)
    rules = [Rule("slm", at_random, NEVER, keep=True), Rule("llm", at_random, ALWAYS)]
    rules += [Rule("risk", Benefit(model), threshold) for threshold in grid]
    title = f"thresholds ({name})"
    played = play(make, rules, tasks["threshold"], threshold_seeds, work / "threshold", profile.workers, title, each)
    chosen = choose_thresholds(played, grid, profile)
    slm = [episode for episode in played if episode.row == "slm"]
    rollouts = as_rollouts(slm)
    benefits = model.benefits(rollouts.features)
    facts = {
        "thresholds": chosen["thresholds"],
        "operating": section.operating,
        "benefits": [round(float(b), 6) for b in benefits[:: max(1, len(benefits) // BENEFITS_KEPT)]],
        "c_slm": section.c_slm,
        "c_llm": section.c_llm,
        "max_steps": longest_limit(read_tasks(dataset), tasks["threshold"]),
        "target_failure": section.target_failure,
        "delta": section.delta,
        "stage": "calibrate",
        "seed": seed,
        "profile": profile.name,
    }
    return {
        "model": model, "history": history, "train": train, "holdout": holdout, "explored": explored, "facts": facts,
        "measured": {"grid": grid, **chosen}, "roc": roc(model.risks(rollouts.features), rollouts),
    }  # fmt: skip


def choose_thresholds(played: Sequence[Episode], grid: Sequence[float], profile: StepRouterProfile) -> dict[str, Any]:
    """Thresholds from episodes that were re-executed at each threshold of the grid.

    ``parity``: the largest whose success is at least PARITY of the LLM's (EVERY where none is). ``bayes``: from costs.
    ``budget``: for the profile's calls an episode. ``guaranteed``: Learn-then-Test over tasks; None where nothing is
    certified. Tasks that share perturbation seeds are independent given these only: the guarantee is for new tasks under
    the split's seeds. Under new seeds too it holds where no two tasks share one, with a ``router.seed_pool`` of at least
    ``tasks.threshold`` × ``router.seeds``. A threshold of 1 never escalates.
    """
    section = profile.router
    by_row: dict[tuple[str, float | None], list[Episode]] = {}
    for episode in played:
        by_row.setdefault((episode.row, episode.threshold), []).append(episode)
    slm, llm = by_row["slm", None], by_row["llm", None]
    at = [by_row["risk", threshold] for threshold in grid]
    success = np.array([[e.success for e in episodes] for episodes in at], dtype=float)
    calls = np.array([[e.llm_calls for e in episodes] for episodes in at], dtype=float)
    steps = np.array([[e.steps for e in episodes] for episodes in at], dtype=float)
    p_llm = float(np.mean([not e.success for e in llm]))
    reached = np.flatnonzero(success.mean(axis=1) >= PARITY * (1 - p_llm))
    names = [episode.task for episode in slm]
    tasks = list(dict.fromkeys(names))
    member = np.array([[name == task for name in names] for task in tasks], dtype=float)
    losses = (member @ (1 - success).T) / member.sum(axis=1, keepdims=True)
    budget = threshold_for_calls(calls.T, grid, section.call_budget)
    thresholds: dict[str, float | None] = {
        "parity": grid[int(reached[-1])] if reached.size else EVERY,
        "bayes": min(1.0, bayes_threshold(section.c_slm, section.c_llm, section.kappa)),
        "budget": min(1.0, budget),
        "guaranteed": learn_then_test(losses, grid, section.target_failure, section.delta, p_value="hoeffding-bentkus"),
    }
    return {
        "thresholds": thresholds,
        "success": success.mean(axis=1).tolist(),
        "escalation": (calls.sum(axis=1) / steps.sum(axis=1)).tolist(),
        "slm_success": float(np.mean([e.success for e in slm])),
        "llm_success": 1 - p_llm,
    }


def operating_threshold(description: Mapping[str, Any]) -> float:
    """The threshold at which a router's folder stands, as `StepRouter.load` reads it: EVERY where none was certified."""
    threshold = description["thresholds"][description["operating"]]
    return EVERY if threshold is None else float(threshold)


def roc(risks: np.ndarray, rollouts: Rollouts) -> dict[str, list[float]]:
    """ROC of the risks against failure over the steps, every episode weighing the same; empty where all end alike."""
    failed = rollouts.failed[rollouts.episode]
    if len(np.unique(failed)) < 2:
        return {"fpr": [], "tpr": [], "thresholds": []}
    weight = 1.0 / np.bincount(rollouts.episode)[rollouts.episode]
    fpr, tpr, thresholds = roc_curve(failed, risks, sample_weight=weight)
    keep = np.unique(np.linspace(0, len(fpr) - 1, 200).astype(int))
    finite = np.minimum(thresholds[keep], 1.0)
    return {"fpr": fpr[keep].tolist(), "tpr": tpr[keep].tolist(), "thresholds": finite.tolist()}


def _write(file: Path, content: Any) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(content, indent=1))
    os.replace(partial, file)
