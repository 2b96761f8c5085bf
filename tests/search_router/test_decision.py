from __future__ import annotations

import json
from datetime import date

import pytest

from routewright.search_router.decision import Decision, Interval


def test_an_interval_that_ends_before_it_starts() -> None:
    with pytest.raises(ValueError, match=r"the interval ends \(2024-05-01\) before it starts \(2024-05-02\)"):
        Interval(date(2024, 5, 2), date(2024, 5, 1))


def test_an_interval_without_ends() -> None:
    with pytest.raises(ValueError, match="needs a start or an end"):
        Interval(None, None)


def test_one_day_and_open_ends_are_fine() -> None:
    day = date(2024, 5, 1)
    assert Interval(day, day) == Interval(day, day)
    assert Interval(day, None) != Interval(None, day)


def test_the_json_of_the_contract() -> None:
    decision = Decision(
        ["b"], "01", ["rose"], date(2024, 1, 2), None, {"a": 0.25, "b": 0.75}, abstained=False, model_version="abc"
    )
    assert json.loads(json.dumps(decision.to_json())) == {
        "agents": ["b"], "bitmask": "01", "keywords": ["rose"], "start": "2024-01-02", "end": None,
        "scores": {"a": 0.25, "b": 0.75}, "abstained": False, "model_version": "abc",
    }  # fmt: skip
    assert decision.start == date(2024, 1, 2), "to_json changes nothing"
