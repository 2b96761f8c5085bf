"""The search router's pipeline from the command line, every stage real, on a pool of three small agents."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STAGES = ("fetch-dataset", "synthesize", "sft", "rl", "evaluate")
TOPICS = {
    "kitchen": ("Cooking, baking and kitchen tools.", "oven pan dough spice knife boil roast recipe flour sauce"),
    "garden": ("Plants, soil and garden work.", "seed soil prune hedge compost rose lawn water spade bloom"),
    "office": ("Paper, letters and office machines.", "printer paper stapler letter folder desk stamp ink copier memo"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three agents with forty documents and thirty judged queries each."""
    folder, rng = tmp_path_factory.mktemp("pool"), random.Random(0)
    agents = []
    for name, (card, vocabulary) in TOPICS.items():
        words = vocabulary.split()
        titles = [" ".join(rng.sample(words, 2)) for _ in range(40)]
        texts = [" ".join(rng.choices(words, k=12)) + f" item {i}" for i in range(40)]
        documents = [{"_id": f"{name}-{i}", "title": titles[i], "text": texts[i]} for i in range(40)]
        queries = [{"_id": f"q{i}", "text": documents[i]["title"] + " " + documents[i]["text"][:30]} for i in range(30)]
        write_lines(folder / f"{name}.jsonl", documents)
        write_lines(folder / f"{name}-queries.jsonl", queries)
        qrels = []
        for split, chosen in (("train", queries[:20]), ("dev", queries[20:25]), ("test", queries[25:])):
            rows = [f"{q['_id']}\t{name}-{q['_id'][1:]}\t1" for q in chosen]
            (folder / f"{name}-{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
            qrels.append(f"{split}: {name}-{split}.tsv")
        agents.append(
            f"  - name: {name}\n    card: {card}\n    search: {{kind: bm25, corpus: {name}.jsonl}}\n"
            f"    queries: {{file: {name}-queries.jsonl, qrels: {{{', '.join(qrels)}}}}}\n"
        )
    (folder / "pool.yaml").write_text("name: tiny\nfallback: office\nagents:\n" + "".join(agents))
    return folder / "pool.yaml"


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(pool: Path, out: Path) -> subprocess.Popen[str]:
    """The command in a folder of its own, so that its tracking store is there too."""
    arguments = ["run", "search-router", "--pool", str(pool), "--profile", "smoke", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "routewright.cli", *arguments], cwd=out.parent, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def metrics(out: Path) -> dict[str, float]:
    """All means of a summary but those that time decides."""
    rows = json.loads((out / "summary.json").read_text())["rows"]
    return {
        f"{row['name']} {name}": value["mean"]
        for row in rows
        for name, value in row["metrics"].items()
        if not name.startswith("latency")
    }


def test_the_pipeline_runs_resumes_and_is_recorded(pool: Path, tmp_path: Path) -> None:
    out, killed = tmp_path / "out", tmp_path / "killed"

    run = start(pool, out)
    shown, _ = run.communicate(timeout=600)
    assert run.returncode == 0, shown
    for stage in STAGES:
        assert f"▸ {stage}" in shown
        assert f"✓ {stage}" in shown
    assert "KFP Executor" not in shown
    assert (out / "report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")
    summary = json.loads((out / "summary.json").read_text())
    assert {"random", "intent", "outcome-lr", "sft", "sft+rl", "oracle"} <= {row["name"] for row in summary["rows"]}
    assert summary["wall_s"] > 0
    assert all((out / path).exists() for path in summary["artifacts"].values())
    recorded(tmp_path, out)

    shutil.copytree(out / "stages", killed / "stages", ignore=shutil.ignore_patterns("rl-*", "evaluate-*"))
    run = start(pool, killed)
    wait_for_training(killed, run)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert not (killed / "summary.json").exists()
    run = start(pool, killed)
    shown, _ = run.communicate(timeout=600)
    assert run.returncode == 0, shown
    assert shown.count("finished earlier") == 3
    assert metrics(killed) == pytest.approx(metrics(out), abs=1e-9), "a resumed run gives what an undisturbed one gives"


def recorded(folder: Path, out: Path) -> None:
    """One MLflow parent run with a finished run a stage; curves, models and data are there."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("search-router")
    assert experiment is not None
    runs = {run.data.tags["routewright.stage"]: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"pipeline", *STAGES}
    parent = runs.pop("pipeline").info.run_id
    for run in runs.values():
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert run.data.tags["git_sha"]
    assert runs["rl"].data.metrics["reward"]
    assert len(client.get_metric_history(runs["sft"].info.run_id, "loss")) > 1
    assert runs["sft"].inputs.dataset_inputs
    assert runs["evaluate"].data.metrics["oracle/ndcg_at_10"] > 0
    assert not list(out.rglob("*.pkl"))


def wait_for_training(out: Path, run: subprocess.Popen[str]) -> None:
    """Return when RL has logged its third step."""
    while run.poll() is None:
        (history,) = list(out.glob("stages/rl-*/history.jsonl")) or [None]
        if history is not None and len(history.read_text().splitlines()) >= 3:
            return
        time.sleep(0.1)
    raise AssertionError(f"the run ended before RL was killed: {run.communicate()[0]}")
