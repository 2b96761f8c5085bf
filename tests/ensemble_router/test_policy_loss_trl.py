"""Our agents' loss and its gradient are TRL's GRPOTrainer's, on the same model, tokens and advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is in the train extra")

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from routewright.config import BackboneSection
from routewright.ensemble_router.agents import completion_log_probs, left_padded
from routewright.ensemble_router.policy_loss import policy_loss
from routewright.ensemble_router.warm_up import character_tokenizer
from routewright.language_models.backbone import from_config

PROMPTS = [[3, 4, 5], [6, 7]]
ROWS, LENGTH, LONGEST = 6, 5, 8


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    folder = tmp_path_factory.mktemp("trl")
    tokenizer = character_tokenizer(["abcdefghij"], [])
    config = BackboneSection(source="architecture", name="qwen3", frozen_layers=0, hidden_size=32, num_layers=2)
    from_config(config, tokenizer, seed=0).save_pretrained(folder / "base")
    arguments = GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[], num_generations=3,
        per_device_train_batch_size=ROWS, max_completion_length=LONGEST, beta=0.05, use_bias_correction_kl=False,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "base"), processing_class=tokenizer, args=arguments,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 6),
    )  # fmt: skip


def batch(model: Any) -> dict[str, torch.Tensor]:
    """Three samples of two prompts, of different lengths; the old policy and the reference differ from the model's."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(LENGTH) < torch.tensor([5, 2, 4, 1, 3, 5])[:, None]
    completions = torch.where(mask, torch.randint(3, 12, (ROWS, LENGTH), generator=g), 0)
    with torch.no_grad():
        log_p = completion_log_probs(model, PROMPTS, completions, mask, pad=0)
    noise = [torch.randn(ROWS, LENGTH, generator=g) * 0.3 for _ in range(2)]
    return {
        "completions": completions, "mask": mask, "old": torch.where(mask, log_p + noise[0], 0.0),
        "reference": torch.where(mask, log_p + noise[1], 0.0), "advantages": torch.randn(ROWS, generator=g),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("loss_type", "level", "ratio", "normaliser", "tokens", "clip"),
    [
        ("dapo", "token", "token", "tokens", 50, (0.2, 0.28)),  # DAPO alone; 50: of all accumulated micro-batches
        ("grpo", "sequence", "sequence", "sequences", 0, (3e-4, 4e-4)),  # GSPO alone
        ("dapo", "sequence", "sequence", "tokens", 50, (0.2, 0.2)),  # the paper's mix
        ("dapo", "sequence", "sequence", "tokens", 20, (0.02, 0.05)),  # the same, with clips that bite
        ("grpo", "token", "token", "sequences", 0, (0.2, 0.28)),
        ("bnpo", "token", "token", "tokens", 20, (0.2, 0.28)),  # the micro-batch's own 20 tokens
        ("dr_grpo", "token", "token", "tokens", ROWS * LONGEST, (0.2, 0.28)),
    ],
)
def test_loss_and_gradient_are_trl_s(
    trainer: GRPOTrainer, loss_type: str, level: str, ratio: Any, normaliser: Any, tokens: int, clip: tuple[float, float]
) -> None:
    ours = AutoModelForCausalLM.from_pretrained(Path(trainer.model.config._name_or_path))
    some = batch(ours)
    prompt, prompt_mask = left_padded([row for row in PROMPTS for _ in range(3)], 0)
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    trainer.epsilon_low, trainer.epsilon_high = clip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.model.zero_grad()
    theirs = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": prompt, "prompt_mask": prompt_mask.long(), "completion_ids": some["completions"],
            "completion_mask": some["mask"].long(), "advantages": some["advantages"],
            "old_per_token_logps": some["old"], "ref_per_token_logps": some["reference"],
            "num_items_in_batch": torch.tensor(float(tokens)),
        },
    )  # fmt: skip
    theirs.backward()
    log_p = completion_log_probs(ours, PROMPTS, some["completions"], some["mask"], pad=0)
    loss = policy_loss(
        log_p, some["old"], some["reference"], some["advantages"], some["mask"], tokens=tokens, sequences=ROWS,
        ratio=ratio, normaliser=normaliser, clip_low=clip[0], clip_high=clip[1], beta=0.05,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    found = dict(ours.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(found[name].grad, parameter.grad, atol=1e-5), name
    assert max(float(p.grad.abs().max()) for p in ours.parameters()) > 1e-3
