"""Tiny collections on disk and a search endpoint on loopback that misbehaves on demand."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def write_qrels(path: Path, rows: list[tuple[str, str, int]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{g}\n" for q, d, g in rows))
    return path


BIRDS = [
    {"_id": "1", "title": "Sparrow", "text": "A small brown bird of the city.", "metadata": {"date": "1958-12"}},
    {"_id": "2", "title": "Eagle", "text": "A large bird that hunts.", "metadata": {"date": "1960"}},
    {"_id": "3", "title": "Penguin", "text": "A bird that swims and does not fly.", "metadata": {"date": "1961-02-28"}},
    {"_id": "4", "title": "Ostrich", "text": "A bird that runs."},
]
BOATS = [
    {"_id": "1", "title": "Canoe", "text": "A narrow boat with paddles.", "metadata": {"kind": ["river", "lake"]}},
    {"_id": "2", "title": "Ferry", "text": "A boat for cars and people.", "metadata": {"kind": "sea", "decks": 3}},
    {"_id": "3", "title": "קיאק 🚣", "text": "סירה צרה boat 🚣", "metadata": {"kind": "river"}},
]


class Endpoint:
    """A real HTTP server; ``answer(payload) -> (status, body, delay in s)`` says how it behaves."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, bytes, float]] = lambda payload: (200, b'{"hits": []}', 0.0)
        self.released = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.received.append(payload)
                status, body, delay = endpoint.answer(payload)
                try:
                    if delay < 0:  # drip: a byte now and then keeps every read short of a read timeout
                        self.send_response(status)
                        self.send_header("Content-Length", str(len(body)))
                        self.end_headers()
                        for byte in body:
                            self.wfile.write(bytes([byte]))
                            self.wfile.flush()
                            if endpoint.released.wait(-delay):
                                return
                        return
                    if delay and endpoint.released.wait(delay):
                        return
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client gave up

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/search"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


def hits_body(*ids: str) -> bytes:
    rows = [{"id": i, "score": 1.0 / n, "title": f"title {i}", "date": "2024"} for n, i in enumerate(ids, 1)]
    return json.dumps({"hits": rows}).encode()
