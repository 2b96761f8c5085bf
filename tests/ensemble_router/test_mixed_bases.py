"""Agents on two base models of other architecture, size and tokenizer: they learn, resume and are served."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft", reason="peft is in the train extra")

from transformers import AutoConfig, AutoModelForCausalLM

from routewright.ensemble_router import coevolve as loop
from routewright.ensemble_router import held_out
from routewright.ensemble_router.coevolve_rules import coevolve_rules, load_agents
from routewright.ensemble_router.held_out import held_answers
from routewright.ensemble_router.profile import EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.prompts import encode_prompt
from routewright.ensemble_router.router import load_ensemble_router
from routewright.ensemble_router.tasks import Task, write_tasks
from routewright.language_models.backbone import train_tokenizer
from serving.ensemble_router import EnsembleInstance, EnsembleRouterPredictor
from serving.exploration import Exploration
from serving.predictor import Timing


def tasks(split: str, n: int) -> list[Task]:
    return [
        Task(id=f"{split}-{domain}-{k}", prompt=f"{domain} {split} {k}", answer=answer, domain=domain, check="exact")
        for domain, answer in (("ones", "1"), ("twos", "2"))
        for k in range(n)
    ]


def coin(task: Task, completion: str) -> float:
    return float(zlib.crc32((task.id + completion).encode()) % 2)


def phi(folder: Path) -> Path:
    """An untrained Phi of width 64 with a byte-level tokenizer: its projections are fused, and no word is a character."""
    tokenizer = train_tokenizer([task.prompt for task in tasks("train", 12)], vocabulary=300)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "phi3", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, original_max_position_embeddings=256, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def mixed(second: Path) -> EnsembleProfile:
    content = load_ensemble_profile("smoke").model_dump()
    content["backbone"].update({"hidden_size": 32, "num_layers": 4})
    content["more_backbones"] = [{"source": "path", "name": str(second), "dtype": "float32"}]
    content.update({"pretrain": None, "warm_up": {"steps": 2, "batch_size": 4}})
    content["agents"].update({"count": 3, "prompts": 2, "max_new_tokens": 3, "beta": 0.01})
    content["coevolve"].update({"queries": 4, "budget": 48, "router_first": 8, "checkpoint_every": 2})
    content["coevolve"]["rules"] = ["familiarity"]
    return EnsembleProfile.model_validate(content)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with phi/, dataset/, whole/ and resumed/, which was killed in its third step."""
    folder = tmp_path_factory.mktemp("mixed")
    profile = mixed(phi(folder / "phi"))
    for name, n in (("train", 12), ("dev", 4)):
        write_tasks(folder / "dataset" / f"{name}.jsonl", tasks(name, n))
    (folder / "dataset" / "dataset.json").write_text('{"tasks_sha256": "0"}', encoding="utf-8")
    real, seen = loop._step, 0

    def dying(*arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > 3:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "verify", coin)
        coevolve_rules(folder / "dataset", folder / "whole", profile, 0)
        patch.setattr(loop, "_step", dying)
        with pytest.raises(KeyboardInterrupt):
            coevolve_rules(folder / "dataset", folder / "resumed", profile, 0)
        patch.setattr(loop, "_step", real)
        coevolve_rules(folder / "dataset", folder / "resumed", profile, 0)
    return folder


def test_agents_of_both_bases_learn(done: Path) -> None:
    run = json.loads((done / "whole" / "rules" / "familiarity" / "run.json").read_text())
    assert all(run[f"updates.agent-{number}"] > 0 for number in range(3))
    for number, (hidden, module) in enumerate(((32, "q_proj"), (64, "qkv_proj"), (32, "q_proj"))):
        file = f"agent-{number}/adapter_model.safetensors"
        before, after = (load_file(done / "whole" / folder / file) for folder in ("warm", "rules/familiarity/adapters"))
        first = next(key for key in after if f"layers.0.self_attn.{module}.lora_A" in key)
        assert after[first].shape[1] == hidden
        assert not torch.equal(before[first], after[first])


def test_a_killed_run_resumes_to_the_same_numbers(done: Path) -> None:
    names = ["rules/familiarity/history.jsonl", "router/familiarity.safetensors", "router/routes.json"]
    names += [f"rules/familiarity/adapters/agent-{number}/adapter_model.safetensors" for number in range(3)]
    for name in names:
        assert (done / "whole" / name).read_bytes() == (done / "resumed" / name).read_bytes(), name
    described = [json.loads((done / run / "router" / "familiarity.json").read_text()) for run in ("whole", "resumed")]
    assert described[0]["model_version"] == described[1]["model_version"]


def test_each_agent_answers_with_its_own_model_and_tokenizer(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers to the same questions, against plain generation by the model that each agent stands on."""
    monkeypatch.setattr(held_out, "verify", coin)
    profile = mixed(done / "phi")
    bases = load_agents(profile, [], done / "whole", done / "whole" / "rules" / "familiarity" / "adapters", 0)
    assert [base.names for base in bases] == [["agent-0", "agent-2"], ["agent-1"]]
    questions = tasks("dev", 2)
    held = held_answers(done / "held.jsonl", bases, questions, profile.agents, "answers")
    for base in bases:
        for name in base.names:
            base.model.set_adapter(name)
            for row, task in enumerate(questions):
                tokens = torch.tensor([encode_prompt(base.tokenizer, task.prompt)])
                made = base.model.generate(
                    input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False
                )
                text = base.tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)
                assert held.texts[row][int(name[-1])] == text


def test_kept_answers_are_read_back_whatever_lines_they_have(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U+2028 and U+0085 end a line for str.splitlines, but not in JSON lines."""
    monkeypatch.setattr(held_out, "verify", coin)
    monkeypatch.setattr(held_out, "completion_text", lambda *_: "one\u2028two\u0085three")
    profile = mixed(done / "phi")
    bases = load_agents(profile, [], done / "whole", done / "whole" / "rules" / "familiarity" / "adapters", 0)
    first = held_answers(done / "lines.jsonl", bases, tasks("dev", 2), profile.agents, "answers")
    monkeypatch.setattr(held_out, "generate", None)
    again = held_answers(done / "lines.jsonl", bases, tasks("dev", 2), profile.agents, "answers")
    assert again.texts == first.texts


def test_the_router_is_served_and_knows_its_bases(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "whole" / "router", tmp_path / "moved")
    router = load_ensemble_router(tmp_path / "moved")
    (more,) = router.description["more_backbones"]
    assert (more["name"], more["agents"]) == (str(done / "phi"), ["agent-1"])
    folders = [path.name for path in (tmp_path / "moved" / "adapters").iterdir() if path.is_dir()]
    assert sorted(folders) == ["agent-0", "agent-1", "agent-2"]
    predictor = EnsembleRouterPredictor(tmp_path / "moved", Exploration(0.0, 1.0, seed=0))
    (answer,) = predictor.decide([EnsembleInstance(query="ones dev 1")], Timing())
    assert answer.agents == router.decide("ones dev 1").agents
    assert set(answer.decision["familiarity"]) == {"agent-0", "agent-1", "agent-2"}
    assert predictor.drift is not None
