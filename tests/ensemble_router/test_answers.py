"""Final answers of completions, by hand."""

from __future__ import annotations

from decimal import Decimal

import pytest

from routewright.ensemble_router.answers import (
    MAX_ANSWER,
    MAX_COMPLETION,
    choice_letter,
    final_answer,
    last_number,
    normalised,
    number,
)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("42", "42"),
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        (r"so \boxed{\frac{1}{2}} and done", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "\\boxed{1} then \\boxed{2"),
        ("48/2=24\n#### 72\nbye", "72"),
        ("The answer is: (B).\nWhy?", "(B)"),
        ("Answer: x = 3\nmore", "x = 3"),
        ("a\0b", "ab"),
        ("", ""),
        ("x" * (MAX_ANSWER + 1), ""),
        ("9 " * MAX_COMPLETION, ""),
        ("\\boxed{" + "{" * 50_000, ""),
    ],
)
def test_final_answer(completion: str, answer: str) -> None:
    assert final_answer(completion) == answer


def test_normalised() -> None:
    assert normalised("  The  CAT. ") == "the cat"
    assert normalised("a,b ,c") == normalised("A, B, C")
    assert normalised("ﬁsh") == "fish"
    assert normalised("12") != normalised("21")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("it costs $1,234.50 today", "1234.50"),
        ("3 + 4 = 7.", "7"),
        ("from 5 to -3", "-3"),
        ("7−2", "2"),
        ("year 1,000,000", "1000000"),
        ("x2", None),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("0,100", "100"),
        ("٣", None),
        ("none", None),
    ],
)
def test_last_number(text: str, value: str | None) -> None:
    assert last_number(text) == (None if value is None else Decimal(value))


def test_number_is_plain() -> None:
    assert number("-1,200.5") == Decimal("-1200.5")
    assert [number(text) for text in ("1e9", "٣", "½", "2 apples", "9" * 101, "")] == [None] * 6


def test_commas_of_a_number_part_thousands() -> None:
    """A list is no number; "1,234" could be one of two, and is read as a number."""
    lists = ("1,2", "3,5,7", "-1,7", "1,2345", "1234,567", "0,100", "1,234,5", "1.5,200", ",1", "1,", "1,234,")
    assert [number(text) for text in lists] == [None] * len(lists)
    assert [number(text) for text in ("1,234", "-$12,345.5", "+100,200,300")] == [1234, Decimal("-12345.5"), 100200300]


@pytest.mark.parametrize(
    ("text", "letter"),
    [("b", "B"), ("(C)", "C"), ("(D) blue ball", "D"), ("It is B.", "B"), ("A dog runs, so C", "C"), ("A or B", ""),
     ("I think (A), not B", "A"), ("none", ""), ("", "")],
)  # fmt: skip
def test_choice_letter(text: str, letter: str) -> None:
    assert choice_letter(text) == letter
