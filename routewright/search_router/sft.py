"""Supervised fine-tuning of the decision slots on intent labels (TRL SFTTrainer).

The prompt carries no loss: the completion is the decision. Its loss is the binary cross-entropy of the slots, and the
cross-entropy of the first answer token over the vocabulary and the agent tokens, which makes an unconstrained decode valid.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from routewright.config import Profile, SftSection
from routewright.evaluation.drift import ROUTES
from routewright.language_models.backbone import load_backbone, resolve_dtype
from routewright.language_models.training import History, last_checkpoint
from routewright.pools.pool import BM25Search, Pool, document_text, load_pool
from routewright.pools.search import PoolSearch
from routewright.search_router.examples import Example, read_examples
from routewright.search_router.features import Features, Featurizer, collate
from routewright.search_router.model import SearchRouterModel, Slots, add_lora, merge_lora, new_model
from routewright.search_router.router import save_router
from routewright.search_router.selection import fit_router
from routewright.search_router.training import featurize, parameter_groups
from routewright.search_router.words import buckets, collection_beliefs, document_frequencies


def slot_targets(example: Example, features: Features, names: Sequence[str], smoothing: float) -> list[float]:
    """Targets of the N + K + 1 slots of one example, in [0, 1].

    Agent bits: 1 − s for the intended agents, else s·P(agent) by the labeller, at least s/10: a policy that is certain
    would never try what reinforcement learning is to find out.
    """
    intent = dict(zip(names, example.intent, strict=True))
    agents = [
        1 - smoothing if name in example.intent_agents else max(smoothing * intent[name], smoothing / 10)
        for name in names
    ]
    wanted = set(example.keywords)
    return [*agents, *(float(word in wanted) for word in features.candidates), float(example.interval is not None)]


def slot_loss(slots: Slots, targets: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy summed over a query's slots, averaged over the batch; `targets` like `slots.logits`."""
    losses = F.binary_cross_entropy_with_logits(slots.logits, targets, reduction="none")
    return torch.where(slots.mask, losses, torch.zeros_like(losses)).sum(1).mean()


def pool_beliefs(pool: Pool, queries: Sequence[str]) -> np.ndarray:
    """CORI beliefs of the pool's collections, float32 (BUCKETS, N), scaled to deviation 1 over these queries and agents."""
    texts = []
    for agent in pool.agents:
        fields = agent.search.fields if isinstance(agent.search, BM25Search) else []
        texts.append([document_text(document, fields) for document in pool.documents(agent.name)])
    beliefs = collection_beliefs(texts)
    rows = np.stack([beliefs[list(terms)].mean(axis=0) for query in queries if (terms := buckets(query))])
    deviation = float((rows - rows.mean(axis=1, keepdims=True)).std())
    return beliefs / deviation if deviation > 0 else beliefs


class DecisionSFTTrainer(SFTTrainer):
    """TRL's SFTTrainer with the decision's loss and three learning rates."""

    policy: SearchRouterModel
    settings: SftSection

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            s = self.settings
            groups = parameter_groups(self.policy, s.lr, s.head_lr, s.word_lr, s.scale_lr, self.args.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, eps=1e-8)
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        slots: Slots = model(inputs["batch"], with_answer=True)
        assert slots.answer is not None
        loss = slot_loss(slots, inputs["targets"])
        first = slots.answer.shape[1] - slots.agents + inputs["intended"]
        answer = F.cross_entropy(slots.answer, first)
        with torch.no_grad():
            right = (slots.logits[:, : slots.agents].argmax(1) == inputs["intended"]).float().mean()
            self._metrics["train"]["intent_accuracy"].append(right.item())
            self._metrics["train"]["answer_loss"].append(answer.item())
        return loss + answer


def made_shardable(trainer: DecisionSFTTrainer) -> SearchRouterModel:
    """Ready the trainer's model for FSDP2; returns a copy with the weights whole, for `gather_weights`.

    The frozen trunk stays whole in every process: each remembers the states of its own queries, and so does not ask the
    trunk as often as the others. FSDP shards no scalars.
    """
    model = trainer.policy
    whole = copy.deepcopy(model)
    for name, parameter in list(model.named_parameters(recurse=False)):
        if parameter.ndim == 0:
            setattr(model, name, torch.nn.Parameter(parameter.detach().reshape(1)))
    model.get_input_embeddings = lambda: model.trunk.embed_tokens  # type: ignore[method-assign]
    trainer.accelerator.state.fsdp_plugin.ignored_modules = "trunk"
    return whole


def gather_weights(trainer: DecisionSFTTrainer, whole: SearchRouterModel) -> None:
    """Bring the sharded weights together in the first process's ``whole``; all processes have to call it."""
    gathered = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        shapes = {name: value.shape for name, value in whole.state_dict().items()}
        whole.load_state_dict({name: value.reshape(shapes[name]) for name, value in gathered.items()})


def train_sft(dataset: Path, examples: Path, out: Path, profile: Profile, seed: int) -> None:
    """Fine-tune the profile's backbone on train.jsonl; writes a router folder `out`. Resumes from its last checkpoint."""
    if (out / ROUTES).is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    settings = profile.sft
    pool = load_pool(dataset / "pool.yaml")
    cards = {agent.name: agent.card for agent in pool.agents}
    train = read_examples(examples / "train.jsonl")[: settings.queries]
    texts = [example.query for example in train] + list(cards.values())
    backbone, tokenizer = load_backbone(profile.backbone, texts, seed)
    dtype = resolve_dtype(profile.backbone.dtype)
    torch.manual_seed(seed)
    model = new_model(backbone, profile.backbone.frozen_layers, cards)
    del backbone
    model.idf.copy_(torch.from_numpy(document_frequencies(texts)))
    model.beliefs.copy_(torch.from_numpy(pool_beliefs(pool, [example.query for example in train])))
    featurizer = Featurizer(tokenizer, model.idf.numpy(), model.beliefs.numpy(), cards)
    model.trunk.to(dtype)
    model.remember_trunk = True
    model.read_cards(featurizer.card_tokens())
    if settings.lora:
        add_lora(model, settings.lora)
    features = featurize(featurizer, train)
    targets = [slot_targets(e, f, pool.names, settings.smoothing) for e, f in zip(train, features, strict=True)]
    intended = [pool.names.index(example.intent_agents[0]) for example in train]

    def collator(rows: list[dict[str, Any]]) -> dict[str, Any]:
        index = [row["row"] for row in rows]
        batch = collate([features[i] for i in index], tokenizer.pad_token_id)
        width = batch.keyword_mask.shape[1]
        matrix = torch.zeros(len(index), len(pool.names) + width + 1)
        for line, i in enumerate(index):
            values = targets[i]
            matrix[line, : len(values) - 1] = torch.tensor(values[:-1])
            matrix[line, -1] = values[-1]
        return {"batch": batch, "targets": matrix, "intended": torch.tensor([intended[i] for i in index])}

    arguments = SFTConfig(
        output_dir=str(out / "checkpoints"),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.01,
        max_grad_norm=1.0,
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
        completion_only_loss=True,
        max_length=None,  # the featurizer cuts queries
        dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_pin_memory=False,
    )
    rows = Dataset.from_dict(
        {
            "row": list(range(len(train))),
            "input_ids": [f.tokens for f in features],
            "labels": [[-100] for _ in features],
        }
    )
    history = History(out, "sft", "loss")
    trainer = DecisionSFTTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[history],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.policy = model
    trainer.settings = settings
    whole = made_shardable(trainer) if trainer.is_fsdp_enabled else model
    trainer.train(resume_from_checkpoint=last_checkpoint(out / "checkpoints"))
    if trainer.is_fsdp_enabled:
        gather_weights(trainer, whole)
    if not trainer.is_world_process_zero():  # on several nodes the first one writes
        return
    merge_lora(whole)
    save_router(
        whole, tokenizer, out, pool, {"stage": "sft", "seed": seed, "profile": profile.name, "queries": len(train)}
    )
    fit_router(out, read_examples(examples / "dev.jsonl"), pool, PoolSearch(pool, out / "search-cache"))
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    shutil.rmtree(out / "search-cache", ignore_errors=True)
