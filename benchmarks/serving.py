"""A served router against the same router in process, under overload, for long, and against requests nobody should send.

    python benchmarks/serving.py --router search-router --model runs/search-router/model [--out FILE]

Starts `routewright serve` on loopback and measures, in this order:

- latency: HTTP at concurrency 1 and the decision in process, in turn; the ratio of their medians, bound 1.3, and the p99.
- overload: the peak goodput of a closed loop, then open-loop arrivals at 8 times that. Bounds: no answer later than the
  deadline (plus 10 %), goodput at least 90 % of the peak.
- memory: the server's resident set before and after many requests.
- hostile: malformed bodies, none of which may get a 5xx; a good request is decided as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "serving"))

from hostile_bodies import at_random, by_hand, instance

SENTENCE = "how do I rotate clean move a the key bucket oven queue function since last year cost of storage encrypt deploy"
WORDS = SENTENCE.split()


def instances(router: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Instances that differ in words and length."""
    rng = random.Random(seed)
    if router == "search-router":
        texts = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 20))) for _ in range(count)]
        return [{"query": text, "reference_date": "2024-05-31"} for text in texts]
    return [{**instance(router), "observation": " ".join(rng.choices(WORDS, k=60))} for _ in range(count)]


class Server:
    """`routewright serve` in a process of its own."""

    def __init__(self, router: str, model: Path, deadline_ms: int, log: Path) -> None:
        command = [sys.executable, "-m", "routewright.cli", "serve", router, "--model", str(model), "--port", "0"]
        command += ["--grpc-port", "0", "--deadline-ms", str(deadline_ms), "--log", str(log)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split(" ready at ")[1].strip()
        self.path = f"/v1/models/{router}:predict"

    def megabytes(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)


def latency(server: Server, router: str, model: Path, count: int) -> dict[str, float]:
    """Milliseconds of HTTP and in-process decisions, taken in turn."""
    decide: Any
    if router == "search-router":
        from routewright.search_router.router import load_router

        loaded = load_router(model)
        decide = lambda item: loaded.decide(item["query"], date(2024, 5, 31))  # noqa: E731
    else:
        from routewright.step_router.client import StepRouter

        steps = StepRouter.load(model)
        decide = lambda item: steps.episode("").decide(item["observation"], item["candidates"])  # noqa: E731
    times: dict[str, list[float]] = {"http": [], "in process": []}
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for i, item in enumerate(instances(router, count + 10)):
            start = time.perf_counter()
            client.post(server.path, json={"instances": [item]}).raise_for_status()
            middle = time.perf_counter()
            decide(item)
            if i >= 10:  # the first ones warm up the client and the router in process
                times["http"].append(1000 * (middle - start))
                times["in process"].append(1000 * (time.perf_counter() - middle))
    p50 = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "p50_ms": p50["http"],
        "p99_ms": float(np.percentile(times["http"], 99)),
        "in_process_p50_ms": p50["in process"],
        "ratio": p50["http"] / p50["in process"],
    }


async def closed_loop(server: Server, router: str, concurrency: int, seconds: float) -> float:
    """Decisions a second of `concurrency` callers that ask again as soon as they are answered."""
    items, done, end = instances(router, 200), 0, time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=httpx.Limits(max_connections=None)) as client:

        async def caller(k: int) -> None:
            nonlocal done
            while time.perf_counter() < end:
                k += 1
                response = await client.post(server.path, json={"instances": [items[k % 200]]})
                done += response.status_code == 200

        await asyncio.gather(*(caller(k) for k in range(concurrency)))
    return done / seconds


async def open_loop(server: Server, router: str, rate: float, seconds: float) -> tuple[Counter[int], list[float]]:
    """Statuses, and every answer's milliseconds, of requests that come at a fixed rate whatever happens.

    Sent over raw connections, one each, kept open: the sender must cost little beside the server it shares cores with.
    """
    host, port = server.url.removeprefix("http://").split(":")
    requests = []
    for item in instances(router, 200):
        body = json.dumps({"instances": [item]}).encode()
        head = f"POST {server.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        requests.append(head.encode() + body)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    statuses: Counter[int] = Counter()
    times: list[float] = []

    async def one(request: bytes) -> None:
        started = time.perf_counter()
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port))
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        times.append(1000 * (time.perf_counter() - started))
        statuses[int(head[9:12])] += 1
        idle.append((reader, writer))

    tasks, begun = set(), time.perf_counter()
    for k in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun + k / rate - time.perf_counter()))
        tasks.add(asyncio.create_task(one(requests[k % 200])))
    await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
    return statuses, times


def overload(server: Server, router: str, deadline_ms: int, seconds: float) -> dict[str, Any]:
    """Goodput and latencies at 8 times the peak."""
    peak = max(asyncio.run(closed_loop(server, router, concurrency, seconds)) for concurrency in (8, 16, 32))
    statuses, times = asyncio.run(open_loop(server, router, 8 * peak, seconds))
    return {
        "peak_per_s": peak,
        "offered_per_s": 8 * peak,
        "goodput_per_s": statuses[200] / seconds,
        "goodput_share": statuses[200] / seconds / peak,
        "statuses": dict(statuses),
        "slowest_ms": max(times),
        "p99_ms": float(np.percentile(times, 99)),
        "deadline_ms": deadline_ms,
    }


async def many(server: Server, router: str, count: int) -> int:
    """Answers of `count` requests, 8 at a time."""
    items, left, done = instances(router, 500), count, 0
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:

        async def caller() -> None:
            nonlocal left, done
            while left > 0:
                left -= 1
                response = await client.post(server.path, json={"instances": [items[left % 500]]})
                done += response.status_code == 200

        await asyncio.gather(*(caller() for _ in range(8)))
    return done


def memory(server: Server, router: str, count: int) -> dict[str, float]:
    """Megabytes after a tenth of the requests, when every cache is filled, and after all of them."""
    asyncio.run(many(server, router, count // 10))
    before = server.megabytes()
    answered = asyncio.run(many(server, router, count))
    return {"requests": count, "answered": answered, "before_mb": before, "after_mb": server.megabytes()}


def hostile(server: Server, router: str, count: int) -> dict[str, Any]:
    """Statuses of malformed requests, and whether a good one is decided as before."""
    bodies = list(by_hand(router))
    bodies = (bodies + list(at_random(router, max(0, count - len(bodies)))))[:count]
    good = {"instances": [instance(router)]}
    statuses: Counter[int] = Counter()
    slowest = 0.0
    with httpx.Client(base_url=server.url, timeout=10) as client:

        def decided() -> dict[str, Any]:
            row: dict[str, Any] = client.post(server.path, json=good).json()["predictions"][0]
            return {name: value for name, value in row.items() if name not in ("request_id", "timestamp")}

        before = decided()
        for path, body in bodies:
            started = time.perf_counter()
            statuses[client.post(path, content=body, headers={"Content-Type": "application/json"}).status_code] += 1
            slowest = max(slowest, time.perf_counter() - started)
        same = decided() == before
    return {"statuses": dict(statuses), "slowest_ms": 1000 * slowest, "same_decision_afterwards": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", choices=("search-router", "step-router"), default="search-router")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["latency", "overload", "memory", "hostile"])
    parser.add_argument("--decisions", type=int, default=200, help="for the latency")
    parser.add_argument("--deadline-ms", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--requests", type=int, default=20_000, help="for the memory")
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="a JSON file of the results")
    given = parser.parse_args()
    results: dict[str, Any] = {"router": given.router}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(given.router, given.model, given.deadline_ms, Path(folder) / "decisions.jsonl")
        try:
            parts: dict[str, Any] = {
                "latency": lambda: latency(server, given.router, given.model, given.decisions),
                "overload": lambda: overload(server, given.router, given.deadline_ms, given.seconds),
                "memory": lambda: memory(server, given.router, given.requests),
                "hostile": lambda: hostile(server, given.router, given.malformed),
            }
            for part in given.parts:
                results[part] = parts[part]()
                print(part, json.dumps(results[part]), flush=True)
        finally:
            server.process.terminate()
            server.process.wait(60)
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
