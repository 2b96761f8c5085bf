"""The small model: a causal language model whose action is chosen among listed ones, or written where none are listed.

Listed actions share one pass: the prompt once, then all actions side by side, each seeing the prompt and itself only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LogitsProcessor

from routewright.errors import BadInput
from routewright.language_models import word_match
from routewright.language_models.backbone import resolve_dtype
from routewright.step_router.features import Candidate
from routewright.step_router.names import name_slots
from routewright.step_router.prompts import completion, prompt
from routewright.step_router.situations import Situation

BATCH_TOKENS = 8_192  # of one pass, padding included
NEW_TOKENS = 256  # of an action that is written, where its profile said nothing
DIGITS = 4  # log-probabilities and scores are rounded, so that what else is in a batch cannot tip a tie
DESCRIPTION = "policy.json"


@dataclass(frozen=True)
class Reader:
    """How situations and actions become tokens; ``limit``: prompt tokens that are read.

    ``known``: the words that are read as they are, all others being names (see `names.py`); None reads every word.
    ``new_tokens``: of an action that is written, at most.
    """

    tokenizer: Any
    limit: int
    known: frozenset[str] | None = None
    new_tokens: int = NEW_TOKENS

    def read(self, situation: Situation, actions: Sequence[str], draw: int = 0) -> tuple[list[int], list[list[int]]]:
        """Tokens of the prompt, and of each action with the end-of-sequence token.

        ``draw`` varies the slots of names. Of a prompt that is too long the first and the last half of the limit are kept.
        """
        texts = [prompt(situation), *(completion(action) for action in actions)]
        if self.known is not None:
            texts = name_slots(texts, self.known, draw)
        first, *others = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        if len(first) > self.limit:
            half = self.limit // 2
            first = [*first[:half], *first[len(first) - (self.limit - half) :]]
        return first, [[*tokens, self.tokenizer.eos_token_id] for tokens in others]


@dataclass(frozen=True)
class Packed:
    """Prompts (ending in the same column) with their actions side by side, (B, L).

    ``predictor`` and ``target`` (B, L − P): the column, counted from the last prompt column, that predicts each action
    token, and that token; ``owner`` (B, L − P) the number of the action a column belongs to, −1 for padding.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    allowed: torch.Tensor
    predictor: torch.Tensor
    target: torch.Tensor
    owner: torch.Tensor
    prompt_width: int


def pack(prompts: Sequence[Sequence[int]], actions: Sequence[Sequence[Sequence[int]]], pad: int) -> Packed:
    """Lay out token lists: B prompts and, for each, its actions' tokens."""
    width = max(len(p) for p in prompts)
    tail = max(sum(map(len, several)) for several in actions)
    rows, length = len(prompts), width + tail
    tokens = torch.full((rows, length), pad)
    positions = torch.zeros((rows, length), dtype=torch.long)
    segment = torch.full((rows, length), -1)
    predictor = torch.zeros((rows, tail), dtype=torch.long)
    for row, (text, several) in enumerate(zip(prompts, actions, strict=True)):
        start = width - len(text)
        tokens[row, start:width] = torch.tensor(text)
        positions[row, start:width] = torch.arange(len(text))
        segment[row, start:width] = 0
        column = width
        for number, action in enumerate(several, 1):
            end = column + len(action)
            tokens[row, column:end] = torch.tensor(action)
            positions[row, column:end] = torch.arange(len(text), len(text) + len(action))
            segment[row, column:end] = number
            predictor[row, column - width : end - width] = torch.arange(column - width, end - width)
            predictor[row, column - width] = 0
            column = end
    known, asking = segment[:, None, :], segment[:, :, None]
    causal = torch.ones((length, length), dtype=torch.bool).tril()
    allowed = causal & (known >= 0) & ((known == 0) | (known == asking))
    allowed |= torch.eye(length, dtype=torch.bool)  # padding sees itself, or its softmax would be of nothing
    owner = segment[:, width:] - 1
    return Packed(tokens, positions, allowed[:, None], predictor, tokens[:, width:], owner.clamp(min=-1), width)


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)


def packed_log_probs(model: Any, packed: Packed) -> torch.Tensor:
    """log p of every action token given the prompt and the action so far, (B, L − P); meaningless at padding."""
    device = model.device
    out = model(
        packed.tokens.to(device),
        attention_mask=_additive(packed.allowed.to(device), model.dtype),
        position_ids=packed.positions.to(device),
        logits_to_keep=packed.tokens.shape[1] - packed.prompt_width + 1,
        use_cache=False,
    )
    logits = out.logits.float()
    norm = logits.logsumexp(-1)
    predictor, target = packed.predictor.to(device), packed.target.to(device)
    rows = torch.arange(len(target), device=device)[:, None]
    return logits[rows, predictor, target] - norm[rows, predictor]


@dataclass(frozen=True)
class ActionLogProbs:
    """log p of each action, ``values`` (B, A) with −1e9 where a row has fewer actions; ``tokens`` (B, A) their lengths."""

    values: torch.Tensor
    tokens: torch.Tensor


def action_log_probs(token_log_probs: torch.Tensor, packed: Packed) -> ActionLogProbs:
    """Sums over each action's tokens; `token_log_probs` (B, L − P) from `packed_log_probs`."""
    owner = packed.owner.to(token_log_probs.device)
    shape = (len(owner), int(owner.max()) + 1)
    real = (owner >= 0).to(token_log_probs.dtype)
    index = owner.clamp(min=0)
    zeros = torch.zeros(shape, dtype=token_log_probs.dtype, device=token_log_probs.device)
    values = zeros.scatter_add(1, index, token_log_probs * real)
    tokens = zeros.scatter_add(1, index, real)
    return ActionLogProbs(values.masked_fill(tokens == 0, -1e9), tokens)


def packed_scores(model: Any, packed: Packed) -> torch.Tensor:
    """The classifier's logit at every column after the prompt, (B, L − P); an action's score is that of its last one."""
    device = model.device
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # what PEFT wraps
    trunk = getattr(model, model.base_model_prefix)
    hidden = trunk(
        packed.tokens.to(device),
        attention_mask=_additive(packed.allowed.to(device), model.dtype),
        position_ids=packed.positions.to(device),
        use_cache=False,
    ).last_hidden_state
    scores: torch.Tensor = model.score(hidden[:, packed.prompt_width :]).squeeze(-1).float()
    return scores


def _batches(sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Indices by length, as many together as BATCH_TOKENS allow; ``sizes``: prompt and action tokens of each."""
    batch: list[int] = []
    widest, longest = 0, 0
    for index in sorted(range(len(sizes)), key=lambda i: sizes[i]):
        wide, long = max(widest, sizes[index][0]), max(longest, sizes[index][1])
        if batch and (len(batch) + 1) * (wide + long) > BATCH_TOKENS:
            yield batch
            batch, wide, long = [], *sizes[index]
        batch.append(index)
        widest, longest = wide, long
    if batch:
        yield batch


@dataclass(frozen=True)
class LanguageModel:
    """A model folder in memory."""

    model: Any
    reader: Reader

    def _packs(
        self, situations: Sequence[Situation], actions: Sequence[Sequence[str]]
    ) -> Iterator[tuple[list[int], Packed]]:
        read = [self.reader.read(situation, several) for situation, several in zip(situations, actions, strict=True)]
        for batch in _batches([(len(text), sum(map(len, tokens))) for text, tokens in read]):
            yield batch, pack([read[i][0] for i in batch], [read[i][1] for i in batch], self.reader.tokenizer.pad_token_id)


class FirstIsGreedy(LogitsProcessor):
    """Leaves the first row its most probable token only, so that one pass writes the greedy text and the samples."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        others = torch.arange(scores.shape[1], device=scores.device) != scores[0].argmax()
        return torch.cat([scores[:1].masked_fill(others, -torch.inf), scores[1:]])


@dataclass(frozen=True)
class Policy(LanguageModel):
    """π_θ: log p of actions, and actions of its own."""

    @torch.inference_mode()
    def log_probs(self, situations: Sequence[Situation], actions: Sequence[Sequence[str]]) -> list[list[list[float]]]:
        """log p of each token (end of sequence included) of each action of each situation, nats."""
        found: list[list[list[float]]] = [[] for _ in situations]
        for batch, packed in self._packs(situations, actions):
            values = packed_log_probs(self.model, packed).cpu().double().round(decimals=DIGITS)
            for row, index in enumerate(batch):
                owner, line = packed.owner[row], values[row]
                found[index] = [line[owner == number].clamp(max=0).tolist() for number in range(len(actions[index]))]
        return found

    @torch.inference_mode()
    def write(self, situation: Situation, count: int, seed: int) -> list[str]:
        """``count`` actions as free text: the greedy one and samples at temperature 1 from ``seed``."""
        tokenizer = self.reader.tokenizer
        tokens = torch.tensor([self.reader.read(situation, [])[0]] * count, device=self.model.device)
        cache = not isinstance(self.model, word_match.WordMatchForCausalLM)  # training leaves its config saying no
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        rows = self.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=self.reader.new_tokens, do_sample=True,
            top_k=0, top_p=1.0, temperature=1.0, logits_processor=[FirstIsGreedy()], use_cache=cache,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        torch.set_rng_state(state)
        texts = [tokenizer.decode(row[tokens.shape[1] :], skip_special_tokens=True) for row in rows]
        return [text.removeprefix(" ") for text in texts]


@dataclass(frozen=True)
class Verifier(LanguageModel):
    """V_φ: how good an action is in a situation, in [0, 1]."""

    @torch.inference_mode()
    def scores(self, situations: Sequence[Situation], actions: Sequence[Sequence[str]]) -> list[list[float]]:
        """σ(logit) of each action of each situation."""
        found: list[list[float]] = [[] for _ in situations]
        for batch, packed in self._packs(situations, actions):
            values = packed_scores(self.model, packed).sigmoid().cpu().double().round(decimals=DIGITS)
            for row, index in enumerate(batch):
                owner = packed.owner[row]
                last = [int((owner == number).nonzero()[-1]) for number in range(len(actions[index]))]
                found[index] = values[row, last].tolist()
        return found


@dataclass(frozen=True)
class SmallModel:
    """Policy and verifier together, as a Proposer."""

    policy: Policy
    verifier: Verifier | None
    candidates: int

    def propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        """The ``candidates`` most probable of the shown actions, or the greedy and sampled ones where none are listed."""
        shown = [self._actions(situation) for situation in situations]
        log_probs = self.policy.log_probs(situations, shown)
        chosen: list[list[int]] = []
        for situation, rows in zip(situations, log_probs, strict=True):
            order = list(range(len(rows)))
            if situation.observation.admissible:
                order.sort(key=lambda i: -round(sum(rows[i]), DIGITS))
            chosen.append(order[: self.candidates])
        kept = [[actions[i] for i in order] for actions, order in zip(shown, chosen, strict=True)]
        scores: list[list[float | None]] = [[None] * len(some) for some in kept]
        if self.verifier:
            scores = [list(marks) for marks in self.verifier.scores(situations, kept)]
        return [
            [Candidate(a, rows[i], score) for a, i, score in zip(some, order, marks, strict=True)]
            for some, order, rows, marks in zip(kept, chosen, log_probs, scores, strict=True)
        ]

    def _actions(self, situation: Situation) -> list[str]:
        if situation.observation.admissible:
            return list(situation.observation.admissible)
        seed = int.from_bytes(hashlib.sha256(prompt(situation).encode()).digest()[:4], "big")
        return self.policy.write(situation, self.candidates, seed)


def save_model(model: Any, reader: Reader, folder: Path, facts: dict[str, Any]) -> None:
    """Safetensors, tokenizer and, last, policy.json with how situations are read and the weights' digest.

    ``facts``: what else it says; ``dtype`` is what the weights are read as on a GPU (float32 unless given).
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    reader.tokenizer.save_pretrained(folder)
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    known = None if reader.known is None else sorted(reader.known)
    content = {
        **facts, "limit": reader.limit, "known_words": known, "new_tokens": reader.new_tokens,
        "weights_sha256": digest.hexdigest(),
    }  # fmt: skip
    partial = folder / f"{DESCRIPTION}.partial"
    partial.write_text(json.dumps(content, indent=1))
    os.replace(partial, folder / DESCRIPTION)


def _load(folder: Path, kind: Any, what: str) -> tuple[Any, Reader]:
    description = folder / DESCRIPTION
    if not description.is_file():
        raise BadInput(f"{what} {folder}: {DESCRIPTION} is missing, expected a folder written by its training stage")
    if not any(folder.glob("tokenizer.*")):  # transformers would make an empty one
        raise BadInput(f"{what} {folder}: the tokenizer is missing, expected a folder written by its training stage")
    try:
        content = json.loads(description.read_text())
        limit, known, stage = int(content["limit"]), content["known_words"], str(content["stage"])
        if (stage == "verifier") != (what == "verifier"):  # the other kind's weights would load, with a random head
            raise ValueError(f"it was written by the stage {stage}")
        on_gpu = torch.cuda.is_available()
        # as trained (float32) on a CPU, whose numbers are kept; on a GPU several processes hold policy and verifier
        dtype = resolve_dtype(str(content.get("dtype", "float32"))) if on_gpu else "auto"
        model = kind.from_pretrained(folder, use_safetensors=True, dtype=dtype)
        words, written = None if known is None else frozenset(known), int(content.get("new_tokens", NEW_TOKENS))
        reader = Reader(AutoTokenizer.from_pretrained(folder), limit, words, written)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise BadInput(f"{what} {folder}: cannot be loaded ({' '.join(str(error).split())[:200]})") from None
    model.requires_grad_(False)
    return model.eval().to("cuda" if on_gpu else "cpu"), reader


def load_policy(folder: Path) -> Policy:
    """A policy folder; BadInput names what is missing."""
    return Policy(*_load(folder, AutoModelForCausalLM, "policy"))


def load_verifier(folder: Path) -> Verifier:
    """A verifier folder; BadInput names what is missing."""
    return Verifier(*_load(folder, AutoModelForSequenceClassification, "verifier"))
