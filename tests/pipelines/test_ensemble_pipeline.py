"""The ensemble router's pipeline: how its stages hang together, and from the command line, every stage real."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "pipelines" / "compiled" / "ensemble-router.yaml"
STAGES = ("fetch-dataset", "synthesize", "coevolve", "evaluate")


def artifact_sources(task: dict[str, Any]) -> dict[str, str]:
    """{input: "task.output"} of a compiled task's artifacts."""
    given = task.get("inputs", {}).get("artifacts", {})
    outputs = {name: source["taskOutputArtifact"] for name, source in given.items() if "taskOutputArtifact" in source}
    return {name: f"{output['producerTask']}.{output['outputArtifactKey']}" for name, output in outputs.items()}


def test_the_ensemble_pipeline_chains_its_stages() -> None:
    root = yaml.safe_load(COMPILED.read_text(encoding="utf-8"))["root"]
    parameters = root["inputDefinitions"]["parameters"]
    assert {name: kind["parameterType"] for name, kind in parameters.items()} == {
        "profile": "STRING", "seed": "NUMBER_INTEGER", "promote": "BOOLEAN", "deploy": "STRING"
    }  # fmt: skip
    tasks = root["dag"]["tasks"]
    assert {name: artifact_sources(task) for name, task in tasks.items() if name != "condition-1"} == {
        "fetch-dataset": {},
        "synthesize": {"dataset": "fetch-dataset.dataset"},
        "coevolve": {"examples": "synthesize.examples"},
        "evaluate-ensemble": {"examples": "synthesize.examples", "trained": "coevolve.trained"},
    }
    for name in ("fetch-dataset", "synthesize"):
        assert tasks[name]["inputs"]["parameters"]["router"] == {"runtimeValue": {"constant": "ensemble-router"}}
    assert set(artifact_sources(tasks["condition-1"]).values()) == {
        "fetch-dataset.dataset", "synthesize.examples", "coevolve.router", "evaluate-ensemble.evaluation"
    }  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs pip install 'routewright[ensemble]'")
def test_the_ensemble_pipeline_runs_is_recorded_and_is_reused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "routewright.cli", "run", "ensemble-router", "--profile", "smoke", "--out", str(out)]
    # In a folder of its own, so that its tracking store is there too.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": "", "COLUMNS": "200"}

    def run() -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    said = run()
    for stage in STAGES:
        assert f"▸ {stage}" in said
        assert f"✓ {stage}" in said
    assert f"routewright serve ensemble-router --model {out / 'model'}" in said
    assert (out / "report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["pipeline"], summary["profile"]) == ("ensemble-router", "smoke")
    rows = {row["name"]: row["metrics"] for row in summary["rows"]}
    assert {"familiarity", "top-1", "frozen-router", "single-best"} <= set(rows)
    assert all(0 <= metrics["accuracy"]["mean"] <= 1 for metrics in rows.values())
    assert rows["top-1"]["agents_per_query"]["mean"] == 1
    assert summary["wall_s"] > 0
    assert all((out / path).exists() for path in summary["artifacts"].values())
    assert not [file for file in out.rglob("*") if file.suffix in (".pkl", ".pickle", ".bin")]
    served(out / "model")
    recorded(tmp_path)
    before = (out / "summary.json").read_text()
    again = run()
    assert again.count("finished earlier") == len(STAGES)
    assert (out / "summary.json").read_text() == before


def served(model: Path) -> None:
    """The folder that the run points at is one that decides."""
    from routewright.ensemble_router.router import load_ensemble_router

    router = load_ensemble_router(model)
    decision = router.decide("gcd 12 18")
    assert set(decision.familiarity) == {"agent-0", "agent-1", "agent-2"}
    assert decision.cumulative == pytest.approx(sum(decision.familiarity[agent] for agent in decision.agents))


def recorded(folder: Path) -> None:
    """One MLflow parent run with a finished run a stage; curves and data are there."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs/mlflow.db")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("ensemble-router")
    assert experiment is not None
    runs = {run.data.tags["routewright.stage"]: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"pipeline", *STAGES}
    parent = runs.pop("pipeline").info.run_id
    for run in runs.values():
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert run.data.tags["config_hash"]
    assert runs["coevolve"].inputs.dataset_inputs
    assert len(client.get_metric_history(runs["coevolve"].info.run_id, "share/agent-0")) > 1
    assert runs["evaluate"].data.metrics["top-1/agents_per_query"] == 1
