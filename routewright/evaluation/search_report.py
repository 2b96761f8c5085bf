"""The search router's report: one self-contained page of ranking quality, agents, latency and what RL changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from markupsafe import Markup

from routewright.evaluation import plots
from routewright.evaluation.calibration import brier_score, expected_calibration_error
from routewright.evaluation.report import (
    DataFile,
    Section,
    TableRow,
    Tile,
    block,
    csv_bytes,
    curve_caption,
    curve_grid,
    downloads_html,
    figure_html,
    gate_section,
    jsonl_gz,
    lineage_section,
    render_page,
    table_html,
)
from routewright.evaluation.summary import (
    AgentNdcg,
    Difference,
    Row,
    Summary,
    best_value,
    format_value,
    metric_order,
    per_agent_table,
    records_by_row,
)

_FIXED, _BROKEN = 10, 5
_QUERY_SHOWN = 600
_CURVES = {"sft": ("loss",), "rl": ("reward", "kl", "entropy", "agents_per_query")}


class ReportExtra(TypedDict):
    """What the records do not say: the pool's name, the run's date, what was trained (two sentences), the lineage."""

    pool: str
    date: str
    trained: str
    lineage: dict[str, str]


def _ndcg_section(summary: Summary) -> Section:
    trained, oracle = summary.row("sft+rl"), summary.row("oracle")
    caption = "Mean NDCG@10 of every row over all held-out queries. Where bars overlap, read the paired differences."
    if trained and oracle and oracle.metrics["ndcg@10"].mean > 0:
        share = trained.metrics["ndcg@10"].mean / oracle.metrics["ndcg@10"].mean
        caption += f" sft+rl reaches {share:.0%} of the oracle, the best single agent of each query (hollow dot)."
    figure = figure_html("ndcg", plots.ndcg_figure(summary.rows), "NDCG@10 of each row with 95 % interval")
    return Section("Ranking quality", figure, caption)


def _mismatch_section(summary: Summary) -> Section | None:
    rows = [row for row in summary.rows if {"ndcg@10/mismatch", "ndcg@10/match"} & set(row.metrics)]
    if not any("ndcg@10/mismatch" in row.metrics for row in rows):
        return None
    some = next(row for row in rows if "ndcg@10/mismatch" in row.metrics)
    size, everything = some.metrics["ndcg@10/mismatch"].n, some.metrics["ndcg@10"].n
    figure = figure_html("mismatch", plots.mismatch_figure(rows), "NDCG@10 on mismatch queries and on all others")
    caption = (
        f"On {size} of {everything} queries ({size / everything:.0%}) the frozen intent labeller picks an agent at "
        "least 0.2 NDCG@10 below the best one: intent points to the wrong place. A gain there should not be paid "
        "for on the rest."
    )
    return Section("Mismatch queries and the rest", figure, caption)


def _difference_section(differences: Sequence[Difference]) -> Section | None:
    if not differences:
        return None
    rows = []
    for d in differences:
        kind, word = ("good", "above") if d.low > 0 else ("bad", "below") if d.high < 0 else ("", "no clear difference")
        mean, low, high = (f"{value:+.3f}".replace("-", "−") for value in (d.mean, d.low, d.high))
        cells = [f"{d.a} − {d.b}", d.subset, mean, f"[{low}, {high}]", block("verdict", word, kind), f"{d.n:,}"]
        rows.append(TableRow(cells, mark=d.subset == "overall"))
    table = table_html(["rows", "queries", "difference", "95 % interval", "verdict", "n"], rows, left=2)
    caption = (
        "NDCG@10 of the first row minus the second on the same queries. An interval on one side of zero is a "
        "difference that resampling the queries does not undo; those about one document are resampled together. "
        "macro: every agent weighs the same; routing: the agents alone, searched with the query as it came, without a "
        "row's keywords and dates."
    )
    return Section("Paired differences", table, caption)


def _table_section(summary: Summary) -> Section:
    metrics = metric_order(summary.rows)
    best = {metric: best_value(summary.rows, metric) for metric in metrics}

    def cell(row: Row, metric: str) -> str | Markup:
        estimate = row.metrics.get(metric)
        if estimate is None:
            return ""
        interval = f"{estimate.low:.3f}–{estimate.high:.3f}" if metric == "ndcg@10" else ""
        bold = row.name != "oracle" and estimate.mean == best[metric]
        return block("value", format_value(metric, estimate.mean), interval, bold)

    rows = [TableRow([row.name, *(cell(row, m) for m in metrics)], mark=row.name == "sft+rl") for row in summary.rows]
    caption = "Bold: best row but the oracle. Empty: the metric does not apply. All intervals are in rows.csv below."
    return Section("All metrics", table_html(["row", *metrics], rows), caption)


def _confusion_section(
    records: Sequence[Mapping[str, Any]], queries: Sequence[Mapping[str, Any]], row: str, agents: Sequence[str]
) -> Section:
    counts = plots.confusion_matrix(records, queries, row, agents)
    right = counts.trace() / max(1, counts.sum())
    figure = figure_html("confusion", plots.confusion_figure(counts, agents), f"best agent against {row}'s top agent")
    caption = (
        f"Each line: the queries that one agent answers best; columns: the agents that {row} ranked first, in percent. "
        f"{right:.0%} lie on the diagonal; an agent within 0.05 of the best also counts as an error here."
    )
    return Section("Chosen and best agent", figure, caption)


def _agent_section(table: Sequence[AgentNdcg], rows: Sequence[Row]) -> Section:
    # The trained rows first: the table is wider than the page.
    names = [row.name for row in reversed(rows)]
    lines = []
    for agent in table:
        values = [agent.ndcg[name].mean for name in names if name != "oracle" and name in agent.ndcg]
        cells: list[str | Markup] = [agent.agent, f"{agent.n:,}"]
        for name in names:
            estimate = agent.ndcg.get(name)
            bold = estimate is not None and name != "oracle" and estimate.mean == max(values)
            cells.append("" if estimate is None else block("value", f"{estimate.mean:.3f}", "", bold))
        lines.append(TableRow(cells))
    caption = "NDCG@10 by the agent whose collection the query comes from. Bold: the best row other than the oracle."
    return Section("By agent", table_html(["agent", "queries", *names], lines), caption)


def _training_sections(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Section]:
    titles = {
        "sft": ("Supervised fine-tuning", "Loss on the labelled decisions."),
        "rl": (
            "Reinforcement learning",
            "Reward should rise and level off; KL says how far the policy has moved from SFT; entropy near zero means "
            "that it has stopped exploring.",
        ),
    }
    sections = []
    for stage, (title, caption) in titles.items():
        if history := histories.get(stage):
            curves = curve_grid(history, _CURVES[stage], f"{stage}-curve")
            sections.append(Section(title, curves, f"{caption} {curve_caption(history)}"))
    return sections


def _latency_section(by_row: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Section | None:
    latencies = {
        name: times
        for name, answers in by_row.items()
        if (times := [r["metrics"]["latency_ms"] for r in answers.values() if r["metrics"].get("latency_ms")])
    }
    if not latencies:
        return None
    figure = figure_html("latency", plots.latency_figure(latencies), "share of decisions made within a time, by row")
    return Section("Latency", figure, "Time of one decision at batch size 1, without the search. Left is faster.")


def _reliability_section(
    by_row: Mapping[str, Mapping[str, Mapping[str, Any]]], queries: Sequence[Mapping[str, Any]]
) -> Section | None:
    best = {query["id"]: set(query["best_agents"]) for query in queries}
    predictions = {}
    for name in ("outcome-lr", "sft", "sft+rl"):
        pairs = [
            (probability, int(agent in best[query]))
            for query, record in by_row.get(name, {}).items()
            for agent, probability in (record.get("scores") or {}).items()
        ]
        if pairs:
            probabilities, outcomes = (list(column) for column in zip(*pairs, strict=True))
            predictions[name] = (probabilities, outcomes)
    if not predictions:
        return None
    numbers = "; ".join(
        f"{name}: Brier {brier_score(*pair):.3f}, ECE {expected_calibration_error(*pair):.3f}"
        for name, pair in predictions.items()
    )
    caption = (
        "The probability given to an agent against how often that agent was within 0.05 NDCG@10 of the best, over all "
        f"agents and queries; on the diagonal a probability can be taken at its word. {numbers}."
    )
    figure = figure_html("reliability", plots.reliability_figure(predictions), "predicted probability, observed share")
    return Section("Reliability of the scores", figure, caption)


def _case(query: Mapping[str, Any], sft: Mapping[str, Any], rl: Mapping[str, Any]) -> dict[str, Any]:
    best, outcome = set(query["best_agents"]), query.get("outcome") or {}

    def verdict(agent: str) -> Markup:
        return block("verdict", "right", "good") if agent in best else block("verdict", "wrong", "bad")

    def step(label: str, record: Mapping[str, Any]) -> dict[str, Any]:
        # The top agent first: it is the one that is right or wrong.
        agents = [record["chosen"], *(agent for agent in record["agents"] if agent != record["chosen"])]
        ndcg = f"{record['metrics']['ndcg@10']:.3f}"
        return {"label": label, "agents": ", ".join(agents), "ndcg": ndcg, "verdict": verdict(record["chosen"])}

    labeller = query["labeller_agent"]
    text = query["query"]
    return {
        "query": text if len(text) <= _QUERY_SHOWN else text[:_QUERY_SHOWN] + " …",
        "steps": [
            {
                "label": "intent labeller",
                "agents": labeller,
                "ndcg": f"{outcome[labeller]:.3f}" if labeller in outcome else "",
                "verdict": verdict(labeller),
            },
            step("sft", sft),
            step("sft+rl", rl),
        ],
        "note": f"best: {query['best_agent']}"
        + (f" {outcome[query['best_agent']]:.3f}" if query["best_agent"] in outcome else "")
        + (" · a mismatch query" if query["mismatch"] else " · not a mismatch query"),
    }


def changed_by_rl(
    by_row: Mapping[str, Mapping[str, Mapping[str, Any]]], queries: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Ids of the queries that RL fixed (sft's top agent wrong, sft+rl's right) and broke, largest change first.

    Right is an agent within 0.05 NDCG@10 of the best; the change is that of NDCG@10, ties in the order of the queries.
    """
    fixed, broken = [], []
    for query in queries:
        sft, rl = by_row.get("sft", {}).get(query["id"]), by_row.get("sft+rl", {}).get(query["id"])
        if sft is None or rl is None:
            continue
        before, after = (record["chosen"] in query["best_agents"] for record in (sft, rl))
        gain = rl["metrics"]["ndcg@10"] - sft["metrics"]["ndcg@10"]
        if after and not before:
            fixed.append((-gain, query["id"]))
        elif before and not after:
            broken.append((gain, query["id"]))
    fixed.sort(key=lambda pair: pair[0])
    broken.sort(key=lambda pair: pair[0])
    return [name for _, name in fixed], [name for _, name in broken]


def _case_section(
    by_row: Mapping[str, Mapping[str, Mapping[str, Any]]], queries: Sequence[Mapping[str, Any]]
) -> Section | None:
    if not {"sft", "sft+rl"} <= set(by_row):
        return None
    by_id = {query["id"]: query for query in queries}
    fixed, broken = changed_by_rl(by_row, queries)
    fixed_mismatch = [name for name in fixed if by_id[name]["mismatch"]]
    broken_mismatch = [name for name in broken if by_id[name]["mismatch"]]

    def cases(names: Sequence[str], nothing: str) -> Markup:
        if not names:
            return Markup("<p>{}</p>").format(nothing)
        items = [_case(by_id[name], by_row["sft"][name], by_row["sft+rl"][name]) for name in names]
        return block("cases", items)

    body = Markup("<h3>Mismatches fixed, largest gain first</h3>{}<h3>Broken, largest loss first</h3>{}").format(
        cases(fixed_mismatch[:_FIXED], "No mismatch query was fixed."), cases(broken[:_BROKEN], "No query was broken.")
    )
    caption = (
        f"On mismatch queries RL turned {len(fixed_mismatch)} wrong top agents right and {len(broken_mismatch)} right "
        f"ones wrong; on the others {len(fixed) - len(fixed_mismatch)} and {len(broken) - len(broken_mismatch)}. "
        "Numbers are NDCG@10: of the agent alone for the labeller, of the merged results for sft and sft+rl."
    )
    return Section("What RL changed", body, caption)


def _data_section(
    summary: Summary,
    records: Sequence[Mapping[str, Any]],
    queries: Sequence[Mapping[str, Any]],
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    differences: Sequence[Difference],
    agents: Sequence[AgentNdcg],
) -> Section:
    interval = ("mean", "low", "high", "n")
    files = [
        DataFile("summary.json", "application/json", summary.model_dump_json(indent=1).encode(), "the run summary"),
        DataFile(
            "rows.csv",
            "text/csv",
            csv_bytes(
                ["row", "metric", *interval],
                [[r.name, m, e.mean, e.low, e.high, e.n] for r in summary.rows for m, e in r.metrics.items()],
            ),
            "every metric of every row with its interval",
        ),
        DataFile(
            "differences.csv",
            "text/csv",
            csv_bytes(
                ["a", "b", "subset", *interval], [[d.a, d.b, d.subset, d.mean, d.low, d.high, d.n] for d in differences]
            ),
            "the paired differences",
        ),
        DataFile(
            "by_agent.csv",
            "text/csv",
            csv_bytes(
                ["agent", "row", *interval],
                [[a.agent, name, e.mean, e.low, e.high, e.n] for a in agents for name, e in a.ndcg.items()],
            ),
            "NDCG@10 by agent",
        ),
        DataFile("queries.jsonl.gz", "application/gzip", jsonl_gz(queries), "the queries and their best agents"),
        DataFile("records.jsonl.gz", "application/gzip", jsonl_gz(records), "one line a row and query"),
    ]
    files += [
        DataFile(f"history-{stage}.jsonl.gz", "application/gzip", jsonl_gz(history), f"{stage} metrics over steps")
        for stage, history in histories.items()
    ]
    return Section("Data", downloads_html(files), "Everything on this page, saved from the page itself.")


def _tiles(summary: Summary) -> list[Tile]:
    tiles = []
    row, oracle = summary.row("sft+rl"), summary.row("oracle")
    if row is not None:
        ndcg = row.metrics["ndcg@10"]
        tiles.append(Tile("NDCG@10, sft+rl", f"{ndcg.mean:.3f}", f"{ndcg.low:.3f}–{ndcg.high:.3f}"))
        if oracle is not None and oracle.metrics["ndcg@10"].mean > 0:
            best = oracle.metrics["ndcg@10"].mean
            tiles.append(Tile("of the oracle", f"{ndcg.mean / best:.0%}", f"oracle {best:.3f}"))
        if mismatch := row.metrics.get("ndcg@10/mismatch"):
            sft = summary.row("sft")
            before = sft.metrics.get("ndcg@10/mismatch") if sft else None
            note = f"sft alone {before.mean:.3f}" if before else ""
            tiles.append(Tile("on mismatch queries", f"{mismatch.mean:.3f}", note))
        if "latency_ms/p50" in row.metrics:
            p50, p99 = row.metrics["latency_ms/p50"].mean, row.metrics["latency_ms/p99"].mean
            tiles.append(Tile("decision, median", f"{p50:.0f} ms", f"p99 {p99:.0f} ms"))
    return tiles


def write_report(
    out: Path,
    summary: Summary,
    records: Sequence[Mapping[str, Any]],
    queries: Sequence[Mapping[str, Any]],
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    differences: Sequence[Difference],
    extra: ReportExtra,
) -> None:
    """Write the search router's report to the file ``out``, replacing it in one step.

    ``records`` and ``queries`` are the evaluation's JSONL rows, ``histories`` holds the training steps under ``sft``
    (loss) and ``rl`` (reward, kl, entropy, agents_per_query). A section without data is left out. ValueError where
    records and queries do not fit together or ``extra`` lacks a field.
    """
    if missing := ReportExtra.__required_keys__ - set(extra):
        raise ValueError(f"the report lacks {', '.join(sorted(missing))} in extra")
    by_row = records_by_row(records, queries)
    by_agent = per_agent_table(records, queries, summary.seed)
    # Pool order where the outcomes tell it, then whatever else was best or chosen.
    agents = list(
        dict.fromkeys(
            [agent for query in queries for agent in query.get("outcome") or {}]
            + [query["best_agent"] for query in queries]
            + [record["chosen"] for record in records]
        )
    )
    shown = next((name for name in ("sft+rl", "sft") if name in by_row), None)
    sections = [
        _ndcg_section(summary),
        _mismatch_section(summary),
        _difference_section(differences),
        gate_section(summary),
        _case_section(by_row, queries),
        _confusion_section(records, queries, shown, agents) if shown else None,
        _agent_section(by_agent, summary.rows),
        *_training_sections(histories),
        _latency_section(by_row),
        _reliability_section(by_row, queries),
        _table_section(summary),
        lineage_section(summary, extra["lineage"]),
        _data_section(summary, records, queries, histories, differences, by_agent),
    ]
    page = render_page(
        title=f"Search router on {extra['pool']}",
        sections=[section for section in sections if section is not None],
        facts=[f"profile {summary.profile}", f"seed {summary.seed}", extra["date"], f"{len(queries):,} queries"],
        lead=extra["trained"],
        tiles=_tiles(summary),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, out)
