"""The start: a base model, pretrained on the families where it has no weights yet, and adapters that differ from each other.

Without a difference at the start the agents' gains are noise and the router has nothing to learn.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from routewright.config import BackboneSection
from routewright.ensemble_router.agents import activate, adapter_parameters, add_adapters
from routewright.ensemble_router.profile import EnsembleProfile, SupervisedSection
from routewright.ensemble_router.prompts import ANSWER, encode_answer, encode_prompt
from routewright.ensemble_router.tasks import Task
from routewright.errors import BadInput
from routewright.language_models.backbone import from_config, load_backbone, resolve_dtype


def character_tokenizer(texts: Sequence[str], words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Characters, `words` and words in more than 0.4 % of the texts: spelling tasks need letters that stand alone."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    counted = Counter(word for text in texts for word in set(re.findall(r" ?[A-Za-z_]{3,}", text)))
    frequent = {word for word, count in counted.items() if count > len(texts) * 0.004} | set(words)
    whole = sorted(frequent, key=lambda word: (-len(word), word))
    characters = sorted({character for text in texts for character in text} - set(whole))
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", "<unk>", *whole, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join([*(re.escape(word) + r"(?![A-Za-z_])" for word in whole), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def base_model(
    profile: EnsembleProfile, tasks: Sequence[Task], folder: Path, seed: int, number: int = 0
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The profile's base model of that number and its tokenizer, frozen and in evaluation mode.

    ``folder``: where one from a config is kept once its pretraining is done.
    """
    config = profile.backbones[number]
    if config.source == "architecture":
        if not (folder / "model.safetensors").is_file():
            made, own = _from_config(config, tasks, seed)
            if profile.pretrain:
                pretrain(made, own, tasks, profile.pretrain, seed)
            partial = folder.with_name(f"{folder.name}.partial")
            for begun in (partial, folder):
                shutil.rmtree(begun, ignore_errors=True)
            own.save_pretrained(partial)
            made.save_pretrained(partial)
            partial.rename(folder)
        # read back the first time too: in memory it has another dtype and place than for a run that resumes
        config = BackboneSection(source="path", name=str(folder), frozen_layers=0, dtype=config.dtype)
    model, tokenizer = load_backbone(config, [], seed, resolve_dtype(config.dtype))
    if torch.cuda.is_available():
        model = model.cuda()
    return model.eval().requires_grad_(False), tokenizer


def _from_config(config: BackboneSection, tasks: Sequence[Task], seed: int) -> tuple[Any, PreTrainedTokenizerFast]:
    texts = [f"{task.prompt}{ANSWER}{task.answer or ''}" for task in tasks]
    tokenizer = character_tokenizer(texts, sorted({task.domain for task in tasks}))
    return from_config(config, tokenizer, seed), tokenizer


def answered(tasks: Sequence[Task]) -> list[Task]:
    """Tasks with an answer to imitate; BadInput where there is none."""
    kept = [task for task in tasks if task.answer and task.check != "code"]
    if not kept:
        raise BadInput("tasks: expected at least one with an answer to train on, found none")
    return kept


def pretrain(
    model: Any, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], settings: SupervisedSection, seed: int
) -> float:
    """Train all weights on the tasks' answers, in place; returns the last loss, nats an answer token."""
    parameters = list(model.parameters())

    def draw(generator: np.random.Generator) -> np.ndarray:
        return generator.integers(len(kept), size=settings.batch_size)

    kept = answered(tasks)
    return _train(model, tokenizer, kept, parameters, settings, draw, seed, "pretraining the base")


def warm_adapters(
    base: Any,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    profile: EnsembleProfile,
    seed: int,
    names: Sequence[str] | None = None,
) -> Any:
    """The base with one adapter for each agent of ``names`` (all of the profile's if not given).

    Each is warmed on its own mixture of domains; without `warm_up` all begin as the base.
    """
    everybody = profile.agents.names
    model = add_adapters(base, names or everybody, profile.agents.lora, seed)
    settings = profile.warm_up
    if settings is None:
        return model.eval()
    kept = answered(tasks)
    places: dict[str, list[int]] = defaultdict(list)
    for place, task in enumerate(kept):
        places[task.domain].append(place)
    domains = sorted(places)
    for number, name in enumerate(everybody):
        if name not in model.peft_config:
            continue
        activate(model, name)
        own = np.array(places[domains[number % len(domains)]])

        def draw(generator: np.random.Generator, own: np.ndarray = own) -> np.ndarray:
            preferred = generator.random(settings.batch_size) < settings.share
            return np.where(
                preferred,
                own[generator.integers(len(own), size=settings.batch_size)],
                generator.integers(len(kept), size=settings.batch_size),
            )

        _train(
            model, tokenizer, kept, adapter_parameters(model, name), settings, draw, seed * 1_000_003 + number,
            f"warming {name}",
        )  # fmt: skip
    return model.eval()


def warm_generalist(
    base: Any, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], profile: EnsembleProfile, seed: int
) -> Any:
    """The base with the first agent's adapter alone, warmed on all domains for as many steps as all agents together."""
    assert profile.warm_up is not None
    name, kept = profile.agents.names[0], answered(tasks)
    model = add_adapters(base, [name], profile.agents.lora, seed)
    settings = profile.warm_up.model_copy(update={"steps": profile.warm_up.steps * profile.agents.count})

    def draw(generator: np.random.Generator) -> np.ndarray:
        return generator.integers(len(kept), size=settings.batch_size)

    activate(model, name)
    _train(
        model, tokenizer, kept, adapter_parameters(model, name), settings, draw, seed * 1_000_003, "warming one for all"
    )
    return model.eval()


def _train(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    parameters: list[torch.nn.Parameter],
    settings: SupervisedSection,
    draw: Callable[[np.random.Generator], np.ndarray],
    seed: int,
    title: str,
) -> float:
    """AdamW on answer-only cross-entropy; the rate rises over 50 steps and falls to a tenth by the last."""
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    prompts = [encode_prompt(tokenizer, task.prompt) for task in tasks]
    answers = [encode_answer(tokenizer, task.answer or "") for task in tasks]
    optimiser = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    loss = torch.zeros(())
    for step in track(range(settings.steps), description=title):
        rows = draw(generator)
        width = max(len(prompts[row]) + len(answers[row]) for row in rows)
        tokens = torch.full((len(rows), width), int(tokenizer.pad_token_id))
        labels = torch.full((len(rows), width), -100)
        for place, row in enumerate(rows):
            text = prompts[row] + answers[row]
            tokens[place, : len(text)] = torch.tensor(text)
            labels[place, len(prompts[row]) : len(text)] = torch.tensor(answers[row])
        for group in optimiser.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / 50) * max(0.1, 1 - step / settings.steps)
        # right padding: causal attention keeps it out of every answer
        hidden = model.get_decoder()(input_ids=tokens.to(device), use_cache=False).last_hidden_state[:, :-1]
        wanted = labels[:, 1:].to(device)
        counted = wanted != -100
        loss = functional.cross_entropy(model.get_output_embeddings()(hidden[counted]).float(), wanted[counted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
    model.eval()
    return float(loss.detach())
