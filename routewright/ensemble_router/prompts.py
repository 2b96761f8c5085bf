"""Questions and answers as tokens, the same in warm-up, training, evaluation and service."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

ANSWER = "\n="
"""Stands between question and answer where the tokenizer has no chat template."""

DAY = "26 Jul 2024"
"""Llama's template has a date, by default of the day that it is; a run that resumes tomorrow must ask the same."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Tokens up to where the answer begins: the chat template where there is one, else the prompt and "\\n="."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False, enable_thinking=False,
            date_string=DAY,
        )  # fmt: skip
        return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])
    return list(tokenizer(prompt + ANSWER, add_special_tokens=False)["input_ids"])


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: str) -> list[int]:
    """The answer's tokens and the end of sequence."""
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], int(tokenizer.eos_token_id)]


def completion_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], mask: Sequence[bool]) -> str:
    """The text of a completion: its unmasked tokens without the special ones."""
    kept = [token for token, alive in zip(tokens, mask, strict=True) if alive]
    return str(tokenizer.decode(kept, skip_special_tokens=True))
