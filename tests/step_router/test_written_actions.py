"""All stages where actions are written, by a small model that never gets a program right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import tiny_profile

from routewright.errors import BadInput
from routewright.evaluation.summary import STEP_ROWS, Summary
from routewright.step_router.bc import distill_bc
from routewright.step_router.calibration import calibrate_router
from routewright.step_router.client import StepRouter
from routewright.step_router.dataset import fetch_tasks
from routewright.step_router.dpo import distill_dpo
from routewright.step_router.evaluation_run import evaluate
from routewright.step_router.policy import SmallModel
from routewright.step_router.profile import StepRouterProfile
from routewright.step_router.results import StepResults
from routewright.step_router.synthesis import synthesize
from routewright.step_router.verifier import train_verifier

SECTIONS: dict[str, Any] = {
    "backbone": {"source": "architecture", "name": "qwen3", "hidden_size": 32, "num_layers": 1, "dtype": "float32"},
    "tasks": {"policy": 2, "router": 2, "threshold": 2, "test": 2},
    "synthesis": {"episodes_per_task": 2},
    "bc": {"epochs": 1, "batch_size": 4, "lr": 1e-3, "new_tokens": 6},
    "verifier": {"states": 4, "epochs": 12, "batch_size": 4, "lr": 1e-2},
    "dpo": {"states": 4, "samples": 2, "batch_size": 4, "gap": 0.0},
    "router": {"seeds": 1, "coins": 1, "candidates": 2, "steps": 5, "operating": "guaranteed"},
    "evaluation": {"seeds": 1, "settings": 2, "bootstrap": 50, "ablations": False},
}

STAGES: list[tuple[Any, tuple[str, ...], str]] = [
    (synthesize, ("data",), "examples"),
    (distill_bc, ("data", "examples"), "bc"),
    (train_verifier, ("data", "examples", "bc"), "verifier"),
    (distill_dpo, ("data", "examples", "bc", "verifier"), "policy"),
    (calibrate_router, ("data", "policy", "verifier"), "router"),
    (evaluate, ("data", "policy", "verifier", "router"), "evaluation"),
]


@pytest.fixture(scope="module")
def profile() -> StepRouterProfile:
    return tiny_profile(**SECTIONS)


def run(source: Path, folder: Path, profile: StepRouterProfile) -> Path:
    data, examples, bc, verifier, policy, router, out = (
        folder / name for name in ("data", "examples", "bc", "verifier", "policy", "router", "evaluation")
    )
    fetch_tasks(str(source), data, profile)
    synthesize(data, examples, profile, 0)
    distill_bc(data, examples, bc, profile, 0)
    train_verifier(data, examples, bc, verifier, profile, 0)
    distill_dpo(data, examples, bc, verifier, policy, profile, 0)
    calibrate_router(data, policy, verifier, router, profile, 0)
    evaluate(data, policy, verifier, router, out, profile, 0)
    return out


def test_a_small_model_that_always_fails_leaves_every_step_to_the_llm(
    tmp_path: Path, profile: StepRouterProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No failure is told from a success, and the table is whole; a second evaluation writes no program again."""
    rows = [
        {"id": f"p{i}", "prompt": f"Add {i}.", "answer": f"def f(x): return x + {i}", "tests": f"assert f(1) == {i + 1}"}
        for i in range(8)
    ]
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run(source, tmp_path, profile)
    summary = Summary.model_validate_json((out / "summary.json").read_text())
    found = {row.name: row.metrics for row in summary.rows}
    assert set(found) == set(STEP_ROWS) - {"risk-no-jsd"}
    assert found["slm"]["success"].mean == 0
    assert found["llm"]["success"].mean == 1
    assert found["risk"]["success"].mean == 1
    results = StepResults.model_validate_json((out / "results.json").read_text())
    assert results.calibration[0].skill is None
    assert results.oracle_rate == 1
    assert (out / "report.html").is_file()
    table = (out / "table.md").read_text()
    assert "The CVaR constraint (at most 0.3) never bound: above it at 0 of 5 training steps" in table
    assert "risk at its own threshold: escalation / oracle's" in table
    assert table.count("| failure-no-cvar |") == 1
    description = json.loads((tmp_path / "router" / "risk.json").read_text())
    assert -1 <= description["thresholds"]["parity"] < 1
    assert (description["operating"], description["thresholds"]["guaranteed"]) == ("guaranteed", None), (
        "two tasks certify none"
    )
    assert StepRouter.load(tmp_path / "router").threshold == -1
    played = next(p for f in results.frontiers if f.row == "risk" for p in f.points if p.operating)
    assert (played.threshold, played.escalation) == (-1, 1), "as it would be served"
    for folder in ("bc", "verifier", "policy/policy"):
        assert json.loads((tmp_path / folder / "policy.json").read_text())["dtype"] == "float32", "the profile's"
    assert [t.name for t in results.thresholds] == ["parity", "bayes", "budget", "guaranteed"]
    for stage, inputs, name in STAGES:
        for seed in (0, 1):
            arguments = (*(tmp_path / folder for folder in inputs), tmp_path / name, profile, seed)
            if seed:
                with pytest.raises(BadInput, match=rf"{name}: was made with another seed: expected another folder"):
                    stage(*arguments)
            else:
                stage(*arguments)

    for file in [out / "summary.json", *(out / "checkpoints" / "rows").iterdir()]:
        file.unlink()

    def nothing(*_: object) -> None:
        raise AssertionError("a decision was written again")

    monkeypatch.setattr(SmallModel, "propose", nothing)
    before = (out / "results.json").read_bytes()
    evaluate(tmp_path / "data", tmp_path / "policy", tmp_path / "verifier", tmp_path / "router", out, profile, 0)
    assert (out / "results.json").read_bytes() == before
