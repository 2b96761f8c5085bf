"""A step router's episodes as evidence, its champion compared by what was recorded of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from promotion_commands import call
from tiny_routers import save_step_router

from routewright import model_registry as registry
from routewright.errors import BadInput
from routewright.evaluation.summary import Summary
from routewright.step_router.environments.protocol import Observation
from routewright.step_router.episodes import Episode, Turn, write_episodes
from routewright.step_router.features import NAMES
from routewright.step_router.identity import IDENTITY
from routewright.step_router.results import build_results
from routewright.step_router.situations import Situation
from routewright.step_router.synthesis import STATES, State
from serving.promotion.evidence import read_evidence

NAME, TASKS, SEEDS = "step-router", 30, (0, 1)


def episodes_of(row: str, threshold: float | None, lost: int, calls: int) -> list[Episode]:
    """Two seeds of thirty tasks; the first ``lost`` tasks fail under both seeds."""
    turns = (Turn("go", "slm", (0.0,) * len(NAMES), ()),) * 4
    return [
        Episode(row, threshold, f"task-{task}", "cooking" if task % 2 else "quest", seed, task >= lost, 4, calls, turns)
        for task in range(TASKS)
        for seed in SEEDS
    ]


def write_states(folder: Path) -> None:
    """What the synthesize stage leaves: thirty teacher episodes of two steps."""
    folder.mkdir()
    states = []
    for task in range(TASKS):
        for actions in ((), ("open door",)):
            shown = Observation(f"find lamp {task}", f"room {len(actions)}", "", ("look", "go north"), len(actions), 9)
            situation = Situation(shown, actions)
            states.append(State(f"task-{task}", 0, situation, situation, "go north"))
    (folder / STATES).write_text("".join(f"{state.to_json()}\n" for state in states))


def write_router(folder: Path, threshold: float) -> None:
    """A router beside all that the calibrate stage leaves in its folder."""
    save_step_router(folder, thresholds={"bayes": threshold})
    for name in ("no-cvar", "query-level", "no-jsd"):
        save_step_router(folder / name)
    for name in ("roc.json", "thresholds.json", "history.jsonl", "rollouts.npz", IDENTITY):
        (folder / name).write_text("{}\n")


def write_run(
    out: Path, lost: int = 2, calls: int = 1, threshold: float = 0.4, c_llm: float = 10.0, dataset: str = "d1"
) -> Path:
    """A run whose risk row fails ``lost`` of thirty tasks; random escalation fails ten."""
    episodes = [
        *episodes_of("slm", None, 15, 0), *episodes_of("llm", None, 0, 4), *episodes_of("risk", threshold, lost, calls),
        *episodes_of("random-matched", 0.5, 10, 1), *episodes_of("random-matched", 0.9, 14, 0),
    ]  # fmt: skip
    risks = {"risk": [[0.9 if i < 30 else 0.1] * 4 for i in range(TASKS * len(SEEDS))]}
    results = build_results(episodes, {"risk": threshold}, risks, 1.0, c_llm, 0.2, 0, 200)
    evaluation = out / "evaluation"
    evaluation.mkdir(parents=True)
    (evaluation / IDENTITY).write_text(json.dumps({"profile": threshold, "dataset": dataset}))
    write_router(out / "model", threshold)
    write_episodes(evaluation / "episodes.jsonl", episodes)
    (evaluation / "results.json").write_text(results.model_dump_json())
    write_states(out / "examples")
    artifacts = {"model": "model", "evaluate": "evaluation", "synthesize": "examples"}
    summary = Summary(pipeline=NAME, profile="smoke", seed=0, wall_s=1.0, rows=results.rows, artifacts=artifacts)
    for folder in (out, evaluation):
        (folder / "summary.json").write_text(summary.model_dump_json())
    return out


def test_the_evidence_is_the_row_at_its_operating_threshold(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    found = read_evidence(NAME, run / "evaluation", "risk", "v")
    assert len(found.judged) == 60
    assert found.mean("quality") == pytest.approx(28 / 30)
    assert found.mean("cost") == 4 * 1.0 + 1 * 10.0
    assert found.worst_seed() == pytest.approx(28 / 30)
    assert set(found.metrics) == {"brier", "ece"}
    baseline = read_evidence(NAME, run / "evaluation", "random-matched", "random-matched")
    assert baseline.mean("quality") == pytest.approx(20 / 30), "the setting nearest to the rate of risk"
    (run / "evaluation" / "results.json").write_text("{}")
    with pytest.raises(BadInput, match=r"not those of an evaluated step-router \('frontiers'\)"):
        read_evidence(NAME, run / "evaluation", "risk", "v")
    (run / "evaluation" / "results.json").unlink()
    with pytest.raises(BadInput, match=r"results\.json: cannot be read"):
        read_evidence(NAME, run / "evaluation", "risk", "v")


def test_a_step_router_is_promoted_refused_and_rolled_back(store, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "gates.yaml").write_text("latency_ratio: 1.0e+6\n")  # of a real clock nothing is expected here
    one = write_run(tmp_path / "one")
    assert call(monkeypatch, "promote", NAME, "--run", one) == 0
    files = registry.files_uri(store, NAME, "1")
    assert {file.name for file in Path(files).iterdir()} == {"risk.json", "model.safetensors"}
    worse = write_run(tmp_path / "two", lost=6, threshold=0.5)
    assert call(monkeypatch, "promote", NAME, "--run", worse, "--gates", tmp_path / "gates.yaml") == 3
    dear = write_run(tmp_path / "three", calls=3, threshold=0.6)
    assert call(monkeypatch, "promote", NAME, "--run", dear, "--gates", tmp_path / "gates.yaml") == 3
    (refused,) = [c for c in json.loads((dear / "promotion" / "decision.json").read_text())["checks"] if not c["passed"]]
    assert refused["name"] == "cost / champion's"
    assert refused["value"] == pytest.approx(34 / 14)
    better = write_run(tmp_path / "four", lost=1, threshold=0.7)
    assert call(monkeypatch, "promote", NAME, "--run", better, "--gates", tmp_path / "gates.yaml") == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    assert call(monkeypatch, "promote", NAME, "--version", 2) == 0
    capsys.readouterr()
    assert call(monkeypatch, "rollback", NAME) == 0
    assert "version 1 is the champion again; no deployment was given" in capsys.readouterr().out
    assert registry.aliases(store, NAME) == {"champion": "1"}


def test_other_tasks_or_prices_are_other_data(store, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "gates.yaml").write_text("latency_ratio: 1.0e+6\n")
    assert call(monkeypatch, "promote", NAME, "--run", write_run(tmp_path / "one")) == 0
    other = {
        "cheap": write_run(tmp_path / "cheap", calls=3, threshold=0.5, c_llm=1.0),
        "corrected": write_run(tmp_path / "corrected", threshold=0.6, dataset="d2"),
    }
    for run in other.values():
        assert call(monkeypatch, "promote", NAME, "--run", run, "--gates", tmp_path / "gates.yaml") == 3
        assert "judged on other data or at other prices than" in capsys.readouterr().out
    # The way on that docs/bring-your-own-agents.md tells.
    store.delete_registered_model_alias(NAME, registry.CHAMPION)
    assert call(monkeypatch, "promote", NAME, "--run", other["corrected"]) == 0
    assert registry.aliases(store, NAME) == {"champion": "2"}


def test_an_evaluation_that_does_not_say_of_which_tasks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "evaluation" / IDENTITY).unlink()
    with pytest.raises(BadInput, match=r"stage\.identity: cannot be read .*, expected what the evaluate stage wrote"):
        read_evidence(NAME, run / "evaluation", "risk", "v")
