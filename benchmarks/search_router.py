"""Learning curve of the search router over the number of outcomes, every row on the same outcomes, several seeds.

    python benchmarks/search_router.py --pool aws-docs --profile laptop --out runs/curve

Each finished point is kept under --out and not repeated; an --out of another pool or profile is refused. Prints a table and
writes it, with every number, to --results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from routewright.config import Profile, load_profile
from routewright.errors import BadInput
from routewright.evaluation.summary import Summary
from routewright.pools.fetch import fetch_dataset
from routewright.search_router.evaluate import evaluate
from routewright.search_router.rl import train_rl
from routewright.search_router.sft import train_sft
from routewright.search_router.synthesis import synthesize

ROWS = ("intent", "outcome-lr", "sft+lr", "union-bm25", "cori", "sft", "sft+rl", "sft+rl/judge", "oracle")


def check_out(out: Path, pool: str, profile: Profile) -> None:
    """BadInput where the folder's points are of another pool or profile; a new folder is marked."""
    mark, own = out / "benchmark.json", {"pool": pool, "profile": profile.digest}
    if mark.is_file():
        known = json.loads(mark.read_text())
        if other := [name for name in own if known.get(name) != own[name]]:
            raise BadInput(f"--out {out}: holds points of another {' and '.join(other)}, expected another folder")
    elif (out / "dataset").exists():
        raise BadInput(f"--out {out}: holds points, but nothing tells of which pool and profile; expected another folder")
    out.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(own))


def with_outcomes(profile: Profile, outcomes: int, judge: bool) -> Profile:
    """The profile with RL (and the outcome baselines) on the first `outcomes` training queries."""
    rl = profile.rl.model_copy(update={"outcomes": outcomes, "also_offline_judge": judge})
    evaluation = profile.evaluation.model_copy(update={"latency_queries": 30, "zero_shot_queries": 10})
    return profile.model_copy(update={"rl": rl, "evaluation": evaluation})


def run_point(folder: Path, profile: Profile, outcomes: int, seed: int, judge: bool) -> dict[str, Any]:
    """Train and evaluate one point of the curve; the SFT policy is shared between the points of a seed."""
    sft = folder / f"seed{seed}" / "sft"
    point = folder / f"seed{seed}" / f"outcomes{outcomes}{'-judge' if judge else ''}"
    settings = with_outcomes(profile, outcomes, judge)
    train_sft(folder / "dataset", folder / "examples", sft, settings, seed)
    train_rl(folder / "dataset", folder / "examples", sft, point / "rl", settings, seed)
    evaluate(folder / "dataset", folder / "examples", sft, point / "rl", point / "evaluation", settings, seed)
    for weights in point.rglob("model.safetensors"):  # hundreds of MB a point; the records stay
        weights.unlink()
    shutil.rmtree(point / "evaluation" / "search-cache", ignore_errors=True)
    summary = Summary.model_validate_json((point / "evaluation" / "summary.json").read_text())
    differences = json.loads((point / "evaluation" / "differences.json").read_text())
    return {
        "outcomes": outcomes,
        "seed": seed,
        "rows": {row.name: {k: v.mean for k, v in row.metrics.items()} for row in summary.rows if row.name in ROWS},
        "differences": differences,
    }


def cell(points: list[dict[str, Any]], row: str, metric: str) -> str:
    """Mean over seeds, and the seeds' range where there are several."""
    values = [point["rows"][row][metric] for point in points if row in point["rows"]]
    if not values:
        return "–"
    spread = f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def difference_cell(points: list[dict[str, Any]], a: str, b: str, subset: str) -> str:
    """Mean over seeds of a paired difference and of the ends of its 95 % interval."""
    found = [d for p in points for d in p["differences"] if (d["a"], d["b"], d["subset"]) == (a, b, subset)]
    if not found:
        return "–"
    mean, low, high = (np.mean([d[key] for d in found]) for key in ("mean", "low", "high"))
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: NDCG@10 (all, mismatch) of each row, and the paired differences of sft+rl, by number of outcomes."""
    lines = []
    counts = sorted({result["outcomes"] for result in results})
    for metric in ("ndcg@10", "ndcg@10/routing", "ndcg@10/mismatch", "ndcg@10/match", "ndcg@10/macro"):
        lines += [f"\n**{metric}**, mean over seeds (range)\n", "| outcomes | " + " | ".join(ROWS) + " |"]
        lines.append("|---" * (len(ROWS) + 1) + "|")
        for count in counts:
            points = [result for result in results if result["outcomes"] == count]
            lines.append(f"| {count:,} | " + " | ".join(cell(points, row, metric) for row in ROWS) + " |")
    lines.append(
        "\n**sft+rl minus another row**, NDCG@10, mean over seeds [mean ends of the paired 95 % intervals over documents]; "
        "routing: the agents alone, without keywords and dates\n"
    )
    others = ("sft", "intent", "outcome-lr", "sft+lr", "union-bm25", "cori")
    pairs = [(b, s) for b in others for s in ("overall", "routing", "mismatch", "match")]
    pairs.append(("union-bm25", "macro"))
    lines += ["| outcomes | " + " | ".join(f"{b}, {s}" for b, s in pairs) + " |", "|---" * (len(pairs) + 1) + "|"]
    for count in counts:
        points = [result for result in results if result["outcomes"] == count]
        lines.append(f"| {count:,} | " + " | ".join(difference_cell(points, "sft+rl", b, s) for b, s in pairs) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", default="aws-docs")
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="write the table and all numbers to this .md and .json")
    parser.add_argument("--outcomes", type=int, nargs="+", default=[250, 500, 1000, 2000, 4000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--judge", action="store_true", help="also train sft+rl/judge")
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile)
    check_out(arguments.out, arguments.pool, profile)
    fetch_dataset(arguments.pool, arguments.out / "dataset")
    synthesize(arguments.out / "dataset", arguments.out / "examples", profile, 0)
    results: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for outcomes in arguments.outcomes:
            results.append(run_point(arguments.out, profile, outcomes, seed, arguments.judge))
            text = table(results)
            print(text, flush=True)
            if arguments.results:
                command = f"python benchmarks/search_router.py --pool {arguments.pool} --profile {arguments.profile}"
                seeds = sorted({result["seed"] for result in results})
                head = f"`{command}`, seeds {seeds}, {os.cpu_count()} cores {platform.machine()}\n"
                arguments.results.with_suffix(".md").write_text(head + text, encoding="utf-8")
                arguments.results.with_suffix(".json").write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        sys.exit(str(error))
