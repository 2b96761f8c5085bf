"""Generation on vLLM, against a stand-in for its classes that answers with transformers: no real vLLM runs here."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="peft is in the train extra")

from peft import PeftModel
from transformers import AutoModelForCausalLM

from routewright.config import BackboneSection, LoraSection
from routewright.ensemble_router import coevolve as loop
from routewright.ensemble_router.agents import Base, adapter_parameters, add_adapters, generate
from routewright.ensemble_router.profile import EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.vllm_generation import generate_on_vllm, vllm_engine
from routewright.ensemble_router.warm_up import character_tokenizer
from routewright.language_models.backbone import from_config

PROMPTS = [[3, 4, 5], [6, 7], [8, 9]]
AGENTS = ["red", "red", "blue"]
GREEDY: dict[str, Any] = {"samples": 2, "max_new_tokens": 5, "temperature": 1.0, "top_k": 1, "top_p": 1.0}


class LLM:
    """Answers greedily with the adapter of each request, as long as it may."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.model, self.settings = model, {**settings, "gpu": os.environ["CUDA_VISIBLE_DEVICES"]}
        self.numbers: list[list[int]] = []

    def generate(self, prompts: list[Any], sampling: list[Any], lora_request: list[Any], use_tqdm: bool) -> list[Any]:
        self.numbers.append([request.lora_int_id for request in lora_request])
        found = []
        for prompt, asked, request in zip(prompts, sampling, lora_request, strict=True):
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.model), request.lora_path).eval()
            tokens = torch.tensor([prompt["prompt_token_ids"]])
            made = model.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=asked.max_tokens, do_sample=False,
                eos_token_id=asked.stop_token_ids, pad_token_id=0,
            )[0, tokens.shape[1] :].tolist()  # fmt: skip
            found.append(types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=made)] * asked.n))
        return found


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in, and two GPUs as far as anybody asks."""
    modules = {name: types.ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request")}
    modules["vllm"].__dict__.update(
        LLM=LLM, SamplingParams=types.SimpleNamespace, __spec__=importlib.machinery.ModuleSpec("vllm", None)
    )
    modules["vllm.lora.request"].__dict__.update(LoRARequest=LoRARequest)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def section(folder: Path, **changes: Any) -> BackboneSection:
    return BackboneSection(**{"source": "path", "name": str(folder), "frozen_layers": 0, "dtype": "float32", **changes})


@pytest.fixture
def base(tmp_path: Path, vllm: None) -> Base:
    """Two agents that differ, with an engine."""
    tokenizer = character_tokenizer(["abcdefghijkl"], [])
    config = BackboneSection(source="architecture", name="qwen3", frozen_layers=0, hidden_size=32, num_layers=2)
    from_config(config, tokenizer, seed=0).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    model = add_adapters(plain, ["red", "blue"], LoraSection(r=4, alpha=8), seed=1).eval()
    for number, name in enumerate(("red", "blue")):
        for parameter in adapter_parameters(model, name):
            torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(number))
    engine = vllm_engine(section(tmp_path / "base"), load_ensemble_profile("smoke").agents, 0)
    return Base(model, tokenizer, ["red", "blue"], engine)


def test_the_same_greedy_answers_as_without_it(base: Base) -> None:
    """Tokens, mask and log-probabilities; the entropy is −log p of the tokens that were drawn, a token."""
    found = generate_on_vllm(base, PROMPTS, AGENTS, generator=torch.Generator().manual_seed(0), **GREEDY)
    expected = generate(
        base.model, PROMPTS, AGENTS, pad=base.pad, ends=base.ends, generator=torch.Generator().manual_seed(0), **GREEDY
    )
    assert torch.equal(found.mask, expected.mask)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.allclose(found.log_p, expected.log_p, atol=1e-4)
    assert found.entropy[0].item() == pytest.approx(-found.log_p[0, found.mask[0]].mean().item())
    assert not torch.equal(found.tokens[4], found.tokens[0])  # blue is not red


def test_an_answer_keeps_the_token_that_ends_it(base: Base) -> None:
    free = generate_on_vllm(base, PROMPTS[:1], ["red"], generator=torch.Generator(), **GREEDY)
    base.model.generation_config.eos_token_id = int(free.tokens[0, 1])
    ended = generate_on_vllm(base, PROMPTS[:1], ["red"], generator=torch.Generator(), **GREEDY)
    length = 1 + free.tokens[0].tolist().index(int(free.tokens[0, 1]))
    assert ended.tokens.tolist() == free.tokens[:, :length].tolist()
    assert ended.mask.all()


def test_an_adapter_that_may_have_learnt_has_a_new_number(base: Base) -> None:
    for _ in range(2):
        generate_on_vllm(base, PROMPTS, AGENTS, generator=torch.Generator(), **GREEDY)
    first, second = base.engine.numbers
    assert first[0] == first[1] != first[2]
    assert not {*first} & {*second}


def test_the_engine_has_a_gpu_of_its_own_and_needs_one(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = load_ensemble_profile("smoke").agents
    assert base.engine.settings == {
        "revision": None, "dtype": "float32", "enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "gpu": "1",
    }  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    engines = [vllm_engine(section(tmp_path / "base"), agents, number) for number in range(3)]
    assert [engine.settings["gpu"] for engine in engines if engine] == ["6", "7", "6"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6,7"
    for changes in ({"layers": (1, 1)}, {"source": "architecture", "name": "qwen3"}, {"source": "packaged"}):
        assert vllm_engine(section(tmp_path / "base", **changes), agents, 0) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert vllm_engine(section(tmp_path / "base"), agents, 0) is None


def test_without_vllm_there_is_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert vllm_engine(section(tmp_path), load_ensemble_profile("smoke").agents, 0) is None


def test_the_loop_learns_from_the_engine_s_answers(base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = iter(range(1000))
    monkeypatch.setattr(loop, "verify", lambda task, text: float(next(rewards) % 2))
    monkeypatch.setattr(loop, "generate", None)
    content = load_ensemble_profile("smoke").model_dump()
    content["agents"].update({"count": 2, "samples": 2, "prompts": 1, "max_new_tokens": 3, "beta": 0.0})
    content["coevolve"].update({"queries": 2, "budget": 6, "router_first": 0})
    profile = EnsembleProfile.model_validate(content)
    tasks = [Task(id=str(n), prompt="abc", answer="a", domain="d", check="exact") for n in range(4)]
    model = add_adapters(base.model.unload(), profile.agents.names, LoraSection(r=4, alpha=8), seed=1)
    named = Base(model, base.tokenizer, profile.agents.names, base.engine)
    done = loop.coevolve(profile, tasks, [named], tmp_path / "run", "familiarity", 0)
    assert done["updates.agent-0"] > 0
    assert len(base.engine.numbers) == done["step"]
