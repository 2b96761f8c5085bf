"""The ensemble router's clients, against a server that stumbles: typed decisions, retries, errors, sync and async alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from stand_in import StandIn, StandInHandler

from routewright.client import AsyncEnsembleRouterClient, EnsembleDecision, EnsembleRouterClient, ServerUnavailable
from routewright.errors import BadInput

DECISION = {
    "request_id": "r1", "model_version": "v1", "agents": ["agent-2", "agent-0"],
    "familiarity": {"agent-0": 0.25, "agent-1": 0.125, "agent-2": 0.5}, "cumulative": 0.75,
}  # fmt: skip


class Stumbling(StandIn):
    """Answers with ``modes``, one each: (status, body, headers); then with ``answer`` for ever."""

    def __init__(self) -> None:
        self.modes: list[Any] = []
        self.answer: Any = {"predictions": [DECISION]}
        self.requests: list[tuple[str, Any]] = []
        server = self

        class Handler(StandInHandler):
            def do_POST(self) -> None:
                server.requests.append((self.path, json.loads(self.body())))
                self.send(*(server.modes.pop(0) if server.modes else (200, server.answer, {})))

        super().__init__(Handler)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stumbling]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = Stumbling()
    yield server
    server.close()


def call(kind: str, url: str, name: str, *arguments: Any) -> Any:
    """What a method of a sync or async client returns."""
    if kind == "sync":
        with EnsembleRouterClient(url, attempts=3) as client:
            return getattr(client, name)(*arguments)

    async def asking() -> Any:
        async with AsyncEnsembleRouterClient(url, attempts=3) as client:
            return await getattr(client, name)(*arguments)

    return asyncio.run(asking())


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
def test_a_decision_is_typed(server: Stumbling, kind: str) -> None:
    decision = call(kind, server.url, "decide", "17 + 25")
    assert decision == EnsembleDecision(**DECISION)
    assert server.requests == [("/v1/models/ensemble-router:predict", {"instances": [{"query": "17 + 25"}]})]


@both
def test_several_queries_in_one_request_and_feedback(server: Stumbling, kind: str) -> None:
    server.answer = {"predictions": [DECISION, {**DECISION, "request_id": "r2"}]}
    decisions = call(kind, server.url, "decide_many", ["a", "b"])
    assert [decision.request_id for decision in decisions] == ["r1", "r2"]
    server.answer = {"accepted": True}
    call(kind, server.url, "feedback", "r2", {"agent-2": 1.0})
    assert server.requests[1] == ("/v1/feedback", {"request_id": "r2", "outcome": {"agent-2": 1.0}})


@both
def test_overload_is_tried_again_and_a_refused_query_is_not(server: Stumbling, kind: str) -> None:
    server.modes = [(503, {"error": "late"}, {"Retry-After": "0"}), (429, {"error": "full"}, {"Retry-After": "0"})]
    assert call(kind, server.url, "decide", "a").agents == ["agent-2", "agent-0"]
    assert len(server.requests) == 3
    server.modes = [(400, {"error": "instances[0]: query: expected at most 1024 tokens, found 2000"}, {})]
    with pytest.raises(BadInput, match=r"^instances\[0\]: query: expected at most 1024 tokens, found 2000$"):
        call(kind, server.url, "decide", "a")
    assert len(server.requests) == 4


@both
@pytest.mark.parametrize(
    "answer", [{"predictions": [{**DECISION, "cumulative": "much"}]}, {"predictions": [{"agents": ["a"]}]}, {}]
)
def test_an_answer_of_another_kind(server: Stumbling, kind: str, answer: Any) -> None:
    server.answer = answer
    with pytest.raises(ServerUnavailable, match="no decisions of a router"):
        call(kind, server.url, "decide", "a")
