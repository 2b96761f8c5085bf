"""Requests that nobody should send: always an answer, never a 500, nothing of another request, and decisions go on."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi_client import over_http
from hostile_bodies import at_random, by_hand, good, instance

from serving import rest
from serving.decision_log import FileLog
from serving.instances import MAX_BODY_BYTES, MAX_INSTANCES
from serving.predictor import Predictor

ROUTERS = ("search-router", "step-router")
JSON = {"Content-Type": "application/json"}


async def send(client: httpx.AsyncClient, bodies: list[tuple[str, bytes]]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for path, body in bodies:
        response = await client.post(path, content=body, headers=JSON)
        counts[response.status_code] += 1
        assert response.status_code in (200, 400, 404, 413), (path, body[:300], response.text[:300])
        if response.status_code != 200:
            said = response.json()["error"]
            assert said
            assert len(said) < 400, "a sentence does not repeat what it was sent"
            assert "secret" not in said
    return counts


@pytest.mark.parametrize("router", ROUTERS)
def test_hostile_bodies_by_hand(serve: Callable[..., Predictor], router: str, tmp_path: Path) -> None:
    predictor = serve(router, log=FileLog(tmp_path / "d.jsonl"))
    bodies = list(by_hand(router))
    assert len(bodies) > 500
    if router == "step-router":  # as many places again; every third will do
        bodies = bodies[::3]

    async def scenario(client: httpx.AsyncClient) -> Counter[int]:
        secret = good(router)[f"/v1/models/{router}:predict"]
        before = await client.post(f"/v1/models/{router}:predict", json=secret)
        counts = await send(client, bodies)
        after = await client.post(f"/v1/models/{router}:predict", json=secret)
        changing = ("request_id", "timestamp")
        one, other = ({k: v for k, v in r.json()["predictions"][0].items() if k not in changing} for r in (before, after))
        assert one == other
        return counts

    counts = over_http(predictor, scenario)
    assert counts[400] > len(bodies) / 2
    for line in (tmp_path / "d.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("router", ROUTERS)
def test_hostile_bodies_at_random(serve: Callable[..., Predictor], router: str) -> None:
    counts = over_http(serve(router), lambda client: send(client, list(at_random(router, 300))))
    assert counts[400] > 100


def test_hostile_bodies_at_once_get_their_own_answers(serve: Callable[..., Predictor]) -> None:
    """Good requests among bad ones: each error is its own sender's, and no answer holds another's words."""
    predictor = serve()
    path = "/v1/models/search-router:predict"

    async def scenario(client: httpx.AsyncClient) -> None:
        async def one(number: int) -> None:
            word = f"oven{number:03}"
            query: Any = f"clean the {word}" if number % 3 else {"word": word}
            response = await client.post(path, json={"instances": [{"query": query}]})
            assert response.status_code == (200 if number % 3 else 400)
            for other in range(120):
                assert other == number or f"oven{other:03}" not in response.text

        await asyncio.gather(*(one(number) for number in range(120)))

    over_http(predictor, scenario)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "instances: missing, expected a list of instances"),
        ([], 'body: expected an object such as {"instances": [...]}'),
        ({"instances": {}}, "instances: expected a list of instances"),
        ({"instances": []}, f"instances: expected 1 to {MAX_INSTANCES} instances, found 0"),
        ({"instances": [{"query": "a"}] * 33}, f"instances: expected 1 to {MAX_INSTANCES} instances, found 33"),
        ({"instances": ["a"]}, "instances[0]: expected an object"),
        ({"instances": [{"query": "a"}, {}]}, "instances[1].query: missing"),
        ({"instances": [{"query": 7}]}, "instances[0].query: expected a valid string"),
        ({"instances": [{"query": " \n"}]},
         "instances[0].query: expected a text with at least one character that is not a blank"),
        ({"instances": [{"query": "a", "reference_date": "yesterday"}]},
         "instances[0].reference_date: expected a date such as 2024-05-31, from 1900-01-01 to 2199-12-31"),
        ({"instances": [{"query": "a", "reference_date": 20240531}]},
         "instances[0].reference_date: expected a date such as 2024-05-31, from 1900-01-01 to 2199-12-31"),
        ({"instances": [{"query": "a", "refrence_date": "2024-05-31"}]}, "instances[0].refrence_date: unknown field"),
    ],
)  # fmt: skip
def test_the_sentence_names_the_field(serve: Callable[..., Predictor], body: Any, said: str) -> None:
    async def asking(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/models/search-router:predict", json=body)

    response = over_http(serve(), asking)
    assert (response.status_code, response.json()) == (400, {"error": said})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": []}, "inputs: expected one tensor, named instance"),
        ({"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["{}"]}]}, "inputs: expected one tensor"),
        ({"inputs": [{"name": "instance", "shape": [1], "datatype": "FP32", "data": ["{}"]}]}, "inputs[0].datatype:"),
        ({"inputs": [{"name": "instance", "shape": [2], "datatype": "BYTES", "data": ["{}"]}]}, "inputs[0].shape:"),
        ({"inputs": [{"name": "instance", "shape": [-1], "datatype": "BYTES", "data": ["{}"]}]}, "inputs[0].shape:"),
        ({"inputs": [{"name": "instance", "shape": [1], "datatype": "BYTES", "data": [7]}]}, "inputs[0].data[0]:"),
        ({"inputs": [{"name": "instance", "shape": [1], "datatype": "BYTES"}]}, "inputs[0].data: missing"),
        ({"inputs": [{"name": "instance", "shape": [1], "datatype": "BYTES", "data": ["{"]}]}, "instance[0]: expected JSON"),
        ({"inputs": [{"name": "instance", "shape": [1], "datatype": "BYTES", "data": ["{}"]}]}, "instance[0].query: miss"),
        ({"outputs": [{"name": "logits"}]}, "outputs: expected only decision"),
        ({"id": 5}, "id: expected"),
        ({"inputs": [{"name": "instance", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}]},
         "inputs[0].parameters.binary_data_size:"),
    ],
)  # fmt: skip
def test_a_v2_sentence_names_the_field(serve: Callable[..., Predictor], change: dict[str, Any], said: str) -> None:
    body = {**good("search-router")["/v2/models/search-router/infer"], **change}

    async def asking(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v2/models/search-router/infer", json=body)

    response = over_http(serve(), asking)
    assert response.status_code == 400
    assert response.json()["error"].startswith(said)


@pytest.mark.parametrize("header", ["", "-1", "x", "99999", "1e3", "٣", "9" * 5000, "10", "0"])
@pytest.mark.parametrize("raw", [b"", b"\x01", b"\x05\x00\x00\x00ab", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00{}extra"])
def test_broken_binary_tensors(serve: Callable[..., Predictor], header: str, raw: bytes) -> None:
    parameters = {"binary_data_size": len(raw)}
    tensor = {"name": "instance", "shape": [1], "datatype": "BYTES", "parameters": parameters}
    start = json.dumps({"inputs": [tensor]}).encode()
    predictor = serve()

    async def asking(client: httpx.AsyncClient) -> list[int]:
        codes = []
        for length in (header, str(len(start))):
            headers = {"Inference-Header-Content-Length": length.encode()}
            response = await client.post("/v2/models/search-router/infer", content=start + raw, headers=headers)  # type: ignore[arg-type]
            codes.append(response.status_code)
        return codes

    assert over_http(predictor, asking) == [400, 400]


def test_sizes_types_and_slow_bodies(serve: Callable[..., Predictor], monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/v1/models/search-router:predict"
    fits = json.dumps({"instances": [{"query": "a" * (MAX_BODY_BYTES - 30)}]}).encode()
    assert len(fits) == MAX_BODY_BYTES
    monkeypatch.setattr(rest, "BODY_TIMEOUT_S", 0.05)

    async def chunks(count: int, pause: float = 0.0) -> AsyncIterator[bytes]:
        for _ in range(count):
            await asyncio.sleep(pause)
            yield b" " * 2**16

    async def scenario(client: httpx.AsyncClient) -> list[int]:
        responses = [
            await client.post(path, content=fits, headers=JSON),
            await client.post(path, content=fits + b" ", headers=JSON),
            await client.post(path, content=chunks(17), headers=JSON),  # no length is announced
            await client.post(path, content=b"{}", headers={"Content-Type": "text/plain"}),
            await client.post(path, content=b"{}", headers={"Content-Type": "application/x-www-form-urlencoded"}),
            await client.post(path, content=gzip.compress(fits), headers={**JSON, "Content-Encoding": "gzip"}),
            await client.post(path, json={"instances": [{"query": "a"}]}, headers={"Content-Encoding": "identity"}),
            await client.post(path, json={"instances": [{"query": "a"}]}, headers={"Content-Type": "Application/JSON; x=1"}),
            await client.post(path, content=b'{"instances": [{"query": "a"}]}'),
        ]
        assert responses[1].headers["connection"] == "close"
        return [response.status_code for response in responses]

    assert over_http(serve(), scenario) == [200, 413, 413, 415, 415, 415, 200, 200, 200]


def test_a_body_that_never_ends_is_given_up(serve: Callable[..., Predictor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "BODY_TIMEOUT_S", 0.05)
    app = rest.application(serve())
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(5)
        raise AssertionError("nobody waits that long")

    async def note(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/feedback", "raw_path": b"/v1/feedback", "query_string": b"",
        "headers": [], "http_version": "1.1", "scheme": "http", "server": ("router", 80), "client": ("x", 1),
        "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, note))
    assert sent[0]["status"] == 408


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/../etc/passwd", 404),
        ("POST", "/v1/models/other:predict", 404),
        ("POST", "/v1/models/search-router:explain", 404),
        ("POST", "/v2/models/search-router/versions/1/infer", 404),
        ("POST", "/v2/repository/models/search-router/unload", 404),
        ("POST", "/v2/repository/models/search-router/load", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/models/search-router:predict", 405),
        ("DELETE", "/v1/feedback", 405),
        ("POST", "/metrics", 405),
        ("GET", "/openapi.json", 200),
    ],
)
def test_paths_and_methods(serve: Callable[..., Predictor], method: str, path: str, status: int) -> None:
    response = over_http(serve(), lambda client: client.request(method, path))
    assert response.status_code == status
    assert status == 200 or response.json()["error"]


def test_a_fault_of_ours_is_a_plain_500_and_the_next_request_is_answered(serve: Callable[..., Predictor]) -> None:
    predictor = serve()
    decide = predictor.router.decide

    def broken(instances: Any, timing: Any) -> Any:
        if any("bug" in instance.query for instance in instances):
            raise ZeroDivisionError("a secret")
        return decide(instances, timing)

    predictor.router.decide = broken  # type: ignore[method-assign]

    async def scenario(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = [{"instances": [{"query": query}]} for query in ("a bug", "lawn", "a bug", "desk")]
        return await asyncio.gather(*(client.post("/v1/models/search-router:predict", json=body) for body in bodies))

    responses = over_http(predictor, scenario)
    assert [response.status_code for response in responses] == [500, 200, 500, 200]
    assert responses[0].json() == {"error": "internal error"}


def test_overload_is_told_with_a_time_to_come_back(serve: Callable[..., Predictor]) -> None:
    predictor = serve(max_waiting=4, max_batch=2)

    async def scenario(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"instances": [instance("search-router")]}
        return await asyncio.gather(*(client.post("/v1/models/search-router:predict", json=body) for _ in range(60)))

    responses = over_http(predictor, scenario)
    codes = Counter(response.status_code for response in responses)
    assert set(codes) == {200, 429}
    assert codes[200] >= 4
    assert all(int(r.headers["Retry-After"]) >= 1 for r in responses if r.status_code == 429)


def test_the_openapi_document_is_sound_and_names_every_route(serve: Callable[..., Predictor]) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    for router in ROUTERS:
        response = over_http(serve(router), lambda client: client.get("/openapi.json"))
        document = response.json()
        validator.validate(document)
        assert f"/v1/models/{router}:predict" in document["paths"]
        assert "/v1/feedback" in document["paths"]
        assert document["paths"][f"/v1/models/{router}:predict"]["post"]["responses"].keys() >= {"200", "400", "429", "503"}


def test_good_bodies_are_good(serve: Callable[..., Predictor]) -> None:
    for router in ROUTERS:
        predictor = serve(router)

        async def scenario(client: httpx.AsyncClient, router: str = router) -> list[int]:
            return [(await client.post(path, json=body)).status_code for path, body in good(router).items()]

        assert over_http(predictor, scenario) == [200, 200, 404]
