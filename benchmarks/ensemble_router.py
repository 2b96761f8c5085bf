"""The ensemble router over several seeds, every rule with agents of its own: rows, targets, differences, specialisation.

    python benchmarks/ensemble_router.py --profile laptop --out runs/ensemble-router-bench

Each finished rule and evaluation is kept under --out and not repeated; a killed run goes on, and a later one with other
--rules trains and evaluates what is new. The seeds have questions of their own. Prints tables and writes them, with every
number, to --results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from routewright.ensemble_router.coevolve_rules import IDENTITY, coevolve_rules, read_identity
from routewright.ensemble_router.dataset import DESCRIPTION, synthesize
from routewright.ensemble_router.evaluation_run import OOD_RECORDS, RECORDS, evaluate_ensemble, evaluation_identity
from routewright.ensemble_router.pooled import Records, over_trainings, pooled_difference, read_records, tokens_saved
from routewright.ensemble_router.profile import RULES, EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.results import NEAR, SAVED, EnsembleResults, better_vote
from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.summary import ENSEMBLE_METRICS

METRICS = tuple(metric for metric in ENSEMBLE_METRICS if not metric.endswith(("tokens/ood", "query/ood")))
SERVED = "familiarity"


@dataclass(frozen=True)
class Found:
    """One seed's evaluation: its results, and each row's answers in and out of distribution."""

    seed: int
    results: EnsembleResults
    inside: dict[str, Records]
    beyond: dict[str, Records]

    def value(self, row: str, metric: str) -> float | None:
        """A row's metric; None where it has none."""
        estimates = [one.metrics[metric] for one in self.results.rows if one.name == row and metric in one.metrics]
        return estimates[0].mean if estimates else None


def run_seed(folder: Path, profile: EnsembleProfile, seed: int) -> Found:
    """All stages of one seed; what is finished is read."""
    if not (folder / "dataset" / DESCRIPTION).is_file():
        synthesize(profile, folder / "dataset", seed)
    coevolve_rules(folder / "dataset", folder / "trained", profile, seed)
    out = folder / "evaluation"
    wanted = evaluation_identity(folder / "dataset", folder / "trained", profile, seed)
    if read_identity(out) != wanted or not (out / OOD_RECORDS).is_file():
        for name in (IDENTITY, "summary.json"):  # of other rules: anew, from the answers that are kept
            (out / name).unlink(missing_ok=True)
    evaluate_ensemble(folder / "dataset", folder / "trained", out, profile, seed)
    return read_seed(out, seed)


def read_seed(evaluation: Path, seed: int) -> Found:
    """A finished evaluation."""
    results = EnsembleResults.model_validate_json((evaluation / "results.json").read_text(encoding="utf-8"))
    return Found(seed, results, read_records(evaluation / RECORDS), read_records(evaluation / OOD_RECORDS))


def tables(found: Sequence[Found]) -> str:
    """Markdown of all seeds."""
    parts = (rows_table, domains_table, target_table, pooled_table, differences_table, curve_table, specialisation_table)
    return "\n".join(line for part in parts for line in part(found)) + "\n"


def _head(title: str, columns: Sequence[str]) -> list[str]:
    return [f"\n**{title}**\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _names(found: Sequence[Found]) -> list[str]:
    return list(dict.fromkeys(row.name for one in found for row in one.results.rows))


def _over_seeds(found: Sequence[Found], row: str, metric: str) -> str:
    values = [value for one in found if (value := one.value(row, metric)) is not None]
    return f"{np.mean(values):.3f} ({min(values):.3f}–{max(values):.3f})" if values else ""


def _signed(d: Estimate) -> str:
    return f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def rows_table(found: Sequence[Found]) -> Iterator[str]:
    """Every row's metrics, mean over the seeds and range."""
    yield from _head("Rows, mean over seeds (range)", ["row", *METRICS])
    for name in _names(found):
        yield f"| {name} | {' | '.join(_over_seeds(found, name, metric) for metric in METRICS)} |"


def domains_table(found: Sequence[Found]) -> Iterator[str]:
    """Accuracy by domain: what is to be had for nothing, the start, and what came of it."""
    domains = list(dict.fromkeys(d for one in found for d in (*one.results.domains, *one.results.ood_domains)))
    present = _names(found)
    rows = [name for name in ("majority", "base", "warm", "warm:routed", SERVED) if name in present]
    yield from _head("Accuracy by domain, mean over seeds (range)", ["domain", *rows])
    for domain in domains:
        yield f"| {domain} | {' | '.join(_over_seeds(found, row, f'accuracy/{domain}') for row in rows)} |"


def target_table(found: Sequence[Found]) -> Iterator[str]:
    """Is familiarity within a point of the better of top-2 and all, with 40 % fewer tokens? By seed, then pooled."""
    title = f"Target: accuracy at least the better vote's − {NEAR:g} with ≥ {SAVED:.0%} fewer tokens, paired 95 % intervals"
    yield from _head(title, ["seed", "better of top-2 and all", "accuracy − its", "tokens saved", "reached"])
    for some, label in [*(([one], str(one.seed)) for one in found), *([(found, "pooled")] if len(found) > 1 else [])]:
        means = {row: [one.value(row, "accuracy") for one in some] for row in _names(some)}
        better = better_vote({row: float(np.mean(v)) for row, v in means.items() if None not in v})  # type: ignore[arg-type]
        pairs = [(one.inside[SERVED], one.inside[better]) for one in some]
        near = pooled_difference([(a.reward, b.reward) for a, b in pairs], 0)
        saved = tokens_saved([(a.tokens, b.tokens) for a, b in pairs], 0)
        reached = "yes" if near.mean >= -NEAR - 1e-9 and saved.mean >= SAVED else "no"
        yield f"| {label} | {better} | {_signed(near)} | {saved.mean:.1%} [{saved.low:.1%}, {saved.high:.1%}] | {reached} |"


def pooled_table(found: Sequence[Found]) -> Iterator[str]:
    """Differences pooled over the seeds."""
    yield from _head(
        "familiarity minus another row, accuracy, mean over seeds; 95 % intervals: over questions of these trainings, and "
        "(t) over trainings",
        ["row", "in distribution", "over trainings", "out of distribution", "over trainings"],
    )

    def cells(name: str, parts: Sequence[dict[str, Records]]) -> list[str]:
        if not all(name in part and SERVED in part for part in parts):
            return ["", ""]
        pairs = [(part[SERVED].reward, part[name].reward) for part in parts]
        over = over_trainings(pairs) if len(pairs) > 1 else None
        return [_signed(pooled_difference(pairs, 0)), f"[{over.low:+.3f}, {over.high:+.3f}]" if over else ""]

    for name in _names(found):
        line = [*cells(name, [one.inside for one in found]), *cells(name, [one.beyond for one in found])]
        if name != SERVED and any(line):
            yield f"| {name} | {' | '.join(line)} |"


def differences_table(found: Sequence[Found]) -> Iterator[str]:
    """Differences of each seed, and how many questions would separate the two rows."""
    columns = ["seed", "row", "questions", "difference", "would separate"]
    yield from _head("familiarity minus another row, accuracy, paired 95 % intervals", columns)
    for one in found:
        for c in one.results.comparisons:
            wanted = "" if c.questions is None else f"{c.questions:,}"
            where = "out of distribution" if c.ood else "in distribution"
            yield f"| {one.seed} | {c.b} | {where} | {_signed(c.difference)} | {wanted} |"


def curve_table(found: Sequence[Found]) -> Iterator[str]:
    """Accuracy and tokens of the co-evolved pair over the cut-off."""
    yield from _head("The co-evolved pair over τ", ["seed", "τ", "accuracy", "tokens", "agents"])
    for one in found:
        for p in one.results.curve:
            accuracy = f"{p.accuracy.mean:.3f} [{p.accuracy.low:.3f}, {p.accuracy.high:.3f}]"
            mark = " (its own)" if p.tau == one.results.tau else ""
            yield f"| {one.seed} | {p.tau:g}{mark} | {accuracy} | {p.tokens:.1f} | {p.agents:.2f} |"


def specialisation_table(found: Sequence[Found]) -> Iterator[str]:
    """Bits of agent and domain, and whether accuracy differs by both."""
    columns = ["seed", "bits", "untrained router's", "p", "p of accuracy by agent and domain"]
    yield from _head("Specialisation", columns)
    for one in found:
        s = one.results.specialisation
        yield f"| {one.seed} | {s.information:.3f} | {s.initial:.3f} | {s.p:.3f} | {s.interaction_p:.3f} |"


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
    found: list[Found] = []
    for seed in arguments.seeds:
        found.append(run_seed(arguments.out / f"seed{seed}", profile, seed))
        command = f"python benchmarks/ensemble_router.py --profile {arguments.profile} --rules {' '.join(arguments.rules)}"
        seeds = [one.seed for one in found]
        text = f"`{command}`, seeds {seeds}, {os.cpu_count()} cores {platform.machine()}\n{tables(found)}"
        print(text, flush=True)
        if arguments.results:
            everything: list[dict[str, Any]] = [{"seed": f.seed, **json.loads(f.results.model_dump_json())} for f in found]
            arguments.results.with_suffix(".md").write_text(text, encoding="utf-8")
            arguments.results.with_suffix(".json").write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
