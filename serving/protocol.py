"""uvicorn's HTTP protocol with refusals that cost little, and with limits for clients that stall.

Through the application a refusal costs a fifth of a step router's decision: at eight times what can be decided, refusals
would take all the time there is. Here a request that comes whole in one read is refused before anything is parsed.
"""

from __future__ import annotations

import asyncio
import re

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving import metrics
from serving.predictor import Predictor
from serving.refusal import Refused, head_too_large, head_too_slow

HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length: ?(\d{1,7})\r\n", re.IGNORECASE)
_UNUSUAL = re.compile(rb"\r\n(?:transfer-encoding|connection|expect|upgrade):", re.IGNORECASE)


def is_whole(data: bytes) -> bool:
    """Whether the bytes are one request with a body of the length it states, and ask nothing of the connection."""
    end = data.find(b"\r\n\r\n")
    length = _LENGTH.search(data, 0, end + 2)
    return length is not None and int(length[1]) == len(data) - end - 4 and not _UNUSUAL.search(data, 0, end)


def protocol_of(predictor: Predictor) -> type[HttpToolsProtocol]:
    """The protocol class of one router's server."""
    name = predictor.name
    deciding = {
        f"POST /v1/models/{name}:predict HTTP/1.1".encode(): "v1",
        f"POST /v2/models/{name}/infer HTTP/1.1".encode(): "v2",
    }
    on_the_way = 0  # requests that came whole and are not answered yet, of all connections

    class RouterProtocol(HttpToolsProtocol):
        """One connection."""

        _stall: asyncio.TimerHandle | None = None
        _head_bytes = 0  # of the head that is being read
        _between = True  # every request that has begun has been read to its end
        _refused_at = 0.0  # by the loop's clock
        _counted = False  # its request is one of those on the way

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._stall is not None:
                self._stall.cancel()
            self._unset_keepalive_if_required()
            self._count(False)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._between and not self._busy() and self._refused(data):
                return
            super().data_received(data)
            if self._stall is not None:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._end(head_too_large(MAX_HEAD_BYTES))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._between, self._head_bytes = False, 0
            self._stall = self.loop.call_later(HEAD_TIMEOUT_S, self._end, head_too_slow(HEAD_TIMEOUT_S))

        def on_headers_complete(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._between = True
            super().on_message_complete()

        def on_response_complete(self) -> None:
            self._count(False)
            super().on_response_complete()

        def _count(self, counted: bool) -> None:
            nonlocal on_the_way
            on_the_way += counted - self._counted
            self._counted = counted

        def _busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def timeout_keep_alive_handler(self) -> None:
            """Close the connection, unless a request was refused meanwhile: a timer for each would cost too much."""
            left = self._refused_at + self.timeout_keep_alive - self.loop.time()
            if left > 0:
                self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
            else:
                super().timeout_keep_alive_handler()

        def _refused(self, data: bytes) -> bool:
            """Refuse a request for a decision where there is no room for it, else count it as on its way."""
            protocol = deciding.get(data[: data.find(b"\r\n")])
            if protocol is None or not is_whole(data):
                return False
            try:
                predictor.check_open(on_the_way)
            except Refused as refused:
                metrics.REQUESTS.labels(name, protocol, refused.outcome).inc()
                self._refused_at = self.loop.time()
                self._write(refused)
                return True
            self._count(True)
            return False

        def _end(self, refused: Refused) -> None:
            """Close the connection, saying why; after the answer that is due, where there is one."""
            if self.transport.is_closing():
                return
            if self._busy():
                self.cycle.keep_alive = False
                return
            self._write(refused, b"connection: close\r\n")
            self.transport.close()

        def _write(self, refused: Refused, more: bytes = b"") -> None:
            body = orjson.dumps({"error": refused.sentence})
            lines = [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
            if refused.retry_after is not None:
                lines.append(b"retry-after: %d\r\n" % refused.retry_after)
            head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            self.transport.write(b"".join([STATUS_LINE[refused.status], *lines, head, more, b"\r\n", body]))

    return RouterProtocol
