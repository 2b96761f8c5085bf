from __future__ import annotations

import json
from datetime import date

import pytest

from routewright.errors import BadInput
from routewright.language_models import chat
from routewright.language_models.chat import BudgetExceeded, ChatClient
from routewright.pools.pool import load_pool
from routewright.search_router.decision import Decision
from routewright.search_router.llm_router import llm_decide


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "title": "a", "text": "b"}\n')
    agents = [
        {"name": name, "card": f"About {name}.", "search": {"kind": "bm25", "corpus": "corpus.jsonl"}}
        for name in ("art", "law", "sea ice")
    ]
    (tmp_path / "pool.yaml").write_text(json.dumps({"name": "p", "fallback": "law", "agents": agents}))
    return load_pool(tmp_path / "pool.yaml")


@pytest.fixture
def client(chat_server, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "RETRIES", 1)
    return ChatClient(chat_server.url, "stand-in", tmp_path / "cache", timeout_s=5)


def route(**changes):
    return json.dumps({"agents": ["art"], "keywords": [], "start": None, "end": None, **changes})


def test_decision_of_the_model(client, chat_server, pool):
    chat_server.answer = lambda request: route(
        agents=["sea ice", "art", "art"], keywords=["melting"], start="2024-03-01", end="2024-03-31"
    )
    (made,) = llm_decide(client, pool, [{"query": "ice in March", "reference_date": "2024-05-02"}])
    assert made.decision == Decision(
        ["sea ice", "art"], "101", ["melting"], date(2024, 3, 1), date(2024, 3, 31), model_version="llm:stand-in"
    )
    assert (made.valid, made.tokens) == (1, 10)
    assert made.latency_ms is not None
    assert made.latency_ms > 0
    (request,) = chat_server.requests
    assert request["messages"][1]["content"].startswith("Reference date: 2024-05-02\n<query-")
    assert "most fitting first" in request["messages"][0]["content"]
    assert '- "sea ice": About sea ice.' in request["messages"][0]["content"]
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["agents"]["items"]["enum"] == ["art", "law", "sea ice"]
    assert sorted(schema["required"]) == ["agents", "end", "keywords", "start"]


@pytest.mark.parametrize(
    "changes",
    [
        {"agents": []},
        {"agents": ["weather"]},
        {"agents": ["art", "weather"]},
        {"start": "someday"},
        {"start": "2024-02-01", "end": "2024-01-01"},
        {"keywords": "melting"},
    ],
)
def test_an_invalid_answer_goes_to_the_fallback(client, chat_server, pool, changes):
    chat_server.answer = lambda request: route(**changes)
    (made,) = llm_decide(client, pool, [{"query": "ice"}])
    assert (made.valid, made.tokens) == (0, 20)
    assert made.decision.agents == ["law"]
    assert made.decision.bitmask == "010"
    assert made.latency_ms is not None


def test_one_failed_answer_leaves_the_others(client, chat_server, pool):
    chat_server.modes = ["ok", "500", "500", "ok"]
    chat_server.answer = lambda request: route()
    made = llm_decide(client, pool, [{"query": query} for query in ("one", "two", "three")])
    assert [item.valid for item in made] == [1, 0, 1]
    assert made[1].latency_ms is None
    assert made[1].decision.agents == ["law"]


def test_latency_and_tokens_are_the_same_after_a_restart(client, chat_server, pool, tmp_path):
    chat_server.answer = lambda request: route()
    first = llm_decide(client, pool, [{"query": "ice"}])
    again = llm_decide(ChatClient(chat_server.url, "stand-in", tmp_path / "cache"), pool, [{"query": "ice"}])
    assert again == first
    assert len(chat_server.requests) == 1


def test_no_row_of_fallbacks_for_want_of_budget_or_server(chat_server, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "RETRIES", 0)
    chat_server.answer = lambda request: route()
    client = ChatClient(chat_server.url, "stand-in", tmp_path / "cache", max_calls=1)
    with pytest.raises(BudgetExceeded):
        llm_decide(client, pool, [{"query": "one"}, {"query": "two"}])
    client = ChatClient(chat_server.url, "stand-in", tmp_path / "cache")
    chat_server.close()
    with pytest.raises(BadInput, match="nobody answers"):
        llm_decide(client, pool, [{"query": "three"}])
