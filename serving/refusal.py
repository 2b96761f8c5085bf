"""Why a request gets no decision, as an exception that every protocol can tell its caller."""

from __future__ import annotations

import math


class Refused(Exception):
    """A request that is not answered: HTTP status, one sentence, and where waiting helps, for how many seconds.

    The sentence never repeats what the request says: it names the field and what was expected.
    """

    def __init__(self, status: int, sentence: str, outcome: str, retry_after: float | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.outcome = status, sentence, outcome
        self.retry_after = None if retry_after is None else max(1, math.ceil(retry_after))


def queue_full(wait: float) -> Refused:
    """429: as many requests wait as may wait; `wait` is how long they take, in seconds."""
    return Refused(429, "the queue is full, try again later", "overloaded", wait)


def deadline_passed(wait: float) -> Refused:
    """503: the deadline passed, or would pass before a decision is made."""
    return Refused(503, "no decision within the deadline, try again later", "deadline", wait)


def not_ready() -> Refused:
    """503: still warming up, or stopping."""
    return Refused(503, "the router is not ready, try again later", "not_ready", 1)


def head_too_large(most: int) -> Refused:
    """431: the request line and the headers."""
    return Refused(431, f"headers: expected at most {most} bytes", "too_large")


def head_too_slow(seconds: float) -> Refused:
    """408: the request line and the headers."""
    return Refused(408, f"headers: expected within {seconds:g} seconds", "bad_input")
