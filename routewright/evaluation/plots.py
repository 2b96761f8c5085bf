"""Plotly figures of an evaluation. Colours read on light and dark pages; the page sets fonts, text and grid colours."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from routewright.evaluation.calibration import reliability_bins
from routewright.evaluation.summary import Row, row_order

ACCENT = "#3b7ddd"
SECOND = "#d9822b"
MUTED = "#8a93a3"
_PALETTE = (MUTED, "#2a9d8f", "#9b6dd6", "#c2577a", "#6b8e23", "#b08d57", "#5a7d9a")
_MEASURES = {
    "loss": "loss",
    "reward": "reward",
    "kl": "KL to SFT (nats)",
    "entropy": "entropy (nats)",
    "agents_per_query": "agents per query",
    "ndcg@10": "NDCG@10",
    "accuracy": "accuracy",
    "reward_margin": "reward margin",
    "jsd": "JSD between views (nats)",
    "brier": "Brier score",
    "cost": "soft escalation",
    "cvar": "CVaR of soft failures",
    "lambda": "λ of the CVaR constraint",
}


def escaped(label: str) -> str:
    """A label for Plotly, which reads a subset of HTML in every text."""
    return html.escape(label, quote=False)


def _colour(row: str) -> str:
    return {"sft+rl": ACCENT, "sft": SECOND}.get(row, MUTED)


def blank_figure(height: int, **layout: Any) -> go.Figure:
    """A figure without data in the page's style, ``height`` in pixels."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 12, "t": 8, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"size": 13, "color": MUTED},
        hoverlabel={"font": {"size": 13}},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        **layout,
    )
    # Fixed ranges: a thumb that scrolls the page over a plot must not zoom it.
    axis: dict[str, Any] = {"automargin": True, "zeroline": False, "fixedrange": True, "title": {"font": {"size": 13}}}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure


def _dots(figure: go.Figure, rows: Sequence[Row], metric: str, name: str, colours: list[str], offset: float) -> None:
    """Dots with 95 % intervals, the first row on top, shifted by ``offset`` of a row height."""
    shown = [(place, row, row.metrics[metric]) for place, row in enumerate(rows) if metric in row.metrics]
    figure.add_trace(
        go.Scatter(
            x=[estimate.mean for _, _, estimate in shown],
            y=[place + offset for place, _, _ in shown],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [estimate.high - estimate.mean for _, _, estimate in shown],
                "arrayminus": [estimate.mean - estimate.low for _, _, estimate in shown],
                "thickness": 2,
                "width": 0,
                "color": MUTED if len(set(colours)) > 1 else colours[0],
            },
            mode="markers",
            name=name,
            marker={
                "size": 8,
                "color": [colours[place] for place, _, _ in shown],
                "symbol": ["circle-open" if row.name == "oracle" else "circle" for _, row, _ in shown],
                "line": {"width": 2, "color": [colours[place] for place, _, _ in shown]},
            },
            customdata=[
                [escaped(row.name), f"{estimate.low:.3f}", f"{estimate.high:.3f}", estimate.n]
                for _, row, estimate in shown
            ],
            hovertemplate="%{customdata[0]}: %{x:.3f} [%{customdata[1]}, %{customdata[2]}]"
            "<br>%{customdata[3]} queries<extra>" + escaped(name) + "</extra>",
        )
    )


def _row_axis(figure: go.Figure, rows: Sequence[Row]) -> None:
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[f"<b>{escaped(row.name)}</b>" if row.name == "sft+rl" else escaped(row.name) for row in rows],
        range=[len(rows) - 0.4, -0.6],
        showgrid=False,
    )


def ndcg_figure(rows: Sequence[Row]) -> go.Figure:
    """NDCG@10 of every row with its 95 % interval, one line a row."""
    figure = blank_figure(60 + 32 * len(rows), showlegend=False)
    _dots(figure, rows, "ndcg@10", "overall", [_colour(row.name) for row in rows], 0.0)
    _row_axis(figure, rows)
    figure.update_xaxes(title_text="NDCG@10, 95 % interval")
    return figure


def mismatch_figure(rows: Sequence[Row]) -> go.Figure:
    """NDCG@10 on the mismatch subset and on its complement, two dots a row."""
    figure = blank_figure(90 + 38 * len(rows))
    _dots(figure, rows, "ndcg@10/mismatch", "mismatch", [SECOND] * len(rows), -0.16)
    _dots(figure, rows, "ndcg@10/match", "all other queries", [ACCENT] * len(rows), 0.16)
    _row_axis(figure, rows)
    figure.update_xaxes(title_text="NDCG@10, 95 % interval")
    figure.update_layout(margin={"t": 34})
    return figure


def confusion_matrix(
    records: Sequence[Mapping[str, Any]], queries: Sequence[Mapping[str, Any]], row: str, agents: Sequence[str]
) -> np.ndarray:
    """Counts, shape (agents, agents): best agent of the query (rows) against the row's top agent (columns).

    ValueError where a query or record names an agent that is not in ``agents``.
    """
    place = {agent: index for index, agent in enumerate(agents)}
    best = {query["id"]: query["best_agent"] for query in queries}
    counts = np.zeros((len(agents), len(agents)), dtype=int)
    for record in records:
        if record["row"] != row:
            continue
        for agent in (best[record["id"]], record["chosen"]):
            if agent not in place:
                raise ValueError(f"query {record['id']!r} names the agent {agent!r}, which is not in the pool")
        counts[place[best[record["id"]]], place[record["chosen"]]] += 1
    return counts


def confusion_figure(counts: np.ndarray, agents: Sequence[str]) -> go.Figure:
    """Heat map of a confusion matrix, each best agent's line in percent of its queries."""
    totals = counts.sum(axis=1, keepdims=True)
    share = np.divide(100.0 * counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    labels = [escaped(agent) for agent in agents]
    numbers = len(agents) <= 16
    figure = blank_figure(120 + 26 * len(agents) if numbers else 640, showlegend=False)
    figure.add_trace(
        go.Heatmap(
            z=share.tolist(),
            x=labels,
            y=labels,
            zmin=0,
            zmax=100,
            colorscale=[[0.0, "rgba(59,125,221,0.03)"], [1.0, "rgba(59,125,221,0.95)"]],
            showscale=False,
            xgap=2,
            ygap=2,
            hoverongaps=False,
            customdata=counts.tolist(),
            hovertemplate="best %{y}<br>chosen %{x}<br>%{customdata} queries, %{z:.0f} %<extra></extra>",
        )
    )
    if numbers:
        for i in range(len(agents)):
            for j in range(len(agents)):
                if counts[i, j]:
                    # Plotly's own contrast rule ignores the page behind a transparent colour; pale cells take its text.
                    font = {"size": 11, "color": "#ffffff"} if share[i, j] > 45 else {"size": 11}
                    figure.add_annotation(
                        x=labels[j], y=labels[i], text=f"{share[i, j]:.0f}", showarrow=False, font=font
                    )
    figure.update_xaxes(side="top", tickangle=-90, ticks="", showgrid=False, type="category")
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False, type="category")
    figure.update_layout(margin={"b": 8})
    return figure


def curve_figure(history: Sequence[Mapping[str, Any]], metric: str) -> go.Figure | None:
    """One metric over training steps, values thin and their centred running mean thick; None where no step has it."""
    points = [(entry["step"], float(entry[metric])) for entry in history if entry.get(metric) is not None]
    if not points:
        return None
    steps, values = (list(axis) for axis in zip(*points, strict=True))
    reach = len(values) // 30
    smooth = [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]
    figure = blank_figure(220, showlegend=False)
    label = escaped(_MEASURES.get(metric, metric))
    hover = f"step %{{x}}<br>{label} %{{y:.4g}}<extra></extra>"
    raw = {"width": 1, "color": "rgba(59,125,221,0.35)"}
    if reach:
        figure.add_trace(go.Scatter(x=steps, y=values, mode="lines", line=raw, hovertemplate=hover))
    figure.add_trace(
        go.Scatter(
            x=steps,
            y=smooth,
            mode="lines" if len(steps) > 1 else "markers",
            line={"width": 2.5, "color": ACCENT},
            hovertemplate=None if reach else hover,
            hoverinfo="skip" if reach else None,
        )
    )
    figure.update_xaxes(title_text="step")
    figure.update_layout(title={"text": label, "x": 0, "xanchor": "left", "y": 0.98, "font": {"size": 14}})
    figure.update_layout(margin={"t": 30})
    return figure


def latency_figure(latencies: Mapping[str, Sequence[float]]) -> go.Figure:
    """Share of decisions faster than a time, one step curve a row; milliseconds on a log axis."""
    figure = blank_figure(340)
    for index, row in enumerate(row_order(latencies)):
        times = np.sort(np.asarray(latencies[row], dtype=float))
        shares = np.arange(1, times.size + 1) / times.size
        if times.size > 400:
            keep = np.unique(np.linspace(0, times.size - 1, 400).astype(int))
            times, shares = times[keep], shares[keep]
        chosen = row in ("sft", "sft+rl")
        figure.add_trace(
            go.Scatter(
                x=times.tolist(),
                y=shares.tolist(),
                mode="lines",
                name=escaped(row),
                line={
                    "shape": "hv",
                    "width": 3 if row == "sft+rl" else 2,
                    "color": _colour(row) if chosen else _PALETTE[index % len(_PALETTE)],
                },
                hovertemplate="%{y:.0%} within %{x:.3g} ms<extra>" + escaped(row) + "</extra>",
            )
        )
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        figure.add_hline(y=share, line={"dash": "dot", "width": 1, "color": MUTED})
        figure.add_annotation(
            x=0, xref="paper", xanchor="left", y=share, yanchor="top", text=label, showarrow=False, font={"size": 11}
        )
    # Plotly labels 20 on a log axis as "2": spell the ticks out.
    ticks = [digit * 10.0**power for power in range(-4, 7) for digit in (1, 2, 5)]
    figure.update_xaxes(type="log", title_text="milliseconds per decision (log)")
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    figure.update_yaxes(range=[0, 1.03], tickformat=".0%", title_text="share of decisions")
    figure.update_layout(margin={"t": 34})
    return figure


def reliability_figure(predictions: Mapping[str, tuple[Sequence[float], Sequence[int]]]) -> go.Figure:
    """Frequency over predicted probability in 15 equal bins, one line a row; on the diagonal is perfect."""
    figure = blank_figure(400)
    figure.add_trace(
        go.Scatter(
            x=[0, 1],
            y=[0, 1],
            mode="lines",
            line={"dash": "dot", "width": 1, "color": MUTED},
            name="perfect",
            hoverinfo="skip",
        )
    )
    for row in row_order(predictions):
        bins = reliability_bins(*predictions[row])
        total = sum(b.n for b in bins)
        figure.add_trace(
            go.Scatter(
                x=[b.probability for b in bins],
                y=[b.frequency for b in bins],
                mode="lines+markers",
                name=escaped(row),
                line={"width": 1.5, "color": _colour(row)},
                marker={"size": [5 + 15 * float(np.sqrt(b.n / total)) for b in bins], "color": _colour(row)},
                customdata=[b.n for b in bins],
                hovertemplate="said %{x:.2f}, was %{y:.2f}<br>%{customdata} cases<extra>" + escaped(row) + "</extra>",
            )
        )
    figure.update_xaxes(title_text="predicted probability", range=[-0.02, 1.02])
    figure.update_yaxes(title_text="observed share", range=[-0.04, 1.04])
    figure.update_layout(margin={"t": 34})
    return figure
