"""An ensemble router's answers as evidence; its base model and adapters belong to the version that is registered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from promotion_commands import call
from tiny_ensemble import ADD, SPELL, save_tiny_ensemble

from routewright import model_registry as registry
from routewright.ensemble_router.coevolve_rules import IDENTITY
from routewright.ensemble_router.tasks import Task, write_tasks
from routewright.errors import BadInput
from routewright.evaluation.bootstrap import mean_interval
from routewright.evaluation.summary import Row, Summary
from serving.promotion.evidence import read_evidence

NAME, QUESTIONS = "ensemble-router", 60


def write_run(out: Path, wrong: int = 6, tokens: float = 5.0, tau: float = 0.7, tasks: str = "t1") -> Path:
    """A run whose familiarity row gets ``wrong`` of sixty questions wrong; the single best agent thirty."""
    evaluation = out / "evaluation"
    evaluation.mkdir(parents=True)
    model = save_tiny_ensemble(out / "model", tau=tau)
    for agent in ("speller", "adder"):
        (model / "adapters" / agent).mkdir(parents=True)
        (model / "adapters" / agent / "adapter_model.safetensors").write_bytes(agent.encode())
    (model / "adapters" / "README.md").write_text("not served")
    shutil.copytree(model / "base", model / "base-1")
    (evaluation / IDENTITY).write_text(json.dumps({"training_sha256": f"{tau}", "tasks_sha256": tasks}))
    rows = []
    with (evaluation / "records.jsonl").open("w") as file:
        for row, missed, spent in (("familiarity", wrong, tokens), ("single-best", 30, 4.0)):
            rewards = [float(number >= missed) for number in range(QUESTIONS)]
            rows.append(Row(name=row, metrics={"accuracy": mean_interval(rewards, 0)}))
            for number, reward in enumerate(rewards):
                told = {"row": row, "id": f"q{number}", "domain": f"d{number % 2}", "reward": reward, "tokens": spent}
                file.write(json.dumps(told) + "\n")
    (out / "examples").mkdir()
    asked = [Task(id=query, prompt=query, answer="x", domain="d0", check="exact") for query in (*SPELL, *ADD)]
    write_tasks(out / "examples" / "test.jsonl", asked)
    artifacts = {"model": "model", "evaluate": "evaluation", "synthesize": "examples"}
    summary = Summary(pipeline=NAME, profile="smoke", seed=0, wall_s=1.0, rows=rows, artifacts=artifacts)
    for folder in (out, evaluation):
        (folder / "summary.json").write_text(summary.model_dump_json())
    return out


def test_the_evidence_is_the_row_s_answers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    found = read_evidence(NAME, run / "evaluation", "familiarity", "v")
    assert len(found.judged) == QUESTIONS
    assert (found.mean("quality"), found.mean("cost")) == (pytest.approx(0.9), 5.0)
    assert {judged.slice for judged in found.judged} == {"d0", "d1"}
    (run / "evaluation" / "records.jsonl").write_text('{"row": "familiarity"}\n')
    with pytest.raises(BadInput, match=r"not those of an evaluated ensemble-router \('id'\)"):
        read_evidence(NAME, run / "evaluation", "familiarity", "v")


def test_an_ensemble_router_is_promoted_refused_and_rolled_back(store, tmp_path, monkeypatch, capsys) -> None:
    import mlflow
    import pandas as pd

    from routewright.ensemble_router.router import load_ensemble_router

    (tmp_path / "gates.yaml").write_text("latency_ratio: 1.0e+6\n")  # of a real clock nothing is expected here
    one = write_run(tmp_path / "one")
    assert call(monkeypatch, "promote", NAME, "--run", one) == 0
    files = Path(registry.files_uri(store, NAME, "1"))
    assert {file.relative_to(files).as_posix() for file in files.rglob("*") if file.is_file()} >= {
        "familiarity.json", "familiarity.safetensors", "base/model.safetensors", "base/tokenizer.json",
        "base-1/model.safetensors", "base-1/tokenizer.json",
        "adapters/speller/adapter_model.safetensors", "adapters/adder/adapter_model.safetensors",
    }  # fmt: skip
    assert registry.folder_digest(one / "model") == registry.version_at(store, NAME, "champion").digest
    (said,) = mlflow.pyfunc.load_model(f"models:/{NAME}/1").predict(pd.DataFrame({"query": [SPELL[0]]}))
    assert json.loads(said)["agents"] == load_ensemble_router(one / "model").decide(SPELL[0]).agents == ["speller"]
    worse = write_run(tmp_path / "two", wrong=20, tau=0.6)
    assert call(monkeypatch, "promote", NAME, "--run", worse, "--gates", tmp_path / "gates.yaml") == 3
    dear = write_run(tmp_path / "three", tokens=9.0, tau=0.5)
    assert call(monkeypatch, "promote", NAME, "--run", dear, "--gates", tmp_path / "gates.yaml") == 3
    (refused,) = [c for c in json.loads((dear / "promotion" / "decision.json").read_text())["checks"] if not c["passed"]]
    assert (refused["name"], refused["value"]) == ("cost / champion's", pytest.approx(9 / 5))
    better = write_run(tmp_path / "four", wrong=2, tau=0.4)
    assert call(monkeypatch, "promote", NAME, "--run", better, "--gates", tmp_path / "gates.yaml") == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    assert call(monkeypatch, "promote", NAME, "--version", 2) == 0
    corrected = write_run(tmp_path / "five", wrong=1, tau=0.3, tasks="t2")
    capsys.readouterr()
    assert call(monkeypatch, "promote", NAME, "--run", corrected, "--gates", tmp_path / "gates.yaml") == 3
    assert "judged on other data or at other prices than" in capsys.readouterr().out
    assert call(monkeypatch, "rollback", NAME) == 0
    assert registry.aliases(store, NAME) == {"champion": "1"}


def test_the_second_base_model_belongs_to_the_version(tmp_path: Path) -> None:
    model = write_run(tmp_path / "run") / "model"
    before = registry.folder_digest(model)
    (model / "base-1" / "model.safetensors").write_bytes(b"other weights")
    assert registry.folder_digest(model) != before
