"""Shared by the floors: a stand-in for an OpenAI-compatible chat server; what a sandbox is refused for is skipped."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from stand_in import StandIn, StandInHandler

from routewright.sandbox import NoWalls


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Where the machine allows no namespaces, what needs a sandbox cannot be tested."""
    try:
        return (yield)
    except NoWalls as error:
        pytest.skip(str(error))


pytest_runtest_call = pytest_runtest_setup


class ChatServer(StandIn):
    """Answers POST /v1/chat/completions over real HTTP.

    ``answer`` makes the answer's text from a request; ``modes`` holds what happens to the next requests, one each,
    before all is well again: a status such as "429", "slow", "drop", "html", "broken" (half a JSON body), "empty".
    Parameters named in ``refuses`` get 400, as from servers that lack them.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.modes: list[str] = []
        self.refuses: set[str] = set()
        self.usage: dict[str, int] | None = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        self.answer: Callable[[dict[str, Any]], str] = lambda request: "{}"
        self.released = threading.Event()
        server = self

        class Handler(StandInHandler):
            def do_POST(self) -> None:
                request = json.loads(self.body())
                server.requests.append(request)
                server.keys.append(self.headers["Authorization"])
                mode = server.modes.pop(0) if server.modes else "ok"
                refused = [name for name in sorted(server.refuses) if name in request]
                if mode == "slow":
                    server.released.wait(20)
                if mode == "drop":
                    self.close_connection = True
                elif refused:
                    self.send(400, {"error": {"message": f"{refused[0]} is not supported"}})
                elif mode.isdigit():
                    # a careless server that repeats the key in its error
                    text = f"no luck with {self.headers['Authorization']}"
                    self.send(int(mode), {"error": {"message": text}}, {"retry-after-ms": "10"})
                elif mode == "html":
                    self.send(200, "<html>welcome</html>", {"Content-Type": "text/html"})
                elif mode == "broken":
                    self.send(200, '{"choices": [')
                else:
                    message = {"role": "assistant", "content": server.answer(request)}
                    choices = [] if mode == "empty" else [{"index": 0, "message": message, "finish_reason": "stop"}]
                    body = {"id": "1", "object": "chat.completion", "created": int(time.time()), "model": "stand-in"}
                    self.send(200, {**body, "choices": choices, "usage": server.usage})

        super().__init__(Handler, "/v1")

    def close(self) -> None:
        self.released.set()
        super().close()


@pytest.fixture(autouse=True)
def credentials_of_one_test() -> Iterator[None]:
    """boto3's default session keeps the credentials it once read: the next test's environment would not count."""
    yield
    if "boto3" in sys.modules:
        sys.modules["boto3"].DEFAULT_SESSION = None  # type: ignore[attr-defined]


@pytest.fixture
def chat_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    """A running chat server; the environment names a key and nothing else."""
    for name in ("BASE_URL", "MODEL", "MAX_CALLS", "MAX_TOKENS"):
        monkeypatch.delenv(f"ROUTEWRIGHT_LLM_{name}", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server = ChatServer()
    yield server
    server.close()
