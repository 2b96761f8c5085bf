"""A folder where several servers log: one log, whoever of them decided and whoever heard what came of it.

And a log that its server goes on writing: what was in it when reading began is read, in order, whatever is rotated or
pruned meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routewright.errors import BadInput
from routewright.pools import decision_log
from routewright.pools.decision_log import log_files, read_decisions, rotated
from routewright.pools.query_log import QueryLogEntry, read_query_log
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


def living(path: Path, count: int, **bounds: int) -> FileLog:
    """A log that rotates before every write but the first, with the queries 0, 1 … in it."""
    log = FileLog(path, max_bytes=1, **bounds)
    for number in range(count):
        log.write([{"request_id": f"r{number}", "query": str(number)}])
    return log


def at_the_first_line(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Have `read_query_log` do something once it is reading."""
    pending, parse = [act], QueryLogEntry.model_validate_json

    def meanwhile(line: bytes) -> QueryLogEntry:
        while pending:
            pending.pop()()
        return parse(line)

    monkeypatch.setattr(QueryLogEntry, "model_validate_json", staticmethod(meanwhile))


@pytest.mark.parametrize("of", ["file", "folder"])
@pytest.mark.parametrize("keep", [100, 2])  # 2: what is being read is pruned
def test_a_log_that_is_rotated_and_pruned_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, of: str
) -> None:
    log = living(tmp_path / "d.jsonl", 3, keep=keep)
    path = tmp_path if of == "folder" else log.path

    def more() -> None:
        for number in range(3, 9):
            log.write([{"request_id": f"r{number}", "query": str(number)}])

    at_the_first_line(monkeypatch, more)
    assert [entry.query for entry in read_query_log(path)] == ["0", "1", "2"]
    before = [str(number) for number in range(9)][-keep - 1 :]
    decisions = read_decisions(path)
    found = [next(decisions)["query"]]
    more()
    assert found + [row["query"] for row in decisions] == before
    log.close()


def test_a_log_that_is_rotated_after_its_files_were_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, pending = living(tmp_path / "d.jsonl", 2), ["2", "3"]

    def listed(path: Path) -> list[Path]:
        found = rotated(path)
        if pending:
            log.write([{"query": pending.pop(0)}])
        return found

    monkeypatch.setattr(decision_log, "rotated", listed)
    assert [entry.query for entry in read_query_log(log.path)] == ["0", "1", "2", "3"]
    log.close()


def test_a_part_that_is_pruned_after_it_was_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = living(tmp_path / "d.jsonl", 3)
    listed = rotated(log.path)
    monkeypatch.setattr(decision_log, "rotated", lambda path: listed)
    listed[0].unlink()
    assert [entry.query for entry in read_query_log(log.path)] == ["1", "2"]
    log.close()


@pytest.mark.parametrize("of", ["file", "folder"])
def test_between_the_two_renames_of_a_rotation(tmp_path: Path, of: str) -> None:
    log = living(tmp_path / "d.jsonl", 2)
    log.close()
    os.rename(log.path, tmp_path / "d.jsonl.000002")
    path = tmp_path if of == "folder" else log.path
    assert [entry.query for entry in read_query_log(path)] == ["0", "1"]
    assert [row["query"] for row in read_decisions(path)] == ["0", "1"]
    for part in rotated(log.path):
        part.unlink()
    with pytest.raises(BadInput, match=r"d\.jsonl: the file cannot be read, no such file"):
        read_query_log(log.path)


def test_a_line_that_was_half_written_when_reading_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    living(tmp_path / "d.jsonl", 1).close()
    os.rename(tmp_path / "d.jsonl", tmp_path / "d.jsonl.000001")
    line = json.dumps({"query": "1"}) + "\n"
    (tmp_path / "d.jsonl").write_text(line[:7])

    def rest() -> None:
        with (tmp_path / "d.jsonl").open("a") as file:
            file.write(line[7:] + line)

    at_the_first_line(monkeypatch, rest)
    assert [entry.query for entry in read_query_log(tmp_path / "d.jsonl")] == ["0"]
    assert "d.jsonl, line 1: the last line is torn and left out" in caplog.text
