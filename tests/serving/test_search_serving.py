"""The search router behind V1, V2 and feedback: decisions as in process, batches as one by one, metrics, log, drawing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from asgi_client import over_http
from kserve.protocol.infer_type import InferInput, InferRequest, InferResponse
from prometheus_client import REGISTRY
from tiny_routers import QUERIES, save_search_router

from routewright.errors import BadInput
from routewright.pools.query_log import read_query_log
from routewright.search_router.router import load_router
from serving.decision_log import FileLog
from serving.exploration import Exploration
from serving.input_drift import RunningDrift
from serving.predictor import Predictor, Timing
from serving.search_router import SearchInstance, SearchRouter

V1, V2 = "/v1/models/search-router:predict", "/v2/models/search-router/infer"
DAY = "2024-05-31"


def without_ids(decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "request_id"} for row in decisions]


def ask(predictor: Predictor, body: Any, path: str = V1) -> httpx.Response:
    async def asking(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    return over_http(predictor, asking)


def feedback(predictor: Predictor, request_id: Any, outcome: Any) -> httpx.Response:
    return ask(predictor, {"request_id": request_id, "outcome": outcome}, "/v1/feedback")


def tensor(texts: list[str], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "instance", "shape": [len(texts)], "datatype": "BYTES", "data": texts}], **more}


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"router": "search-router", **labels}) or 0.0


# --- Decisions


def test_a_served_decision_is_the_one_in_process(serve: Callable[..., Predictor], search_folder: Path) -> None:
    router = load_router(search_folder)
    expected = [router.decide(query, date(2024, 5, 31)).to_json() for query in QUERIES]
    predictor = serve()

    async def one_by_one(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        found = []
        for query in QUERIES:
            response = await client.post(V1, json={"instances": [{"query": query, "reference_date": DAY}]})
            assert response.status_code == 200
            found += response.json()["predictions"]
        return found

    decisions = over_http(predictor, one_by_one)
    assert without_ids(decisions) == expected
    assert len({row["request_id"] for row in decisions}) == len(QUERIES)
    assert len({tuple(row["agents"]) for row in decisions}) > 1


@pytest.mark.parametrize(
    ("file", "agents", "said"),
    [
        ("router.json", ["garden", "kitchen", "office"], "router.json: agents: expected those of config.json"),
        ("router.json", None, "router.json: agents: expected those of config.json"),
        ("config.json", ["kitchen", "garden"], "model.safetensors does not fit config.json"),
    ],
)
def test_a_folder_whose_files_name_other_agents_is_refused(tmp_path: Path, file: str, agents: Any, said: str) -> None:
    folder = save_search_router(tmp_path)
    described = json.loads((folder / file).read_text())
    assert described["agents"] == ["kitchen", "garden", "office"]
    (folder / file).write_text(json.dumps(described | {"agents": agents}))
    with pytest.raises(BadInput, match=said):
        SearchRouter(folder, Exploration(0.0))


def test_a_batch_decides_as_one_by_one(tmp_path: Path) -> None:
    """In float32: the same agents, keywords and days, and the same scores but for rounding."""
    served = SearchRouter(save_search_router(tmp_path), Exploration(0.0))
    served.router = load_router(tmp_path, torch.float32)
    queries = [f"{a} and {b}" for a in QUERIES for b in QUERIES]
    instances = [SearchInstance(query=query) for query in queries]
    alone = [served.decide([instance], Timing())[0].decision for instance in instances]
    together = [a.decision for i in range(0, 49, 16) for a in served.decide(instances[i : i + 16], Timing())]
    for one, other in zip(alone, together, strict=True):
        scores = list(one.pop("scores").values()), list(other.pop("scores").values())
        np.testing.assert_allclose(*scores, atol=1e-5)
        assert one == other


def test_concurrent_requests_share_forward_passes_and_get_their_own_answers(
    serve: Callable[..., Predictor], search_folder: Path
) -> None:
    router = load_router(search_folder)
    expected = {query: router.decide(query, date(2024, 5, 31)) for query in QUERIES}
    predictor = serve()
    sizes: list[int] = []
    decide = predictor.router.decide

    def counting(instances: Any, timing: Timing) -> Any:
        sizes.append(len(instances))
        return decide(instances, timing)

    predictor.router.decide = counting  # type: ignore[method-assign]

    async def together(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = [{"instances": [{"query": query, "reference_date": DAY}]} for query in QUERIES * 8]
        return await asyncio.gather(*(client.post(V1, json=body) for body in bodies))

    for query, response in zip(QUERIES * 8, over_http(predictor, together), strict=True):
        row = response.json()["predictions"][0]
        assert row["agents"] == expected[query].agents
        assert row["keywords"] == expected[query].keywords
    assert sum(sizes) == 8 * len(QUERIES)
    assert max(sizes) > 1
    assert max(sizes) <= 16


def test_several_instances_keep_their_order(serve: Callable[..., Predictor]) -> None:
    predictor = serve()
    both = ask(predictor, {"instances": [{"query": query, "reference_date": DAY} for query in QUERIES]}).json()
    each = [ask(predictor, {"instances": [{"query": q, "reference_date": DAY}]}).json()["predictions"][0] for q in QUERIES]
    assert [row["agents"] for row in both["predictions"]] == [row["agents"] for row in each]


def test_today_is_the_reference_date_if_none_is_given(serve: Callable[..., Predictor], search_folder: Path) -> None:
    query = "what did the copier cost last year"
    found = ask(serve(), {"instances": [{"query": query}, {"query": query, "reference_date": None}]}).json()["predictions"]
    expected = load_router(search_folder).decide(query).to_json()
    for row in found:
        assert (row["start"], row["end"]) == (expected["start"], expected["end"])


# --- V2


def test_v2_json(serve: Callable[..., Predictor]) -> None:
    predictor = serve()
    instances = [{"query": query, "reference_date": DAY} for query in QUERIES]
    response = ask(predictor, tensor([json.dumps(instance) for instance in instances], id="mine"), V2)
    assert response.status_code == 200
    body = response.json()
    assert (body["id"], body["model_name"]) == ("mine", "search-router")
    assert body["model_version"] == predictor.router.model_version
    (output,) = body["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("decision", "BYTES", [len(QUERIES)])
    decisions = [json.loads(text) for text in output["data"]]
    assert without_ids(decisions) == without_ids(ask(predictor, {"instances": instances}).json()["predictions"])


def test_v2_without_an_id_gets_one(serve: Callable[..., Predictor]) -> None:
    assert len(ask(serve(), tensor(['{"query": "lawn"}']), V2).json()["id"]) == 32


def test_v2_binary_as_kserve_s_client_sends_it(serve: Callable[..., Predictor]) -> None:
    predictor = serve()
    sent = InferInput("instance", [2], "BYTES")
    sent.set_data_from_numpy(np.array([b'{"query": "lawn"}', '{"query": "Rosen für Käthe"}'.encode()], dtype=object))
    request = InferRequest("search-router", [sent], request_id="7", parameters={"binary_data_output": True})
    body, length = request.to_rest()

    async def asking(client: httpx.AsyncClient) -> httpx.Response:
        headers = {"Inference-Header-Content-Length": str(length), "Content-Type": "application/octet-stream"}
        return await client.post(V2, content=body, headers=headers)

    response = over_http(predictor, asking)
    assert response.status_code == 200
    answered = InferResponse.from_bytes(response.content, int(response.headers["Inference-Header-Content-Length"]))
    decisions = [json.loads(text) for text in answered.outputs[0].as_numpy().ravel()]
    assert decisions[0]["agents"] == ["garden"]
    assert answered.id == "7"


# --- Readiness, health, metadata


def test_ready_only_after_the_warm_up(search_folder: Path) -> None:
    predictor = Predictor(SearchRouter(search_folder, Exploration(0.0)), deadline_s=60.0)

    async def states(client: httpx.AsyncClient) -> list[int]:
        paths = ("/", "/v2/health/live", "/v2/health/ready", "/v1/models/search-router", "/v2/models/search-router/ready")
        codes = [(await client.get(path)).status_code for path in paths]
        refused = await client.post(V1, json={"instances": [{"query": "lawn"}]})
        assert refused.status_code in (200, 503)
        assert ("Retry-After" in refused.headers) == (refused.status_code == 503)
        return [*codes, refused.status_code]

    assert over_http(predictor, states) == [200, 200, 503, 503, 503, 503]
    predictor.load()
    assert over_http(predictor, states) == [200] * 6
    predictor.stop()
    assert over_http(predictor, states) == [200, 200, 503, 503, 503, 503]


def test_metadata(serve: Callable[..., Predictor]) -> None:
    predictor = serve()

    async def get(client: httpx.AsyncClient) -> list[Any]:
        return [(await client.get(path)).json() for path in ("/v1/models", "/v2/models", "/v2/models/search-router", "/v2")]

    v1, v2, model, server = over_http(predictor, get)
    assert v1 == v2 == {"models": ["search-router"]}
    assert model["inputs"] == [{"name": "instance", "datatype": "BYTES", "shape": [-1]}]
    assert model["versions"] == [server["version"]] == [predictor.router.model_version]


# --- Metrics


def test_metrics_count_what_happened(serve: Callable[..., Predictor]) -> None:
    predictor = serve()
    counted = {
        "ok": lambda: sample("routewright_requests_total", protocol="v1", outcome="ok"),
        "bad": lambda: sample("routewright_requests_total", protocol="v1", outcome="bad_input"),
        "garden": lambda: sample("routewright_decisions_total", agent="garden"),
        "total": lambda: sample("routewright_latency_seconds_count", phase="total"),
        "queue": lambda: sample("routewright_latency_seconds_count", phase="queue"),
        "forward": lambda: sample("routewright_latency_seconds_count", phase="forward"),
        "features": lambda: sample("routewright_latency_seconds_count", phase="features"),
    }
    before = {name: count() for name, count in counted.items()}
    ask(predictor, {"instances": [{"query": "lawn"}]})
    ask(predictor, {"instances": [{"query": "lawn", "when": "now"}]})
    after = {name: count() - before[name] for name, count in counted.items()}
    assert after == {"ok": 1, "bad": 1, "garden": 1, "total": 2, "queue": 1, "forward": 1, "features": 1}

    async def page(client: httpx.AsyncClient) -> str:
        return (await client.get("/metrics")).text

    text = over_http(predictor, page)
    assert 'routewright_decisions_total{agent="garden",router="search-router"}' in text
    assert "request_predict_seconds" in text  # KServe's own, on the same page


def test_abstentions_are_counted(tmp_path: Path) -> None:
    predictor = Predictor(SearchRouter(save_search_router(tmp_path, abstain=1.0), Exploration(0.0)), deadline_s=60.0)
    predictor.load()
    before = sample("routewright_abstentions_total")
    (row,) = ask(predictor, {"instances": [{"query": "lawn"}]}).json()["predictions"]
    predictor.stop()
    assert (row["agents"], row["abstained"]) == (["office"], True)
    assert sample("routewright_abstentions_total") - before == 1


def test_a_running_drift_score() -> None:
    """By hand: 500 decisions in one of two bins against an even reference, PSI with counts smoothed by one half."""
    drift = RunningDrift({"a": 50, "b": 50})
    scores = [drift.add("a") for _ in range(600)]
    assert [i + 1 for i, score in enumerate(scores) if score is not None] == [500, 525, 550, 575, 600]
    p, q = np.array([50.5, 50.5]) / 101, np.array([500.5, 0.5]) / 501
    assert scores[499] == pytest.approx(float(((p - q) * np.log(p / q)).sum()))


def test_a_drift_reference_in_the_folder(tmp_path: Path) -> None:
    folder = save_search_router(tmp_path)
    assert SearchRouter(folder, Exploration(0.0)).drift is None
    (folder / "routes.json").write_text('{"garden": 10, "office": 5}')
    assert SearchRouter(folder, Exploration(0.0)).drift is not None
    for broken in ("[]", "{", '{"garden": -1}', '{"garden": "x"}', "{}"):
        (folder / "routes.json").write_text(broken)
        with pytest.raises(BadInput, match=r"routes\.json: expected"):
            SearchRouter(folder, Exploration(0.0))


# --- Log, feedback, exploration


def test_decisions_and_feedback_become_a_query_log(serve: Callable[..., Predictor], tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    predictor = serve(log=FileLog(path))
    rows = ask(predictor, {"instances": [{"query": q, "reference_date": DAY} for q in QUERIES]}).json()["predictions"]
    assert feedback(predictor, rows[0]["request_id"], {"kitchen": 1, "office": 0.25}).json() == {"accepted": True}
    entries = read_query_log(path)
    assert [entry.query for entry in entries] == QUERIES
    first = entries[0]
    assert first.decision == rows[0]
    assert first.outcome == {"kitchen": 1, "office": 0.25}
    assert (first.router, first.model_version) == ("search-router", predictor.router.model_version)
    assert (first.explored, first.propensity, first.reference_date) == (False, 1.0, date(2024, 5, 31))
    assert first.timestamp is not None


def test_feedback_after_a_restart_and_rotation(serve: Callable[..., Predictor], tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    predictor = serve(log=FileLog(path, max_bytes=1))
    (row,) = ask(predictor, {"instances": [{"query": "lawn"}]}).json()["predictions"]
    ask(predictor, {"instances": [{"query": "desk"}]})
    predictor.stop()
    again = serve(log=FileLog(path, max_bytes=1))
    assert feedback(again, row["request_id"], {"garden": 1.0}).status_code == 200
    assert [entry.outcome for entry in read_query_log(path)] == [{"garden": 1.0}, {}]


def test_feedback_that_is_refused(serve: Callable[..., Predictor], tmp_path: Path) -> None:
    predictor = serve(log=FileLog(tmp_path / "d.jsonl"))
    (row,) = ask(predictor, {"instances": [{"query": "lawn"}]}).json()["predictions"]
    known = row["request_id"]
    cases: list[tuple[Any, Any, int, str]] = [
        ("0" * 32, {"garden": 1}, 404, "request_id: no decision"),
        ("nonsense", {"garden": 1}, 404, "request_id: no decision"),
        (7, {"garden": 1}, 400, "request_id: expected"),
        (known, {"attic": 1}, 400, "outcome.attic: unknown agent, expected one of kitchen, garden, office"),
        (known, {"garden": 1.5}, 400, "outcome.garden: expected"),
        (known, {"garden": "1"}, 400, "outcome.garden: expected"),
        (known, {"garden": True}, 400, "outcome.garden: expected"),
        (known, {}, 400, "outcome:"),
        (known, 1, 400, "outcome: expected"),
    ]
    for request_id, outcome, status, said in cases:
        response = feedback(predictor, request_id, outcome)
        assert (response.status_code, response.json()["error"][: len(said)]) == (status, said)
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) == 1


def test_without_a_log_nothing_is_kept(serve: Callable[..., Predictor]) -> None:
    predictor = serve()
    (row,) = ask(predictor, {"instances": [{"query": "lawn"}]}).json()["predictions"]
    response = feedback(predictor, row["request_id"], {"garden": 1})
    assert (response.status_code, response.json()) == (
        404, {"error": "request_id: no decision log is kept, start the server with --log"},
    )  # fmt: skip


@pytest.mark.parametrize("redaction", ["hash", "drop"])
def test_redaction_keeps_the_query_s_words_out_of_the_log(
    serve: Callable[..., Predictor], tmp_path: Path, redaction: str
) -> None:
    predictor = serve(log=FileLog(tmp_path / "d.jsonl"), redaction=redaction)
    query = "clean the oven of doctor Zebulon"
    rows = ask(predictor, {"instances": [{"query": query}, {"query": query}]}).json()["predictions"]
    assert rows[0]["keywords"]  # the caller gets them
    text = (tmp_path / "d.jsonl").read_text()
    for word in ("clean", "oven", "doctor", "zebulon", *rows[0]["keywords"]):
        assert word not in text.lower()
    first, second = (json.loads(line) for line in text.splitlines())
    assert first["query"] == second["query"]
    assert first["redacted"] == redaction
    assert (first["query"] == "") == (redaction == "drop")


def test_exploration_is_logged_with_its_propensity(serve: Callable[..., Predictor], tmp_path: Path) -> None:
    """Sets of agents are drawn; each propensity is that of the set in the log, and frequencies agree."""
    path = tmp_path / "d.jsonl"
    predictor = serve(log=FileLog(path), epsilon=0.6)
    for _ in range(20):
        rows = ask(predictor, {"instances": [{"query": "lawn"}] * 30}).json()["predictions"]
        for row in rows:
            assert row["bitmask"] == "".join("01"[name in row["agents"]] for name in predictor.router.agents)
            assert row["agents"] == sorted(row["agents"], key=lambda name: -row["scores"][name])
    logged = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(logged) == 600
    assert {(row["epsilon"], row["largest"]) for row in logged} == {(0.6, 3)}
    shares = Counter(frozenset(row["decision"]["agents"]) for row in logged)
    told = {frozenset(row["decision"]["agents"]): row["propensity"] for row in logged}
    own = frozenset({"garden"})
    # from one agent of three: two added, two exchanged; or any set, its size even from 1 to 3
    assert told[own] == pytest.approx(0.4 + 0.6 * (1 / 9) / 2)
    assert told[frozenset({"office"})] == pytest.approx(0.6 * (1 / 4 + 1 / 9) / 2)
    assert told[frozenset({"kitchen", "office"})] == pytest.approx(0.6 * (1 / 9) / 2)
    assert told[frozenset(predictor.router.agents)] == pytest.approx(0.6 * (1 / 3) / 2)
    assert sum(told.values()) == pytest.approx(1)
    for agents, propensity in told.items():
        assert shares[agents] / 600 == pytest.approx(propensity, abs=0.08)  # 4 standard errors
    assert all(row["explored"] for row in logged if row["decision"]["agents"] != ["garden"])
