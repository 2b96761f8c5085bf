"""N agents as LoRA adapters on one base model, held once, or on several; generation for agents of one base in one batch.

A prompt's keys and values are computed once and shared by its G samples, in generation and in the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from routewright.config import LoraSection
from routewright.errors import BadInput

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"]
"""Linear layers that get an adapter, those of them that an architecture has (Phi's are fused: the last two)."""
GOING = 0.75
"""A batch is made smaller once no more than this share of its rows goes on."""


@dataclass(frozen=True)
class Base:
    """A base model with the LoRA adapters of the agents that stand on it, ``names``, and its tokenizer.

    ``engine``: vLLM's (`vllm_generation`), where that samples the answers that the agents learn from.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    names: list[str]
    engine: Any = None

    @property
    def pad(self) -> int:
        """The padding token."""
        return int(self.tokenizer.pad_token_id)

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's and the generation config's (a turn of Phi's ends with another one)."""
        told = self.model.generation_config.eos_token_id
        more = [] if told is None else [told] if isinstance(told, int) else told
        return sorted({int(self.tokenizer.eos_token_id), *more})


def check_names(names: Sequence[str]) -> None:
    """BadInput for fewer than two agents, names that are not different, or names that a module or folder cannot have."""
    if len(names) < 2:
        raise BadInput(f"agents: expected at least two to route between, found {len(names)}")
    for name in names:
        if not name or "." in name or "/" in name or names.count(name) > 1:
            raise BadInput(f"agents: expected different names without dots and slashes, found {name!r}")


def add_adapters(base: Any, names: Sequence[str], lora: LoraSection, seed: int) -> Any:
    """The base (frozen, in place) with a fresh LoRA adapter for each agent: B is 0, so all begin as the base."""
    from peft import LoraConfig, get_peft_model

    present = {name.rpartition(".")[2] for name, _ in base.named_modules()}
    targets = [name for name in TARGETS if name in present]
    config = LoraConfig(
        task_type="CAUSAL_LM", r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets
    )
    model = None
    for number, name in enumerate(names):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + number)
            if model is None:
                model = get_peft_model(base, config, adapter_name=name)
            else:
                model.add_adapter(name, config)
    assert model is not None
    activate(model, names[0])
    return model


def save_adapters(model: Any, folder: Path) -> None:
    """One folder an agent, as PEFT writes it (safetensors)."""
    for name in model.peft_config:
        model.save_pretrained(folder, selected_adapters=[name])


def load_adapters(base: Any, folder: Path, names: Sequence[str]) -> Any:
    """The base with saved adapters; BadInput names an adapter that is missing or does not fit the base."""
    from peft import PeftModel

    model = None
    for name in names:
        place = folder / name
        if not (place / "adapter_model.safetensors").is_file():
            raise BadInput(f"adapter {place}: expected a folder with adapter_config.json and adapter_model.safetensors")
        try:
            if model is None:
                model = PeftModel.from_pretrained(base, str(place), adapter_name=name, is_trainable=True)
            else:
                model.load_adapter(str(place), adapter_name=name, is_trainable=True)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            told = " ".join(str(error).split())[:300]
            raise BadInput(f"adapter {place}: it does not fit the base model ({told})") from None
    assert model is not None
    activate(model, names[0])
    return model


def adapter_parameters(model: Any, name: str) -> list[torch.nn.Parameter]:
    """One agent's own parameters: each agent needs its own optimiser, or momentum moves the idle ones."""
    return [value for key, value in model.named_parameters() if f".{name}." in key]


def activate(model: Any, name: str) -> None:
    """Make this agent the one that answers and learns."""
    model.set_adapter(name)
    for parameter in adapter_parameters(model, name):
        parameter.requires_grad_(True)


@dataclass(frozen=True)
class Samples:
    """Completions of P prompts, G each, row p·G + g.

    ``tokens`` (P·G, T) and ``mask`` (P·G, T), true up to the end of sequence, which counts; ``log_p`` (P·G, T) of each
    token under the untruncated policy at the sampling temperature, ``entropy`` (P·G,) mean nats a token.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    log_p: torch.Tensor
    entropy: torch.Tensor


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and boolean mask (P, L), prompts ending in the last column. BadInput for an empty prompt."""
    if any(len(prompt) == 0 for prompt in prompts):
        raise BadInput("prompt: expected at least one token, found an empty prompt")
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), width), pad)
    mask = torch.zeros((len(prompts), width), dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = True
    return tokens, mask


def _read(
    model: Any, prompts: torch.Tensor, mask: torch.Tensor, samples: int, extra: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """The prompts' cache repeated for G samples, the logits after the last token (P·G, V), prompt mask (P·G, L)."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    out = model(
        input_ids=prompts, attention_mask=mask.long(), position_ids=positions, use_cache=True, logits_to_keep=1, **extra
    )
    cache = out.past_key_values
    cache.batch_repeat_interleave(samples)
    return cache, out.logits[:, -1].repeat_interleave(samples, dim=0), mask.repeat_interleave(samples, dim=0)


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    agents: Sequence[str],
    *,
    samples: int,
    max_new_tokens: int,
    pad: int,
    ends: Sequence[int],
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Samples:
    """``samples`` completions of each prompt by the agent named beside it, in one batch.

    Several agents in one batch are computed with PEFT's mixed batches (rows of one agent should stand together). One of
    ``ends`` ends a completion and belongs to it. Temperature 0 takes the likeliest token. What the caller's generator draws
    decides all, so a run can be resumed.
    """
    if len(prompts) != len(agents):
        raise ValueError(f"expected one agent a prompt, found {len(agents)} for {len(prompts)}")
    was_training = model.training
    model.eval()
    names = sorted(set(agents))
    mixed = len(names) > 1
    if not mixed:
        activate(model, names[0])
    tokens, mask = left_padded(prompts, pad)
    device = next(model.parameters()).device
    extra: dict[str, Any] = {"adapter_names": list(agents)} if mixed else {}
    cache, logits, seen = _read(model, tokens.to(device), mask.to(device), samples, extra)
    if mixed:
        extra = {"adapter_names": [agent for agent in agents for _ in range(samples)]}
    rows = len(prompts) * samples
    place = seen.sum(dim=1)
    live = torch.arange(rows, device=device)  # rows that are still computed
    drawn = torch.full((rows, max_new_tokens), pad, device=device)
    answered = torch.zeros((rows, max_new_tokens), dtype=torch.bool, device=device)
    logs, nats = (torch.zeros((rows, max_new_tokens), device=device) for _ in range(2))
    last = torch.tensor(list(ends), device=device)
    alive = torch.ones(rows, dtype=torch.bool, device=device)  # of the live rows, those without an end yet
    for step in range(max_new_tokens):
        log_p = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
        token = _draw(log_p, temperature, top_k, top_p, generator)
        going = live[alive]
        drawn[going, step], answered[going, step] = token[alive], True
        logs[going, step] = log_p.gather(1, token[:, None])[alive, 0]
        nats[going, step] = -(log_p.exp() * log_p).sum(dim=-1)[alive]
        token = torch.where(alive, token, torch.full_like(token, pad))
        before, alive = alive, alive & ~torch.isin(token, last)
        if not alive.any() or step == max_new_tokens - 1:
            break
        seen = torch.cat([seen, before[:, None]], dim=1)
        if alive.sum() <= GOING * len(alive):  # answers differ in length: finished rows are not computed any longer
            left = alive.nonzero()[:, 0]
            cache.batch_select_indices(left)
            live, token, seen, place, alive = live[left], token[left], seen[left], place[left], alive[left]
            if mixed:
                extra = {"adapter_names": [extra["adapter_names"][row] for row in left.tolist()]}
        out = model(
            input_ids=token[:, None], attention_mask=seen.long(), position_ids=place[:, None], cache=cache,
            use_cache=True, **extra,
        )  # fmt: skip
        logits, place = out.logits[:, -1], place + 1
    model.train(was_training)
    made = step + 1
    entropy = nats.sum(dim=1) / answered.sum(dim=1)
    return Samples(drawn[:, :made].cpu(), answered[:, :made].cpu(), logs[:, :made].cpu(), entropy.cpu())


def _draw(log_p: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return log_p.argmax(dim=-1)
    p = log_p.exp()
    if 0 < top_k < p.shape[-1]:
        least = p.topk(top_k, dim=-1).values[:, -1:]
        p = torch.where(p >= least, p, torch.zeros_like(p))
    if top_p < 1.0:
        ordered, index = (p / p.sum(dim=-1, keepdim=True)).sort(dim=-1, descending=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p  # the one that crosses top_p stays
        p = torch.zeros_like(p).scatter(1, index, ordered.masked_fill(outside, 0.0))
    return torch.multinomial(p.cpu(), 1, generator=generator)[:, 0].to(log_p.device)


def completion_log_probs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: torch.Tensor,
    mask: torch.Tensor,
    pad: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """log π of each completion token under the active adapter, with gradient, (P·G, T); 0 where masked.

    ``completions`` and ``mask`` (P·G, T), G rows a prompt; the prompts are read once each, their cache carries gradients.
    """
    tokens, prompt_mask = left_padded(prompts, pad)
    device = next(model.parameters()).device
    samples = len(completions) // len(prompts)
    completions, mask = completions.to(device), mask.to(device)
    cache, first, seen = _read(model, tokens.to(device), prompt_mask.to(device), samples, {})
    logits = first[:, None]
    if completions.shape[1] > 1:
        positions = seen.sum(dim=1, keepdim=True) + torch.arange(completions.shape[1] - 1, device=device)
        rest = model(
            input_ids=completions[:, :-1], attention_mask=torch.cat([seen, mask[:, :-1]], dim=1).long(),
            position_ids=positions, cache=cache, use_cache=True,
        ).logits  # fmt: skip
        logits = torch.cat([logits, rest], dim=1)
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1).gather(2, completions[:, :, None])[:, :, 0]
    return torch.where(mask, log_p, torch.zeros_like(log_p))
