"""Plotly figures of the step router's evaluation: the frontier, calibration, importance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from routewright.evaluation.plots import ACCENT, MUTED, SECOND, blank_figure, escaped
from routewright.evaluation.summary import row_order

_STYLES = {
    "risk": (ACCENT, "solid"), "risk-no-cvar": (ACCENT, "dash"), "risk-no-jsd": (ACCENT, "dot"),
    "entropy": (SECOND, "solid"), "verifier": ("#2a9d8f", "solid"), "query-level": ("#9b6dd6", "solid"),
    "failure-risk": ("#b07c2a", "solid"), "failure-no-cvar": ("#b07c2a", "dash"),
    "time": ("#c2577a", "solid"), "repeat": ("#6b8e23", "solid"), "random-matched": (MUTED, "dash"),
}  # fmt: skip


def frontier_figure(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    references: Mapping[str, tuple[float, float]],
    operating: tuple[float, float],
) -> go.Figure:
    """Success against escalation, points (escalation, success): a line a router, references and the operating point."""
    figure = blank_figure(560)
    # The router under test is drawn last, over the others.
    for row in sorted(row_order(curves), key=lambda name: name == "risk"):
        colour, dash = _STYLES.get(row, (MUTED, "solid"))
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in curves[row]],
                y=[y for _, y in curves[row]],
                mode="lines+markers",
                name=escaped(row),
                line={"width": 3 if row == "risk" else 1.5, "color": colour, "dash": dash},
                marker={"size": 6 if row == "risk" else 4, "color": colour},
                hovertemplate="%{y:.3f} at %{x:.1%}<extra>" + escaped(row) + "</extra>",
            )
        )
    marks = [(row, place, "circle-open", 11, MUTED) for row, place in references.items()]
    for name, (x, y), symbol, size, colour in [*marks, ("risk at its threshold", operating, "diamond", 14, ACCENT)]:
        figure.add_trace(
            go.Scatter(
                x=[x],
                y=[y],
                mode="markers" if name.startswith("risk") else "markers+text",
                name=escaped(name),
                text=[escaped(name)],
                textposition={"slm": "bottom right", "llm": "bottom left"}.get(name, "middle right"),
                marker={"size": size, "symbol": symbol, "color": colour, "line": {"width": 2, "color": colour}},
                hovertemplate=f"{escaped(name)}: %{{y:.3f}} at %{{x:.1%}}<extra></extra>",
                showlegend=name.startswith("risk"),
            )
        )
    figure.update_xaxes(title_text="escalation: share of steps that the LLM takes", tickformat=".0%", range=[-0.03, 1.03])
    figure.update_yaxes(title_text="success")
    figure.update_layout(legend={"y": -0.16, "yanchor": "top"})
    return figure


def risk_reliability_figure(bins: Mapping[str, Sequence[tuple[float, float, int]]]) -> go.Figure:
    """Failure frequency over predicted risk, bins (probability, frequency, n), one line a row; the diagonal is perfect."""
    figure = blank_figure(400)
    figure.add_trace(
        go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"dash": "dot", "width": 1, "color": MUTED}, name="perfect",
                   hoverinfo="skip")
    )  # fmt: skip
    for row in row_order(bins):
        colour, dash = _STYLES.get(row, (MUTED, "solid"))
        total = sum(n for _, _, n in bins[row])
        figure.add_trace(
            go.Scatter(
                x=[probability for probability, _, _ in bins[row]],
                y=[frequency for _, frequency, _ in bins[row]],
                mode="lines+markers",
                name=escaped(row),
                line={"width": 1.5, "color": colour, "dash": dash},
                marker={"size": [5 + 15 * float(np.sqrt(n / total)) for _, _, n in bins[row]], "color": colour},
                customdata=[n for _, _, n in bins[row]],
                hovertemplate="said %{x:.2f}, was %{y:.2f}<br>%{customdata} steps<extra>" + escaped(row) + "</extra>",
            )
        )
    figure.update_xaxes(title_text="predicted risk", range=[-0.02, 1.02])
    figure.update_yaxes(title_text="share that failed", range=[-0.04, 1.04])
    figure.update_layout(margin={"t": 34})
    return figure


def importance_figure(changes: Mapping[str, tuple[float, float]], label: str) -> go.Figure:
    """Bars (mean, standard deviation over repeats), one a feature, the largest on top."""
    names = sorted(changes, key=lambda name: changes[name][0])
    figure = blank_figure(60 + 22 * len(names), showlegend=False)
    figure.add_trace(
        go.Bar(
            x=[changes[name][0] for name in names],
            y=[escaped(name) for name in names],
            orientation="h",
            marker={"color": ACCENT},
            error_x={"type": "data", "array": [changes[name][1] for name in names], "thickness": 1.5, "width": 0,
                     "color": MUTED},
            hovertemplate="%{y}: %{x:.4f}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_xaxes(title_text=escaped(label))
    figure.update_yaxes(showgrid=False, type="category")
    return figure
