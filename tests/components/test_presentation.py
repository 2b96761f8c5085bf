"""What the KFP UI shows of a stage, from the files it wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from kfp import dsl

from components.presentation import show_roc, show_step_evaluation, show_thresholds, show_training


def shown(path: Path) -> SimpleNamespace:
    return SimpleNamespace(path=str(path))


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["loss"], {"loss": 0.5}), ((), {"loss": 0.5, "accuracy": 0.9})],
    ids=["the named metrics", "all metrics"],
)
def test_curves_and_last_values_of_a_history(tmp_path: Path, names: list[str], expected: dict[str, float]) -> None:
    rows = [{"step": 1, "loss": 0.7, "note": "x"}, {"step": 2, "loss": 0.5, "timestamp": 7.0}, {"step": 2, "accuracy": 0.9}]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = dsl.Metrics()
    show_training(tmp_path, shown(tmp_path / "curves.html"), metrics, names, "BC")
    assert metrics.metadata == expected
    page = (tmp_path / "curves.html").read_text()
    assert ("accuracy over training steps" in page) == ("accuracy" in expected)


def test_success_and_escalation_of_every_step_row(tmp_path: Path) -> None:
    estimate = {"mean": 0.75, "low": 0.5, "high": 1.0, "n": 8}
    rows = [
        {"name": "slm", "metrics": {"success": estimate, "escalation": {**estimate, "mean": 0}, "brier": estimate}},
        {"name": "risk", "metrics": {"success": estimate}},
    ]
    (tmp_path / "summary.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "report.html").write_text("<!doctype html>")
    (tmp_path / "table.md").write_text("| row |")
    metrics = dsl.Metrics()
    show_step_evaluation(tmp_path, shown(tmp_path / "out.html"), shown(tmp_path / "out.md"), metrics)
    assert metrics.metadata == {"slm success": 0.75, "slm escalation": 0.0, "risk success": 0.75}
    assert (tmp_path / "out.html").read_text() == "<!doctype html>"
    assert (tmp_path / "out.md").read_text() == "| row |"


def test_a_roc_curve_without_infinity(tmp_path: Path) -> None:
    curve = {"fpr": [0, 0.5, 1], "tpr": [0, 1, 1], "thresholds": [math.inf, 0.6, 0.1]}
    (tmp_path / "roc.json").write_text(json.dumps(curve))
    roc = dsl.ClassificationMetrics()
    show_roc(tmp_path / "roc.json", roc)
    assert roc.metadata["confidenceMetrics"] == [
        {"confidenceThreshold": 1.0, "recall": 0, "falsePositiveRate": 0},
        {"confidenceThreshold": 0.6, "recall": 1, "falsePositiveRate": 0.5},
        {"confidenceThreshold": 0.1, "recall": 1, "falsePositiveRate": 1},
    ]


def test_the_thresholds_that_there_are(tmp_path: Path) -> None:
    thresholds = {"bayes": 0.1, "budget": math.inf, "guaranteed": None}
    (tmp_path / "risk.json").write_text(json.dumps({"thresholds": thresholds, "operating": "bayes", "c_llm": 50.0}))
    metrics = dsl.Metrics()
    show_thresholds(tmp_path / "risk.json", metrics)
    assert metrics.metadata == {"threshold bayes": 0.1}
