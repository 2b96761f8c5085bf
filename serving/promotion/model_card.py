"""The model card: what a model is, what it learnt from, its numbers and its limits, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from routewright.evaluation.gates import Check
from routewright.evaluation.summary import Summary, table_markdown

TITLES = {"search-router": "Search router", "step-router": "Step router", "ensemble-router": "Ensemble router"}
WHAT = {
    "search-router": "Decides which agents get a query: one forward pass of a small language model, trained by supervised "
    "fine-tuning on intent and then with REINFORCE++ on what the agents returned.",
    "step-router": "Decides whether a small model takes the next step of an episode or the big one does: a calibrated "
    "risk of failure from 15 features of the policy, the verifier and the trajectory.",
    "ensemble-router": "Decides which LoRA agents answer a query, by how well each agent's head predicts a frozen random "
    "target from the backbone's state of it; agents and heads were trained together on verified answers.",
}
LIMITS = {
    "search-router": (
        "It knows the agents of its pool; the pool's digest tells whether they are still the same.",
        "Its probabilities are those of its training traffic: after drift, thresholds and calibration no longer hold.",
        "Quality was judged by the relevance judgements of the held-out queries; what nobody judged counts as irrelevant.",
        "Intervals are over queries of one evaluation, not over trainings.",
    ),
    "step-router": (
        "Risk is that of the small model it was calibrated with, on environments like those of its training.",
        "Thresholds hold for the stated costs and the stated step limit.",
        "An escalated step was taken by the teacher of the evaluation; another big model may do worse.",
        "Intervals are over tasks of one evaluation, not over trainings.",
    ),
    "ensemble-router": (
        "It knows the agents that it was trained with, as they were at the end of the training.",
        "A query far from all that was trained on is familiar to nobody: then all agents answer.",
        "Answers were verified against stored ones; how good an answer without a verifier is, nobody measured.",
        "Intervals are over questions of one evaluation, not over trainings.",
    ),
}


def model_card(
    router: str, description: Mapping[str, Any], summary: Summary, checks: Sequence[Check], digest: str, first: bool
) -> str:
    """The card of a candidate, from its own description, the evaluation's summary and the gates."""
    facts = {name: value for name, value in description.items() if isinstance(value, str | int | float | bool)}
    agents = description.get("agents")
    lines = [
        f"# {TITLES[router]} {description['model_version']}",
        "",
        WHAT[router],
        "",
        "## What",
        "",
        f"- files, SHA-256: `{digest}`",
        *(f"- {name.replace('_', ' ')}: `{value}`" for name, value in facts.items()),
        *([f"- agents: {', '.join(map(str, agents))}"] if isinstance(agents, list) else []),
        "",
        "## Data",
        "",
        f"Pipeline `{summary.pipeline}`, profile `{summary.profile}`, seed {summary.seed}. All rows below answer the same "
        "held-out queries or episodes, thresholds were fitted on other ones; intervals are 95 % bootstrap.",
        "",
        "## Numbers",
        "",
        table_markdown(summary).strip(),
        "",
        "No champion to compare with: absolute gates only." if first else "Compared with the champion on the same data.",
        "",
        checks_markdown(checks),
        "",
        "## Limits",
        "",
        *(f"- {limit}" for limit in LIMITS[router]),
    ]
    return "\n".join(lines) + "\n"


def checks_markdown(checks: Sequence[Check]) -> str:
    """The gates as a Markdown table."""
    rows = ["| gate | value | bound | passed | why |", "|---|---|---|---|---|"]
    for check in checks:
        value = "–" if check.value is None else f"{check.value:.4g}"
        rows.append(f"| {check.name} | {value} | {check.bound:g} | {'yes' if check.passed else '**no**'} | {check.why} |")
    return "\n".join(rows)
