"""A folder where several servers log: one log, whoever of them decided and whoever heard what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from routewright.pools.decision_log import log_files, read_decisions
from routewright.pools.query_log import read_query_log
from serving.decision_log import FileLog, is_own_request_id, new_request_id


def test_replicas_log_side_by_side_and_know_each_other_s_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTEWRIGHT_LOG_KEY", "of both")
    one, other = FileLog(tmp_path / "pod-1.jsonl", max_bytes=100), FileLog(tmp_path / "pod-2.jsonl")
    asked = [new_request_id(one.key) for _ in range(3)]
    for number, request in enumerate(asked):
        one.write([{"request_id": request, "query": f"query {number} {'x' * 40}", "agents": ["a"]}])
    assert is_own_request_id(asked[0], other.key)
    other.write([{"request_id": asked[0], "outcome": {"a": 0.5}}])
    one.close()
    other.close()
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "pod-0.jsonl").write_text('{"query": "of an earlier version"}\n')
    names = ["pod-1.jsonl.000001", "pod-1.jsonl.000002", "pod-1.jsonl", "pod-2.jsonl"]
    assert [file.name for file in log_files(tmp_path)] == names
    entries = read_query_log(tmp_path)
    assert [entry.query[:7] for entry in entries] == ["query 0", "query 1", "query 2"]
    assert [entry.outcome for entry in entries] == [{"a": 0.5}, {}, {}]
    assert [row.get("outcome") for row in read_decisions(tmp_path)] == [{"a": 0.5}, None, None]
