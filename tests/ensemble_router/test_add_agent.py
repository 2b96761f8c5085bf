"""A new agent: its head alone learns from logged outcomes; what was there before stays bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_ensemble import ADD, AGENTS, SPELL, save_tiny_ensemble

pytest.importorskip("peft", reason="peft is in the train extra")

from transformers import AutoModelForCausalLM

from routewright import cli
from routewright.config import LoraSection
from routewright.ensemble_router.add_agent import ADAPTER_FILES, add_agent, read_outcomes
from routewright.ensemble_router.agents import add_adapters, save_adapters
from routewright.ensemble_router.cli import counted
from routewright.ensemble_router.router import load_ensemble_router
from routewright.errors import BadInput

COUNT = [f"how many e in {word}" for word in ("lamp", "door", "tree", "river", "stone", "cloud", "glass", "paper")]
HEADS = "familiarity.safetensors"


def adapters(base: Path, out: Path, names: list[str], **changes: Any) -> Path:
    """Adapters of that base model, or of one that `changes` of its config make different."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if changes:
        model = AutoModelForCausalLM.from_config(type(model.config)(**{**model.config.to_dict(), **changes}))
    save_adapters(add_adapters(model, names, LoraSection(r=4, alpha=8), seed=3), out)
    return out


def write_log(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_ensemble(tmp_path_factory.mktemp("trained") / "router")
    adapters(folder / "base", folder / "adapters", AGENTS)
    (folder / "routes.json").write_text(json.dumps(dict.fromkeys(AGENTS, 5)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapters(model / "base", tmp_path_factory.mktemp("new"), ["counter", "another"]) / "counter"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"query": query, "outcome": {"counter": 1.0, "speller": 0.0}} for query in COUNT[:6]]
    rows += [{"query": query, "outcome": {"counter": 0.0, "speller": 1.0}} for query in SPELL]
    rows += [{"query": query, "outcome": {"counter": 0.0, "adder": 1.0}} for query in ADD[:6]]
    rows += [{"query": query, "outcome": {"speller": 1.0}} for query in SPELL]  # says nothing of the new one
    return write_log(tmp_path_factory.mktemp("log") / "log.jsonl", rows)


def test_it_learns_where_it_is_better_and_all_else_stays_bit_for_bit(
    model: Path, log: Path, adapter: Path, tmp_path: Path
) -> None:
    before = {path.relative_to(model): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    told = add_agent(model, log, tmp_path / "out", "counter", adapter, seed=0)
    assert (told["queries"], told["above"]["queries"], told["below"]["queries"]) == (20, 6, 14)
    assert told["above"]["after"] > 0.7 > 0.3 > told["below"]["after"]
    assert {path.relative_to(model): path.read_bytes() for path in model.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "out" / "routes.json").exists()  # counts of the old agents alone
    for path, content in before.items():
        if not path.name.startswith(("familiarity.", "routes.")):
            assert (tmp_path / "out" / path).read_bytes() == content
    for file in ADAPTER_FILES:
        assert (tmp_path / "out" / "adapters" / "counter" / file).read_bytes() == (adapter / file).read_bytes()
    old, new = load_file(model / HEADS), load_file(tmp_path / "out" / HEADS)
    assert {key: value.numpy().tobytes() for key, value in old.items()} == {key: new[key].numpy().tobytes() for key in old}
    assert {key.split(".")[1] for key in new.keys() - old.keys()} == {"3"}
    router, earlier = load_ensemble_router(tmp_path / "out"), load_ensemble_router(model)
    assert router.agents == [*AGENTS, "counter"]
    for query in COUNT[6:]:
        assert router.decide(query).agents[0] == "counter"
    for query in (*SPELL, *ADD):
        assert router.decide(query).agents == earlier.decide(query).agents
    assert router.decide(SPELL[0]).model_version != earlier.decide(SPELL[0]).model_version


def test_without_an_adapter_it_is_a_head_alone_and_the_seed_decides_it(model: Path, log: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        add_agent(model, log, tmp_path / name, "counter", None, seed)
    heads = [(tmp_path / name / HEADS).read_bytes() for name in ("one", "again", "other")]
    assert heads[0] == heads[1] != heads[2]
    assert not (tmp_path / "one" / "adapters" / "counter").exists()


def test_agents_are_added_one_after_the_other(model: Path, log: Path, tmp_path: Path) -> None:
    add_agent(model, log, tmp_path / "one", "counter", None, 0)
    more = write_log(tmp_path / "more.jsonl", [{"query": "hello", "outcome": {"greeter": 0.9}}])
    add_agent(tmp_path / "one", more, tmp_path / "two", "greeter", None, 0)
    assert load_ensemble_router(tmp_path / "two").decide("hello").agents[0] == "greeter"
    assert json.loads((tmp_path / "two" / "familiarity.json").read_text())["added"] == ["counter", "greeter"]
    one, two = load_file(tmp_path / "one" / HEADS), load_file(tmp_path / "two" / HEADS)
    assert all(value.numpy().tobytes() == two[key].numpy().tobytes() for key, value in one.items())


def test_one_query_is_not_told_in_the_plural() -> None:
    assert [counted(number) for number in (1, 2, 1200)] == ["1 query", "2 queries", "1,200 queries"]


def test_gains_from_outcomes(tmp_path: Path) -> None:
    """Against the mean of all that have an outcome: 0.5 − 0.5, 1 − 0.5, alone 0.7, 0 − 2/3."""
    outcomes = [
        {"a": 1.0, "new": 0.5, "b": 0.0}, {"new": 1.0, "a": 0.0}, {"new": 0.7}, {"a": 1.0}, {"a": 1.0, "b": 1.0, "new": 0.0}
    ]  # fmt: skip
    log = write_log(tmp_path / "log", [{"query": f"q{n}", "outcome": outcome} for n, outcome in enumerate(outcomes)])
    found = read_outcomes(log, "new")
    assert [one.query for one in found] == ["q0", "q1", "q2", "q4"]
    assert [one.gain for one in found] == pytest.approx([0.0, 0.5, 0.7, -2 / 3])


def test_a_served_router_s_log_is_joined_with_its_feedback(tmp_path: Path) -> None:
    """Feedback on lines of their own; redacted queries and other routers' decisions teach nothing."""
    log = write_log(tmp_path / "log", [
        {"query": "q1", "request_id": "1", "router": "ensemble-router", "decision": {"agents": ["a"]}, "propensity": 0.5},
        {"query": "hmac-sha256:00", "request_id": "2", "router": "ensemble-router", "redacted": "hash"},
        {"query": "q3", "request_id": "3", "router": "search-router"},
        *({"request_id": number, "router": "ensemble-router", "outcome": {"new": 1.0}} for number in "123"),
    ])  # fmt: skip
    assert [one.query for one in read_outcomes(log, "new")] == ["q1"]


GOOD = {"query": "q", "outcome": {"counter": 1.0}}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"query": "q", "outcome": {"speller": 1.0}}], "log.jsonl: outcome: no query has one of agent 'counter'"),
        ([], r"no query has one of agent 'counter', expected lines such as \{"),
        ([{"query": "q", "outcome": {"counter": 1.0, "adder": 1.0}}], "is never better or worse than the others"),
        ([GOOD, {"query": "q", "outcome": {"counter": 7}}], r"query 2: outcome\.counter: expected less than or equal to 1"),
        ([GOOD, {"query": 7, "outcome": {"counter": 1}}], "query 2: query: expected a valid string"),
        ([GOOD, {"query": " ", "outcome": {"counter": 0.5}}], "query 2: query: expected a text, found an empty one"),
        ([GOOD, {"query": "a" * 2000, "outcome": {"counter": 0.5}}], "query 2: query: expected at most 1024 tokens"),
        ([GOOD, {"outcome": {"counter": 1}}], "line 2: expected a query, or a request_id and its outcome"),
        ([GOOD, [1]], "line 2: expected a JSON object"),
    ],
)  # fmt: skip
def test_a_log_that_teaches_nothing_or_is_broken(model: Path, tmp_path: Path, rows: list[Any], said: str) -> None:
    log = write_log(tmp_path / "log.jsonl", rows)
    with pytest.raises(BadInput, match=said) as caught:
        add_agent(model, log, tmp_path / "out", "counter", None, 0)
    assert str(log) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"), [("adder", "'adder' has a head already"), ("a.b", "without dots"), ("", "without dots")]
)
def test_names_that_cannot_be_used(model: Path, log: Path, tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        add_agent(model, log, tmp_path / "out", name, None, 0)


def test_an_adapter_that_does_not_fit_leaves_nothing_behind(model: Path, log: Path, tmp_path: Path) -> None:
    deeper = {"num_hidden_layers": 5, "layer_types": None}
    wider = {"hidden_size": 64}
    for number, changes in enumerate((wider, deeper)):
        wrong = adapters(model / "base", tmp_path / f"wrong-{number}", ["counter", "another"], **changes) / "counter"
        with pytest.raises(BadInput, match=rf"^adapter {wrong}: it does not fit the base model"):
            add_agent(model, log, tmp_path / "out", "counter", wrong, 0)
    with pytest.raises(BadInput, match=r"adapter_config\.json is missing, expected a LoRA adapter's folder"):
        add_agent(model, log, tmp_path / "out", "counter", tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == []


def test_the_command_line(
    model: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(model), "--log", str(log), "--out", str(tmp_path / "out"), "--name", "counter"]
    codes = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["routewright", "ensemble", "add-agent", *options])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        codes.append(stopped.value.code or 0)
    shown = capsys.readouterr()
    assert codes == [0, 2]
    assert "counter: head trained for 300 steps on 20 queries with" in shown.out
    assert "worse than the average (14 queries): " in shown.out
    assert f"routewright serve ensemble-router --model {tmp_path / 'out'}" in shown.out
    assert shown.err.strip() == f"error: --out {tmp_path / 'out'}: it is there already, expected a new folder"
