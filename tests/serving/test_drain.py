"""What signals do to a server that is asked meanwhile; a drain that never ends by itself shows who ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable

import httpx
import pytest
from hostile_bodies import good

from serving import server
from serving.predictor import Predictor

PATH = "/v1/models/step-router:predict"
READY = "/v2/health/ready"
BODY = good("step-router")[PATH]
PATIENCE_S = 120  # a server that does not end fails its test instead of holding up all others


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threading.current_thread() is threading.main_thread(), "signals are for the main thread"
    monkeypatch.setattr(server, "DRAIN_S", 1e6)


def while_served(predictor: Predictor, scenario: Callable[[str], Awaitable[None]]) -> None:
    """Run the scenario with the server's URL; the server must have ended for it to return."""

    async def main() -> None:
        http = server.listening_socket("127.0.0.1", 0, "--port")
        warm = asyncio.Event()
        serving = asyncio.create_task(server.run(predictor, http, on_ready=warm.set))
        await warm.wait()
        await scenario("http://{}:{}".format(*http.getsockname()))
        await asyncio.wait_for(serving, PATIENCE_S)

    asyncio.run(main())


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)


def test_after_sigterm_it_is_not_ready_and_decides_on(serve: Callable[..., Predictor]) -> None:
    async def scenario(url: str) -> None:
        async with client(url) as kept, client(url) as probe:
            assert (await kept.post(PATH, json=BODY)).status_code == 200
            assert (await probe.get(READY)).status_code == 200
            os.kill(os.getpid(), signal.SIGTERM)
            while (await probe.get(READY)).status_code == 200:
                pass
            while (answer := await kept.post(PATH, json=BODY)).headers.get("connection") != "close":
                assert answer.status_code == 200
            for _ in range(3):  # each on a connection of its own
                async with client(url) as new:
                    answer = await new.post(PATH, json=BODY)
                    assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            assert (await probe.get(READY)).status_code == 503
            os.kill(os.getpid(), signal.SIGTERM)

    while_served(serve("step-router"), scenario)


def test_the_drain_ends_by_itself(serve: Callable[..., Predictor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DRAIN_S", 0.2)

    async def scenario(url: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    predictor = serve("step-router")
    while_served(predictor, scenario)
    assert (predictor.draining, predictor.ready) == (True, False)


def test_ctrl_c_does_not_wait(serve: Callable[..., Predictor]) -> None:
    async def scenario(url: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    predictor = serve("step-router")
    while_served(predictor, scenario)
    assert (predictor.draining, predictor.ready) == (False, False)


def test_before_it_was_ready_there_is_nothing_to_drain(
    serve: Callable[..., Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor, go_on = serve("step-router"), threading.Event()
    predictor.ready = False
    monkeypatch.setattr(predictor, "load", go_on.wait)

    async def main() -> None:
        serving = asyncio.create_task(server.run(predictor, server.listening_socket("127.0.0.1", 0, "--port")))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(serving, PATIENCE_S)
        go_on.set()

    asyncio.run(main())
    assert not predictor.draining
