"""A served router against the same router in process, under overload, for long, and against requests nobody should send.

    python benchmarks/serving.py --router search-router --model runs/search-router/model [--out FILE]

Starts `routewright serve` on loopback and measures, by default all but dtype and in this order:

- latency: HTTP at concurrency 1 and the decision in process, in turn; the ratio of their medians, bound 1.3, and the p99.
- overload: the peak goodput of a closed loop, then open-loop arrivals at 8 times that, both over raw connections. Bounds:
  no answer later than the deadline (plus 10 %), goodput at least 90 % of the peak. The caller takes its time from the cores
  that the server runs on, eight times as much under overload: where it has no core of its own, the share of the goodput
  a CPU second of the server tells what the server does, the other one what both do.
- dtype (with --dataset and --examples of the model's run): milliseconds of the search router's decision in float32,
  bfloat16 and int8 (dynamic, linear layers), in turn; how many test queries get the same agents as in float32, and the
  NDCG@10 lost, with its paired interval. What is served is `fastest_dtype()`, which measures the machine at the start.
- memory: the server's resident set before and after many requests, and how it rises over their last half.
- hostile: malformed bodies, none of which may get a 5xx; a good request is decided as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import select
import socket
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
CONNECTIONS = 1024


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

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


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


def dtypes(model: Path, dataset: Path, examples: Path, count: int) -> dict[str, Any]:
    """Speed and quality of each weights' dtype."""
    import torch
    from torch.ao.quantization import quantize_dynamic

    from routewright.evaluation.bootstrap import paired_difference
    from routewright.language_models.backbone import fastest_dtype
    from routewright.pools.pool import load_pool
    from routewright.pools.search import PoolSearch
    from routewright.search_router.examples import read_examples
    from routewright.search_router.reward import Action
    from routewright.search_router.router import as_interval, load_router
    from routewright.search_router.selection import decision_ndcg

    pool, test = load_pool(dataset / "pool.yaml"), read_examples(examples / "test.jsonl")
    routers = {"float32": load_router(model, torch.float32), "bfloat16": load_router(model, torch.bfloat16)}
    routers["int8"] = load_router(model, torch.float32)
    for part in ("trunk", "top"):
        quantised = quantize_dynamic(getattr(routers["int8"].model, part), {torch.nn.Linear}, torch.qint8)
        setattr(routers["int8"].model, part, quantised)
    decisions = {name: [router.decide(e.query, e.reference) for e in test] for name, router in routers.items()}
    times: dict[str, list[float]] = {name: [] for name in routers}
    for item in instances("search-router", count):
        for name, router in routers.items():
            started = time.perf_counter()
            router.decide(item["query"], date(2024, 5, 31))
            times[name].append(1000 * (time.perf_counter() - started))
    with tempfile.TemporaryDirectory() as cache:
        search = PoolSearch(pool, Path(cache))
        ndcg = {
            name: decision_ndcg(
                test, [Action(tuple(d.agents), tuple(d.keywords), as_interval(d)) for d in found], pool, search
            )
            for name, found in decisions.items()
        }
    results: dict[str, Any] = {"served": str(fastest_dtype()).removeprefix("torch.")}
    for name in routers:
        same = [one.agents == other.agents for one, other in zip(decisions["float32"], decisions[name], strict=True)]
        lost = paired_difference(ndcg[name], ndcg["float32"], 0)
        results[name] = {
            "p50_ms": float(np.median(times[name])),
            "speed": float(np.median(np.array(times["float32"]) / np.array(times[name]))),
            "same_agents": float(np.mean(same)),
            "ndcg@10": float(np.mean(ndcg[name])),
            "ndcg@10_minus_float32": [round(lost.mean, 5), round(lost.low, 5), round(lost.high, 5)],
        }
    return results


def raw_requests(server: Server, router: str) -> list[bytes]:
    """200 requests as they go over the wire."""
    requests = []
    for item in instances(router, 200):
        body = json.dumps({"instances": [item]}).encode()
        head = f"POST {server.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return requests


class Load:
    """What came of a load: statuses, milliseconds of each answer, seconds from the first request to the last answer."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.times: list[float] = []
        self.took = 0.0

    @property
    def goodput(self) -> float:
        return self.statuses[200] / self.took


def send_load(server: Server, router: str, seconds: float, *, callers: int = 0, rate: float = 0.0) -> Load:
    """A closed loop of so many callers that ask again as soon as they are answered, or requests at a fixed rate.

    At a fixed rate each request goes over a connection that no other one waits on: a pool of open ones, as a proxy keeps,
    and more where they do not suffice. Bare sockets, since the sender shares its cores with the server.
    """
    host, port = server.url.removeprefix("http://").split(":")
    requests, load = raw_requests(server, router), Load()
    poll, idle = select.epoll(), list[socket.socket]()
    waiting: dict[int, tuple[socket.socket, float, bytes]] = {}

    def connect() -> socket.socket:
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(connection, select.EPOLLIN)
        return connection

    idle += [connect() for _ in range(callers or CONNECTIONS)]
    httpx.get(f"{server.url}/v2/health/ready").raise_for_status()  # the server has taken the connections up
    sent, begun = 0, time.perf_counter()
    while (now := time.perf_counter()) < begun + seconds or waiting:
        due = 0 if now >= begun + seconds else len(idle) if callers else int(rate * (now - begun)) - sent
        for _ in range(min(due, 64)):  # answers are read in between
            connection = idle.pop() if idle else connect()
            waiting[connection.fileno()] = (connection, time.perf_counter(), b"")
            connection.sendall(requests[sent % 200])
            sent += 1
        for fd, _ in poll.poll(0 if due > 64 else 0.002):
            connection, started, answer = waiting[fd]
            answer += connection.recv(65536)
            head, blank, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
            if not blank or length is None or len(body) < int(length[1]):
                waiting[fd] = (connection, started, answer)
                continue
            load.statuses[int(head[9:12])] += 1
            load.times.append(1000 * (time.perf_counter() - started))
            del waiting[fd]
            idle.append(connection)
    load.took = time.perf_counter() - begun
    for connection in idle:
        connection.close()
    return load


def overload(server: Server, router: str, deadline_ms: int, seconds: float) -> dict[str, Any]:
    """Goodput and latencies at 8 times the peak."""

    def measured(**how: Any) -> tuple[float, float, Load]:
        before = server.cpu_s()
        load = send_load(server, router, seconds, **how)
        return load.goodput, load.statuses[200] / (server.cpu_s() - before), load

    peak, peak_a_cpu_s, _ = max((measured(callers=callers) for callers in (8, 16, 32)), key=lambda run: run[0])
    goodput, a_cpu_s, load = measured(rate=8 * peak)
    return {
        "peak_per_s": peak,
        "peak_per_server_cpu_s": peak_a_cpu_s,
        "offered_per_s": sum(load.statuses.values()) / load.took,  # 8 times the peak, unless the sender falls behind
        "goodput_per_s": goodput,
        "goodput_share": goodput / peak,
        "goodput_share_a_server_cpu_s": a_cpu_s / peak_a_cpu_s,
        "statuses": dict(load.statuses),
        "slowest_ms": max(load.times),
        "p99_ms": float(np.percentile(load.times, 99)),
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


def memory(server: Server, router: str, count: int) -> dict[str, Any]:
    """Megabytes after a tenth of the requests, when every cache is filled, and after each twentieth of all of them.

    ``slope_mb`` is the least-squares rise over the last half, in megabytes per 1,000 requests.
    """
    asyncio.run(many(server, router, count // 10))
    seen, answered, part = [server.megabytes()], 0, max(1, count // 20)
    for _ in range(20):
        answered += asyncio.run(many(server, router, part))
        seen.append(server.megabytes())
    slope = float(np.polyfit(np.arange(11) * part / 1000, seen[10:], 1)[0])
    return {
        "requests": 20 * part, "answered": answered, "before_mb": seen[0], "after_mb": seen[-1], "slope_mb": slope,
        "seen_mb": seen,
    }  # fmt: skip


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
    parser.add_argument("--dataset", type=Path, help="for the dtype: the pool's folder")
    parser.add_argument("--examples", type=Path, help="for the dtype: the synthesize stage's folder")
    parser.add_argument("--decisions", type=int, default=200, help="for the latency and the dtype")
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
                "dtype": lambda: dtypes(given.model, given.dataset, given.examples, given.decisions),
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
