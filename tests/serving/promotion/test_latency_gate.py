"""The p99 gate: challenger and champion timed in turn, in one run, on the same inputs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_ensemble_promotion
import test_step_promotion
from evaluated_run import write_search_run
from promotion_commands import call

from routewright import model_registry as registry
from routewright.ensemble_router.router import EnsembleRouter
from routewright.search_router import evaluate, router
from routewright.search_router.examples import Example, write_examples
from routewright.step_router.client import StepRouter
from serving.promotion.latency import ROUNDS, spread

sys.path.append(str(Path(__file__).parents[2] / "search_router"))
from household import queries, write_household

NAME, CHUNK, WARM_UP = "search-router", 25, 5
GATES = "brier_rise: 1\nece_rise: 1\nmargin: 1\nmismatch_margin: 1\nslice_margin: 1\ncost_ratio: 100\n"


def write_run(out: Path, model: Path, pool: Path, second: float) -> Path:
    """A run whose model is that folder with another threshold, with the pool and thirty test queries beside it."""
    write_search_run(out, latency_ms=None)
    shutil.rmtree(out / "model")
    shutil.copytree(model, out / "model")
    described = json.loads((out / "model" / "router.json").read_text())
    (out / "model" / "router.json").write_text(json.dumps({**described, "second": second, "model_version": str(second)}))
    examples = []
    for agent in ("kitchen", "garden", "office"):
        outcome = {name: float(name == agent) for name in ("kitchen", "garden", "office")}
        for row in queries(agent)[:10]:
            examples.append(
                Example(
                    f"{agent}/{row['_id']}", row["text"], agent, row["_id"], {agent: {"x": 1}}, "2025-06-15",
                    intent=list(outcome.values()), intent_agents=[agent], outcome=outcome,
                )
            )  # fmt: skip
    (out / "examples").mkdir()
    write_examples(out / "examples" / "test.jsonl", examples)
    summary = json.loads((out / "summary.json").read_text())
    summary["artifacts"] |= {"fetch-dataset": str(pool), "synthesize": "examples"}
    (out / "summary.json").write_text(json.dumps(summary))
    return out


class Machine:
    """A clock that only decisions move: so many ms each by the model's name, four times as many from the n-th on."""

    def __init__(self, ms: dict[str, float], slow_after: float = float("inf")) -> None:
        self.ms, self.slow_after, self.now, self.decided = ms, slow_after, 0.0, list[str]()

    def perf_counter(self) -> float:
        return self.now

    def put_under(self, monkeypatch: pytest.MonkeyPatch, routers: type, method: str, name: Callable[[Any], str]) -> None:
        decide = getattr(routers, method)

        def timed(self_: Any, *asked: Any) -> Any:
            slower = 4 if len(self.decided) >= self.slow_after else 1
            self.decided.append(name(self_))
            self.now += slower * self.ms[name(self_)] / 1000
            return decide(self_, *asked)

        monkeypatch.setattr(routers, method, timed)
        monkeypatch.setattr(evaluate, "time", SimpleNamespace(perf_counter=self.perf_counter))


@pytest.mark.parametrize(
    ("ms", "slow_after", "passes"),
    [
        ({"0.9": 10.0, "0.8": 30.0}, float("inf"), False),
        ({"0.9": 10.0, "0.8": 11.0}, float("inf"), True),
        # what slows the machine down half way meets both
        ({"0.9": 10.0, "0.8": 11.0}, 2 * (CHUNK + WARM_UP), True),
        ({"0.9": 10.0, "0.8": 13.0}, 2 * (CHUNK + WARM_UP), False),
    ],
)
def test_a_slower_challenger_is_refused(
    store, search_folder: Path, tmp_path: Path, monkeypatch, ms: dict[str, float], slow_after: float, passes: bool
) -> None:
    pool = write_household(tmp_path / "pool").parent
    one = write_run(tmp_path / "one", search_folder, pool, 0.9)
    two = write_run(tmp_path / "two", search_folder, pool, 0.8)
    (tmp_path / "gates.yaml").write_text(GATES)
    assert call(monkeypatch, "promote", NAME, "--run", one, "--gates", tmp_path / "gates.yaml") == 0
    machine = Machine(ms, slow_after)
    machine.put_under(monkeypatch, router.Router, "decide", lambda decides: decides.model_version)
    assert call(monkeypatch, "promote", NAME, "--run", two, "--gates", tmp_path / "gates.yaml") == (0 if passes else 3)
    chunk = [CHUNK + WARM_UP] * 2 + [5 + WARM_UP] * 2
    turns = ["0.8"] * chunk[0] + ["0.9"] * chunk[1] + ["0.8"] * chunk[2] + ["0.9"] * chunk[3]
    assert machine.decided == turns
    found = json.loads((two / "promotion" / "decision.json").read_text())
    (gate,) = [check for check in found["checks"] if check["name"] == "p99 latency / champion's"]
    assert (gate["passed"], gate["bound"]) == (passes, 1.2)
    assert gate["value"] == pytest.approx(ms["0.8"] / ms["0.9"])
    slower = 4 if slow_after < float("inf") else 1
    assert gate["why"] == f"{slower * ms['0.8']:.4g} ms, champion's {slower * ms['0.9']:.4g} ms"
    assert f"{gate['value']:.4g}" in (two / "promotion" / "decision.md").read_text()
    assert registry.aliases(store, NAME)["champion"] == ("2" if passes else "1")
    if not passes:
        assert found["reason"] == "said no: p99 latency / champion's"


OTHERS = {
    "step-router": (
        lambda out, name: test_step_promotion.write_run(out, threshold=float(name)),
        (StepRouter, "predict", lambda decides: str(decides.threshold)),
        [25, 25, 10],
    ),
    "ensemble-router": (
        lambda out, name: test_ensemble_promotion.write_run(out, tau=float(name)),
        (EnsembleRouter, "decide", lambda decides: str(decides.tau)),
        [16],
    ),
}  # fmt: skip


def latency_gate(run: Path) -> dict[str, Any]:
    checks = json.loads((run / "promotion" / "decision.json").read_text())["checks"]
    (gate,) = [check for check in checks if check["name"] == "p99 latency / champion's"]
    return dict(gate)


@pytest.mark.parametrize("slower", [1.1, 3.0])
@pytest.mark.parametrize("name", OTHERS)
def test_a_slower_step_or_ensemble_router_is_refused(store, tmp_path: Path, monkeypatch, name: str, slower: float) -> None:
    write, patched, chunks = OTHERS[name]
    one, two = write(tmp_path / "one", "0.4"), write(tmp_path / "two", "0.6")
    assert call(monkeypatch, "promote", name, "--run", one) == 0
    first = latency_gate(one)
    assert (first["passed"], first["value"], first["bound"]) == (True, None, 1.2)
    assert first["why"] == "not measured: no champion to compare with"
    machine = Machine({"0.4": 10.0, "0.6": 10.0 * slower})
    machine.put_under(monkeypatch, *patched)
    assert call(monkeypatch, "promote", name, "--run", two) == (0 if slower < 1.2 else 3)
    turns = [model for count in chunks for model in ("0.6", "0.4") for _ in range(count + WARM_UP)]
    assert machine.decided == turns * ROUNDS
    gate = latency_gate(two)
    assert (gate["passed"], gate["bound"]) == (slower < 1.2, 1.2)
    assert gate["value"] == pytest.approx(slower)
    assert gate["why"] == f"{10 * slower:.4g} ms, champion's 10 ms"
    assert registry.aliases(store, name)["champion"] == ("2" if slower < 1.2 else "1")


@pytest.mark.parametrize("name", OTHERS)
def test_without_inputs_a_champion_is_not_replaced(store, tmp_path: Path, monkeypatch, name: str) -> None:
    write, _, _ = OTHERS[name]
    one, two = write(tmp_path / "one", "0.4"), write(tmp_path / "two", "0.6")
    shutil.rmtree(two / "examples")
    assert call(monkeypatch, "promote", name, "--run", one) == 0
    assert call(monkeypatch, "promote", name, "--run", two) == 3
    gate = latency_gate(two)
    assert (gate["passed"], gate["value"]) == (False, None)
    assert gate["why"] == "not measured: the run has no inputs that the synthesize stage wrote"


def test_inputs_are_taken_from_first_to_last() -> None:
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread(range(10), 10) == list(range(10))
