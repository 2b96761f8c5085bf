"""Evaluate a search router and every baseline on the same held-out queries; write the summary, the report, the records."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from scipy.special import expit, softmax

from routewright.config import Profile
from routewright.errors import BadInput
from routewright.evaluation.plots import confusion_matrix
from routewright.evaluation.ranking import agent_f1, exact_set, keyword_precision
from routewright.evaluation.search_report import ReportExtra, write_report
from routewright.evaluation.summary import (
    Gate,
    Subset,
    Summary,
    paired_differences,
    summarise,
    table_markdown,
)
from routewright.language_models.chat import chat_client_from_environment
from routewright.pools.pool import BM25Search, Pool, load_pool
from routewright.pools.search import PoolSearch
from routewright.search_router.baselines import (
    UnionVote,
    best_single_agent,
    first_agent_ndcg,
    fit_linear,
    outcome_labels,
)
from routewright.search_router.decision import Interval
from routewright.search_router.examples import Example, read_examples
from routewright.search_router.llm_router import llm_decide
from routewright.search_router.reward import Action
from routewright.search_router.router import Router, load_router
from routewright.search_router.selection import Answers, decision_ndcg, fit_thresholds, routed, router_answers
from routewright.search_router.time_expressions import interval_iou
from routewright.search_router.zero_shot import zero_shot_route

T = TypeVar("T")

PAIRS = (
    ("sft+rl", "sft"), ("sft+rl", "intent"), ("sft+rl", "outcome-lr"), ("sft+rl", "sft+lr"), ("sft+rl", "union-bm25"),
    ("sft+rl", "cori"), ("sft+rl/judge", "sft"),
)  # fmt: skip
SUBSETS: tuple[Subset, ...] = ("overall", "mismatch", "match", "macro", "routing")
OUTCOME_LR_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)  # of outcome-lr in sft+lr, chosen on dev as C is


@dataclass
class Evaluation:
    """The held-out queries, how to search them, and the records of the rows so far."""

    pool: Pool
    search: PoolSearch
    test: list[Example]
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        row: str,
        actions: Sequence[Action],
        answers: Answers | None = None,
        examples: Sequence[Example] | None = None,
        more: Callable[[int], dict[str, float]] | None = None,
        says_keywords: bool = False,
    ) -> None:
        """Record one row's decisions on the test queries (or on `examples`, some of them)."""
        examples = self.test if examples is None else examples
        plain = [Action(action.agents, (), None) for action in actions]
        value = decision_ndcg(examples, actions, self.pool, self.search)
        routing = value if plain == list(actions) else decision_ndcg(examples, plain, self.pool, self.search)
        for i, (example, action) in enumerate(zip(examples, actions, strict=True)):
            best = example.best_agents()
            metrics: dict[str, float] = {
                "ndcg@10": float(value[i]),
                "ndcg@10/routing": float(routing[i]),
                "agent_f1": agent_f1(action.agents, best),
                "exact_set": exact_set(action.agents, best),
                "valid": 1.0,
                "cost": float(len(action.agents)),
                "agents_per_query": float(len(action.agents)),
            }
            if says_keywords:
                today = example.reference or date.today()
                metrics["keyword_precision"] = keyword_precision(action.keywords, example.keywords)
                metrics["date_iou"] = interval_iou(action.interval, example.interval, today)
            metrics |= more(i) if more else {}
            record: dict[str, Any] = {
                "row": row, "id": example.id, "agents": list(action.agents), "chosen": action.agents[0], "metrics": metrics,
            }  # fmt: skip
            if answers is not None:
                record["scores"] = dict(zip(self.pool.names, answers.scores[i].round(5).tolist(), strict=True))
            self.records.append(record)


def decider(router: Router) -> Callable[[Example], object]:
    """The router's decision on an example's query."""
    return lambda example: router.decide(example.query, example.reference)


def decision_latencies(decide: Callable[[T], object], inputs: Mapping[str, T]) -> dict[str, float]:
    """Milliseconds of one decision at batch 1, tokenizer to thresholds, {name of the input: ms}, after five to warm up."""
    for asked in list(inputs.values())[:5]:
        decide(asked)
    latencies = {}
    for name, asked in inputs.items():
        start = time.perf_counter()
        decide(asked)
        latencies[name] = 1000 * (time.perf_counter() - start)
    return latencies


def collection_scores(router: Router, examples: Sequence[Example]) -> np.ndarray:
    """The CORI belief alone as P(agent), softmax over agents, float (n, N): what the collections say without training."""
    beliefs = np.stack([router.featurizer(e.query, e.reference).collection for e in examples])
    return softmax(beliefs, axis=1)


def added_log_odds(sft: np.ndarray, linear: np.ndarray, weight: float) -> np.ndarray:
    """σ(log-odds of ``sft`` + weight · log-odds of ``linear``), both P(agent) (n, N)."""
    added: np.ndarray = expit(log_odds(sft) + weight * log_odds(linear))
    return added


def log_odds(p: np.ndarray) -> np.ndarray:
    """ln(p / (1 − p)), p clipped to [1e-4, 1 − 1e-4]."""
    clipped = np.clip(p, 1e-4, 1 - 1e-4)
    return np.log(clipped / (1 - clipped))


def outcome_lr_weight(sft: np.ndarray, linear: np.ndarray, dev: Sequence[Example], names: Sequence[str]) -> float:
    """How much outcome-lr counts in sft+lr: the best NDCG@10 of the first agent on dev, the smaller among equals."""
    return max(OUTCOME_LR_WEIGHTS, key=lambda w: (first_agent_ndcg(added_log_odds(sft, linear, w), dev, names), -w))


def add_simple_rows(evaluation: Evaluation, train: Sequence[Example], seed: int) -> None:
    """random, best-single, all-agents, oracle: no thresholds to fit."""
    names = evaluation.pool.names
    rng = np.random.default_rng(seed)
    single = best_single_agent(train, names)
    test = evaluation.test
    evaluation.add("random", [Action((names[i],), (), None) for i in rng.integers(len(names), size=len(test))])
    evaluation.add("best-single", [Action((single,), (), None)] * len(test))
    evaluation.add("all-agents", [Action(tuple(names), (), None)] * len(test))
    evaluation.add("oracle", [Action((max(e.outcome, key=lambda n: e.outcome[n]),), (), None) for e in test])


def evaluate(dataset: Path, examples: Path, sft: Path, rl: Path, out: Path, profile: Profile, seed: int) -> None:
    """Write summary.json, report.html, table.md, records.jsonl, queries.jsonl and confusion.json into `out`.

    Thresholds of every row are fitted on dev, the trained routers' by their own stages; all rows answer the same test
    queries.
    """
    if (out / "summary.json").is_file():
        return
    started = time.time()
    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    pool = load_pool(dataset / "pool.yaml")
    names = pool.names
    train = read_examples(examples / "train.jsonl")
    outcomes, intents = train[: profile.rl.outcomes], train[: profile.sft.queries]
    dev, test = read_examples(examples / "dev.jsonl"), read_examples(examples / "test.jsonl")
    evaluation = Evaluation(pool, PoolSearch(pool, out / "search-cache"), test)
    dev_texts, test_texts = [e.query for e in dev], [e.query for e in test]

    console.print("evaluating: simple rows")
    add_simple_rows(evaluation, outcomes, seed)

    def add_scored(row: str, on_dev: Answers, on_test: Answers, **more: Any) -> None:
        console.print(f"evaluating: {row}")
        thresholds = fit_thresholds(on_dev, dev, pool, evaluation.search)
        evaluation.add(row, routed(on_test, *thresholds, pool), on_test, **more)

    linear: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    answered, best = outcome_labels(outcomes)
    for row, fit_on, labels in (
        ("intent", intents, [e.intent_agents[0] for e in intents]),
        ("outcome-lr", answered, best),
    ):
        router = fit_linear(fit_on, labels, dev, names)
        if router is None:
            raise BadInput(
                f"pool '{pool.name}': all training queries have the same {row} label, expected at least two agents"
            )
        linear[row] = router.probabilities(dev_texts), router.probabilities(test_texts)
        add_scored(row, Answers(linear[row][0]), Answers(linear[row][1]))
    if all(isinstance(agent.search, BM25Search) for agent in pool.agents):
        union = UnionVote(pool)
        add_scored("union-bm25", Answers(union.probabilities(dev_texts)), Answers(union.probabilities(test_texts)))

    console.print("evaluating: collection belief")
    sft_router = load_router(sft)
    add_scored("cori", *(Answers(collection_scores(sft_router, side)) for side in (dev, test)))

    console.print("evaluating: zero-shot")
    add_zero_shot_row(evaluation, profile, seed)

    folders = {"sft": sft, "sft+rl": rl}
    if (rl / "judge" / "router.json").is_file():
        folders["sft+rl/judge"] = rl / "judge"
    for row, folder in folders.items():
        model = load_router(folder)
        on_test, valid = router_answers(model, test)
        timed = {example.id: example for example in test[: profile.evaluation.latency_queries]}
        latencies = decision_latencies(decider(model), timed)

        def more(i: int, valid: np.ndarray = valid, latencies: dict[str, float] = latencies) -> dict[str, float]:
            latency = latencies.get(test[i].id)
            return {"valid/unconstrained": float(valid[i])} | ({"latency_ms": latency} if latency is not None else {})

        console.print(f"evaluating: {row}")
        actions = routed(on_test, model.description["second"], model.description["abstain"], pool)
        evaluation.add(row, actions, on_test, more=more, says_keywords=True)
        if row == "sft":
            on_dev, _ = router_answers(model, dev)
            first, second = linear["outcome-lr"]
            weight = outcome_lr_weight(on_dev.scores, first, dev, names)
            added = [
                Answers(added_log_odds(answers.scores, scores, weight), answers.keywords, answers.intervals)
                for answers, scores in ((on_dev, first), (on_test, second))
            ]
            add_scored("sft+lr", *added, says_keywords=True)

    client = chat_client_from_environment(out / "llm-cache", out / "checkpoints" / "llm-spent")
    if client is not None:
        add_llm_row(evaluation, client)
    write_outputs(evaluation, out, profile, seed, started, {"sft": sft, "rl": rl}, dataset)


def add_zero_shot_row(evaluation: Evaluation, profile: Profile, seed: int) -> None:
    """The untrained backbone on the first test queries; it is slow."""
    some = evaluation.test[: profile.evaluation.zero_shot_queries]
    told = zero_shot_route(evaluation.pool, [e.query for e in some], profile.backbone, seed)
    answers = Answers(np.stack([answer.probabilities for answer in told]))
    evaluation.add(
        "zero-shot",
        routed(answers, 1.01, 0.0, evaluation.pool),
        answers,
        some,
        more=lambda i: {"valid/unconstrained": float(told[i].valid), "latency_ms": told[i].latency_ms},
    )


def add_llm_row(evaluation: Evaluation, client: Any) -> None:
    """The optional row `llm:<model>`: a prompted model behind an OpenAI-compatible URL."""
    rows = [{"query": e.query, "reference_date": e.reference_date} for e in evaluation.test]
    decided = llm_decide(client, evaluation.pool, rows)
    actions = []
    for answer in decided:
        d = answer.decision
        actions.append(Action(tuple(d.agents), tuple(d.keywords), Interval(d.start, d.end) if d.start or d.end else None))

    def more(i: int) -> dict[str, float]:
        extra = {"valid": float(decided[i].valid)}
        latency = decided[i].latency_ms
        return extra | ({"latency_ms": latency} if latency is not None else {})

    evaluation.add(f"llm:{client.model}", actions, more=more, says_keywords=True)


def query_rows(test: Sequence[Example]) -> list[dict[str, Any]]:
    """The queries of records.jsonl: what was best, what the labeller said, whether they are mismatches."""
    return [
        {
            "id": e.id, "query": e.query, "style": e.style, "home": e.home, "group": e.group,
            "best_agent": max(e.outcome, key=lambda name: e.outcome[name]), "best_agents": e.best_agents(),
            "labeller_agent": e.intent_agents[0], "mismatch": e.mismatch(), "outcome": e.outcome,
        }
        for e in test
    ]  # fmt: skip


def gates(summary_rows: Sequence[Any], differences: Sequence[Any]) -> list[Gate]:
    """What a new router must show: better than SFT on mismatches, no loss elsewhere, 0.80 of the oracle, valid, fast."""
    found: list[Gate] = []
    by_name = {row.name: row.metrics for row in summary_rows}
    for subset, bound in (("mismatch", 0.0), ("match", -0.01)):
        difference = next((d for d in differences if (d.a, d.b, d.subset) == ("sft+rl", "sft", subset)), None)
        if difference is not None:
            found.append(
                Gate(name=f"sft+rl − sft, {subset}", passed=difference.mean > bound, value=difference.mean, bound=bound)
            )
    router = by_name["sft+rl"]
    share = router["ndcg@10"].mean / max(by_name["oracle"]["ndcg@10"].mean, 1e-9)
    found.append(Gate(name="share of the oracle's NDCG@10", passed=share >= 0.8, value=share, bound=0.8))
    found.append(Gate(name="valid", passed=router["valid"].mean == 1.0, value=router["valid"].mean, bound=1.0))
    for percentile, bound in (("p50", 60.0), ("p99", 120.0)):
        value = router[f"latency_ms/{percentile}"].mean
        found.append(Gate(name=f"decision latency {percentile}, ms", passed=value <= bound, value=value, bound=bound))
    return found


def _write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The training steps that a stage logged."""
    return [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]


def write_outputs(
    evaluation: Evaluation,
    out: Path,
    profile: Profile,
    seed: int,
    started: float,
    folders: dict[str, Path],
    dataset: Path,
) -> None:
    """All files of `evaluate`, summary.json last."""
    queries = query_rows(evaluation.test)
    records = evaluation.records
    present = {record["row"] for record in records}
    pairs = [pair for pair in PAIRS if set(pair) <= present]
    rows = summarise(records, queries, seed)
    differences = paired_differences(records, queries, pairs, SUBSETS, seed)
    summary = Summary(
        pipeline="search-router", profile=profile.name, seed=seed, wall_s=round(time.time() - started, 1), rows=rows,
        gates=gates(rows, differences),
        artifacts={"report": "report.html", "records": "records.jsonl", "queries": "queries.jsonl"},
    )  # fmt: skip
    _write_jsonl(out / "records.jsonl", records)
    _write_jsonl(out / "queries.jsonl", queries)
    (out / "differences.json").write_text(json.dumps([d.model_dump() for d in differences], indent=1), encoding="utf-8")
    matrix = confusion_matrix(records, queries, "sft+rl", evaluation.pool.names)
    confusion = {"labels": evaluation.pool.names, "matrix": matrix.tolist()}
    (out / "confusion.json").write_text(json.dumps(confusion), encoding="utf-8")
    (out / "table.md").write_text(table_markdown(summary), encoding="utf-8")
    manifest = json.loads((dataset / "dataset.json").read_text(encoding="utf-8"))
    tuned = json.loads((folders["sft"] / "router.json").read_text(encoding="utf-8"))
    router = json.loads((folders["rl"] / "router.json").read_text(encoding="utf-8"))
    extra: ReportExtra = {
        "pool": evaluation.pool.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "trained": (
            f"A router of {len(evaluation.pool.names)} agents was fine-tuned on intent labels of {tuned['queries']:,} "
            f"queries and then trained with REINFORCE++ on what the agents returned for {router['outcomes']:,} of them. "
            f"Every row below answers the same {len(queries):,} held-out queries; thresholds were fitted on other ones."
        ),
        "lineage": {
            "git": os.environ.get("ROUTEWRIGHT_GIT_SHA", "unknown"),
            "dataset md5": manifest["md5"],
            "pool digest": manifest["pool_digest"],
            "model version": router["model_version"],
            "config sha256": profile.digest,
            "seed": str(seed),
            "backbone": f"{profile.backbone.name} {profile.backbone.revision or ''}".strip(),
        },
    }
    histories = {stage: read_history(folder) for stage, folder in folders.items()}
    write_report(out / "report.html", summary, records, queries, histories, differences, extra)
    shutil.rmtree(out / "search-cache", ignore_errors=True)
    partial = out / "summary.partial"
    partial.write_text(summary.model_dump_json(indent=1), encoding="utf-8")
    partial.rename(out / "summary.json")
