"""The ensemble router's page holds both tables, draws its plots, needs no network, and carries its data."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs
from simulated_ensemble import AGENTS, small

from routewright.ensemble_router.results import EnsembleResults, gates_of, separating
from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.ensemble_report import EnsembleReportExtra, write_ensemble_report
from routewright.evaluation.summary import Summary, rich_table, table_markdown

EXTRA: EnsembleReportExtra = {
    "dataset": "gcd, spell_backward",
    "date": "2026-03-05",
    "trained": "Four LoRA agents and a familiarity router learnt together from 9,600 verified answers.",
    "lineage": {"profile digest": "9f86d081884c", "ensemble router": "0123456789ab"},
}


def histories() -> dict[str, list[dict[str, Any]]]:
    told = {"f": 0.3, "share": 0.5, "entropy": 0.4, "updates": 3, "n": 4, "gain": None, "reward": {}}
    lines = [
        {"step": step, "answers": 9 * step, "agents_per_query": 2.0, "reward": 0.5, "agents": dict.fromkeys(AGENTS, told)}
        for step in range(40)
    ]
    return {"familiarity": lines, "top-1": lines}


class _Text(str):
    """The page with what is in it."""

    @property
    def titles(self) -> list[str]:
        return re.findall(r"<h2>(.*?)</h2>", self)

    @property
    def figures(self) -> list[Any]:
        found = re.findall(
            r'<script type="application/json" class="figure" data-for="[^"]+">(.*?)</script>', self, re.DOTALL
        )
        return [json.loads(one) for one in found]

    @property
    def files(self) -> dict[str, bytes]:
        found = re.findall(r'<a download="([^"]+)" href="data:[^;]+;base64,([^"]+)">', self)
        return {name: base64.b64decode(data) for name, data in found}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> _Text:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_ensemble_report(*small(), histories(), EXTRA, path)
    assert not list(path.parent.glob("*.partial"))
    return _Text(path.read_text(encoding="utf-8"))


def _heads(page: str, title: str) -> list[str]:
    return re.findall(r'<th scope="row">(.*?)</th>', page.split(f"<h2>{title}</h2>")[1].split("</table>")[0])


def test_sections_and_both_tables(page: _Text) -> None:
    assert page.titles == [
        "Accuracy against tokens", "Each rule with agents of its own", "All rules on the co-evolved agents",
        "Paired differences", "Gates", "By domain", "Specialisation", "Map of the questions",
        "Training, familiarity", "Training, top-1", "Lineage", "Data",
    ]  # fmt: skip
    assert len(page.figures) == 1 + 4 + 1 + (2 + 4) + (2 + 1)
    own = _heads(page, "Each rule with agents of its own")
    assert own == ["majority", "warm", "top-1", "top-2", "all", "frozen-router", "familiarity"]
    same = _heads(page, "All rules on the co-evolved agents")
    assert same == ["single-best", "familiarity", "warm:routed", "co-evolved:all", "co-evolved:top-2"]
    results, _ = small()
    row = next(row for row in results.rows if row.name == "familiarity")
    assert f"{row.metrics['accuracy'].mean:.1%}" in page.split("<h2>")[0]  # the tile


def test_nothing_points_outside(page: _Text) -> None:
    addresses = re.findall(r'(?:href|src)="([^"]*)"', page.replace(get_plotlyjs(), ""))
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "default-src 'none'" in page


def test_differences_are_paired_and_say_how_many_questions_would_separate(page: _Text) -> None:
    results, _ = small()
    inside = {c.b: c for c in results.comparisons if not c.ood}
    assert inside["warm"].difference.low > 0
    assert inside["warm"].questions is None
    unclear = inside["all"]
    assert unclear.difference.low <= 0 <= unclear.difference.high
    assert unclear.questions is not None
    assert unclear.questions > 300
    table = page.split("<h2>Paired differences</h2>")[1].split("</table>")[0]
    assert f"{unclear.questions:,}" in table
    assert ("good", "above") in re.findall(r'class="verdict (\w*)" role="img" aria-label="(\w+)">', table)


def test_separating_by_hand() -> None:
    """Mean 0.1, standard deviation 0.5: (1.96·0.5/0.1)² = 96.04, so 97 questions."""
    values = np.array([0.6, -0.4] * 10)
    unclear = Estimate(mean=0.1, low=-0.1, high=0.3, n=20)
    assert separating(values, unclear) == 97
    assert separating(values, unclear.model_copy(update={"low": 0.01})) is None
    assert separating(values, unclear.model_copy(update={"mean": 0.0})) is None


def test_gates_say_what_was_promised() -> None:
    results, summary = small()
    gates = {gate.name: gate for gate in summary.gates}
    assert list(gates) == [
        "accuracy − all's, the better of top-2 and all", "tokens ÷ all's", "accuracy − top-1's, lower end",
        "accuracy − linucb's, lower end: not measured, no agents were trained with linucb",
        "accuracy − reward-regression's, lower end: not measured, no agents were trained with reward-regression",
        "accuracy − classifier's, lower end: not measured, no agents were trained with classifier",
        "accuracy − frozen-router's, lower end", "accuracy − warm's, lower end",
        "bits of agent and domain − untrained router's",
    ]  # fmt: skip
    assert gates["tokens ÷ all's"].passed
    assert gates["tokens ÷ all's"].value == pytest.approx(1 / 3, abs=0.03)
    without = [c for c in results.comparisons if c.b != "frozen-router"]
    rows = [row for row in results.rows if row.name != "frozen-router"]
    told = gates_of(results.model_copy(update={"comparisons": without, "rows": rows}))
    assert [(gate.name, gate.passed, gate.value) for gate in told if "frozen" in gate.name] == [
        ("accuracy − frozen-router's, lower end: not measured, no agents were trained with frozen-router", False, None)
    ]
    collapsed = results.specialisation.model_copy(update={"information": 0.0, "p": 1.0})
    last = gates_of(results.model_copy(update={"specialisation": collapsed}))[-1]
    assert not last.passed
    alike = results.specialisation.model_copy(update={"interaction_p": 0.4})
    assert not gates_of(results.model_copy(update={"specialisation": alike}))[-1].passed


def test_data_comes_back_whole(page: _Text) -> None:
    results, summary = small()
    assert EnsembleResults.model_validate_json(page.files["results.json"]) == results
    assert Summary.model_validate_json(page.files["summary.json"]) == summary
    curve = list(csv.DictReader(io.StringIO(page.files["tau.csv"].decode())))
    assert [float(line["tau"]) for line in curve] == [0.1, 1.0]
    lines = gzip.decompress(page.files["history-top-1.jsonl.gz"]).splitlines()
    assert [json.loads(line) for line in lines] == histories()["top-1"]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    results, summary = small()
    points = [point.model_copy(update={"domain": evil}) for point in results.map]
    results = results.model_copy(update={"ood_domains": [evil], "map": points})
    extra: EnsembleReportExtra = {"dataset": evil, "date": evil, "trained": evil, "lineage": {evil: evil}}
    write_ensemble_report(results, summary.model_copy(update={"profile": evil}), histories(), extra, tmp_path / "r.html")
    assert "<img" not in (tmp_path / "r.html").read_text(encoding="utf-8").replace(get_plotlyjs(), "")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    results, summary = small()
    with pytest.raises(ValueError, match="lacks lineage, trained"):
        write_ensemble_report(results, summary, {}, {"dataset": "", "date": ""}, tmp_path / "r.html")  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="not those of the results"):
        write_ensemble_report(results, summary.model_copy(update={"rows": []}), {}, EXTRA, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_tables_lead_with_accuracy() -> None:
    _, summary = small()
    first = table_markdown(summary).splitlines()[0]
    assert first.startswith("| row | accuracy | accuracy/ood | tokens | tokens/ood | agents_per_query |")
    from rich.console import Console

    console = Console(width=60, record=True, file=io.StringIO())
    console.print(rich_table(summary))
    text = console.export_text()
    assert "familiarity" in text
    assert "tokens" in text
