"""The step router over several seeds: rows, targets and comparisons, and how often the stated guarantee holds.

    python benchmarks/step_router.py --profile laptop --out runs/step-router-bench

Shell tasks (``--environment shell``) and programs (the path of a file of problems) have small profiles of their own:
benchmarks/profiles/step-router-shell.yaml and step-router-code.yaml.

Each finished stage is kept under --out and not repeated; an --out of another environment or profile is refused. The seeds
share the tasks. Prints tables and writes them, with every number, to --results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routewright.errors import BadInput
from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.step_report import CVAR_ACTS, HINDSIGHT, NEW_SEEDS
from routewright.step_router.bc import distill_bc
from routewright.step_router.calibration import calibrate_router
from routewright.step_router.dataset import fetch_tasks
from routewright.step_router.dpo import distill_dpo
from routewright.step_router.episodes import Episode, read_episodes
from routewright.step_router.evaluation_run import evaluate
from routewright.step_router.profile import StepRouterProfile, load_step_profile
from routewright.step_router.results import StepResults
from routewright.step_router.risk import constraint_told
from routewright.step_router.synthesis import synthesize
from routewright.step_router.thresholds import learn_then_test
from routewright.step_router.verifier import train_verifier

METRICS = ("success", "escalation", "llm_calls_per_episode", "cost", "worst_seed_success", "brier", "ece")
RESAMPLES = 200


def run_seed(folder: Path, tasks: Path, profile: StepRouterProfile, seed: int) -> StepResults:
    """All stages of one seed; what is finished is read."""
    examples, bc, verifier, policy, router, out = (
        folder / name for name in ("examples", "bc", "verifier", "policy", "router", "evaluation")
    )
    synthesize(tasks, examples, profile, seed)
    distill_bc(tasks, examples, bc, profile, seed)
    train_verifier(tasks, examples, bc, verifier, profile, seed)
    distill_dpo(tasks, examples, bc, verifier, policy, profile, seed)
    calibrate_router(tasks, policy, verifier, router, profile, seed)
    evaluate(tasks, policy, verifier, router, out, profile, seed)
    return StepResults.model_validate_json((out / "results.json").read_text())


def guarantee(episodes: Sequence[Episode], target: float, delta: float, seed: int) -> dict[str, float]:
    """How Learn-then-Test does on fresh tasks: calibrated on half of the test games, checked on the other half.

    Both halves have the same perturbation seeds, as the statement has: under other seeds it says nothing.

    ``broken``: share of resamples in which a threshold was certified and the other half failed more often than the target.
    That half is a sample too, so its own noise counts against the guarantee.
    """
    risk = [e for e in episodes if e.row == "risk" and e.threshold is not None]
    grid = sorted({float(e.threshold) for e in risk if e.threshold is not None})
    games = sorted({e.task for e in risk})
    failures = np.zeros((len(games), len(grid)))
    counts = np.zeros((len(games), len(grid)))
    for e in risk:
        at = games.index(e.task), grid.index(float(e.threshold or 0.0))
        failures[at] += not e.success
        counts[at] += 1
    losses = failures / counts
    rng = np.random.default_rng(seed)
    certified = broken = 0
    for _ in range(RESAMPLES):
        order = rng.permutation(len(games))
        first, second = order[: len(games) // 2], order[len(games) // 2 :]
        threshold = learn_then_test(losses[first], grid, target, delta, p_value="hoeffding-bentkus")
        if threshold is not None:
            certified += 1
            broken += losses[second, grid.index(threshold)].mean() > target
    return {"target": target, "delta": delta, "certified": certified / RESAMPLES, "broken": broken / RESAMPLES}


def with_interval(metric: str, estimate: Estimate, tasks: int) -> str:
    """The metric with its 95 % interval over tasks.

    Where every episode ended alike a bootstrap knows no spread: then the exact (Clopper-Pearson) interval of so many tasks.
    """
    low, high = estimate.low, estimate.high
    if metric == "success" and low == high and estimate.mean in (0.0, 1.0):
        end = 0.025 ** (1 / tasks)
        low, high = (end, 1.0) if estimate.mean else (0.0, 1 - end)
    return f"{estimate.mean:.3f} [{low:.3f}, {high:.3f}]"


def both_intervals(these: Estimate | None, new: Estimate | None) -> str:
    """A value with its interval over tasks and, behind it, that over tasks and perturbation seeds."""
    if these is None:
        return "–"
    return " ".join([f"{these.mean:.3f}", *(f"[{e.low:.3f}, {e.high:.3f}]" for e in (these, new) if e is not None)])


def tables(found: Sequence[tuple[int, StepResults, list[dict[str, float]]]]) -> str:
    """Markdown of all seeds."""
    first = found[0][1]
    told = "mean over seeds (range)" if len(found) > 1 else "95 % intervals over tasks"
    lines = [
        f"\n**Rows**, {told}; {first.episodes} episodes of {first.tasks} test tasks, {first.seeds} perturbation seeds\n",
        "| row | " + " | ".join(METRICS) + " |",
        "|---" * (len(METRICS) + 1) + "|",
    ]
    for name in [row.name for row in first.rows]:
        cells = []
        for metric in METRICS:
            estimates = [
                row.metrics[metric] for _, results, _ in found for row in results.rows
                if row.name == name and metric in row.metrics
            ]  # fmt: skip
            values = [estimate.mean for estimate in estimates]
            if len(estimates) == 1:
                cells.append(with_interval(metric, estimates[0], first.tasks))
            else:
                cells.append(f"{np.mean(values):.3f} ({min(values):.3f}–{max(values):.3f})" if values else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "\n**Targets of risk**\n",
        f"{HINDSIGHT} {NEW_SEEDS}\n",
        "| seed | success / llm's | escalation / oracle's | at 0.97: escalation | that / oracle's | Brier skill |",
        "|---|---|---|---|---|---|",
    ]
    for seed, results, _ in found:
        target = next(t for t in results.targets if t.row == "risk")
        skill = next(c for c in results.calibration if c.row == "risk")
        pairs = [(getattr(target, name), new) for name, new in target.new_seeds.items()]
        pairs.append((skill.skill, skill.skill_new_seeds))
        lines.append(f"| {seed} | " + " | ".join(both_intervals(*pair) for pair in pairs) + " |")
    lines += [
        "\n**One row minus another**, paired 95 % intervals over tasks, and over tasks and perturbation seeds\n",
        f"{CVAR_ACTS}\n",
        "| seed | row | at | difference, these seeds | new seeds |",
        "|---|---|---|---|---|",
    ]
    for seed, results, _ in found:
        for c in results.comparisons:
            d, new = c.difference, "" if c.new_seeds is None else f"[{c.new_seeds.low:+.3f}, {c.new_seeds.high:+.3f}]"
            lines.append(f"| {seed} | {c.a} − {c.b} | {c.at} | {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}] | {new} |")
    lines += [f"\n**Guarantee** (Learn-then-Test over games), {RESAMPLES} splits of the test games, under the same seeds\n",
              "| seed | target failure rate | δ | certified | broken |", "|---|---|---|---|---|"]  # fmt: skip
    for seed, _, checks in found:
        lines += [
            f"| {seed} | {c['target']:.2f} | {c['delta']:.2f} | {c['certified']:.3f} | {c['broken']:.3f} |" for c in checks
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", default="textworld")
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="write the tables and all numbers to this .md and .json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    profile = load_step_profile(arguments.profile)
    fetch_tasks(arguments.environment, arguments.out / "dataset", profile)
    found: list[tuple[int, StepResults, list[dict[str, float]]]] = []
    told: list[str] = []
    for seed in arguments.seeds:
        folder = arguments.out / f"seed{seed}"
        results = run_seed(folder, arguments.out / "dataset", profile, seed)
        episodes = read_episodes(folder / "evaluation" / "episodes.jsonl")
        checks = [guarantee(episodes, target, profile.router.delta, seed) for target in (0.1, 0.2, 0.3)]
        found.append((seed, results, checks))
        history = [json.loads(line) for line in (folder / "router" / "history.jsonl").read_text().splitlines()]
        told.append(f"Seed {seed}: {constraint_told(history, profile.router.epsilon)}\n")
        source = Path(arguments.environment).name
        command = f"python benchmarks/step_router.py --environment {source} --profile {arguments.profile}"
        text = f"`{command}`, seeds {[s for s, _, _ in found]}, {os.cpu_count()} cores {platform.machine()}\n"
        text += tables(found) + "\n**CVaR constraint**\n\n" + "".join(told)
        print(text, flush=True)
        if arguments.results:
            everything: list[dict[str, Any]] = [
                {"seed": s, "guarantee": checks, **json.loads(r.model_dump_json())} for s, r, checks in found
            ]
            arguments.results.with_suffix(".md").write_text(text, encoding="utf-8")
            arguments.results.with_suffix(".json").write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        sys.exit(str(error))
