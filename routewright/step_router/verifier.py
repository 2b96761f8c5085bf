"""The process verifier V_φ (arXiv 2605.16604): how good an action is in a situation (TRL RewardTrainer).

Learns from the teacher's action against what the policy would do instead, at states of the policy split: the
Bradley-Terry loss −log σ(r⁺ − r⁻), averaged over a state's rejected actions. It starts from the cloned policy.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PrinterCallback
from trl import RewardConfig, RewardTrainer

from routewright.errors import BadInput
from routewright.language_models.backbone import resolve_dtype
from routewright.language_models.training import History, last_checkpoint, quiet
from routewright.step_router.bc import lora_config, packed_rows, training_arguments
from routewright.step_router.identity import check_stage
from routewright.step_router.policy import (
    DESCRIPTION,
    Packed,
    SmallModel,
    load_policy,
    pack,
    packed_scores,
    save_model,
)
from routewright.step_router.profile import StepRouterProfile
from routewright.step_router.remembered import Remembered
from routewright.step_router.situations import Proposer
from routewright.step_router.synthesis import State, read_states, unique

CENTERING = 0.01  # keeps scores around 0, so that σ(score) means the same in every situation


def last_columns(packed: Packed) -> torch.Tensor:
    """The column of each action's last token, (B, A); −1 where a row has fewer actions."""
    owner = packed.owner
    columns = torch.arange(owner.shape[1]).expand_as(owner)
    last = torch.full((len(owner), int(owner.max()) + 1), -1)
    return last.scatter_reduce(1, owner.clamp(min=0), torch.where(owner >= 0, columns, -1), "amax")


def bradley_terry_loss(rewards: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Mean over states of the mean over their rejected actions of −log σ(r⁺ − r⁻).

    ``rewards`` (B, A) with the preferred action first; ``present`` (B, A) tells which exist, at least two a row.
    """
    losses = -logsigmoid(rewards[:, :1] - rewards[:, 1:])
    rejected = present[:, 1:].to(rewards.dtype)
    return ((losses * rejected).sum(1) / rejected.sum(1)).mean()


class VerifierTrainer(RewardTrainer):
    """TRL's RewardTrainer with the prompt shared by all actions of a state."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        packed: Packed = inputs["packed"]
        last = last_columns(packed)
        scores = packed_scores(model, packed)
        rewards = scores.gather(1, last.clamp(min=0).to(scores.device))
        present = (last >= 0).to(scores.device)
        loss = bradley_terry_loss(rewards, present)
        with torch.no_grad():
            best = rewards.masked_fill(~present, -1e9).argmax(1) == 0
            self._metrics["train"]["accuracy"].append(best.float().mean().item())
            self._metrics["train"]["mean_reward"].append(rewards[present].mean().item())
        return loss + CENTERING * (rewards[present] ** 2).mean()


def verifier_actions(states: Sequence[State], proposer: Proposer) -> list[list[str]]:
    """For each state the teacher's action and the policy's other candidates; empty where it has no other."""
    proposed = proposer.propose([state.situation for state in states])
    actions = []
    for state, options in zip(states, proposed, strict=True):
        others = [c.action for c in options if c.action.strip() != state.teacher.strip()]
        actions.append([state.teacher, *dict.fromkeys(others)] if others else [])
    return actions


def chosen_states(examples: Path, count: int, seed: int) -> list[State]:
    """``count`` different states of the policy split, drawn by the seed, in their order."""
    states = list(unique(read_states(examples)))
    if len(states) <= count:
        return states
    return [states[i] for i in sorted(random.Random(f"states/{seed}").sample(range(len(states)), count))]


def train_verifier(dataset: Path, examples: Path, bc: Path, out: Path, profile: StepRouterProfile, seed: int) -> None:
    """Train the verifier from the cloned policy; writes a folder `out`. Resumes from its last checkpoint.

    BadInput where `out` is of another profile, seed, examples or policy.
    """
    if check_stage(out, DESCRIPTION, profile, seed, examples=examples, bc=bc):
        return
    section = profile.verifier
    policy = load_policy(bc)
    reader = policy.reader
    states = chosen_states(examples, section.states, seed)
    proposer = Remembered(SmallModel(policy, None, profile.router.candidates), out / "proposals")
    actions = verifier_actions(states, proposer)
    del policy, proposer  # a GPU holds one model at a time
    read = [reader.read(s.situation, a) for s, a in zip(states, actions, strict=True) if a]
    if not read:
        raise BadInput(f"{examples}: the policy proposes nothing but the teacher's action, there is nothing to compare")
    dtype = resolve_dtype(profile.backbone.dtype)
    torch.manual_seed(seed)
    with quiet():  # the head is new: that is what the stage is for
        model = AutoModelForSequenceClassification.from_pretrained(bc, num_labels=1, use_safetensors=True)
    model.config.pad_token_id = reader.tokenizer.pad_token_id

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        chosen = [read[row["row"]] for row in rows]
        return {"packed": pack([c[0] for c in chosen], [c[1] for c in chosen], reader.tokenizer.pad_token_id)}

    rows = packed_rows(read)
    rows = rows.add_column("chosen_ids", rows["input_ids"]).add_column("rejected_ids", rows["input_ids"])
    trainer = VerifierTrainer(
        model=model,
        args=RewardConfig(
            **{**training_arguments(section, out, dtype, seed), "max_length": None},  # the reader cuts prompts
            train_sampling_strategy="group_by_length",
            remove_unused_columns=False,
        ),
        train_dataset=rows,
        data_collator=collate,
        processing_class=reader.tokenizer,
        peft_config=lora_config(section.lora, "SEQ_CLS"),
        callbacks=[History(out, "verifier", "accuracy")],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=last_checkpoint(out / "checkpoints"))
    trained: Any = trainer.model
    if section.lora:
        trained = trained.merge_and_unload()
    facts = {
        "stage": "verifier",
        "seed": seed,
        "profile": profile.name,
        "states": len(read),
        "dtype": profile.backbone.dtype,
    }
    save_model(trained, reader, out, facts)
    for name in ("checkpoints", "proposals"):
        shutil.rmtree(out / name, ignore_errors=True)
