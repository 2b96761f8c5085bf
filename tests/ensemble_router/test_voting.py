"""Votes: weights, equal answers, ties, abstentions."""

from __future__ import annotations

import pytest

from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.voting import Vote, answer_key, vote


def task(check: str, answer: str | None = "4", **more: object) -> Task:
    return Task.model_validate({"id": "t", "prompt": "2 + 2 =", "answer": answer, "domain": "d", "check": check, **more})


EXACT, NUMBER, CODE = task("exact"), task("number"), task("code", None, tests="assert f(1)")


def test_familiarity_weighs_the_votes() -> None:
    """Two at 0.2 + 0.25 against one at 0.4: 0.45 / 0.85."""
    assert vote(NUMBER, ["7", "the answer is 4.0", "4"], [0.4, 0.2, 0.25]) == Vote(2, "4", pytest.approx(0.45 / 0.85), ())
    assert vote(NUMBER, ["7", "4", "4"], [0.5, 0.2, 0.25]).answer == "7"
    assert vote(EXACT, ["Paris.", "Rome", " paris "], [0.3, 0.5, 0.3]).winner == 0


def test_math_equivalent_answers_count_as_one() -> None:
    pytest.importorskip("math_verify", reason="math-verify is in the ensemble extra")
    found = vote(task("math", r"\frac{1}{2}"), [r"\boxed{\frac{1}{2}}", "3", "0.5"], [0.3, 0.4, 0.2])
    assert (found.winner, found.weight) == (0, pytest.approx(0.5 / 0.9))


def test_a_list_is_not_the_number_of_its_digits() -> None:
    pytest.importorskip("math_verify", reason="math-verify is in the ensemble extra")
    assert vote(task("math", "1,2"), ["1,2", "12", "1, 2"], [0.3, 0.4, 0.2]).winner == 0


def test_two_agents_are_top_1_unless_one_abstains() -> None:
    assert vote(EXACT, ["a", "b"], [0.3, 0.31]).winner == 1
    assert vote(EXACT, ["a", ""], [0.3, 0.31]) == Vote(0, "a", 1.0, (1,))


def test_abstentions() -> None:
    assert vote(NUMBER, ["", "no idea", "\0"], [0.9, 0.9, 0.9]) == Vote(-1, "", 0.0, (0, 1, 2))
    assert vote(NUMBER, ["no idea", "4", " "], [0.9, 0.1, 0.9]) == Vote(1, "4", 1.0, (0, 2))
    assert vote(EXACT, [], []) == Vote(-1, "", 0.0, ())


def test_ties() -> None:
    """More agents; then the most familiar single agent; then the earlier."""
    assert vote(EXACT, ["a", "b", "b"], [0.4, 0.2, 0.2]).answer == "b"
    assert vote(EXACT, ["a", "a", "b", "b"], [0.2, 0.2, 0.1, 0.3]).answer == "b"
    assert vote(EXACT, ["a", "b"], [0.3, 0.3]).answer == "a"
    assert vote(EXACT, ["a", "b"], [0.0, 0.0]) == Vote(0, "a", 0.0, ())


def test_open_tasks_take_the_most_familiar_agent_that_wrote_anything() -> None:
    assert vote(CODE, ["x = 1", "y = 2", "y = 2"], [0.5, 0.3, 0.4]).winner == 0
    assert vote(CODE, ["x = 1", "", "y = 2"], [0.3, 0.9, 0.4]) == Vote(2, "y = 2", pytest.approx(4 / 7), (1,))


def test_answer_keys() -> None:
    assert [answer_key("number", text) for text in ("1,000.50", "x = 1000.5", "-0")] == ["1000.5", "1000.5", "0"]
    assert answer_key("choice", "(B) blue") == "B"


def test_a_completion_without_a_familiarity() -> None:
    with pytest.raises(ValueError, match="one familiarity a completion"):
        vote(EXACT, ["a"], [])
