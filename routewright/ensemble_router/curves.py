"""What happened to each agent while it co-evolved, as numbers over steps that a plot and a tracking server take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routewright.ensemble_router.coevolve import HISTORY
from routewright.ensemble_router.coevolve_rules import RULES_FOLDER, SERVED
from routewright.tracking import read_history

PER_AGENT = ("f", "share", "gain", "entropy")


def flat(row: Mapping[str, Any]) -> dict[str, float]:
    """One line of a rule's history.jsonl without its nesting: `share/agent-0`, `reward/agent-0/gcd` …; None is left out."""
    numbers = {name: row[name] for name in ("step", "answers", "agents_per_query")}
    for agent, told in row["agents"].items():
        numbers |= {f"{name}/{agent}": told[name] for name in PER_AGENT if told[name] is not None}
        numbers |= {f"reward/{agent}/{domain}": reward for domain, reward in told["reward"].items()}
    return numbers


def write_curves(trained: Path) -> None:
    """Write history.jsonl of the co-evolved agents, the rule that is served, to the folder that `coevolve_rules` wrote."""
    rows = read_history(trained / RULES_FOLDER / SERVED / HISTORY)
    (trained / HISTORY).write_text("".join(json.dumps(flat(row)) + "\n" for row in rows), encoding="utf-8")


def shown_curves(trained: Path) -> list[str]:
    """The curves worth a look: agents per query, then each agent's share of the queries and its familiarity."""
    names = {name: None for row in read_history(trained / HISTORY) for name in row}
    return ["agents_per_query", *(name for name in names if name.startswith(("share/", "f/")))]
