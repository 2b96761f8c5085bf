"""English time expressions in a query, resolved to closed intervals of days against a reference date.

What a phrase such as "last two weeks" or "3 March" means is in ``calendar_phrases``. Here phrases get their role from
the words before them and are joined. Conventions (*ref* is the reference date):

* "from A to B", "between A and B", "A until B", "A - B": A to B, both included. A takes over the year of B, and with it
  the month ("the 3rd to the 6th of January 2021"); without a year each end is resolved by itself, as the annotators of
  NLU++ do ("the 16th to the 22nd of April" on 15 March is 16 March to 22 April). An end before its start is the first
  such day after the start ("from Monday to Wednesday").
* "since A", "starting A", "from A on": open end, from the first day of A. "since" looks back: "since November" is
  last November. "after A" starts the day after A.
* "until A", "up to A", "till A": open start, to the last day of A; "until May" is the coming May. "before A" ends the
  day before A; "by A" ends with A.
  A deadline still to come is the day itself ("by Wednesday", "before the 14th of January").
* "from A" alone is A when A is past ("reports from 2019") and open-ended when it is to come.
* Arrivals and stays without an end ("arriving on Friday", "3 nights, 9 December") start at the date and are open;
  departures ("leaving on Thursday") are open-started; both together are one interval.
* Of several unrelated expressions the first counts.
* A bare year, month, "4th", "12/03" or abbreviated weekday needs such a word or "in", "on", "during"; so "HTTP 404",
  "top 10", "Windows 2019", "the 2nd argument" and "you may march" are no dates.
* Only the first 2,000 characters and the first 32 phrases in them are read.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from datetime import date, timedelta

from routewright.search_router.calendar_phrases import (
    Days,
    Phrase,
    as_coming_month,
    complete_phrase,
    find_phrases,
    resolve_phrase,
)
from routewright.search_router.decision import Interval

MAX_CHARS = 2000
MAX_PHRASES = 32
EARLIEST = date(1970, 1, 1)

_ONE_DAY = timedelta(days=1)
# one character to one, so that spans fit the original text; other letters than A-Z stay as they are
_PLAIN = str.maketrans(
    string.ascii_uppercase + "\u2019\u2018\u00a0\t\n\r\u2014",
    string.ascii_lowercase + "''    \u2013",
)
# nearly every query without a date stops here
_HINT = re.compile(
    r"\d|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun|to(?:day|morrow)|yesterday|day"
    r"|night|week|fortnight|month|quarter|year|decade|century|spring|summer|autumn|fall|winter|christmas|new year"
    r"|valentine|independence|halloween|boxing|this (?:morn|after)|(?:twen|thir|for|fif|six|seven|eigh|nine)ties)"
)

_CUES = {
    "since": "since|ever since",
    "start": "starting|starting from|starting on|starting in|start from|start on|starts on|beginning|beginning in"
    "|beginning on|only from|valid from|as of|effective",
    "from": "from",
    "after": "after|later than",
    "until": "until|till|til|'til|up to|up until|through|thru|no later than",
    "before": "before|prior to|earlier than",
    "by": "by",
    "between": "between",
    "in": "in|during|throughout|around|within|over|back in",
    "on": "on|at|of|for|than|the|this|night of|to|say|leave|leaving|arrive|arriving|coming"
    "|check[- ]?out|check[- ]?in|checking out|checking in",
}
_CUE = re.compile(
    r"(?<![\w-])(?:"
    + "|".join(f"(?P<{role}>{words})" for role, words in _CUES.items())
    + r")(?: (?:the|about|around|roughly|exactly|a|year|years))?[ ,]{1,3}$"
)
_CUES_OF_YEARS = ("since", "start", "from", "after", "until", "before", "by", "between", "in")
_CUES_OF_ANY = (*_CUES_OF_YEARS, "on")
# the nearest of these before a date says which end of a stay it is; what is booked for an hour is no stay
_STAY_VERB = re.compile(
    r"\b(?:(?P<arrival>arriv(?:e|es|ing|al)|coming|come|checking in|check-?in|will join|stay|staying)"
    r"|(?P<booking>re-?book|(?<!a )(?<!the )book|booking|reservation)|"
    r"(?P<departure>leav(?:e|ing)|depart(?:ing)?|checking out|check-?out)|(?P<in>check in)"
    r"|(?P<out>check out))\b"
)
_BY_THE_HOUR = re.compile(
    r"\b(?:tables?|restaurant|dinner|lunch|breakfast|massage|spa|session|slot|appointment|meeting|call|ticket|event)\b"
)
_IS_ARRIVAL = re.compile(r" (?:is|will be) (?:my|our|the) arrival\b")
_MOVED_TO = re.compile(r"\b(?:shift|move|reschedule|postpone|push|schedule)\b[^.?!;]{1,40} to (?:the )?$")
_TIME_OF_DAY = re.compile(r"\btime\b|\d:\d\d|\b[ap]\.?m\b|\bpast \d|\b(?:at|around|between|after) \d")
_CLAUSE_END = re.compile(r"[.?!;]")
_NIGHTS = re.compile(
    r"(?<!past )(?<!to )(?<![:\d] )(?<![:\d])\b(?:\d{1,2}|one|two|three|four|five|six|seven) nights?\b"
    r"|(?<!my )(?<!our )(?<!the )\b(?:room|bedroom|suite)\b"
)
_JOIN = re.compile(
    r",? ?(?:(?P<to>[-–]|to|until|till|til|up to|through|thru)|(?P<and>and|&)|, ?(?:and )?(?:leaving|until))"
    r"(?: (?:to|the|about|on))? ?"
)
_ONWARDS = re.compile(r" ?,? ?(?:on\b(?! \w)|onwards?\b|and (?:later|after)\b)")
# what may follow "the 4th" when it is a day: no noun
_AFTER_NTH = re.compile(
    r" ?(?:$|[.,;:?!)\-–]|'|(?:at|for|to|until|till|and|with|in|by|if|so|how|what|when|inclusive|please|we|i|is|was"
    r"|two|three|thanks|from|my|it|or)\b)"
)
_COUNTED_NOUN = re.compile(
    r" ?(?:[x×*%°=<>]|(?:px|pixels?|ms|s|sec|seconds?|minutes?|hours?|rows?|columns?|lines?|items?|records?|bytes?"
    r"|kb|mb|gb|hz"
    r"|files?|users?|requests?|steps?|iterations?|epochs?|words?|tokens?|char(?:acter)?s?|points?|times|people|dollars?"
    r"|euros?|pounds?|meters?|metres?|feet|miles|km|kg|m|elements?|values?|samples?|documents?|queries|years?|days?|weeks?"
    r"|months?|error|status|code)\b)"
)
_VERB = re.compile(r" (?:be|not|have|has|cause|also|or may|fail|result|need|never|only|still|differ|vary|cases)\b")
_NOT_A_WEEKDAY = re.compile(
    r"(?:\b(?:every|each|black|good|ash|cyber|super|bloody|first|second|third|fourth|fifth|per|ruby)"
    r"|\dth|\dst|\drd|\dnd) $"
)
_VERSION = re.compile(r"\b(?:version|v|api|policy|rfc|iso)[ :=\"']{0,3}$")


@dataclass(frozen=True)
class TimeExpression:
    """A time expression: ``text[start:end]`` of the query and the days it means."""

    start: int
    end: int
    text: str
    interval: Interval


@dataclass(frozen=True)
class _Part:
    """A phrase, or two joined ones: its span, its days, its role, and the phrase where it may be the end of a range.

    Roles: "days"; "start" and "end" leave the other end open; "arrival" and "departure" do so for days to come; "in"
    and "out" (check in, check out) only when they meet each other.
    """

    start: int
    end: int
    days: Days
    role: str
    phrase: Phrase | None = None

    @property
    def yearless(self) -> bool:
        return self.phrase is not None and self.phrase.kind == "day" and "year" not in self.phrase.fields


_OPENING, _CLOSING = ("start", "arrival", "in"), ("end", "departure", "out")


def find_time_expression(text: str, reference_date: date) -> TimeExpression | None:
    """The first time expression of ``text`` and its interval; None where there is none.

    Case does not matter. Reads the first 2,000 characters. Never raises on any text.
    """
    plain = text[:MAX_CHARS].translate(_PLAIN)
    if not _HINT.search(plain):
        return None
    # runs of spaces count as one; ``places`` leads back to the original text
    places = [place for place, letter in enumerate(plain) if letter != " " or plain[place - 1 : place] != " "]
    found = _first_interval("".join(plain[place] for place in places), reference_date)
    if found is None:
        return None
    start, end, interval = found
    start, end = places[start], places[end - 1] + 1
    return TimeExpression(start, end, text[start:end], interval)


def _first_interval(plain: str, reference: date) -> tuple[int, int, Interval] | None:
    """Span and interval of the first expression, joined with a later one where the two are ends of one interval."""
    parts = _parts(plain, reference)
    if not parts:
        return None
    part = parts[0]
    for other in parts[1:]:
        opening, closing = (part, other) if part.role in _OPENING else (other, part)
        if opening.role not in _OPENING or closing.role not in _CLOSING or not _near(plain, part, other):
            continue
        first, last = opening.days[0], closing.days[1]
        if last < first and closing.phrase is not None:
            moved = resolve_phrase(closing.phrase, first)
            last = moved[1] if moved else last
        if first <= last:
            start, end = min(opening.start, closing.start), max(opening.end, closing.end)
            return start, end, Interval(first, last)
    first, last = part.days
    # a stay lies ahead, also on a day of this month that "this month or later" put behind
    to_come = first >= (reference.replace(day=1) if part.yearless else reference)
    if part.role == "start" or (part.role == "arrival" and to_come):
        interval = Interval(first, None)
    elif part.role == "end" or (part.role == "departure" and to_come):
        interval = Interval(None, last)
    else:
        interval = Interval(first, last)
    return part.start, part.end, interval


def resolve_interval(text: str, reference_date: date) -> Interval | None:
    """The closed interval of days that the first time expression in ``text`` means; None where there is none.

    >>> resolve_interval("errors in the last two weeks", date(2024, 6, 15))
    Interval(start=datetime.date(2024, 6, 1), end=datetime.date(2024, 6, 15))
    """
    found = find_time_expression(text, reference_date)
    return found.interval if found else None


def interval_iou(a: Interval | None, b: Interval | None, today: date) -> float:
    """Days in both intervals over days in either (Jaccard), in [0, 1]; 1 for two None, 0 for one.

    Open starts count from 1970-01-01 and open ends to ``today``, or from and to the outermost given day of the two
    intervals where that lies further out.
    """
    if a is None or b is None:
        return float(a is b)
    given = [day for day in (a.start, a.end, b.start, b.end) if day is not None]
    floor, ceiling = min(EARLIEST, *given), max(today, *given)
    (a_first, a_last), (b_first, b_last) = (
        ((i.start or floor).toordinal(), (i.end or ceiling).toordinal()) for i in (a, b)
    )
    shared = max(0, min(a_last, b_last) - max(a_first, b_first) + 1)
    return shared / (a_last - a_first + 1 + b_last - b_first + 1 - shared)


def _parts(plain: str, reference: date) -> list[_Part]:
    """Phrases that are dates in their context, joined into ranges where the words say so."""
    phrases = find_phrases(plain)[:MAX_PHRASES]
    parts: list[_Part] = []
    index = 0
    while index < len(phrases):
        phrase = phrases[index]
        cue = _cue(plain, phrase)
        later = phrases[index + 1] if index + 1 < len(phrases) else None
        if later is not None and _joined(plain, phrase, later, cue):
            days = _range(phrase, later, reference, past=cue == "since")
            if days is not None:
                parts.append(_Part(_with_cue(plain, phrase, cue), later.end, days, "days"))
                index += 2
                continue
        if _is_date(plain, phrase, cue):
            anchor = parts[-1].days[0] if parts else reference
            part = _single(plain, phrase, cue, reference, anchor)
            if part is not None:
                parts.append(part)
        index += 1
    return parts


def _cue(plain: str, phrase: Phrase) -> str | None:
    match = _CUE.search(plain, max(0, phrase.start - 32), phrase.start)
    return match.lastgroup if match else None


def _with_cue(plain: str, phrase: Phrase, cue: str | None) -> int:
    if cue in (None, "on"):
        return phrase.start
    match = _CUE.search(plain, max(0, phrase.start - 32), phrase.start)
    return match.start() if match else phrase.start


def _is_date(plain: str, phrase: Phrase, cue: str | None) -> bool:
    """Whether a phrase is a date here and not a number, a verb or a name."""
    if not _followed_well(plain, phrase):
        return False
    if phrase.kind == "bare weekday" and _NOT_A_WEEKDAY.search(plain, max(0, phrase.start - 12), phrase.start):
        return False
    if phrase.kind == "numeric" and _VERSION.search(plain, max(0, phrase.start - 12), phrase.start):
        return False
    if not phrase.needs_cue:
        return True
    if phrase.kind in ("bare year", "bare month", "bare quarter", "year month"):
        return cue in _CUES_OF_YEARS
    return cue in _CUES_OF_ANY


def _followed_well(plain: str, phrase: Phrase) -> bool:
    if phrase.kind in ("nth", "bare day"):
        return _AFTER_NTH.match(plain, phrase.end) is not None
    if phrase.kind in ("bare year", "years"):
        return _COUNTED_NOUN.match(plain, phrase.end) is None
    if phrase.fields.get("month") == "may" and "year" not in phrase.fields:
        return _VERB.match(plain, phrase.end) is None
    return True


def _joined(plain: str, phrase: Phrase, later: Phrase, cue: str | None) -> bool:
    """Whether the words between two phrases make them a range."""
    if later.start - phrase.end > 16:
        return False
    join = _JOIN.fullmatch(plain, phrase.end, later.start)
    if join is None or (join["and"] and cue not in ("between", "from")):
        return False
    if not _followed_well(plain, later):
        return False
    # "resize 2018 to 2020", "1/2 - 3/4": two doubtful phrases are no range without a cue, but months and days are
    return bool(cue) or not (phrase.needs_cue and later.needs_cue and phrase.kind in ("bare year", "numeric"))


def _range(phrase: Phrase, later: Phrase, reference: date, past: bool) -> Days | None:
    first = resolve_phrase(complete_phrase(phrase, later), reference, past)
    if first is None:
        return None
    last = resolve_phrase(later, first[0] if later.kind == "weekday after" else reference, past)
    if last is not None and last[1] < first[0]:
        # the later end is the first such day after the earlier one; a month or season began a year before
        moved = resolve_phrase(later, first[0])
        if moved is not None and moved[1] >= first[0]:
            last = moved
        else:
            first = resolve_phrase(phrase, last[0]) or first
    return (first[0], last[1]) if last is not None and first[0] <= last[1] else None


def _single(plain: str, phrase: Phrase, cue: str | None, reference: date, anchor: date) -> _Part | None:
    """One phrase with its role."""
    if cue == "until" and phrase.kind == "bare month":
        phrase = as_coming_month(phrase)
    days = resolve_phrase(phrase, anchor if phrase.kind == "weekday after" else reference, past=cue == "since")
    # no day lies before the first or after the last one of the calendar
    if days is None or days[0] == date.min or days[1] == date.max:
        return None
    start, (first, last) = _with_cue(plain, phrase, cue), days
    role = "days"
    if phrase.kind in ("years", "days of month"):
        role = "days"
    elif cue in ("since", "start"):
        role = "start"
    elif cue == "from":
        role = "start" if first >= reference or _ONWARDS.match(plain, phrase.end) else "days"
    elif cue == "after":
        role, first = "start", last + _ONE_DAY
    elif cue == "until" or plain[: phrase.start] == "to ":
        role = "end"
    elif cue in ("before", "by"):
        deadline = first == last and first > reference
        if phrase.fields.get("part") == "end of" and last > reference:
            first = last
        elif not deadline:
            role, last = "end", last if cue == "by" else first - _ONE_DAY
    elif not _MOVED_TO.search(plain, 0, phrase.start):
        role = _stay_role(plain, start, phrase.end) or ("arrival" if _NIGHTS.search(plain) else "days")
        if first < last:
            role = "days"
    # the day before a date does not move with it
    return _Part(start, phrase.end, (first, last), role, phrase if cue not in ("before", "after") else None)


def _near(plain: str, part: _Part, other: _Part) -> bool:
    """Whether two parts stand close together in one sentence."""
    return other.start - part.end <= 60 and not re.search(r"[.?!] ", plain[part.end : other.start])


def _stay_role(plain: str, position: int, end: int) -> str | None:
    """The end of a stay that the nearest verb of arrival or departure in this clause gives to a date."""
    if _IS_ARRIVAL.match(plain, end):
        return "arrival"
    window = max(0, position - 75)
    if _BY_THE_HOUR.search(plain, window, position):
        return None
    role = None
    for verb in _STAY_VERB.finditer(plain, window, position):
        role = None if _CLAUSE_END.search(plain, verb.end(), position) else verb.lastgroup
    if role in ("out", "booking"):
        timed = _TIME_OF_DAY.search(plain) is not None
        return (role if role == "out" else None) if timed else ("departure" if role == "out" else "arrival")
    return role
