"""Dynamic batching: one worker takes what waits, never later than a deadline, never more than a bound.

A batch is whatever waits when the worker is free, so a lone request does not wait for company. When more comes than can
be decided, requests are refused at once instead of waiting ever longer: with 429 where the queue is full, with 503 where
the measured pace says that the deadline would pass. A decision that comes after its deadline is not sent.

Where a forward pass takes long, and leaves the interpreter to others meanwhile, the worker is a thread. Where a decision
is Python code of a millisecond it is the event loop itself: a thread would take turns with it at every system call, each
of up to a switch interval, and under overload what waits in the sockets is then not even refused in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from routewright.errors import BadInput
from serving.refusal import Refused, deadline_passed, not_ready, queue_full

_log = logging.getLogger(__name__)
_PACE_WEIGHT = 0.2  # of the newest batch in the running mean of seconds a decision

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class Job(Generic[In, Out]):
    """One item that waits for its decision; times are `time.perf_counter()`."""

    item: In
    arrived: float
    deadline: float
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Out]

    def settle(self, outcome: Out | Exception) -> None:
        """Give the answer or the error to whoever waits, in the event loop."""
        if self.answer.done():  # given up at its deadline
            return
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class Batcher(Generic[In, Out]):
    """Runs `decide` on batches, in one thread of its own or, ``in_loop``, between two looks at the sockets.

    ``decide`` takes the items and how long each has waited (seconds) and returns an answer or an exception for each;
    what it raises itself is every item's. At most ``max_batch`` items a call, at most ``max_waiting`` waiting, each
    decided within ``deadline_s`` of its arrival or refused.
    """

    def __init__(
        self,
        decide: Callable[[Sequence[In], Sequence[float]], Sequence[Out | Exception]],
        max_batch: int,
        max_waiting: int,
        deadline_s: float,
        in_loop: bool = False,
    ) -> None:
        self._decide, self.max_batch, self.max_waiting, self.deadline_s = decide, max_batch, max_waiting, deadline_s
        self._waiting: deque[Job[In, Out]] = deque()
        self._condition = threading.Condition()
        self._stopping = False
        self._pace = 0.0  # seconds a decision, a running mean; 0 before the first
        self._running = 0  # items in the worker's hands
        self._queue_since: float | None = None  # when the last batch ended, if it left some waiting
        # a pace is an estimate; and where the loop decides, what it has not read yet has waited in the sockets before
        self._longest_wait = deadline_s / (4 if in_loop else 2)
        self._turn_is_due = False
        self._thread: threading.Thread | None = None
        if not in_loop:
            self._thread = threading.Thread(target=self._work, name="decisions", daemon=True)
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Items that wait, those being decided not counted."""
        return len(self._waiting)

    def expected_wait(self) -> float:
        """Seconds until all that wait would be decided at the measured pace."""
        return (len(self._waiting) + self._running) * self._pace

    def check_room(self, items: int = 1, on_the_way: int = 0) -> None:
        """Raise `Refused` where that many more items cannot be decided in time; cheap, to be asked before parsing.

        ``on_the_way`` are requests that were let in and are not answered, whether they have come to the queue or not.
        """
        if self._stopping:
            raise not_ready()
        before = max(len(self._waiting), on_the_way - self._running)
        if before and before + items > self.max_waiting:
            raise queue_full(self.expected_wait())
        # with nobody waiting, an item is let in whatever the pace says
        if before and (before + self._running + items) * self._pace > self._longest_wait:
            raise deadline_passed(self.expected_wait())

    async def submit(self, items: Sequence[In]) -> list[Out]:
        """The answers of a request's items, in order; the first error of any of them, `Refused` at the deadline."""
        self.check_room(len(items))
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        jobs = [Job(item, now, now + self.deadline_s, loop, loop.create_future()) for item in items]
        with self._condition:
            if self._stopping:
                raise not_ready()
            self._waiting.extend(jobs)
            self._condition.notify()
        if self._thread is None and not self._turn_is_due:
            self._turn_is_due = True
            loop.call_soon(self._turn, loop)
        answers = [job.answer for job in jobs]
        try:
            async with asyncio.timeout(self.deadline_s):
                return list(await asyncio.gather(*answers))
        except TimeoutError:
            raise deadline_passed(self.expected_wait()) from None
        finally:
            for answer in answers:  # the worker passes over what nobody waits for
                if not answer.done():
                    answer.cancel()
                elif not answer.cancelled():
                    answer.exception()  # looked at, so that asyncio does not report it

    def stop(self) -> None:
        """Take nothing new, decide what waits, end the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _take(self) -> list[Job[In, Out]] | None:
        """The next batch, without what nobody waits for or what would come too late; None at the end."""
        with self._condition:
            while not self._waiting:
                if self._stopping:
                    return None
                self._condition.wait()
            batch: list[Job[In, Out]] = []
            late: list[Job[In, Out]] = []
            now = time.perf_counter()
            while self._waiting and len(batch) < self.max_batch:
                job = self._waiting[0]
                left = (batch[0] if batch else job).deadline - now
                # a batch is as slow as it is large, and its first item is the one that has waited longest
                if batch and (len(batch) + 1) * self._pace > left:
                    break
                self._waiting.popleft()
                if job.answer.done():
                    continue
                # alone, an item is tried whatever the pace says: else one slow batch would shut the door for good
                too_slow = self._pace > left and bool(self._waiting)
                (late if left <= 0 or (not batch and too_slow) else batch).append(job)
            self._running = len(batch)
        if late:
            self._settle(late, [deadline_passed(self.expected_wait())] * len(late))
        return batch

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            self._run(batch)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """One batch in the event loop; the next one after whatever else is ready."""
        self._turn_is_due = False
        if self._waiting:
            self._run(self._take() or [])
        if self._waiting:
            self._turn_is_due = True
            loop.call_soon(self._turn, loop)

    def _run(self, batch: list[Job[In, Out]]) -> None:
        if not batch:
            return
        started = time.perf_counter()
        items, waited = [job.item for job in batch], [started - job.arrived for job in batch]
        answers: Sequence[Out | Exception]
        try:
            answers = self._decide(items, waited)
        except Exception as error:  # the worker must live on, or nobody is ever answered again
            answers = [error] * len(batch)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, BadInput | Refused):
                _log.error("a decision failed: %s", type(answer).__name__, exc_info=answer)
        self._settle(batch, answers)
        ended = time.perf_counter()
        spent = (ended - (self._queue_since or started)) / len(batch)
        # in the loop, the time between two batches counts too: it is spent on reading and refusing
        self._queue_since = ended if self._waiting and self._thread is None else None
        self._pace = spent if not self._pace else (1 - _PACE_WEIGHT) * self._pace + _PACE_WEIGHT * spent
        self._running = 0

    def _settle(self, jobs: Sequence[Job[In, Out]], answers: Sequence[Out | Exception]) -> None:
        for job, answer in zip(jobs, answers, strict=True):
            if self._thread is None:
                job.settle(answer)
                continue
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                job.loop.call_soon_threadsafe(job.settle, answer)
