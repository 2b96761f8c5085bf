"""REINFORCE++ on outcomes, from the SFT checkpoint (TRL GRPOTrainer for loop, buffers and logging; our estimator).

An action is the vector of a query's slot bits; a "token" is one bit, and log π of the action is the sum over its bits.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional as F
from torch.utils.data import Sampler
from transformers import GenerationConfig, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from routewright.config import Profile, RlSection
from routewright.errors import BadInput
from routewright.evaluation.drift import ROUTES
from routewright.language_models import reinforce
from routewright.language_models.backbone import resolve_dtype
from routewright.language_models.chat import chat_client_from_environment
from routewright.language_models.training import History, last_checkpoint
from routewright.pools.pool import Pool, load_pool
from routewright.pools.search import PoolSearch
from routewright.search_router.examples import Example, read_examples
from routewright.search_router.features import Features, Featurizer, collate
from routewright.search_router.judges import Judge, LLMJudge, OfflineJudge, QrelsJudge, pool_documents
from routewright.search_router.model import SearchRouterModel, Slots, add_lora, merge_lora
from routewright.search_router.reward import Action, HierarchicalReward, usual_outcomes
from routewright.search_router.router import load_model, save_router
from routewright.search_router.selection import fit_router
from routewright.search_router.training import featurize, parameter_groups


def action_of(bits: Sequence[bool], order: Sequence[int], features: Features, names: Sequence[str]) -> Action:
    """The decision that a row of slot bits makes; `order` ranks the agents by probability, best first."""
    words = bits[len(names) : len(names) + len(features.candidates)]
    return Action(
        agents=tuple(names[i] for i in order if bits[i]),
        keywords=tuple(word for word, bit in zip(features.candidates, words, strict=True) if bit),
        interval=features.interval if bits[-1] else None,
    )


def log_probability(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """log π of each bit, log σ(±logit); same shape as `logits`."""
    return F.logsigmoid(torch.where(bits, logits, -logits))


def bernoulli_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of each bit in nats."""
    return F.binary_cross_entropy_with_logits(logits, torch.sigmoid(logits), reduction="none")


@torch.no_grad()
def slot_logits(
    model: SearchRouterModel, features: Sequence[Features], pad_token: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Logits of every slot of each query, float32 (N + K + 1,), without padding; `dtype` as the training computes in."""
    device = next(model.parameters()).device
    count = len(model.config.agents)
    rows = []
    for start in range(0, len(features), 64):
        part = features[start : start + 64]
        with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
            logits = model(collate(part, pad_token).to(device)).logits.float()
        rows += [torch.cat([row[: count + len(f.candidates)], row[-1:]]) for row, f in zip(logits, part, strict=True)]
    return rows


def unused_reward(prompts: list[str], **_: Any) -> list[float | None]:
    """TRL asks for a reward of texts; ours needs the whole action and is computed with the samples."""
    return [None] * len(prompts)


class _ShuffledEpochs(Sampler[int]):
    """Row numbers in a new seeded order each epoch, `total` of them; a resumed run sees the same sequence."""

    def __init__(self, rows: int, total: int, seed: int) -> None:
        self.rows, self.total, self.seed = rows, total, seed

    def __iter__(self) -> Any:
        generator = np.random.default_rng(self.seed)
        epochs = -(-self.total // self.rows)
        return iter(np.concatenate([generator.permutation(self.rows) for _ in range(epochs)])[: self.total].tolist())

    def __len__(self) -> int:
        return self.total


class ReinforcePlusPlusTrainer(GRPOTrainer):
    """GRPOTrainer with REINFORCE++ (both variants): its own sampling of slot bits, advantages and loss."""

    policy: SearchRouterModel
    settings: RlSection
    examples: list[Example]
    features: list[Features]
    reward: HierarchicalReward
    reference: list[torch.Tensor]  # the SFT policy's slot logits of each example, without padding
    names: list[str]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            s = self.settings
            groups = parameter_groups(self.policy, s.lr, s.head_lr, s.word_lr, s.scale_lr, weight_decay=0.0)
            self.optimizer = torch.optim.AdamW(groups, eps=1e-8)
        return self.optimizer

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        return _ShuffledEpochs(len(self.examples), self.args.max_steps * self.settings.batch_size, self.args.seed)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample `samples` actions a query, search, judge; returns what `_compute_loss` needs, rows = queries × samples."""
        s = self.settings
        index = [row["row"] for row in inputs]
        batch = collate([self.features[i] for i in index], self._tokenizer.pad_token_id).to(self.accelerator.device)
        with self.accelerator.autocast():
            slots: Slots = self.policy(batch)
        self._slots = slots  # the update follows at once, with the same weights: its pass is this one
        current = slots.logits.detach().float() / s.temperature
        width = current.shape[1]
        logits = current.repeat_interleave(s.samples, dim=0)
        mask = slots.mask.repeat_interleave(s.samples, dim=0)
        # a generator of its own: a resumed run samples what an undisturbed one would have
        generator = torch.Generator().manual_seed(1_000_003 * self.args.seed + self.state.global_step)
        uniform = torch.rand(logits.shape, generator=generator).to(logits.device)
        bits = (uniform < torch.sigmoid(logits)) & mask
        reference = torch.zeros(len(index), width, device=logits.device)
        for row, i in enumerate(index):
            reference[row, : len(self.reference[i]) - 1] = self.reference[i][:-1]
            reference[row, -1] = self.reference[i][-1]
        reference = reference.repeat_interleave(s.samples, dim=0) / s.temperature
        orders = torch.argsort(-current[:, : slots.agents], dim=1, stable=True).tolist()
        actions = [
            (self.examples[i], action_of(row, orders[q], self.features[i], self.names))
            for q, i in enumerate(index)
            for row in bits[q * s.samples : (q + 1) * s.samples].tolist()
        ]
        reward = torch.tensor(self.reward(actions), device=logits.device)
        log_old, log_ref = log_probability(logits, bits), log_probability(reference, bits)
        groups = torch.arange(len(index), device=logits.device).repeat_interleave(s.samples)
        kl = reinforce.k1(log_old, log_ref)
        if s.variant == "reinforce++-baseline":
            centred = reinforce.subtract_group_mean(reward, groups)
            rewards = reinforce.token_rewards(centred, kl, mask, beta=0.0)
        else:
            rewards = reinforce.token_rewards(reward, kl, mask, s.beta)
        advantages = reinforce.whiten(reinforce.returns(rewards, mask), mask)
        sizes = torch.tensor([float(len(action.agents)) for _, action in actions])
        self._metrics["train"]["reward"].append(reward.mean().item())
        self._metrics["train"]["agents_per_query"].append(sizes.mean().item())
        return {
            "query": groups,
            "bits": bits, "mask": mask, "log_old": log_old, "log_ref": log_ref, "advantages": advantages,
            "tokens": mask.sum(),
        }  # fmt: skip

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        s = self.settings
        mask = inputs["mask"]
        logits = self._slots.logits.float()[inputs["query"]] / s.temperature  # a query's samples share one pass
        log_p = log_probability(logits, inputs["bits"])
        tokens = float(inputs["tokens"])
        loss = reinforce.clipped_loss(log_p, inputs["log_old"], inputs["advantages"], mask, s.clip, tokens)
        if s.variant == "reinforce++-baseline" and s.beta > 0:
            penalty = reinforce.k2(log_p, inputs["log_ref"])
            loss = loss + s.beta * torch.where(mask, penalty, torch.zeros_like(penalty)).sum() / tokens
        with torch.no_grad():
            rows = mask.shape[0]
            kl = torch.where(mask, reinforce.k3(log_p, inputs["log_ref"]), torch.zeros_like(log_p)).sum() / rows
            entropy = torch.where(mask, bernoulli_entropy(logits), torch.zeros_like(log_p)).sum() / rows
            self._metrics["train"]["kl"].append(kl.item())
            self._metrics["train"]["entropy"].append(entropy.item())
        return loss


def make_judge(name: str, pool: Pool, cache: Path) -> Judge:
    """The judge of R_con that a profile names; BadInput where the LLM judge has no URL."""
    if name == "qrels":
        return QrelsJudge()
    if name == "offline":
        return OfflineJudge(pool)
    client = chat_client_from_environment(cache, cache.parent / "checkpoints" / "llm-spent")
    if client is None:
        raise BadInput(
            "rl.judge is llm: expected ROUTEWRIGHT_LLM_BASE_URL and ROUTEWRIGHT_LLM_MODEL in the environment"
        )
    return LLMJudge(client, pool_documents(pool))


def train_rl(dataset: Path, examples: Path, sft: Path, out: Path, profile: Profile, seed: int) -> None:
    """Train the SFT policy on outcomes; writes a router folder `out`. Resumes from its last checkpoint.

    With `rl.also_offline_judge` a second policy, rewarded by the offline judge, goes into `out`/judge.
    """
    train_policy(dataset, examples, sft, out, profile, seed, profile.rl.judge)
    if profile.rl.also_offline_judge:
        train_policy(dataset, examples, sft, out / "judge", profile, seed, "offline")


def train_policy(dataset: Path, examples: Path, sft: Path, out: Path, profile: Profile, seed: int, judge: str) -> None:
    """One policy under one judge (see `train_rl`)."""
    if (out / ROUTES).is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    s = profile.rl
    pool = load_pool(dataset / "pool.yaml")
    train = read_examples(examples / "train.jsonl")[: s.outcomes]
    model, tokenizer, _ = load_model(sft)
    featurizer = Featurizer(tokenizer, model.idf.numpy(), model.beliefs.numpy(), model.cards)
    if pool.names != model.config.agents:
        raise BadInput(f"model folder {sft} was trained for other agents than {dataset / 'pool.yaml'} lists")
    if s.lora:
        torch.manual_seed(seed)  # adapters start at random, and a resumed run must start at the same
        add_lora(model, s.lora)
    model.generation_config = GenerationConfig()  # TRL wants one; nothing is generated token by token
    dtype = resolve_dtype(profile.backbone.dtype)
    features = featurize(featurizer, train)
    model.remember_trunk = True
    reference = slot_logits(model, features, tokenizer.pad_token_id, dtype)
    arguments = GRPOConfig(
        output_dir=str(out / "checkpoints"),
        max_steps=s.updates(len(train)),
        per_device_train_batch_size=s.batch_size,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=s.batch_size,  # nominal: rows are queries here, and samples are drawn in the trainer
        beta=0.0,  # the KL is in our own reward or loss
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        max_grad_norm=1.0,
        temperature=s.temperature,
        logging_steps=1,
        save_steps=0.25,
        save_total_limit=1,
        seed=seed,
        bf16=dtype == torch.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    search = PoolSearch(pool, out / "search-cache")
    trainer = ReinforcePlusPlusTrainer(
        model=model,
        reward_funcs=unused_reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"row": list(range(len(train))), "prompt": [e.query for e in train]}),
        processing_class=tokenizer,
        callbacks=[History(out, "rl", "reward")],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.policy = model
    trainer.settings, trainer.examples, trainer.names = s, train, pool.names
    trainer.features, trainer.reference = features, reference
    usual = usual_outcomes(train, pool.names)
    trainer.reward = HierarchicalReward(pool, search, make_judge(judge, pool, out / "judge-cache"), s, usual)
    trainer.train(resume_from_checkpoint=last_checkpoint(out / "checkpoints"))
    merge_lora(model)
    facts = {"stage": "rl", "seed": seed, "profile": profile.name, "outcomes": len(train), "judge": judge}
    save_router(model, tokenizer, out, pool, facts)
    fit_router(out, read_examples(examples / "dev.jsonl"), pool, search)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    shutil.rmtree(out / "search-cache", ignore_errors=True)
