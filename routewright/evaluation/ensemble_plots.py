"""Plotly figures of the ensemble router's evaluation, in the manner of `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.plots import ACCENT, MUTED, SECOND, blank_figure, escaped

AGENT_COLOURS = (ACCENT, SECOND, "#2a9d8f", "#9b6dd6", "#c2577a", "#6b8e23", "#b08d57", "#5a7d9a")
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "pentagon")

Place = tuple[float, float]


def tokens_figure(
    curve: Sequence[tuple[float, float, Estimate]], own: Mapping[str, Place], same: Mapping[str, Place], served: str
) -> go.Figure:
    """Accuracy over generated tokens a question: the curve's points (τ, tokens, accuracy), and rows (tokens, accuracy).

    ``own``: rules with agents of their own, filled; ``same``: on the agents of the row ``served``, hollow.
    """
    figure = blank_figure(460)
    ordered = sorted(curve, key=lambda point: point[1])
    figure.add_trace(
        go.Scatter(
            x=[tokens for _, tokens, _ in ordered],
            y=[accuracy.mean for _, _, accuracy in ordered],
            error_y={
                "type": "data", "symmetric": False, "thickness": 1, "width": 0, "color": "rgba(59,125,221,0.45)",
                "array": [accuracy.high - accuracy.mean for _, _, accuracy in ordered],
                "arrayminus": [accuracy.mean - accuracy.low for _, _, accuracy in ordered],
            },
            mode="lines+markers",
            name=f"{escaped(served)}, τ from {min(t for t, _, _ in curve):g} to {max(t for t, _, _ in curve):g}",
            line={"width": 3, "color": ACCENT},
            marker={"size": 6, "color": ACCENT},
            customdata=[tau for tau, _, _ in ordered],
            hovertemplate="τ = %{customdata:g}: %{y:.3f} with %{x:.1f} tokens<extra></extra>",
        )
    )  # fmt: skip
    for name, places, symbol, colour, mode in (
        ("agents of its own", own, "circle", SECOND, "markers+text"),
        ("on the co-evolved agents", same, "circle-open", MUTED, "markers"),
    ):
        if places:
            figure.add_trace(
                go.Scatter(
                    x=[x for x, _ in places.values()],
                    y=[y for _, y in places.values()],
                    mode=mode,
                    name=name,
                    text=[escaped(row.rpartition(":")[2]) for row in places],
                    textposition=["middle right" if place % 2 else "top center" for place in range(len(places))],
                    textfont={"size": 11},
                    marker={"size": 9, "symbol": symbol, "color": colour, "line": {"width": 2, "color": colour}},
                    hovertemplate="%{text}: %{y:.3f} with %{x:.1f} tokens<extra></extra>",
                )
            )
    if served in own:
        x, y = own[served]
        figure.add_trace(
            go.Scatter(
                x=[x], y=[y], mode="markers", name=f"{escaped(served)} at its τ",
                marker={"size": 14, "symbol": "diamond", "color": ACCENT},
                hovertemplate=f"{escaped(served)}: %{{y:.3f}} with %{{x:.1f}} tokens<extra></extra>",
            )
        )  # fmt: skip
    figure.update_xaxes(title_text="generated tokens a question")
    figure.update_yaxes(title_text="accuracy")
    figure.update_layout(legend={"y": -0.2, "yanchor": "top"})
    return figure


def agent_domain_figure(values: Mapping[str, Sequence[float]], agents: Sequence[str], title: str) -> go.Figure:
    """Heat map of shares in [0, 1], {domain: one value an agent}; a line an agent, a column a domain."""
    domains = list(values)
    share = 100.0 * np.array([[values[domain][place] for domain in domains] for place in range(len(agents))])
    labels, lines = [escaped(domain) for domain in domains], [escaped(agent) for agent in agents]
    figure = blank_figure(210 + 28 * len(agents), showlegend=False)
    figure.add_trace(
        go.Heatmap(
            z=share.tolist(), x=labels, y=lines, zmin=0, zmax=100, showscale=False, xgap=2, ygap=2,
            colorscale=[[0.0, "rgba(59,125,221,0.03)"], [1.0, "rgba(59,125,221,0.95)"]],
            hovertemplate="%{y}, %{x}: %{z:.0f} %<extra></extra>",
        )
    )  # fmt: skip
    for row, agent in enumerate(lines):
        for column, domain in enumerate(labels):
            font = {"size": 11, "color": "#ffffff"} if share[row, column] > 45 else {"size": 11}
            figure.add_annotation(x=domain, y=agent, text=f"{share[row, column]:.0f}", showarrow=False, font=font)
    figure.update_xaxes(side="bottom", tickangle=-35, ticks="", showgrid=False, type="category")
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False, type="category")
    figure.update_layout(title={"text": escaped(title), "x": 0, "xanchor": "left", "y": 0.98, "font": {"size": 14}})
    figure.update_layout(margin={"t": 34})
    return figure


def agent_curves_figure(history: Sequence[Mapping[str, Any]], agents: Sequence[str], key: str, title: str) -> go.Figure:
    """A running mean of one value of each agent over steps, `history` lines as co-evolution writes them."""
    figure = blank_figure(260)
    for place, agent in enumerate(agents):
        points = [(line["step"], float(v)) for line in history if (v := line["agents"][agent].get(key)) is not None]
        if not points:
            continue
        steps, values = (list(axis) for axis in zip(*points, strict=True))
        reach = len(values) // 30
        smooth = [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]
        figure.add_trace(
            go.Scatter(
                x=steps, y=smooth, mode="lines" if len(steps) > 1 else "markers", name=escaped(agent),
                line={"width": 2, "color": AGENT_COLOURS[place % len(AGENT_COLOURS)]},
                hovertemplate="step %{x}: %{y:.3g}<extra>" + escaped(agent) + "</extra>",
            )
        )  # fmt: skip
    figure.update_xaxes(title_text="step")
    figure.update_layout(title={"text": escaped(title), "x": 0, "xanchor": "left", "y": 0.99, "font": {"size": 14}})
    figure.update_layout(margin={"t": 62})
    return figure


def states_figure(points: Sequence[tuple[float, float, str, str]], variance: Sequence[float]) -> go.Figure:
    """Questions at (x, y, domain, agent): coloured by agent, a symbol a domain; `variance`: the axes' shares of it."""
    figure = blank_figure(480)
    domains = sorted({domain for _, _, domain, _ in points})
    agents = sorted({agent for _, _, _, agent in points})
    for place, agent in enumerate(agents):
        own = [point for point in points if point[3] == agent]
        colour = AGENT_COLOURS[place % len(AGENT_COLOURS)]
        figure.add_trace(
            go.Scatter(
                x=[x for x, _, _, _ in own], y=[y for _, y, _, _ in own], mode="markers", name=escaped(agent),
                marker={
                    "size": 6, "opacity": 0.7, "color": colour,
                    "symbol": [_SYMBOLS[domains.index(domain) % len(_SYMBOLS)] for _, _, domain, _ in own],
                },
                text=[escaped(domain) for _, _, domain, _ in own],
                hovertemplate="%{text}<extra>" + escaped(agent) + "</extra>",
            )
        )  # fmt: skip
    for domain in domains:
        own = [point for point in points if point[2] == domain]
        figure.add_annotation(
            x=float(np.median([x for x, _, _, _ in own])), y=float(max(y for _, y, _, _ in own)), text=escaped(domain),
            showarrow=False, yshift=10, font={"size": 12},
        )  # fmt: skip
    figure.update_xaxes(title_text=f"first axis, {variance[0]:.0%} of the variance", showgrid=False)
    figure.update_yaxes(title_text=f"second axis, {variance[1]:.0%}", showgrid=False)
    figure.update_layout(margin={"t": 34})
    return figure
