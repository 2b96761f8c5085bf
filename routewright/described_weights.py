"""Weights in a folder with a JSON beside them that says what they are and carries their digest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import nn

from routewright.errors import BadInput


def save_described(
    state: Mapping[str, torch.Tensor], folder: Path, weights: str, description: str, facts: Mapping[str, Any]
) -> None:
    """Write ``weights`` (safetensors) and, last, ``description``: `facts`, the digest and the version made of it."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{weights}.partial"
    save_file({name: value.contiguous() for name, value in state.items()}, partial)
    digest = hashlib.sha256(partial.read_bytes()).hexdigest()
    os.replace(partial, folder / weights)
    described = {**facts, "model_version": digest[:12], "weights_sha256": digest}
    partial = folder / f"{description}.partial"
    partial.write_text(json.dumps(described, indent=1), encoding="utf-8")
    os.replace(partial, folder / description)


def read_described(
    folder: Path, what: str, weights: str, description: str, stage: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State and description; BadInput, beginning with ``what``, names what is missing, unreadable or changed since."""
    where = f"{what} {folder}"
    if not folder.is_dir():
        raise BadInput(f"{where}: no such folder, expected one written by the {stage} stage")
    for name in (weights, description):
        if not (folder / name).is_file():
            raise BadInput(f"{where}: {name} is missing, expected a folder written by the {stage} stage")
    try:
        described: dict[str, Any] = dict(json.loads((folder / description).read_text(encoding="utf-8")))
        digest = described["weights_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{where}: {description} is unreadable ({' '.join(str(error).split())})") from None
    content = (folder / weights).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise BadInput(f"{where}: {weights} does not match the digest in {description}")
    return load(content), described


def fill(model: nn.Module, state: Mapping[str, torch.Tensor], where: str, stage: str) -> None:
    """Load the state into the model; BadInput, beginning with ``where``, where it is that of another one."""
    own = model.state_dict()
    shapes = [{name: value.shape for name, value in one.items()} for one in (own, state)]
    wrong = sorted(name for name in {*own, *state} if shapes[0].get(name) != shapes[1].get(name))
    if wrong:
        raise BadInput(f"{where} holds another model than this version's ({wrong[0]} differs), run the {stage} stage again")
    model.load_state_dict(dict(state))
