"""The step router's pipeline from the command line, every stage real, on a few text games."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from routewright.evaluation.summary import STEP_ROWS

ROOT = Path(__file__).parents[2]
STAGES = ("fetch-dataset", "synthesize", "distill-bc", "verifier", "distill-dpo", "calibrate", "evaluate")
TRAINED = ("distill-bc", "verifier", "distill-dpo", "calibrate")


@pytest.mark.skipif(importlib.util.find_spec("textworld") is None, reason="needs pip install 'routewright[textworld]'")
def test_the_step_pipeline_runs_and_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "routewright.cli", "run", "step-router", "--profile", "smoke", "--out", str(out)]
    # In a folder of its own, so that its tracking store is there too.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": ""}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    assert run.returncode == 0, run.stdout
    for stage in STAGES:
        assert f"▸ {stage}" in run.stdout
        assert f"✓ {stage}" in run.stdout
    assert "KFP Executor" not in run.stdout
    assert (out / "report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["pipeline"], summary["profile"]) == ("step-router", "smoke")
    rows = {row["name"]: row["metrics"] for row in summary["rows"]}
    assert set(STEP_ROWS) <= set(rows)
    assert rows["slm"]["escalation"]["mean"] == 0
    assert rows["llm"]["escalation"]["mean"] == 1
    assert all(0 <= metrics["success"]["mean"] <= 1 for metrics in rows.values())
    assert summary["wall_s"] > 0
    assert all((out / path).exists() for path in summary["artifacts"].values())
    assert (out / "model" / "risk.json").is_file()
    assert {path.parent.name for path in (out / "kfp").rglob("curves")} == set(TRAINED)
    assert not [file for file in out.rglob("*") if file.suffix in (".pkl", ".pickle")]
    recorded(tmp_path)


def recorded(folder: Path) -> None:
    """One MLflow parent run with a finished run a stage; curves, the model and data are there."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs/mlflow.db")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("step-router")
    assert experiment is not None
    runs = {run.data.tags["routewright.stage"]: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"pipeline", *STAGES}
    parent = runs.pop("pipeline").info.run_id
    for run in runs.values():
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert run.data.tags["config_hash"]
    for stage in TRAINED:
        assert runs[stage].data.metrics, "the history's last values"
        assert runs[stage].inputs.dataset_inputs
    assert len(client.get_metric_history(runs["calibrate"].info.run_id, "brier")) > 1
    assert runs["evaluate"].data.metrics["llm/escalation"] == 1
    (model,) = mlflow.search_logged_models([experiment.experiment_id], output_format="list")
    assert model.name == "step-router"
