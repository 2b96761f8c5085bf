"""When to retrain a search router, and whether what came of it would have done better on logged traffic.

Both read what a served router logged (`routewright.pools.decision_log`). Queries are divided by a hash of their text: on
what a router learns from, nothing can be concluded about it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from routewright.errors import BadInput
from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.drift import MAX_EMBEDDED, MIN_QUERIES, Drift, detect_drift
from routewright.evaluation.off_policy import (
    MIN_DECISIONS,
    OffPolicyEstimate,
    action_of,
    estimate_from_log,
    importance_weights,
    outcome_predictions,
    reward_of,
    usable_entries,
)
from routewright.pools.query_log import QueryLogEntry, read_query_log

HELD_OUT = 0.3
"""Share of the queries that only the off-policy check reads."""
MARGIN = 0.05
"""A challenger is surely (lower end of 95 %) not worse than the logged router by more than this."""
LEARN, HELD_OUT_LOG, DRIFT, OFF_POLICY = "learn.jsonl", "held-out.jsonl", "drift.json", "off-policy.json"


class OffPolicyDecision(BaseModel):
    """``off-policy.json``: whether the log lets the candidate pass, the reason in one sentence, and the numbers.

    ``estimate.gain`` is that over the logged router without its exploration, which costs it what a candidate would not pay.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    passed: bool
    reason: str
    bound: float
    estimate: OffPolicyEstimate


def check_drift(log: Path, reference: Path, out: Path, seed: int) -> Drift:
    """Compare a served router's log with an earlier one, by routes and query embeddings; drift.json has all numbers.

    Also writes learn.jsonl and held-out.jsonl, the log as query logs for training and for the off-policy check. A route is
    the router's first agent; explored decisions are left out, as chance made them, and of more than 2,000 others as many are
    drawn. BadInput: a log that is missing or broken, or with fewer than 50 decisions whose query can be read.
    """
    from routewright.language_models.embedding import embed

    out.mkdir(parents=True, exist_ok=True)
    entries, earlier = (_traffic(path) for path in (log, reference))
    for name, chosen in ((LEARN, False), (HELD_OUT_LOG, True)):
        lines = [entry.model_dump_json() for entry in entries if held_out(entry.query) == chosen]
        (out / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sides = []
    for path, side in ((reference, earlier), (log, entries)):
        greedy = [entry for entry in side if not entry.explored and action_of(entry)]
        if len(greedy) < MIN_QUERIES:
            raise BadInput(
                f"{path}: expected at least {MIN_QUERIES} decisions, not explored and with the query in clear text, found "
                f"{len(greedy)}"
            )
        sides.append(random.Random(seed).sample(greedy, min(len(greedy), 2 * MAX_EMBEDDED)))
    before, now = ([str((entry.decision or {})["agents"][0]) for entry in side] for side in sides)
    vectors = [embed([entry.query for entry in side]) for side in sides]
    found = detect_drift(before, now, vectors[0], vectors[1], seed=seed)
    _write(out / DRIFT, {**asdict(found), "current": len(now)})
    return found


def held_out(query: str) -> bool:
    """Whether a query belongs to the off-policy check, whoever asks it how often, in whatever case and spacing."""
    text = " ".join(query.casefold().split())
    place = int(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12], 16) / 16**12
    return place < HELD_OUT


def check_off_policy(model: Path, held_out_log: Path, out: Path) -> OffPolicyDecision:
    """Judge a search router on logged decisions that it did not learn from; off-policy.json has all numbers.

    It passes where the estimate is conclusive (enough decisions, effectively, and all actions explored) and the lower end of
    its gain over the logged router, had that not explored, is at least −0.05. BadInput where the log has no decision with
    propensity and outcome, or knows other agents.
    """
    from routewright.search_router.router import load_router

    used = usable_entries(read_query_log(held_out_log))
    if not used:
        raise BadInput(
            f"{held_out_log}: found no decision with request_id, propensity and outcome, expected a log written with "
            "exploration and feedback on it"
        )
    router = load_router(model)
    unknown = sorted({agent for entry in used for agent in action_of(entry) or ()} - set(router.names))
    if unknown:
        raise BadInput(f"{held_out_log}: unknown agent '{unknown[0]}', expected one of {', '.join(router.names)}")
    features = [router.featurizer(entry.query, _day(entry)) for entry in used]
    decisions = [router.decision(f, p) for f, p in zip(features, router.probabilities(features), strict=True)]
    taken = {str(entry.request_id): frozenset(decision.agents) for entry, decision in zip(used, decisions, strict=True)}
    outcomes = outcome_model(used, taken, router.names) if len(used) >= MIN_DECISIONS else None
    estimate = estimate_from_log(used, {name: {action: 1.0} for name, action in taken.items()}, outcomes)
    if estimate.conclusive:
        estimate = estimate.model_copy(update={"gain": gain_without_exploration(used, taken)})
    passed, reason = False, estimate.reason
    if estimate.conclusive and estimate.gain is None:
        reason = "every decision was explored: the log does not say how the router does without exploration"
    if estimate.conclusive and estimate.gain is not None:
        passed = estimate.gain.low >= -MARGIN
        told = "is at least" if passed else "may be below"
        reason = f"the gain over the logged router {told} {-MARGIN}: {estimate.gain.low:+.3f} to {estimate.gain.high:+.3f}"
    decision = OffPolicyDecision(passed=passed, reason=reason, bound=-MARGIN, estimate=estimate)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / OFF_POLICY, decision.model_dump())
    return decision


def outcome_model(
    entries: Sequence[QueryLogEntry], candidate: Mapping[str, frozenset[str]], agents: Sequence[str]
) -> dict[str, dict[frozenset[str], float]]:
    """{request id: {action: q(x, a)}} of the logged and the candidate's actions, for the doubly robust estimate.

    Of a set it is the best of its agents', as the reward is; cross-fitted, see `outcome_predictions`.
    """
    logged = [action_of(entry) or frozenset() for entry in entries]
    rewards = [reward_of(entry) or 0.0 for entry in entries]
    q = outcome_predictions([entry.query for entry in entries], logged, rewards, agents, seed=0)
    found = {}
    for entry, action, row in zip(entries, logged, q, strict=True):
        name, of = str(entry.request_id), dict(zip(agents, row.tolist(), strict=True))
        found[name] = {a: max(of[agent] for agent in a) for a in (action, candidate[name])}
    return found


def gain_without_exploration(entries: Sequence[QueryLogEntry], candidate: Mapping[str, frozenset[str]]) -> Estimate | None:
    """Value of a candidate (SNIPS) minus that of the logged router's own decisions; 95 % interval by the delta method.

    ``candidate``: {request id: agents}. The mean over decisions that were not explored is the router's own, as chance alone
    says which are; against all of them a candidate would gain by not exploring. None where all were explored.
    """
    kept = [entry for entry in entries if entry.propensity != 1]
    r = np.array([reward_of(entry) or 0.0 for entry in kept])
    same = [float(candidate[str(entry.request_id)] == action_of(entry)) for entry in kept]
    w = importance_weights(same, [entry.propensity or 0.0 for entry in kept])
    own = np.array([float(not entry.explored) for entry in kept])
    if not own.any():
        return None
    value, logged = (w * r).sum() / w.sum(), (own * r).sum() / own.sum()
    influence = w * (r - value) / w.mean() - own * (r - logged) / own.mean()
    gain, error = float(value - logged), 1.959964 * float(influence.std(ddof=1)) / len(kept) ** 0.5
    return Estimate(mean=gain, low=gain - error, high=gain + error, n=len(kept))


def drift_markdown(found: dict[str, Any]) -> str:
    """What drift.json says, as a person reads it."""
    lines = [f"**{'drifted' if found['drifted'] else 'not drifted'}**: {found['reason']}", ""]
    lines += ["| statistic | value | threshold |", "|---|---|---|"]
    lines += [f"| {name} | {found[key]:.4f} | {found[f'{key}_threshold']:.4f} |" for name, key in (
        ("population stability of the routes", "psi"), ("discrepancy of the queries (MMD²)", "mmd"),
    )]  # fmt: skip
    lines += ["", "| route | share before | share now |", "|---|---|---|"]
    lines += [f"| {name} | {before:.1%} | {now:.1%} |" for name, (before, now) in found["shares"].items()]
    return "\n".join(lines) + "\n"


def _traffic(log: Path) -> Sequence[QueryLogEntry]:
    """The decisions of a served router's log with their outcomes."""
    if not log.exists():
        raise BadInput(f"log {log}: no such file, expected the decisions that routewright serve --log wrote")
    return [entry for entry in read_query_log(log) if entry.learnable]


def _day(entry: QueryLogEntry) -> date:
    if entry.reference_date is not None:
        return entry.reference_date
    return entry.timestamp.date() if entry.timestamp is not None else date.today()


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
