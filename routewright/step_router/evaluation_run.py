"""The step router against every heuristic, on held-out tasks under unseen perturbation seeds (stage `evaluate`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from routewright.evaluation.step_report import CVAR_ACTS, HINDSIGHT, write_step_report
from routewright.evaluation.summary import Gate, Summary, table_markdown
from routewright.language_models.chat import named_model
from routewright.step_router import escalation
from routewright.step_router.calibration import ROLLOUTS, alone, fit, operating_threshold
from routewright.step_router.dataset import read_tasks
from routewright.step_router.episodes import Episode, Rule, play, write_episodes
from routewright.step_router.escalation import ALWAYS, NEVER, Benefit, QueryLevel, Risk, Signal
from routewright.step_router.features import NAMES
from routewright.step_router.identity import check_stage
from routewright.step_router.perturbations import perturbation_seeds
from routewright.step_router.profile import StepRouterProfile
from routewright.step_router.results import StepResults, build_results
from routewright.step_router.risk import RiskModel, RiskSettings, Rollouts, constraint_told, load_risk
from routewright.step_router.rollouts import (
    as_rollouts,
    first_scores,
    first_steps,
    player,
    read_rollouts,
    with_logprobs,
)

GROUPS = {
    "policy": ("entropy", "entropy_history", "surprisal", "evidence"),
    "verifier": ("verifier_mean", "verifier_spread", "verifier_best", "verifier_worst", "verifier_margin"),
    "candidates": ("consistency", "objective_overlap"),
    "time": ("time", "step"),
    "repeats": ("repeats",),
    "novelty": ("observation_novelty",),
}
"""Features that are left out together in the ablation."""


def quantile_grid(values: np.ndarray, count: int) -> list[float]:
    """``count`` thresholds that shares 0.1 … 0.9 of the values lie above, without repetition, ascending."""
    return sorted({float(np.round(q, 6)) for q in np.quantile(values, np.linspace(0.1, 0.9, count))})


def rules_of(
    router: Path, rollouts: Rollouts, count: int, operating: Mapping[str, float]
) -> tuple[list[Rule], dict[str, RiskModel]]:
    """Every row's thresholds, and the models that predict.

    ``rollouts`` are the small model's own episodes on the tasks of the router split that were held out for the temperature;
    those without log-probabilities do not count, as every row is played with them.
    """
    rollouts = with_logprobs(rollouts)
    models = {row: load_risk(router / folder)[0] for row, folder in (("risk", "."), ("risk-no-cvar", "no-cvar"))}
    query_level = load_risk(router / "query-level")[0]
    features = rollouts.features
    longest = int(features[:, NAMES.index("step")].max())
    signals: dict[str, tuple[Signal, list[float]]] = {
        "random-matched": (escalation.random, [float(t) for t in np.linspace(0.1, 0.9, count)]),
        "entropy": (escalation.entropy, quantile_grid(features[:, escalation.ENTROPY], count)),
        "verifier": (escalation.verifier, quantile_grid(-first_scores(features), count)),
        "time": (escalation.time, [k - 0.5 for k in _spread(1, longest, count)]),
        "repeat": (escalation.repeat, [0.5, 1.5, 2.5]),
        "query-level": (
            QueryLevel(query_level),
            quantile_grid(query_level.risks(first_steps(rollouts).features), count),
        ),
    }
    for row, of in (("failure-risk", "risk"), ("failure-no-cvar", "risk-no-cvar")):
        signals[row] = (Risk(models[of]), quantile_grid(models[of].risks(features), count))
    for row, model in models.items():
        signals[row] = (Benefit(model), quantile_grid(model.benefits(features), count))
    rules = [Rule("slm", escalation.random, NEVER, keep=True), Rule("llm", escalation.random, ALWAYS)]
    for row, (signal, grid) in signals.items():
        own = [operating[row]] if row in operating else []
        rules += [Rule(row, signal, threshold) for threshold in sorted({*grid, *own})]
    return rules, models


def _spread(first: int, last: int, count: int) -> list[int]:
    return sorted({round(k) for k in np.linspace(first, max(first, last), count)})


def ablated(router: Path, test: Rollouts, profile: StepRouterProfile, seed: int) -> dict[str, dict[str, float]]:
    """Brier and AUC on the test episodes of routers refitted without a group of features (held constant)."""
    section = profile.router
    settings = RiskSettings(alpha=section.alpha, epsilon=section.epsilon, steps=section.steps)
    train, holdout = (read_rollouts(router / ROLLOUTS, name) for name in ("train", "holdout"))
    failed = test.failed[test.episode]
    weight = 1.0 / np.bincount(test.episode)[test.episode] / len(test.failed)
    found = {}
    for group, names in {"nothing": (), **GROUPS}.items():
        columns = [NAMES.index(name) for name in names if name != "evidence"]  # the flag says how to read the others
        model, _ = fit(_held(train, columns), None, _held(holdout, columns), settings, seed)
        risks = model.risks(_held(test, columns).features)
        found[group] = {
            "brier": float((weight * (risks - failed) ** 2).sum()),
            "auc": float(roc_auc_score(failed, risks, sample_weight=weight)),
        }
    return found


def _held(rollouts: Rollouts, columns: Sequence[int]) -> Rollouts:
    features = rollouts.features.copy()
    features[:, list(columns)] = 0.0
    return Rollouts(features, rollouts.episode, rollouts.failed, rollouts.seed)


def gates_of(results: StepResults) -> list[Gate]:
    """What the risk router promises, as facts: near the LLM's success, at no more escalation than the oracle's.

    The second is read off the frontier of the test episodes, with hindsight: no threshold set beforehand would stand there.
    The third is of the interval over tasks and perturbation seeds, as a router meets seeds that no test has seen.
    """
    gates = []
    rows = {row.name: row.metrics for row in results.rows}
    share = rows["risk"]["success"].mean / max(rows["llm"]["success"].mean, 1e-9)
    gates.append(Gate(name="risk success / llm success", passed=share >= 0.97, value=share, bound=0.97))
    target = next(target for target in results.targets if target.row == "risk")
    ratio = target.oracle_ratio.mean if target.oracle_ratio else None
    gates.append(
        Gate(name="escalation at 0.97 of llm / oracle's", passed=ratio is not None and ratio <= 1.0, value=ratio, bound=1.0)
    )
    skill = next(c for c in results.calibration if c.row == "risk").skill_new_seeds
    gates.append(
        Gate(
            name="brier skill under new seeds, lower end",
            passed=skill is not None and skill.low > 0,
            value=None if skill is None else skill.low,
            bound=0.0,
        )
    )
    return gates


def evaluate(
    dataset: Path, policy: Path, verifier: Path, router: Path, out: Path, profile: StepRouterProfile, seed: int
) -> None:
    """Play every row on the test split and write summary.json, report.html, table.md, episodes.jsonl and results.json.

    BadInput where ``out`` is of another profile, seed, dataset or models.
    """
    started = time.monotonic()
    inputs = {"dataset": dataset, "policy": policy, "verifier": verifier, "router": router}
    if check_stage(out, "summary.json", profile, seed, **inputs):
        return
    tasks = read_tasks(dataset)
    section, test = profile.router, tasks.splits["test"]
    seeds, each = perturbation_seeds("test", profile.evaluation.seed_pool), profile.evaluation.seeds
    work = out / "checkpoints"
    make = player(dataset, policy / "policy", verifier, section.candidates, work / "proposals")
    known = read_rollouts(router / ROLLOUTS, "holdout")
    description = load_risk(router)[1]
    operating = {"risk": operating_threshold(description)}
    rules, models = rules_of(router, known, profile.evaluation.settings, operating)
    played = play(make, rules, test, seeds, work / "rows", profile.workers, "held-out episodes", each)
    slm = [episode for episode in played if episode.row == "slm"]
    risks = {row: _risks(model, slm) for row, model in models.items()}
    if profile.evaluation.ablations:
        other, told = load_risk(router / "no-jsd")
        operating["risk-no-jsd"] = operating_threshold(told)
        without = player(dataset, policy / "policy-no-jsd", verifier, section.candidates, work / "proposals-no-jsd")
        own = alone("slm-no-jsd", work / "slm-no-jsd", without, test, seeds, each, profile.workers)
        held = with_logprobs(read_rollouts(router / "no-jsd" / ROLLOUTS, "holdout"))
        own_grid = quantile_grid(other.benefits(held.features), profile.evaluation.settings)
        grid = sorted({*own_grid, operating["risk-no-jsd"]})
        own_rules = [Rule("risk-no-jsd", Benefit(other), t) for t in grid]
        played += own
        played += play(without, own_rules, test, seeds, work / "no-jsd", profile.workers, "without the JSD term", each)
        risks["risk-no-jsd"] = _risks(other, own)
    results = build_results(
        played, operating, risks, section.c_slm, section.c_llm, section.alpha, seed, profile.evaluation.bootstrap,
        predict=models["risk"].risks, ablation=_ablation(router, slm, profile, seed), thresholds=description["thresholds"],
    )  # fmt: skip
    write_episodes(out / "episodes.jsonl", played)
    (out / "results.json").write_text(results.model_dump_json(indent=1), encoding="utf-8")
    artifacts = {name: name for name in ("report.html", "table.md", "episodes.jsonl", "results.json")}
    summary = Summary(
        pipeline="step-router", profile=profile.name, seed=seed, wall_s=round(time.monotonic() - started, 1),
        rows=results.rows, gates=gates_of(results), artifacts=artifacts,
    )  # fmt: skip
    histories = _histories(policy, verifier, router)
    constraint = constraint_told(histories["router"], section.epsilon)
    notes = [f"{HINDSIGHT} {_operating_told(results)}", f"{CVAR_ACTS} {constraint}"]
    (out / "table.md").write_text("\n\n".join([table_markdown(summary).rstrip(), *notes]) + "\n", encoding="utf-8")
    trained = (
        f"{profile.backbone.name} cloned the teacher on {len(tasks.splits['policy'])} tasks, and was tuned by DPO with the "
        f"process verifier. The risk router learnt from its failures on {len(tasks.splits['router'])} other tasks; its "
        f"thresholds come from {len(tasks.splits['threshold'])} more. {constraint}"
    )
    lineage = {
        "profile digest": profile.digest[:12],
        "risk router": str(description["model_version"]),
        "teacher": named_model() or "the environment's own expert",
    }
    write_step_report(
        results,
        summary,
        histories,
        {
            "dataset": tasks.environment,
            "date": datetime.now(UTC).date().isoformat(),
            "trained": trained,
            "lineage": lineage,
        },
        out / "report.html",
    )
    partial = out / "summary.json.partial"
    partial.write_text(summary.model_dump_json(indent=2), encoding="utf-8")
    os.replace(partial, out / "summary.json")


def _operating_told(results: StepResults) -> str:
    """The share of the oracle's escalation that `risk` needs at its own threshold, as a sentence."""
    ratio = next(target for target in results.targets if target.row == "risk").operating_ratio
    if ratio is None:
        return "The oracle escalates nothing here."
    return f"risk at its own threshold: escalation / oracle's {ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]."


def _risks(model: RiskModel, episodes: Sequence[Episode]) -> list[list[float]]:
    return [model.risks(np.array([turn.features for turn in episode.turns])).tolist() for episode in episodes]


def _ablation(router: Path, slm: Sequence[Episode], profile: StepRouterProfile, seed: int) -> dict[str, dict[str, float]]:
    test = as_rollouts(slm)
    return ablated(router, test, profile, seed) if len(np.unique(test.failed)) > 1 else {}


def _histories(policy: Path, verifier: Path, router: Path) -> dict[str, list[dict[str, Any]]]:
    """The curves of the trainings, DPO's under the report's names."""
    files = {"bc": policy / "bc-history.jsonl", "verifier": verifier / "history.jsonl",
             "dpo": policy / "history.jsonl", "router": router / "history.jsonl"}  # fmt: skip
    rows = {
        name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items() if file.is_file()
    }
    for row in rows.get("dpo", []):
        row["reward_margin"] = row.get("rewards/margins", 0.0)
    return rows
