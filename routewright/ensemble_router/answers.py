"""Final answers in completions, and when two of them say the same.

Digits here are ASCII digits: a model's "٣" is no 3. Everything is linear in the length of the text.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

MAX_COMPLETION = 200_000
"""A longer completion has no answer: it ran away."""
MAX_ANSWER = 2_000
"""Characters of a final answer; more is a text, not an answer."""

# Commas part thousands; anywhere else they part the numbers of a list.
_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(rf"(?<![0-9A-Za-z.])[-−+]?\$?{_DIGITS}(?:\.[0-9]+)?|(?<![0-9A-Za-z.])[-−+]?\.[0-9]+")
_LETTER = re.compile(r"\(([A-Za-z])\)|(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])")


def final_answer(completion: str) -> str:
    """The answer a completion ends with, "" where there is none.

    In this order: the last <answer>…</answer>, the last \\boxed{…}, the text after the last "####", after the last "answer
    is" or "answer:" (to the end of the line), else the whole completion.
    """
    if len(completion) > MAX_COMPLETION:
        return ""
    text = completion.replace("\0", "").strip()
    for found in (_tagged(text), _boxed(text), _after(text, "####"), _told(text)):
        if found:
            return found if len(found) <= MAX_ANSWER else ""
    return text if len(text) <= MAX_ANSWER else ""


def _tagged(text: str) -> str:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else ""


def _boxed(text: str) -> str:
    start = text.rfind("\\boxed{")
    if start < 0:
        return ""
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip()
    return ""


def _after(text: str, mark: str) -> str:
    start = text.rfind(mark)
    if start < 0:
        return ""
    return text[start + len(mark) :].lstrip().split("\n", 1)[0].strip()


def _told(text: str) -> str:
    lowered = text.lower()
    if len(lowered) != len(text):  # a few letters change length: the places would not match
        return ""
    start = max(lowered.rfind(mark) + len(mark) if mark in lowered else -1 for mark in ("answer is", "answer:"))
    return text[start:].lstrip(" :\n").split("\n", 1)[0].strip().rstrip(".").strip() if start >= 0 else ""


def normalised(answer: str) -> str:
    """Compatibility forms folded, case and outer punctuation dropped, blanks single: what `exact` compares."""
    text = unicodedata.normalize("NFKC", answer).casefold()
    text = " ".join(text.split()).strip(" .,;:!?\"'`*$")
    return re.sub(r" ?, ?", ", ", text)


def last_number(answer: str) -> Decimal | None:
    """The last number of a text ("$1,234.50" is 1234.5), None where there is none."""
    found = None
    for found in _NUMBER.finditer(answer):  # noqa: B007
        pass
    return number(found.group()) if found else None


def number(text: str) -> Decimal | None:
    """The text as one plain number, None where it is anything else; no exponents, at most 100 characters.

    "1,234" is 1234, though it could be a list; "1,2" is none.
    """
    plain = text.strip().replace("−", "-").replace("$", "")
    if len(plain) > 100 or not re.fullmatch(rf"[-+]?(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)", plain):
        return None
    return Decimal(plain.replace(",", ""))


def choice_letter(answer: str) -> str:
    """The option letter an answer names, "B" of "(B) blue"; "" where it names none or several.

    A letter in brackets counts before a bare capital; "A" opening a sentence ("A dog …") is an article.
    """
    text = answer.strip()
    if re.fullmatch(r"\(?[A-Za-z]\)?[.:]?", text):
        return text.strip("().:").upper()
    bracketed = {one.upper() for one, _ in _LETTER.findall(text) if one}
    bare = {two for _, two in _LETTER.findall(re.sub(r"\b[AI] (?!(?:or|and|is)\b)(?=[a-z])", "", text)) if two}
    named = bracketed or bare
    return named.pop() if len(named) == 1 else ""
