"""Generation on vLLM, where it is installed on a node with several GPUs: agents learn on the first, vLLM answers on another.

Tried with a stand-in for vLLM's classes only: it has never run on a real one.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from routewright.config import BackboneSection
from routewright.ensemble_router.agents import Base, Samples, activate, completion_log_probs, save_adapters
from routewright.ensemble_router.profile import AgentsSection

_NUMBERS = itertools.count(1)
"""vLLM keeps an adapter by its number: one that has learnt since needs a new one."""


def vllm_engine(backbone: BackboneSection, agents: AgentsSection, number: int) -> Any | None:
    """vLLM with a base model and room for its agents' adapters, on a GPU after the first; None without vLLM or such a GPU.

    ``number``: which of the profile's base models it is; they take the GPUs in turn. None too for one that is not as it was
    published: from a config, from a wheel, or with layers left out.
    """
    gpus = torch.cuda.device_count()
    published = backbone.source in ("hub", "path") and not backbone.layers
    if not published or gpus < 2 or importlib.util.find_spec("vllm") is None:
        return None
    from vllm import LLM

    torch.cuda.init()  # before the variable below, which is for the engine's own process
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else [str(gpu) for gpu in range(gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[1 + number % (gpus - 1)]
    try:
        return LLM(
            model=backbone.name, revision=backbone.revision, dtype=backbone.dtype, enable_lora=True, max_loras=agents.count,
            max_lora_rank=max(8, agents.lora.r),
        )  # fmt: skip
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def generate_on_vllm(
    base: Base,
    prompts: Sequence[Sequence[int]],
    agents: Sequence[str],
    *,
    samples: int,
    max_new_tokens: int,
    generator: torch.Generator,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Samples:
    """What `agents.generate` gives, sampled by the base's engine.

    Log-probabilities are computed anew by the agents' own model, as vLLM's are of other kernels; the entropy is estimated by
    the mean of −log p over the sampled tokens. Every request has a seed from the caller's generator.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    seeds = torch.randint(2**31, (len(prompts),), generator=generator).tolist()
    settings = [
        SamplingParams(
            n=samples, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_new_tokens,
            stop_token_ids=base.ends,
        )
        for seed in seeds
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        save_adapters(base.model, Path(folder))
        numbers = {name: next(_NUMBERS) for name in sorted(set(agents))}
        requests = [LoRARequest(f"{name}-{numbers[name]}", numbers[name], str(Path(folder) / name)) for name in agents]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found = base.engine.generate(asked, settings, lora_request=requests, use_tqdm=False)
    drawn = [list(one.token_ids) for answer in found for one in answer.outputs]
    tokens = torch.full((len(drawn), max(map(len, drawn))), base.pad)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, one in enumerate(drawn):
        tokens[row, : len(one)], mask[row, : len(one)] = torch.tensor(one), True
    log_p = torch.zeros(tokens.shape)
    for name in sorted(set(agents)):
        own = [place for place, agent in enumerate(agents) if agent == name]
        rows = [place * samples + sample for place in own for sample in range(samples)]
        activate(base.model, name)
        with torch.no_grad():
            known = completion_log_probs(
                base.model, [prompts[place] for place in own], tokens[rows], mask[rows], base.pad, temperature
            )
        log_p[rows] = known.float().cpu()
    return Samples(tokens, mask, log_p, -log_p.sum(dim=1) / mask.sum(dim=1))
