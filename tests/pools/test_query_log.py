from __future__ import annotations

import json
import logging
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from routewright.errors import BadInput
from routewright.pools.query_log import read_query_log

LINE: dict[str, Any] = {
    "query": "rotate a password 🔑", "reference_date": "2026-01-31", "agents": ["security"], "keywords": ["rotate"],
    "start": "2025-01-01", "end": None, "qrels": {"security": {"d1": 2}}, "outcome": {"security": 0.5},
    "request_id": "r1", "router": "search", "model_version": "3", "decision": {"agents": ["security"]},
    "explored": True, "propensity": 0.05, "timestamp": "2026-01-31T10:00:00Z", "unknown": 1,
}


def test_a_full_and_a_bare_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(LINE) + "\n\n" + '{"query": "x"}')
    full, bare = read_query_log(path)
    assert full.start == date(2025, 1, 1)
    assert full.qrels == {"security": {"d1": 2}}
    assert full.timestamp is not None
    assert full.timestamp.tzinfo is not None
    assert (bare.query, bare.agents, bare.propensity, bare.explored) == ("x", [], None, False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": 5}, "line 2: query: expected a valid string"),
        ({"outcome": {"a": 1.5}}, "line 2: outcome.a: expected less than or equal to 1"),
        ({"propensity": 0}, "line 2: propensity: expected greater than 0"),
        ({"start": "2025-01-02", "end": "2025-01-01"}, "line 2: expected an end not before the start 2025-01-02"),
        ({"start": "yesterday"}, "line 2: start: "),
        ({"timestamp": "2026-01-31T10:00:00"}, "line 2: timestamp: "),
        ({"qrels": {"a": {"d": "1"}}}, "line 2: qrels.a.d: expected a valid integer"),
    ],
)
def test_a_faulty_field(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | change) + "\n")
    with pytest.raises(BadInput) as caught:
        read_query_log(path)
    assert f"log.jsonl, {reason}" in str(caught.value)


def test_half_a_character(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | {"query": "half a smile \ud83d"}) + "\n")
    with pytest.raises(BadInput, match=r"log\.jsonl, line 2: Invalid JSON"):
        read_query_log(path)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('\ufeff{"query": "x"}\n\ufeff{"query": "y"}\n', encoding="utf-8")
    with pytest.raises(BadInput, match=r"log\.jsonl, line 2: Invalid JSON"):
        read_query_log(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").write_text('\ufeff{"query": "x"}\n', encoding="utf-8")
    assert [entry.query for entry in read_query_log(tmp_path / "log.jsonl")] == ["x"]


def test_a_missing_query(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"agents": []}\n')
    with pytest.raises(BadInput, match=r"log\.jsonl, line 1: query: Field required"):
        read_query_log(tmp_path / "log.jsonl")


def test_an_outcome_that_is_none_is_a_missing_query(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"query": "x", "request_id": "r1"}\n{"request_id": "r1", "outcome": {"a": 2}}\n')
    with pytest.raises(BadInput, match=r"log\.jsonl, line 2: query: Field required"):
        read_query_log(tmp_path / "log.jsonl")


def test_only_a_torn_last_line_is_tolerated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, whole = tmp_path / "log.jsonl", json.dumps(LINE, ensure_ascii=False).encode()
    for cut in range(1, len(whole), 7):
        path.write_bytes(whole + b"\n" + whole[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(read_query_log(path)) == 1
        assert [r.getMessage() for r in caplog.records] == [f"{path}, line 2: the last line is torn and left out"]
    path.write_bytes(whole[:50] + b"\n" + whole + b"\n")
    with pytest.raises(BadInput, match="line 1: Invalid JSON"):
        read_query_log(path)
    path.write_bytes(whole + b"\n" + whole[:50] + b"\n")
    with pytest.raises(BadInput, match="line 2: Invalid JSON"):
        read_query_log(path)
