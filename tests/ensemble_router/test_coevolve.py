"""The loop: a killed run resumes to the same numbers; frozen parts stay; rules spend the same budget."""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="peft is in the train extra")

from routewright.ensemble_router import coevolve as loop
from routewright.ensemble_router.agents import Base
from routewright.ensemble_router.coevolve import queries_of_step
from routewright.ensemble_router.familiarity import FamiliarityHeads, load_heads
from routewright.ensemble_router.learned_rules import LEARNED, load_learned
from routewright.ensemble_router.profile import EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.warm_up import base_model, warm_adapters
from routewright.errors import BadInput

TASKS = [Task(id=str(n), prompt=f"ones {n}", answer="1", domain="ones", check="exact") for n in range(20)]


def coin(task: Task, completion: str) -> float:
    return float(zlib.crc32(completion.encode()) % 2)


def profile(budget: int = 40, dropout: float = 0.0) -> EnsembleProfile:
    content = load_ensemble_profile("smoke").model_dump()
    content["backbone"].update({"hidden_size": 32, "num_layers": 4})
    content.update({"pretrain": None, "warm_up": None})
    content["agents"].update({"count": 2, "prompts": 2, "max_new_tokens": 3, "beta": 0.01})
    content["agents"]["lora"]["dropout"] = dropout
    content["coevolve"].update({"queries": 4, "budget": budget, "router_first": 8, "checkpoint_every": 2})
    return EnsembleProfile.model_validate(content)


def run(
    folder: Path, rule: str, budget: int = 40, heads: FamiliarityHeads | None = None, dropout: float = 0.0
) -> tuple[dict[str, Any], Any]:
    wanted = profile(budget, dropout)
    base, tokenizer = base_model(wanted, TASKS, folder.parent / "base", seed=0)
    model = warm_adapters(base, tokenizer, TASKS, wanted, seed=0)
    bases = [Base(model, tokenizer, wanted.agents.names)]
    return loop.coevolve(wanted, TASKS, bases, folder, rule, 0, heads), model


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


@pytest.mark.parametrize("rule", LEARNED)
def test_a_killed_run_of_a_learnt_rule_resumes_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(loop, "verify", coin)
    whole, _ = run(tmp_path / "whole", rule)
    real, seen = loop._step, 0

    def dying(*arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(loop, "_step", dying)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", rule)
    monkeypatch.setattr(loop, "_step", real)
    resumed, _ = run(tmp_path / "killed", rule)
    assert resumed == whole
    for name in ("history.jsonl", "adapters/agent-0/adapter_model.safetensors", "router/learned.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    router = load_learned(tmp_path / "whole" / "router")
    assert router.rule == rule
    assert router.linucb.alpha == 0.0


def test_frozen_agents_do_not_learn_and_all_rules_spend_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "verify", coin)
    frozen, _ = run(tmp_path / "frozen", "frozen-agents")
    learning, _ = run(tmp_path / "top", "top-1")
    assert frozen["updates.agent-0"] == frozen["updates.agent-1"] == 0
    assert learning["updates.agent-0"] + learning["updates.agent-1"] > 0
    assert frozen["answers"] == learning["answers"] == 40
    rows = [json.loads(line) for line in (tmp_path / "top" / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["agents_per_query"] for row in rows} == {1.0}


def test_the_frozen_router_stays_as_it_was_given_while_its_agents_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "verify", coin)
    run(tmp_path / "frozen-agents", "frozen-agents")
    given = load_heads(tmp_path / "frozen-agents" / "router")[0]
    for rule, same in (("frozen-router", True), ("familiarity", False)):
        done, _ = run(tmp_path / rule, rule, heads=given)
        kept = load_heads(tmp_path / rule / "router")[0].state_dict()
        assert all(torch.equal(value, kept[key]) for key, value in given.state_dict().items()) == same
        assert done["updates.agent-0"] + done["updates.agent-1"] > 0


def test_the_adapters_dropout_is_on_in_updates_and_off_in_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the first step are those without dropout, the agents after updates others; twice run they are the same."""
    monkeypatch.setattr(loop, "verify", coin)
    lines, weights = [], []
    for name, dropout in (("without", 0.0), ("with", 0.5), ("again", 0.5)):
        run(tmp_path / name, "familiarity", dropout=dropout)
        lines.append((tmp_path / name / "history.jsonl").read_text(encoding="utf-8").splitlines()[0])
        weights.append((tmp_path / name / "adapters" / "agent-0" / "adapter_model.safetensors").read_bytes())
    assert lines[0] == lines[1] == lines[2]
    assert weights[0] != weights[1] == weights[2]


@pytest.mark.parametrize(("rule", "agents"), [("top-2", {2.0}), ("all", {2.0}), ("random", {1.0}), ("one-model", {1.0})])
def test_rules_ask_as_many_agents_as_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, agents: set[float]
) -> None:
    monkeypatch.setattr(loop, "verify", coin)
    run(tmp_path / rule, rule, 20)
    rows = [json.loads(line) for line in (tmp_path / rule / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["agents_per_query"] for row in rows} == agents
    shares = [sum(row["agents"][name]["share"] for row in rows) / len(rows) for name in ("agent-0", "agent-1")]
    assert shares == [1.0, 0.0] if rule == "one-model" else shares[0] > 0 and shares[1] > 0


@pytest.mark.parametrize(
    ("rule", "width", "lam", "told"),
    [
        ("last-layer", 32, 2.0, []),
        ("half-lambda", 64, 1.0, ["2 agents at the margin 1 sum to a familiarity of 0.74, above tau = 0.7: lambda = 1"]),
        ("double-lambda", 64, 4.0, []),
    ],
)
def test_an_ablation_trains_heads_and_agents_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, width: int, lam: float, told: list[str]
) -> None:
    """One layer of 32 numbers instead of two; half and double λ in training and saved; N·e^(−λm) of that λ."""
    monkeypatch.setattr(loop, "verify", coin)
    seen: set[float] = set()
    real = loop.familiarity

    def watched(d: torch.Tensor, value: float) -> torch.Tensor:
        seen.add(value)
        return real(d, value)

    monkeypatch.setattr(loop, "familiarity", watched)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done, _ = run(tmp_path / rule, rule, 20)
    assert [str(one.message).split(" should")[0] for one in caught if "margin" in str(one.message)] == told
    assert done["updates.agent-0"] + done["updates.agent-1"] > 0
    heads, description = load_heads(tmp_path / rule / "router")
    assert (heads.width, description["lambda"], description["rule"]) == (width, lam, rule)
    assert seen == {lam}


def test_an_epoch_runs_through_all_tasks_in_whole_steps() -> None:
    """Ten tasks, four a step: two whole steps an epoch, then another order."""
    steps = [queries_of_step(step, 4, 10, 0) for step in range(4)]
    assert [len(step) for step in steps] == [4] * 4
    assert len({*steps[0], *steps[1]}) == len({*steps[2], *steps[3]}) == 8
    assert steps[0] != steps[2]


def test_an_unknown_rule_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected one of familiarity"):
        run(tmp_path / "x", "best")
