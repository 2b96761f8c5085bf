"""The ensemble router behind V1 and V2: decisions as in process, hostile requests, log, redaction, exploration, metrics."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from asgi_client import over_http
from hostile_bodies import at_random, by_hand, good
from prometheus_client import REGISTRY
from tiny_ensemble import ADD, AGENTS, SPELL, save_tiny_ensemble
from transformers import AutoModelForCausalLM

from routewright.config import BackboneSection
from routewright.ensemble_router.router import EnsembleRouter, load_ensemble_router
from routewright.errors import BadInput
from routewright.language_models.backbone import load_backbone
from routewright.pools.query_log import read_query_log
from serving.decision_log import FileLog
from serving.ensemble_router import EnsembleRouterPredictor
from serving.exploration import Exploration
from serving.predictor import Predictor
from serving.server import load_served

ROOT = Path(__file__).resolve().parents[2]
V1, V2 = "/v1/models/ensemble-router:predict", "/v2/models/ensemble-router/infer"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_ensemble(tmp_path_factory.mktemp("ensemble-router"))


@pytest.fixture(scope="module")
def router(folder: Path) -> EnsembleRouter:
    return load_ensemble_router(folder)


@pytest.fixture
def ensemble(folder: Path) -> Iterator[Callable[..., Predictor]]:
    """Makes warm predictors, which are stopped after the test."""
    made: list[Predictor] = []

    def make(epsilon: float = 0.0, cap: float = 1.0, redaction: Any = "none", **settings: Any) -> Predictor:
        served: Any = EnsembleRouterPredictor(folder, Exploration(epsilon, cap, seed=0), redaction)
        made.append(Predictor(served, **{"deadline_s": 60.0, **settings}))  # on a busy machine nothing is refused
        made[-1].load()
        return made[-1]

    yield make
    for predictor in made:
        predictor.stop()


def ask(predictor: Predictor, body: Any, path: str = V1) -> httpx.Response:
    async def asking(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    return over_http(predictor, asking)


def decided(predictor: Predictor, *queries: str) -> list[dict[str, Any]]:
    response = ask(predictor, {"instances": [{"query": query} for query in queries]})
    assert response.status_code == 200, response.text
    return list(response.json()["predictions"])


# --- Decisions


def test_a_served_decision_is_the_one_in_process(ensemble: Callable[..., Predictor], router: EnsembleRouter) -> None:
    queries = [SPELL[0], ADD[3], "what is this?", SPELL[5]]
    rows = decided(ensemble(), *queries)
    assert [row["agents"] for row in rows] == [["speller"], ["adder"], rows[2]["agents"], ["speller"]]
    for query, row in zip(queries, rows, strict=True):
        here = router.decide(query)
        assert set(row) == {"request_id", "model_version", "agents", "familiarity", "cumulative"}
        assert (row["agents"], row["familiarity"]) == (here.agents, here.familiarity)
        assert (row["cumulative"], row["model_version"]) == (here.cumulative, here.model_version)
        assert list(row["familiarity"]) == AGENTS
    assert len({row["request_id"] for row in rows}) == 4


def test_v2_carries_the_same_decision(ensemble: Callable[..., Predictor]) -> None:
    predictor = ensemble()
    (expected,) = decided(predictor, SPELL[1])
    texts = [json.dumps({"query": SPELL[1]})]
    tensor = {"name": "instance", "shape": [1], "datatype": "BYTES", "data": texts}
    answered = ask(predictor, {"inputs": [tensor]}, V2).json()
    assert (answered["model_name"], answered["model_version"]) == ("ensemble-router", expected["model_version"])
    (output,) = answered["outputs"]
    assert {**json.loads(output["data"][0]), "request_id": ""} == {**expected, "request_id": ""}


def test_concurrent_requests_get_their_own_answers(ensemble: Callable[..., Predictor]) -> None:
    queries = (SPELL + ADD) * 2

    async def together(client: httpx.AsyncClient) -> list[httpx.Response]:
        return await asyncio.gather(*(client.post(V1, json={"instances": [{"query": query}]}) for query in queries))

    found = [response.json()["predictions"][0]["agents"] for response in over_http(ensemble(), together)]
    assert found == ([["speller"]] * len(SPELL) + [["adder"]] * len(ADD)) * 2


# --- What nobody should send


@pytest.mark.parametrize(
    ("instance", "said"),
    [
        ({}, "instances[0].query: missing"),
        ({"query": 7}, "instances[0].query: expected a valid string"),
        ({"query": None}, "instances[0].query: expected a valid string"),
        ({"query": ["a"]}, "instances[0].query: expected a valid string"),
        ({"query": ""}, "instances[0].query: expected to have at least 1 character"),
        ({"query": " \n"}, "instances[0].query: expected a text with at least one character that is not a blank"),
        ({"query": "a", "reference_date": "2024-05-31"}, "instances[0].reference_date: unknown field"),
        ("a", "instances[0]: expected an object"),
        ({"query": "a" * 1100}, "instances[0].query: expected at most 1024 tokens, found 1102"),
        ({"query": "a" * 8193}, "instances[0].query: expected to have at most 8192 characters"),
    ],
)
def test_a_faulty_field_is_named(ensemble: Callable[..., Predictor], instance: Any, said: str) -> None:
    response = ask(ensemble(), {"instances": [instance]})
    assert (response.status_code, response.json()) == (400, {"error": said})


def test_a_query_that_is_too_long_fails_alone(ensemble: Callable[..., Predictor]) -> None:
    async def together(client: httpx.AsyncClient) -> list[httpx.Response]:
        queries = ["b" * 2000 if number % 3 == 0 else SPELL[number % 8] for number in range(24)]
        return await asyncio.gather(*(client.post(V1, json={"instances": [{"query": query}]}) for query in queries))

    codes = [response.status_code for response in over_http(ensemble(), together)]
    assert codes == [400 if number % 3 == 0 else 200 for number in range(24)]


def test_a_query_that_would_take_too_long_is_refused_before_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much the backbone reads: one pass over 40,960 tokens would keep all others waiting for minutes."""
    folder = save_tiny_ensemble(tmp_path / "router")
    config = folder / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 40_960}))
    predictor = Predictor(EnsembleRouterPredictor(folder, Exploration(0.0)), deadline_s=60.0)
    predictor.load()
    (found,) = decided(predictor, "a" * 2046)
    assert found["agents"]

    def waits(items: Any) -> None:
        raise AssertionError("it waits for its turn")

    monkeypatch.setattr(predictor.batcher, "submit", waits)
    response = ask(predictor, {"instances": [{"query": SPELL[0]}, {"query": "a" * 2047}]})
    said = "instances[1].query: expected at most 2048 tokens, found 2049"
    assert (response.status_code, response.json()) == (400, {"error": said})
    predictor.stop()


def test_hostile_bodies(ensemble: Callable[..., Predictor], tmp_path: Path) -> None:
    """Never a 500, no sentence repeats what was sent, the log stays whole, and the next decision is what it was."""
    predictor = ensemble(log=FileLog(tmp_path / "d.jsonl"))
    bodies = [*by_hand("ensemble-router"), *at_random("ensemble-router", 300)]
    assert len(bodies) > 800

    async def scenario(client: httpx.AsyncClient) -> Counter[int]:
        secret = good("ensemble-router")[V1]
        before = (await client.post(V1, json=secret)).json()["predictions"][0]
        counts: Counter[int] = Counter()
        for path, body in bodies:
            response = await client.post(path, content=body, headers=JSON)
            counts[response.status_code] += 1
            assert response.status_code in (200, 400, 404, 413), (path, body[:300], response.text[:300])
            if response.status_code != 200:
                assert 0 < len(response.json()["error"]) < 400
        after = (await client.post(V1, json=secret)).json()["predictions"][0]
        assert {**before, "request_id": ""} == {**after, "request_id": ""}
        return counts

    assert over_http(predictor, scenario)[400] > len(bodies) / 2
    for line in (tmp_path / "d.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line)


def test_the_openapi_document_is_sound(ensemble: Callable[..., Predictor]) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    document = over_http(ensemble(), lambda client: client.get("/openapi.json")).json()
    validator.validate(document)
    assert document["components"]["schemas"]["EnsembleInstance"]["required"] == ["query"]
    assert set(document["components"]["schemas"]["EnsembleDecision"]["required"]) == {
        "request_id", "model_version", "agents", "familiarity", "cumulative"
    }  # fmt: skip


def test_what_is_no_ensemble_router(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^ensemble router .*nowhere: no such folder"):
        load_served("ensemble-router", tmp_path / "nowhere", Exploration(0.0))
    with pytest.raises(BadInput, match=r"familiarity\.safetensors is missing"):
        load_served("ensemble-router", tmp_path, Exploration(0.0))
    with pytest.raises(BadInput, match="expected search-router, step-router or ensemble-router"):
        load_served("chess-router", folder, Exploration(0.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backbone_is_read_in_the_dtype_that_the_folder_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Not in float32 first, which takes twice the memory; every number is the one that training's cast gives."""
    base = BackboneSection(source="path", name="base", dtype=dtype)  # type: ignore[arg-type]
    folder = save_tiny_ensemble(tmp_path / "router", backbone=base.model_dump(mode="json"))
    trained, _ = load_backbone(base.model_copy(update={"name": str(folder / "base")}), [], 0)
    trained.to(getattr(torch, dtype))
    read, asked = AutoModelForCausalLM.from_pretrained, []

    def reading(*where: Any, **how: Any) -> Any:
        asked.append(how["dtype"])
        return read(*where, **how)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reading)
    served = load_ensemble_router(folder).model
    assert asked == [getattr(torch, dtype)]
    expected = [*trained.named_parameters(), *trained.named_buffers()]
    found = [*served.named_parameters(), *served.named_buffers()]
    for (name, one), (other, two) in zip(expected, found, strict=True):
        assert (name, one.dtype) == (other, two.dtype)
        assert torch.equal(one, two.cpu())


# --- What is kept


def test_decisions_and_feedback_become_a_query_log(ensemble: Callable[..., Predictor], tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    predictor = ensemble(log=FileLog(path))
    first, second = decided(predictor, SPELL[0], ADD[0])
    answers = [
        ask(predictor, {"request_id": request_id, "outcome": outcome}, "/v1/feedback").status_code
        for request_id, outcome in (
            (first["request_id"], {"speller": 1.0}), (second["request_id"], {"nobody": 1.0}), ("0" * 32, {"adder": 1.0}),
        )
    ]  # fmt: skip
    assert answers == [200, 400, 404]
    one, two = read_query_log(path)
    assert (one.query, one.outcome, one.router, one.propensity, one.explored) == (
        SPELL[0], {"speller": 1.0}, "ensemble-router", 1.0, False,
    )  # fmt: skip
    assert one.decision == first
    assert (two.query, two.outcome) == (ADD[0], {})


@pytest.mark.parametrize("redaction", ["hash", "drop"])
def test_redaction_keeps_the_query_out_of_the_log(
    ensemble: Callable[..., Predictor], tmp_path: Path, redaction: str
) -> None:
    predictor = ensemble(log=FileLog(tmp_path / "d.jsonl"), redaction=redaction)
    decided(predictor, "spell zebulon")
    text = (tmp_path / "d.jsonl").read_text(encoding="utf-8")
    assert "zebulon" not in text
    assert json.loads(text)["redacted"] == redaction


def test_exploration_draws_sets_of_agents_with_their_propensity(ensemble: Callable[..., Predictor], tmp_path: Path) -> None:
    """ε = 0.6, 3 agents, the router's choice a single one: two changes add one, two exchange it; or any set of 1 to 3."""
    predictor = ensemble(epsilon=0.6, log=FileLog(tmp_path / "d.jsonl"))
    for _ in range(12):
        for row in decided(predictor, *[SPELL[0]] * 20):
            assert row["cumulative"] == pytest.approx(sum(row["familiarity"][agent] for agent in row["agents"]))
    lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["largest"] for line in lines} == {3}
    counts = Counter(frozenset(line["decision"]["agents"]) for line in lines)
    told = {frozenset(line["decision"]["agents"]): line["propensity"] for line in lines}
    assert told[frozenset({"speller"})] == pytest.approx(0.4 + 0.6 * (1 / 9) / 2)
    assert told[frozenset({"speller", "adder"})] == pytest.approx(0.6 * (1 / 4 + 1 / 9) / 2)
    assert told[frozenset({"adder", "stranger"})] == pytest.approx(0.6 * (1 / 9) / 2)
    assert sum(told.values()) == pytest.approx(1)
    for agents, p in told.items():
        assert counts[agents] / 240 == pytest.approx(p, abs=4 * (p * (1 - p) / 240) ** 0.5)


def test_decisions_are_counted_for_each_agent(ensemble: Callable[..., Predictor]) -> None:
    def count(agent: str) -> float:
        labels = {"router": "ensemble-router", "agent": agent}
        return REGISTRY.get_sample_value("routewright_decisions_total", labels) or 0.0

    predictor, before = ensemble(), {agent: count(agent) for agent in AGENTS}
    decided(predictor, SPELL[0], SPELL[1], ADD[0])
    assert {agent: count(agent) - before[agent] for agent in AGENTS} == {"speller": 2, "adder": 1, "stranger": 0}


def test_drift_is_measured_against_a_reference_in_the_folder(tmp_path: Path) -> None:
    folder = save_tiny_ensemble(tmp_path / "router")
    assert EnsembleRouterPredictor(folder, Exploration(0.0)).drift is None
    (folder / "routes.json").write_text(json.dumps({"speller": 50, "adder": 50}))
    drift = EnsembleRouterPredictor(folder, Exploration(0.0)).drift
    assert drift is not None
    same = [drift.add(agent) for agent in ["speller", "adder"] * 250][-1]
    moved = [drift.add("stranger") for _ in range(500)][-1]
    assert same is not None
    assert moved is not None
    assert same < 0.1 < 1 < moved


# --- As a person starts it


def test_it_is_served_from_the_command_line(folder: Path, router: EnsembleRouter) -> None:
    from test_serve_command import Server

    from routewright.client import EnsembleRouterClient

    server = Server("ensemble-router", folder, "--epsilon", "0")
    with EnsembleRouterClient(server.url) as client:
        one, two = client.decide_many([ADD[0], SPELL[0]])
    assert "curl" in server.curl
    assert ":predict" in server.curl
    assert server.stop() == (0, "stopped\n", "")
    assert (one.agents, one.familiarity) == (["adder"], router.decide(ADD[0]).familiarity)
    assert two.cumulative == router.decide(SPELL[0]).cumulative


def test_serving_imports_no_trainer() -> None:
    code = (
        "import sys; sys.argv = sys.argv[:1]; import serving.server, serving.ensemble_router;"
        "print([name for name in ('trl', 'peft', 'datasets', 'kfp', 'mlflow', 'reasoning_gym') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
