"""Verifier-guided DPO with the consistency term (arXiv 2605.16604): L_DPO + 0.1·L_JSD, the cloned policy as reference.

Pairs: the cloned policy proposes K actions at a state. The teacher's action is preferred, whether the policy proposes it
or not; against it stands the most probable other proposal that the verifier scores lower by at least the gap.
The Jensen-Shannon divergence is between the policy's distributions over one fixed set of actions,
seen under two perturbations of the same state.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from routewright.errors import BadInput
from routewright.language_models.backbone import resolve_dtype
from routewright.language_models.training import History, last_checkpoint
from routewright.step_router.bc import lora_config, training_arguments
from routewright.step_router.identity import check_stage
from routewright.step_router.policy import (
    DESCRIPTION,
    Reader,
    SmallModel,
    action_log_probs,
    load_policy,
    load_verifier,
    pack,
    packed_log_probs,
    save_model,
)
from routewright.step_router.profile import DpoSection, StepRouterProfile
from routewright.step_router.remembered import Remembered
from routewright.step_router.situations import Proposer, Situation
from routewright.step_router.synthesis import State
from routewright.step_router.verifier import chosen_states

VIEW_ACTIONS = 8  # of the fixed set that the consistency term compares distributions over


@dataclass(frozen=True)
class Pair:
    """One preference, and the two views of its state for the consistency term."""

    situation: Situation
    other: Situation
    chosen: str
    rejected: str
    actions: tuple[str, ...]  # the fixed set, the same for both views


def rejected(scored: Sequence[tuple[str, float]], teacher: tuple[str, float], gap: float) -> str | None:
    """The first proposal, the most probable coming first, that is not the teacher's and scores lower by at least ``gap``.

    Preferring what the verifier likes best over the teacher's own action, where they differ, made the policy worse.
    """
    action, best = teacher
    return next((other for other, score in scored if other.strip() != action.strip() and best - score >= gap), None)


def make_pairs(states: Sequence[State], proposer: Proposer, verifier: Any, settings: DpoSection) -> list[Pair]:
    """The preferences at these states, of proposals with scores; a state without a gap gives none."""
    proposed = proposer.propose([state.situation for state in states])
    teacher_scores = verifier.scores([s.situation for s in states], [[s.teacher] for s in states])
    pairs = []
    for state, options, (teacher_score,) in zip(states, proposed, teacher_scores, strict=True):
        scored = [(c.action, float(c.verifier_score)) for c in options if c.verifier_score is not None]
        fixed = tuple(dict.fromkeys([state.teacher, *(action for action, _ in scored)]))[:VIEW_ACTIONS]
        other = rejected(scored, (state.teacher, teacher_score), settings.gap)
        if other is not None:
            pairs.append(Pair(state.situation, state.other, state.teacher, other, fixed))
    return pairs


def jensen_shannon(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """JSD of each row's two distributions, nats, (B,) in [0, ln 2]; log-probabilities (B, A), very low (−1e9) for none."""
    mean = torch.logaddexp(log_p, log_q) - math.log(2)
    left = (log_p.exp() * (log_p - mean)).sum(1)
    right = (log_q.exp() * (log_q - mean)).sum(1)
    return (left + right) / 2


class ConsistentDPOTrainer(DPOTrainer):
    """TRL's DPOTrainer with w·JSD added; its rows come with token lists."""

    jsd_weight: float

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        first, second = inputs.pop("first"), inputs.pop("second")
        loss = super()._compute_loss(model, inputs, return_outputs)
        self._metrics["train"]["dpo_loss"].append(loss.item())
        with torch.set_grad_enabled(self.jsd_weight > 0):
            views = [action_log_probs(packed_log_probs(model, view), view).values.log_softmax(1) for view in (first, second)]
            divergence = jensen_shannon(*views).mean()
        self._metrics["train"]["jsd"].append(divergence.item())
        return loss + self.jsd_weight * divergence if self.jsd_weight > 0 else loss


def dpo_rows(pairs: Sequence[Pair], reader: Reader) -> Dataset:
    """Token lists of the pairs, and the numbers of their views."""
    rows: dict[str, list[Any]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": [], "row": []}
    for number, pair in enumerate(pairs):
        text, (chosen, rejected) = reader.read(pair.situation, [pair.chosen, pair.rejected])
        values = {"prompt_ids": text, "chosen_ids": chosen, "rejected_ids": rejected, "row": number}
        for name, value in values.items():
            rows[name].append(value)
    return Dataset.from_dict(rows)


def train_dpo(
    pairs: Sequence[Pair], bc: Path, out: Path, profile: StepRouterProfile, jsd: float, seed: int, title: str
) -> None:
    """DPO on the pairs with the consistency term at weight ``jsd``; writes a policy folder `out`."""
    if (out / DESCRIPTION).is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    section = profile.dpo
    reader = load_policy(bc).reader
    dtype = resolve_dtype(profile.backbone.dtype)
    views = [
        [reader.read(view, pair.actions) for view in (pair.situation, pair.other)] for pair in pairs
    ]  # names of one state are slots of its own text, so that both views are read as they would be
    padding = reader.tokenizer.pad_token_id
    preferences = DataCollatorForPreference(pad_token_id=padding)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = preferences(rows)
        for name, place in (("first", 0), ("second", 1)):
            some = [views[row["row"]][place] for row in rows]
            batch[name] = pack([text for text, _ in some], [actions for _, actions in some], padding)
        return batch

    lora = lora_config(section.lora)
    model = AutoModelForCausalLM.from_pretrained(bc, use_safetensors=True)
    # without its adapters the model is its own reference
    reference = None if lora else AutoModelForCausalLM.from_pretrained(bc, use_safetensors=True)
    torch.manual_seed(seed)
    trainer = ConsistentDPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(
            **training_arguments(section, out, dtype, seed),
            beta=section.beta,
            remove_unused_columns=False,
        ),
        train_dataset=dpo_rows(pairs, reader),
        data_collator=collate,
        processing_class=reader.tokenizer,
        peft_config=lora,
        callbacks=[History(out, title, "loss")],
    )
    trainer.jsd_weight = jsd
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=last_checkpoint(out / "checkpoints"))
    trained: Any = trainer.model
    if section.lora:
        trained = trained.merge_and_unload()
    facts = {"stage": "dpo", "seed": seed, "profile": profile.name, "pairs": len(pairs), "jsd_weight": jsd,
             "dtype": profile.backbone.dtype}  # fmt: skip
    save_model(trained, reader, out, facts)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def distill_dpo(
    dataset: Path, examples: Path, bc: Path, verifier: Path, out: Path, profile: StepRouterProfile, seed: int
) -> None:
    """Verifier-guided DPO; writes `out`/policy and, where the profile asks for ablations, `out`/policy-no-jsd.

    BadInput where `out` is of another profile, seed, examples, policy or verifier.
    """
    check_stage(out, f"policy/{DESCRIPTION}", profile, seed, examples=examples, bc=bc, verifier=verifier)
    policy, judge = load_policy(bc), load_verifier(verifier)
    proposer = Remembered(SmallModel(policy, judge, profile.dpo.samples), out / "proposals")
    pairs = make_pairs(chosen_states(examples, profile.dpo.states, seed), proposer, judge, profile.dpo)
    if not pairs:
        raise BadInput(
            f"{verifier}: no proposal scores lower than the teacher's action by dpo.gap = {profile.dpo.gap}: no pairs"
        )
    del policy, judge, proposer  # a GPU holds one model at a time
    (out / "pairs.json").write_text(json.dumps({"pairs": len(pairs)}))
    train_dpo(pairs, bc, out / "policy", profile, profile.dpo.jsd, seed, "dpo + jsd")
    if profile.evaluation.ablations:
        train_dpo(pairs, bc, out / "policy-no-jsd", profile, 0.0, seed, "dpo without jsd")
    shutil.rmtree(out / "proposals", ignore_errors=True)
    shutil.copyfile(out / "policy" / "history.jsonl", out / "history.jsonl")
    if (bc / "history.jsonl").is_file():
        shutil.copyfile(bc / "history.jsonl", out / "bc-history.jsonl")  # the report shows it as well
