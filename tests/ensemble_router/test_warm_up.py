"""The start of the agents: tokens, a pretrained base, adapters that prefer different domains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("peft", reason="peft is in the train extra")

from routewright.ensemble_router import warm_up
from routewright.ensemble_router.agents import activate, adapter_parameters, completion_log_probs
from routewright.ensemble_router.profile import EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.prompts import completion_text, encode_answer, encode_prompt
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.warm_up import base_model, character_tokenizer, warm_adapters, warm_generalist
from routewright.errors import BadInput

TASKS = [
    Task(id=f"{domain}{n}", prompt=f"{domain} {n}", answer=answer, domain=domain, check="exact")
    for domain, answer in (("ones", "1"), ("twos", "2"))
    for n in range(10)
]


def profile(count: int = 2, steps: int = 40) -> EnsembleProfile:
    content = load_ensemble_profile("smoke").model_dump()
    content["backbone"].update({"hidden_size": 32, "num_layers": 2})
    content["pretrain"] = None
    content["warm_up"].update({"steps": steps, "batch_size": 8, "share": 1.0, "lr": 1e-2})
    content["agents"]["count"] = count
    return EnsembleProfile.model_validate(content)


def test_words_are_one_token_and_letters_stand_alone() -> None:
    tokenizer = character_tokenizer(
        ["spell_backward cat\n=tac"] * 300 + ["spell_backward horse\n=esroh"], ["spell_backward"]
    )
    tokens = encode_prompt(tokenizer, "spell_backward horse")
    assert len(tokens) == 1 + len(" horse") + len("\n=")
    answer = encode_answer(tokenizer, "esroh")
    assert len(answer) == 6
    assert completion_text(tokenizer, [*answer, 0], [True] * 6 + [False]) == "esroh"


def test_a_chat_template_s_date_does_not_change_from_day_to_day() -> None:
    tokenizer = character_tokenizer(["26 Jul 2024: abc"], [])
    tokenizer.chat_template = "{{ date_string }}: {{ messages[0]['content'] }}"
    assert tokenizer.decode(encode_prompt(tokenizer, "abc")) == "26 Jul 2024: abc"


def test_each_adapter_prefers_its_domain_and_the_base_stays(tmp_path: Path) -> None:
    base, tokenizer = base_model(profile(), TASKS, tmp_path, seed=0)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    model = warm_adapters(base, tokenizer, TASKS, profile(), seed=0)
    found = {}
    for name in ("agent-0", "agent-1"):
        activate(model, name)
        for answer in ("1", "2"):
            completion = torch.tensor([encode_answer(tokenizer, answer)])
            prompt = [encode_prompt(tokenizer, "ones 3")]
            log_p = completion_log_probs(model, prompt, completion, torch.ones_like(completion).bool(), 0)
            found[name, answer] = float(log_p.detach()[0, 0])
    assert found["agent-0", "1"] > found["agent-0", "2"]  # domains in alphabetical order: ones, twos
    assert found["agent-1", "2"] > found["agent-1", "1"]
    kept, _ = base_model(profile(), TASKS, tmp_path, seed=9)  # the folder's, not a new one
    assert all(torch.equal(value, before[key]) for key, value in kept.state_dict().items())


def test_one_adapter_for_all_knows_all_domains(tmp_path: Path) -> None:
    base, tokenizer = base_model(profile(), TASKS, tmp_path, seed=0)
    model = warm_generalist(base, tokenizer, TASKS, profile(), seed=0)
    assert list(model.peft_config) == ["agent-0"]
    for prompt, right, wrong in (("ones 3", "1", "2"), ("twos 3", "2", "1")):
        log_p = {}
        for answer in (right, wrong):
            completion = torch.tensor([encode_answer(tokenizer, answer)])
            given = [encode_prompt(tokenizer, prompt)]
            log_p[answer] = float(
                completion_log_probs(model, given, completion, torch.ones_like(completion).bool(), 0).detach()[0, 0]
            )
        assert log_p[right] > log_p[wrong]


def test_one_adapter_for_all_is_warmed_as_long_as_all_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(warm_up, "_train", lambda *arguments: steps.append(arguments[4].steps))
    base, tokenizer = base_model(profile(count=3), TASKS, tmp_path, seed=0)
    warm_generalist(base, tokenizer, TASKS, profile(count=3), seed=0)
    base, tokenizer = base_model(profile(count=3), TASKS, tmp_path, seed=0)
    warm_adapters(base, tokenizer, TASKS, profile(count=3), seed=0)
    assert steps == [120, 40, 40, 40]


def test_a_run_that_resumes_begins_with_the_same_base(tmp_path: Path) -> None:
    content = profile().model_dump()
    content["backbone"]["dtype"] = "bfloat16"
    other = EnsembleProfile.model_validate(content)
    first, _ = base_model(other, TASKS, tmp_path, seed=0)
    again, _ = base_model(other, TASKS, tmp_path, seed=0)
    assert first.dtype == again.dtype == torch.bfloat16
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in first.state_dict().items())


def test_a_base_that_was_killed_while_it_was_saved_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed with half of the weights' file written: nothing of it is taken for a base, the next run makes a whole one."""
    whole, _ = base_model(profile(), TASKS, tmp_path / "whole", seed=0)
    real = PreTrainedModel.save_pretrained

    def dying(model: PreTrainedModel, folder: Path, **more: object) -> None:
        real(model, folder, **more)  # type: ignore[arg-type]
        file = Path(folder) / "model.safetensors"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", dying)
    with pytest.raises(KeyboardInterrupt):
        base_model(profile(), TASKS, tmp_path / "base", seed=0)
    assert not (tmp_path / "base").exists()
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", real)
    again, _ = base_model(profile(), TASKS, tmp_path / "base", seed=0)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in whole.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "whole"]


def test_a_seed_gives_the_same_adapters(tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        base, tokenizer = base_model(profile(steps=3), TASKS, tmp_path, seed=0)
        made.append(warm_adapters(base, tokenizer, TASKS, profile(steps=3), seed=4))
    pairs = zip(adapter_parameters(made[0], "agent-1"), adapter_parameters(made[1], "agent-1"), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_tasks_without_an_answer_cannot_warm(tmp_path: Path) -> None:
    base, tokenizer = base_model(profile(), TASKS, tmp_path, seed=0)
    code = Task(id="c", prompt="c", tests="assert True", domain="code", check="code")
    with pytest.raises(BadInput, match="at least one with an answer"):
        warm_adapters(base, tokenizer, [code], profile(), seed=0)
