"""One self-contained HTML page of an evaluation: it opens without a network and carries the data behind it.

``render_page`` is the shell (title, tiles, sections) for any router; beside it is what the pages of all routers share.
"""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from routewright.evaluation import plots
from routewright.evaluation.summary import Summary


@dataclass(frozen=True)
class Section:
    """A section of a page; ``caption`` says in plain text what to see."""

    title: str
    html: Markup
    caption: str = ""


@dataclass(frozen=True)
class Tile:
    """A key number at the head of a page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class TableRow:
    """Cells of one table line, the first is its heading; ``mark`` sets the line off."""

    cells: Sequence[str | Markup]
    mark: bool = False


@dataclass(frozen=True)
class DataFile:
    """A file a reader can save from the page."""

    name: str
    kind: str
    content: bytes
    about: str


@cache
def _environment() -> Environment:
    loader = PackageLoader("routewright.evaluation", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def block(macro: str, *arguments: Any) -> Markup:
    """A piece of ``blocks.html.j2``, escaped there."""
    return Markup(getattr(_environment().get_template("blocks.html.j2").module, macro)(*arguments))


def figure_html(name: str, figure: go.Figure, alt: str) -> Markup:
    """A figure that ``render_page`` draws; ``name`` is unique on the page, ``alt`` describes it to a screen reader."""
    # Plotly writes <, > and / as \u escapes, so the data cannot end the script that holds it.
    return block("figure", name, Markup(figure.to_json()), int(figure.layout.height or 320), alt)


def table_html(columns: Sequence[str], rows: Iterable[TableRow], left: int = 1) -> Markup:
    """A table that scrolls in its own container; columns after the first ``left`` are numbers, set right."""
    return block("table", columns, list(rows), left)


def downloads_html(files: Iterable[DataFile]) -> Markup:
    """Links that hold the files themselves."""
    listed = [
        {
            "name": file.name,
            "kind": file.kind,
            "data": base64.b64encode(file.content).decode("ascii"),
            "size": f"{max(1, round(len(file.content) / 1024)):,} kB",
            "about": file.about,
        }
        for file in files
    ]
    return block("downloads", listed)


def render_page(
    title: str, sections: Sequence[Section], facts: Sequence[str] = (), lead: str = "", tiles: Sequence[Tile] = ()
) -> str:
    """The page as HTML: every text escaped, plotly.js inlined once, network access forbidden by its own policy."""
    plotly_js = Markup(get_plotlyjs()) if any('class="figure"' in section.html for section in sections) else ""
    template = _environment().get_template("report.html.j2")
    return template.render(title=title, facts=facts, lead=lead, tiles=tiles, sections=sections, plotly_js=plotly_js)


def curves_html(history: Sequence[Mapping[str, Any]], metrics: Sequence[str], title: str) -> str:
    """A self-contained page with one curve a metric over ``step``; metrics that no step has are left out."""
    return render_page(title, [Section("Training curves", curve_grid(history, metrics, "curve"), curve_caption(history))])


def curve_grid(history: Sequence[Mapping[str, Any]], metrics: Sequence[str], prefix: str) -> Markup:
    """One figure a metric over ``step``, side by side; figures are named ``prefix``-0, -1, …"""
    drawn: list[Markup] = []
    for metric in metrics:
        figure = plots.curve_figure(history, metric)
        if figure is not None:
            drawn.append(figure_html(f"{prefix}-{len(drawn)}", figure, f"{metric} over training steps"))
    return block("grid", drawn) if drawn else Markup("<p>No step was recorded.</p>")


def curve_caption(history: Sequence[Mapping[str, Any]]) -> str:
    """What the figures of `curve_grid` show."""
    steps = [entry["step"] for entry in history]
    return f"{len(steps)} records up to step {max(steps)}; thin: each record, thick: running mean." if steps else ""


def gate_section(summary: Summary) -> Section | None:
    """Each gate with its verdict, None without gates."""
    if not summary.gates:
        return None
    rows = [
        TableRow([gate.name, block("verdict", "passed" if gate.passed else "failed", "good" if gate.passed else "bad"),
                  "not measured" if gate.value is None else f"{gate.value:.4g}", f"{gate.bound:.4g}"])
        for gate in summary.gates
    ]  # fmt: skip
    passed = sum(gate.passed for gate in summary.gates)
    table = table_html(["gate", "verdict", "value", "bound"], rows, left=2)
    caption = f"{passed} of {len(summary.gates)} passed: what a run should show. A promotion has gates of its own."
    return Section("Gates", table, caption)


def lineage_section(summary: Summary, lineage: Mapping[str, str]) -> Section:
    """What the run was made of, name by name, and how long it took."""
    facts = {**lineage, "wall time": f"{summary.wall_s:,.0f} s"}
    table = table_html(["what", "value"], [TableRow([name, str(value)]) for name, value in facts.items()], left=2)
    caption = "The same code, config, data and seed on the same machine give the same metrics."
    return Section("Lineage", Markup('<div class="lineage">{}</div>').format(table), caption)


def csv_bytes(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """A CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()


def jsonl_gz(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A gzipped JSONL file, the same bytes for the same rows."""
    lines = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    return gzip.compress(lines.encode(), mtime=0)
