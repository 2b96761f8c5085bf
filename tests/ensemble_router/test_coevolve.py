"""The loop: a killed run resumes to the same numbers; frozen parts stay; rules spend the same budget."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="peft is in the train extra")

from routewright.ensemble_router import coevolve as loop
from routewright.ensemble_router.familiarity import load_heads
from routewright.ensemble_router.profile import EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.warm_up import base_model, warm_adapters
from routewright.errors import BadInput

TASKS = [Task(id=str(n), prompt=f"ones {n}", answer="1", domain="ones", check="exact") for n in range(20)]


def coin(task: Task, completion: str) -> float:
    return float(zlib.crc32(completion.encode()) % 2)


def profile() -> EnsembleProfile:
    content = load_ensemble_profile("smoke").model_dump()
    content["backbone"].update({"hidden_size": 32, "num_layers": 4})
    content.update({"pretrain": None, "warm_up": None})
    content["agents"].update({"count": 2, "prompts": 2, "max_new_tokens": 3, "beta": 0.01})
    content["coevolve"].update({"queries": 4, "budget": 40, "router_first": 8, "checkpoint_every": 2})
    return EnsembleProfile.model_validate(content)


def run(folder: Path, rule: str) -> tuple[dict[str, Any], Any]:
    base, tokenizer = base_model(profile(), TASKS, folder.parent / "base", seed=0)
    model = warm_adapters(base, tokenizer, TASKS, profile(), seed=0)
    return loop.coevolve(profile(), TASKS, model, tokenizer, folder, rule, 0), model


def test_a_killed_run_resumes_to_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "verify", coin)
    whole, _ = run(tmp_path / "whole", "familiarity")
    assert whole["updates.agent-0"] > 2
    seen = 0

    def dying(task: Task, completion: str) -> float:
        nonlocal seen
        seen += 1
        if seen > 110:  # in the fourth step, after the checkpoint of the second
            raise KeyboardInterrupt
        return coin(task, completion)

    monkeypatch.setattr(loop, "verify", dying)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", "familiarity")
    assert len((tmp_path / "killed" / "history.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    monkeypatch.setattr(loop, "verify", coin)
    resumed, _ = run(tmp_path / "killed", "familiarity")
    assert resumed == whole
    for name in ("history.jsonl", "adapters/agent-0/adapter_model.safetensors", "router/familiarity.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    with pytest.raises(BadInput, match="another rule"):
        run(tmp_path / "killed", "top-1")


def test_frozen_agents_do_not_learn_and_all_rules_spend_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "verify", coin)
    frozen, _ = run(tmp_path / "frozen", "frozen-agents")
    learning, _ = run(tmp_path / "top", "top-1")
    assert frozen["updates.agent-0"] == frozen["updates.agent-1"] == 0
    assert learning["updates.agent-0"] + learning["updates.agent-1"] > 0
    assert frozen["answers"] == learning["answers"] == 40
    rows = [json.loads(line) for line in (tmp_path / "top" / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["agents_per_query"] for row in rows} == {1.0}


def test_the_frozen_router_stays_after_its_first_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "verify", coin)
    run(tmp_path / "frozen", "frozen-router")
    run(tmp_path / "free", "familiarity")
    heads = [load_heads(tmp_path / name / "router")[0].state_dict() for name in ("frozen", "free")]
    assert any(not torch.equal(value, heads[1][key]) for key, value in heads[0].items())


def test_an_unknown_rule_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected one of familiarity"):
        run(tmp_path / "x", "best")
