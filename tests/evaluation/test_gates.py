"""Promotion gates: each passes and refuses for its own reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routewright.errors import BadInput
from routewright.evaluation.gates import Check, Evidence, GateBounds, Judged, load_bounds, promotion_gates

BOUNDS = GateBounds()


def evidence(quality: float = 0.7, count: int = 60, worse: dict[str, float] | None = None, **changes: Any) -> Evidence:
    """Sixty queries in three slices and two seeds, every fourth a mismatch; ``worse`` lowers the quality of a part."""
    worse = worse or {}
    judged = []
    for i in range(count):
        part, seed, mismatch = f"agent-{i % 3}", i % 2, i % 4 == 0
        value = quality + 0.1 * (i % 5) / 4 - worse.get(part, 0) - worse.get(f"seed-{seed}", 0)
        value -= worse.get("mismatch", 0) if mismatch else 0
        fields = {"probability": 0.8, "outcome": int(i % 5 > 0), "latency_ms": 20.0 + i / 10, "cost": 1.0}
        told = {name: changes.get(name, given) for name, given in fields.items()}
        judged.append(Judged(id=f"q{i}", quality=value, mismatch=mismatch, slice=part, seed=seed, **told))
    top = {name: value for name, value in changes.items() if name in Evidence.model_fields}
    return Evidence(**{"model_version": "v2", "data": "d1", "measured_in": "run", "judged": judged, **top})


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_an_equal_candidate_passes_every_gate() -> None:
    checks = promotion_gates(evidence(metrics={"valid": 1.0}), evidence(model_version="v1"), None, BOUNDS)
    assert failed(checks) == []
    assert list(by_name(checks)) == [
        "quality − champion, lower end", "quality on mismatches − champion, lower end", "worst seed − champion's",
        "worst slice − champion, upper end", "Brier − champion's", "ECE − champion's", "p99 latency / champion's",
        "cost / champion's", "valid decisions",
    ]  # fmt: skip
    assert by_name(checks)["p99 latency / champion's"].value == 1.0
    assert by_name(checks)["quality − champion, lower end"].why == "mean +0.0000 [+0.0000, +0.0000] over 60"


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"quality": 0.67}, ["quality − champion, lower end", "quality on mismatches − champion, lower end"]),
        ({"worse": {"mismatch": 0.03}}, ["quality on mismatches − champion, lower end"]),
        ({"worse": {"seed-1": 0.03}}, ["worst seed − champion's"]),
        ({"worse": {"agent-1": 0.06}}, ["worst slice − champion, upper end"]),
        ({"probability": 0.95}, ["Brier − champion's", "ECE − champion's"]),
        ({"latency_ms": 40.0}, ["p99 latency / champion's"]),
        ({"cost": 1.2}, ["cost / champion's"]),
        ({"metrics": {"valid": 0.99}}, ["valid decisions"]),
    ],
)
def test_a_worse_candidate_is_refused_by_the_gate_for_it(change: dict[str, Any], refused: list[str]) -> None:
    checks = promotion_gates(evidence(**change), evidence(model_version="v1"), None, BOUNDS)
    assert set(refused) <= set(failed(checks))
    # A part that is worse drags the whole down; no gate of another kind may speak.
    quality = {name for name in by_name(checks) if "quality" in name or "seed" in name or "slice" in name}
    assert set(failed(checks)) - set(refused) <= (quality if "worse" in change or "quality" in change else set())


def test_a_small_loss_within_the_margin_passes() -> None:
    assert failed(promotion_gates(evidence(quality=0.695), evidence(), None, BOUNDS)) == []


def test_what_cannot_be_measured_does_not_pass() -> None:
    other_data = promotion_gates(evidence(), evidence(data="d2"), None, BOUNDS)
    assert by_name(other_data)["quality − champion, lower end"].value is None
    assert "judged on other data or at other prices than v2" in by_name(other_data)["quality − champion, lower end"].why
    assert "worst slice − champion, upper end" in failed(other_data)
    fewer = promotion_gates(evidence(), evidence(count=59), None, BOUNDS)
    assert "1 are not in both" in by_name(fewer)["quality − champion, lower end"].why
    other_run = promotion_gates(evidence(), evidence(measured_in="yesterday"), None, BOUNDS)
    assert failed(other_run) == ["p99 latency / champion's"]
    assert "not measured in one run" in by_name(other_run)["p99 latency / champion's"].why
    assert failed(promotion_gates(evidence(latency_ms=None), evidence(), None, BOUNDS)) == ["p99 latency / champion's"]
    assert failed(promotion_gates(evidence(cost=1.0), evidence(cost=0.0), None, BOUNDS)) == ["cost / champion's"]


def test_gates_that_do_not_apply_are_left_out() -> None:
    bare = Evidence(
        model_version="v2", data="d", measured_in="r", judged=[Judged(id=f"e{i}", quality=i % 2) for i in range(40)]
    )
    checks = promotion_gates(bare, bare, None, BOUNDS)
    assert [check.name for check in checks] == ["quality − champion, lower end"]


def test_small_slices_are_not_looked_at() -> None:
    (check,) = [
        c
        for c in promotion_gates(evidence(worse={"agent-1": 0.2}), evidence(), None, GateBounds(slice_size=21))
        if "slice" in c.name
    ]
    assert check.passed
    assert check.why == "no slice has 21 queries"


def episodes(lost: int, per_task: int = 4, tasks: int = 30, grouped: bool = True) -> Evidence:
    """Each task under four seeds, which all end alike; the first ``lost`` tasks fail."""
    judged = [
        Judged(id=f"t{task}/{seed}", quality=float(task >= lost), slice="quest", group=f"t{task}" if grouped else None)
        for task in range(tasks)
        for seed in range(per_task)
    ]
    return Evidence(model_version="v", data="d", measured_in="run", judged=judged)


def test_episodes_of_one_task_are_resampled_together() -> None:
    """Three of 30 tasks more are lost: as 120 lone episodes surely worse than 0.01, as 30 tasks perhaps none."""
    name, bounds = "quality − champion, lower end", GateBounds(margin=0.17)
    alone = promotion_gates(episodes(3, grouped=False), episodes(0, grouped=False), None, bounds)
    grouped = promotion_gates(episodes(3), episodes(0), None, bounds)
    assert by_name(alone)[name].passed
    assert not by_name(grouped)[name].passed
    one, many = by_name(grouped)[name].value, by_name(alone)[name].value
    assert one is not None
    assert many is not None
    # the standard error of four times fewer values is twice as large
    assert (-0.1 - one) / (-0.1 - many) == pytest.approx(2, abs=0.35)
    assert by_name(grouped)[name].why.endswith("over 120")


def test_a_slice_of_few_tasks_is_not_looked_at_however_often_they_were_played() -> None:
    (check,) = [c for c in promotion_gates(episodes(3, 10, 5), episodes(0, 10, 5), None, BOUNDS) if "slice" in c.name]
    assert check.passed
    assert check.why == "no slice has 20 queries"


def test_a_first_model_meets_absolute_gates_only() -> None:
    baseline = evidence(quality=0.6, model_version="best-single")
    checks = promotion_gates(evidence(), None, baseline, BOUNDS)
    assert list(by_name(checks)) == ["quality − best-single, lower end", "ECE", "p99 latency, ms"]
    assert failed(checks) == []
    for quality in (0.55, 0.6):  # worse, and a router that always asks what the baseline asks
        checks_of_it = promotion_gates(evidence(quality=quality), None, baseline, BOUNDS)
        assert failed(checks_of_it) == ["quality − best-single, lower end"]
    assert failed(promotion_gates(evidence(latency_ms=200.0), None, baseline, BOUNDS)) == ["p99 latency, ms"]
    assert failed(promotion_gates(evidence(probability=0.2), None, baseline, BOUNDS)) == ["ECE"]
    # 0.8 was said and 48 of 60 came true.
    assert by_name(checks)["ECE"].value == pytest.approx(0.0)


def test_whole_run_calibration_counts_where_queries_have_no_probability() -> None:
    own = evidence(probability=None, metrics={"brier": 0.2, "ece": 0.05})
    champion = evidence(probability=None, metrics={"brier": 0.18, "ece": 0.05})
    checks = by_name(promotion_gates(own, champion, None, BOUNDS))
    assert checks["Brier − champion's"].value == pytest.approx(0.02)
    assert not checks["Brier − champion's"].passed
    assert checks["ECE − champion's"].passed


def test_bounds_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gates.yaml"
    file.write_text("margin: 0.05\n")
    assert load_bounds(file) == GateBounds(margin=0.05)
    file.write_text("")
    assert load_bounds(file) == BOUNDS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margin: two\n", "gates.yaml: margin: expected a valid number"),
        ("magrin: 0.1\n", "gates.yaml: magrin: unknown key, expected one of margin"),
        ("margin: [\n", "gates.yaml: not YAML"),
        ("- 1\n", "gates.yaml: content: expected a mapping"),
        (None, "gates.yaml: cannot be read"),
    ],
)
def test_bad_bounds(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "gates.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput, match=message):
        load_bounds(file)


def test_bounds_that_are_not_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "gates.yaml"
    file.write_bytes(b"margin: 0.05 # caf\xe9\n")
    with pytest.raises(BadInput, match="not YAML"):
        load_bounds(file)
