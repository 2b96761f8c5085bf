"""Query states, heads, files; NaN."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from routewright.ensemble_router.familiarity import (
    DESCRIPTION,
    WEIGHTS,
    FamiliarityHeads,
    FusedHeads,
    distance,
    familiarity,
    least_lambda,
    load_heads,
    query_states,
    save_heads,
    state_layers,
    warn_of_margin,
)
from routewright.errors import BadInput

NAMES = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def backbone() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def heads() -> FamiliarityHeads:
    return FamiliarityHeads(64, NAMES, seed=3)


def states(rows: int = 5, width: int = 64) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 3 + 1


def test_query_states_are_two_layers_at_the_last_token(backbone: Any) -> None:
    tokens = torch.tensor([[5, 6, 7, 8]])
    hidden = backbone(tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[2][0, -1], hidden[3][0, -1]])
    assert torch.allclose(query_states(backbone, tokens, torch.ones_like(tokens))[0], expected, atol=1e-6)
    assert [state_layers(layers) for layers in (4, 36, 30, 1)] == [(2, 3), (18, 27), (15, 22), (0, 0)]


def test_padding_on_either_side_changes_nothing(backbone: Any) -> None:
    alone = query_states(backbone, torch.tensor([[5, 6, 7]]), torch.ones(1, 3))
    right = query_states(backbone, torch.tensor([[5, 6, 7, 0, 0], [9] * 5]), torch.tensor([[1, 1, 1, 0, 0], [1] * 5]))
    left = query_states(backbone, torch.tensor([[0, 0, 5, 6, 7], [9] * 5]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5]))
    assert torch.allclose(right[0], alone[0], atol=1e-6)
    assert torch.allclose(left[0], alone[0], atol=1e-6)
    assert torch.allclose(left[1], right[1], atol=1e-5)
    assert not torch.allclose(left[0], left[1], atol=1e-2)
    assert not right.requires_grad
    with pytest.raises(BadInput, match="empty query"):
        query_states(backbone, torch.tensor([[0, 0]]), torch.zeros(1, 2))


def test_distance_and_familiarity_by_hand() -> None:
    """Orthogonal vectors of any length: √2; opposite ones 2; the same direction 0. f = exp(−2√2) = 0.0591."""
    a = torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 2.0]])
    b = torch.tensor([[0.0, 0.1], [-5.0, 0.0], [1.0, 1.0]])
    d = distance(a, b)
    assert d.tolist() == pytest.approx([math.sqrt(2), 2.0, 0.0], abs=1e-6)
    assert familiarity(d, 2.0).tolist() == pytest.approx([0.0591, math.exp(-4), 1.0], abs=5e-5)


def test_heads_are_the_layers_of_the_paper(heads: FamiliarityHeads) -> None:
    """One agent at a time, layer by layer, with scales and shifts that are not 1 and 0."""
    for number, head in enumerate([*heads.predictors, *heads.targets]):
        torch.nn.init.normal_(head.get_parameter("norm.weight"), 1, 0.3, generator=torch.Generator().manual_seed(number))
        torch.nn.init.normal_(head.get_parameter("norm.bias"), 0, 0.3, generator=torch.Generator().manual_seed(number))
    x = states()
    expected = []
    for predictor, target in zip(heads.predictors, heads.targets, strict=True):
        outs = []
        for head in (predictor, target):
            p = dict(head.named_parameters())
            inner = functional.layer_norm(x, (64,), p["norm.weight"], p["norm.bias"]) @ p["first.weight"].T + p["first.bias"]
            outs.append((inner * torch.sigmoid(inner)) @ p["second.weight"].T + p["second.bias"])
        cosine = functional.cosine_similarity(outs[0], outs[1])
        expected.append((2 - 2 * cosine).sqrt())
    found = heads(x)
    assert torch.allclose(found, torch.stack(expected, dim=1), atol=1e-4)
    exact, half, bytewise = (FusedHeads(heads, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8))
    for row in range(len(x)):
        assert torch.allclose(exact(x[row]), found[row], atol=1e-5)
        assert torch.allclose(half(x[row]), found[row], atol=0.005)
        assert torch.allclose(bytewise(x[row]), found[row], atol=0.01)
        assert not torch.equal(bytewise(x[row]), half(x[row]))  # it is another layout


def test_untrained_heads_are_unrelated() -> None:
    d = FamiliarityHeads(256, [f"a{i}" for i in range(8)], seed=0)(states(20, 256))
    assert d.mean().item() == pytest.approx(math.sqrt(2), abs=0.08)


def test_targets_are_orthogonal_and_frozen(heads: FamiliarityHeads) -> None:
    weight = heads.targets[0].get_parameter("second.weight")
    assert torch.allclose(weight @ weight.T, torch.eye(256), atol=1e-4)
    heads(states()).sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in heads.targets.parameters())
    assert all(p.grad is not None for p in heads.predictors.parameters())


def test_training_brings_a_predictor_to_its_target_and_no_other(heads: FamiliarityHeads) -> None:
    before = heads(states()).detach()
    optimiser = torch.optim.AdamW(heads.predictors[1].parameters(), lr=1e-3)
    for _ in range(80):
        optimiser.zero_grad()
        heads(states())[:, 1].mean().backward()
        optimiser.step()
    after = heads(states()).detach()
    assert after[:, 1].max() < 0.3 < before[:, 1].min()
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])


def test_a_new_head_leaves_the_others_bit_identical(heads: FamiliarityHeads) -> None:
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    fused = FusedHeads(heads)(states()[0])
    heads.add("grey", seed=9)
    after = heads.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert len(after) == len(before) // 3 * 4
    assert torch.allclose(FusedHeads(heads)(states()[0])[:3], fused, atol=1e-6)
    assert heads.agents == [*NAMES, "grey"]
    with pytest.raises(BadInput, match="'grey' has a head already"):
        heads.add("grey", seed=9)


def test_agents_that_are_no_choice() -> None:
    with pytest.raises(BadInput, match="at least two to route between, found 1"):
        FamiliarityHeads(8, ["alone"], 0)
    with pytest.raises(BadInput, match="different names"):
        FamiliarityHeads(8, ["a", "a"], 0)


def test_saved_and_loaded(heads: FamiliarityHeads, tmp_path: Path) -> None:
    save_heads(heads, tmp_path, {"lambda": 2.0})
    loaded, told = load_heads(tmp_path)
    assert torch.equal(loaded(states()), heads(states()))
    assert (told["agents"], told["lambda"], len(told["model_version"])) == (NAMES, 2.0, 12)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-1] + b"\1")
    with pytest.raises(BadInput, match="does not match the digest"):
        load_heads(tmp_path)
    (tmp_path / DESCRIPTION).write_text("{}")
    with pytest.raises(BadInput, match="is unreadable"):
        load_heads(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(BadInput, match=f"{WEIGHTS} is missing"):
        load_heads(tmp_path)


def test_other_heads_than_described(heads: FamiliarityHeads, tmp_path: Path) -> None:
    save_heads(heads, tmp_path, {})
    told = json.loads((tmp_path / DESCRIPTION).read_text())
    (tmp_path / DESCRIPTION).write_text(json.dumps({**told, "agents": ["x", "y"]}))
    with pytest.raises(BadInput, match="holds another model"):
        load_heads(tmp_path)


def test_nan_in_a_head_at_load_and_at_decision(heads: FamiliarityHeads, tmp_path: Path) -> None:
    fused = FusedHeads(heads)
    with pytest.raises(BadInput, match="familiarity of agent 'red': expected a finite distance"):
        fused(torch.full((64,), math.nan))
    fused.second_bias[1] = math.nan
    with pytest.raises(BadInput, match="familiarity of agent 'green': expected a finite distance"):
        fused(states()[0])
    with torch.no_grad():
        heads.predictors[2].get_parameter("first.bias")[7] = math.nan
    with pytest.raises(BadInput, match="head of agent 'blue': expected finite weights"):
        FusedHeads(heads)
    save_heads(heads, tmp_path, {})
    with pytest.raises(BadInput, match="head of agent 'blue': expected finite weights"):
        load_heads(tmp_path)
    values = {name: value.nan_to_num(0) for name, value in load_file(tmp_path / WEIGHTS).items()}
    save_file(values, tmp_path / WEIGHTS)
    told = json.loads((tmp_path / DESCRIPTION).read_text())
    told["weights_sha256"] = hashlib.sha256((tmp_path / WEIGHTS).read_bytes()).hexdigest()
    (tmp_path / DESCRIPTION).write_text(json.dumps(told))
    load_heads(tmp_path)


def test_margin_that_does_not_silence_everybody() -> None:
    """6·e^−2 = 0.81 > 0.7, 5·e^−2 = 0.68; ln(6/0.7)/1 = 2.148."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_margin(5, 2.0, 0.7, 1.0)
        warn_of_margin(6, 2.15, 0.7, 1.0)
    with pytest.warns(UserWarning, match=r"lambda = 2 should be at least 2\.15"):
        warn_of_margin(6, 2.0, 0.7, 1.0)
    assert least_lambda(6, 0.7, 1.0) == pytest.approx(2.1484, abs=1e-4)
