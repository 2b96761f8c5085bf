"""What a connection may do: refusals before anything is parsed, heads that stall or never end, idle connections."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from serving import protocol
from serving.predictor import Predictor
from serving.protocol import MAX_HEAD_BYTES, is_whole, protocol_of
from serving.rest import application
from serving.server import listening_socket

PATH = "/v1/models/search-router:predict"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


def request(query: str = "clean the oven", path: str = PATH, head: str = "") -> bytes:
    body = json.dumps({"instances": [{"query": query}]}).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def answer(connection: Connection) -> tuple[int, dict[str, str], Any]:
    """The next answer's status, headers and body."""
    head = (await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), 20)).decode()
    status, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, json.loads(await connection[0].readexactly(int(headers["content-length"])))


async def ask(connection: Connection, data: bytes) -> tuple[int, dict[str, str], Any]:
    connection[1].write(data)
    return await answer(connection)


def on_the_wire(
    predictor: Predictor, scenario: Callable[[Connect], Awaitable[None]], app: Any = None, keep_alive_s: int = 20
) -> None:
    """Run the scenario against the predictor's server on a port of loopback."""
    http = listening_socket("127.0.0.1", 0, "--port")
    config = uvicorn.Config(
        app or application(predictor), http=protocol_of(predictor), log_config=None, lifespan="off",
        timeout_keep_alive=keep_alive_s, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)

    async def connect() -> Connection:
        return await asyncio.open_connection(*http.getsockname())

    async def main() -> None:
        serving = asyncio.create_task(server._serve([http]))
        try:
            await scenario(connect)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(main())


async def no_application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing must get here")


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (request(), True),
        (request(head="Content-Type: application/json\r\n"), True),
        (request()[:-1], False),
        (request() + b"G", False),
        (request() + request(), False),
        (request(head="Connection: close\r\n"), False),
        (request(head="Expect: 100-continue\r\n"), False),
        (request(head="Transfer-Encoding: chunked\r\n"), False),
        (b"POST / HTTP/1.1\r\ncontent-length:0\r\n\r\n", True),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", False),
        (b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", False),
        (b"POST / HTTP/1.1\r\nX: content-length: 0\r\n\r\n", False),
        (b"POST / HTTP/1.1\r\nX: y", False),
        (b"\r\ncontent-length: 0\r\n", False),
        (b"", False),
    ],
)
def test_what_is_a_whole_request(data: bytes, whole: bool) -> None:
    assert is_whole(data) == whole


@pytest.mark.parametrize("path", [PATH, "/v2/models/search-router/infer"])
def test_a_refusal_comes_before_the_application_and_leaves_the_connection_open(
    serve: Callable[..., Predictor], path: str
) -> None:
    predictor = serve()
    predictor.ready = False

    async def scenario(connect: Connect) -> None:
        connection = await connect()
        for _ in range(3):
            status, headers, body = await ask(connection, request(path=path))
            assert (status, headers["retry-after"]) == (503, "1")
            assert body == {"error": "the router is not ready, try again later"}
            assert headers["content-type"] == "application/json"

    on_the_wire(predictor, scenario, no_application)


def test_after_a_refusal_the_same_connection_is_served(serve: Callable[..., Predictor]) -> None:
    predictor = serve()

    async def scenario(connect: Connect) -> None:
        connection = await connect()
        for ready in (True, False, True, False):
            predictor.ready = ready
            for data in (request(), request(head="Connection: keep-alive\r\n")):
                assert (await ask(connection, data))[0] == (200 if ready else 503)
            half = len(request()) // 2
            connection[1].write(request()[:half])
            await connection[1].drain()
            await asyncio.sleep(0.01)
            assert (await ask(connection, request()[half:]))[0] == (200 if ready else 503)

    on_the_wire(predictor, scenario)


def test_requests_on_the_way_take_room_until_they_are_answered_or_their_sender_is_gone(
    serve: Callable[..., Predictor],
) -> None:
    predictor = serve(max_waiting=4)
    seen: list[int] = []
    check = predictor.check_open

    def counting(on_the_way: int = 0) -> None:
        seen.append(on_the_way)
        check(on_the_way)

    predictor.check_open = counting  # type: ignore[method-assign]

    async def scenario(connect: Connect) -> None:
        connections = [await connect() for _ in range(40)]
        for connection in connections:
            connection[1].write(request())
        statuses = [(await answer(connection))[0] for connection in connections]
        assert set(statuses) == {200, 429}
        for connection in [await connect() for _ in range(20)]:
            connection[1].write(request())
            connection[1].close()
        connection = await connect()
        while predictor.batcher.waiting:
            await asyncio.sleep(0.01)
        assert (await ask(connection, request()))[0] == 200
        seen.clear()
        assert (await ask(connection, request()))[0] == 200

    on_the_wire(predictor, scenario)
    assert set(seen) == {0}


def test_a_head_that_stalls_is_told_and_the_connection_closed(
    serve: Callable[..., Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)

    async def scenario(connect: Connect) -> None:
        connection = await connect()
        connection[1].write(b"POST / HTTP/1.1\r\nX: ")
        for _ in range(5):  # what drips does not count as progress
            await asyncio.sleep(0.02)
            connection[1].write(b"y")
        status, headers, body = await answer(connection)
        assert (status, headers["connection"]) == (408, "close")
        assert body == {"error": "headers: expected within 0.2 seconds"}
        assert await connection[0].read() == b""

    on_the_wire(serve(), scenario)


def test_an_answer_that_is_due_comes_before_a_stalled_connection_is_closed(
    serve: Callable[..., Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    predictor = serve()
    decide = predictor.router.decide

    def slowly(instances: Any, timing: Any) -> Any:
        time.sleep(0.5)
        return decide(instances, timing)

    predictor.router.decide = slowly  # type: ignore[method-assign]

    async def scenario(connect: Connect) -> None:
        connection = await connect()
        assert (await ask(connection, request() + b"POST / HT"))[0] == 200
        assert await connection[0].read() == b""

    on_the_wire(predictor, scenario)


def test_a_head_without_end_is_refused(serve: Callable[..., Predictor]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        head = b"GET / HTTP/1.1\r\n"
        connection[1].write(head + b"X" * (MAX_HEAD_BYTES - len(head)))
        await asyncio.sleep(0.05)
        connection[1].write(b"X")
        status, headers, body = await answer(connection)
        assert (status, headers["connection"]) == (431, "close")
        assert body == {"error": "headers: expected at most 65536 bytes"}
        assert (await ask(await connect(), request()))[0] == 200

    on_the_wire(serve(), scenario)


def test_idle_connections_are_closed_and_busy_ones_are_not(serve: Callable[..., Predictor]) -> None:
    predictor = serve()
    predictor.ready = False

    async def scenario(connect: Connect) -> None:
        silent, refused = await connect(), await connect()
        for _ in range(6):
            assert (await ask(refused, request()))[0] == 503
            await asyncio.sleep(0.3)
        assert await asyncio.wait_for(silent[0].read(), 20) == b""
        assert (await ask(refused, request()))[0] == 503
        assert await asyncio.wait_for(refused[0].read(), 20) == b""

    on_the_wire(predictor, scenario, keep_alive_s=1)
