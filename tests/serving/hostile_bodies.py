"""Bodies that nobody should send: by hand, and as many more as wanted by breaking good ones at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

WRONG: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**18, 1e308, "", " ", "\u0000", "x" * 5000, [], [[]], {}, {"a": {}}, [None], ["x"],
    "\ud800", "🤖" * 50, "../../etc/passwd", "${jndi:ldap://x}", "%s%s%n", "<script>", "' OR 1=1 --", "NaN", "Infinity",
    "-0", "1970-01-01T00:00:00", "9999-12-31", "0001-01-01", "2024-02-30", "2024-1-1", "２０２４-01-01", "\u202e", "{", "]",
]  # fmt: skip

RAW: list[bytes] = [
    b"",
    b" ",
    b"{",
    b"}",
    b"[",
    b"]",
    b"{}",
    b"[]",
    b"null",
    b"true",
    b"0",
    b'"x"',
    b"nope",
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"instances"',
    b'{"instances":}',
    b'{"instances":[}',
    b'{"instances":[{"query":"a"}',
    b'{"instances":[{"query":"\xff"}]}',
    b'{"instances":[{"query":"\xed\xa0\x80"}]}',
    b'{"instances":[{"query":"\\ud800"}]}',
    b'{"instances":[{"query":"\\u00"}]}',
    b'{"instances":[{"query":NaN}]}',
    b'{"instances":[{"query":"a","reference_date":Infinity}]}',
    b'{"instances":[{"query":1e999}]}',
    b'{"instances":[{"query":"a"}]}garbage',
    b'{"instances":[{"query":"a",}]}',
    b"{'instances':[]}",
    b'{"instances":[{"query":"a"}],}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"instances":' + b"[" * 900 + b"]" * 900 + b"}",
    b"[" * 100_000 + b"]" * 100_000,
    b'{"instances":[{"query":' + b"[" * 500 + b"]" * 500 + b"}]}",
    b"1" * 100_000,
    b'{"instances":[' + b"9" * 100_000 + b"]}",
    b'{"instances":[{"query":"' + b"\\u0000" * 1000 + b'"}]}',
    "﻿{}".encode("utf-16"),
    '{"instances":[]}'.encode("utf-16"),
    b"query=how+do+I",
    b"<xml/>",
    b"%PDF-1.4",
    b"\x1f\x8b\x08\x00",
    b"--boundary\r\n",
    b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"instances":[{"query":"a"}],"instances":7}',
]


def instance(router: str) -> dict[str, Any]:
    """A good instance."""
    if router == "search-router":
        return {"query": "clean the oven since last year", "reference_date": "2024-05-31"}
    if router == "ensemble-router":
        return {"query": "spell lamp"}
    return {
        "observation": "a dark room", "step": 1, "max_steps": 10, "budget_left": 3, "objective": "light the lamp",
        "candidates": [{"action": "go", "token_logprobs": [-0.1, -0.2], "verifier_score": 0.3},
                       {"action": "look", "token_logprobs": [-1.0], "verifier_score": 0.2}],
        "history": [{"action": "wake", "observation": "a bed", "entropy": 0.5}], "episode": "e1",
    }  # fmt: skip


def good(router: str) -> dict[str, Any]:
    """Good bodies by path."""
    text = json.dumps(instance(router))
    agent = {"search-router": "garden", "step-router": "slm", "ensemble-router": "speller"}[router]
    tensor = {"name": "instance", "shape": [1], "datatype": "BYTES", "data": [text]}
    return {
        f"/v1/models/{router}:predict": {"instances": [instance(router)]},
        f"/v2/models/{router}/infer": {"id": "1", "inputs": [tensor], "outputs": [{"name": "decision"}]},
        "/v1/feedback": {"request_id": "0" * 32, "outcome": {agent: 1.0}},
    }


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def _changed(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy with `change(old)` at a place; `change` returns ... to leave the place out."""
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    new = _changed(copy[path[0]], path[1:], change)
    if new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = new
    return copy


def by_hand(router: str) -> Iterator[tuple[str, bytes]]:
    """Every path with every raw body, and every place of every good body with every wrong value, left out, or doubled."""
    for path, body in good(router).items():
        for raw in RAW:
            yield path, raw
        for place in _places(body):
            changes = [lambda old, new=wrong: new for wrong in WRONG] + [lambda old: [old, old], lambda old: {"x": old}]
            if place:
                changes.append(lambda old: ...)
            for change in changes:
                yield path, json.dumps(_changed(body, place, change)).encode()
    for text in RAW:  # within a tensor's text
        data = [text.decode("latin-1")]
        tensor = {"name": "instance", "shape": [1], "datatype": "BYTES", "data": data}
        yield f"/v2/models/{router}/infer", json.dumps({"inputs": [tensor]}).encode()


def at_random(router: str, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Good bodies with a few places changed and a few bytes flipped, cut or doubled."""
    rng = random.Random(seed)
    paths = list(good(router).items())
    for _ in range(count):
        path, body = rng.choice(paths)
        for _ in range(rng.randrange(3)):
            place = rng.choice(list(_places(body)))
            wrong = rng.choice(WRONG)
            body = _changed(body, place, lambda old, new=wrong: new)
        raw = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass"))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(raw) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                raw[at:at] = rng.randbytes(rng.randrange(1, 4))
            elif kind == 1:
                del raw[at : at + rng.randrange(1, 10)]
            elif kind == 2:
                raw[at:at] = raw[at : at + 20]
            elif at < len(raw):
                raw[at] = rng.randrange(256)
        yield path, bytes(raw)
