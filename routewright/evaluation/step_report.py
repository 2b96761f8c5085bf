"""The step router's report: one self-contained page of success, escalation, calibration and where the router errs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from markupsafe import Markup

from routewright.evaluation import step_plots
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
from routewright.evaluation.summary import REFERENCES, Row, Summary, best_value, format_value, metric_order

if TYPE_CHECKING:  # only for its name: this floor does not import the routers
    from routewright.step_router.results import Comparison, Group, StepResults

_CURVES = {
    "bc": ("Behaviour cloning", ("loss",), "Loss on the teacher's actions."),
    "verifier": ("Process verifier", ("loss", "accuracy"), "It learns to tell the teacher's action from the policy's."),
    "dpo": (
        "Verifier-guided DPO",
        ("loss", "reward_margin", "jsd"),
        "The loss starts at ln 2 = 0.693 and the reward margin at 0; JSD is how far two perturbed views of one state "
        "lead the policy apart.",
    ),
    "router": (
        "Risk router",
        ("brier", "cvar", "lambda", "cost"),
        "λ rises while the worst seeds fail more often than the bound allows, and falls once they do not.",
    ),
}
HINDSIGHT = (
    "The escalation at 0.97 of the LLM's success is read with hindsight, where the frontier of these test episodes first "
    "reaches it; the escalation at a router's own threshold was settled beforehand."
)
CVAR_ACTS = (
    "The CVaR term acts on the risk, which failure-risk escalates on; risk escalates on the benefit of a call, which has "
    "the term through the shared layers only. So its ablation is failure-risk − failure-no-cvar."
)
NEW_SEEDS = (
    "What strikes an episode depends on its perturbation seed alone, which many tasks share. The first interval resamples "
    "the tasks: it holds for new tasks under these seeds. The second resamples tasks and seeds, both independently (the "
    "pigeonhole bootstrap, Owen 2007, known to be conservative): it holds for new tasks under new seeds."
)
_MANY_SEEDS = 12
_SHORT = {"llm_calls_per_episode": "LLM calls", "escalated_episodes": "episodes", "worst_seed_success": "worst seed"}


class StepReportExtra(TypedDict):
    """What the results do not say: the tasks' name, the run's date, what was trained (two sentences), the lineage."""

    dataset: str
    date: str
    trained: str
    lineage: dict[str, str]


def write_step_report(
    results: StepResults,
    summary: Summary,
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    extra: StepReportExtra,
    out: Path,
) -> None:
    """Write the step router's report to the file ``out``, replacing it in one step.

    ``summary`` has the rows of ``results``. ``histories`` holds the training steps under ``bc`` (loss), ``verifier``
    (loss, accuracy), ``dpo`` (loss, reward_margin, jsd) and ``router`` (brier, cvar, lambda, cost); a stage or section
    without data is left out. ValueError where the rows differ or ``extra`` lacks a field.
    """
    if missing := StepReportExtra.__required_keys__ - set(extra):
        raise ValueError(f"the report lacks {', '.join(sorted(missing))} in extra")
    if summary.rows != results.rows:
        raise ValueError("the summary's rows are not those of the results")
    sections = [
        _frontier_section(results),
        _rows_section(results),
        _threshold_section(results),
        _comparison_section(results),
        _target_section(results),
        _gates(summary),
        _worst_section(results),
        _calibration_section(results),
        *_group_sections(results),
        _importance_section(results),
        _ablation_section(results),
        *_training_sections(histories),
        lineage_section(summary, extra["lineage"]),
        _data_section(results, summary, histories),
    ]
    page = render_page(
        title=f"Step router on {extra['dataset']}",
        sections=[section for section in sections if section is not None],
        facts=[
            f"profile {summary.profile}",
            f"seed {summary.seed}",
            extra["date"],
            f"{results.episodes:,} episodes: {results.tasks:,} tasks, {results.seeds:,} perturbation seeds",
        ],
        lead=extra["trained"],
        tiles=_tiles(results),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, out)


def _rows(results: StepResults) -> dict[str, Row]:
    return {row.name: row for row in results.rows}


def _intervals(*estimates: Estimate | None) -> Markup:
    """One under the other: a table has little room."""
    return Markup("<br>").join(f"[{_signed(e.low)}, {_signed(e.high)}]" for e in estimates if e is not None)


def _signed(value: float, digits: int = 3) -> str:
    """With a true minus; a rounded zero has no sign."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def _estimate_cell(estimate: Estimate | None, new_seeds: Estimate | None = None) -> Markup | str:
    if estimate is None:
        return ""
    return block("value", _signed(estimate.mean), _intervals(estimate, new_seeds), False)


def _tiles(results: StepResults) -> list[Tile]:
    rows = _rows(results)
    risk = rows["risk"].metrics
    slm, llm = (rows[name].metrics["success"].mean for name in ("slm", "llm"))
    tiles = [
        Tile("success, risk", f"{risk['success'].mean:.1%}", f"small model {slm:.1%}, LLM {llm:.1%}"),
        Tile("steps escalated", f"{results.matched_rate:.1%}", f"oracle {results.oracle_rate:.1%}"),
    ]
    area = next(frontier.area for frontier in results.frontiers if frontier.row == "risk")
    tiles.append(Tile("area under the frontier", f"{area.mean:.3f}", f"{area.low:.3f}–{area.high:.3f}"))
    skill = next((c.skill for c in results.calibration if c.row == "risk"), None)
    if skill is not None:
        tiles.append(Tile("Brier skill", _signed(skill.mean), f"{_signed(skill.low)} to {_signed(skill.high)}, these seeds"))
    return tiles


def _frontier_section(results: StepResults) -> Section:
    rows = _rows(results)

    def place(name: str) -> tuple[float, float]:
        return rows[name].metrics["escalation"].mean, rows[name].metrics["success"].mean

    curves = {f.row: [(p.escalation, p.success) for p in f.points] for f in results.frontiers}
    figure = step_plots.frontier_figure(curves, {name: place(name) for name in ("slm", "llm", "oracle")}, place("risk"))
    caption = (
        "Every line runs from the small model alone to the LLM alone; a higher line buys more success with the same "
        "escalation. Each dot is one threshold, played anew from the first step to the last. The oracle gives the LLM "
        "exactly the episodes that the small model fails; a router that steps in late can beat it."
    )
    target = next(target for target in results.targets if target.row == "risk")
    if target.escalation_at_share is not None:
        ratio, own, at = target.oracle_ratio, target.operating_ratio, target.escalation_at_share.mean
        caption += f" With hindsight, risk reaches 97 % of the LLM's success at {at:.1%} escalation"
        caption += f", {ratio.mean:.2f} × the oracle's" if ratio is not None else ""
        caption += f"; its own threshold stands at {own.mean:.2f} ×." if own is not None else "."
    return Section("Success against escalation", figure_html("frontier", figure, "success over escalation"), caption)


def _rows_section(results: StepResults) -> Section:
    metrics = metric_order(results.rows)
    best = {metric: best_value(results.rows, metric) for metric in metrics}

    def cell(row: Row, metric: str) -> str | Markup:
        estimate = row.metrics.get(metric)
        if estimate is None:
            return ""
        interval = f"{estimate.low:.3f}–{estimate.high:.3f}" if metric == "success" else ""
        bold = row.name not in REFERENCES and estimate.mean == best[metric]
        return block("value", format_value(metric, estimate.mean), interval, bold)

    lines = [TableRow([row.name, *(cell(row, m) for m in metrics)], mark=row.name == "risk") for row in results.rows]
    columns = ["row", *(_SHORT.get(metric, metric) for metric in metrics)]
    caption = (
        f"risk stands at its own threshold, as does risk-no-jsd. The rows without one are read off their frontier where "
        f"they escalate as much as risk, {results.matched_rate:.1%}: linear between the two measured settings next to "
        "it, as a coin tossed between the two would do. Bold: the best router. Escalation is the share of steps that the "
        "LLM takes; look at its calls an episode too, as steps that the small model wastes dilute the share. Cost an "
        f"episode: {results.c_slm:g} a proposal of the small model, {results.c_llm:g} a step of the LLM; a rule that looks "
        "at the proposals pays for both where it escalates. Episodes: the share with any call. Intervals are for new tasks "
        f"under these {results.seeds:,} perturbation seeds; of success under new seeds too: {_under_new_seeds(results)}."
    )
    return Section("All rows", table_html(columns, lines), caption)


def _under_new_seeds(results: StepResults) -> str:
    found = {name: results.success_new_seeds[name] for name in ("slm", "risk", "llm")}
    return ", ".join(f"{name} {estimate.low:.3f}–{estimate.high:.3f}" for name, estimate in found.items())


_THRESHOLDS = {
    "parity": "98 % of the LLM's success",
    "bayes": "costs of a call and of a failure",
    "budget": "mean LLM calls an episode",
    "guaranteed": "Learn-then-Test",
}


def _threshold_section(results: StepResults) -> Section | None:
    if not results.thresholds:
        return None
    own = next(p.threshold for f in results.frontiers if f.row == "risk" for p in f.points if p.operating)

    def between(values: tuple[float, float]) -> str:
        low, high = (f"{value:.3f}" for value in values)
        return low if low == high else f"{low}–{high}"

    lines = [
        TableRow(
            [t.name, _THRESHOLDS.get(t.name, ""), "none: all to the LLM" if t.value is None else _signed(t.value, 4),
             between(t.escalation), between(t.success)],
            mark=t.value is not None and t.value == own,
        )
        for t in results.thresholds
    ]  # fmt: skip
    caption = (
        "The thresholds of risk that calibration chose, marked where risk stands here; Learn-then-Test speaks of new tasks "
        "under calibration's perturbation seeds. Success and escalation are read off the frontier: of the measured settings "
        "next to the threshold, the lower and the upper one; the other thresholds were not played."
    )
    columns = ["threshold", "from", "benefit above", "escalation", "success"]
    return Section("Thresholds", table_html(columns, lines, left=2), caption)


def _comparison_cell(found: Comparison | None) -> str | Markup:
    if found is None:
        return ""
    d, new = found.difference, found.new_seeds or found.difference
    below_is_good = found.at == "cvar at own rate"
    word = "above" if d.low > 0 else "below" if d.high < 0 else "unclear"
    mark = {"above": "▲", "below": "▼", "unclear": "○"}[word]
    kind = "" if word == "unclear" else "good" if (word == "below") == below_is_good else "bad"
    if word != "unclear" and new.low <= 0 <= new.high:
        mark, word, kind = {"▲": "△", "▼": "▽"}[mark], f"{word} under these seeds", ""
    text = _signed(d.mean) if d.mean <= 0 else f"+{_signed(d.mean)}"
    return block("difference", text, _intervals(d, found.new_seeds), mark, word, kind)


def _compared(results: StepResults, b: str, at: str, a: str = "risk") -> Comparison | None:
    return next((c for c in results.comparisons if (c.a, c.b, c.at) == (a, b, at)), None)


def _comparison_section(results: StepResults) -> Section | None:
    others = [f.row for f in results.frontiers if f.row != "risk"]
    if not others:
        return None
    lines = [
        TableRow([name, *(_comparison_cell(_compared(results, name, at)) for at in ("oracle rate", "own rate", "area"))])
        for name in others
    ]
    caption = (
        f"Success of risk minus that of the row, both at the oracle's escalation ({results.oracle_rate:.1%}), both at "
        f"risk's own ({results.matched_rate:.1%}), and the difference of the areas, on the same episodes. {NEW_SEEDS} "
        "▲ above and ▼ below: both 95 % intervals leave out zero; △ and ▽: the first only; ○: neither."
    )
    columns = ["risk minus", "at the oracle's rate", "at risk's rate", "area"]
    return Section("Paired differences", table_html(columns, lines), caption)


def _target_section(results: StepResults) -> Section:
    areas = {f.row: f.area for f in results.frontiers}
    lines = [
        TableRow(
            [t.row, *(_estimate_cell(getattr(t, name), new) for name, new in t.new_seeds.items()),
             _estimate_cell(areas[t.row])],
            mark=t.row == "risk",
        )
        for t in results.targets
    ]  # fmt: skip
    caption = (
        "Success as a share of the LLM's, and escalation divided by the oracle's, in the setting of the table above; the "
        "least escalation at which the frontier has 97 % of the LLM's success; that escalation divided by the oracle's, "
        "where 1 or less is as cheap as knowing beforehand which episodes fail; the area under the frontier. The "
        "second interval, where there is one, is for new tasks under new perturbation seeds. "
        f"{HINDSIGHT}"
    )
    columns = ["row", "of the LLM's", "÷ the oracle's", "escalation at 97 %", "that ÷ the oracle's", "area"]
    return Section("97 % of the LLM", table_html(columns, lines), caption)


def _gates(summary: Summary) -> Section | None:
    section = gate_section(summary)
    if section is None:
        return None
    more = f"{HINDSIGHT} The Brier skill is judged by its interval over tasks and perturbation seeds."
    return replace(section, caption=f"{section.caption} {more}")


def _worst_section(results: StepResults) -> Section:
    lines = []
    for row in results.rows:
        worst, cvar = row.metrics["worst_seed_success"], row.metrics["cvar"]
        difference = _comparison_cell(_compared(results, row.name, "cvar at own rate"))
        lines.append(TableRow([row.name, _estimate_cell(worst), _estimate_cell(cvar), difference], mark=row.name == "risk"))
    caption = (
        f"Success at the perturbation seed with the lowest, and the mean failure rate of the worst {results.alpha:.0%} of "
        f"the {results.seeds:,} seeds (CVaR). The last column is the CVaR of risk minus that of the row, both at risk's "
        "escalation: ▼ is better. The lowest of many noisy rates is biased down in a resample, so intervals "
        "lean to the bad side."
    )
    columns = ["row", "worst seed's success", "CVaR of failure", "risk minus row"]
    table = table_html(columns, lines)
    if results.by_seed:
        shown = results.by_seed if results.seeds <= _MANY_SEEDS else results.by_seed[:_MANY_SEEDS]
        title = "By seed" if results.seeds <= _MANY_SEEDS else f"The {len(shown)} seeds with the lowest success of risk"
        table += Markup("<h3>{}</h3>{}").format(title, _group_table("seed", shown))
    return Section("Worst seeds", table, caption)


def _calibration_section(results: StepResults) -> Section | None:
    if not results.calibration:
        return None
    figure = step_plots.risk_reliability_figure(
        {c.row: [(b.probability, b.frequency, b.n) for b in c.bins] for c in results.calibration}
    )
    steps = list(dict.fromkeys(auc.step for c in results.calibration for auc in c.auc))

    def auc_cells(found: Mapping[int | None, float | None]) -> list[str]:
        values = [found.get(step) for step in steps]
        return ["" if value is None else f"{value:.3f}" for value in values]

    lines = [
        TableRow(
            [c.row, _estimate_cell(c.brier), _estimate_cell(c.skill, c.skill_new_seeds), _estimate_cell(c.ece),
             *auc_cells({auc.step: auc.auc for auc in c.auc})],
            mark=c.row == "risk",
        )
        for c in results.calibration
    ]  # fmt: skip
    columns = ["row", "Brier", "Brier skill", "ECE", *("AUC" if step is None else f"step {step}" for step in steps)]
    caption = (
        "The risk of each step against what became of the episode, where the small model went on alone; on the diagonal a "
        "risk can be taken at its word, larger dots hold more steps. Every episode weighs the same. Brier skill above 0 "
        f"beats the base rate ({results.calibration[0].base_rate:.1%} of the episodes fail); its second "
        "interval is for new tasks under new perturbation seeds. Failing episodes are long, "
        "so the step number alone tells much over all steps; the AUC at the first steps is the harder test."
    )
    figure_block = figure_html("reliability", figure, "predicted risk and observed share of failures")
    return Section("Calibration", figure_block + table_html(columns, lines), caption)


def _group_table(what: str, groups: Sequence[Group]) -> Markup:
    rows = list(groups[0].success)
    lines = [
        TableRow([g.name, f"{g.n:,}", *(_estimate_cell(g.success[row]) for row in rows), f"{g.escalation.mean:.1%}"])
        for g in groups
    ]
    return table_html([what, "episodes", *rows, "risk escalates"], lines)


def _group_sections(results: StepResults) -> list[Section]:
    sections = []
    if results.by_environment:
        caption = "Success of the small model alone, of risk at its threshold and of the LLM alone."
        sections.append(Section("By environment", _group_table("environment", results.by_environment), caption))
    if results.by_perturbation:
        caption = (
            "Episodes in which the kind struck at least once while the small model ran alone; an episode counts under every "
            "kind that struck. Long episodes are struck more often, and they are the ones that fail."
        )
        sections.append(Section("By perturbation", _group_table("perturbation", results.by_perturbation), caption))
    return sections


def _importance_section(results: StepResults) -> Section | None:
    if not results.importance:
        return None
    figures = [
        figure_html(
            f"importance-{metric}",
            step_plots.importance_figure(
                {i.feature: (i.auc, i.auc_std) if metric == "auc" else (i.brier, i.brier_std) for i in results.importance},
                label,
            ),
            f"{label}, by feature",
        )
        for metric, label in (("brier", "rise of the Brier score"), ("auc", "drop of the AUC"))
    ]
    caption = (
        "How much worse the risk gets when one feature is shuffled over all steps; whiskers: standard deviation over "
        "repeats. Two features that say the same hide one another."
    )
    return Section("Which features count", block("grid", figures), caption)


def _ablation_section(results: StepResults) -> Section | None:
    policies = {row.name: row.metrics["success"] for row in results.policies}
    body = Markup("")
    if results.ablation:
        lines = [TableRow([name, f"{a.brier:.4f}", f"{a.auc:.4f}"]) for name, a in results.ablation.items()]
        body += table_html(["refitted without", "Brier", "AUC"], lines)
    if len(policies) > 1:
        lines = [TableRow([name, _estimate_cell(success)]) for name, success in policies.items()]
        for found in results.comparisons:
            if found.at == "small model alone":
                lines.append(TableRow([f"{found.a} − {found.b}", _comparison_cell(found)]))
        body += table_html(["small model alone", "success"], lines)
    measures = ("oracle rate", "own rate", "cvar at own rate", "area")
    lines = [
        TableRow([f"{a} − {b}", *(_comparison_cell(_compared(results, b, at, a)) for at in measures)])
        for a, b in (("failure-risk", "failure-no-cvar"), ("risk", "risk-no-cvar"))
        if _compared(results, b, "area", a) is not None
    ]
    if lines:
        columns = ["CVaR term", "at the oracle's rate", "at risk's rate", "CVaR at risk's rate", "area"]
        body += table_html(columns, lines)
    if not body:
        return None
    caption = (
        "Routers fitted anew without a feature, small models distilled without the consistency term (no-jsd), and routers "
        f"without the CVaR term. {CVAR_ACTS}"
    )
    return Section("Ablations", body, caption)


def _training_sections(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Section]:
    return [
        Section(title, curve_grid(history, metrics, f"{stage}-curve"), f"{caption} {curve_caption(history)}")
        for stage, (title, metrics, caption) in _CURVES.items()
        if (history := histories.get(stage))
    ]


def _data_section(
    results: StepResults, summary: Summary, histories: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Section:
    interval = ("mean", "low", "high", "n")
    metrics = [[r.name, m, e.mean, e.low, e.high, e.n] for r in results.rows for m, e in r.metrics.items()]
    points = [
        [f.row, p.rule, "" if p.threshold is None else p.threshold, p.operating, p.escalation, p.success,
         p.llm_calls_per_episode, p.escalated_episodes]
        for f in results.frontiers for p in f.points
    ]  # fmt: skip
    point_columns = ["row", "rule", "threshold", "operating", "escalation", "success", "llm_calls_per_episode",
                     "escalated_episodes"]  # fmt: skip
    difference_columns = ["a", "b", "at", "rate", *interval, "low_new_seeds", "high_new_seeds"]
    differences = [
        [c.a, c.b, c.at, "" if c.rate is None else c.rate, d.mean, d.low, d.high, d.n,
         *(("", "") if c.new_seeds is None else (c.new_seeds.low, c.new_seeds.high))]
        for c in results.comparisons if (d := c.difference)
    ]  # fmt: skip
    files = [
        DataFile("results.json", "application/json", results.model_dump_json(indent=1).encode(), "all of this page"),
        DataFile("summary.json", "application/json", summary.model_dump_json(indent=1).encode(), "the run summary"),
        DataFile("rows.csv", "text/csv", csv_bytes(["row", "metric", *interval], metrics), "every metric of every row"),
        DataFile("frontier.csv", "text/csv", csv_bytes(point_columns, points), "every measured setting"),
        DataFile("differences.csv", "text/csv", csv_bytes(difference_columns, differences),
                 "the paired differences"),
    ]  # fmt: skip
    files += [
        DataFile(f"history-{stage}.jsonl.gz", "application/gzip", jsonl_gz(history), f"{stage} metrics over steps")
        for stage, history in histories.items()
    ]
    return Section("Data", downloads_html(files), "Everything on this page, saved from the page itself.")
