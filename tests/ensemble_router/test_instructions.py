"""IFEval's kinds: one response that follows and one that does not, each."""

from __future__ import annotations

from typing import Any

import pytest

from routewright.ensemble_router.instructions import KINDS, check_instruction, follows, sentences, words
from routewright.errors import BadInput

ENGLISH = "the weather is lovely today and the children are playing in the garden with their friends"
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog.", "A category and a dog."),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "at least"}, "War, war!", "war warlike"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "less than"}, "one war", "war war"),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "rocky road", "a Rock"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "# #", "#"),
    ("language:response_language", {"language": "ru"}, "Сегодня хорошая погода, и мы идём гулять в парк.", ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, "Dr. No. Yes.", "A b. C d. E."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n\n***\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "it's a well-known", "it's two"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "elm"},
     "Oak.\n\n'Elm' tree.", "Elm.\n\nOak."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [address]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "bye\nP.P.S. more", "bye\nP.S. more"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "bye\nP. S. more", "bye"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two\n**bold**", "* one"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and **"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     "SECTION 1\na\nSECTION 2\nb", "SECTION 1\nSECTION X"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Hope>>\ntext", "<< >>\ntext"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. I do.", "I say it."),
    ("startend:end_checker", {"end_phrase": "Peace!"}, 'now "peace!"', "peace! now"),
    ("startend:quotation", {}, '"all of it"', '"'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "ONE two", "ONE TWO"),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH.title()),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.title()),
    ("punctuation:no_comma", {}, "no commas", "one, two"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arguments", "good", "bad"), CASES)
def test_each_kind(kind: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    if kind.startswith(("language", "change_case:english")):
        pytest.importorskip("langdetect", reason="langdetect is in the ensemble extra")
    check_instruction(kind, arguments)
    assert follows(kind, arguments, good)
    assert not follows(kind, arguments, bad)
    assert not follows(kind, arguments, " \n")


def test_every_kind_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(KINDS)
    assert len(KINDS) == 25


@pytest.mark.parametrize(
    ("kind", "arguments", "told"),
    [
        ("keywords:rhyme", {}, "expected one of the 25 kinds"),
        ("punctuation:no_comma", {"n": 1}, "expected the arguments []"),
        ("keywords:existence", {"keywords": "cat"}, "expected list, found 'cat'"),
        ("keywords:existence", {"keywords": [1]}, "expected words"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}, "'at least' or 'less than'"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": True}, "expected int, found True"),
    ],
)
def test_unknown_kinds_and_arguments(kind: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput) as error:
        check_instruction(kind, arguments)
    assert told in str(error.value)


def test_words_and_sentences() -> None:
    assert words("It's a state-of-the-art test: 3 apples.") == ["It's", "a", "state-of-the-art", "test", "3", "apples"]
    assert sentences('Dr. Who met J. Smith. "Really?" he said! Yes') == [
        "Dr. Who met J. Smith.",
        '"Really?',
        "he said!",
        "Yes",
    ]
