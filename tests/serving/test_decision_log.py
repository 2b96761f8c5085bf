"""The decision log: nothing lost, rotation, torn lines, one writer, the collector, and the reader that joins outcomes."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_in import StandIn, StandInHandler

from routewright.errors import BadInput
from routewright.pools.decision_log import read_decisions, rotated, write_step_feedback
from routewright.pools.query_log import read_query_log
from routewright.step_router.client import read_feedback
from routewright.step_router.features import NAMES
from serving.decision_log import (
    KEY_VARIABLE,
    CollectorLog,
    FileLog,
    is_own_request_id,
    new_request_id,
    open_log,
    redact,
)

TIME = "2026-11-30T04:00:00+00:00"


def decision(number: int, **more: Any) -> dict[str, Any]:
    return {
        "query": f"question {number} ☃",
        "reference_date": "2026-11-30",
        "decision": {"agents": ["garden"]},
        "request_id": f"id{number}",
        "router": "search-router",
        "model_version": "v1",
        "explored": False,
        "propensity": 1.0,
        "timestamp": TIME,
        **more,
    }


def outcome(number: int, value: float) -> dict[str, Any]:
    return {"request_id": f"id{number}", "router": "search-router", "outcome": {"garden": value}, "timestamp": TIME}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- The file


def test_lines_are_on_disk_when_write_returns(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "logs" / "d.jsonl")
    log.write([decision(1), decision(2)])
    assert lines(tmp_path / "logs" / "d.jsonl") == [decision(1), decision(2)]  # not closed, not flushed
    assert (tmp_path / "logs" / "d.jsonl").stat().st_mode & 0o077 == 0
    log.close()


def test_rotation_keeps_order_and_the_newest_files(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    size = len(json.dumps(decision(10), ensure_ascii=False, separators=(",", ":")).encode()) + 1
    log = FileLog(path, max_bytes=2 * size, keep=3)
    for number in range(10, 21):
        log.write([decision(number)])
    log.close()
    assert [file.name for file in rotated(path)] == ["d.jsonl.000003", "d.jsonl.000004", "d.jsonl.000005"]
    assert [row["request_id"] for row in read_decisions(path)] == [f"id{n}" for n in range(14, 21)]
    log = FileLog(path, max_bytes=2 * size, keep=3)  # numbers go on after a restart
    log.write([decision(21), decision(22)])
    log.close()
    assert rotated(path)[-1].name == "d.jsonl.000006"


def test_a_line_torn_by_a_kill_is_cut_off_before_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "d.jsonl"
    log = FileLog(path)
    log.write([decision(1)])
    log.close()
    with path.open("ab") as file:
        file.write(b'{"query": "half a li')
    assert [row["request_id"] for row in read_decisions(path)] == ["id1"]
    assert "torn" in caplog.text
    log = FileLog(path)
    log.write([decision(2)])
    log.close()
    assert [row["request_id"] for row in lines(path)] == ["id1", "id2"]


def test_a_file_that_is_one_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"x" * 200_000)
    log = FileLog(path)
    log.write([decision(1)])
    log.close()
    assert lines(path) == [decision(1)]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    log, write = FileLog(path), os.write
    log.write([decision(1)])
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    log.write([decision(2)])  # no error for whoever asked
    monkeypatch.setattr(os, "write", write)
    log.write([decision(3)])
    log.close()
    assert [row["request_id"] for row in lines(path)] == ["id1", "id3"]


@pytest.mark.parametrize("failing", ["open", "rename"])
def test_a_rotation_that_fails_costs_no_line_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "d.jsonl"
    log = FileLog(path, max_bytes=1)  # every write after the first rotates
    log.write([decision(1)])

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, failing, no_space)
        log.write([decision(2)])
        log.write([decision(3)])
    assert [row["request_id"] for row in lines(path)] == ["id1", "id2", "id3"]
    log.write([decision(4)])
    log.write([decision(5)])
    log.close()
    assert [row["request_id"] for row in read_decisions(path)] == [f"id{n}" for n in range(1, 6)]
    assert [len(lines(file)) for file in rotated(path)] == [3, 1]


def test_a_log_that_somebody_took_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    log = FileLog(path, max_bytes=1)
    log.write([decision(1)])
    path.unlink()
    log.write([decision(2)])
    log.close()
    assert lines(path) == [decision(2)]
    assert rotated(path) == []


def test_threads_share_a_log(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "d.jsonl", max_bytes=5000)
    threads = [
        threading.Thread(target=lambda k=k: [log.write([decision(100 * k + i)]) for i in range(50)])  # type: ignore[misc]
        for k in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    found = [row["request_id"] for row in read_decisions(tmp_path / "d.jsonl")]
    assert sorted(found) == sorted(f"id{100 * k + i}" for k in range(1, 5) for i in range(50))


def test_one_server_a_file(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "d.jsonl")
    with pytest.raises(BadInput, match=r"d\.jsonl: another server writes to it"):
        FileLog(tmp_path / "d.jsonl")
    log.close()
    FileLog(tmp_path / "d.jsonl").close()


def test_a_log_that_its_last_writer_rotates_just_before_it_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    last, flock = FileLog(path, max_bytes=1), fcntl.flock
    last.write([decision(1)])

    def late(file: int, how: int) -> None:
        last.write([decision(2)])
        last.close()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    log = FileLog(path)
    log.write([decision(3)])
    log.close()
    assert [row["request_id"] for row in lines(path)] == ["id2", "id3"]


def test_a_line_finished_just_before_its_writer_lets_go_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    whole, flock = json.dumps(decision(1)).encode() + b"\n", fcntl.flock
    path.write_bytes(whole[:20])

    def late(file: int, how: int) -> None:
        with path.open("ab") as other:
            other.write(whole[20:])
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    FileLog(path).close()
    assert lines(path) == [decision(1)]


def test_a_log_that_could_not_be_had_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.mkdir()
    with pytest.raises(BadInput, match="is a directory"):
        FileLog(path)
    path.rmdir()
    FileLog(path).close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        open_log(str(tmp_path / "file" / "d.jsonl"), "here")
    with pytest.raises(BadInput, match="cannot be written, is a directory"):
        open_log(str(tmp_path), "here")


# --- Request ids and redaction


def test_request_ids_are_known_without_being_remembered(tmp_path: Path) -> None:
    first = FileLog(tmp_path / "d.jsonl")
    made = [new_request_id(first.key) for _ in range(200)]
    first.close()
    again = FileLog(tmp_path / "d.jsonl")  # after a restart
    assert len(set(made)) == 200
    assert all(is_own_request_id(request_id, again.key) for request_id in made)
    assert not any(is_own_request_id(request_id, b"another key") for request_id in made)
    again.close()
    flipped = ("0" if made[0][0] != "0" else "1") + made[0][1:]
    for strange in (flipped, made[0][:-1], made[0] + "00", " " + made[0], "", "zz" * 16, "☃"):
        assert not is_own_request_id(strange, first.key)


def test_a_key_from_the_environment_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "fleet")
    log = FileLog(tmp_path / "d.jsonl")
    log.close()
    assert is_own_request_id(new_request_id(b"fleet"), log.key)
    assert not (tmp_path / "d.jsonl.key").exists()


def test_redaction() -> None:
    assert redact("my secret", "none", b"k") == "my secret"
    assert redact("my secret", "drop", b"k") == ""
    # printf 'my secret' | openssl dgst -sha256 -hmac k
    digest = "bc287db70fbae340adf57db56f56d48ac3ed5ffa05118773734b13bc7caea724"
    assert redact("my secret", "hash", b"k") == f"hmac-sha256:{digest}"
    assert redact("my secret", "hash", b"k") != redact("my secret", "hash", b"other")


# --- The reader


def test_outcomes_are_joined_across_rotation_and_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    log = FileLog(path, max_bytes=1)  # every write after the first rotates
    for rows in ([decision(1), decision(2)], [outcome(1, 0.25)], [decision(3)], [outcome(1, 1.0), outcome(3, 0.0)]):
        log.write(rows)
    log.close()
    assert len(rotated(path)) == 3
    entries = read_query_log(path)
    assert [(entry.request_id, entry.outcome) for entry in entries] == [
        ("id1", {"garden": 1.0}), ("id2", {}), ("id3", {"garden": 0.0}),
    ]  # fmt: skip
    assert entries[0].propensity == 1.0
    assert entries[0].query == "question 1 ☃"


def test_what_cannot_be_learnt_from_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    rows = [decision(1), decision(2, query="", redacted="drop"), decision(3, router="step-router", query="")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [entry.request_id for entry in read_query_log(path) if entry.learnable] == ["id1"]


def test_a_compressed_log(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(decision(1)) + "\n" + json.dumps(outcome(1, 0.5)) + "\n")
    assert [row["outcome"] for row in read_decisions(path)] == [{"garden": 0.5}]


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "expected a JSON object"), ("[]", "found list"), ('{"request_id": "x"}', "expected a query, or a request_id"),
     ('{"outcome": {"a": 1}}', "expected a query, or"), ('{"request_id": "x", "outcome": 1}', "expected a query, or")],
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(decision(1)) + "\n" + line + "\n")
    with pytest.raises(BadInput, match=rf"d\.jsonl, line 2: .*{said}"):
        list(read_decisions(path))


def test_step_decisions_become_the_feedback_log(tmp_path: Path) -> None:
    def step(number: int, episode: str | None) -> dict[str, Any]:
        named = {} if episode is None else {"episode": episode}
        return {
            "query": "", "step": number, **named,
            "features": dict.fromkeys(NAMES, 0.5), "risk": 0.3, "benefit": 0.2, "threshold": 0.4,
            "escalate": False, "decision": {}, "request_id": f"s{number}", "router": "step-router", "model_version": "v1",
            "explored": False, "propensity": 0.95, "timestamp": TIME,
        }  # fmt: skip

    rows = [step(0, "e"), step(1, "e"), step(2, "never ended"), step(3, None)]
    ends = [{"request_id": "s1", "outcome": {"slm": 1.0}}, {"request_id": "s3", "outcome": {"llm": 0.0}}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + ends))
    assert write_step_feedback(tmp_path / "d.jsonl", tmp_path / "feedback.jsonl") == 3
    entries = read_feedback(tmp_path / "feedback.jsonl")
    assert [(e.request_id, e.episode, e.outcome) for e in entries] == [("s0", "e", 1), ("s1", "e", 1), ("s3", "s3", 0)]
    assert entries[0].propensity == 0.95


# --- The collector


class Collector(StandIn):
    """Takes CloudEvents over real HTTP; ``modes`` holds the statuses of the next answers, "drop" to hang up."""

    def __init__(self) -> None:
        self.events: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.modes: list[str] = []
        self.release = threading.Event()
        self.arrived = threading.Event()
        self.release.set()
        collector = self

        class Handler(StandInHandler):
            def do_POST(self) -> None:
                body = self.body()
                collector.arrived.set()
                collector.release.wait(10)
                mode = collector.modes.pop(0) if collector.modes else "200"
                if mode == "drop":
                    self.close_connection = True
                    return
                if mode == "200":
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    collector.events.append((headers, json.loads(body)))
                self.send(int(mode))

        super().__init__(Handler, "/events")

    def close(self) -> None:
        self.release.set()
        super().close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    collector = Collector()
    yield collector
    collector.close()


def test_events_as_from_kserve_s_logger(collector: Collector) -> None:
    log = open_log(collector.url, "routewright/search-router")
    log.write([decision(1), decision(2)])
    log.write([outcome(1, 0.5)])
    log.close()
    assert [body for _, body in collector.events] == [decision(1), decision(2), outcome(1, 0.5)]
    headers = collector.events[0][0]
    assert headers["ce-specversion"] == "1.0"
    assert headers["ce-type"] == "org.kubeflow.serving.inference.response"
    assert headers["ce-id"] == "id1"
    assert headers["ce-source"] == "routewright/search-router"
    assert headers["ce-time"] == TIME
    assert headers["content-type"] == "application/json"
    assert collector.events[2][0]["ce-type"] == "org.kubeflow.serving.inference.feedback"


def test_a_collector_that_stumbles_is_tried_again(collector: Collector) -> None:
    collector.modes = ["503", "drop", "429", "200", "400"]
    log = CollectorLog(collector.url, "here", pause_s=0.01)
    log.write([decision(1), decision(2), decision(3)])
    log.close()
    # what it refuses as faulty is not tried again
    assert [body["request_id"] for _, body in collector.events] == ["id1", "id3"]


def test_a_dead_collector_is_never_waited_for_and_its_buffer_is_bounded(collector: Collector) -> None:
    collector.release.clear()
    log = CollectorLog(collector.url, "here", buffer=5, pause_s=0.01)
    log.write([decision(0)])
    assert collector.arrived.wait(10)
    for number in range(1, 101):
        log.write([decision(number)])  # returns though nobody answers
    assert len(log._waiting) == 5
    collector.release.set()
    log.close()
    assert [body["request_id"] for _, body in collector.events] == ["id0", "id96", "id97", "id98", "id99", "id100"]


@pytest.mark.parametrize("url", ["http://", "http:///logs", "http://[::1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(BadInput, match="expected a file or an http"):
        open_log(url, "here")


def test_a_log_at_a_url_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it must not become a file
    with pytest.raises(BadInput, match="expected a file or an http"):
        open_log("s3://bucket/log.jsonl", "routewright/search-router")
    assert list(tmp_path.iterdir()) == []
