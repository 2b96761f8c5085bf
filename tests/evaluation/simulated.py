"""Simulated evaluation records with the shape of a real run: eleven agents, mismatches, rows of growing skill."""

from __future__ import annotations

from typing import Any

import numpy as np

from routewright.evaluation.search_report import ReportExtra
from routewright.evaluation.summary import SEARCH_ROWS, Difference, Gate, Summary, paired_differences, summarise

AGENTS = ["compute", "storage", "database", "networking", "security", "analytics", "machine-learning", "messaging",
          "developer-tools", "iot", "general"]  # fmt: skip
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> & how do I \"quote\" שלום 🙂"
_TEXTS = [
    "how do I create a subnet in two availability zones",
    "rotate a database password automatically without downtime",
    "ThrottlingException when I list objects, what is the limit?",
    "copy snapshots between regions created since March 2024",
    "attach a policy to a role used by a notebook",
    "send a message to several queues at once",
]
# Chance of the best agent as the top choice: (on mismatch queries, on the others).
_SKILL = {"random": (0.09, 0.09), "best-single": (0.2, 0.3), "all-agents": (0.5, 0.5), "intent": (0.05, 0.8),
          "outcome-lr": (0.5, 0.8), "sft+lr": (0.55, 0.84), "union-bm25": (0.45, 0.7), "cori": (0.4, 0.6),
          "zero-shot": (0.1, 0.4), "sft": (0.15, 0.86), "sft+rl": (0.75, 0.88), "oracle": (1.0, 1.0)}  # fmt: skip
PAIRS = [("sft+rl", "sft"), ("sft+rl", "intent"), ("sft+rl", "outcome-lr"), ("sft+rl", "sft+lr")]


def simulate(n: int, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records and queries of ``n`` held-out queries."""
    rng = np.random.default_rng(seed)
    queries, records = [], []
    for i in range(n):
        best = AGENTS[min(10, int(rng.gamma(2.0, 2.0)))]
        outcome = {agent: round(float(rng.beta(1, 9)), 4) for agent in AGENTS}
        outcome[best] = round(float(0.5 + 0.5 * rng.random()), 4)
        mismatch = bool(rng.random() < 0.22)
        labeller = best if not mismatch else AGENTS[(AGENTS.index(best) + 3) % len(AGENTS)]
        queries.append({"id": f"q{i}", "query": HOSTILE if i % 7 == 0 else _TEXTS[i % len(_TEXTS)], "style": "how-to",
                        "home": best, "best_agent": best, "best_agents": [best], "labeller_agent": labeller,
                        "mismatch": mismatch, "outcome": outcome})  # fmt: skip
        for row in SEARCH_ROWS:
            right = rng.random() < _SKILL[row][0 if mismatch else 1]
            chosen = best if right else labeller if mismatch else AGENTS[int(rng.integers(len(AGENTS)))]
            agents = AGENTS if row == "all-agents" else [chosen]
            metrics: dict[str, float] = {
                "ndcg@10": float(np.clip(outcome[chosen] + rng.normal(0, 0.02), 0, 1)),
                "ndcg@10/routing": outcome[chosen],
                "agent_f1": 2 * float(best in agents) / (len(agents) + 1),
                "exact_set": int(agents == [best]),
                "cost": len(agents),
                "agents_per_query": len(agents),
            }
            record = {"row": row, "id": f"q{i}", "agents": agents, "chosen": chosen, "metrics": metrics}
            if row in ("sft", "sft+rl", "zero-shot"):
                metrics |= {
                    "valid": 1,
                    "valid/unconstrained": int(rng.random() < 0.9),
                    "keyword_precision": float(rng.beta(6, 2)),
                    "latency_ms": float(rng.gamma(30, 1.4)),
                }
                if i % 3 == 0:
                    metrics["date_iou"] = float(rng.random() < 0.9)
                logits = rng.normal(-3, 1, len(AGENTS)) + 4.5 * (np.array(AGENTS) == chosen)
                record["scores"] = dict(zip(AGENTS, (1 / (1 + np.exp(-logits))).round(4).tolist(), strict=True))
            elif row in ("intent", "outcome-lr"):
                metrics["latency_ms"] = float(rng.gamma(9, 0.1))
            records.append(record)
    return records, queries


def histories(seed: int = 0) -> dict[str, list[dict[str, float]]]:
    """Training histories that look like training."""
    rng = np.random.default_rng(seed)
    sft = [{"step": s, "loss": 0.2 + 2 * float(np.exp(-s / 30)) + 0.05 * float(rng.normal())} for s in range(1, 201)]
    rl = [
        {
            "step": s,
            "reward": 0.75 - 0.35 * float(np.exp(-s / 40)) + 0.06 * float(rng.normal()),
            "kl": 0.3 * (1 - float(np.exp(-s / 60))) + 0.02 * float(rng.normal()),
            "entropy": 1.2 * float(np.exp(-s / 80)) + 0.1,
            "agents_per_query": 2.5 - float(s) / 200,
        }
        for s in range(1, 161)
    ]
    return {"sft": sft, "rl": rl}


def simulated_summary(
    records: list[dict[str, Any]], queries: list[dict[str, Any]], seed: int = 0
) -> tuple[Summary, list[Difference]]:
    """A summary with gates, and the paired differences of the contract."""
    summary = Summary(
        pipeline="search-router",
        profile="laptop",
        seed=seed,
        wall_s=712.4,
        rows=summarise(records, queries, seed),
        gates=[
            Gate(name="sft+rl above sft on mismatch", passed=True, value=0.21, bound=0.0),
            Gate(name="decision p99 (ms)", passed=False, value=131.0, bound=120.0),
            Gate(name="shared pool", passed=False, value=None, bound=0.465),
        ],
        artifacts={"report": "report.html"},
    )
    return summary, paired_differences(records, queries, PAIRS, ("overall", "mismatch", "match"), seed)


EXTRA: ReportExtra = {
    "pool": "aws-docs",
    "date": "2026-03-05 14:20 UTC",
    "trained": "SmolLM2-135M was fine-tuned on 2,400 intent-labelled queries, then trained by REINFORCE++ on 1,000 "
    "outcomes of the agents' own search. It reads the agents' cards and answers with agents, keywords and dates.",
    "lineage": {
        "git sha": "0123456789abcdef0123456789abcdef01234567",
        "dataset md5": "d41d8cd98f00b204e9800998ecf8427e",
        "config hash": "9f86d081884c7d659a2feaa0c55ad015",
        "seeds": "0",
    },
}
