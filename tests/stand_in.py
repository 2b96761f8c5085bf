"""What the tests' stand-in servers have in common: a free port on loopback, a thread, an answer with its length."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandInHandler(BaseHTTPRequestHandler):
    """A quiet handler."""

    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        """The request's body."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        """Answer with bytes, a text as it is, or anything else as JSON."""
        if not isinstance(content, bytes | str):
            content = json.dumps(content)
        data = content if isinstance(content, bytes) else content.encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


class StandIn:
    """A server in a thread, until `close`."""

    def __init__(self, handler: type[StandInHandler], path: str = "") -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}{path}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
