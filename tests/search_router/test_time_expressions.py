"""Time expressions: each convention on a hand-made case, the annotated NLU++ utterances, and properties on any text."""

from __future__ import annotations

import gzip
import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routewright.search_router.calendar_phrases import find_phrases, resolve_phrase
from routewright.search_router.decision import Interval
from routewright.search_router.time_expressions import find_time_expression, interval_iou, resolve_interval

REFERENCE = date(2024, 6, 15)  # a Saturday
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def days(text: str, reference: date = REFERENCE) -> str | None:
    """The interval as "start..end", open ends empty."""
    found = resolve_interval(text, reference)
    return f"{found.start or ''}..{found.end or ''}" if found else None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # counted back from the reference date
        ("errors in the last two weeks", "2024-06-01..2024-06-15"),
        ("papers of the past 3 months", "2024-03-15..2024-06-15"),
        ("in the last year", "2023-06-15..2024-06-15"),
        ("over the last decade", "2014-06-15..2024-06-15"),
        ("incidents in the last 5 days", "2024-06-10..2024-06-15"),
        ("year to date", "2024-01-01..2024-06-15"),
        # calendar periods; weeks run Monday to Sunday
        ("this week", "2024-06-10..2024-06-16"),
        ("last week", "2024-06-03..2024-06-09"),
        ("next week", "2024-06-17..2024-06-23"),
        ("this month", "2024-06-01..2024-06-30"),
        ("last month's report", "2024-05-01..2024-05-31"),
        ("last quarter", "2024-01-01..2024-03-31"),
        ("this year", "2024-01-01..2024-12-31"),
        ("last weekend", "2024-06-08..2024-06-09"),
        # joined
        ("between March and May 2024", "2024-03-01..2024-05-31"),
        ("between November and February 2024", "2023-11-01..2024-02-29"),
        ("from 2018 to 2020", "2018-01-01..2020-12-31"),
        ("2018-2020", "2018-01-01..2020-12-31"),
        ("from Monday to Wednesday", "2024-06-17..2024-06-19"),
        ("from the 3rd to the 6th of January 2021", "2021-01-03..2021-01-06"),
        ("3-5 May 2020", "2020-05-03..2020-05-05"),
        ("March 3-5, 2021", "2021-03-03..2021-03-05"),
        ("starting on the 23rd what did I spend until Nov the 10th", "2024-06-23..2024-11-10"),
        ("leaving on the 22nd, arriving on the 20th", "2024-06-20..2024-06-22"),
        ("3 Jul until the Friday after", "2024-07-03..2024-07-05"),
        # open ends
        ("since 2019", "2019-01-01.."),
        ("since November", "2023-11-01.."),
        ("since last Monday", "2024-06-10.."),
        ("since the summer", "2024-06-01.."),
        ("after 5th of May 2023", "2023-05-06.."),
        ("from 3 May 2022 onwards", "2022-05-03.."),
        ("before June 2020", "..2020-05-31"),
        ("until 2015", "..2015-12-31"),
        ("by 2030", "..2030-12-31"),
        ("3 nights from 9 December", "2024-12-09.."),
        # a deadline to come is its day; what is from a past period is in it
        ("I need it before the 14th of January", "2025-01-14..2025-01-14"),
        ("by Wednesday", "2024-06-19..2024-06-19"),
        ("emails from last week", "2024-06-03..2024-06-09"),
        # days
        ("yesterday", "2024-06-14..2024-06-14"),
        ("my wallet got stolen last night", "2024-06-14..2024-06-14"),
        ("the day after tomorrow", "2024-06-17..2024-06-17"),
        ("3 weeks ago", "2024-05-25..2024-05-25"),
        ("in three days", "2024-06-18..2024-06-18"),
        ("a couple of days ago", "2024-06-13..2024-06-13"),
        ("next Tuesday", "2024-06-18..2024-06-18"),
        ("last Friday", "2024-06-14..2024-06-14"),
        ("Saturday", "2024-06-22..2024-06-22"),
        ("Thursday last week", "2024-06-06..2024-06-06"),
        ("next week Friday", "2024-06-21..2024-06-21"),
        ("on the 3rd of March", "2025-03-03..2025-03-03"),
        ("June 10", "2024-06-10..2024-06-10"),
        ("the 18th", "2024-06-18..2024-06-18"),
        ("on the 10th, please", "2024-07-10..2024-07-10"),
        ("Tuesday March 3", "2026-03-03..2026-03-03"),
        ("29 Feb", "2028-02-29..2028-02-29"),
        ("May the fourth 2020", "2020-05-04..2020-05-04"),
        ("5 may '19", "2019-05-05..2019-05-05"),
        ("on 12/03", "2025-03-12..2025-03-12"),
        ("03/25/2024", "2024-03-25..2024-03-25"),
        ("2024-03-05T10:00:00Z", "2024-03-05..2024-03-05"),
        ("Christmas 2020", "2020-12-25..2020-12-25"),
        # months, quarters, seasons, parts
        ("what changed in November", "2023-11-01..2023-11-30"),
        ("in Q3 2023", "2023-07-01..2023-09-30"),
        ("second half of 2020", "2020-07-01..2020-12-31"),
        ("in summer 2020", "2020-06-01..2020-08-31"),
        ("last winter", "2023-12-01..2024-02-29"),
        ("first week of May", "2024-05-01..2024-05-07"),
        ("last week of May 2023", "2023-05-25..2023-05-31"),
        ("late March 2022", "2022-03-21..2022-03-31"),
        ("mid-2021", "2021-05-01..2021-08-31"),
        ("music of the 90s", "1990-01-01..1999-12-31"),
        ("since the late 1980s", "1987-01-01.."),
        ("two years ago", "2022-01-01..2022-12-31"),
    ],
)
def test_conventions(text: str, expected: str) -> None:
    assert days(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "at 9 pm",
        "10 past 3 in the afternoon",
        "between 8 and 10",
        "last 3 hours",
        "for two weeks",
        "5 nights for two",
        "for the next 8 months",
        "every Monday",
        "on the 4th of each month",
        "a few days ago",
        "recently",
        "tonight",
        "python 3.11",
        "top 10 results of 2000 rows",
        "code 2019",
        "HTTP 404",
        "Windows Server 2019",
        "after 2000 requests",
        "resize to 1920x1080",
        "the 2nd argument of the 1st call",
        "May I ask",
        "it may fail",
        "results from may differ",
        "march of progress",
        "the second argument",
        "Spring Boot 2.0",
        "energy from the sun",
        "10.0.0.1",
        "API version 2012-10-17",
        "objects older than 90 days",
        "python get yesterday's date",
        "get the last day of the month",
        "31 June 2020",
        "March 30 to 2",
        "over the past 9999 years",
        "ما هو الطقس 🌧️",
    ],
)
def test_no_date(text: str) -> None:
    assert days(text) is None


def test_month_words_need_their_context() -> None:
    assert days("in May 2020") == "2020-05-01..2020-05-31"
    assert days("you may 5 times") is None
    assert days("on May 5") == "2025-05-05..2025-05-05"


def test_span_is_in_the_original_text() -> None:
    text = "İstanbul\u00a0flights  between March  and\tMay 2024, please"
    found = find_time_expression(text, REFERENCE)
    assert found is not None
    assert text[found.start : found.end] == found.text == "between March  and\tMay 2024"
    found = find_time_expression("What Changed In The Last Two Weeks?", REFERENCE)
    assert found is not None
    assert (found.start, found.end, found.text) == (13, 34, "In The Last Two Weeks")


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    assert days("x " * 900 + "since 2019") == "2019-01-01.."
    assert days("x " * 1000 + "since 2019") is None
    for hostile in (
        "1" * 100_000,
        "from monday to " * 7_000,
        "feb 30 " * 14_000,
        " " * 100_000,
        "monday 31 april " * 6_000,
    ):
        resolve_interval(hostile, REFERENCE)


def test_ends_of_the_calendar() -> None:
    assert days("before yesterday", date(1, 1, 2)) is None
    assert days("after today", date.max) is None
    assert days("last week", date.min) is None
    assert days("tomorrow", date.max) is None


def test_phrases_look_back_when_asked() -> None:
    (phrase,) = find_phrases("25 december")
    assert resolve_phrase(phrase, REFERENCE) == (date(2024, 12, 25),) * 2
    assert resolve_phrase(phrase, REFERENCE, past=True) == (date(2023, 12, 25),) * 2


def test_interval_iou() -> None:
    week = Interval(date(2024, 6, 3), date(2024, 6, 9))
    half = Interval(date(2024, 6, 3), date(2024, 6, 6))
    assert interval_iou(None, None, REFERENCE) == 1.0
    assert interval_iou(week, None, REFERENCE) == interval_iou(None, week, REFERENCE) == 0.0
    assert interval_iou(week, week, REFERENCE) == 1.0
    assert interval_iou(week, half, REFERENCE) == pytest.approx(4 / 7)
    assert interval_iou(week, Interval(date(2024, 7, 1), None), REFERENCE) == 0.0
    # an open end reaches today: 13 days, 7 of them shared
    assert interval_iou(week, Interval(date(2024, 6, 3), None), REFERENCE) == pytest.approx(7 / 13)
    # an open start is 1970-01-01
    assert (
        interval_iou(Interval(None, date(1970, 1, 10)), Interval(date(1970, 1, 6), date(1970, 1, 10)), REFERENCE) == 0.5
    )


def test_annotated_utterances() -> None:
    path = SHARED / "dates" / "nlupp_dates.jsonl.gz"
    if not path.exists():
        pytest.skip("needs the NLU++ utterances in ../shared/data/dates")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    exact, silent = [], []
    for row in rows:
        found = days(row["text"], date.fromisoformat(row["reference_date"]))
        if row["interval"]:
            exact.append(found == f"{row['interval']['start'] or ''}..{row['interval']['end'] or ''}")
        elif not any(slot.startswith("date") for slot in row["date_slots"]):
            silent.append(found is None)
    assert len(exact) == 407
    assert sum(exact) / len(exact) >= 0.85
    assert sum(silent) / len(silent) >= 0.98


@pytest.mark.parametrize(
    ("collection", "allowed"), [("cosqa", 0.002), ("stackfaq", 0.002), ("npl", 0.0), ("cacm", 0.0)]
)
def test_technical_queries_have_no_dates(collection: str, allowed: float) -> None:
    path = SHARED / "ir" / collection / "queries.jsonl.gz"
    if not path.exists():
        pytest.skip("needs the queries in ../shared/data/ir")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        found = [resolve_interval(json.loads(line)["text"], REFERENCE) is not None for line in lines]
    assert sum(found) / len(found) <= allowed


_WORDS = (
    "since from to until before after by between and in on the of last next this first 2nd 3rd 31st week weekend month"
    " year quarter day days ago May march feb 29 30 31 2019 0000 9999 2024-02-30 99/99 12/03/20 '20 monday sun Q4 90s"
    " decade century 1900s leaving arriving nights early end - , . 10 9999 friday that"
)
_PHRASES = st.lists(st.sampled_from(_WORDS.split()), max_size=12).map(" ".join)
_DATES = st.dates(min_value=date(1, 1, 1), max_value=date(9999, 12, 31))


@settings(max_examples=400, deadline=None)
@given(text=st.one_of(st.text(), _PHRASES), reference=_DATES)
def test_any_text_resolves_in_order(text: str, reference: date) -> None:
    found = find_time_expression(text, reference)
    if found is not None:
        assert 0 <= found.start < found.end <= len(text)
        assert found.text == text[found.start : found.end]
        assert found.interval.start or found.interval.end
        assert found.interval == resolve_interval(text, reference)


@settings(max_examples=200, deadline=None)
@given(text=_PHRASES, reference=st.dates(min_value=date(1900, 1, 1), max_value=date(2100, 1, 1)))
def test_case_does_not_matter(text: str, reference: date) -> None:
    assert resolve_interval(text.upper(), reference) == resolve_interval(text.lower(), reference)


_NEAR = st.dates(min_value=REFERENCE - timedelta(days=40), max_value=REFERENCE + timedelta(days=40))
_INTERVALS = st.one_of(
    st.none(),
    st.tuples(_NEAR, _NEAR).map(lambda pair: Interval(min(pair), max(pair))),
    _NEAR.map(lambda day: Interval(day, None)),
    _NEAR.map(lambda day: Interval(None, day)),
)


@given(a=_INTERVALS, b=_INTERVALS)
def test_iou_is_a_similarity(a: Interval | None, b: Interval | None) -> None:
    value = interval_iou(a, b, REFERENCE)
    assert 0.0 <= value <= 1.0
    assert value == interval_iou(b, a, REFERENCE)
    assert interval_iou(a, a, REFERENCE) == 1.0
