"""What a promotion reads of real evaluations of trained routers, and the champion that answers the same queries again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from routewright.errors import BadInput
from routewright.evaluation.gates import Evidence, GateBounds, promotion_gates
from serving.promotion.evidence import answer_again, description_of, read_evidence, read_summary
from serving.promotion.latency import LATENCY_INPUTS


def test_the_evidence_of_a_run_is_its_row(evaluated: Path, rl_folder: Path) -> None:
    version = str(description_of("search-router", rl_folder)["model_version"])
    found = read_evidence("search-router", evaluated, "sft+rl", version)
    row = read_summary(evaluated).row("sft+rl")
    assert row is not None
    assert found.mean("quality") == pytest.approx(row.metrics["ndcg@10"].mean)
    assert len(found.judged) == row.metrics["ndcg@10"].n
    assert {judged.slice for judged in found.judged} == {"kitchen", "garden", "office"}
    assert found.metrics == {"valid": 1.0}
    assert found.p99_ms() is not None
    assert found.calibration("ece") is not None
    baseline = read_evidence("search-router", evaluated, "best-single", "best-single")
    assert baseline.data == found.data
    checks = promotion_gates(found, None, baseline, GateBounds())
    assert next(check.passed for check in checks if check.name == "quality − best-single, lower end")


def test_champion_and_candidate_answer_the_same_queries_in_one_run(
    dataset: Path, examples: Path, evaluated: Path, sft_folder: Path, rl_folder: Path, tmp_path: Path
) -> None:
    found = answer_again(dataset, examples, {"new": rl_folder, "old": sft_folder}, tmp_path)
    recorded = read_evidence("search-router", evaluated, "sft+rl", "new")
    assert [judged.quality for judged in found["new"].judged] == pytest.approx([j.quality for j in recorded.judged])
    asked = min(LATENCY_INPUTS, len(recorded.judged))
    assert len(found["old"].numbers("latency_ms")) == len(found["new"].numbers("latency_ms")) == asked
    checks = {check.name: check for check in promotion_gates(found["new"], found["old"], None, GateBounds())}
    assert checks["quality − champion, lower end"].value is not None
    assert checks["p99 latency / champion's"].value is not None


def changed(dataset: Path, examples: Path, folder: Path, *renamed: str, added: bool = False) -> tuple[Path, Path]:
    """A data set and its examples whose pool has other agents, "new-…", in the place of some, or beside all."""
    shutil.copytree(dataset, folder / "data")
    shutil.copytree(examples, folder / "examples")
    file, test = folder / "data" / "pool.yaml", folder / "examples" / "test.jsonl"
    pool, rows = yaml.safe_load(file.read_text()), [json.loads(line) for line in test.read_text().split("\n") if line]
    if added:
        pool["agents"].insert(0, {**pool["agents"][0], "name": "new"})
        rows = [row | {"outcome": {"new": 0.0} | row["outcome"]} for row in rows]
    for old in renamed:
        next(agent for agent in pool["agents"] if agent["name"] == old)["name"] = f"new-{old}"
        pool["fallback"] = pool["agents"][-1]["name"]
        for row in rows:
            for field in ("outcome", "qrels"):
                row[field] = {f"new-{name}" if name == old else name: value for name, value in row[field].items()}
    file.write_text(yaml.safe_dump(pool, sort_keys=False))
    test.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data", folder / "examples"


def test_a_champion_that_does_not_know_a_new_agent_decides_as_before(
    dataset: Path, examples: Path, rl_folder: Path, tmp_path: Path
) -> None:
    before = answer_again(dataset, examples, {"old": rl_folder}, tmp_path / "before")["old"]
    wider, asked = changed(dataset, examples, tmp_path, added=True)
    after = answer_again(wider, asked, {"old": rl_folder}, tmp_path / "after")["old"]

    def told(evidence: Evidence) -> list[Any]:
        return [(one.id, one.quality, one.probability, one.outcome, one.cost) for one in evidence.judged]

    assert told(after) == told(before)
    checks = promotion_gates(after, after, None, GateBounds())
    assert all(check.passed for check in checks)


def test_a_champion_loses_what_is_no_longer_there(dataset: Path, examples: Path, rl_folder: Path, tmp_path: Path) -> None:
    before = answer_again(dataset, examples, {"old": rl_folder}, tmp_path / "before")["old"]
    lost = {one.id for one in before.judged if one.slice == "garden" and one.quality > 0}
    assert lost
    smaller, asked = changed(dataset, examples, tmp_path, "garden")
    after = {one.id: one for one in answer_again(smaller, asked, {"old": rl_folder}, tmp_path / "after")["old"].judged}
    assert {name for name in lost if after[name].quality == 0} == lost, "the fallback has none of the garden's documents"
    assert {one.id: one.quality for one in before.judged if one.slice == "kitchen"} == {
        name: one.quality for name, one in after.items() if one.slice == "kitchen"
    }


def test_a_champion_without_its_fallback_uses_the_pools(
    dataset: Path, examples: Path, rl_folder: Path, tmp_path: Path
) -> None:
    other, asked = changed(dataset, examples, tmp_path, "garden", "office")
    found = answer_again(other, asked, {"old": rl_folder}, tmp_path / "after")["old"]
    offices = [one for one in found.judged if one.slice == "office"]
    assert [one.probability for one in offices if one.quality > 0], "asked as the fallback, though never chosen"
    assert {one.probability for one in offices if one.quality > 0} == {None}


def test_a_champion_of_other_agents_altogether_is_refused(
    dataset: Path, examples: Path, rl_folder: Path, tmp_path: Path
) -> None:
    other, asked = changed(dataset, examples, tmp_path, "kitchen", "garden", "office")
    with pytest.raises(
        BadInput,
        match=r"model version old routes to kitchen, garden, office, the pool has new-kitchen, new-garden, new-office: "
        r"expected an agent in common; to go on without a champion, take the alias away",
    ):
        answer_again(other, asked, {"old": rl_folder}, tmp_path)


def test_a_query_may_hold_any_line_separator_of_unicode(evaluated: Path, tmp_path: Path) -> None:
    shutil.copytree(evaluated, tmp_path / "evaluation")
    file = tmp_path / "evaluation" / "queries.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")
    first = json.loads(lines[0])
    lines[0] = json.dumps(first | {"query": "one\u2028two\u2029three\x85four"}, ensure_ascii=False)
    file.write_text("\n".join(lines), encoding="utf-8")
    read = read_evidence("search-router", tmp_path / "evaluation", "sft+rl", "v")
    known = read_evidence("search-router", evaluated, "sft+rl", "v")
    assert read.judged == known.judged
    assert read.data != known.data, "another question"
