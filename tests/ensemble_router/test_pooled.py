"""Several seeds together: means by hand, intervals against an independent bootstrap, records as they are written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from routewright.ensemble_router.pooled import over_trainings, pooled_difference, read_records, tokens_saved


def test_every_seed_weighs_the_same() -> None:
    """Differences 1, 0 and 0, 0, 0, 1: means ½ and ¼, so ⅜."""
    pairs = [(np.array([1.0, 1.0]), np.array([0.0, 1.0])), (np.array([0.0, 0, 1, 1]), np.array([0.0, 0, 1, 0]))]
    found = pooled_difference(pairs, 0)
    assert (found.mean, found.n) == (0.375, 6)
    assert found.low <= 0.375 <= found.high


def test_the_pooled_interval_is_of_questions_within_seeds() -> None:
    """Seeds that differ a lot but hold constant differences leave nothing to resample."""
    found = pooled_difference([(np.ones(50), np.zeros(50)), (np.zeros(50), np.zeros(50))], 0)
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


def test_over_trainings_is_student_s_interval_of_the_seeds_means() -> None:
    # Means 0.1, 0.2, 0.3: s = 0.1, t(2) = 4.303, half = 4.303 * 0.1 / sqrt(3) = 0.2484; the questions' spread is no part.
    pairs = [(np.full(4, m) + np.array([-1.0, 1.0, -1.0, 1.0]), np.zeros(4)) for m in (0.1, 0.2, 0.3)]
    found = over_trainings(pairs)
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.2 - 0.2484, 0.2 + 0.2484), abs=1e-4)
    assert found.n == 3
    with pytest.raises(ValueError, match="two trainings"):
        over_trainings(pairs[:1])


def test_tokens_saved_by_hand() -> None:
    """Means 3 of 6 and 2 of 4: 1 − 5/10. Where every question saves half, every resample does."""
    pairs = [(np.array([2.0, 4.0]), np.array([4.0, 8.0])), (np.array([2.0]), np.array([4.0]))]
    found = tokens_saved(pairs, 0, 100)
    assert (found.mean, found.low, found.high, found.n) == (0.5, 0.5, 0.5, 3)
    with pytest.raises(ValueError, match="expected a row that generated tokens"):
        tokens_saved([(np.ones(3), np.zeros(3))], 0)


def test_the_interval_of_tokens_saved_is_paired() -> None:
    """Against resampling question numbers one by one, and narrower than with tokens that are not paired."""
    rng = np.random.default_rng(0)
    other = rng.integers(5, 40, 300).astype(float)
    own = other * 0.5 + rng.normal(0, 0.5, 300)
    found = tokens_saved([(own, other)], 1, 4000)
    drawn = []
    for _ in range(4000):
        rows = rng.integers(0, 300, 300)
        drawn.append(1 - own[rows].mean() / other[rows].mean())
    low, high = np.quantile(drawn, (0.025, 0.975))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.001)
    unpaired = tokens_saved([(rng.permutation(own), other)], 1, 4000)
    assert unpaired.high - unpaired.low > 3 * (found.high - found.low)


def test_records_by_row_in_the_order_of_the_questions(tmp_path: Path) -> None:
    lines = [
        {"row": row, "id": str(n), "domain": "d", "reward": reward, "tokens": 3.0 + n}
        for row, rewards in (("all", [1.0, 0.0]), ("familiarity", [0.0, 1.0]))
        for n, reward in enumerate(rewards)
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = read_records(tmp_path / "records.jsonl")
    assert {row: (r.reward.tolist(), r.tokens.tolist()) for row, r in found.items()} == {
        "all": ([1.0, 0.0], [3.0, 4.0]), "familiarity": ([0.0, 1.0], [3.0, 4.0]),
    }  # fmt: skip
    assert read_records(tmp_path / "nothing.jsonl") == {}
