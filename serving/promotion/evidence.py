"""What is known of a candidate and of the champion, from the evaluation's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from routewright.errors import BadInput
from routewright.evaluation.gates import Evidence, Judged
from routewright.evaluation.summary import Row, Summary
from serving.promotion.latency import LATENCY_INPUTS, latencies_in_turn

if TYPE_CHECKING:
    from routewright.pools.pool import Pool
    from routewright.search_router.reward import Action
    from routewright.search_router.router import Router
    from routewright.search_router.selection import Answers

ROWS = {
    "search-router": ("sft+rl", "best-single"), "step-router": ("risk", "random-matched"),
    "ensemble-router": ("familiarity", "single-best"),
}  # fmt: skip
"""The row that is promoted, and the one that needs no training of a router."""
DESCRIPTIONS = {"search-router": "router.json", "step-router": "risk.json", "ensemble-router": "familiarity.json"}


def read_summary(folder: Path) -> Summary:
    """summary.json of an evaluation folder; BadInput where it is missing or something else."""
    file = folder / "summary.json"
    try:
        return Summary.model_validate_json(read_text(file))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise BadInput(f"{file}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; BadInput names file and line."""
    rows: list[dict[str, Any]] = []
    # Not splitlines: a query may hold other line separators of Unicode.
    lines = read_text(file).removesuffix("\n").split("\n")
    for number, line in enumerate(lines if lines != [""] else [], 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise BadInput(f"{file}, line {number}: not a JSON object ({error})") from None
    return rows


def read_text(file: Path) -> str:
    """The text of a file of an evaluation; BadInput where it is missing."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror}), expected what the evaluate stage wrote") from None


def description_of(router: str, model: Path) -> dict[str, Any]:
    """The JSON in which a model folder describes itself; BadInput where it is missing or broken."""
    file = model / DESCRIPTIONS[router]
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8")))
        str(found["model_version"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{file}: expected a trained {router} that says its model_version ({type(error).__name__})") from None
    return found


def read_evidence(router: str, evaluation: Path, row: str, version: str) -> Evidence:
    """A row's answers to the held-out queries or episodes of an evaluation folder; BadInput where it has none.

    For a search router the probability is the chosen agent's, the outcome whether it was one of the best.
    """
    summary = read_summary(evaluation)
    metrics = {name: value.mean for name, value in _row(summary, row, evaluation).metrics.items()}
    try:
        readers = {"search-router": _judged_queries, "step-router": _judged_episodes, "ensemble-router": _judged_questions}
        judged = readers[router](evaluation, row)
        data = _data_digest(judged, _asked(router, evaluation))
    except (KeyError, TypeError, ValueError) as error:
        told = " ".join(str(error).split())
        raise BadInput(f"{evaluation}: the records are not those of an evaluated {router} ({told})") from None
    if not judged:
        raise BadInput(f"{evaluation}: row '{row}' has no records, expected those of the evaluated {router}")
    kept = {str(name): metrics[name] for name in ("valid", "brier", "ece") if name in metrics}
    return Evidence(
        model_version=version, data=data, measured_in=str((evaluation / "summary.json").resolve()),
        judged=judged, metrics=kept,
    )  # fmt: skip


def _row(summary: Summary, name: str, folder: Path) -> Row:
    row = summary.row(name)
    if row is None:
        raise BadInput(f"{folder / 'summary.json'}: rows: expected {name} among {', '.join(r.name for r in summary.rows)}")
    return row


def _asked(router: str, evaluation: Path) -> dict[str, Any]:
    """What an evaluation asked, and at which prices: the queries themselves, or the digest of the tasks."""
    if router == "search-router":
        return {query["id"]: query for query in read_lines(evaluation / "queries.jsonl")}
    if router == "ensemble-router":
        from routewright.ensemble_router.coevolve_rules import IDENTITY as COEVOLUTION

        return {"tasks": json.loads(read_text(evaluation / COEVOLUTION))["tasks_sha256"]}
    from routewright.step_router.identity import IDENTITY

    told, results = (json.loads(read_text(evaluation / name)) for name in (IDENTITY, "results.json"))
    return {"tasks": told["dataset"], "c_slm": results["c_slm"], "c_llm": results["c_llm"]}


def _data_digest(judged: Sequence[Judged], asked: Mapping[str, Any]) -> str:
    """A hash over what was asked, whoever answered it."""
    from routewright.tracking import settings_hash

    return settings_hash({"asked": dict(asked), "judged": {one.id: [one.mismatch, one.slice] for one in judged}})


def _judged_queries(evaluation: Path, row: str) -> list[Judged]:
    queries = {query["id"]: query for query in read_lines(evaluation / "queries.jsonl")}
    records = [record for record in read_lines(evaluation / "records.jsonl") if record["row"] == row]
    return [judged_query(record, queries[record["id"]]) for record in records]


def judged_query(record: Mapping[str, Any], query: Mapping[str, Any]) -> Judged:
    """One line of records.jsonl with its line of queries.jsonl."""
    scores, chosen = record.get("scores") or {}, record["chosen"]
    return Judged(
        id=record["id"], quality=record["metrics"]["ndcg@10"], mismatch=query["mismatch"], slice=query["home"],
        group=query.get("group"),
        probability=scores.get(chosen), outcome=int(chosen in query["best_agents"]) if chosen in scores else None,
        latency_ms=record["metrics"].get("latency_ms"), cost=record["metrics"].get("cost"),
    )  # fmt: skip


def _judged_questions(evaluation: Path, row: str) -> list[Judged]:
    """A row's answers to the held-out questions; the cost is the tokens that its agents generated."""
    return [
        Judged(id=record["id"], quality=record["reward"], slice=record["domain"], cost=record["tokens"])
        for record in read_lines(evaluation / "records.jsonl")
        if record["row"] == row
    ]


def _judged_episodes(evaluation: Path, row: str) -> list[Judged]:
    """The episodes of a row at its operating threshold, else (of a baseline) at the setting nearest to its rate."""
    episodes = [episode for episode in read_lines(evaluation / "episodes.jsonl") if episode["row"] == row]
    results = json.loads(read_text(evaluation / "results.json"))
    points = [p for frontier in results["frontiers"] if frontier["row"] == row for p in frontier["points"]]
    operating = [point["threshold"] for point in points if point["operating"]]
    if not operating:
        rate = results["matched_rate"]
        measured = [point for point in points if point["rule"] == "threshold"]
        operating = [point["threshold"] for point in sorted(measured, key=lambda p: abs(p["escalation"] - rate))[:1]]
    small, large = float(results["c_slm"]), float(results["c_llm"])
    return [
        Judged(
            id=f"{episode['task']}/{episode['seed']}", quality=float(episode["success"]), slice=episode["kind"],
            group=episode["task"], seed=episode["seed"], cost=small * episode["steps"] + large * episode["llm_calls"],
        )
        for episode in episodes
        if episode["threshold"] in operating
    ]  # fmt: skip


def answer_again(dataset: Path, examples: Path, folders: Mapping[str, Path], work: Path) -> dict[str, Evidence]:
    """Evidence of several search routers ({version: folder}) on the same test queries, timed in turn in this run.

    A router of another pool decides as far as it can (`decided_in`); BadInput where it has no agent in common with this one.
    """
    from routewright.pools.pool import load_pool
    from routewright.pools.search import PoolSearch
    from routewright.search_router.evaluate import Evaluation, decider, query_rows
    from routewright.search_router.examples import read_examples
    from routewright.search_router.router import load_router
    from routewright.search_router.selection import router_answers

    pool, test = load_pool(dataset / "pool.yaml"), read_examples(examples / "test.jsonl")
    evaluation = Evaluation(pool, PoolSearch(pool, work / "search-cache"), test)
    routers = {version: load_router(folder) for version, folder in folders.items()}
    for version, router in routers.items():
        if not set(router.names) & set(pool.names):
            raise BadInput(
                f"model version {version} routes to {', '.join(router.names)}, the pool has {', '.join(pool.names)}: "
                "expected an agent in common; to go on without a champion, take the alias away "
                "(docs/bring-your-own-agents.md)"
            )
    deciders = {version: decider(router) for version, router in routers.items()}
    latencies = latencies_in_turn(deciders, {example.id: example for example in test[:LATENCY_INPUTS]})
    queries = {query["id"]: query for query in query_rows(test)}
    found = {}
    for version, router in routers.items():
        answers, _ = router_answers(router, test)
        measured = latencies[version]

        def more(i: int, measured: dict[str, float] = measured) -> dict[str, float]:
            return {"latency_ms": measured[test[i].id]} if test[i].id in measured else {}

        evaluation.records.clear()
        evaluation.add(version, decided_in(pool, router, answers), more=more)
        # By the router's own names, which the pool may not have.
        scores = [dict(zip(router.names, row.round(5).tolist(), strict=True)) for row in answers.scores]
        judged = [
            judged_query({**record, "scores": own}, queries[record["id"]])
            for record, own in zip(evaluation.records, scores, strict=True)
        ]
        found[version] = Evidence(
            model_version=version, data=_data_digest(judged, queries), measured_in="promotion", judged=judged,
            metrics={"valid": 1.0},
        )  # fmt: skip
    return found


def decided_in(pool: Pool, router: Router, answers: Answers) -> list[Action]:
    """What a router's answers decide in a pool that may have changed since its training.

    An agent that it does not know is never asked. One that is gone is missing from the decisions that ask it; where nobody
    is left, its fallback answers, or the pool's if that is gone too.
    """
    from routewright.search_router.router import choose_agents

    told, actions = router.description, []
    own = told["fallback"]
    fallback = own if own in pool.names else pool.fallback
    for place, row in enumerate(answers.scores):
        chosen, _ = choose_agents(row, told["second"], told["abstain"], router.names.index(own))
        there = [router.names[a] for a in chosen if router.names[a] in pool.names]
        actions.append(answers.action(place, there or [fallback]))
    return actions
