"""The report is one escaped, self-contained page that draws its plots and carries its data."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from routewright.evaluation import plots
from routewright.evaluation.report import (
    Section,
    curves_html,
    figure_html,
    render_page,
    table_html,
)
from routewright.evaluation.report import TableRow as Line
from routewright.evaluation.search_report import changed_by_rl, write_report
from routewright.evaluation.summary import Summary, records_by_row
from tests.evaluation.simulated import EXTRA, HOSTILE, histories, simulate, simulated_summary


class _Page(HTMLParser):
    """Tags, addresses, section titles, download links and figure data of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.files: dict[str, bytes] = {}
        self.titles: list[str] = []
        self.queries: list[str] = []
        self.figures: list[dict[str, Any]] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.addresses += [attributes[name] for name in ("src", "href", "action", "data") if name in attributes]
        self.handlers += [name for name in attributes if name.startswith("on")]
        if "download" in attributes:
            self.files[attributes["download"]] = base64.b64decode(attributes["href"].split(",", 1)[1])
        self._open = f"{tag}.{attributes.get('class', '')}"
        if self._open == "p.query":
            self.queries.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "h2.":
            self.titles.append(data)
        elif self._open == "p.query":
            self.queries[-1] += data
        elif self._open == "script.figure":
            self.figures.append(json.loads(data))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records, queries = simulate(140)
    summary, differences = simulated_summary(records, queries)
    out = tmp_path_factory.mktemp("report") / "nested" / "report.html"
    write_report(out, summary, records, queries, histories(), differences, EXTRA)
    return out


@pytest.fixture(scope="module")
def page(report: Path) -> _Page:
    return _Page(report.read_text(encoding="utf-8"))


def test_sections(page: _Page) -> None:
    assert page.titles == [
        "Ranking quality", "Mismatch queries and the rest", "Paired differences", "Gates", "What RL changed",
        "Chosen and best agent", "By agent", "Supervised fine-tuning", "Reinforcement learning", "Latency",
        "Reliability of the scores", "All metrics", "Lineage", "Data",
    ]  # fmt: skip
    assert len(page.figures) == 3 + 1 + 4 + 2


def test_nothing_points_outside(report: Path, page: _Page) -> None:
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    text = report.read_text(encoding="utf-8")
    assert text.count(get_plotlyjs()) == 1
    assert "http" not in text.replace(get_plotlyjs(), "").replace("http-equiv", "")
    assert "default-src 'none'" in text
    assert not list(report.parent.glob("*.partial"))


def test_hostile_query_is_text(report: Path, page: _Page) -> None:
    assert any(query == HOSTILE for query in page.queries)
    assert not page.handlers
    assert "<script>document.title" not in report.read_text(encoding="utf-8")


def test_hostile_names_are_text(tmp_path: Path) -> None:
    records, queries = simulate(20)
    evil = "<img src=x onerror=alert(1)>"
    renamed = json.loads(json.dumps([records, queries]).replace('"compute"', json.dumps(evil)))
    summary, differences = simulated_summary(*renamed)
    gates = [gate.model_copy(update={"name": evil}) for gate in summary.gates]
    summary = summary.model_copy(update={"profile": evil, "gates": gates})
    extra = {**EXTRA, "pool": evil, "trained": evil, "lineage": {evil: evil}}
    write_report(tmp_path / "r.html", summary, *renamed, histories(), differences, extra)  # type: ignore[arg-type]
    text = (tmp_path / "r.html").read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    assert "<img" not in text
    # Plotly reads HTML in its own texts, so names must reach it escaped as well.
    assert "\\u003cimg" not in text


def test_figure_data_cannot_close_its_script() -> None:
    hostile = "</script><script>alert(1)</script>"
    block = figure_html("f", go.Figure(layout={"title": {"text": hostile}}), hostile)
    assert block.count("</script>") == 1
    assert _Page(block).figures[0]["layout"]["title"]["text"] == hostile


def test_a_very_long_query_is_cut_in_the_page_and_whole_in_the_data(tmp_path: Path) -> None:
    records, queries = simulate(60)
    long = [{**query, "query": "word " * 20_000} for query in queries]
    summary, differences = simulated_summary(records, long)
    write_report(tmp_path / "r.html", summary, records, long, {}, differences, EXTRA)
    page = _Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.queries
    assert all(len(query) < 700 for query in page.queries)
    first = json.loads(gzip.decompress(page.files["queries.jsonl.gz"]).splitlines()[0])
    assert len(first["query"]) == 100_000


def test_data_comes_back_whole(page: _Page) -> None:
    records, queries = simulate(140)
    summary, differences = simulated_summary(records, queries)
    assert Summary.model_validate_json(page.files["summary.json"]) == summary
    for name, rows in (("records", records), ("queries", queries), ("history-rl", histories()["rl"])):
        assert [json.loads(line) for line in gzip.decompress(page.files[f"{name}.jsonl.gz"]).splitlines()] == rows
    table = list(csv.DictReader(io.StringIO(page.files["differences.csv"].decode())))
    assert [float(line["mean"]) for line in table] == [d.mean for d in differences]
    assert len(list(csv.DictReader(io.StringIO(page.files["rows.csv"].decode())))) == sum(
        len(row.metrics) for row in summary.rows
    )


def test_report_is_the_same_twice(report: Path, tmp_path: Path) -> None:
    records, queries = simulate(140)
    summary, differences = simulated_summary(records, queries)
    write_report(tmp_path / "again.html", summary, records, queries, histories(), differences, EXTRA)
    assert (tmp_path / "again.html").read_bytes() == report.read_bytes()


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    records, queries = simulate(12)
    kept = [record for record in records if record["row"] in ("intent", "oracle")]
    for record in kept:
        record["metrics"].pop("latency_ms", None)
    plain = [{**query, "mismatch": False} for query in queries]
    summary, _ = simulated_summary(records, plain)
    rows = [row for row in summary.rows if row.name in ("intent", "oracle")]
    summary = summary.model_copy(update={"rows": rows, "gates": []})
    write_report(tmp_path / "r.html", summary, kept, plain, {}, [], EXTRA)
    titles = _Page((tmp_path / "r.html").read_text(encoding="utf-8")).titles
    assert titles == ["Ranking quality", "By agent", "All metrics", "Lineage", "Data"]


def test_missing_extra_is_named(tmp_path: Path) -> None:
    records, queries = simulate(5)
    summary, _ = simulated_summary(records, queries)
    with pytest.raises(ValueError, match="lacks lineage, pool"):
        write_report(tmp_path / "r.html", summary, records, queries, {}, [], {"date": "", "trained": ""})  # type: ignore[typeddict-item]


def test_changed_by_rl_by_hand() -> None:
    def query(name: str, best: list[str]) -> dict[str, Any]:
        return {"id": name, "best_agents": best, "mismatch": True}

    def record(row: str, name: str, chosen: str, ndcg: float) -> dict[str, Any]:
        return {"row": row, "id": name, "chosen": chosen, "metrics": {"ndcg@10": ndcg}}

    queries = [query("small", ["a"]), query("large", ["a", "b"]), query("broke", ["a"]), query("same", ["a"])]
    records = [
        record("sft", "small", "c", 0.5), record("sft+rl", "small", "a", 0.8),
        record("sft", "large", "c", 0.1), record("sft+rl", "large", "b", 0.9),
        record("sft", "broke", "a", 0.9), record("sft+rl", "broke", "c", 0.1),
        record("sft", "same", "a", 0.9), record("sft+rl", "same", "a", 0.9),
    ]  # fmt: skip
    assert changed_by_rl(records_by_row(records, queries), queries) == (["large", "small"], ["broke"])


def test_confusion_matrix_by_hand() -> None:
    queries = [{"id": str(i), "best_agent": best} for i, best in enumerate("aab")]
    records = [{"row": "r", "id": str(i), "chosen": chosen} for i, chosen in enumerate("abb")]
    other = [{"row": "other", "id": "0", "chosen": "b"}]
    assert plots.confusion_matrix(records + other, queries, "r", ["a", "b"]).tolist() == [[1, 1], [0, 1]]
    with pytest.raises(ValueError, match="not in the pool"):
        plots.confusion_matrix(records, queries, "r", ["a"])


def test_confusion_figure_is_in_percent_of_the_line() -> None:
    figure = plots.confusion_figure(np.array([[3, 1], [0, 0]]), ["a", "b"])
    assert figure.data[0].z[0] == pytest.approx([75.0, 25.0])
    large = plots.confusion_figure(np.ones((64, 64), dtype=int), [f"agent {i}" for i in range(64)])
    assert not large.layout.annotations


def test_figures_show_the_numbers_of_the_rows() -> None:
    summary, _ = simulated_summary(*simulate(60))
    ndcg = plots.ndcg_figure(summary.rows)
    assert list(ndcg.data[0].x) == [row.metrics["ndcg@10"].mean for row in summary.rows]
    low = [x - e for x, e in zip(ndcg.data[0].x, ndcg.data[0].error_x.arrayminus, strict=True)]
    assert low == pytest.approx([row.metrics["ndcg@10"].low for row in summary.rows])
    mismatch, match = plots.mismatch_figure(summary.rows).data
    assert list(mismatch.x) == [row.metrics["ndcg@10/mismatch"].mean for row in summary.rows]
    assert list(match.x) == [row.metrics["ndcg@10/match"].mean for row in summary.rows]


def test_latency_and_reliability_figures() -> None:
    curve = plots.latency_figure({"sft": [30.0, 10.0, 20.0, 40.0]}).data[0]
    assert list(curve.x) == [10.0, 20.0, 30.0, 40.0]
    assert list(curve.y) == [0.25, 0.5, 0.75, 1.0]
    many = plots.latency_figure({"sft": np.arange(1.0, 5001.0).tolist()}).data[0]
    assert len(many.x) <= 400
    assert (many.x[-1], many.y[-1]) == (5000.0, 1.0)
    _, line = plots.reliability_figure({"sft": ([0.1, 0.9, 0.95], [0, 1, 0])}).data
    assert list(line.x) == pytest.approx([0.1, 0.9, 0.95])
    assert list(line.y) == pytest.approx([0.0, 1.0, 0.0])


def test_curves_page() -> None:
    history = [{"step": s, "reward": s / 10, "kl": None} for s in range(1, 6)]
    page = _Page(curves_html(history, ["reward", "kl", "absent"], "RL <training>"))
    assert len(page.figures) == 1
    assert page.figures[0]["data"][0]["y"] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    empty = curves_html([], ["loss"], "SFT")
    assert "No step was recorded" in empty
    assert len(empty) < 20_000  # no plots, no plotly.js


def test_curve_is_smoothed_but_keeps_its_values() -> None:
    history = [{"step": s, "loss": float(s % 2)} for s in range(300)]
    figure = plots.curve_figure(history, "loss")
    assert figure is not None
    raw, smooth = figure.data
    assert set(raw.y) == {0.0, 1.0}
    assert min(smooth.y[20:-20]) > 0.4
    assert max(smooth.y[20:-20]) < 0.6


def test_shell_serves_any_router() -> None:
    table = table_html(["row", "success"], [Line(["slm <tiny>", "0.646"])])
    text = render_page("Step router", [Section("Rows", table, "What each row <did>.")])
    assert "slm &lt;tiny&gt;" in text
    assert "What each row &lt;did&gt;." in text
    assert len(text) < 20_000


_PROBE = """<!doctype html><body><iframe id="f" src="report.html" style="width:WIDTHpx;height:900px;border:0"></iframe>
<script>f.onload = () => setTimeout(() => { const d = f.contentDocument; const out = document.createElement("pre");
out.textContent = JSON.stringify({ width: d.documentElement.scrollWidth, title: d.title,
drawn: [...d.querySelectorAll(".plot")].filter(p => p.querySelector(".main-svg")).length });
document.body.append(out); }, 1000);</script>"""


@pytest.mark.parametrize("width", [390, 1280])
def test_browser_draws_every_plot_and_nothing_overflows(report: Path, tmp_path: Path, width: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    shutil.copy(report, tmp_path / "report.html")
    (tmp_path / "probe.html").write_text(_PROBE.replace("WIDTH", str(width)))
    flags = [
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking",
        "--disable-component-update --disable-sync --allow-file-access-from-files --hide-scrollbars",
        "--enable-logging=stderr --virtual-time-budget=15000 --window-size=1400,1000",
    ]
    command = [chromium, *" ".join(flags).split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    address = (tmp_path / "probe.html").as_uri()
    run = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<pre>(\{.*?\})</pre>", run.stdout)
    assert found, run.stderr[-2000:]
    seen = json.loads(found[1])
    assert seen == {"width": width, "title": "Search router on aws-docs", "drawn": 10}
    assert "CONSOLE" not in run.stderr
