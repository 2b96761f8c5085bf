"""The step router behind V1 and V2: decisions as in process, budgets, what an instance need not carry, log, exploration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi_client import over_http
from prometheus_client import REGISTRY
from tiny_routers import save_step_router

from routewright.pools.decision_log import write_step_feedback
from routewright.step_router.client import StepRouter, read_feedback
from routewright.step_router.features import Candidate, Context, compute_features, named
from serving.decision_log import FileLog
from serving.exploration import Exploration
from serving.predictor import Predictor
from serving.step_router import StepInstance, StepRouterPredictor

V1 = "/v1/models/step-router:predict"


def step(score: float = 0.9, **changes: Any) -> dict[str, Any]:
    candidates = [{"action": "go east", "verifier_score": score}, {"action": "look", "verifier_score": score / 2}]
    return {
        "observation": "a dark room", "candidates": candidates, "step": 0, "max_steps": 10, "budget_left": 3, **changes
    }  # fmt: skip


def ask(predictor: Predictor, *instances: Any, path: str = V1) -> httpx.Response:
    async def asking(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json={"instances": list(instances)})

    return over_http(predictor, asking)


def decided(predictor: Predictor, *instances: Any) -> list[dict[str, Any]]:
    response = ask(predictor, *instances)
    assert response.status_code == 200, response.text
    return list(response.json()["predictions"])


@pytest.fixture
def predictor(serve: Callable[..., Predictor]) -> Predictor:
    return serve("step-router")


def test_an_episode_decides_as_in_process(predictor: Predictor, step_folder: Path) -> None:
    """The client in process and the server that is told everything: same features, risks, thresholds and answers."""
    router = StepRouter.load(step_folder)
    episode = router.episode("light the lamp", max_steps=6, calls=2)
    history: list[dict[str, Any]] = []
    left = 2
    for number, score in enumerate((0.9, 0.2, 0.45, 0.3, 0.1, 0.55)):
        observation = f"room {number % 3}"
        candidates = [Candidate("go east", [-0.2, -0.1], score), Candidate(f"take lamp {number}", [-1.5], 0.1)]
        here = episode.decide(observation, candidates)
        (there,) = decided(predictor, {
            "observation": observation, "candidates": [vars(c) for c in candidates], "step": number, "max_steps": 6,
            "budget_left": left, "objective": "light the lamp", "history": history,
        })  # fmt: skip
        assert there["features"] == here.features
        assert (there["risk"], there["benefit"], there["threshold"]) == (here.risk, here.benefit, here.threshold)
        assert (there["escalate"], there["take"]) == (here.escalate, here.take)
        action = episode.acted("the LLM's" if here.take is None else here.take)
        history.append({"action": action, "observation": observation, "entropy": here.features["entropy"]})
        left -= here.escalate
    assert left < 2


def test_what_is_not_told_did_not_happen(predictor: Predictor) -> None:
    instance = step(step=4)
    (found,) = decided(predictor, instance)
    candidates = [Candidate(c["action"], None, c["verifier_score"]) for c in instance["candidates"]]
    assert found["features"] == named(compute_features(Context("", "a dark room", candidates, 4, 10)))
    names = ("repeats", "observation_novelty", "objective_overlap", "step", "time")
    assert [found["features"][name] for name in names] == [0, 1, 0, 4, 0.4]


def test_a_budget_is_hard_and_paced(predictor: Predictor) -> None:
    """Benefits in training were .1 .2 .3 .5 .6 .7 .8 .9: with 1 call for 4 steps only the upper quarter may use it, .7."""
    free, spare, paced, spent = decided(
        predictor,
        step(0.1, budget_left=None), step(0.1, budget_left=10), step(0.1, step=6, budget_left=1), step(0.1, budget_left=0),
    )  # fmt: skip
    assert (free["threshold"], free["escalate"], free["take"]) == (0.4, True, None)
    assert (spare["threshold"], paced["threshold"]) == (0.4, 0.7)
    assert (spent["threshold"], spent["escalate"], spent["take"]) == (1.0, False, "go east")


def test_a_decision_s_fields(predictor: Predictor) -> None:
    (found,) = decided(predictor, step())
    assert list(found) == [
        "request_id", "model_version", "escalate", "take", "risk", "benefit", "threshold", "features", "explored",
        "propensity", "timestamp",
    ]  # fmt: skip
    assert found["model_version"] == predictor.router.model_version
    assert (found["explored"], found["propensity"]) == (False, 1.0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"observation": 1}, "observation: expected"),
        ({"candidates": []}, "candidates:"),
        ({"candidates": "go"}, "candidates: expected"),
        ({"candidates": ["go"]}, "candidates[0]: expected"),
        ({"candidates": [{"verifier_score": 0.1}]}, "candidates[0].action: missing"),
        ({"candidates": [{"action": "go"}]}, "candidates: expected token_logprobs on every candidate"),
        ({"candidates": [{"action": "go", "verifier_score": "high"}]}, "candidates[0].verifier_score: expected"),
        ({"candidates": [{"action": "go", "verifier_score": True}]}, "candidates[0].verifier_score: expected"),
        ({"candidates": [{"action": "go", "token_logprobs": []}]}, "candidates[0].token_logprobs:"),
        ({"candidates": [{"action": "go", "token_logprobs": [0.5]}]}, "candidates[0].token_logprobs[0]: expected"),
        ({"candidates": [{"action": "go", "token_logprobs": [-1, None]}]}, "candidates[0].token_logprobs[1]: expected"),
        ({"candidates": [{"action": "go", "color": 1}]}, "candidates[0].color: unknown field"),
        ({"candidates": [{"action": "go", "verifier_score": 1}] * 65}, "candidates:"),
        ({"step": -1}, "step: expected"),
        ({"step": 11}, "step: expected a whole number from 0 to max_steps = 10, found 11"),
        ({"step": 1.5}, "step: expected"),
        ({"step": 10**30}, "step: expected"),
        ({"max_steps": 0}, "max_steps: expected"),
        ({"budget_left": -1}, "budget_left: expected"),
        ({"budget_left": True}, "budget_left: expected"),
        ({"objective": None}, "objective: expected"),
        ({"history": [{"action": "a", "observation": "b", "entropy": 0.5}]}, "history: expected at most step = 0 past"),
        ({"step": 1, "history": [{"action": "a", "observation": "b"}]}, "history[0].entropy: missing"),
        ({"step": 1, "history": [{"action": "a", "observation": "b", "entropy": 7}]}, "history[0].entropy: expected"),
        ({"weather": "fine"}, "weather: unknown field"),
    ],
)  # fmt: skip
def test_a_faulty_field_is_named(predictor: Predictor, change: dict[str, Any], field: str) -> None:
    response = ask(predictor, {**step(), **change})
    assert response.status_code == 400
    assert field in response.json()["error"]
    assert response.json()["error"].startswith("instances[0]")


@pytest.mark.parametrize("missing", ["observation", "candidates", "step", "max_steps", "budget_left"])
def test_what_an_instance_must_carry(predictor: Predictor, missing: str) -> None:
    instance = step()
    del instance[missing]
    assert ask(predictor, instance).json() == {"error": f"instances[0].{missing}: missing"}


def test_a_kind_of_evidence_that_training_did_not_have(tmp_path: Path) -> None:
    import torch

    from routewright.step_router.risk import RiskSettings, load_risk, save_risk
    from serving.instances import parse_model
    from serving.predictor import Timing

    folder = save_step_router(tmp_path)
    model, description = load_risk(folder)
    facts = {name: description[name] for name in ("thresholds", "operating", "benefits", "c_slm", "c_llm", "max_steps")}
    for kinds in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1]):
        model.evidence = torch.tensor([float(kind) for kind in kinds])
        save_risk(model, folder, RiskSettings(), facts)
        served = StepRouterPredictor(folder, Exploration(0.0))
        example = parse_model(StepInstance, served.examples[0])
        assert len(served.decide([example], Timing())) == 1  # what it warms up with is what it knows
    model.evidence = torch.tensor([1.0, 0.0, 0.0])
    save_risk(model, folder, RiskSettings(), facts)
    predictor = Predictor(StepRouterPredictor(folder, Exploration(0.0)), deadline_s=60.0)
    predictor.load()
    response = ask(predictor, step())
    predictor.stop()
    assert response.status_code == 400
    assert response.json()["error"].startswith("instances[0]: candidates: evidence: expected one of [-1]")


def test_a_faulty_instance_fails_its_own_request_alone(predictor: Predictor) -> None:
    import asyncio

    bad = step(history=[{"action": "a", "observation": "b", "entropy": 0.5}])

    async def together(client: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = [{"instances": [bad if i % 4 == 0 else step()]} for i in range(32)]
        return await asyncio.gather(*(client.post(V1, json=body) for body in bodies))

    codes = [response.status_code for response in over_http(predictor, together)]
    assert codes == [400 if i % 4 == 0 else 200 for i in range(32)]


def test_the_log_becomes_the_feedback_log_and_holds_no_text(serve: Callable[..., Predictor], tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    predictor = serve("step-router", log=FileLog(path))
    secret = "the vault of Zebulon"
    rows = decided(predictor, step(0.9, observation=secret, objective=secret, episode="e1"),
                   step(0.1, step=1, observation=secret, episode="e1"), step())  # fmt: skip
    assert [row["escalate"] for row in rows] == [False, True, False]

    async def end(client: httpx.AsyncClient) -> list[int]:
        bodies = [{"request_id": rows[1]["request_id"], "outcome": outcome} for outcome in ({"llm": 1}, {"garden": 1})]
        return [(await client.post("/v1/feedback", json=body)).status_code for body in bodies]

    assert over_http(predictor, end) == [200, 400]
    assert "Zebulon" not in path.read_text()
    assert "go east" not in path.read_text()
    assert write_step_feedback(path, tmp_path / "feedback.jsonl") == 2
    entries = read_feedback(tmp_path / "feedback.jsonl")
    assert [(e.episode, e.step, e.escalate, e.outcome) for e in entries] == [("e1", 0, False, 1), ("e1", 1, True, 1)]
    assert entries[0].features == rows[0]["features"]
    logged = json.loads(path.read_text().splitlines()[1])
    assert logged["decision"]["agents"] == ["llm"]


def test_exploration_is_a_fair_coin_and_stops_at_an_empty_budget(serve: Callable[..., Predictor]) -> None:
    predictor = serve("step-router", epsilon=0.5)
    rows = [row for _ in range(20) for row in decided(predictor, *[step(0.9)] * 30)]
    escalated = [row for row in rows if row["escalate"]]
    assert {row["propensity"] for row in escalated} == {0.25}
    assert {row["propensity"] for row in rows if not row["escalate"]} == {0.75}
    assert len(escalated) / 600 == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 600) ** 0.5)
    spent = decided(predictor, *[step(0.1, budget_left=0)] * 30)
    assert {(row["escalate"], row["explored"], row["propensity"]) for row in spent} == {(False, False, 1.0)}


def test_escalations_are_counted(predictor: Predictor) -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("routewright_escalations_total", {"router": "step-router"}) or 0.0

    before = count()
    decided(predictor, step(0.1), step(0.9))
    assert count() - before == 1


def test_drift_is_measured_against_the_benefits_of_training(tmp_path: Path) -> None:
    """Tied benefits share a bin; what lands in a bin that the reference left empty is counted all the same."""
    assert StepRouterPredictor(save_step_router(tmp_path / "few"), Exploration(0.0)).drift is None
    served = StepRouterPredictor(save_step_router(tmp_path / "many", benefits=[0.1] * 50 + [0.5] * 50), Exploration(0.0))
    assert served.drift is not None
    assert len({served._bin(0.1), served._bin(0.5)}) == 2
    same = [served.drift.add(served._bin(value)) for value in [0.1, 0.5] * 250][-1]
    moved = [served.drift.add(served._bin(value)) for value in [-1.0] * 500][-1]
    assert same is not None
    assert same < 0.1  # not 0: counts of an unequal number of decisions are smoothed
    assert moved is not None
    assert moved > 1
