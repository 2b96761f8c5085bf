"""Output folders of ``routewright run`` with made-up numbers, small enough to be judged in no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from routewright.evaluation.summary import Summary, summarise


def write_search_run(
    out: Path, version: str = "m1", quality: float = 0.8, best_single: float = 0.4, latency_ms: float | None = 20.0
) -> Path:
    """A search run over sixty queries of three agents; ``version`` decides the content of the model's files."""
    model, evaluation = out / "model", out / "evaluation"
    for folder in (model, evaluation):
        folder.mkdir(parents=True, exist_ok=True)
    agents = ["a", "b", "c"]
    described = {"router": "search-router", "model_version": version, "pool": "toy", "agents": agents}
    (model / "router.json").write_text(json.dumps(described))
    (model / "model.safetensors").write_text(f"weights of {version}")
    queries: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    for i in range(60):
        home = agents[i % 3]
        queries.append({"id": f"q{i}", "mismatch": i % 4 == 0, "home": home, "best_agents": [home]})
        for row, value in (("sft+rl", quality), ("best-single", best_single)):
            metrics = {"ndcg@10": value + 0.1 * (i % 5) / 5, "cost": 1.0, "valid": 1.0}
            metrics |= {} if latency_ms is None else {"latency_ms": latency_ms}
            scores = {name: 0.95 if name == home else 0.02 for name in agents}
            records.append(
                {"row": row, "id": f"q{i}", "chosen": home, "agents": [home], "scores": scores, "metrics": metrics}
            )
    rows = summarise(records, queries, 0)
    artifacts = {"model": "model", "evaluate": "evaluation"}
    summary = Summary(pipeline="search-router", profile="smoke", seed=0, wall_s=1.0, rows=rows, artifacts=artifacts)
    for folder in (out, evaluation):
        (folder / "summary.json").write_text(summary.model_dump_json())
    for name, lines in (("queries", queries), ("records", records)):
        (evaluation / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out
