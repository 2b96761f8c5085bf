"""Behaviour cloning on two processes, each with half of every batch, ends like that on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import history, made_states, tiny_profile, write_states

from components.train_job import lay_out_call
from routewright.step_router.bc import distill_bc
from routewright.step_router.profile import StepRouterProfile

ROOT = Path(__file__).parents[2]


def eight_steps(batch_size: int) -> StepRouterProfile:
    return tiny_profile(bc={"epochs": 2, "batch_size": batch_size, "lr": 3e-3})


def test_two_processes_clone_what_one_does(tmp_path: Path) -> None:
    examples = write_states(made_states(48), tmp_path / "examples")
    alone, out = tmp_path / "alone", tmp_path / "two"
    distill_bc(Path("unused"), examples, alone, eight_steps(12), seed=0)
    named = {"dataset": examples, "examples": examples, "out": out, "profile": eight_steps(6), "seed": 0}
    lay_out_call(distill_bc, named, tmp_path / "two.call.json", tmp_path / "two.inputs")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "components.train_node", str(tmp_path / "two.call.json")],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = load_file(alone / "model.safetensors"), load_file(out / "model.safetensors")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-3, rtol=1e-2, msg=lambda told, name=name: f"{name}: {told}")
    assert [row["step"] for row in history(out)] == list(range(1, 9))
    for row, other in zip(history(alone), history(out), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-3)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-2)
    assert not (out / "checkpoints").exists()
