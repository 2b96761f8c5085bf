"""LoRA agents on one base: switched, generated in one batch, their prompts read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("peft", reason="peft is in the train extra")

from routewright.config import LoraSection
from routewright.ensemble_router.agents import (
    Base,
    activate,
    adapter_parameters,
    add_adapters,
    check_names,
    completion_log_probs,
    generate,
    left_padded,
    load_adapters,
    save_adapters,
)
from routewright.ensemble_router.warm_up import character_tokenizer
from routewright.errors import BadInput

NAMES = ["red", "green", "blue"]
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14], [15]]
LORA = LoraSection(r=4, alpha=8)


def base(hidden: int = 32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=50, hidden_size=hidden, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def model() -> Any:
    made = add_adapters(base(), NAMES, LORA, seed=1)
    for number, name in enumerate(NAMES):  # B is 0 at first: make the agents differ
        for parameter in adapter_parameters(made, name):
            torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(number))
    return made


def sampled(model: Any, agents: list[str], prompts: list[list[int]] = PROMPTS, **more: Any) -> Any:
    settings = {"samples": 3, "max_new_tokens": 6, "pad": 0, "ends": [1], "generator": torch.Generator().manual_seed(2)}
    return generate(model, prompts, agents, **{**settings, **more})


def plain_log_probs(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_fresh_agents_are_the_base_and_do_not_depend_on_each_other() -> None:
    tokens = torch.tensor([[5, 6, 7]])
    expected = base()(tokens).logits
    several, two = add_adapters(base(), NAMES, LORA, seed=1), add_adapters(base(), NAMES[:2], LORA, seed=1)
    for name in NAMES:
        activate(several, name)
        assert torch.allclose(several(tokens).logits, expected, atol=1e-6)
    pairs = zip(adapter_parameters(several, "green"), adapter_parameters(two, "green"), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_training_one_agent_moves_no_other_and_not_the_base(model: Any) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    activate(model, "green")
    optimiser = torch.optim.AdamW(adapter_parameters(model, "green"), lr=1e-2)
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimiser.step()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved
    assert all(".green." in key for key in moved)
    assert {key for key, value in model.named_parameters() if value.requires_grad} == {
        key for key, _ in model.named_parameters() if ".green." in key
    }


def test_shared_prompts_give_the_plain_log_probabilities_and_gradients(model: Any) -> None:
    activate(model, "blue")
    found = sampled(model, ["blue"] * 4)
    log_p = completion_log_probs(model, PROMPTS, found.tokens, found.mask, pad=0)
    plain = []
    for row in range(len(found.tokens)):
        length = int(found.mask[row].sum())
        one = plain_log_probs(model, PROMPTS[row // 3], found.tokens[row, :length].tolist())
        plain.append(one.sum())
        assert torch.allclose(log_p[row, :length], one, atol=1e-5)
        assert torch.allclose(found.log_p[row, :length], one, atol=1e-5)
        assert (log_p[row, length:] == 0).all()
    own = torch.autograd.grad(log_p.sum(), adapter_parameters(model, "blue"))
    expected = torch.autograd.grad(torch.stack(plain).sum(), adapter_parameters(model, "blue"))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(own, expected, strict=True))


def test_a_mixed_batch_is_each_agent_alone(model: Any) -> None:
    agents = ["red", "green", "green", "blue"]
    mixed = sampled(model, agents, samples=1, temperature=0)
    for row, agent in enumerate(agents):
        alone = sampled(model, [agent], [PROMPTS[row]], samples=1, temperature=0)
        length = int(alone.mask.sum())
        assert mixed.tokens[row, :length].tolist() == alone.tokens[0, :length].tolist()
        assert int(mixed.mask[row].sum()) == length
        assert torch.allclose(mixed.log_p[row, :length], alone.log_p[0, :length], atol=1e-4)
    others = sampled(model, ["blue", "red", "red", "green"], samples=1, temperature=0)
    assert not torch.equal(others.tokens, mixed.tokens)


def test_sampling_follows_the_generator_and_its_limits(model: Any) -> None:
    one, again = sampled(model, ["red"] * 4), sampled(model, ["red"] * 4)
    assert torch.equal(one.tokens, again.tokens)
    other = sampled(model, ["red"] * 4, generator=torch.Generator().manual_seed(3))
    assert not torch.equal(one.tokens, other.tokens)
    greedy = sampled(model, ["red"] * 4, temperature=0)
    for limited in ({"top_k": 1}, {"top_p": 1e-6}):
        assert torch.equal(sampled(model, ["red"] * 4, **limited).tokens, greedy.tokens)
    assert (one.entropy > 0).all()


def test_an_answer_ends_at_the_end_of_sequence(model: Any) -> None:
    """With "end" as what the greedy agent says at once, the generation is empty: one token, the end."""
    greedy = sampled(model, ["red"], [PROMPTS[0]], samples=1, temperature=0)
    first = int(greedy.tokens[0, 0])
    empty = sampled(model, ["red"], [PROMPTS[0]], samples=2, temperature=0, ends=[first])
    assert (empty.tokens.tolist(), empty.mask.tolist()) == ([[first], [first]], [[True], [True]])
    log_p = completion_log_probs(model, [PROMPTS[0]], empty.tokens, empty.mask, pad=0)
    assert log_p.shape == (2, 1)
    assert torch.isfinite(log_p).all()
    free = sampled(model, ["red"], [PROMPTS[0]], samples=1, temperature=0, ends=[]).tokens[0].tolist()
    for ends in ([free[2], 49], [49, free[2]]):
        several = sampled(model, ["red"], [PROMPTS[0]], samples=1, temperature=0, ends=ends).tokens[0].tolist()
        assert several == free[: 1 + next(place for place, token in enumerate(free) if token in ends)]


def test_all_tokens_that_end_an_answer_are_known() -> None:
    """The tokenizer's and those of the model's generation config, one or several."""
    tokenizer = character_tokenizer(["abc"], [])
    made = base()
    for told, ends in ((None, [1]), (1, [1]), ([1, 7], [1, 7]), (0, [0, 1])):
        made.generation_config.eos_token_id = told
        assert Base(made, tokenizer, []).ends == ends


def test_leaving_out_finished_rows_changes_no_answer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows of three agents that end at different places, computed to the end or dropped as soon as they end."""
    agents = ["red", "red", "green", "blue"]
    free = sampled(model, agents, samples=2, temperature=0, ends=[])
    end = int(free.tokens[0, 1])  # the first row ends at its second token at the latest
    found = []
    for going in (0.0, 1.0):
        monkeypatch.setattr("routewright.ensemble_router.agents.GOING", going)
        found.append(sampled(model, agents, samples=2, temperature=0, ends=[end]))
    whole, dropped = found
    assert len(set(whole.mask.sum(dim=1).tolist())) > 1
    assert torch.equal(whole.tokens, dropped.tokens)
    assert torch.equal(whole.mask, dropped.mask)
    assert torch.allclose(whole.log_p, dropped.log_p, atol=1e-4)
    assert torch.allclose(whole.entropy, dropped.entropy, atol=1e-4)


def test_adapters_come_back(model: Any, tmp_path: Path) -> None:
    save_adapters(model, tmp_path)
    loaded = load_adapters(base(), tmp_path, NAMES)
    agents = ["red", "green", "green", "blue"]
    kwargs: dict[str, Any] = {"samples": 1, "temperature": 0}
    assert torch.equal(sampled(loaded, agents, **kwargs).tokens, sampled(model, agents, **kwargs).tokens)
    assert all(parameter.requires_grad for parameter in adapter_parameters(loaded, "red"))


def test_an_adapter_that_does_not_fit_the_base(model: Any, tmp_path: Path) -> None:
    save_adapters(model, tmp_path)
    with pytest.raises(BadInput, match="red: it does not fit the base model"):
        load_adapters(base(hidden=48), tmp_path, NAMES)
    with pytest.raises(BadInput, match=r"grey: expected a folder with adapter_config\.json"):
        load_adapters(base(), tmp_path, ["red", "grey"])


def test_names_and_prompts_that_cannot_be_used() -> None:
    for names, told in (
        (["red"], "at least two"),
        (["red", "red"], "different names"),
        (["a.b", "c"], "without dots"),
        (["a/b", "c"], "slashes"),
    ):
        with pytest.raises(BadInput, match=told):
            check_names(names)
    with pytest.raises(BadInput, match="empty prompt"):
        left_padded([[1], []], 0)
