"""The version of a router's folder is of all that decides and answers, wherever the folder lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_ensemble import save_tiny_ensemble

from routewright.ensemble_router.familiarity import load_heads
from routewright.ensemble_router.router import load_ensemble_router, save_whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny_ensemble(tmp_path_factory.mktemp("router"))
    (made / "adapters" / "speller").mkdir(parents=True)
    save_file({"lora_A": torch.ones(2, 2)}, made / "adapters" / "speller" / "adapter_model.safetensors")
    return made


def version(folder: Path, **facts: Any) -> str:
    heads, description = load_heads(folder)
    save_whole(heads, folder, {**description, **facts})
    return str(load_ensemble_router(folder).description["model_version"])


def other_adapter(folder: Path) -> None:
    save_file({"lora_A": torch.zeros(2, 2)}, folder / "adapters" / "speller" / "adapter_model.safetensors")


def other_base(folder: Path) -> None:
    weights = load_file(folder / "base" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    save_file(weights, folder / "base" / "model.safetensors", metadata={"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    path = folder / "base" / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def other_readme(folder: Path) -> None:
    (folder / "adapters" / "speller" / "README.md").write_text("trained in /elsewhere", encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "same"), [(other_adapter, False), (other_base, False), (other_tokenizer, False), (other_readme, True)]
)
def test_adapters_base_and_tokenizer_are_in_the_version(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], same: bool
) -> None:
    shutil.copytree(folder, tmp_path / "moved")
    first = version(folder)
    assert version(tmp_path / "moved") == first
    change(tmp_path / "moved")
    assert (version(tmp_path / "moved") == first) is same


def test_lambda_and_tau_are_in_the_version(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "moved")
    found = {version(tmp_path / "moved", tau=tau, **{"lambda": lam}) for tau, lam in ((0.7, 2.0), (0.5, 2.0), (0.7, 2.1))}
    assert len(found) == 3
    assert len(json.loads((tmp_path / "moved" / "familiarity.json").read_text())["model_version"]) == 12
