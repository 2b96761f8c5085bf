"""Behaviour cloning: it learns what the teacher does, survives a kill, and leaves a plain folder."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import ACTIONS, Killed, history, made_states, tiny_profile, watch_steps, write_states

from routewright.config import LoraSection
from routewright.step_router.bc import bc_actions, distill_bc, lora_config, mixed_batches
from routewright.step_router.policy import load_policy

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 12, "lr": 3e-3}


def clone(examples: Path, out: Path, **bc: Any) -> Path:
    distill_bc(Path("unused"), examples, out, tiny_profile(bc=QUICK | bc), seed=0)
    return out


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_states(made_states(72), tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def cloned(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps without a disturbance."""
    return clone(examples, tmp_path_factory.mktemp("bc") / "whole")


def test_the_teachers_action_comes_first_among_some_others() -> None:
    (state, *_) = made_states(1)
    everything = bc_actions(state, 9)
    assert everything[0] == state.teacher
    assert sorted(everything) == sorted(ACTIONS)
    few = bc_actions(state, 2)
    assert few == everything[:2]
    assert few == bc_actions(state, 2), "drawn by the state"
    drawn = {bc_actions(replace(state, seed=seed), 2)[1] for seed in range(20)}
    assert drawn == set(ACTIONS) - {state.teacher}
    written = replace(state, situation=made_states(1, listed=False)[0].situation)
    assert bc_actions(written, 9) == [state.teacher]


def test_lora_settings_are_the_profiles() -> None:
    assert lora_config(None) is None
    config = lora_config(LoraSection(r=4, alpha=8, dropout=0.1))
    assert config is not None
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.1)


def test_it_learns(examples: Path, tmp_path: Path) -> None:
    """Which button depends on the light; of four listed actions chance agrees once in four."""
    out = clone(examples, tmp_path / "bc", epochs=10)
    rows = history(out)
    assert [row["step"] for row in rows] == list(range(1, 61))
    early, late = rows[:3], rows[-6:]
    assert sum(row["loss"] for row in late) / 6 < 0.5 * sum(row["loss"] for row in early) / 3
    assert sum(row["agreement"] for row in late) / 6 > 0.9 > 0.7 > sum(row["agreement"] for row in early) / 3
    policy = load_policy(out)
    fresh = made_states(80)[72:]  # captains that it never heard of
    found = policy.log_probs([state.situation for state in fresh], [list(ACTIONS)] * len(fresh))
    chosen = [ACTIONS[max(range(4), key=lambda i, rows=some: sum(rows[i]))] for some in found]
    assert chosen == [state.teacher for state in fresh]


def test_a_killed_training_ends_like_an_undisturbed_one(
    examples: Path, cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        killed = watch_steps(patch, kill_at=8)
        with pytest.raises(Killed):
            clone(examples, tmp_path)
        assert killed == list(range(1, 9))
    assert not (tmp_path / "policy.json").exists()
    with monkeypatch.context() as patch:
        resumed = watch_steps(patch)
        clone(examples, tmp_path)
        assert resumed == list(range(7, 13)), "from the checkpoint at step 6 on"
        clone(examples, tmp_path)
        assert len(resumed) == 6, "a finished training is not repeated"
    whole, other = load_file(cloned / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert whole.keys() == other.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-6, rtol=1e-5)
    assert [row["step"] for row in history(tmp_path)] == list(range(1, 13))
    for one, two in zip(history(cloned), history(tmp_path), strict=True):
        for name in ("loss", "agreement", "token_loss"):
            assert one[name] == pytest.approx(two[name], abs=1e-4)
    assert not (tmp_path / "checkpoints").exists()


def test_lora_is_merged(examples: Path, cloned: Path, tmp_path: Path) -> None:
    out = clone(examples, tmp_path, epochs=0.5, lora={"r": 4, "alpha": 8})
    assert not list(out.glob("adapter*"))
    merged, whole = load_file(out / "model.safetensors"), load_file(cloned / "model.safetensors")
    assert merged.keys() == whole.keys(), "no adapter is left beside the weights"
    start = clone(examples, tmp_path / "start", epochs=0.5, lora={"r": 4, "alpha": 8}, lr=1e-12)
    before = load_file(start / "model.safetensors")
    moved = {name for name, tensor in merged.items() if not torch.allclose(tensor, before[name], atol=1e-7)}
    assert moved
    assert all("proj" in name for name in moved), "linear layers only"
    load_policy(out)


def test_free_text_learns_from_its_tokens_alone(tmp_path: Path) -> None:
    """Nothing else is listed: π of the only action is 1, whatever the weights are."""
    examples = write_states(made_states(24, listed=False), tmp_path / "examples")
    out = clone(examples, tmp_path / "bc", epochs=4, token_weight=0.5)
    rows = history(out)
    assert len(rows) == 8
    for row in rows:
        assert row["loss"] == pytest.approx(0.5 * row["token_loss"], abs=1e-3)
        assert row["agreement"] == 1
    assert rows[-1]["token_loss"] < 0.8 * rows[0]["token_loss"]


def test_a_policy_that_writes_reads_all_words(tmp_path: Path) -> None:
    """Slots stand for names where actions are listed; nobody could carry out a written slot, or a name in lower case."""
    states = [replace(state, teacher="Press GREEN") for state in made_states(24, listed=False)]
    out = clone(write_states(states, tmp_path / "examples"), tmp_path / "bc", epochs=0.5, new_tokens=7)
    reader = load_policy(out).reader
    text, (action,) = reader.read(states[1].situation, ["Press Zorb1"])
    assert reader.known is None
    assert "captain zorb1" in reader.tokenizer.decode(text)
    assert reader.tokenizer.decode(action[:-1]) == " Press Zorb1"
    assert reader.new_tokens == 7


def test_mixed_batches_hold_every_row_once_and_rows_of_like_length() -> None:
    lengths = [(7 * row) % 101 for row in range(96 + 2)]
    order = mixed_batches(lengths, 4, seed=3)
    assert sorted(order) == list(range(98))
    assert order == mixed_batches(lengths, 4, seed=3)
    assert order != mixed_batches(lengths, 4, seed=4)
    batches = [[lengths[row] for row in order[first : first + 4]] for first in range(0, 96, 4)]
    assert max(max(batch) - min(batch) for batch in batches) < 40, "of 32 rows between 0 and 100, four neighbours"
    means = [sum(batch) / 4 for batch in batches]
    assert any(a < b for a, b in pairwise(means))
    assert any(a > b for a, b in pairwise(means))
