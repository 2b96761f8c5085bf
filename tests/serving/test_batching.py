"""The queue before the model: what is batched, what is refused, and that nobody waits beyond a deadline."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest

from routewright.errors import BadInput
from serving.batching import Batcher
from serving.refusal import Refused


class Gate:
    """Decides by doubling; holds every batch until it is opened, and remembers the batches."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, items: Sequence[int], waited: Sequence[float]) -> list[int | Exception]:
        self.batches.append(list(items))
        self.entered.set()
        assert len(waited) == len(items)
        self.open.wait(10)
        return [BadInput("odd") if item < 0 else 2 * item for item in items]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def run(coroutine: Coroutine[Any, Any, Any], batcher: Batcher[Any, Any], gate: Gate) -> Any:
    try:
        return asyncio.run(coroutine)
    finally:
        gate.open.set()
        batcher.stop()


async def entered(gate: Gate) -> None:
    await asyncio.to_thread(gate.entered.wait, 10)


def test_what_waits_becomes_one_batch_in_order(gate: Gate) -> None:
    batcher = Batcher(gate, max_batch=4, max_waiting=20, deadline_s=10)

    async def scenario() -> list[list[int]]:
        first = asyncio.create_task(batcher.submit([1]))
        await entered(gate)  # the worker has it, the rest must wait
        rest = [asyncio.create_task(batcher.submit(items)) for items in ([2, 3], [4], [5, 6])]
        await asyncio.sleep(0)
        gate.open.set()
        return await asyncio.gather(first, *rest)

    assert run(scenario(), batcher, gate) == [[2], [4, 6], [8], [10, 12]]
    assert gate.batches == [[1], [2, 3, 4, 5], [6]]


def test_an_error_is_its_own_request_s(gate: Gate) -> None:
    batcher = Batcher(gate, max_batch=4, max_waiting=20, deadline_s=10)

    async def scenario() -> list[Any]:
        gate.open.set()
        return await asyncio.gather(*(batcher.submit(items) for items in ([1], [-1], [2, -2], [3])), return_exceptions=True)

    answers = run(scenario(), batcher, gate)
    assert (answers[0], answers[3]) == ([2], [6])
    assert [type(answer) for answer in answers[1:3]] == [BadInput, BadInput]


def test_a_full_queue_refuses_at_once(gate: Gate) -> None:
    batcher = Batcher(gate, max_batch=1, max_waiting=2, deadline_s=10)

    async def scenario() -> Refused:
        tasks = [asyncio.create_task(batcher.submit([1]))]
        await entered(gate)
        tasks += [asyncio.create_task(batcher.submit([item])) for item in (2, 3)]
        await asyncio.sleep(0)
        assert batcher.waiting == 2
        with pytest.raises(Refused) as refused:
            await batcher.submit([4])
        gate.open.set()
        assert await asyncio.gather(*tasks) == [[2], [4], [6]]
        return refused.value

    refused = run(scenario(), batcher, gate)
    assert (refused.status, refused.outcome) == (429, "overloaded")
    assert refused.retry_after is not None
    assert refused.retry_after >= 1
    assert gate.batches == [[1], [2], [3]]


def test_a_deadline_ends_the_wait_and_spares_the_worker(gate: Gate) -> None:
    batcher = Batcher(gate, max_batch=8, max_waiting=20, deadline_s=0.1)

    async def scenario() -> list[Any]:
        first = asyncio.create_task(batcher.submit([1]))
        await entered(gate)
        answers = await asyncio.gather(first, batcher.submit([2]), return_exceptions=True)
        gate.open.set()  # long after both deadlines: what nobody waits for is not decided
        return [*answers, await batcher.submit([3])]

    one, two, three = run(scenario(), batcher, gate)
    assert [(error.status, error.outcome) for error in (one, two)] == [(503, "deadline"), (503, "deadline")]
    assert three == [6]
    assert gate.batches == [[1], [3]]


def test_who_would_wait_too_long_is_refused_before_waiting(gate: Gate) -> None:
    batcher = Batcher(gate, max_batch=1, max_waiting=1000, deadline_s=1.0)

    async def scenario() -> None:
        task = asyncio.create_task(batcher.submit([1]))
        await entered(gate)
        batcher._pace = 0.2  # five a second: half a deadline is two and a half
        waiting = asyncio.create_task(batcher.submit([2]))
        await asyncio.sleep(0)
        assert batcher.expected_wait() == pytest.approx(0.4)
        with pytest.raises(Refused) as refused:
            await batcher.submit([3])
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        gate.open.set()
        assert await asyncio.gather(task, waiting) == [[2], [4]]

    run(scenario(), batcher, gate)


def test_one_slow_batch_does_not_shut_the_door(gate: Gate) -> None:
    """Alone, an item is tried whatever the pace says; the pace recovers."""
    batcher = Batcher(gate, max_batch=4, max_waiting=10, deadline_s=0.5)
    gate.open.set()

    async def scenario() -> None:
        batcher._pace = 60.0
        for item in range(40):
            assert await batcher.submit([item]) == [2 * item]
        assert batcher._pace < 1

    run(scenario(), batcher, gate)


def test_a_decider_that_raises_does_not_end_the_thread() -> None:
    def broken(items: Sequence[int], waited: Sequence[float]) -> list[int]:
        if items == [0]:
            raise ZeroDivisionError
        return list(items)

    batcher: Batcher[int, int] = Batcher(broken, 1, 10, 5.0)

    async def scenario() -> list[int]:
        with pytest.raises(ZeroDivisionError):
            await batcher.submit([0])
        return await batcher.submit([1])

    assert asyncio.run(scenario()) == [1]
    batcher.stop()


def test_stopping_decides_what_waits_and_takes_nothing_new(gate: Gate) -> None:
    batcher = Batcher(gate, max_batch=1, max_waiting=10, deadline_s=10)

    async def scenario() -> list[list[int]]:
        tasks = [asyncio.create_task(batcher.submit([1]))]
        await entered(gate)
        tasks.append(asyncio.create_task(batcher.submit([2])))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(asyncio.to_thread(batcher.stop))
        while not batcher._stopping:
            await asyncio.sleep(0.001)
        with pytest.raises(Refused, match="not ready"):
            await batcher.submit([3])
        gate.open.set()
        await stopping
        return await asyncio.gather(*tasks)

    assert run(scenario(), batcher, gate) == [[2], [4]]


def test_under_overload_nobody_waits_beyond_the_deadline_and_decisions_go_on() -> None:
    """Eight times what can be decided: of those that are answered none came after its deadline by the queue's own clock."""
    late: list[float] = []

    def slow(items: Sequence[float], waited: Sequence[float]) -> list[float]:
        time.sleep(0.002 * len(items))
        late.extend(wait for wait in waited if wait > 0.2)
        return list(items)

    batcher: Batcher[float, float] = Batcher(slow, 8, 50, 0.2)

    async def one() -> str:
        try:
            await batcher.submit([1.0])
            return "ok"
        except Refused as refused:
            return refused.outcome

    async def scenario() -> list[str]:
        tasks = []
        for _ in range(100):
            tasks += [asyncio.create_task(one()) for _ in range(16)]
            await asyncio.sleep(0.004)
        return await asyncio.gather(*tasks)

    outcomes = asyncio.run(scenario())
    batcher.stop()
    assert set(outcomes) <= {"ok", "overloaded", "deadline"}
    assert outcomes.count("ok") >= 20
    assert outcomes.count("ok") < len(outcomes)
    assert not late


# --- In the event loop


def test_in_the_loop_a_batch_is_what_came_while_the_loop_was_busy() -> None:
    batches: list[list[int]] = []

    def double(items: Sequence[int], waited: Sequence[float]) -> list[int | Exception]:
        assert threading.current_thread() is threading.main_thread()
        batches.append(list(items))
        return [BadInput("odd") if item < 0 else 2 * item for item in items]

    batcher: Batcher[int, int] = Batcher(double, 4, 20, 10.0, in_loop=True)

    async def scenario() -> list[Any]:
        together = [[1], [2, 3], [-4], [5, 6]]
        answers = await asyncio.gather(*(batcher.submit(items) for items in together), return_exceptions=True)
        return [*answers, await batcher.submit([7])]

    answers = asyncio.run(scenario())
    batcher.stop()
    assert (answers[:2], answers[3:]) == ([[2], [4, 6]], [[10, 12], [14]])
    assert isinstance(answers[2], BadInput)
    assert batches == [[1, 2, 3, -4], [5, 6], [7]]


def test_in_the_loop_others_get_their_turn_between_two_batches() -> None:
    order: list[str] = []

    def decide(items: Sequence[int], waited: Sequence[float]) -> list[int]:
        order.append("batch")
        return list(items)

    batcher: Batcher[int, int] = Batcher(decide, 1, 20, 10.0, in_loop=True)

    async def scenario() -> None:
        deciding = asyncio.create_task(batcher.submit([1, 2, 3]))
        for _ in range(8):
            await asyncio.sleep(0)
            order.append("other")
        await deciding

    asyncio.run(scenario())
    assert order.count("batch") == 3
    assert ("batch", "batch") not in set(itertools.pairwise(order))


def test_in_the_loop_the_pace_counts_what_the_loop_does_between_two_batches() -> None:
    batcher: Batcher[int, int] = Batcher(lambda items, waited: list(items), 1, 20, 10.0, in_loop=True)

    async def scenario() -> None:
        deciding = asyncio.create_task(batcher.submit(list(range(10))))
        while not deciding.done():
            time.sleep(0.01)  # reads and refuses
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert batcher._pace > 0.005


def test_in_the_loop_a_decider_that_raises_and_a_stop_leave_nobody_waiting() -> None:
    def broken(items: Sequence[int], waited: Sequence[float]) -> list[int]:
        if items == [0]:
            raise ZeroDivisionError
        return list(items)

    batcher: Batcher[int, int] = Batcher(broken, 1, 10, 5.0, in_loop=True)

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await batcher.submit([0])
        waiting = asyncio.create_task(batcher.submit([1, 2]))
        await asyncio.sleep(0)
        await asyncio.to_thread(batcher.stop)
        with pytest.raises(Refused, match="not ready"):
            await batcher.submit([3])
        assert await waiting == [1, 2]

    asyncio.run(scenario())


def test_requests_on_the_way_count_as_if_they_waited(gate: Gate) -> None:
    batcher = Batcher(gate, max_batch=1, max_waiting=10, deadline_s=1.0)
    gate.open.set()
    batcher.check_room(1, on_the_way=9)
    with pytest.raises(Refused, match="full"):
        batcher.check_room(1, on_the_way=10)
    batcher._pace = 0.1  # half a deadline is five decisions
    batcher.check_room(1, on_the_way=4)
    with pytest.raises(Refused, match="deadline"):
        batcher.check_room(1, on_the_way=5)
    batcher.stop()
