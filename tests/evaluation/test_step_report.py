"""The step router's page holds the rows, draws its plots, needs no network, and carries its data."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from routewright.evaluation.step_report import StepReportExtra, write_step_report
from routewright.evaluation.summary import STEP_ROWS, Gate, Summary
from routewright.step_router.episodes import Episode, Turn
from routewright.step_router.features import NAMES
from routewright.step_router.results import StepResults, build_results

EXTRA: StepReportExtra = {
    "dataset": "TextWorld",
    "date": "2026-03-05 14:20 UTC",
    "trained": "SmolLM2-135M learned 5,255 states of 900 teacher episodes, then 640 preference pairs of its verifier. "
    "The risk router was fitted on the episodes that this small model failed, on games that it never saw.",
    "lineage": {"git sha": "0123456789abcdef0123456789abcdef01234567", "config hash": "9f86d081884c7d659a2feaa0c55ad015"},
}
# How well a router's signal tells the episodes that the small model fails.
SKILL = {"random-matched": 0.0, "entropy": 0.35, "verifier": 0.3, "time": 0.4, "repeat": 0.5, "query-level": 0.25,
         "failure-risk": 0.6, "failure-no-cvar": 0.55,
         "risk": 0.75, "risk-no-cvar": 0.7, "risk-no-jsd": 0.7}  # fmt: skip
KINDS = ("tool_failure", "truncation", "injection", "stale")


def simulate(tasks: int, seeds: int, seed: int = 0) -> tuple[list[Episode], dict[str, float], dict[str, list[list[float]]]]:
    """Episodes of all rows at four thresholds, operating thresholds, and risks."""
    rng = np.random.default_rng(seed)
    pairs = [(f"game-{i:03d}", z) for i in range(tasks) for z in range(seeds)]
    hardness = np.repeat(rng.beta(1.2, 2.2, tasks), seeds)
    fails = {"": rng.random(len(pairs)) < hardness, "-no-jsd": rng.random(len(pairs)) < np.minimum(1, hardness * 1.2)}
    lengths = {name: np.where(lost, 10, rng.integers(3, 9, len(pairs))) for name, lost in fails.items()}
    teacher = rng.integers(3, 7, len(pairs))
    luck = rng.random(len(pairs)) < 0.985
    episodes: list[Episode] = []

    def add(
        row: str, threshold: float | None, success: np.ndarray, calls: np.ndarray, steps: np.ndarray, turns: bool
    ) -> None:
        for i, (task, z) in enumerate(pairs):
            told = tuple(
                Turn("go north", "slm", tuple(rng.normal(0.3 * (10 - int(steps[i]) < 1), 1, len(NAMES)).tolist()),
                     (KINDS[int(rng.integers(4))],) if rng.random() < 0.15 else ())
                for _ in range(int(steps[i]))
            ) if turns else ()  # fmt: skip
            kind = "cooking" if int(task[5:]) % 4 == 0 else "quest"
            episodes.append(Episode(row, threshold, task, kind, z, bool(success[i]), int(steps[i]), int(calls[i]), told))

    none = np.zeros(len(pairs))
    add("slm", None, ~fails[""], none, lengths[""], True)
    add("slm-no-jsd", None, ~fails["-no-jsd"], none, lengths["-no-jsd"], True)
    add("llm", None, luck, teacher, teacher, False)
    for row, skill in SKILL.items():
        suffix = "-no-jsd" if row.endswith("-no-jsd") else ""
        score = skill * fails[suffix] + (1 - skill) * rng.random(len(pairs))
        for threshold in (0.85, 0.7, 0.55, 0.4, 0.2):
            takes = score > threshold
            late = np.where(takes, rng.integers(1, 4, len(pairs)), 0) if row != "query-level" else none
            add(row, threshold, np.where(takes, luck & (rng.random(len(pairs)) < 0.98), ~fails[suffix]),
                np.where(takes, teacher, 0), np.where(takes, teacher + late, lengths[suffix]), False)  # fmt: skip
    operating = {row: 0.55 for row in SKILL if row.startswith("risk")}
    risks = {}
    for row in operating:
        own = [e for e in episodes if e.row == ("slm-no-jsd" if row.endswith("-no-jsd") else "slm")]
        level = {e.task: h for e, h in zip(own, hardness, strict=True)}
        slope = {True: -0.036 * SKILL[row], False: 0.12 * SKILL[row]}
        risks[row] = [
            np.clip(level[e.task] + slope[e.success] * np.arange(e.steps) + rng.normal(0, 0.1, e.steps), 0, 1).tolist()
            for e in own
        ]
    return episodes, operating, risks


def histories(seed: int = 0) -> dict[str, list[dict[str, float]]]:
    """Training histories that look like training."""
    rng = np.random.default_rng(seed)

    def falling(high: float, low: float, pace: float, n: int) -> list[float]:
        return [low + (high - low) * float(np.exp(-s / pace)) + 0.03 * float(rng.normal()) for s in range(n)]

    columns = {
        "bc": {"loss": falling(2.4, 0.3, 40, 200)},
        "verifier": {"loss": falling(0.7, 0.3, 30, 120), "accuracy": falling(0.5, 0.86, 30, 120)},
        "dpo": {"loss": falling(0.693, 0.5, 30, 90), "reward_margin": falling(0, 1.2, 30, 90),
                "jsd": falling(0.2, 0.05, 30, 90)},
        "router": {"brier": falling(0.25, 0.17, 60, 300), "cvar": falling(0.5, 0.3, 60, 300),
                   "lambda": falling(0.69, 0.2, 60, 300), "cost": falling(0.5, 0.3, 60, 300)},
    }  # fmt: skip
    return {
        stage: [{"step": s + 1, **{metric: values[s] for metric, values in found.items()}}
                for s in range(len(next(iter(found.values()))))]
        for stage, found in columns.items()
    }  # fmt: skip


def simulated(tasks: int, seeds: int, resamples: int) -> tuple[StepResults, Summary]:
    episodes, operating, risks = simulate(tasks, seeds)
    results = build_results(
        episodes, operating, risks, 1.0, 50.0, 0.2, 0, resamples,
        predict=lambda rows: 1 / (1 + np.exp(-rows @ np.linspace(1.5, 0, len(NAMES)))),
        ablation={"repeats": {"brier": 0.19, "auc": 0.71}, "verifier_*": {"brier": 0.181, "auc": 0.75}},
        thresholds={"parity": 0.55, "bayes": 0.8, "guaranteed": None},
    )  # fmt: skip
    gates = [Gate(name="risk above entropy", passed=True, value=0.03, bound=0.0)]
    summary = Summary(pipeline="step-router", profile="laptop", seed=0, wall_s=1902.0, rows=results.rows, gates=gates)
    return results, summary


@cache
def small() -> tuple[StepResults, Summary]:
    return simulated(24, 3, 60)


class _Text(str):
    """A page; its tags, downloads and figures."""

    @property
    def titles(self) -> list[str]:
        return re.findall(r"<h2>(.*?)</h2>", self)

    @property
    def addresses(self) -> list[str]:
        return re.findall(r"<[a-z][^>]*?\s(?:src|href|action|data)=\"([^\"]*)\"", self.replace(get_plotlyjs(), ""))

    @property
    def files(self) -> dict[str, bytes]:
        found = re.findall(r'download="([^"]+)" href="data:[^;]+;base64,([^"]*)"', self)
        return {name: base64.b64decode(data) for name, data in found}

    @property
    def figures(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in re.findall(r'class="figure" data-for="[^"]+">(.*?)</script>', self, re.DOTALL)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "nested" / "report.html"
    write_step_report(*small(), histories(), EXTRA, out)
    return out


@pytest.fixture(scope="module")
def page(report: Path) -> _Text:
    return _Text(report.read_text(encoding="utf-8"))


def test_sections_and_rows(page: _Text) -> None:
    assert page.titles == [
        "Success against escalation", "All rows", "Thresholds", "Paired differences", "97 % of the LLM", "Gates",
        "Worst seeds", "Calibration", "By environment", "By perturbation", "Which features count", "Ablations",
        "Behaviour cloning", "Process verifier", "Verifier-guided DPO", "Risk router", "Lineage", "Data",
    ]  # fmt: skip
    assert len(page.figures) == 1 + 1 + 2 + 1 + 2 + 3 + 4
    table = page.split("<h2>All rows</h2>")[1].split("</table>")[0]
    assert re.findall(r'<th scope="row">(.*?)</th>', table) == list(STEP_ROWS)
    results, _ = small()
    risk = next(row for row in results.rows if row.name == "risk")
    assert f"{risk.metrics['success'].mean:.3f}" in table
    assert f"{risk.metrics['success'].mean:.1%}" in page.split("<h2>")[0]  # the tile


def test_nothing_points_outside(report: Path, page: _Text) -> None:
    assert page.addresses
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert page.count(get_plotlyjs()) == 1
    assert "http" not in page.replace(get_plotlyjs(), "").replace("http-equiv", "")
    assert "default-src 'none'" in page
    assert not list(report.parent.glob("*.partial"))


def test_the_frontier_is_drawn_from_the_measured_settings(page: _Text) -> None:
    results, _ = small()
    drawn = {trace["name"]: trace for trace in page.figures[0]["data"]}
    assert {"slm", "llm", "oracle", "risk at its threshold", *SKILL} == set(drawn)
    for frontier in results.frontiers:
        assert drawn[frontier.row]["x"] == [p.escalation for p in frontier.points]
        assert drawn[frontier.row]["y"] == [p.success for p in frontier.points]
    assert drawn["risk at its threshold"]["x"] == pytest.approx([results.matched_rate])
    assert drawn["oracle"]["x"] == [results.oracle_rate]


def test_verdicts_follow_the_intervals(page: _Text) -> None:
    results, _ = small()
    table = page.split("<h2>Paired differences</h2>")[1].split("</table>")[0]
    words = re.findall(r'class="verdict (\w*)" role="img" aria-label="([\w ]+)">(.)<', table)
    measures = ("oracle rate", "own rate", "area")
    expected = []
    for frontier in results.frontiers:
        for at in measures:
            for c in results.comparisons:
                if (c.a, c.b, c.at) == ("risk", frontier.row, at):
                    d, new = c.difference, c.new_seeds
                    assert new is not None
                    if d.low > 0:
                        expected.append(("good", "above", "▲") if new.low > 0 else ("", "above under these seeds", "△"))
                    elif d.high < 0:
                        expected.append(("bad", "below", "▼") if new.high < 0 else ("", "below under these seeds", "▽"))
                    else:
                        expected.append(("", "unclear", "○"))
                    for e in (d, new):
                        assert f"[{e.low:.3f}, {e.high:.3f}]".replace("-0.000", "0.000").replace("-", "−") in table
    assert words == expected
    assert {mark for *_, mark in words} == {"▲", "△", "○"}


def test_thresholds_are_read_off_the_frontier(page: _Text) -> None:
    """Where risk stands is measured; the one from costs lies between two settings; none that was certified is told."""
    section = page.split("<h2>Thresholds</h2>")[1].split("<h2>")[0]
    assert re.findall(r'<tr( class="mark")?><th scope="row">(\w+)</th>', section) == [
        (' class="mark"', "parity"), ("", "bayes"), ("", "guaranteed")
    ]  # fmt: skip
    risk = next(f for f in small()[0].frontiers if f.row == "risk")
    at = {p.threshold: p.success for p in risk.points}
    low, high = sorted([at[0.7], at[0.85]])
    assert f"{at[0.55]:.3f}" in section
    assert f"{low:.3f}–{high:.3f}" in section
    assert "none: all to the LLM" in section
    assert "read off the frontier" in section


def test_success_is_told_under_new_seeds_too(page: _Text) -> None:
    section = page.split("<h2>All rows</h2>")[1].split("<h2>")[0]
    slm = small()[0].success_new_seeds["slm"]
    assert f"under new seeds too: slm {slm.low:.3f}–{slm.high:.3f}, risk " in section
    assert "risk and its ablations" not in section, "risk-no-cvar has no threshold of its own"


def test_a_lower_cvar_is_the_good_side(page: _Text) -> None:
    results, _ = small()
    own = [c for c in results.comparisons if (c.a, c.at) == ("risk", "cvar at own rate")]
    lower = [c.b for c in own if c.difference.high < 0]
    table = page.split("<h2>Worst seeds</h2>")[1].split("</table>")[0]
    assert lower
    assert table.count('class="verdict good" role="img" aria-label="below">▼') == len(lower)


def test_the_cvar_ablation_stands_where_the_term_acts(page: _Text) -> None:
    section = page.split("<h2>Ablations</h2>")[1].split("<h2>")[0]
    assert re.findall(r'<th scope="row">(.*? − .*?no-cvar)</th>', section) == [
        "failure-risk − failure-no-cvar", "risk − risk-no-cvar"
    ]  # fmt: skip
    assert "The CVaR term acts on the risk" in section


def test_the_share_read_with_hindsight_is_told_from_the_operating_one(page: _Text) -> None:
    results, _ = small()
    section = page.split("<h2>97 % of the LLM</h2>")[1].split("<h2>")[0]
    own = next(target for target in results.targets if target.row == "risk").operating_ratio
    assert own is not None
    assert f"{own.mean:.3f}" in section
    for title in ("97 % of the LLM", "Gates"):
        assert "is read with hindsight" in page.split(f"<h2>{title}</h2>")[1].split("<h2>")[0]


def test_data_comes_back_whole(page: _Text) -> None:
    results, summary = small()
    assert StepResults.model_validate_json(page.files["results.json"]) == results
    assert Summary.model_validate_json(page.files["summary.json"]) == summary
    points = list(csv.DictReader(io.StringIO(page.files["frontier.csv"].decode())))
    assert len(points) == sum(len(frontier.points) for frontier in results.frontiers)
    differences = list(csv.DictReader(io.StringIO(page.files["differences.csv"].decode())))
    assert [float(line["mean"]) for line in differences] == [c.difference.mean for c in results.comparisons]
    lines = gzip.decompress(page.files["history-router.jsonl.gz"]).splitlines()
    assert [json.loads(line) for line in lines] == histories()["router"]


def test_report_is_the_same_twice(report: Path, tmp_path: Path) -> None:
    write_step_report(*small(), histories(), EXTRA, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == report.read_bytes()


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    episodes, _, _ = simulate(6, 2)
    kept = [e for e in episodes if e.row in ("slm", "llm", "risk")]
    results = build_results(kept, {"risk": 0.55}, {}, 1.0, 50.0, 0.2, 0, 20)
    summary = Summary(pipeline="step-router", profile="smoke", seed=0, wall_s=1.0, rows=results.rows)
    write_step_report(results, summary, {}, EXTRA, tmp_path / "r.html")
    titles = _Text((tmp_path / "r.html").read_text(encoding="utf-8")).titles
    assert titles == [
        "Success against escalation", "All rows", "97 % of the LLM", "Worst seeds", "By environment", "By perturbation",
        "Lineage", "Data",
    ]  # fmt: skip


def test_hostile_names_are_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    results, summary = small()
    groups = [group.model_copy(update={"name": evil}) for group in results.by_environment]
    results = results.model_copy(update={"by_environment": groups, "ablation": {evil: results.ablation["repeats"]}})
    extra: StepReportExtra = {"dataset": evil, "date": evil, "trained": evil, "lineage": {evil: evil}}
    write_step_report(results, summary.model_copy(update={"profile": evil}), histories(), extra, tmp_path / "r.html")
    assert "<img" not in (tmp_path / "r.html").read_text(encoding="utf-8").replace(get_plotlyjs(), "")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    results, summary = small()
    with pytest.raises(ValueError, match="lacks lineage, trained"):
        write_step_report(results, summary, {}, {"dataset": "", "date": ""}, tmp_path / "r.html")  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="not those of the results"):
        write_step_report(results, summary.model_copy(update={"rows": summary.rows[1:]}), {}, EXTRA, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


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
    assert json.loads(found[1]) == {"width": width, "title": "Step router on TextWorld", "drawn": 14}
    assert "CONSOLE" not in run.stderr
