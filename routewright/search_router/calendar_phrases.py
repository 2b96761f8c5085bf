"""Single calendar phrases in English text: where they are, and which days they mean.

A phrase is one point or period: "the 3rd of March", "Q3 2023", "last two weeks", "tomorrow", "next Tuesday".
``time_expressions`` joins phrases into intervals. All patterns have bounded repeats, so a scan is linear in the text.

Conventions (weeks run Monday to Sunday; *ref* is the reference date):

* A day without a year ("3 March") is in this month or later; without a month ("the 18th") it is ref or later. A weekday
  in front picks the next such day that falls on it. With ``past`` the latest one not after ref is taken instead.
* A weekday alone is the first one after ref; "last Friday" the latest before it; "next Friday" and "Friday last week"
  lie in the calendar week named; "this Friday" is ref or later.
* A month, quarter, season or holiday season without a year is the latest that has begun; "next May" the first to come.
* "last week / month / quarter / year" and "previous ..." are the calendar period before; "this ..." and "next ..."
  likewise, whole. "the last week", "past month" and "last 3 months" count back from ref: [ref - n, ref].
  "next 3 months" is [ref, ref + n].
* "3 weeks ago" and "in 3 days" are single days; "3 years ago" is that calendar year.
* early / mid / late are thirds (months of a year, days 1-10, 11-20, 21- of a month, years 0-3, 4-6, 7-9 of a decade).
  "first week of May" is 1-7 May, "last week" the last seven days. Seasons are meteorological and northern; a winter
  belongs to the year in which its December lies. "the 90s" are 1990-1999.
* Numbers with slashes are day first (12/03 is 12 March) unless only month first is possible.
* Not dates: times of day, "tonight" and "this evening", hours and minutes, durations ("for two weeks", "3 nights"),
  vague words ("recently", "a few days ago"), recurrences ("every Monday", "the 4th of each month").
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import lru_cache

import dateparser
from dateutil.relativedelta import relativedelta

Days = tuple[date, date]
Fields = dict[str, str]

# fmt: off
_MONTH_NAMES = [
    "january jan", "february feb", "march mar", "april apr", "may", "june jun", "july jul", "august aug",
    "september sept sep", "october oct", "november nov", "december dec",
]
_WEEKDAY_NAMES = [
    "monday mon", "tuesday tues tue", "wednesday weds wed", "thursday thurs thur thu", "friday fri", "saturday sat",
    "sunday sun",
]
_ORDINAL_WORDS = [
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
    "twentieth", "twenty-first", "twenty-second", "twenty-third", "twenty-fourth", "twenty-fifth", "twenty-sixth",
    "twenty-seventh", "twenty-eighth", "twenty-ninth", "thirtieth", "thirty-first",
]
_NUMBER_WORDS = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]
# fmt: on
_MONTHS = {name: number for number, names in enumerate(_MONTH_NAMES, start=1) for name in names.split()}
_WEEKDAYS = {name: number for number, names in enumerate(_WEEKDAY_NAMES) for name in names.split()}
_FULL_WEEKDAYS = [name for name in _WEEKDAYS if name.endswith("day")]
_ORDINALS = {word: number for number, word in enumerate(_ORDINAL_WORDS, start=1)}
_NUMBERS = {word: number for number, word in enumerate(_NUMBER_WORDS, start=1)} | {
    "a": 1, "an": 1, "a couple of": 2, "couple of": 2, "thirty": 30, "sixty": 60, "ninety": 90, "hundred": 100,
}  # fmt: skip
_HOLIDAYS = {
    "new year's day": (1, 1), "new years day": (1, 1), "valentine's day": (2, 14), "valentines day": (2, 14),
    "independence day": (7, 4), "halloween": (10, 31), "christmas eve": (12, 24), "christmas day": (12, 25),
    "christmas": (12, 25), "boxing day": (12, 26), "new year's eve": (12, 31), "new years eve": (12, 31),
}  # fmt: skip
_SEASON_STARTS = {"spring": 3, "summer": 6, "autumn": 9, "fall": 9, "winter": 12}
_DECADES = {"twenties": 2020, "thirties": 1930, "forties": 1940, "fifties": 1950, "sixties": 1960, "seventies": 1970,
            "eighties": 1980, "nineties": 1990}  # fmt: skip


def _any(words: Iterable[str]) -> str:
    """Any of the words, longer ones first."""
    return "(?:" + "|".join(sorted(map(re.escape, words), key=len, reverse=True)) + ")"


_MONTH = _any(_MONTHS) + r"(?![a-z\d])\.?"
_WEEKDAY = _any(_WEEKDAYS) + r"(?![a-z\d])"
_CLEAR_WEEKDAY = _any(name for name in _WEEKDAYS if name not in ("mon", "wed", "sat", "sun")) + r"(?![a-z\d])"
_DAY = r"(?:3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?(?![a-z\d:%])"
_NTH = r"(?:3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)(?![a-z\d])"
_SPELLED = _any(_ORDINALS)
_YEAR = r"(?:18|19|20)\d\d(?![\d:%])"
_NAMED_YEAR = rf"(?:{_YEAR}|'\d\d(?!\d)|(?:last|this|next) year\b)"
_NUMBER = rf"(?:\d{{1,4}}|{_any(_NUMBERS)})"
_UNIT = r"(?:day|week|fortnight|month|quarter|year|decade)"
_PART = r"(?:early|mid|middle of|late|beginning of|start of|end of)"

_STEP = {
    "day": relativedelta(days=1),
    "week": relativedelta(weeks=1),
    "fortnight": relativedelta(weeks=2),
    "month": relativedelta(months=1),
    "quarter": relativedelta(months=3),
    "year": relativedelta(years=1),
    "decade": relativedelta(years=10),
    "century": relativedelta(years=100),
}
_ONE_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Phrase:
    """One calendar phrase: its half-open span in the text, its kind, its fields, and whether it is a date only after
    a word such as "in" or "since" (a bare year, month or "4th" often is none)."""

    start: int
    end: int
    kind: str
    fields: Fields
    needs_cue: bool = False


def _number(words: str) -> int:
    return int(words) if words.isdigit() else _NUMBERS[words]


def _month_number(words: str) -> int:
    return _MONTHS[words.rstrip(".")]


def _day_number(words: str) -> int:
    return _ORDINALS[words] if words in _ORDINALS else int(words.rstrip("stndrh"))


def _year_number(words: str, reference: date) -> int:
    if words.endswith("year"):
        return reference.year + {"last": -1, "this": 0, "next": 1}[words.split()[0]]
    if words.startswith("'"):
        return (1900 if int(words[1:]) >= 50 else 2000) + int(words[1:])
    return int(words)


def _months(year: int, first: int, count: int) -> Days:
    """``count`` whole months from month ``first`` (1-12) of ``year``."""
    start = date(year, first, 1)
    return start, start + relativedelta(months=count) - _ONE_DAY


def _period(unit: str, day: date) -> Days:
    """The calendar week, month, quarter, year or decade around ``day``."""
    if unit == "week":
        start = day - timedelta(days=day.weekday())
        return start, start + timedelta(days=6)
    if unit == "month":
        return _months(day.year, day.month, 1)
    if unit == "quarter":
        return _months(day.year, (day.month - 1) // 3 * 3 + 1, 3)
    if unit == "decade":
        return _months(day.year // 10 * 10, 1, 120)
    return _months(day.year, 1, 12)


def _latest_months(first: int, count: int, reference: date) -> Days:
    """The latest run of months that starts in month ``first`` and has begun by the reference date."""
    return _months(reference.year - (date(reference.year, first, 1) > reference), first, count)


def _part_of(part: str, days: Days) -> Days:
    """The early, middle or late third of a month, a year or several years."""
    third = {"early": 0, "beginning of": 0, "start of": 0, "mid": 1, "middle of": 1}.get(part, 2)
    first, last = days
    if last - first < timedelta(days=31):
        return first + timedelta(days=10 * third), last if third == 2 else first + timedelta(days=10 * third + 9)
    if last - first <= timedelta(days=366):
        return _months(first.year, 4 * third + 1, 4)
    bounds = (0, 4, 7, 10)
    return _months(first.year + bounds[third], 1, 12 * (bounds[third + 1] - bounds[third]))


def _nearest(month: int | None, day: int, weekday: int | None, reference: date, past: bool) -> Days | None:
    """The first such day of ref's month or later (of ref or later where no month is given), or the latest by ref."""
    step = -1 if past else 1
    months: Iterable[tuple[int, int]]
    if month:
        # forty years hold every weekday of 29 February, also across 2100
        start = reference.year + (not past and month < reference.month)
        months = ((year, month) for year in range(start, start + 41 * step, step))
    else:
        start = 12 * reference.year + reference.month - 1
        months = (divmod(count, 12) for count in range(start, start + 41 * step, step))
        months = ((year, zero_based + 1) for year, zero_based in months)
    for year, number in months:
        if not date.min.year <= year <= date.max.year or day > monthrange(year, number)[1]:
            continue
        found = date(year, number, day)
        if (found > reference) if past else (not month and found < reference):
            continue
        if weekday is None or found.weekday() == weekday:
            return found, found
    return None


# dateparser settles the order of numeric dates and two-digit years; a call takes about 1 ms, hence the cache
@lru_cache(maxsize=4096)
def _numeric_date(words: str, order: str) -> date | None:
    found = dateparser.parse(
        words,
        languages=["en"],
        settings={"DATE_ORDER": order, "PARSERS": ["absolute-time"], "STRICT_PARSING": True},
    )
    return found.date() if found else None


def _on_numeric(fields: Fields, reference: date, past: bool) -> Days | None:
    words = fields["numeric"]
    if words.count("/") == 1:
        # a leap year stands in for the year, so that 29/02 parses
        found = _numeric_date(f"{words}/2000", "DMY")
        return _nearest(found.month, found.day, None, reference, past) if found else None
    found = _numeric_date(words, "YMD" if words[:4].isdigit() else "DMY")
    return (found, found) if found else None


def _on_day(fields: Fields, reference: date, past: bool) -> Days | None:
    day, month = _day_number(fields["day"]), _month_number(fields["month"])
    if "year" in fields:
        found = date(_year_number(fields["year"], reference), month, day)
        return found, found
    return _nearest(month, day, _WEEKDAYS.get(fields.get("weekday", "")), reference, past)


def _on_days_of_month(fields: Fields, reference: date, past: bool) -> Days | None:
    first = _on_day(fields, reference, past)
    return (first[0], first[0].replace(day=_day_number(fields["to"]))) if first else None


def _on_nth(fields: Fields, reference: date, past: bool) -> Days | None:
    day = _day_number(fields["day"])
    which = fields.get("which")
    if which in ("last month", "this month", "next month"):
        found = _period("month", reference)[0] + relativedelta(months=("last", "this", "next").index(which[:4]) - 1)
        return found.replace(day=day), found.replace(day=day)
    if which == "last":
        return _nearest(None, day, None, reference - _ONE_DAY, True)
    return _nearest(None, day, _WEEKDAYS.get(fields.get("weekday", "")), reference, past)


def _on_month(fields: Fields, reference: date, past: bool) -> Days | None:
    month = _month_number(fields["month"])
    which = fields.get("which")
    if "year" in fields:
        days = _months(_year_number(fields["year"], reference), month, 1)
    elif which == "next":
        days = _months(reference.year + (month <= reference.month), month, 1)
    elif which == "coming":
        days = _months(reference.year + (month < reference.month), month, 1)
    elif which == "this":
        days = _months(reference.year, month, 1)
    elif which in ("last", "this past"):
        days = _months(reference.year - (month >= reference.month), month, 1)
    else:
        days = _latest_months(month, 1, reference)
    return _part_of(fields["part"], days) if "part" in fields else days


def _on_week_of_month(fields: Fields, reference: date, past: bool) -> Days | None:
    days = _on_month(fields, reference, past)
    assert days is not None
    if fields["nth"] == "last":
        return days[1] - timedelta(days=6), days[1]
    start = days[0] + timedelta(days=7 * (_day_number(fields["nth"]) - 1))
    return start, min(start + timedelta(days=6), days[1])


def _on_share_of_year(fields: Fields, reference: date, past: bool) -> Days | None:
    """Quarters and halves, also in digits: q3, h1."""
    nth, months = (_day_number(fields["nth"]), 3 if fields["share"] in ("q", "quarter") else 6)
    first = (nth - 1) * months + 1
    if first > 12:
        return None
    if "year" in fields:
        return _months(_year_number(fields["year"], reference), first, months)
    return _latest_months(first, months, reference)


def _on_season(fields: Fields, reference: date, past: bool) -> Days | None:
    first, which = _SEASON_STARTS[fields["season"]], fields.get("which")
    if "year" in fields:
        return _months(_year_number(fields["year"], reference), first, 3)
    latest = _latest_months(first, 3, reference)
    if which == "next" or (which == "this" and latest[1] < reference):
        return _months(latest[0].year + 1, first, 3)
    if which in ("last", "this past") and latest[1] >= reference:
        return _months(latest[0].year - 1, first, 3)
    return latest


def _on_year(fields: Fields, reference: date, past: bool) -> Days | None:
    days = _months(_year_number(fields["year"], reference), 1, 12)
    return _part_of(fields["part"], days) if "part" in fields else days


def _on_years(fields: Fields, reference: date, past: bool) -> Days | None:
    first, last = int(fields["year"]), int(fields["to"])
    return (date(first, 1, 1), date(last, 12, 31)) if first < last else None


def _on_decade(fields: Fields, reference: date, past: bool) -> Days | None:
    words = fields["decade"]
    if words in _DECADES:
        first = _DECADES[words]
    else:
        first = int(words[:-1].rstrip("'"))
        if first < 100:
            first += 1900 if first >= 30 else 2000
    days = _months(first, 1, 120)
    return _part_of(fields["part"], days) if "part" in fields else days


def _on_weekday(fields: Fields, reference: date, past: bool) -> Days | None:
    weekday, which = _WEEKDAYS[fields["weekday"]], fields.get("which")
    if week := fields.get("week"):
        monday = _period("week", reference)[0] + timedelta(weeks=("last", "this", "next").index(week.split()[0]) - 1)
        found = monday + timedelta(days=weekday)
    elif which in ("last", "past") or past:
        found = reference - timedelta(days=(reference.weekday() - weekday - 1) % 7 + 1)
    elif which == "next":
        found = _period("week", reference)[0] + timedelta(days=7 + weekday)
    elif which == "this":
        found = reference + timedelta(days=(weekday - reference.weekday()) % 7)
    else:
        found = reference + timedelta(days=(weekday - reference.weekday() - 1) % 7 + 1)
    if "weeks" in fields:
        from_then = reference + timedelta(weeks=_number(fields["weeks"]))
        found = from_then + timedelta(days=(weekday - from_then.weekday()) % 7)
    return found, found


def _on_weekend(fields: Fields, reference: date, past: bool) -> Days | None:
    saturday = _period("week", reference)[0] + timedelta(days=5)
    which = fields.get("which", "this")
    if which in ("last", "past"):
        saturday -= timedelta(weeks=1)
    elif which == "next":
        saturday += timedelta(weeks=1)
    return saturday, saturday + _ONE_DAY


def _on_count(fields: Fields, reference: date, past: bool) -> Days | None:
    """ "last 3 months", "next two weeks": counted from the reference date, in whole steps."""
    step = _STEP[fields["unit"]] * _number(fields["number"])
    return (reference, reference + step) if fields["which"] in ("next", "coming") else (reference - step, reference)


def _on_period(fields: Fields, reference: date, past: bool) -> Days | None:
    unit, which = fields["unit"], fields["which"].removeprefix("the ")
    rolling = fields["which"] in ("the last", "the past", "past", "this past")
    if rolling or unit in ("fortnight", "century"):
        return None if which in ("this", "current", "next", "coming") else (reference - _STEP[unit], reference)
    if which in ("this", "current"):
        moved = reference
    elif which in ("next", "coming"):
        moved = _period(unit, reference)[0] + _STEP[unit]
    else:
        moved = _period(unit, reference)[0] - _STEP[unit]
    days = _period(unit, moved)
    return _part_of(fields["part"], days) if "part" in fields and unit in ("month", "year", "decade") else days


def _on_to_date(fields: Fields, reference: date, past: bool) -> Days | None:
    return _period(fields["unit"], reference)[0], reference


def _on_ago(fields: Fields, reference: date, past: bool) -> Days | None:
    moved = reference - _STEP[fields["unit"]] * _number(fields["number"])
    return _period("year", moved) if fields["unit"] in ("year", "decade") else (moved, moved)


def _on_ahead(fields: Fields, reference: date, past: bool) -> Days | None:
    moved = reference + _STEP[fields["unit"]] * _number(fields.get("number", "a"))
    return moved, moved


_DAY_WORDS = {  # "now" only opens a range
    "day before yesterday": -2, "yesterday": -1, "last night": -1, "today": 0, "now": 0, "this morning": 0,
    "this afternoon": 0, "tomorrow": 1, "day after tomorrow": 2,
}  # fmt: skip


def _on_word(fields: Fields, reference: date, past: bool) -> Days | None:
    found = reference + timedelta(days=_DAY_WORDS[fields["word"]])
    return found, found


def _on_holiday(fields: Fields, reference: date, past: bool) -> Days | None:
    month, day = _HOLIDAYS[fields["holiday"]]
    if "year" in fields:
        found = date(_year_number(fields["year"], reference), month, day)
        return found, found
    return _nearest(month, day, None, reference, past)


def _on_year_month(fields: Fields, reference: date, past: bool) -> Days | None:
    return _months(int(fields["year"]), int(fields["number"]), 1)


# Tried in this order at each position: longer phrases come first, and "none" swallows what only looks like a date.
_RULES: list[tuple[str, str]] = [
    (
        "none",
        rf"\b(?:every|each)(?: other)? (?:{_MONTH}|{_WEEKDAY}|{_UNIT}\b)|(?:{_NTH}|\b{_SPELLED}|\blast)"
        rf" (?:(?:day|date|week|month|business day|working day|{_WEEKDAY}) (?:of|in) "
        r"(?:(?:each|every|the|a|any|any given) )?|of (?:each|every|any) )(?:week|month|quarter|year)\b"
        r"|\b(?:today|yesterday|tomorrow|current)(?:'?s)? dates?\b"
        rf"|\bin today's\b|\b(?:for|within|over) the (?:next|coming) {_NUMBER} {_UNIT}s?\b",
    ),
    (
        "numeric",
        rf"(?<![\w./-])(?P<numeric>{_YEAR}-\d{{1,2}}-\d{{1,2}}|{_YEAR}/\d{{1,2}}/\d{{1,2}}|\d{{1,2}}/\d{{1,2}}/"
        r"(?:\d{4}|\d\d)|\d{1,2}-\d{1,2}-\d{4}|\d{1,2}\.\d{1,2}\.\d{4}|\d{1,2}/\d{1,2})(?![\w/-])(?!\.\d)",
    ),
    (
        "numeric",
        rf"(?<![\w./-])(?P<numeric>{_YEAR}-\d\d-\d\d)(?=t\d\d)",
    ),
    ("years", rf"(?<![\w./-])(?P<year>{_YEAR}) ?[-–] ?(?P<to>{_YEAR})(?![\w/-])(?!\.\d)"),
    (
        "days of month",
        rf"\b(?P<month>{_MONTH}) (?P<day>{_DAY}) ?(?:-|–|to|through) ?(?P<to>{_DAY})(?!-)"
        rf"(?:,? (?P<year>{_NAMED_YEAR}))?",
    ),
    (
        "day",
        rf"(?<![\w./:])(?<!\d,)(?:(?P<weekday>{_WEEKDAY}),? )?(?:the )?(?P<day>{_DAY}|{_SPELLED})(?: day)?(?: of)? "
        rf"(?P<month>{_MONTH})(?:,? (?:of )?(?P<year>{_NAMED_YEAR}))?",
    ),
    (
        "day",
        rf"\b(?:(?P<weekday>{_WEEKDAY}),? )?(?:the )?(?P<month>{_MONTH}),? (?:the )?(?P<day>{_DAY}|{_SPELLED})"
        rf"(?!\.\d)(?! of )(?:,? (?:of )?(?P<year>{_NAMED_YEAR}))?",
    ),
    (
        "week of month",
        rf"\b(?P<nth>first|second|third|fourth|last|[1-4](?:st|nd|rd|th)) week (?:of|in) (?P<month>{_MONTH})"
        rf"(?:,? (?P<year>{_NAMED_YEAR}))?",
    ),
    (
        "share of year",
        rf"\b(?:the )?(?P<nth>first|second|third|fourth|[1-4](?:st|nd|rd|th)) (?P<share>quarter|half) of "
        rf"(?P<year>{_NAMED_YEAR})",
    ),
    ("share of year", rf"\b(?P<share>q|h)(?P<nth>[1-4])(?: of|,|-)? ?(?P<year>{_NAMED_YEAR})"),
    ("share of year", rf"(?<![\w.])(?P<year>{_YEAR})[ -]?(?P<share>q)(?P<nth>[1-4])\b"),
    ("bare quarter", r"(?<![\w-])(?P<share>q)(?P<nth>[1-4])\b(?![-.])"),
    (
        "decade",
        rf"\b(?:the )?(?:(?P<part>{_PART})[ -](?:the )?)?(?P<decade>(?:18|19|20)\d0'?s)\b"
        rf"|\bthe (?:(?P<part2>{_PART})[ -](?:the )?)?(?P<decade2>'?\d0'?s|{_any(_DECADES)})\b",
    ),
    (
        "month",
        rf"\b(?:the )?(?P<part>{_PART})[ -](?P<month>{_MONTH})(?:,? (?:of )?(?P<year>{_NAMED_YEAR}))?",
    ),
    ("year", rf"\b(?:the )?(?P<part>{_PART})[ -](?P<year>{_NAMED_YEAR})"),
    ("month", rf"\b(?P<month>{_MONTH})(?: of|,)? ?(?P<year>{_NAMED_YEAR})(?!-)"),
    ("month", rf"\b(?P<which>last|next|this past|this) (?P<month>{_MONTH})"),
    ("bare month", rf"(?<![\w-])(?P<month>{_MONTH})(?!-?\w)"),
    (
        "season",
        rf"\b(?P<season>{_any(_SEASON_STARTS)})(?: of|,)? (?P<year>{_NAMED_YEAR})",
    ),
    (
        "season",
        rf"(?:\b(?P<which>last|next|this past|this)|(?:(?<=in )|(?<=during )|(?<=over )|(?<=since )|(?<=until ))the) "
        rf"(?P<season>{_any(_SEASON_STARTS)})\b(?! of)",
    ),
    (
        "weekday",
        rf"\b(?P<weekday>{_WEEKDAY}),? (?:of )?(?P<week>(?:last|this|next) week)\b"
        rf"|\b(?P<week2>(?:last|this|next) week)(?:'s)?,? (?:on )?(?P<weekday2>{_WEEKDAY})",
    ),
    ("weekday", rf"\b(?P<weekday>{_WEEKDAY}) in (?P<weeks>{_NUMBER}) weeks?\b"),
    ("nth", rf"\b(?:(?:next|this) )?(?P<weekday>{_WEEKDAY}),? (?:the )?(?P<day>{_NTH})"),
    ("weekday after", rf"\b(?:(?:the )?(?P<weekday>{_WEEKDAY}) after\b(?! \w)|that (?P<weekday2>{_WEEKDAY}))"),
    ("weekday", rf"\b(?P<which>last|past|next|this) (?P<weekday>{_WEEKDAY})"),
    ("bare weekday", rf"(?<![\w-])(?P<weekday>{_CLEAR_WEEKDAY})(?![-.'_(]\w)"),
    ("weekend", r"\b(?P<which>last|past|next|this) weekend\b|\b(?:over|at|during|on) the weekend\b"),
    (
        "counted",
        rf"\b(?:the )?(?P<which>last|past|previous|next|coming) (?P<number>{_NUMBER}) "
        rf"(?:calendar )?(?P<unit>{_UNIT})s?\b(?! old)",
    ),
    (
        "period",
        rf"\b(?:(?:the )?(?P<part>{_PART})[ -])?(?P<which>the last|the past|the previous|the next|the coming|this past"
        r"|the current|last|past|previous|next|coming|this|current) "
        r"(?P<unit>week|fortnight|month|quarter|year|decade|century)\b"
        r"(?! of\b)(?!-)",
    ),
    (
        "period",
        r"(?:(?<=in )|(?<=over )|(?<=during )|(?<=within ))(?P<which>the (?:last|past)) (?P<unit>day)\b(?! of\b)",
    ),
    ("to date", r"\b(?P<unit>week|month|quarter|year) to date\b"),
    ("ago", rf"(?<![\w.,])(?P<number>{_NUMBER}) (?P<unit>{_UNIT})s? ago\b"),
    ("ahead", r"\ba (?P<unit>week|fortnight) (?:from )?today\b"),
    (
        "ahead",
        rf"\bin (?P<number>{_NUMBER}) (?P<unit>day|week|fortnight|month)(?:s|s'|'s)?(?: time)?\b(?! of\b)"
        rf"|(?<![\w.,])(?P<number2>{_NUMBER}) (?P<unit2>day|week|fortnight|month)s? from (?:now|today)\b",
    ),
    ("word", r"\b(?P<word>now)(?= (?:until|till|til|to|through)\b)"),
    ("word", rf"\b(?:the )?(?P<word>{_any(word for word in _DAY_WORDS if word != 'now')})\b(?!\(|-)"),
    ("holiday", rf"\b(?P<holiday>{_any(_HOLIDAYS)})\b(?:,? (?P<year>{_NAMED_YEAR}))?"),
    (
        "nth",
        rf"\b(?:(?P<which>last) )?(?:the )?(?<![\w.-])(?P<day>{_NTH})"
        rf"(?: (?:of )?(?P<which2>(?:last|this|next) month)| of the month\b)?",
    ),
    (
        "bare day",
        rf"(?<![\w.:-])(?P<day>{_DAY})(?= ?(?:-|–|to|until|till|through|and) ?(?:the )?{_DAY} (?:of )?{_MONTH})",
    ),
    ("year month", rf"(?<![\w./-])(?P<year>{_YEAR})-(?P<number>0[1-9]|1[0-2])(?![\w/-])"),
    ("bare year", rf"(?<![\w./$£€#-])(?P<year>{_YEAR})(?![\w/-])(?![.,]\d)"),
]
_RESOLVERS: dict[str, Callable[[Fields, date, bool], Days | None]] = {
    "numeric": _on_numeric,
    "years": _on_years,
    "days of month": _on_days_of_month,
    "day": _on_day,
    "week of month": _on_week_of_month,
    "share of year": _on_share_of_year,
    "bare quarter": _on_share_of_year,
    "decade": _on_decade,
    "month": _on_month,
    "bare month": _on_month,
    "year month": _on_year_month,
    "year": _on_year,
    "bare year": _on_year,
    "season": _on_season,
    "weekday": _on_weekday,
    "weekday after": _on_weekday,
    "bare weekday": _on_weekday,
    "nth": _on_nth,
    "bare day": _on_nth,
    "weekend": _on_weekend,
    "counted": _on_count,
    "period": _on_period,
    "to date": _on_to_date,
    "ago": _on_ago,
    "ahead": _on_ahead,
    "word": _on_word,
    "holiday": _on_holiday,
}
_PATTERNS = [re.compile(pattern) for _, pattern in _RULES]
_SCAN = re.compile("|".join("(" + re.sub(r"\(\?P<\w+>", "(?:", pattern) + ")" for _, pattern in _RULES))


def find_phrases(text: str) -> list[Phrase]:
    """Calendar phrases of a text in lower case with plain spaces, from left to right, without overlaps."""
    found = []
    for match in _SCAN.finditer(text):
        index = (match.lastindex or 1) - 1
        kind, inner = _RULES[index][0], _PATTERNS[index].match(text, match.start())
        if kind == "none" or inner is None:
            continue
        fields = {name.rstrip("2"): value for name, value in inner.groupdict().items() if value is not None}
        found.append(Phrase(match.start(), match.end(), kind, fields, _doubtful(kind, fields, match.start())))
    return found


def _doubtful(kind: str, fields: Fields, position: int) -> bool:
    """Whether the phrase is a date only behind a cue."""
    if kind == "bare weekday":
        return fields["weekday"] not in _FULL_WEEKDAYS
    if kind == "numeric":
        return fields["numeric"].count("/") == 1
    if kind == "nth":
        return "which" not in fields and "weekday" not in fields and position > 0
    if kind == "day":
        # "you may 5", "option 1 may": the modal verb
        modal = fields["month"].rstrip(".") in ("may", "march", "mar", "dec", "sep")
        return modal and position > 0 and "year" not in fields and fields["day"].isdigit()
    return kind in ("bare year", "bare month", "bare quarter", "bare day", "year month")


def complete_phrase(phrase: Phrase, other: Phrase) -> Phrase:
    """The phrase with the month and year it shares with a later one: "the 3rd" [to the 6th of January 2021]."""
    fields = dict(phrase.fields)
    if "year" in fields or "year" not in other.fields or phrase.kind in ("numeric", "years", "year month"):
        return phrase
    if phrase.kind in ("nth", "bare day") and "month" in other.fields:
        return replace(phrase, kind="day", fields=fields | {key: other.fields[key] for key in ("month", "year")})
    if "month" in fields or "share" in fields or "season" in fields:
        return replace(phrase, fields=fields | {"year": other.fields["year"]})
    return phrase


def as_coming_month(phrase: Phrase) -> Phrase:
    """The bare month as the first one that is not over: "May" in "until May"."""
    return replace(phrase, fields=phrase.fields | {"which": "coming"})


def resolve_phrase(phrase: Phrase, reference: date, past: bool = False) -> Days | None:
    """First and last day of the phrase, or None where the calendar has no such day (31 June, a year beyond 9999).

    ``past`` prefers the latest occurrence by the reference date where the phrase leaves month or year open.
    """
    try:
        found = _RESOLVERS[phrase.kind](phrase.fields, reference, past)
    except (ValueError, OverflowError):
        return None
    # "March 30 to 2" runs backwards
    return found if found is not None and found[0] <= found[1] else None
