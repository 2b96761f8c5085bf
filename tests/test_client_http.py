"""The clients of served routers, against a server that stumbles: typed decisions, retries, errors, sync and async alike."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Any

import pytest
from stand_in import StandIn, StandInHandler

from routewright.client import (
    AsyncSearchRouterClient,
    AsyncStepRouterClient,
    SearchDecision,
    SearchRouterClient,
    ServerUnavailable,
    StepDecision,
    StepRouterClient,
)
from routewright.errors import BadInput
from routewright.search_router.decision import Decision
from routewright.step_router.features import Candidate, PastStep

SEARCH = {
    "agents": ["garden"], "bitmask": "010", "keywords": ["lawn"], "start": "2024-01-01", "end": None,
    "scores": {"kitchen": 0.1, "garden": 0.9, "office": 0.2}, "abstained": False, "model_version": "v1", "request_id": "r1",
}  # fmt: skip
STEP = {
    "request_id": "r2", "model_version": "v1", "escalate": False, "take": "go", "risk": 0.25, "benefit": 0.2,
    "threshold": 0.4, "features": {"entropy": 0.5}, "explored": False, "propensity": 1.0,
    "timestamp": "2026-11-30T04:00:00+00:00",
}  # fmt: skip
QUERY = ("lawn", date(2024, 5, 31))


class Stumbling(StandIn):
    """Answers with ``modes``, one each: (status, body, headers), or "drop"; then with ``answer`` for ever."""

    def __init__(self) -> None:
        self.modes: list[Any] = []
        self.answer: Any = {"predictions": [SEARCH]}
        self.requests: list[tuple[str, Any]] = []
        self.times: list[float] = []
        server = self

        class Handler(StandInHandler):
            def do_POST(self) -> None:
                server.requests.append((self.path, json.loads(self.body())))
                server.times.append(time.monotonic())
                mode = server.modes.pop(0) if server.modes else (200, server.answer, {})
                if mode == "drop":
                    self.close_connection = True
                    return
                self.send(*mode)

        super().__init__(Handler)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stumbling]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = Stumbling()
    yield server
    server.close()


def call(kind: str, url: str, name: str, *arguments: Any, attempts: int = 4, **named: Any) -> Any:
    """One method of the sync or of the async client of a router."""
    sync: Any = SearchRouterClient if "search" in kind else StepRouterClient
    awaited: Any = AsyncSearchRouterClient if "search" in kind else AsyncStepRouterClient
    if "async" not in kind:
        with sync(url, attempts=attempts) as client:
            return getattr(client, name)(*arguments, **named)

    async def asking() -> Any:
        async with awaited(url, attempts=attempts) as client:
            return await getattr(client, name)(*arguments, **named)

    return asyncio.run(asking())


both = pytest.mark.parametrize("kind", ["search", "async search"])


@both
def test_a_search_decision_is_typed(server: Stumbling, kind: str) -> None:
    decision = call(kind, server.url, "decide", *QUERY)
    assert isinstance(decision, SearchDecision)
    assert isinstance(decision, Decision)
    assert (decision.agents, decision.start, decision.end) == (["garden"], date(2024, 1, 1), None)
    assert decision.to_json() == SEARCH
    assert server.requests == [
        ("/v1/models/search-router:predict", {"instances": [{"query": "lawn", "reference_date": "2024-05-31"}]})
    ]


@both
def test_several_queries_in_one_request(server: Stumbling, kind: str) -> None:
    server.answer = {"predictions": [SEARCH, {**SEARCH, "request_id": "r9"}]}
    decisions = call(kind, server.url, "decide_many", [("lawn", None), QUERY])
    assert [decision.request_id for decision in decisions] == ["r1", "r9"]
    assert server.requests[0][1]["instances"][0] == {"query": "lawn"}


@pytest.mark.parametrize("kind", ["step", "async step"])
def test_a_step_decision_is_typed(server: Stumbling, kind: str) -> None:
    server.answer = {"predictions": [STEP]}
    decision = call(
        kind, server.url, "decide", "a room",
        [Candidate("go", (-0.5, -0.1), 0.5), {"action": "look", "verifier_score": 0.1}], 2, 10, None,
        objective="light the lamp", history=[PastStep("wake", "a bed", 0.5)], episode="e1",
    )  # fmt: skip
    assert isinstance(decision, StepDecision)
    assert decision.timestamp == datetime(2026, 11, 30, 4, tzinfo=UTC)
    assert (decision.take, decision.escalate, decision.features) == ("go", False, {"entropy": 0.5})
    assert server.requests[0][1]["instances"] == [{
        "observation": "a room", "step": 2, "max_steps": 10, "budget_left": None, "objective": "light the lamp",
        "candidates": [{"action": "go", "token_logprobs": [-0.5, -0.1], "verifier_score": 0.5},
                       {"action": "look", "verifier_score": 0.1}],
        "history": [{"action": "wake", "observation": "a bed", "entropy": 0.5}], "episode": "e1",
    }]  # fmt: skip


@both
def test_feedback(server: Stumbling, kind: str) -> None:
    server.answer = {"accepted": True}
    assert call(kind, server.url, "feedback", "r1", {"garden": 1.0}) is None
    assert server.requests == [("/v1/feedback", {"request_id": "r1", "outcome": {"garden": 1.0}})]


@both
def test_what_json_has_no_form_for_is_not_sent(server: Stumbling, kind: str) -> None:
    for name, arguments in (("decide", ("half a smile \ud83d",)), ("feedback", ("r1", {"garden": float("nan")}))):
        with pytest.raises(BadInput, match=r"^request: expected whole characters and finite numbers \("):
            call(kind, server.url, name, *arguments)
    assert server.requests == []


@both
def test_an_overloaded_server_is_asked_again_when_it_says(server: Stumbling, kind: str) -> None:
    server.modes = [(429, {"error": "full"}, {"Retry-After": "1"}), (503, {"error": "late"}, {}), "drop"]
    assert call(kind, server.url, "decide", *QUERY).request_id == "r1"
    assert len(server.requests) == 4
    assert server.times[1] - server.times[0] >= 0.95  # not before the second that it asked for


@both
def test_it_gives_up_after_its_attempts(server: Stumbling, kind: str) -> None:
    server.modes = [(503, {"error": "still late"}, {"Retry-After": "0"})] * 9
    with pytest.raises(ServerUnavailable, match="still late"):
        call(kind, server.url, "decide", *QUERY, attempts=3)
    assert len(server.requests) == 3


@both
def test_nobody_there(kind: str) -> None:
    with pytest.raises(ServerUnavailable, match="ConnectError"):
        call(kind, "http://127.0.0.1:9", "decide", *QUERY, attempts=2)


@both
def test_a_refused_input_is_not_tried_again(server: Stumbling, kind: str) -> None:
    server.modes = [(400, {"error": "instances[0].query: expected a text"}, {})]
    with pytest.raises(BadInput, match=r"^instances\[0\]\.query: expected a text$"):
        call(kind, server.url, "decide", *QUERY)
    assert len(server.requests) == 1


@both
@pytest.mark.parametrize(
    "answer",
    [b"<html>", {"predictions": []}, {"predictions": [{}]}, {"predictions": [SEARCH, SEARCH]}, [], {"predictions": [STEP]}],
)
def test_an_answer_of_another_kind(server: Stumbling, kind: str, answer: Any) -> None:
    server.answer = answer
    with pytest.raises(ServerUnavailable):
        call(kind, server.url, "decide", *QUERY)
    assert len(server.requests) == 1


def test_a_500_is_no_decision(server: Stumbling) -> None:
    server.modes = [(500, b"oops", {})]
    with pytest.raises(ServerUnavailable, match="HTTP 500"):
        call("search", server.url, "decide", *QUERY)


@pytest.mark.parametrize("url", ["", "router:8080", "ftp://router", "http://", "http://[::1"])
def test_a_url_that_is_none(url: str) -> None:
    for kind in (SearchRouterClient, AsyncStepRouterClient):
        with pytest.raises(BadInput, match=r"^url: expected one such as"):
            kind(url)


def test_attempts_count_the_first() -> None:
    with pytest.raises(BadInput, match=r"^attempts: expected at least 1"):
        SearchRouterClient("http://router", attempts=0)


def test_a_client_needs_no_model_library() -> None:
    code = "import sys, routewright.client; print([n for n in ('torch', 'transformers', 'kserve') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
