"""Verifiable instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911): its 25 kinds, one function each.

After the reference implementation, without nltk: words are runs of letters, digits and inner apostrophes, sentences end at
. ! or ? before a blank or the end. An empty response follows nothing, and a language that cannot be told is the wrong one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from routewright.errors import BadInput

_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|[A-Z])\.(?=\s)")
RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
LANGUAGE_CHARACTERS = 5_000
"""Of a text whose language is told; its detector is slow."""


def words(text: str) -> list[str]:
    """The words of a text."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """The sentences of a text; abbreviations such as "Dr." and initials do not end one."""
    marked = _ABBREVIATION.sub(lambda found: found.group().replace(".", "\0"), text)
    parts = (one.replace("\0", ".").strip() for one in re.split(r"(?<=[.!?])[\"”')]*\s+|\n{2,}", marked))
    return [part for part in parts if words(part)]


def language(text: str) -> str:
    """The language of a text as ISO 639-1, "" where it cannot be told."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return detect(text[:LANGUAGE_CHARACTERS])
    except LangDetectException:
        return ""


def _compared(count: int, relation: str, bound: int) -> bool:
    return count >= bound if relation == "at least" else count < bound


def _word_count(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(_word_count(text, word) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs separated by ***; an empty one counts only at the ends, as none."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1 if not parts[0] else 0 : len(parts) - (1 if len(parts) > 1 and not parts[-1] else 0)]
    return all(inner) and len(inner) == num_paragraphs


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    opening = words(parts[nth_paragraph - 1])
    return bool(opening) and opening[0].lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(rf"(?m)(?:^|\s){pattern}", text.lower()) is not None


def _constrained_response(text: str) -> bool:
    return any(response in text for response in RESPONSES)


def _highlighted_sections(text: str, num_highlights: int) -> bool:
    single = [part for part in re.findall(r"\*([^\n*]*)\*", text) if part.strip()]
    double = [part for part in re.findall(r"\*\*([^\n*]*)\*\*", text) if part.strip()]
    return len(single) + len(double) >= num_highlights


def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?[0-9]+\s?", text)) >= num_sections


def _json_format(text: str) -> bool:
    inner = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(inner)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(part.strip() for part in re.findall(r"<<([^\n<>]+)>>", text))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    inner = [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compared(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


Function = Callable[..., bool]
KINDS: dict[str, tuple[Function, dict[str, type[Any]]]] = {
    "keywords:existence": (lambda t, keywords: all(_word_count(t, k) for k in keywords), {"keywords": list}),
    "keywords:frequency": (
        lambda t, keyword, frequency, relation: _compared(_word_count(t, keyword), relation, frequency),
        {"keyword": str, "frequency": int, "relation": str},
    ),
    "keywords:forbidden_words": (_forbidden_words, {"forbidden_words": list}),
    "keywords:letter_frequency": (_letter_frequency, {"letter": str, "let_frequency": int, "let_relation": str}),
    "language:response_language": (lambda t, language: globals()["language"](t) == language, {"language": str}),
    "length_constraints:number_sentences": (
        lambda t, num_sentences, relation: _compared(len(sentences(t)), relation, num_sentences),
        {"num_sentences": int, "relation": str},
    ),
    "length_constraints:number_paragraphs": (_paragraphs, {"num_paragraphs": int}),
    "length_constraints:number_words": (
        lambda t, num_words, relation: _compared(len(words(t)), relation, num_words),
        {"num_words": int, "relation": str},
    ),
    "length_constraints:nth_paragraph_first_word": (
        _nth_paragraph_first_word, {"num_paragraphs": int, "nth_paragraph": int, "first_word": str}
    ),
    "detectable_content:number_placeholders": (
        lambda t, num_placeholders: len(re.findall(r"\[[^\[\]]*\]", t)) >= num_placeholders, {"num_placeholders": int}
    ),
    "detectable_content:postscript": (_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": (
        lambda t, num_bullets: len(re.findall(r"(?m)^[ \t]*(?:\*(?!\*)|-)", t)) == num_bullets, {"num_bullets": int}
    ),
    "detectable_format:constrained_response": (_constrained_response, {}),
    "detectable_format:number_highlighted_sections": (_highlighted_sections, {"num_highlights": int}),
    "detectable_format:multiple_sections": (_multiple_sections, {"section_spliter": str, "num_sections": int}),
    "detectable_format:json_format": (_json_format, {}),
    "detectable_format:title": (_title, {}),
    "combination:two_responses": (_two_responses, {}),
    "combination:repeat_prompt": (_repeat_prompt, {"prompt_to_repeat": str}),
    "startend:end_checker": (_end_checker, {"end_phrase": str}),
    "startend:quotation": (_quotation, {}),
    "change_case:capital_word_frequency": (_capital_words, {"capital_frequency": int, "capital_relation": str}),
    "change_case:english_capital": (lambda t: t.isupper() and language(t.lower()) == "en", {}),
    "change_case:english_lowercase": (lambda t: t.islower() and language(t) == "en", {}),
    "punctuation:no_comma": (lambda t: "," not in t, {}),
}  # fmt: skip


def check_instruction(kind: str, arguments: dict[str, Any]) -> None:
    """BadInput for a kind that has no check, and for arguments it cannot be checked with."""
    if kind not in KINDS:
        raise BadInput(f"instruction {kind!r}: expected one of the {len(KINDS)} kinds of IFEval")
    expected = KINDS[kind][1]
    if set(arguments) != set(expected):
        raise BadInput(f"instruction {kind}: expected the arguments {sorted(expected)}, found {sorted(arguments)}")
    for name, wanted in expected.items():
        value = arguments[name]
        if type(value) is not wanted or not (value or value == 0):
            raise BadInput(f"instruction {kind}: {name}: expected {wanted.__name__}, found {value!r}"[:300])
        if isinstance(value, list) and not all(isinstance(word, str) and word for word in value):
            raise BadInput(f"instruction {kind}: {name}: expected words, found {value!r}"[:300])
        if name.endswith("relation") and value not in ("at least", "less than"):
            raise BadInput(f"instruction {kind}: {name}: expected 'at least' or 'less than', found {value!r}"[:300])


def follows(kind: str, arguments: dict[str, Any], response: str) -> bool:
    """Whether a response follows one instruction; an empty one does not."""
    return bool(response.strip()) and bool(KINDS[kind][0](response, **arguments))
