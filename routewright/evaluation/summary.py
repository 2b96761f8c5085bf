"""The run summary: rows of metrics with intervals, paired differences, and how they look in a terminal or Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from routewright.evaluation.bootstrap import Estimate, mean_interval, percentile_interval, std_interval
from routewright.evaluation.clustered import clustered_difference, clustered_macro, clustered_mean

if TYPE_CHECKING:
    from rich.table import Table

SEARCH_ROWS = (
    "random", "best-single", "all-agents", "intent", "outcome-lr", "sft+lr", "union-bm25", "cori", "zero-shot", "sft",
    "sft+rl", "oracle",
)  # fmt: skip
"""The search router's rows in the order of the contract."""

SEARCH_METRICS = (
    "ndcg@10", "ndcg@10/mismatch", "ndcg@10/match", "ndcg@10/macro", "ndcg@10/routing", "ndcg@10/std", "agent_f1",
    "exact_set", "keyword_precision", "date_iou", "valid", "valid/unconstrained", "latency_ms/mean", "latency_ms/p50",
    "latency_ms/p99", "cost", "agents_per_query",
)  # fmt: skip
"""The search router's metrics in the order they are shown."""

STEP_ROWS = (
    "slm", "llm", "random-matched", "entropy", "verifier", "time", "repeat", "query-level", "failure-risk",
    "failure-no-cvar", "risk", "risk-no-cvar", "risk-no-jsd", "oracle",
)  # fmt: skip
"""The step router's rows in the order of the contract, and `failure-risk`: the paper's rule on the same models."""

STEP_METRICS = (
    "success", "escalation", "llm_calls_per_episode", "cost", "escalated_episodes", "worst_seed_success", "cvar",
    "brier", "ece",
)  # fmt: skip
"""The step router's metrics in the order they are shown; a run that has ``success`` is a step router's."""

ENSEMBLE_ROWS = (
    "majority", "base", "warm", "single-best", "one-model", "random", "top-1", "top-2", "all", "linucb", "reward-regression",
    "classifier", "icl", "frozen-router", "frozen-agents", "no-exploration", "no-margin", "last-layer",
    "half-lambda", "double-lambda", "familiarity",
)  # fmt: skip
"""The ensemble router's rows in the order they are shown; extra rows, on the same agents or of the start, follow."""

ENSEMBLE_METRICS = (
    "accuracy", "accuracy/ood", "tokens", "tokens/ood", "agents_per_query", "agents_per_query/ood", "latency_ms/p50",
)  # fmt: skip
"""The ensemble router's metrics in the order they are shown, `accuracy/<domain>` after them."""

_MEANS = ("ndcg@10/routing", "agent_f1", "exact_set", "keyword_precision", "date_iou", "valid", "valid/unconstrained",
          "cost", "agents_per_query")  # fmt: skip
_LOWER_IS_BETTER = {"latency_ms/mean", "latency_ms/p50", "latency_ms/p99", "cvar", "brier", "ece"}
# A low value of these is no merit by itself: a bad router is cheap and steady too.
_NO_DIRECTION = {"ndcg@10/std", "cost", "agents_per_query", "escalation", "llm_calls_per_episode", "escalated_episodes",
                 "tokens", "tokens/ood", "agents_per_query/ood"}  # fmt: skip
_HEADLINES = ("ndcg@10", "success", "accuracy")  # shown with their intervals
REFERENCES = {"oracle", "slm", "llm"}
"""Rows that no router competes with: they know the outcome, or never or always call the LLM."""

Subset = Literal["overall", "mismatch", "match", "macro", "routing"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Row(_Strict):
    """One router or baseline; metrics that do not apply to it are absent."""

    name: str
    metrics: dict[str, Estimate]


class Gate(_Strict):
    """A promotion gate; ``value`` is None where it could not be measured (then it did not pass)."""

    name: str
    passed: bool
    value: float | None
    bound: float


class Summary(_Strict):
    """``summary.json`` of a run."""

    pipeline: str
    profile: str
    seed: int
    wall_s: float
    rows: list[Row]
    gates: list[Gate] = []
    artifacts: dict[str, str] = {}

    def row(self, name: str) -> Row | None:
        """The row of that name, None where the run has none."""
        return next((row for row in self.rows if row.name == name), None)


class Difference(_Strict):
    """Mean of NDCG@10 of row ``a`` minus row ``b`` over the queries of ``subset`` that both rows answered.

    ``routing`` is all of them, each searched as it came: the agents alone, without a row's keywords and dates.
    """

    a: str
    b: str
    subset: Subset
    mean: float
    low: float
    high: float
    n: int


class AgentNdcg(_Strict):
    """NDCG@10 of every row on the ``n`` queries whose collection is the agent's (``home``)."""

    agent: str
    n: int
    ndcg: dict[str, Estimate]


def row_order(names: Iterable[str]) -> list[str]:
    """Row names in the order of the contract; ``llm:*`` follow zero-shot, other extra rows come before the oracle."""
    known = dict.fromkeys(name for name in (*SEARCH_ROWS, *STEP_ROWS) if name != "oracle")
    position = {name: float(place) for place, name in enumerate([*known, "oracle"])}
    extra = position["oracle"] - 0.5

    def place(name: str) -> float:
        return position["zero-shot"] + 0.5 if name.startswith("llm:") else position.get(name, extra)

    return sorted(names, key=place)


def metric_order(rows: Sequence[Row]) -> list[str]:
    """The metrics that any of the rows has, contract order first, others as they come."""
    present = {metric: None for row in rows for metric in row.metrics}
    known = STEP_METRICS if "success" in present else ENSEMBLE_METRICS if "accuracy" in present else SEARCH_METRICS
    return [m for m in known if m in present] + [m for m in present if m not in known]


def best_value(rows: Sequence[Row], metric: str) -> float | None:
    """The best value of a metric among the rows but ``REFERENCES``; None where no direction is better or all are equal."""
    values = [row.metrics[metric].mean for row in rows if row.name not in REFERENCES and metric in row.metrics]
    if metric in _NO_DIRECTION or len(set(values)) < 2:
        return None
    return min(values) if metric in _LOWER_IS_BETTER else max(values)


def records_by_row(
    records: Sequence[Mapping[str, Any]], queries: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Mapping[str, Any]]]:
    """{row: {query id: record}}, rows in contract order and ids in the order of ``queries`` (so bootstraps pair).

    ValueError where a record names an unknown query or a row answers one query twice.
    """
    if not queries:
        raise ValueError("there are no evaluated queries")
    known = {query["id"] for query in queries}
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        row = found.setdefault(record["row"], {})
        if record["id"] not in known:
            raise ValueError(f"a record of row {record['row']!r} names the unknown query {record['id']!r}")
        if record["id"] in row:
            raise ValueError(f"row {record['row']!r} has two records of query {record['id']!r}")
        row[record["id"]] = record
    return {
        name: {query["id"]: found[name][query["id"]] for query in queries if query["id"] in found[name]}
        for name in row_order(found)
    }


def _ndcg(record: Mapping[str, Any], subset: Subset = "overall") -> float:
    return float(record["metrics"]["ndcg@10/routing" if subset == "routing" else "ndcg@10"])


def _groups(queries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is resampled together: queries about one document; a query that tells no group is one of its own."""
    return [query.get("group") or query["id"] for query in queries]


def _summarise_row(answers: Mapping[str, Mapping[str, Any]], by_id: Mapping[str, Mapping[str, Any]], seed: int) -> Row:
    ndcg = {name: _ndcg(record) for name, record in answers.items()}
    values = list(ndcg.values())

    def mean_over(part: Mapping[str, float]) -> Estimate:
        return clustered_mean(list(part.values()), _groups(by_id[name] for name in part), seed)

    def present(metric: str) -> dict[str, float]:
        return {n: r["metrics"][metric] for n, r in answers.items() if r["metrics"].get(metric) is not None}

    metrics = {"ndcg@10": mean_over(ndcg)}
    for subset, wanted in (("mismatch", True), ("match", False)):
        part = {name: value for name, value in ndcg.items() if bool(by_id[name]["mismatch"]) is wanted}
        if part:
            metrics[f"ndcg@10/{subset}"] = mean_over(part)
    asked = [by_id[name] for name in ndcg]
    metrics["ndcg@10/macro"] = clustered_macro(values, [query["home"] for query in asked], _groups(asked), seed)
    metrics["ndcg@10/std"] = std_interval(values, seed)
    for metric in _MEANS:
        if part := present(metric):
            metrics[metric] = mean_over(part)
    if latency := list(present("latency_ms").values()):
        metrics["latency_ms/mean"] = mean_interval(latency, seed)
        metrics["latency_ms/p50"] = percentile_interval(latency, 50, seed)
        metrics["latency_ms/p99"] = percentile_interval(latency, 99, seed)
    ordered = sorted(metrics, key=SEARCH_METRICS.index)
    return Row(name=answers[next(iter(answers))]["row"], metrics={metric: metrics[metric] for metric in ordered})


def summarise(records: Sequence[Mapping[str, Any]], queries: Sequence[Mapping[str, Any]], seed: int) -> list[Row]:
    """The summary's search rows from the per-query records, in contract order, with 95 % bootstrap intervals over groups.

    A metric is averaged over the queries whose record has it (``n`` says how many) and left out where none has it;
    ``/macro`` is the mean over ``home`` agents, ``/std`` the standard deviation over queries.
    """
    by_id = {query["id"]: query for query in queries}
    return [_summarise_row(answers, by_id, seed) for answers in records_by_row(records, queries).values()]


def paired_differences(
    records: Sequence[Mapping[str, Any]],
    queries: Sequence[Mapping[str, Any]],
    pairs: Sequence[tuple[str, str]],
    subsets: Sequence[Subset],
    seed: int,
) -> list[Difference]:
    """NDCG@10 of ``a`` minus ``b`` for each pair and subset, paired over the queries both rows answered.

    ``macro`` averages over ``home`` agents, every agent weighing the same. A subset without queries is left out; a
    pair that names an absent row is a ValueError. Queries of one ``group`` are resampled together.
    """
    rows = records_by_row(records, queries)
    differences = []
    for a, b in pairs:
        missing = [name for name in (a, b) if name not in rows]
        if missing:
            raise ValueError(f"a paired difference names the row {missing[0]!r}, but the rows are {', '.join(rows)}")
        for subset in subsets:
            shared = [
                query
                for query in queries
                if query["id"] in rows[a] and query["id"] in rows[b]
                and (subset in ("overall", "macro", "routing") or bool(query["mismatch"]) is (subset == "mismatch"))
            ]  # fmt: skip
            if not shared:
                continue
            first = [_ndcg(rows[a][query["id"]], subset) for query in shared]
            second = [_ndcg(rows[b][query["id"]], subset) for query in shared]
            if subset == "macro":
                gains = [x - y for x, y in zip(first, second, strict=True)]
                estimate = clustered_macro(gains, [query["home"] for query in shared], _groups(shared), seed)
            else:
                estimate = clustered_difference(first, second, _groups(shared), seed)
            differences.append(Difference(a=a, b=b, subset=subset, **estimate.model_dump()))
    return differences


def per_agent_table(
    records: Sequence[Mapping[str, Any]], queries: Sequence[Mapping[str, Any]], seed: int
) -> list[AgentNdcg]:
    """NDCG@10 by the agent a query comes from, agents in the order of the pool where the queries tell it."""
    rows = records_by_row(records, queries)
    pool = list(dict.fromkeys(agent for query in queries for agent in query.get("outcome") or {}))
    homes = dict.fromkeys(query["home"] for query in queries)
    table = []
    for agent in [a for a in pool if a in homes] + [a for a in homes if a not in pool]:
        own = [query for query in queries if query["home"] == agent]
        ndcg = {}
        for name, answers in rows.items():
            asked = [query for query in own if query["id"] in answers]
            if asked:
                ndcg[name] = clustered_mean([_ndcg(answers[query["id"]]) for query in asked], _groups(asked), seed)
        table.append(AgentNdcg(agent=agent, n=len(own), ndcg=ndcg))
    return table


def format_value(metric: str, value: float) -> str:
    """A metric's value as people read it: milliseconds and large costs with one decimal, most others with three."""
    if metric.startswith("latency_ms") or (metric == "cost" and value >= 100):
        return f"{value:,.1f}"
    if metric.startswith("tokens"):
        return f"{value:,.1f}"
    return f"{value:.2f}" if metric.startswith(("agents_per_query", "llm_calls_per_episode")) else f"{value:.3f}"


def table_markdown(summary: Summary) -> str:
    """The rows as a GitHub table: all metrics, NDCG@10 or success with its interval, the best but a reference's in bold."""
    metrics = metric_order(summary.rows)
    best = {metric: best_value(summary.rows, metric) for metric in metrics}

    def cell(row: Row, metric: str) -> str:
        estimate = row.metrics.get(metric)
        if estimate is None:
            return ""
        text = format_value(metric, estimate.mean)
        if row.name not in REFERENCES and estimate.mean == best[metric]:
            text = f"**{text}**"
        return f"{text} [{estimate.low:.3f}, {estimate.high:.3f}]" if metric in _HEADLINES else text

    lines = [["row", *metrics], ["---", *("---:" for _ in metrics)]]
    lines += [[row.name.replace("|", "\\|"), *(cell(row, metric) for metric in metrics)] for row in summary.rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def rich_table(summary: Summary) -> Table:
    """The rows for a terminal of 60 columns: the metrics that decide, the best value but a reference's in bold."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    present = metric_order(summary.rows)
    if "success" in present:
        shown = {"success": "success", "escalation": "escal.", "llm_calls_per_episode": "calls", "cost": "cost",
                 "worst_seed_success": "worst"}  # fmt: skip
        caption = "success: 95 % bootstrap by task; worst: success at the worst seed"
        width = 15
    elif "accuracy" in present:
        shown = {"accuracy": "acc.", "accuracy/ood": "OOD", "tokens": "tokens", "agents_per_query": "agents"}
        caption = "acc.: 95 % bootstrap by question; tokens: generated, a question"
        width = 28
    else:
        shown = {"ndcg@10": "NDCG", "ndcg@10/mismatch": "mism.", "ndcg@10/match": "match", "agent_f1": "F1",
                 "latency_ms/p50": "ms"}  # fmt: skip
        caption = "NDCG@10, 95 % bootstrap; mism.: mismatch; ms: median"
        width = 12
    metrics = {metric: label for metric, label in shown.items() if metric in present}
    best = {metric: best_value(summary.rows, metric) for metric in metrics}
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"{summary.pipeline} · {summary.profile} · seed {summary.seed}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    table.add_column("row", overflow="fold", max_width=width)
    for metric, label in metrics.items():
        table.add_column(label, justify="right", no_wrap=True)
        if metric in _HEADLINES:
            table.add_column("95 %", justify="right", no_wrap=True, style="dim")
    for row in summary.rows:
        cells = [Text(row.name, style="dim" if row.name in REFERENCES else "")]
        for metric in metrics:
            estimate = row.metrics.get(metric)
            text = "" if estimate is None else format_value(metric, estimate.mean)
            bold = estimate is not None and row.name not in REFERENCES and estimate.mean == best[metric]
            cells.append(Text(text, style="bold" if bold else ""))
            if metric in _HEADLINES:
                cells.append(Text("" if estimate is None else f"{estimate.low:.2f}–{estimate.high:.2f}"))
        table.add_row(*cells)
    return table
