"""The run summary: metrics by hand, row order, subsets, differences, tables."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.summary import (
    SEARCH_METRICS,
    SEARCH_ROWS,
    STEP_METRICS,
    STEP_ROWS,
    Row,
    Summary,
    best_value,
    format_value,
    metric_order,
    paired_differences,
    per_agent_table,
    rich_table,
    row_order,
    summarise,
    table_markdown,
)
from tests.evaluation.simulated import AGENTS, simulate, simulated_summary


def _query(name: str, home: str, mismatch: bool) -> dict[str, Any]:
    return {"id": name, "home": home, "mismatch": mismatch}


def _record(row: str, name: str, ndcg: float, **metrics: float) -> dict[str, Any]:
    return {"row": row, "id": name, "agents": ["x"], "chosen": "x", "metrics": {"ndcg@10": ndcg, **metrics}}


QUERIES = [_query("1", "x", True), _query("2", "x", False), _query("3", "x", False), _query("4", "y", False)]
RECORDS = [
    _record("oracle", "1", 1.0), _record("oracle", "2", 1.0), _record("oracle", "3", 1.0), _record("oracle", "4", 1.0),
    _record("sft", "4", 0.8, latency_ms=40.0, date_iou=1.0), _record("sft", "1", 0.0, latency_ms=10.0),
    _record("sft", "2", 0.4, latency_ms=20.0), _record("sft", "3", 0.6, latency_ms=30.0, date_iou=0.0),
]  # fmt: skip


def test_metrics_by_hand() -> None:
    sft, oracle = summarise(RECORDS, QUERIES, seed=0)
    assert (sft.name, oracle.name) == ("sft", "oracle")
    means = {metric: estimate.mean for metric, estimate in sft.metrics.items()}
    assert means == pytest.approx(
        {
            "ndcg@10": 0.45,
            "ndcg@10/mismatch": 0.0,
            "ndcg@10/match": 0.6,
            "ndcg@10/macro": (1 / 3 + 0.8) / 2,
            "ndcg@10/std": math.sqrt((0.45**2 + 0.05**2 + 0.15**2 + 0.35**2) / 4),
            "date_iou": 0.5,
            "latency_ms/mean": 25.0,
            "latency_ms/p50": 25.0,
            "latency_ms/p99": float(np.percentile([10, 20, 30, 40], 99)),
        }
    )
    assert {m: sft.metrics[m].n for m in ("ndcg@10", "ndcg@10/match", "date_iou")} == {
        "ndcg@10": 4,
        "ndcg@10/match": 3,
        "date_iou": 2,
    }
    assert "latency_ms/mean" not in oracle.metrics


def test_empty_mismatch_subset_is_left_out() -> None:
    queries = [{**query, "mismatch": False} for query in QUERIES]
    assert all("ndcg@10/mismatch" not in row.metrics for row in summarise(RECORDS, queries, seed=0))
    found = paired_differences(RECORDS, queries, [("oracle", "sft")], ("overall", "mismatch", "match"), seed=0)
    assert [d.subset for d in found] == ["overall", "match"]


def test_order_of_records_does_not_matter() -> None:
    assert summarise(RECORDS, QUERIES, seed=0) == summarise(RECORDS[::-1], QUERIES, seed=0)


def test_paired_differences_by_hand() -> None:
    subsets = ("overall", "mismatch", "match", "macro")
    found = paired_differences(RECORDS, QUERIES, [("oracle", "sft")], subsets, seed=0)
    assert [(d.a, d.b, d.subset, d.n) for d in found] == [
        ("oracle", "sft", "overall", 4),
        ("oracle", "sft", "mismatch", 1),
        ("oracle", "sft", "match", 3),
        ("oracle", "sft", "macro", 4),
    ]
    assert [d.mean for d in found] == pytest.approx([0.55, 1.0, 0.4, (2 / 3 + 0.2) / 2])


def test_queries_about_one_document_are_resampled_together() -> None:
    queries = [{**_query(str(i), "x", False), "group": f"document {i // 5}"} for i in range(50)]
    records = [_record("sft", str(i), float(i // 5 % 2), **{"ndcg@10/routing": 0.5}) for i in range(50)]
    width = {}
    for name, some in (("grouped", queries), ("single", [{**query, "group": query["id"]} for query in queries])):
        found = summarise(records, some, seed=0)[0].metrics
        width[name] = [found[metric].high - found[metric].low for metric in ("ndcg@10", "ndcg@10/match", "ndcg@10/macro")]
    assert (np.array(width["grouped"]) > 1.8 * np.array(width["single"])).all()  # √5 if all were random


def test_the_difference_of_the_agents_alone() -> None:
    records = [
        _record(row, name, ndcg, **{"ndcg@10/routing": routing})
        for row, ndcg, routing in (("sft+rl", 0.9, 0.6), ("cori", 0.7, 0.7))
        for name in "1234"
    ]
    found = paired_differences(records, QUERIES, [("sft+rl", "cori")], ("overall", "routing"), seed=0)
    assert [(d.subset, d.n) for d in found] == [("overall", 4), ("routing", 4)]
    assert [d.mean for d in found] == pytest.approx([0.2, -0.1])


def test_paired_differences_use_the_queries_both_rows_answered() -> None:
    found = paired_differences(RECORDS[:-1], QUERIES, [("oracle", "sft")], ("overall",), seed=0)
    assert (found[0].n, found[0].mean) == (3, pytest.approx((1.0 + 0.6 + 0.2) / 3))


def test_records_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="unknown query '9'"):
        summarise([_record("sft", "9", 1.0)], QUERIES, seed=0)
    with pytest.raises(ValueError, match="two records of query '1'"):
        summarise([_record("sft", "1", 1.0)] * 2, QUERIES, seed=0)
    with pytest.raises(ValueError, match="no evaluated queries"):
        summarise([], [], seed=0)
    with pytest.raises(ValueError, match="row 'sft\\+rl'"):
        paired_differences(RECORDS, QUERIES, [("sft+rl", "sft")], ("overall",), seed=0)


def test_row_order_follows_the_contract() -> None:
    names = ["oracle", "sft+rl/judge", "sft+rl", "llm:b", "sft", "zero-shot", "random"]
    assert row_order(names) == ["random", "zero-shot", "llm:b", "sft", "sft+rl", "sft+rl/judge", "oracle"]


def test_simulated_run_has_all_rows_and_metrics() -> None:
    records, queries = simulate(60)
    rows = summarise(records, queries, seed=0)
    assert [row.name for row in rows] == list(SEARCH_ROWS)
    assert {metric for row in rows for metric in row.metrics} == set(SEARCH_METRICS)
    for row in rows:
        for estimate in row.metrics.values():
            assert estimate.low <= estimate.high


def test_per_agent_table() -> None:
    x, y = per_agent_table(RECORDS, QUERIES, seed=0)
    assert (x.agent, x.n, x.ndcg["sft"].mean) == ("x", 3, pytest.approx(1 / 3))
    assert (y.agent, y.n, y.ndcg["sft"].mean) == ("y", 1, pytest.approx(0.8))
    records, queries = simulate(40)
    names = [entry.agent for entry in per_agent_table(records, queries, seed=0)]
    assert names == [agent for agent in AGENTS if agent in names]


def test_summary_json_keeps_its_shape() -> None:
    summary, _ = simulated_summary(*simulate(30))
    data = json.loads(summary.model_dump_json())
    assert list(data) == ["pipeline", "profile", "seed", "wall_s", "rows", "gates", "artifacts"]
    assert list(data["rows"][0]) == ["name", "metrics"]
    assert list(data["rows"][0]["metrics"]["ndcg@10"]) == ["mean", "low", "high", "n"]
    assert list(data["gates"][0]) == ["name", "passed", "value", "bound"]
    assert Summary.model_validate_json(summary.model_dump_json()) == summary
    with pytest.raises(ValidationError):
        Summary.model_validate({**data, "surprise": 1})
    with pytest.raises(ValidationError):
        Summary.model_validate({**data, "wall_s": float("nan")})


def test_best_value_has_no_opinion_where_low_is_no_merit() -> None:
    rows = summarise(*simulate(60), seed=0)
    assert best_value(rows, "ndcg@10") == max(r.metrics["ndcg@10"].mean for r in rows if r.name != "oracle")
    assert best_value(rows, "latency_ms/p50") == min(
        r.metrics["latency_ms/p50"].mean for r in rows if "latency_ms/p50" in r.metrics
    )
    assert best_value(rows, "cost") is None
    assert best_value(rows, "valid") is None  # 1 for every row that has it


def test_markdown_table() -> None:
    summary, _ = simulated_summary(*simulate(60))
    lines = table_markdown(summary).splitlines()
    assert len(lines) == 2 + len(SEARCH_ROWS)
    assert len({line.count("|") for line in lines}) == 1
    ndcg = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines[2:]}
    bold = [name for name, text in ndcg.items() if text.startswith("**")]
    best = max((r for r in summary.rows if r.name != "oracle"), key=lambda r: r.metrics["ndcg@10"].mean)
    assert bold == [best.name]


def test_terminal_table_fits_sixty_columns() -> None:
    records, queries = simulate(60)
    extra = [{**r, "row": "llm:some-provider/a-very-long-model-name"} for r in records if r["row"] == "sft"]
    summary, _ = simulated_summary(records + extra, queries)
    console = Console(width=60, file=io.StringIO(), color_system=None)
    console.print(rich_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 60 for line in text.splitlines())
    for row in summary.rows:
        assert f"{row.metrics['ndcg@10'].mean:.3f}" in text
        assert row.name[:10] in text
    assert "…" not in text  # the long model name is folded


def _step_summary() -> Summary:
    """Every step row and metric; success 0.5 + 0.04 · place in the contract, the LLM's and the oracle's highest."""
    rows = []
    for place, name in enumerate(STEP_ROWS):
        success = {"slm": 0.3, "llm": 0.99, "oracle": 0.995}.get(name, 0.5 + 0.04 * place)
        values = {"success": success, "escalation": 0.314, "llm_calls_per_episode": 1.234, "cost": 61.7 + place * 20,
                  "escalated_episodes": 0.4, "worst_seed_success": success - 0.1, "cvar": 1.1 - success}  # fmt: skip
        if name.startswith("risk"):
            values |= {"brier": 0.2 - 0.01 * place, "ece": 0.05}
        metrics = {m: Estimate(mean=v, low=v - 0.02, high=v + 0.02, n=600) for m, v in reversed(values.items())}
        rows.append(Row(name=name, metrics=metrics))
    return Summary(pipeline="step-router", profile="laptop", seed=0, wall_s=1.0, rows=rows)


def test_step_rows_and_metrics_in_contract_order() -> None:
    assert row_order(reversed(STEP_ROWS)) == list(STEP_ROWS)
    assert row_order(["oracle", "slm-no-jsd", "risk", "slm"]) == ["slm", "risk", "slm-no-jsd", "oracle"]
    assert metric_order(_step_summary().rows) == list(STEP_METRICS)


def test_references_do_not_compete_and_less_failure_is_better() -> None:
    rows = _step_summary().rows
    assert best_value(rows, "success") == pytest.approx(0.5 + 0.04 * STEP_ROWS.index("risk-no-jsd"))
    assert best_value(rows, "cvar") == pytest.approx(0.6 - 0.04 * STEP_ROWS.index("risk-no-jsd"))
    assert best_value(rows, "brier") == pytest.approx(0.2 - 0.01 * STEP_ROWS.index("risk-no-jsd"))
    for metric in ("escalation", "llm_calls_per_episode", "cost", "escalated_episodes"):
        assert best_value(rows, metric) is None
    assert [format_value("cost", value) for value in (3.25, 1234.56)] == ["3.250", "1,234.6"]


def test_step_tables() -> None:
    summary = _step_summary()
    assert Summary.model_validate_json(summary.model_dump_json()) == summary
    lines = table_markdown(summary).splitlines()
    assert lines[0] == "| row | " + " | ".join(STEP_METRICS) + " |"
    assert "**0.980** [0.960, 1.000]" in lines[2 + STEP_ROWS.index("risk-no-jsd")]
    assert "**" not in lines[2 + STEP_ROWS.index("llm")]
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(rich_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    for row in summary.rows:
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [row.name])
        cost = format_value("cost", row.metrics["cost"].mean)
        assert line.split()[1:] == [
            f"{row.metrics['success'].mean:.3f}",
            f"{row.metrics['success'].low:.2f}–{row.metrics['success'].high:.2f}",
            "0.314", "1.23", cost, f"{row.metrics['worst_seed_success'].mean:.3f}",
        ]  # fmt: skip
