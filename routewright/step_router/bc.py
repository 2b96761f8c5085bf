"""Behaviour cloning of the teacher (TRL SFTTrainer); the prompt carries no loss.

Where actions are listed, the policy is the language model's log p of each action normalised over the list,
π_θ(a|s) = p_θ(a|s)/Σ_b p_θ(b|s), and the teacher's action is cloned under it: every pass teaches what *not* to do as
well, which a model trained from nothing needs. To that comes the usual log p of the completion's tokens.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import AddedToken, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from routewright.config import BackboneSection, LoraSection
from routewright.language_models.backbone import load_backbone, resolve_dtype
from routewright.language_models.training import History, last_checkpoint
from routewright.step_router.identity import check_stage
from routewright.step_router.names import SLOTS, known_words, name_slots, slot
from routewright.step_router.policy import DESCRIPTION, Packed, Reader, action_log_probs, pack, packed_log_probs, save_model
from routewright.step_router.profile import StepRouterProfile, TrainingSection
from routewright.step_router.prompts import completion, prompt
from routewright.step_router.synthesis import State, read_states, unique


def lora_config(lora: LoraSection | None, task_type: str = "CAUSAL_LM") -> LoraConfig | None:
    """PEFT's settings for a profile's; None trains all weights."""
    if lora is None:
        return None
    return LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules="all-linear", task_type=task_type
    )


def training_arguments(section: TrainingSection, out: Path, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """What the three trainings have in common, as arguments of TRL's configs."""
    return {
        "output_dir": str(out / "checkpoints"),
        "num_train_epochs": section.epochs,
        "per_device_train_batch_size": section.batch_size,
        "learning_rate": section.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_steps": 0.25,
        "save_total_limit": 1,
        "seed": seed,
        "bf16": dtype == torch.bfloat16,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": section.lora is not None,
        "dataloader_pin_memory": False,
        "max_length": section.max_length,
    }


BUCKET = 8  # batches whose rows are sorted by length


class BcTrainer(SFTTrainer):
    """TRL's SFTTrainer with the loss over the listed actions."""

    token_weight: float

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        packed: Packed = inputs["packed"]
        if not hasattr(model, "dtype"):  # DistributedDataParallel passes on calls, not attributes
            model.dtype = model.module.dtype
        log_p = action_log_probs(packed_log_probs(model, packed), packed)
        listed = -log_p.values.log_softmax(1)[:, 0].mean()
        tokens = -(log_p.values[:, 0] / log_p.tokens[:, 0]).mean()
        with torch.no_grad():
            self._metrics["train"]["agreement"].append((log_p.values.argmax(1) == 0).float().mean().item())
            self._metrics["train"]["token_loss"].append(tokens.item())
        return listed + self.token_weight * tokens


def packed_rows(read: Sequence[tuple[list[int], list[list[int]]]]) -> Dataset:
    """A dataset that carries indices, with token lists that tell lengths."""
    return Dataset.from_dict(
        {
            "row": list(range(len(read))),
            "input_ids": [[*text, *(t for action in actions for t in action)] for text, actions in read],
            "labels": [[-100] for _ in read],
        }
    )


def mixed_batches(lengths: Sequence[int], size: int, seed: int) -> list[int]:
    """An order of all rows in which batches of ``size`` hold rows of like length, and short and long batches alternate.

    The sampler's own grouping goes from long to short over fifty batches: first only recipes, then only short quests.
    """
    rng = random.Random(f"order/{seed}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), size * BUCKET):
        alike = sorted(order[start : start + size * BUCKET], key=lambda row: lengths[row])
        batches += [alike[first : first + size] for first in range(0, len(alike), size)]
    last = [batch for batch in batches if len(batch) < size]
    full = [batch for batch in batches if len(batch) == size]
    rng.shuffle(full)
    return [row for batch in [*full, *last] for row in batch]


def bc_actions(state: State, most: int) -> list[str]:
    """The teacher's action and then other listed ones, at most ``most``, drawn by the state."""
    others = [action for action in state.situation.observation.admissible or () if action != state.teacher]
    random.Random(f"others/{state.task}/{state.seed}/{state.situation.actions}").shuffle(others)
    return [state.teacher, *others[: most - 1]]


def new_policy(backbone: BackboneSection, states: list[State], limit: int, seed: int) -> tuple[Any, Reader]:
    """The backbone as a policy that has learnt nothing yet.

    One from an architecture reads names as slots where actions are listed; where it has to write them, it reads all words.
    """
    if backbone.source != "architecture":
        model, tokenizer = load_backbone(backbone, [], seed)
        return model, Reader(tokenizer, limit)
    if not any(state.situation.observation.admissible for state in states):
        model, tokenizer = load_backbone(backbone, [prompt(s.situation) + completion(s.teacher) for s in states], seed)
        return model, Reader(tokenizer, limit)
    shown = [(s.task, prompt(s.situation)) for s in states]
    listed = [(s.task, " ".join([s.teacher, *(s.situation.observation.admissible or ())])) for s in states]
    known = frozenset(known_words(shown, listed))
    texts = ["\n".join(name_slots([text, action], known)) for (_, text), (_, action) in zip(shown, listed, strict=True)]
    slots = [slot(number) for number in range(SLOTS)]
    for name in slots:
        texts = [text.replace(name, "") for text in texts]
    model, tokenizer = load_backbone(backbone, texts, seed)
    tokenizer.add_tokens([AddedToken(name, lstrip=True) for name in slots])
    torch.manual_seed(seed)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model, Reader(tokenizer, limit, known)


def distill_bc(
    dataset: Path, examples: Path, out: Path, profile: StepRouterProfile, seed: int,
    watchers: Sequence[TrainerCallback] = (),
) -> None:  # fmt: skip
    """Clone the teacher on the synthesized states; writes a policy folder `out`. Resumes from its last checkpoint.

    BadInput where `out` is of another profile, seed or examples. ``watchers`` see the training go on, to time it.
    """
    if check_stage(out, DESCRIPTION, profile, seed, examples=examples):
        return
    section = profile.bc
    states = list(unique(read_states(examples)))
    model, reader = new_policy(profile.backbone, states, section.max_length, seed)
    reader = replace(reader, new_tokens=section.new_tokens)
    dtype = resolve_dtype(profile.backbone.dtype)
    torch.manual_seed(seed)
    epochs, processes = math.ceil(section.epochs), PartialState().num_processes
    read = [  # every epoch with other names
        reader.read(state.situation, bc_actions(state, section.actions), draw) for draw in range(epochs) for state in states
    ]
    order: list[int] = []
    for epoch in range(epochs):
        first = epoch * len(states)
        lengths = [len(text) + sum(map(len, actions)) for text, actions in read[first : first + len(states)]]
        order += [first + row for row in mixed_batches(lengths, section.batch_size * processes, seed + epoch)]
    read = [read[row] for row in order[: round(section.epochs * len(states))]]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        chosen = [read[row["row"]] for row in rows]
        return {"packed": pack([c[0] for c in chosen], [c[1] for c in chosen], reader.tokenizer.pad_token_id)}

    trainer = BcTrainer(
        model=model,
        args=SFTConfig(
            **{**training_arguments(section, out, dtype, seed), "num_train_epochs": 1},
            completion_only_loss=True,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=packed_rows(read),
        data_collator=collate,
        processing_class=reader.tokenizer,
        peft_config=lora_config(section.lora),
        callbacks=[History(out, "behaviour cloning", "loss"), *watchers],
    )
    trainer.token_weight = section.token_weight
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=last_checkpoint(out / "checkpoints"))
    if not trainer.is_world_process_zero():  # on several nodes the first one writes
        return
    trained: Any = trainer.model
    if section.lora:
        trained = trained.merge_and_unload()
    facts = {"stage": "bc", "seed": seed, "profile": profile.name, "states": len(states), "dtype": profile.backbone.dtype}
    save_model(trained, reader, out, facts)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
