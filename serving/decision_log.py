"""The decision log: what was decided, with which probability, and later what came of it.

A line is in the query log's format (`routewright.pools.query_log`); feedback is a line of its own that carries the same
`request_id`, and `routewright.pools.decision_log` joins them. To a file, a decision is written before it is answered, in
one write a batch: after kill -9 the only lines missing are those of the batch in hand (at most `Batcher.max_batch`),
which nobody got an answer from. A collector gets every line as a CloudEvent, as from KServe's logger, and is never
waited for.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from routewright.errors import BadInput
from routewright.pools.decision_log import rotated
from serving.metrics import LOG_LOST

KEY_VARIABLE = "ROUTEWRIGHT_LOG_KEY"
Redaction = Literal["none", "hash", "drop"]
_log = logging.getLogger(__name__)


class DecisionLog(Protocol):
    """Where decisions and outcomes go; threads may share one."""

    key: bytes
    """Signs request ids and hashes queries."""

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append JSON objects; a failure is counted and reported, never raised."""

    def close(self) -> None:
        """Bring what is buffered to its place."""


def signing_key(path: Path | None) -> bytes:
    """The secret of ROUTEWRIGHT_LOG_KEY; else that of the file beside the log, made once; else one for this process."""
    if given := os.environ.get(KEY_VARIABLE):
        return given.encode()
    if path is None:
        return secrets.token_bytes(32)
    file = path.with_name(f"{path.name}.key")
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as new:
            new.write(secrets.token_hex(32))
    except FileExistsError:
        pass
    return file.read_text(encoding="ascii").encode()


def new_request_id(key: bytes) -> str:
    """32 hex digits: 80 random bits and a 48-bit tag, by which a server knows its own ids without remembering them."""
    nonce = secrets.token_bytes(10)
    return (nonce + _tag(nonce, key)).hex()


def is_own_request_id(request_id: str, key: bytes) -> bool:
    """Whether this id was given out under this key."""
    try:
        raw = bytes.fromhex(request_id)
    except ValueError:
        return False
    return len(request_id) == 32 and hmac.compare_digest(_tag(raw[:10], key), raw[10:])


def _tag(nonce: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"request-id" + nonce, "sha256")[:6]


def redact(text: str, how: Redaction, key: bytes) -> str:
    """The text, its keyed hash (equal texts stay equal; without the key nobody can test a guess) or nothing."""
    if how == "none":
        return text
    return "" if how == "drop" else "hmac-sha256:" + hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def encoded(line: dict[str, Any]) -> bytes:
    """One line of the log, its newline included."""
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


class FileLog:
    """A log in FILE; past ``max_bytes`` it becomes FILE.000001, FILE.000002 …, of which the newest ``keep`` stay.

    One server a file: BadInput where another has it open, or where it cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int = 64 * 2**20, keep: int = 100) -> None:
        self.path, self._max_bytes, self._keep = Path(path), max_bytes, keep
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._guard = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._open()  # not before: the last writer may have rotated it, or written more
                self.key = signing_key(self.path)
            except OSError:
                os.close(self._guard)
                raise
        except BlockingIOError:
            raise BadInput(f"log {path}: another server writes to it, expected a file of its own") from None
        except OSError as error:
            raise BadInput(f"log {path}: cannot be written, {(error.strerror or str(error)).lower()}") from None
        self._drop_torn_line()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size

    def _drop_torn_line(self) -> None:
        """Cut off what a kill left after the last newline: its request got no answer, and the next line must start anew."""
        end = self._size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < self._size:
            os.ftruncate(self._file, end)
            self._size = end

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append the lines in one write."""
        data = b"".join(encoded(line) for line in lines)
        with self._lock:
            if self._size and self._size + len(data) > self._max_bytes:
                try:
                    self._rotate()
                except OSError as error:
                    _log.error("the decision log %s grows on: no new file, %s", self.path, error.strerror or error)
            try:
                if os.write(self._file, data) != len(data):
                    os.ftruncate(self._file, self._size)  # all or nothing: the next line must not hang on to half a line
                    raise OSError("the disk is full")
                self._size += len(data)
            except OSError as error:
                LOG_LOST.inc(len(lines))
                _log.error("the decision log %s lost %d lines: %s", self.path, len(lines), error.strerror or error)

    def _rotate(self) -> None:
        """Go on in a new file; it is opened before anything is moved, so that where it cannot be had the old one serves."""
        older = rotated(self.path)
        number = int(older[-1].suffix[1:]) + 1 if older else 1
        new = self.path.with_name(f"{self.path.name}.new")
        file = os.open(new, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            if self.path.exists():  # else somebody took it away
                os.rename(self.path, self.path.with_name(f"{self.path.name}.{number:06}"))
            os.rename(new, self.path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._size = file, 0
        for path in older[: max(0, len(older) + 1 - self._keep)]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is buffered; lets another server have the file."""
        with self._lock:
            os.close(self._file)
            os.close(self._guard)


class CollectorLog:
    """Posts each line to a URL as a CloudEvent in binary mode, as KServe's logger does, from a thread of its own.

    At most ``buffer`` lines wait: what comes on top pushes the oldest out, and is counted. Each is tried ``attempts``
    times, with growing pauses, on connection errors, 429 and 5xx.
    """

    def __init__(self, url: str, source: str, buffer: int = 10_000, attempts: int = 5, pause_s: float = 0.5) -> None:
        import httpx

        self.url, self.key, self._source, self._attempts, self._pause_s = url, signing_key(None), source, attempts, pause_s
        try:
            self._client = httpx.Client(timeout=5)
            if httpx.URL(url).scheme not in ("http", "https") or not httpx.URL(url).host:
                raise httpx.InvalidURL("")
        except httpx.InvalidURL:
            raise BadInput(f"log {url[:200]}: expected a file or an http(s) URL") from None
        self._waiting: deque[dict[str, Any]] = deque()
        self._buffer = buffer
        self._condition = threading.Condition()
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._work, name="collector", daemon=True)
        self._thread.start()

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Queue the lines."""
        with self._condition:
            self._waiting.extend(lines)
            lost = max(0, len(self._waiting) - self._buffer)
            for _ in range(lost):
                self._waiting.popleft()
            self._condition.notify()
        if lost:
            LOG_LOST.inc(lost)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and self._stop_at is None:
                    self._condition.wait()
                if not self._waiting or (self._stop_at is not None and time.monotonic() > self._stop_at):
                    LOG_LOST.inc(len(self._waiting))
                    return
                line = self._waiting.popleft()
            if not self._post(line):
                LOG_LOST.inc()

    def _post(self, line: dict[str, Any]) -> bool:
        import httpx
        import tenacity
        from cloudevents.conversion import to_binary
        from cloudevents.http import CloudEvent

        kind = "response" if "propensity" in line else "feedback"
        attributes = {
            "type": f"org.kubeflow.serving.inference.{kind}",
            "source": self._source,
            "id": line["request_id"],
            "time": line["timestamp"],
            "datacontenttype": "application/json",
        }
        headers, body = to_binary(CloudEvent(attributes, line))

        def attempt() -> int:
            return self._client.post(self.url, content=body, headers=headers).status_code

        def again(state: tenacity.RetryCallState) -> bool:
            outcome = state.outcome
            assert outcome is not None
            if self._stop_at is not None and time.monotonic() > self._stop_at:
                return False
            return outcome.failed or outcome.result() == 429 or outcome.result() >= 500

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_exponential_jitter(multiplier=self._pause_s, max=10),
            retry=again,
            retry_error_callback=lambda state: None,
        )
        try:
            status = retrying(attempt)
        except httpx.HTTPError:
            status = None
        if status is None or status >= 300:
            _log.error("the collector took no decision log line: %s", "no answer" if status is None else status)
            return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Post what waits, for a few seconds at most."""
        with self._condition:
            self._stop_at = time.monotonic() + timeout_s
            self._condition.notify()
        self._thread.join(timeout_s + 6)
        self._client.close()


def open_log(where: str, source: str) -> DecisionLog:
    """A log at a file's path or an http(s) URL."""
    return CollectorLog(where, source) if "://" in where else FileLog(Path(where))
