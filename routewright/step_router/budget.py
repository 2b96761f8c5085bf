"""Escalation under a budget of LLM calls, over one episode and over a day.

Below a fixed threshold the first steps that gain would use the budget up. Instead the threshold rises to the level that the
steps still to come are expected to pass only as often as there are calls left (a certainty-equivalent online knapsack),
and falls back to the fixed one when calls are plenty. A budget is a hard limit: with none left, or a budget of 0,
nothing is escalated.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta

import numpy as np
from numpy.typing import ArrayLike

from routewright.errors import BadInput


def paced_threshold(threshold: float, calls_left: int, steps_left: float, benefits: ArrayLike) -> float:
    """max(τ, the (1 − b/s) quantile of `benefits`), b calls and s steps left, this one included; inf for b ≤ 0.

    ``benefits`` are those of past decisions of the same kind, sorted or not; empty, only τ counts. With b ≥ s calls are
    plenty: τ.
    """
    if calls_left <= 0:
        return math.inf
    known = np.asarray(benefits, dtype=float)
    if calls_left >= steps_left or known.size == 0:
        return threshold
    # the inverse of the empirical distribution: at most b/s of the known ones lie strictly above
    return max(threshold, float(np.quantile(known, 1 - calls_left / steps_left, method="inverted_cdf")))


def check_calls(calls: int) -> int:
    """The budget itself; BadInput where it is not a whole number of at least 0."""
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 0:
        raise BadInput(f"budget: expected a whole number of calls of at least 0, found {calls!r}")
    return calls


@dataclass
class EpisodeBudget:
    """At most `calls` LLM calls in an episode of `max_steps` steps."""

    calls: int
    threshold: float
    max_steps: int
    benefits: Sequence[float] = ()
    spent: int = 0

    def __post_init__(self) -> None:
        check_calls(self.calls)

    def threshold_at(self, step: int) -> float:
        """The threshold for the step with this number (from 0)."""
        return paced_threshold(self.threshold, self.calls - self.spent, max(1, self.max_steps - step), self.benefits)


@dataclass
class DayBudget:
    """At most `calls` LLM calls a day (in the time zone of `now`), for about `decisions` decisions a day.

    The decisions still expected today shrink evenly with the hours left, so calls saved in a calm morning are spent in
    the evening. One object serves all threads of a process.
    """

    calls: int
    threshold: float
    decisions: float
    benefits: Sequence[float] = ()
    spent: int = 0
    day: date | None = None
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_calls(self.calls)
        if not self.decisions > 0:
            raise BadInput(f"decisions: expected a number of decisions a day above 0, found {self.decisions}")

    def threshold_at(self, now: datetime) -> float:
        """The threshold now; a later date starts a new day's budget, an earlier one (a clock set back) does not."""
        with self.lock:
            if self.day is None or now.date() > self.day:
                self.day, self.spent = now.date(), 0
            start = now.replace(hour=0, minute=0, second=0, microsecond=0)
            left = 1 - (now - start) / timedelta(days=1)
            return paced_threshold(self.threshold, self.calls - self.spent, max(1.0, self.decisions * left), self.benefits)


def escalate(
    benefit: float, step: int, episode: EpisodeBudget, day: DayBudget | None = None, now: datetime | None = None
) -> bool:
    """Whether to call the LLM on this step: its benefit exceeds the threshold of every budget. A yes is spent from each.

    ``benefit`` is the fall of P(failure); BadInput outside [−1, 1]. With a `day`, `now` is required.
    """
    if not -1 <= benefit <= 1:
        raise BadInput(f"benefit: expected a difference of probabilities, found {benefit}")
    if benefit <= episode.threshold_at(step):
        return False
    if day is not None:
        if now is None:
            raise BadInput("now: a day's budget needs the time of the decision")
        with day.lock:  # nobody else may take the last call between the look and the spending
            if benefit <= day.threshold_at(now):
                return False
            day.spent += 1
    episode.spent += 1
    return True
