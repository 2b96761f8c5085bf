"""A tiny pool on disk, a search endpoint on loopback, and the shared seven-agent pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pool import BIRDS, BOATS, Endpoint, write_jsonl, write_qrels

SHARED_POOL = Path(__file__).parents[2].parent / "shared" / "data" / "ir" / "pool.yaml"


@pytest.fixture
def pool_content() -> dict[str, Any]:
    """The content of a valid pool file with two agents; a test breaks what it wants broken."""
    return {
        "name": "tiny",
        "fallback": "boats",
        "agents": [
            {
                "name": "birds",
                "card": "Birds, dated.",
                "search": {"kind": "bm25", "corpus": "birds/corpus.jsonl.gz"},
                "queries": {"file": "birds/queries.jsonl", "qrels": {"dev": "birds/qrels/dev.tsv"}},
            },
            {"name": "boats", "card": "Boats.", "search": {"kind": "bm25", "corpus": "boats.jsonl"}},
        ],
    }


@pytest.fixture
def write_pool(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes the corpora and queries of the tiny pool and a pool file with the given content; returns its path."""
    write_jsonl(tmp_path / "birds" / "corpus.jsonl.gz", BIRDS)
    write_jsonl(tmp_path / "boats.jsonl", BOATS)
    write_jsonl(tmp_path / "birds" / "queries.jsonl", [{"_id": "q1", "text": "which bird swims"}])
    write_qrels(tmp_path / "birds" / "qrels" / "dev.tsv", [("q1", "3", 1)])

    def write(content: Any) -> Path:
        path = tmp_path / "pool.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return path

    return write


@pytest.fixture(scope="session")
def shared_pool_path() -> Path:
    if not SHARED_POOL.is_file():
        pytest.skip(f"the shared seven-agent pool is not here: {SHARED_POOL}")
    return SHARED_POOL


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.close()


@pytest.fixture
def dead_url() -> str:
    """A URL where nothing listens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_address[1]
    server.server_close()
    return f"http://127.0.0.1:{port}/search"
