"""What a promotion reads of real evaluations of trained routers, and the champion that answers the same queries again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from routewright.errors import BadInput
from routewright.evaluation.gates import GateBounds, promotion_gates
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


def test_a_champion_of_another_pool_is_refused(dataset: Path, examples: Path, rl_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copytree(dataset, tmp_path / "data", dirs_exist_ok=True)
    pool = tmp_path / "data" / "pool.yaml"
    pool.write_text(pool.read_text().replace("name: garden", "name: lawn"))
    with pytest.raises(BadInput, match=r"model version old routes to .*garden.*, the pool has .*lawn.*: expected the same"):
        answer_again(tmp_path / "data", examples, {"old": rl_folder}, tmp_path)
