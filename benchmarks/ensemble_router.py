"""The ensemble router over several seeds, every rule with agents of its own: rows, differences, specialisation.

    python benchmarks/ensemble_router.py --profile laptop --out runs/ensemble-router-bench

Each finished rule and evaluation is kept under --out and not repeated; a killed run goes on. The seeds have questions of
their own. Prints tables and writes them, with every number, to --results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routewright.ensemble_router.coevolve_rules import coevolve_rules
from routewright.ensemble_router.dataset import DESCRIPTION, synthesize
from routewright.ensemble_router.evaluation_run import evaluate_ensemble
from routewright.ensemble_router.profile import RULES, EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.results import EnsembleResults
from routewright.evaluation.summary import ENSEMBLE_METRICS

METRICS = tuple(metric for metric in ENSEMBLE_METRICS if not metric.endswith(("tokens/ood", "query/ood")))


def run_seed(folder: Path, profile: EnsembleProfile, seed: int) -> EnsembleResults:
    """All stages of one seed; what is finished is read."""
    if not (folder / "dataset" / DESCRIPTION).is_file():
        synthesize(profile, folder / "dataset", seed)
    coevolve_rules(folder / "dataset", folder / "trained", profile, seed)
    evaluate_ensemble(folder / "dataset", folder / "trained", folder / "evaluation", profile, seed)
    return EnsembleResults.model_validate_json((folder / "evaluation" / "results.json").read_text(encoding="utf-8"))


def tables(found: Sequence[tuple[int, EnsembleResults]]) -> str:
    """Markdown of all seeds."""
    lines = [
        "\n**Rows**, mean over seeds (range)\n",
        "| row | " + " | ".join(METRICS) + " |",
        "|---" * (len(METRICS) + 1) + "|",
    ]
    for name in [row.name for row in found[0][1].rows]:
        cells = []
        for metric in METRICS:
            values = [
                row.metrics[metric].mean for _, results in found for row in results.rows
                if row.name == name and metric in row.metrics
            ]  # fmt: skip
            cells.append(f"{np.mean(values):.3f} ({min(values):.3f}–{max(values):.3f})" if values else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "\n**familiarity minus another row**, accuracy, paired 95 % intervals\n",
        "| seed | row | questions | difference | would separate |",
        "|---|---|---|---|---|",
    ]
    for seed, results in found:
        for c in results.comparisons:
            d, where = c.difference, "out of distribution" if c.ood else "in distribution"
            wanted = "" if c.questions is None else f"{c.questions:,}"
            lines.append(f"| {seed} | {c.b} | {where} | {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}] | {wanted} |")
    lines += [
        "\n**Specialisation**\n",
        "| seed | bits | untrained router's | p | p of accuracy by agent and domain |",
        "|---|---|---|---|---|",
    ]
    for seed, results in found:
        s = results.specialisation
        lines.append(f"| {seed} | {s.information:.3f} | {s.initial:.3f} | {s.p:.3f} | {s.interaction_p:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="write the tables and all numbers to this .md and .json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rules", nargs="+", default=list(RULES), help="rules that train agents of their own")
    arguments = parser.parse_args()
    shipped = load_ensemble_profile(arguments.profile).model_dump()
    shipped["coevolve"]["rules"] = arguments.rules
    profile = EnsembleProfile.model_validate(shipped)
    found: list[tuple[int, EnsembleResults]] = []
    for seed in arguments.seeds:
        found.append((seed, run_seed(arguments.out / f"seed{seed}", profile, seed)))
        command = f"python benchmarks/ensemble_router.py --profile {arguments.profile} --rules {' '.join(arguments.rules)}"
        text = f"`{command}`, seeds {[s for s, _ in found]}, {os.cpu_count()} cores {platform.machine()}\n{tables(found)}"
        print(text, flush=True)
        if arguments.results:
            everything: list[dict[str, Any]] = [{"seed": s, **json.loads(r.model_dump_json())} for s, r in found]
            arguments.results.with_suffix(".md").write_text(text, encoding="utf-8")
            arguments.results.with_suffix(".json").write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
