"""What a data scientist sees of a stage in the KFP UI, from the files the stage wrote."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routewright.evaluation.report import curves_html
from routewright.tracking import read_history


def show_training(folder: Path, curves: Any, metrics: Any, names: Sequence[str], title: str) -> None:
    """Curves of metrics over steps (``dsl.HTML``), and the last value of each (``dsl.Metrics``).

    Without ``names`` every number in the history counts.
    """
    history = read_history(folder / "history.jsonl")
    names = names or list(
        {
            name: None
            for row in history
            for name, value in row.items()
            if name not in ("step", "timestamp") and isinstance(value, int | float)
        }
    )
    Path(curves.path).write_text(curves_html(history, list(names), title), encoding="utf-8")
    for name in names:
        values = [row[name] for row in history if name in row]
        if values:
            metrics.log_metric(name, float(values[-1]))


def show_numbers(file: Path, metrics: Any) -> None:
    """The top-level numbers of a JSON file as ``dsl.Metrics``."""
    for name, value in json.loads(file.read_text(encoding="utf-8")).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            metrics.log_metric(name, float(value))


def show_evaluation(folder: Path, report: Any, table: Any, metrics: Any, confusion: Any) -> None:
    """Report (``dsl.HTML``), table (``dsl.Markdown``), NDCG@10 by row and the chosen-against-best confusion matrix."""
    shutil.copyfile(folder / "report.html", report.path)
    shutil.copyfile(folder / "table.md", table.path)
    for row in json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rows"]:
        for metric in ("ndcg@10", "ndcg@10/mismatch"):
            if metric in row["metrics"]:
                metrics.log_metric(f"{row['name']} {metric}", float(row["metrics"][metric]["mean"]))
    matrix = json.loads((folder / "confusion.json").read_text(encoding="utf-8"))
    confusion.log_confusion_matrix(matrix["labels"], matrix["matrix"])


def show_step_evaluation(folder: Path, report: Any, table: Any, metrics: Any) -> None:
    """Report (``dsl.HTML``), table (``dsl.Markdown``), success and escalation of every row (``dsl.Metrics``)."""
    shutil.copyfile(folder / "report.html", report.path)
    shutil.copyfile(folder / "table.md", table.path)
    for row in json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rows"]:
        for metric in ("success", "escalation"):
            if metric in row["metrics"]:
                metrics.log_metric(f"{row['name']} {metric}", float(row["metrics"][metric]["mean"]))


def show_roc(file: Path, roc: Any) -> None:
    """The ROC curve in a JSON file of ``fpr``, ``tpr`` and ``thresholds`` (``dsl.ClassificationMetrics``)."""
    curve = json.loads(file.read_text(encoding="utf-8"))
    # The first threshold of a curve is infinite, which KFP's JSON cannot say; a risk is at most 1.
    thresholds = [min(float(threshold), 1.0) for threshold in curve["thresholds"]]
    roc.log_roc_curve(curve["fpr"], curve["tpr"], thresholds)


def show_thresholds(file: Path, metrics: Any) -> None:
    """The thresholds of a risk.json (``dsl.Metrics``); one that nothing could be said about is left out."""
    for name, threshold in json.loads(file.read_text(encoding="utf-8"))["thresholds"].items():
        if threshold is not None and math.isfinite(threshold):
            metrics.log_metric(f"threshold {name}", float(threshold))
