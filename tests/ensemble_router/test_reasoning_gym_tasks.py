"""Procedural questions: reproducible, never in two splits, stripped or in full."""

from __future__ import annotations

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is in the ensemble extra")

from routewright.ensemble_router.reasoning_gym_tasks import ASKED, asked, reasoning_gym_tasks, split_of
from routewright.ensemble_router.verify import verify
from routewright.errors import BadInput


def test_splits_never_overlap_whatever_the_seed_and_wording() -> None:
    """simple_equations asks the same equation in several wordings: what is asked decides, not the words."""
    small = {"min_terms": 2, "max_terms": 2, "max_value": 4}
    train = reasoning_gym_tasks("simple_equations", "train", 150, 1, small)
    test = reasoning_gym_tasks("simple_equations", "test", 20, 2, small)
    keys = [{asked("simple_equations", task.prompt) for task in tasks} for tasks in (train, test)]
    assert (len(keys[0]), len(keys[1])) == (150, 20)
    assert not keys[0] & keys[1]
    assert {task.split for task in train} == {"train"}
    assert {task.prompt.split()[0] for task in train} >= {"Find", "Solve"}
    a, b = (f"{words}: 2*x + 4 = 8" for words in ("Solve for x", "Find the value of x in the equation"))
    assert split_of("simple_equations", a) == split_of("simple_equations", b)


def test_the_same_arguments_give_the_same_tasks() -> None:
    first, again = (reasoning_gym_tasks("gcd", "train", 20, 3, {"max_value": 60}) for _ in range(2))
    assert first == again
    assert first != reasoning_gym_tasks("gcd", "train", 20, 4, {"max_value": 60})


@pytest.mark.parametrize("family", sorted(ASKED))
def test_stripped_wording_asks_the_same(family: str) -> None:
    """The stripped prompt is a piece of the question under the family's name, and the stored answer passes."""
    full = reasoning_gym_tasks(family, "train", 8, 5)
    stripped = reasoning_gym_tasks(family, "train", 8, 5, stripped=True)
    for one, other in zip(full, stripped, strict=True):
        name, rest = other.prompt.split(" ", 1)
        assert name == family
        assert rest
        assert rest in one.prompt
        assert (one.answer, one.generator) == (other.answer, other.generator)
        assert verify(other, f" {one.answer}\n") == 1.0
    assert len({task.prompt for task in stripped}) == 8


def test_what_cannot_be_made_is_said() -> None:
    with pytest.raises(BadInput, match="there is no such family"):
        reasoning_gym_tasks("sums", "train", 5, 1)
    with pytest.raises(BadInput, match="parameters"):
        reasoning_gym_tasks("gcd", "train", 5, 1, {"max_valu": 3})
    with pytest.raises(BadInput, match="parameters"):
        reasoning_gym_tasks("gcd", "train", 5, 1, {"min_value": 30, "max_value": 3})
    with pytest.raises(BadInput, match=r"found [0-9]+ different train questions, expected 500"):
        reasoning_gym_tasks("gcd", "train", 500, 1, {"max_value": 6})
    with pytest.raises(BadInput, match="stores no answer"):
        reasoning_gym_tasks("propositional_logic", "train", 5, 1)
    with pytest.raises(BadInput, match="no stripped template"):
        reasoning_gym_tasks("syllogism", "train", 5, 1, stripped=True)
