from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from household import profile_with, read_lines
from resuming import Killed, kill_at, killed_before_thresholds, logged_steps, same_result
from safetensors.torch import load_file

from routewright.config import LoraSection, Profile
from routewright.errors import BadInput
from routewright.language_models.training import last_checkpoint
from routewright.search_router import sft
from routewright.search_router.examples import Example, read_examples
from routewright.search_router.features import Features
from routewright.search_router.model import Slots
from routewright.search_router.router import load_router
from routewright.search_router.sft import DecisionSFTTrainer, slot_loss, slot_targets, train_sft


@pytest.fixture(scope="module")
def short() -> Profile:
    """Sixteen steps, a checkpoint every four."""
    return profile_with(sft={"queries": 64, "epochs": 4, "batch_size": 16})


@pytest.fixture(scope="module")
def undisturbed(dataset: Path, examples: Path, short: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train_sft(dataset, examples, folder, short, seed=0)
    return folder


# --- Targets and loss


def features_of(candidates: list[str]) -> Features:
    return replace(Features(*[[]] * len(fields(Features))), candidates=candidates)


def test_targets_by_hand() -> None:
    example = Example(
        id="1", query="q", home="c", group="g", qrels={}, intent=[0.6, 0.399, 0.001], intent_agents=["a"], keywords=["rose"],
        start="2024-01-01",
    )  # fmt: skip
    found = slot_targets(example, features_of(["red", "rose"]), ["a", "b", "c"], smoothing=0.1)
    # the intended agent 1 - s; the others s P(agent), at least s / 10; then a bit a candidate; then the interval's
    assert found == pytest.approx([0.9, 0.0399, 0.01, 0.0, 1.0, 1.0])
    example.start, example.intent_agents = None, ["a", "b"]
    assert slot_targets(example, features_of([]), ["a", "b", "c"], 0.2) == pytest.approx([0.8, 0.8, 0.02, 0.0])


def test_the_loss_by_hand() -> None:
    """Binary cross-entropies summed over the slots that exist, averaged over the queries."""
    logits = torch.tensor([[0.0, math.log(3), 50.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    targets = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3]])
    first = math.log(2) + (-0.5 * math.log(0.75) - 0.5 * math.log(0.25))
    assert slot_loss(Slots(logits, mask, 2), targets).item() == pytest.approx((first + 3 * math.log(2)) / 2)


def test_the_prompt_carries_no_loss() -> None:
    """The loss is that of the decision's slots and of the one token after the prompt, and of nothing else."""
    torch.manual_seed(0)
    slots = Slots(torch.randn(4, 6), torch.rand(4, 6) > 0.2, 3, torch.randn(4, 20))
    targets, intended = torch.rand(4, 6), torch.tensor([2, 0, 1, 1])
    asked: list[dict[str, Any]] = []

    def model(batch: str, **options: Any) -> Slots:
        asked.append({"batch": batch, **options})
        return slots

    trainer = DecisionSFTTrainer.__new__(DecisionSFTTrainer)
    trainer._metrics = {"train": defaultdict(list)}
    inputs = {"batch": "the features", "targets": targets, "intended": intended, "labels": torch.arange(4)}
    loss = trainer.compute_loss(model, inputs)
    assert asked == [{"batch": "the features", "with_answer": True}]
    log_p = torch.log_softmax(slots.answer, dim=1)
    expected = slot_loss(slots, targets) - log_p[range(4), 17 + intended].mean()  # of 17 words and 3 agents
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


# --- Training


def test_the_loss_goes_down_and_intent_is_learned(sft_folder: Path, splits: dict[str, list[Example]]) -> None:
    history = read_lines(sft_folder / "history.jsonl")
    assert [row["step"] for row in history] == list(range(1, 25))
    losses = [row["loss"] for row in history]
    assert all(math.isfinite(loss) for loss in losses)
    assert np.mean(losses[-6:]) < 0.7 * np.mean(losses[:6])
    router = load_router(sft_folder, torch.float32)
    right = [router.decide(e.query, e.reference) for e in splits["test"]]
    agreed = [max(d.scores, key=d.scores.__getitem__) in e.intent_agents for d, e in zip(right, splits["test"], strict=True)]
    assert np.mean(agreed) > 0.8


def test_an_unconstrained_answer_is_valid(sft_folder: Path, splits: dict[str, list[Example]]) -> None:
    from routewright.search_router.selection import router_answers

    _, valid = router_answers(load_router(sft_folder, torch.float32), splits["test"])
    assert valid.mean() > 0.9


def test_the_folder_is_finished(sft_folder: Path) -> None:
    assert not (sft_folder / "checkpoints").exists()
    description = json.loads((sft_folder / "router.json").read_text())
    facts = [description[key] for key in ("stage", "seed", "profile", "queries")]
    assert facts == ["sft", 0, "smoke", 120]
    assert description["second"] > 0


def test_the_same_seed_gives_the_same_router(
    undisturbed: Path, dataset: Path, examples: Path, short: Profile, tmp_path: Path
) -> None:
    train_sft(dataset, examples, tmp_path / "same", short, seed=0)
    same_result(tmp_path / "same", undisturbed)
    train_sft(dataset, examples, tmp_path / "other", short, seed=1)
    last, others = (read_lines(folder / "history.jsonl")[-1] for folder in (undisturbed, tmp_path / "other"))
    assert last["loss"] != others["loss"]


@pytest.mark.parametrize("step", [2, 4, 7, 14])
def test_a_killed_training_resumes(
    undisturbed: Path, dataset: Path, examples: Path, short: Profile, tmp_path: Path, step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before the first checkpoint, at one, between two of them, after the last."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(step, patch)
        with pytest.raises(Killed):
            train_sft(dataset, examples, tmp_path, short, seed=0)
    assert not (tmp_path / "router.json").exists()
    assert bool(list(tmp_path.glob("checkpoints/checkpoint-*"))) == (step > 4)
    steps = logged_steps(monkeypatch)
    train_sft(dataset, examples, tmp_path, short, seed=0)
    same_result(tmp_path, undisturbed)
    assert steps == list(range((step - 1) // 4 * 4 + 1, 17)), "it goes on from the last checkpoint"


def test_a_stage_killed_before_its_thresholds_are_fitted_resumes(
    undisturbed: Path, dataset: Path, examples: Path, short: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        killed_before_thresholds(sft, patch)
        with pytest.raises(Killed):
            train_sft(dataset, examples, tmp_path, short, seed=0)
    assert (tmp_path / "router.json").exists()
    steps = logged_steps(monkeypatch)
    train_sft(dataset, examples, tmp_path, short, seed=0)
    same_result(tmp_path, undisturbed)
    assert steps == []
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in undisturbed.iterdir()}


def test_a_training_killed_twice_and_inside_a_checkpoint(
    undisturbed: Path, dataset: Path, examples: Path, short: Profile, tmp_path: Path
) -> None:
    for step in (6, 10):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(step, patch)
            with pytest.raises(Killed):
                train_sft(dataset, examples, tmp_path, short, seed=0)
    torn = tmp_path / "checkpoints" / "checkpoint-12"  # a checkpoint's state is written last
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    train_sft(dataset, examples, tmp_path, short, seed=0)
    same_result(tmp_path, undisturbed)


def test_a_finished_folder_is_left_as_it_is(
    undisturbed: Path, dataset: Path, examples: Path, short: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "load_backbone", lambda *_: pytest.fail("trained again"))
    before = {file: file.stat().st_mtime_ns for file in undisturbed.rglob("*")}
    train_sft(dataset, examples, undisturbed, short, seed=0)
    assert {file: file.stat().st_mtime_ns for file in undisturbed.rglob("*")} == before


def test_adapters_in_bfloat16_resume_too(
    dataset: Path, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gpu profile's way: LoRA on a bfloat16 model."""
    lora = profile_with(
        backbone={"dtype": "bfloat16"},
        sft={"queries": 64, "epochs": 2, "batch_size": 16, "lora": LoraSection(r=4, alpha=8), "lr": 1e-2},
    )
    train_sft(dataset, examples, tmp_path / "whole", lora, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(5, patch)
        with pytest.raises(Killed):
            train_sft(dataset, examples, tmp_path / "killed", lora, seed=0)
    train_sft(dataset, examples, tmp_path / "killed", lora, seed=0)
    same_result(tmp_path / "killed", tmp_path / "whole")
    losses = [row["loss"] for row in read_lines(tmp_path / "whole" / "history.jsonl")]
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    state = load_file(tmp_path / "whole" / "model.safetensors")
    assert not any("lora" in name for name in state), "folded in"
    assert load_router(tmp_path / "whole").decide("the red rose").agents


def test_it_reads_no_test_queries(
    dataset: Path, examples: Path, tmp_path: Path, short: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def spy(path: Path) -> list[Example]:
        read.append(path.name)
        return read_examples(path)

    monkeypatch.setattr(sft, "read_examples", spy)
    train_sft(dataset, examples, tmp_path, short, seed=0)
    assert sorted(read) == ["dev.jsonl", "train.jsonl"]


def test_more_queries_than_there_are_is_all_of_them(sft_folder: Path, splits: dict[str, list[Example]]) -> None:
    assert json.loads((sft_folder / "router.json").read_text())["queries"] == len(splits["train"])


def test_missing_examples(dataset: Path, tmp_path: Path, short: Profile) -> None:
    with pytest.raises(BadInput, match=r"train\.jsonl: no such file"):
        train_sft(dataset, tmp_path / "nowhere", tmp_path / "out", short, seed=0)


# --- Checkpoints


def test_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "none") is None
    for step, whole in ((2, True), (10, True), (12, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "optimizer.pt").touch()
        if whole:
            (folder / "trainer_state.json").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert not (tmp_path / "checkpoint-12").exists()
