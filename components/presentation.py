"""What a data scientist sees of a stage in the KFP UI, from the files the stage wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routewright.evaluation.report import curves_html
from routewright.tracking import read_history


def show_training(folder: Path, curves: Any, metrics: Any, names: Sequence[str], title: str) -> None:
    """Curves of the named metrics over steps (``dsl.HTML``), and the last value of each (``dsl.Metrics``)."""
    history = read_history(folder / "history.jsonl")
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
