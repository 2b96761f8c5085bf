"""The stages coevolve and evaluate on two tiny agents: every trained rule has its row, what is done is not repeated."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("peft", reason="peft is in the train extra")

from routewright.ensemble_router import coevolve as loop
from routewright.ensemble_router import coevolve_rules as stage
from routewright.ensemble_router import held_out
from routewright.ensemble_router.agents import adapter_parameters
from routewright.ensemble_router.coevolve_rules import coevolve_rules
from routewright.ensemble_router.evaluation_run import OOD_RECORDS, RECORDS, evaluate_ensemble
from routewright.ensemble_router.familiarity import load_heads
from routewright.ensemble_router.held_out import Held, Outcome, always, outcome
from routewright.ensemble_router.pooled import read_records
from routewright.ensemble_router.profile import EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.prompts import encode_prompt
from routewright.ensemble_router.results import EnsembleResults, row_of
from routewright.ensemble_router.router import load_ensemble_router
from routewright.ensemble_router.tasks import Task, read_tasks, write_tasks
from routewright.ensemble_router.warm_up import base_model
from routewright.errors import BadInput
from routewright.evaluation.summary import Summary
from serving.ensemble_router import EnsembleRouterPredictor
from serving.exploration import Exploration

RULES = (
    "familiarity", "top-1", "all", "frozen-agents", "frozen-router", "one-model", "random", "linucb", "icl", "last-layer",
    "half-lambda",
)  # fmt: skip


def tasks(split: str, n: int) -> list[Task]:
    return [
        Task(id=f"{split}-{domain}-{k}", prompt=f"{domain} {split} {k}", answer=answer, domain=domain, check="exact")
        for domain, answer in (("ones", "1"), ("twos", "2"))
        for k in range(n)
    ]


def coin(task: Task, completion: str) -> float:
    return float(zlib.crc32((task.id + completion).encode()) % 2)


def tiny(rules: tuple[str, ...] = RULES) -> EnsembleProfile:
    content = load_ensemble_profile("smoke").model_dump()
    content["backbone"].update({"hidden_size": 32, "num_layers": 4})
    content.update({"pretrain": None, "warm_up": None})
    content["agents"].update({"count": 2, "prompts": 2, "max_new_tokens": 3})
    content["coevolve"].update({"queries": 4, "budget": 24, "router_first": 8, "rules": rules})
    content["evaluation"] = {"bootstrap": 50, "taus": [0.2]}
    return EnsembleProfile.model_validate(content)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with dataset/, trained/ and evaluation/."""
    folder = tmp_path_factory.mktemp("ensemble")
    for name, n in (("train", 12), ("dev", 4), ("test", 6), ("out-of-distribution", 2)):
        write_tasks(folder / "dataset" / f"{name}.jsonl", tasks(name, n))
    (folder / "dataset" / "dataset.json").write_text('{"tasks_sha256": "0"}', encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "verify", coin)
        patch.setattr(held_out, "verify", coin)
        coevolve_rules(folder / "dataset", folder / "trained", tiny(), 0)
        evaluate_ensemble(folder / "dataset", folder / "trained", folder / "evaluation", tiny(), 0)
    return folder


def test_every_rule_has_its_row(done: Path) -> None:
    summary = Summary.model_validate_json((done / "evaluation" / "summary.json").read_text())
    names = [row.name for row in summary.rows]
    extra = {"base", "last-layer", "half-lambda"}
    assert extra < set(names)
    assert [name for name in names if name not in extra] == [
        "majority", "warm", "single-best", "one-model", "random", "top-1", "all", "linucb", "icl", "frozen-router",
        "frozen-agents", "familiarity", "warm:single-best", "warm:routed", "co-evolved:top-1", "co-evolved:top-2",
        "co-evolved:all", "co-evolved:random", "co-evolved:linucb", "co-evolved:reward-regression", "co-evolved:classifier",
        "co-evolved:icl",
    ]  # fmt: skip
    rows = {row.name: row.metrics for row in summary.rows}
    assert {name: rows[name]["agents_per_query"].mean for name in ("all", "top-1", "linucb", "single-best")} == {
        "all": 2.0, "top-1": 1.0, "linucb": 1.0, "single-best": 1.0,
    }  # fmt: skip
    assert rows["familiarity"]["accuracy"].n == 12
    assert rows["familiarity"]["accuracy/ood"].n == 4
    assert rows["majority"]["accuracy/ones"].mean == rows["majority"]["accuracy"].mean == 1.0
    assert rows["co-evolved:top-2"]["accuracy"] == rows["co-evolved:all"]["accuracy"]  # of two agents
    assert rows["co-evolved:top-1"]["accuracy"] == rows["co-evolved:all"]["accuracy"]  # the heavier vote wins
    assert "latency_ms/p50" not in rows["single-best"]
    assert rows["base"]["agents_per_query"].mean == 1.0
    assert rows["base"]["accuracy/ood"].n == 4
    assert all((done / "evaluation" / path).exists() for path in summary.artifacts.values())
    gates = {gate.name: gate for gate in summary.gates}
    assert "accuracy − co-evolved:classifier's, lower end" in gates
    assert gates["accuracy − top-1's, lower end"].bound == 0.0


def test_rules_are_fitted_on_training_questions_with_the_router_s_number_of_answers(done: Path) -> None:
    lines = (done / "evaluation" / "answers" / "familiarity-fit.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    train = {task.id for task in read_tasks(done / "dataset" / "train.jsonl")}
    assert {line["id"] for line in kept} <= train
    assert len(kept) == min(len(train), tiny().coevolve.budget // 2)  # of two agents
    assert not (done / "evaluation" / "answers" / "warm-fit.jsonl").exists()


def test_a_median_latency_has_the_interval_of_the_median() -> None:
    """Of 1, 2 … 1001 ms the median's order-statistic interval, by the binomial, ends at the 470th and 532nd value."""
    outcome = Outcome(np.ones(2), np.ones(2), np.ones(2), [[0], [0]])
    row = row_of("familiarity", ["a", "b"], outcome, [], None, [float(n) for n in range(1, 1002)], 0, 50)
    median = row.metrics["latency_ms/p50"]
    assert (median.mean, median.n) == (501.0, 1001)
    assert median.low == pytest.approx(470, abs=8)
    assert median.high == pytest.approx(532, abs=8)


def test_results_agree_with_the_kept_answers(done: Path) -> None:
    """The single row `one-model` and the accuracy matrix, computed anew from answers/."""
    results = EnsembleResults.model_validate_json((done / "evaluation" / "results.json").read_text())
    assert set(results.own) == set(RULES)
    kept = [json.loads(line) for line in (done / "evaluation" / "answers" / "one-model-test.jsonl").read_text().splitlines()]
    row = next(row for row in results.rows if row.name == "one-model")
    assert row.metrics["accuracy"].mean == pytest.approx(np.mean([line["rewards"][0] for line in kept]))
    assert row.metrics["tokens"].mean == pytest.approx(np.mean([line["tokens"][0] for line in kept]))
    kept = [json.loads(line) for line in (done / "evaluation" / "answers" / "warm-test.jsonl").read_text().splitlines()]
    ones = np.array([line["rewards"] for line in kept if "ones" in line["id"]])
    assert results.specialisation.warm_accuracy["ones"] == pytest.approx(ones.mean(axis=0).tolist())
    assert [point.tau for point in results.curve] == [0.2, 0.7]
    assert {c.b for c in results.comparisons if c.ood} == {c.b for c in results.comparisons if not c.ood}
    assert len(results.map) == 12


def test_ablations_decide_by_their_own_state_and_lambda(done: Path) -> None:
    """Computed anew from the saved heads: one layer's state of 32 numbers, and half of λ = 2."""
    base, tokenizer = base_model(tiny(), [], done / "trained" / "base", 0)
    questions = tasks("test", 6)
    prompts = [torch.tensor([encode_prompt(tokenizer, task.prompt)]) for task in questions]
    results = EnsembleResults.model_validate_json((done / "evaluation" / "results.json").read_text())
    rows = {row.name: row.metrics for row in results.rows}
    for rule, layers, lam in (("last-layer", (4,), 2.0), ("half-lambda", (2, 3), 1.0)):
        heads, description = load_heads(done / "trained" / "rules" / rule / "router")
        assert (heads.width, description["lambda"]) == (32 * len(layers), lam)
        asked = []
        for tokens in prompts:
            hidden = base.get_decoder()(tokens, output_hidden_states=True).hidden_states
            f = np.exp(-lam * heads(torch.cat([hidden[layer][:, -1] for layer in layers], dim=-1)).detach().numpy()[0])
            asked.append(1 if f.max() >= 0.7 else 2)
        assert rows[rule]["agents_per_query"].mean == np.mean(asked)


def test_the_base_answers_with_its_adapters_off(done: Path) -> None:
    base, tokenizer = base_model(tiny(), [], done / "trained" / "base", 0)
    kept = [json.loads(line) for line in (done / "evaluation" / "answers" / "base-test.jsonl").read_text().splitlines()]
    for task, line in zip(tasks("test", 6), kept, strict=True):
        tokens = torch.tensor([encode_prompt(tokenizer, task.prompt)])
        made = base.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False)
        assert line["texts"] == [tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)]


def test_records_hold_each_row_s_answers_in_and_out_of_distribution(done: Path) -> None:
    results = EnsembleResults.model_validate_json((done / "evaluation" / "results.json").read_text())
    for name, suffix in ((RECORDS, ""), (OOD_RECORDS, "/ood")):
        records = read_records(done / "evaluation" / name)
        for row in results.rows:
            if row.name != "majority":
                assert records[row.name].reward.mean() == pytest.approx(row.metrics[f"accuracy{suffix}"].mean)
                assert records[row.name].tokens.mean() == pytest.approx(row.metrics[f"tokens{suffix}"].mean)


def test_the_router_folder_carries_what_drift_is_measured_from(done: Path) -> None:
    """First choices on the dev questions, which the predictor's gauge takes; a new agent makes them void."""
    folder = done / "trained" / "router"
    counts = json.loads((folder / "routes.json").read_text())
    router = load_ensemble_router(folder)
    asked = [router.decide(task.prompt).agents[0] for task in tasks("dev", 4)]
    assert counts == {name: asked.count(name) for name in ("agent-0", "agent-1")}
    predictor = EnsembleRouterPredictor(folder, Exploration(0.0, 1.0, seed=0))
    assert predictor.drift is not None
    scores = [predictor.drift.add(name) for _ in range(125) for name in (*asked[:2], *asked[4:6])]
    assert scores[-1] is not None


def test_what_is_done_is_not_repeated(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(stage, "coevolve", again)
    monkeypatch.setattr(stage, "warm_adapters", again)
    before = (done / "trained" / "router" / "familiarity.json").read_bytes()
    coevolve_rules(done / "dataset", done / "trained", tiny(), 0)
    assert (done / "trained" / "router" / "familiarity.json").read_bytes() == before
    stamp = (done / "evaluation" / "summary.json").stat().st_mtime_ns
    evaluate_ensemble(done / "dataset", done / "trained", done / "evaluation", tiny(), 0)
    assert (done / "evaluation" / "summary.json").stat().st_mtime_ns == stamp


def test_one_model_begins_from_an_adapter_with_the_warm_up_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tiny(("familiarity", "one-model", "top-1")).model_dump()
    content["warm_up"] = {"steps": 2, "batch_size": 4}
    profile = EnsembleProfile.model_validate(content)
    for name, n in (("train", 12), ("dev", 4), ("test", 6)):
        write_tasks(tmp_path / "dataset" / f"{name}.jsonl", tasks(name, n))
    (tmp_path / "dataset" / "dataset.json").write_text('{"tasks_sha256": "0"}', encoding="utf-8")
    monkeypatch.setattr(loop, "verify", coin)
    monkeypatch.setattr(held_out, "verify", coin)
    starts, real = {}, stage.coevolve

    def watched(*given: Any) -> Any:
        starts[given[4]] = [p.detach().clone() for p in adapter_parameters(given[2][0].model, "agent-0")]
        return real(*given)

    monkeypatch.setattr(stage, "coevolve", watched)
    coevolve_rules(tmp_path / "dataset", tmp_path / "trained", profile, 0)
    same = {rule: all(map(torch.equal, starts[rule], starts["top-1"])) for rule in starts}
    assert same == {"familiarity": True, "one-model": False, "top-1": True}
    evaluate_ensemble(tmp_path / "dataset", tmp_path / "trained", tmp_path / "evaluation", profile, 0)
    summary = Summary.model_validate_json((tmp_path / "evaluation" / "summary.json").read_text())
    rows = {row.name: row.metrics for row in summary.rows}
    assert rows["warm:one-model"]["agents_per_query"].mean == 1.0


def test_other_weights_are_judged_anew(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same profile, seed and questions, but another agent-0 of one rule: refused in place, answered anew elsewhere."""
    monkeypatch.setattr(held_out, "verify", coin)
    shutil.copytree(done, tmp_path / "copy")
    trained, out = tmp_path / "copy" / "trained", tmp_path / "copy" / "evaluation"
    file = trained / "rules" / "top-1" / "adapters" / "agent-0" / "adapter_model.safetensors"
    save_file({key: value + 0.5 for key, value in load_file(file).items()}, file)
    with pytest.raises(BadInput, match="another profile, seed or dataset"):
        evaluate_ensemble(done / "dataset", trained, out, tiny(), 0)
    for name in ("coevolution.json", "summary.json"):
        (out / name).unlink()
    times = {name: (out / "answers" / f"{name}-test.jsonl").stat().st_mtime_ns for name in ("top-1", "all", "base")}
    evaluate_ensemble(done / "dataset", trained, out, tiny(), 0)
    again = {name: (out / "answers" / f"{name}-test.jsonl").stat().st_mtime_ns for name in times}
    assert {name: again[name] == times[name] for name in times} == {"top-1": False, "all": True, "base": True}


def test_a_profile_with_a_frozen_router_needs_frozen_agents() -> None:
    with pytest.raises(ValueError, match="expected frozen-agents beside frozen-router"):
        tiny(("familiarity", "frozen-router"))


def test_another_seed_or_a_missing_training_is_told(done: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="another profile, seed or dataset"):
        coevolve_rules(done / "dataset", done / "trained", tiny(), 1)
    for trained, seed in ((done / "trained", 1), (tmp_path / "nothing", 0)):
        with pytest.raises(BadInput, match="expected what the coevolve stage trained"):
            evaluate_ensemble(done / "dataset", trained, tmp_path / "out", tiny(), seed)
    with pytest.raises(BadInput, match=r"dataset\.json: expected what the synthesize stage writes"):
        coevolve_rules(tmp_path, tmp_path / "trained", tiny(), 0)


def test_the_router_folder_decides_from_elsewhere(done: Path, tmp_path: Path) -> None:
    """Moved away from its training it still decides, and as the evaluation's rule did."""
    folder = tmp_path / "moved"
    folder.mkdir()
    for path in (done / "trained" / "router").rglob("*"):
        target = folder / path.relative_to(done / "trained" / "router")
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    router = load_ensemble_router(folder)
    decision = router.decide("ones test 0")
    assert set(decision.familiarity) == {"agent-0", "agent-1"}
    assert decision.agents[0] == max(decision.familiarity, key=lambda name: decision.familiarity[name])
    assert decision.cumulative == pytest.approx(sum(decision.familiarity[name] for name in decision.agents))
    assert decision.model_version == json.loads((folder / "familiarity.json").read_text())["model_version"]
    results = EnsembleResults.model_validate_json((done / "evaluation" / "results.json").read_text())
    asked = [router.decide(task.prompt).agents[0] for task in tasks("test", 6)]
    assert asked == [point.agent for point in results.map]


@pytest.mark.parametrize(
    ("query", "told"), [("", "found an empty one"), ("  \n", "found an empty one"), ("1 " * 2000, "at most 1024 tokens")]
)
def test_queries_that_cannot_be_read(done: Path, query: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        load_ensemble_router(done / "trained" / "router").decide(query)


def test_odd_text_is_a_query_too(done: Path) -> None:
    assert load_ensemble_router(done / "trained" / "router").decide("\ud800 ٣ \0").agents


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [("lambda", 0, "lambda: expected more than 0"), ("tau", 3, "tau: expected"), ("backbone", None, "is unreadable")],
)
def test_a_described_router_with_wrong_values_is_told(
    done: Path, tmp_path: Path, field: str, value: float | None, told: str
) -> None:
    for name in ("familiarity.json", "familiarity.safetensors"):
        (tmp_path / name).write_bytes((done / "trained" / "router" / name).read_bytes())
    described = json.loads((tmp_path / "familiarity.json").read_text())
    (tmp_path / "familiarity.json").write_text(json.dumps({**described, field: value}), encoding="utf-8")
    with pytest.raises(BadInput, match=told):
        load_ensemble_router(tmp_path)


def test_outcome_by_hand() -> None:
    """Three agents say 1, 2, 2: equal votes elect 2; one that weighs 0.9 elects 1; an abstaining one earns 0."""
    questions = [Task(id=str(n), prompt="?", answer="2", domain="d", check="exact") for n in range(2)]
    held = Held(
        [["1", "2", "2"], ["", "", ""]], np.array([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]), np.array([[1, 2, 3], [4, 5, 6]])
    )
    states = np.zeros((2, 4), dtype=np.float32)
    all_of_them = outcome(questions, held, states, always([0, 1, 2], 3))
    assert all_of_them.reward.tolist() == [1.0, 0.0]
    assert all_of_them.tokens.tolist() == [6.0, 15.0]
    weighed = outcome(questions, held, states, lambda _: ([0, 1, 2], np.array([0.9, 0.2, 0.3])))
    assert weighed.reward.tolist() == [0.0, 0.0]
    alone = outcome(questions, held, states, always([2], 3))
    assert (alone.reward.tolist(), alone.tokens.tolist(), alone.agents.tolist()) == ([1.0, 0.0], [3.0, 6.0], [1.0, 1.0])
