"""Supervised fine-tuning on two processes ends like that on one: whole models (DDP), or one in parts (FSDP)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from household import profile_with, read_lines
from safetensors.torch import load_file

from components.train_job import lay_out_call
from pipelines.trainjob import FSDP
from routewright.config import Profile
from routewright.search_router.sft import train_sft

ROOT = Path(__file__).parents[2]


def eight_steps(batch_size: int) -> Profile:
    """A checkpoint every two."""
    return profile_with(sft={"queries": 64, "epochs": 2, "batch_size": batch_size})


@pytest.fixture(scope="module")
def alone(dataset: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train_sft(dataset, examples, folder, eight_steps(16), seed=0)
    return folder


def on_two(dataset: Path, examples: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same training with half the batch in each of two processes."""
    named = {"dataset": dataset, "examples": examples, "out": out, "profile": eight_steps(8), "seed": 0}
    call = out.with_name("sft.call.json")
    lay_out_call(train_sft, named, call, out.with_name("sft.inputs"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.run(
        [*torchrun, "-m", "on_processes", str(call)], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("environment", [{}, FSDP], ids=["whole", "sharded"])
def test_two_processes_train_what_one_does(
    dataset: Path, examples: Path, alone: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "sft"
    if environment:  # killed half way, it goes on from the gathered checkpoint
        assert on_two(dataset, examples, out, DIES_AT="5", **environment).returncode
        assert {path.parent.name for path in out.glob("checkpoints/*/pytorch_model_fsdp.bin")} == {"checkpoint-4"}
    done = on_two(dataset, examples, out, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = load_file(alone / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: value.shape for name, value in one.items()} == {name: value.shape for name, value in two.items()}
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-3, rtol=1e-2, msg=lambda told, name=name: f"{name}: {told}")
    rows, others = read_lines(alone / "history.jsonl"), read_lines(out / "history.jsonl")
    assert [row["step"] for row in others] == list(range(1, 9))
    for row, other in zip(rows, others, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-3)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-2)
    assert not (out / "checkpoints").exists()
