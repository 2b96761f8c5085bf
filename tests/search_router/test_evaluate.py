"""The evaluation on the household pool: rows, metrics, records that bear them out, and what it must not look at."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from household import profile_with, read_lines

from routewright.config import Profile
from routewright.errors import BadInput
from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.ranking import agent_f1, exact_set
from routewright.evaluation.summary import SEARCH_ROWS, Difference, Row
from routewright.pools.pool import Pool
from routewright.pools.search import PoolSearch
from routewright.search_router import evaluate as evaluate_module
from routewright.search_router.evaluate import Evaluation, added_log_odds, evaluate, gates, log_odds, outcome_lr_weight
from routewright.search_router.examples import Example, read_examples
from routewright.search_router.reward import Action

Records = dict[str, dict[str, dict[str, Any]]]
NDCG = {"ndcg@10", "ndcg@10/mismatch", "ndcg@10/match", "ndcg@10/macro", "ndcg@10/routing", "ndcg@10/std"}
SEEN = NDCG | {"agent_f1", "exact_set", "valid", "cost", "agents_per_query"}
SAID = {"keyword_precision", "date_iou"}
TIMED = {"latency_ms/mean", "latency_ms/p50", "latency_ms/p99"}


@pytest.fixture(scope="module")
def summary(evaluated: Path) -> dict[str, Any]:
    return json.loads((evaluated / "summary.json").read_text())


@pytest.fixture(scope="module")
def means(summary: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {row["name"]: {key: value["mean"] for key, value in row["metrics"].items()} for row in summary["rows"]}


@pytest.fixture(scope="module")
def records(evaluated: Path) -> Records:
    found: Records = defaultdict(dict)
    for record in read_lines(evaluated / "records.jsonl"):
        assert record["id"] not in found[record["row"]], "one record a row and query"
        found[record["row"]][record["id"]] = record
    return found


@pytest.fixture(scope="module")
def again(
    dataset: Path, examples: Path, sft_folder: Path, rl_folder: Path, profile: Profile
) -> Callable[..., list[dict[str, Any]]]:
    """Evaluate into another folder; returns the records."""

    def run(out: Path, examples: Path = examples, rl: Path = rl_folder, profile: Profile = profile) -> list[dict[str, Any]]:
        evaluate(dataset, examples, sft_folder, rl, out, profile, seed=0)
        return read_lines(out / "records.jsonl")

    return run


def test_all_files_are_there(evaluated: Path) -> None:
    names = {file.name for file in evaluated.iterdir() if file.is_file()}
    assert names >= {"summary.json", "report.html", "table.md", "records.jsonl", "queries.jsonl", "confusion.json"}
    assert not list(evaluated.glob("*.partial"))
    assert "sft+rl" in (evaluated / "table.md").read_text()
    assert (evaluated / "report.html").read_text(encoding="utf-8").lower().startswith("<!doctype html")


def test_the_rows_and_metrics_of_the_contract(summary: dict[str, Any], means: dict[str, dict[str, float]]) -> None:
    assert [row["name"] for row in summary["rows"]] == list(SEARCH_ROWS)
    assert (summary["pipeline"], summary["profile"], summary["seed"]) == ("search-router", "smoke", 0)
    for name, metrics in means.items():
        expected = SEEN - {"ndcg@10/mismatch"} | ({"ndcg@10/mismatch"} & metrics.keys())
        if name in ("sft", "sft+lr", "sft+rl"):
            expected |= SAID
        if name in ("sft", "sft+rl", "zero-shot"):
            expected |= TIMED | {"valid/unconstrained"}
        assert metrics.keys() == expected, name
        if name != "zero-shot":  # which answers some of the queries, maybe no mismatch among them
            assert "ndcg@10/mismatch" in metrics
        assert all(np.isfinite(list(metrics.values())))
        assert metrics["valid"] == 1.0
    for row in summary["rows"]:
        for estimate in row["metrics"].values():
            assert estimate["low"] <= estimate["mean"] <= estimate["high"]
    assert all(Path(path).suffix for path in summary["artifacts"].values())


def test_a_row_of_one_query_more_or_less(records: Records, splits: dict[str, list[Example]], profile: Profile) -> None:
    ids = [example.id for example in splits["test"]]
    for row, found in records.items():
        if row == "zero-shot":
            assert list(found) == ids[: profile.evaluation.zero_shot_queries]
        else:
            assert list(found) == ids, row


def test_means_are_those_of_the_records(records: Records, means: dict[str, dict[str, float]]) -> None:
    for row, found in records.items():
        for metric in ("ndcg@10", "agent_f1", "exact_set", "cost", "agents_per_query", "valid"):
            values = [record["metrics"][metric] for record in found.values()]
            assert means[row][metric] == pytest.approx(np.mean(values)), (row, metric)
            if metric == "ndcg@10":
                assert means[row]["ndcg@10/std"] == pytest.approx(np.std(values), rel=0.06)


def test_records_are_consistent(records: Records, splits: dict[str, list[Example]], pool: Pool) -> None:
    by_id = {example.id: example for example in splits["test"]}
    search = PoolSearch(pool)
    for row, found in records.items():
        for identity, record in found.items():
            example = by_id[identity]
            assert record["agents"]
            assert set(record["agents"]) <= set(pool.names)
            assert len(set(record["agents"])) == len(record["agents"])
            assert record["chosen"] == record["agents"][0]
            metrics = record["metrics"]
            assert metrics["agent_f1"] == agent_f1(record["agents"], example.best_agents())
            assert metrics["exact_set"] == exact_set(record["agents"], example.best_agents())
            assert metrics["cost"] == metrics["agents_per_query"] == len(record["agents"])
            if "scores" in record:
                assert list(record["scores"]) == pool.names
                if row not in ("union-bm25",):
                    assert record["agents"] == ["office"] or record["chosen"] == max(
                        record["scores"], key=record["scores"].__getitem__
                    )
            if len(record["agents"]) == 1 and row in ("random", "best-single", "intent", "outcome-lr", "oracle"):
                assert metrics["ndcg@10"] == pytest.approx(example.outcome[record["chosen"]])
            if row in ("sft+rl", "sft"):
                assert 0 <= metrics["keyword_precision"] <= 1
                assert 0 <= metrics["date_iou"] <= 1
    assert search.failures == {}


def test_the_oracle_is_above_every_single_agent(
    records: Records, means: dict[str, dict[str, float]], splits: dict[str, list[Example]], pool: Pool
) -> None:
    for example in splits["test"]:
        oracle = records["oracle"][example.id]
        assert oracle["metrics"]["ndcg@10"] == pytest.approx(example.best)
        assert oracle["metrics"]["agent_f1"] > 0
    for name in pool.names:
        assert means["oracle"]["ndcg@10"] >= np.mean([e.outcome[name] for e in splits["test"]])
    assert means["oracle"]["ndcg@10"] >= max(means[row]["ndcg@10"] for row in ("random", "best-single"))
    assert means["all-agents"]["agents_per_query"] == 3
    assert means["oracle"]["agents_per_query"] == 1
    assert means["random"]["agents_per_query"] == 1


def test_outcomes_help_where_intent_misleads(means: dict[str, dict[str, float]]) -> None:
    assert means["sft+rl"]["ndcg@10/mismatch"] >= means["sft"]["ndcg@10/mismatch"]
    assert means["sft+rl"]["ndcg@10"] > means["random"]["ndcg@10"] + 0.2
    assert means["intent"]["ndcg@10/match"] > means["intent"]["ndcg@10/mismatch"]


def test_routing_is_the_agents_alone(pool: Pool, splits: dict[str, list[Example]], tmp_path: Path) -> None:
    """It is what the agent returned for the query as it came, whatever keywords and dates the row says."""
    evaluation = Evaluation(pool, PoolSearch(pool, tmp_path), splits["test"])
    misled = ("rose", "rose", "rose", "rose", "rose", "rose")
    evaluation.add("misled", [Action((max(e.outcome, key=lambda n: e.outcome[n]),), misled, None) for e in splits["test"]])
    for example, record in zip(splits["test"], evaluation.records, strict=True):
        assert record["metrics"]["ndcg@10/routing"] == pytest.approx(example.best)
    found = {name: np.mean([r["metrics"][name] for r in evaluation.records]) for name in ("ndcg@10", "ndcg@10/routing")}
    assert found["ndcg@10"] < found["ndcg@10/routing"]


def test_outcome_lr_counts_as_much_as_dev_says(splits: dict[str, list[Example]]) -> None:
    dev, names = splits["dev"], list(splits["dev"][0].outcome)
    told = np.array([[example.outcome[name] for name in names] for example in dev]) * 0.8 + 0.1
    wrong = 1 - told
    assert outcome_lr_weight(told, wrong, dev, names) == 0.0
    # Log-odds of σ(told)'s opposite at weight 1 cancel out, only 2 turns the choice round.
    assert outcome_lr_weight(wrong, told, dev, names) == 2.0
    np.testing.assert_allclose(added_log_odds(np.array([0.5]), np.array([0.8]), 1.0), [0.8])
    np.testing.assert_allclose(added_log_odds(np.array([0.8]), np.array([0.2]), 0.5), [2 / 3])


def test_queries_are_described(evaluated: Path, splits: dict[str, list[Example]]) -> None:
    rows = read_lines(evaluated / "queries.jsonl")
    assert [row["id"] for row in rows] == [example.id for example in splits["test"]]
    for row, example in zip(rows, splits["test"], strict=True):
        assert row["query"] == example.query
        assert row["group"] == example.group
        assert row["best_agent"] in row["best_agents"]
        assert row["best_agent"] == max(example.outcome, key=example.outcome.__getitem__)
        assert row["labeller_agent"] == example.intent_agents[0]
        assert row["outcome"] == example.outcome
        assert row["mismatch"] == (example.outcome[row["labeller_agent"]] <= example.best - 0.2)
    assert 0 < sum(row["mismatch"] for row in rows) < len(rows)


def test_the_confusion_counts_every_query(evaluated: Path, records: Records, splits: dict[str, list[Example]]) -> None:
    confusion = json.loads((evaluated / "confusion.json").read_text())
    matrix = np.array(confusion["matrix"])
    assert confusion["labels"] == ["kitchen", "garden", "office"]
    assert matrix.sum() == len(splits["test"])
    right = sum(records["sft+rl"][e.id]["chosen"] == max(e.outcome, key=e.outcome.__getitem__) for e in splits["test"])
    assert np.trace(matrix) == right


def test_what_the_report_says_of_its_making(evaluated: Path, dataset: Path, rl_folder: Path) -> None:
    report = (evaluated / "report.html").read_text(encoding="utf-8")
    manifest = json.loads((dataset / "dataset.json").read_text())
    version = json.loads((rl_folder / "router.json").read_text())["model_version"]
    for fact in (manifest["md5"], manifest["pool_digest"], version, "household"):
        assert fact in report


def test_differences_are_paired(evaluated: Path, records: Records) -> None:
    found = {(d["a"], d["b"], d["subset"]): d for d in json.loads((evaluated / "differences.json").read_text())}
    expected = np.mean(
        [r["metrics"]["ndcg@10"] - records["sft"][i]["metrics"]["ndcg@10"] for i, r in records["sft+rl"].items()]
    )
    assert found["sft+rl", "sft", "overall"]["mean"] == pytest.approx(expected)
    assert ("sft+rl", "outcome-lr", "mismatch") in found


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**r, "metrics": {k: v for k, v in r["metrics"].items() if k != "latency_ms"}} for r in records]


def test_evaluating_twice_gives_the_same(again: Callable[..., Any], evaluated: Path, tmp_path: Path) -> None:
    assert untimed(again(tmp_path / "again")) == untimed(read_lines(evaluated / "records.jsonl"))


def test_test_labels_decide_nothing(again: Callable[..., Any], evaluated: Path, examples: Path, tmp_path: Path) -> None:
    """With every label and outcome of the test queries changed, all rows but the oracle decide as before."""
    folder = Path(shutil.copytree(examples, tmp_path / "examples"))
    rows = read_lines(folder / "test.jsonl")
    for row in rows:
        row |= {"qrels": {"garden": {"rose-red": 1}}, "home": "garden"}
        row |= {"outcome": {"kitchen": 0.0, "garden": 1.0, "office": 0.0}}
        row |= {"keywords": [], "start": None, "end": None, "intent": [0, 1, 0], "intent_agents": ["garden"]}
    # some keep a mismatch, for a subset without queries has no mean
    for row in rows[::2]:
        row["intent_agents"] = ["office"]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, after = ({(r["row"], r["id"]): r for r in records} for records in (
        read_lines(evaluated / "records.jsonl"), again(tmp_path / "out", examples=folder)
    ))  # fmt: skip
    assert before.keys() == after.keys()
    for key, record in after.items():
        if key[0] != "oracle":
            assert record["agents"] == before[key]["agents"], key
            assert record.get("scores") == before[key].get("scores"), key
    assert any(record["metrics"]["ndcg@10"] != before[key]["metrics"]["ndcg@10"] for key, record in after.items())


def test_training_and_dev_files_are_read_for_what_they_are(
    again: Callable[..., Any], tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Baselines get the same number of outcomes and of intent labels as the routers."""
    fitted: list[tuple[int, int]] = []
    fit = evaluate_module.fit_linear

    def spy(train: Any, labels: Any, dev: Any, names: Any) -> Any:
        fitted.append((len(train), len(dev)))
        return fit(train, labels, dev, names)

    monkeypatch.setattr(evaluate_module, "fit_linear", spy)
    few = profile.model_copy(
        update={
            "sft": profile.sft.model_copy(update={"queries": 70}), "rl": profile.rl.model_copy(update={"outcomes": 50}),
        }
    )  # fmt: skip
    again(tmp_path / "out", profile=few)
    assert fitted == [(70, 30), (50, 30)]


def test_a_second_policy_has_its_row(again: Callable[..., Any], rl_folder: Path, sft_folder: Path, tmp_path: Path) -> None:
    rl = Path(shutil.copytree(rl_folder, tmp_path / "rl"))
    shutil.copytree(sft_folder, rl / "judge")
    found = again(tmp_path / "out", rl=rl)
    rows = {row: [r["agents"] for r in found if r["row"] == row] for row in ("sft", "sft+rl/judge")}
    assert rows["sft+rl/judge"] == rows["sft"]
    names = [row["name"] for row in json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]]
    assert names.index("sft+rl/judge") == names.index("sft+rl") + 1


def test_a_prompted_model_has_its_row(
    again: Callable[..., Any], chat_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTEWRIGHT_LLM_BASE_URL", chat_server.url)
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "stand-in")
    decision = {"agents": ["office", "garden"], "keywords": ["kettle"], "start": "2021-01-01", "end": None}
    chat_server.answer = lambda request: json.dumps(decision)
    found = [record for record in again(tmp_path / "out") if record["row"] == "llm:stand-in"]
    assert len(found) == 30
    for record in found:
        assert record["agents"] == ["office", "garden"]
        assert record["metrics"]["valid"] == 1.0
        assert record["metrics"]["latency_ms"] > 0
        assert "keyword_precision" in record["metrics"]
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file():
            assert b"sk-very-secret" not in file.read_bytes(), file


def test_a_finished_folder_is_left_as_it_is(
    again: Callable[..., Any], evaluated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_module, "load_pool", lambda _: pytest.fail("evaluated again"))
    again(evaluated)


def test_examples_that_no_agent_answers_differently(again: Callable[..., Any], examples: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(examples, tmp_path / "examples"))
    rows = read_lines(folder / "train.jsonl")
    for row in rows:
        row["outcome"] = {"kitchen": 0.0, "garden": 0.0, "office": 1.0}
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInput, match="all training queries have the same outcome-lr label, expected at least two agents"):
        again(tmp_path / "out", examples=folder)
    assert not (tmp_path / "out" / "summary.json").exists()


def test_missing_test_queries(again: Callable[..., Any], examples: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(examples, tmp_path / "examples"))
    (folder / "test.jsonl").unlink()
    with pytest.raises(BadInput, match=r"test\.jsonl: no such file"):
        again(tmp_path / "out", examples=folder)


def test_log_odds() -> None:
    np.testing.assert_allclose(log_odds(np.array([0.5, 0.75])), [0.0, np.log(3)])
    assert np.isfinite(log_odds(np.array([0.0, 1.0]))).all()


# --- Gates


def gate_input(
    mismatch: float, match: float, ndcg: float, valid: float, p50: float, p99: float
) -> tuple[list[Row], list[Difference]]:
    def estimate(value: float) -> Estimate:
        return Estimate(mean=value, low=value, high=value, n=10)

    metrics = {"ndcg@10": ndcg, "valid": valid, "latency_ms/p50": p50, "latency_ms/p99": p99}
    rows = [
        Row(name="sft+rl", metrics={key: estimate(value) for key, value in metrics.items()}),
        Row(name="oracle", metrics={"ndcg@10": estimate(0.5)}),
    ]
    differences = [
        Difference(a="sft+rl", b="sft", subset=subset, mean=value, low=value, high=value, n=10)
        for subset, value in (("mismatch", mismatch), ("match", match))
    ]
    return rows, differences


def test_a_good_router_passes_every_gate() -> None:
    found = gates(*gate_input(0.1, -0.009, 0.40, 1.0, 60.0, 120.0))
    assert len(found) == 6
    assert all(gate.passed for gate in found)


@pytest.mark.parametrize(("place", "worse"), [(0, 0.0), (1, -0.01), (2, 0.399), (3, 0.999), (4, 60.1), (5, 120.1)])
def test_each_gate_can_say_no(place: int, worse: float) -> None:
    values = [0.1, 0.0, 0.45, 1.0, 30.0, 50.0]
    values[place] = worse
    assert [gate.passed for gate in gates(*gate_input(*values))] == [i != place for i in range(6)]


def test_the_runs_gates_are_its_numbers(summary: dict[str, Any], means: dict[str, dict[str, float]]) -> None:
    by_name = {gate["name"]: gate for gate in summary["gates"]}
    share = by_name["share of the oracle's NDCG@10"]
    assert share["value"] == pytest.approx(means["sft+rl"]["ndcg@10"] / means["oracle"]["ndcg@10"])
    assert share["passed"] == (share["value"] >= 0.8)


def test_the_profile_of_the_fixtures_is_smoke(examples: Path) -> None:
    """The household's splits are as its file says: four of six train, one dev, one test."""
    assert [len(read_examples(examples / f"{split}.jsonl")) for split in ("train", "dev", "test")] == [120, 30, 30]
    assert profile_with().name == "smoke"
