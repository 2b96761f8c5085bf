"""The ensemble router's report: one self-contained page of accuracy against tokens, rules, specialisation and training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from markupsafe import Markup

from routewright.evaluation import ensemble_plots
from routewright.evaluation.bootstrap import Estimate
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
from routewright.evaluation.summary import ENSEMBLE_METRICS, Row, Summary, best_value, format_value

if TYPE_CHECKING:  # only for its name: this floor does not import the routers
    from routewright.ensemble_router.results import Comparison, EnsembleResults

SERVED = "familiarity"
_SHORT = {"accuracy/ood": "accuracy, OOD", "agents_per_query": "agents", "latency_ms/p50": "decision, ms"}
_AGENT_CURVES = {
    "share": "share of queries asked", "f": "mean familiarity", "entropy": "mean entropy, nats a token",
    "updates": "updates so far",
}  # fmt: skip


class EnsembleReportExtra(TypedDict):
    """What the results do not say: the domains' names, the run's date, what was trained, the lineage."""

    dataset: str
    date: str
    trained: str
    lineage: dict[str, str]


def write_ensemble_report(
    results: EnsembleResults,
    summary: Summary,
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    extra: EnsembleReportExtra,
    out: Path,
) -> None:
    """Write the ensemble router's report to the file ``out``, replacing it in one step.

    ``summary`` has the rows of ``results``; ``histories``: {rule: lines of its co-evolution}. ValueError where the rows
    differ or ``extra`` lacks a field.
    """
    if missing := EnsembleReportExtra.__required_keys__ - set(extra):
        raise ValueError(f"the report lacks {', '.join(sorted(missing))} in extra")
    if summary.rows != results.rows:
        raise ValueError("the summary's rows are not those of the results")
    sections = [
        _tokens_section(results),
        _own_section(results),
        _same_section(results),
        _comparison_section(results),
        gate_section(summary),
        _domain_section(results),
        _specialisation_section(results),
        _map_section(results),
        *_training_sections(results, histories),
        lineage_section(summary, extra["lineage"]),
        _data_section(results, summary, histories),
    ]
    questions = f"{results.questions:,} questions"
    if results.ood_questions:
        questions += f", {results.ood_questions:,} out of distribution (OOD)"
    page = render_page(
        title="Ensemble router",
        sections=[section for section in sections if section is not None],
        facts=[f"profile {summary.profile}", f"seed {summary.seed}", extra["date"], questions],
        lead=f"{extra['trained']} Domains: {extra['dataset']}.",
        tiles=_tiles(results),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, out)


def _rows(results: EnsembleResults) -> dict[str, Row]:
    return {row.name: row for row in results.rows}


def _signed(value: float) -> str:
    """With a true minus and a plus; a rounded zero has no sign."""
    text = f"{value:+.3f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def _interval(estimate: Estimate) -> str:
    return f"[{_signed(estimate.low)}, {_signed(estimate.high)}]"


def _tiles(results: EnsembleResults) -> list[Tile]:
    rows = _rows(results)
    own, warm = rows[SERVED].metrics, rows["warm"].metrics
    everybody = next(rows[name] for name in ("all", "co-evolved:all") if name in rows)
    accuracy, tokens = own["accuracy"], own["tokens"].mean
    tiles = [
        Tile("accuracy", f"{accuracy.mean:.1%}", f"at the start {warm['accuracy'].mean:.1%}"),
        Tile("tokens a question", f"{tokens:.1f}", f"{everybody.name} {everybody.metrics['tokens'].mean:.1f}"),
        Tile("agents a question", f"{own['agents_per_query'].mean:.2f}", f"of {len(results.agents)}, τ = {results.tau:g}"),
    ]  # fmt: skip
    if "accuracy/ood" in own:
        tiles.append(
            Tile("accuracy, OOD", f"{own['accuracy/ood'].mean:.1%}", f"at the start {warm['accuracy/ood'].mean:.1%}")
        )
    return tiles


def _tokens_section(results: EnsembleResults) -> Section:
    rows = _rows(results)

    def place(name: str) -> tuple[float, float]:
        return rows[name].metrics["tokens"].mean, rows[name].metrics["accuracy"].mean

    same = [name for name in rows if name.startswith("co-evolved:")]
    figure = ensemble_plots.tokens_figure(
        [(point.tau, point.tokens, point.accuracy) for point in results.curve],
        {name: place(name) for name in [*results.own, "warm"]},
        {name: place(name) for name in [*same, "single-best"]},
        SERVED,
    )
    caption = (
        "The line asks the co-evolved agents until their familiarities sum to τ; higher and further left is better. A rule "
        "with agents of its own was trained with as many answers. Two votes are one: the heavier wins, so top-2 equals "
        "top-1 on the same agents unless the first one abstains."
    )
    return Section("Accuracy against tokens", figure_html("tokens", figure, "accuracy over generated tokens"), caption)


def _table(rows: Sequence[Row], answers: Mapping[str, int] | None = None) -> Markup:
    shown = [
        metric for metric in ENSEMBLE_METRICS if metric not in ("tokens/ood", "agents_per_query/ood")
    ]  # those: rows.csv
    metrics = [metric for metric in shown if any(metric in row.metrics for row in rows)]
    best = {metric: best_value(rows, metric) for metric in metrics}

    def cell(row: Row, metric: str) -> str | Markup:
        estimate = row.metrics.get(metric)
        if estimate is None:
            return ""
        if metric.startswith("latency"):
            return f"{estimate.mean:.2f}"
        interval = f"{estimate.low:.3f}–{estimate.high:.3f}" if metric.startswith("accuracy") else ""
        return block("value", format_value(metric, estimate.mean), interval, estimate.mean == best[metric])

    lines = [TableRow([row.name, *(cell(row, metric) for metric in metrics)], mark=row.name == SERVED) for row in rows]
    columns = ["row", *(_SHORT.get(metric, metric) for metric in metrics)]
    if answers:
        columns.append("trained on")
        lines = [
            TableRow([*line.cells, f"{answers[row.name]:,}" if row.name in answers else ""], line.mark)
            for line, row in zip(lines, rows, strict=True)
        ]
    return table_html(columns, lines)


def _own_section(results: EnsembleResults) -> Section:
    rows = [row for row in results.rows if row.name in results.own or row.name in ("majority", "base", "warm")]
    caption = (
        "Every rule chose who was asked in training, from the same warm agents, and chooses among the agents that came of "
        "it. base: the base model without adapters; warm: the start, untrained heads, which ask everybody; majority: "
        "training's most frequent answer of each domain. Agents answer greedily. The decision's time leaves out the "
        "backbone's pass, which every rule needs. Trained on: answers, each of several samples. Bold: the best."
    )
    return Section("Each rule with agents of its own", _table(rows, results.answers), caption)


def _same_section(results: EnsembleResults) -> Section:
    names = {row.name for row in results.rows if ":" in row.name} | {SERVED, "single-best"}
    caption = (
        "The same rules on the agents that co-evolved with the familiarity router; what has to be fitted learns from "
        "training questions, with as many answers as the router had (at most 4,096 questions), the single best comes from "
        "the dev questions. warm:single-best and warm:routed leave the agents as they began; the latter has the co-evolved "
        "router, so familiarity minus warm:routed is what the agents learnt."
    )
    return Section("All rules on the co-evolved agents", _table([row for row in results.rows if row.name in names]), caption)


def _comparison_cell(found: Comparison | None) -> str | Markup:
    if found is None:
        return ""
    d = found.difference
    mark, word, kind = ("▲", "above", "good") if d.low > 0 else ("▼", "below", "bad") if d.high < 0 else ("○", "unclear", "")
    return block("difference", _signed(d.mean), _interval(d), mark, word, kind)


def _comparison_section(results: EnsembleResults) -> Section:
    rows = _rows(results)
    inside = {c.b: c for c in results.comparisons if not c.ood}
    beyond = {c.b: c for c in results.comparisons if c.ood}

    def needed(found: Comparison | None) -> str:
        return "" if found is None or found.questions is None else f"{found.questions:,}"

    def tokens(name: str) -> str:
        return f"{rows[SERVED].metrics['tokens'].mean / max(rows[name].metrics['tokens'].mean, 1e-9):.2f} ×"

    columns = ["familiarity minus", "accuracy", "would separate", "tokens"]
    if beyond:
        columns += ["accuracy, OOD", "would separate"]
    lines = []
    for name, found in inside.items():
        cells = [name, _comparison_cell(found), needed(found), tokens(name)]
        lines.append(TableRow([*cells, *([_comparison_cell(beyond[name]), needed(beyond[name])] if beyond else [])]))
    caption = (
        "Accuracy of familiarity minus the row's on the same questions, 95 % interval over questions resampled together. "
        "▲ above, ▼ below; ○: the interval holds 0, and then so many questions of this kind would separate the two, were "
        "mean and spread to stay. Tokens: familiarity's over the row's. What another training seed changes is not in it."
    )
    return Section("Paired differences", table_html(columns, lines), caption)


def _domain_section(results: EnsembleResults) -> Section:
    domains = [*results.domains, *results.ood_domains]
    best = {d: best_value(results.rows, f"accuracy/{d}") for d in domains}
    lines = []
    for row in results.rows:
        cells: list[str | Markup] = [row.name]
        for domain in domains:
            estimate = row.metrics.get(f"accuracy/{domain}")
            value = "" if estimate is None else format_value("accuracy", estimate.mean)
            cells.append(block("value", value, "", estimate is not None and estimate.mean == best[domain]))
        lines.append(TableRow(cells, mark=row.name == SERVED))
    caption = f"Accuracy by domain; out of distribution: {', '.join(results.ood_domains) or 'none'}."
    return Section("By domain", table_html(["row", *domains], lines), caption)


def _specialisation_section(results: EnsembleResults) -> Section:
    told = results.specialisation
    drawn = (
        ("asked", told.asked, "asked, % of the domain's questions"), ("first", told.first, "most familiar, %"),
        ("accuracy", told.accuracy, "accuracy alone, %"), ("warm", told.warm_accuracy, "accuracy alone at the start, %"),
    )  # fmt: skip
    figures = [
        figure_html(f"matrix-{name}", ensemble_plots.agent_domain_figure(values, results.agents, title), title)
        for name, values, title in drawn
    ]
    caption = (
        f"The most familiar agent tells {told.information:.2f} bits of the domain, untrained heads {told.initial:.2f} "
        f"(p = {told.p:.3f} that the two are alike, choices swapped question by question). Accuracy differs by agent and "
        f"domain beyond that of agents and domains alone with p = {told.interaction_p:.3f} (rewards permuted over agents). "
        "Only both together are specialisation: a router may sort domains over agents that are all the same."
    )
    return Section("Specialisation", block("grid", figures), caption)


def _map_section(results: EnsembleResults) -> Section:
    figure = ensemble_plots.states_figure([(p.x, p.y, p.domain, p.agent) for p in results.map], results.map_variance)
    caption = "The backbone's states of the test questions on two principal axes, coloured by the most familiar agent."
    return Section("Map of the questions", figure_html("map", figure, "query states coloured by agent"), caption)


def _training_sections(results: EnsembleResults, histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Section]:
    sections = []
    for rule, history in histories.items():
        if not history:
            continue
        shown = _AGENT_CURVES if rule == SERVED else {"share": _AGENT_CURVES["share"]}
        figures = [
            figure_html(
                f"{rule}-{key}", ensemble_plots.agent_curves_figure(history, results.agents, key, title), f"{title} by step"
            )
            for key, title in shown.items()
        ]
        body = curve_grid(history, ("reward", "agents_per_query"), f"{rule}-curve") + block("grid", figures)
        caption = f"Reward: mean over the step's sampled answers. {curve_caption(history)}"
        sections.append(Section(f"Training, {rule}", body, caption))
    return sections


def _data_section(
    results: EnsembleResults, summary: Summary, histories: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Section:
    interval = ("mean", "low", "high", "n")
    metrics = [[r.name, m, e.mean, e.low, e.high, e.n] for r in results.rows for m, e in r.metrics.items()]
    differences = [
        [c.a, c.b, c.ood, d.mean, d.low, d.high, d.n, c.questions or ""] for c in results.comparisons if (d := c.difference)
    ]
    curve = [[p.tau, p.tokens, p.agents, p.accuracy.mean, p.accuracy.low, p.accuracy.high] for p in results.curve]
    files = [
        DataFile("results.json", "application/json", results.model_dump_json(indent=1).encode(), "all of this page"),
        DataFile("summary.json", "application/json", summary.model_dump_json(indent=1).encode(), "the run summary"),
        DataFile("rows.csv", "text/csv", csv_bytes(["row", "metric", *interval], metrics), "every metric of every row"),
        DataFile("differences.csv", "text/csv", csv_bytes(["a", "b", "ood", *interval, "questions"], differences),
                 "the paired differences"),
        DataFile("tau.csv", "text/csv", csv_bytes(["tau", "tokens", "agents", "accuracy", "low", "high"], curve),
                 "the τ sweep"),
    ]  # fmt: skip
    files += [
        DataFile(f"history-{rule}.jsonl.gz", "application/gzip", jsonl_gz(history), f"{rule}'s training over steps")
        for rule, history in histories.items()
    ]
    return Section("Data", downloads_html(files), "Everything on this page, saved from the page itself.")
