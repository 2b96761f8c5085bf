"""What a served search router would have logged on the household pool, exploration and feedback included."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path

ADJECTIVES = ("red", "small", "heavy", "broken", "plastic", "antique")
VERBS = ("repair", "clean", "store", "buy", "replace", "move", "label", "sell")
HOMES = {
    "kitchen": ("oven", "pan", "dough", "whisk", "skillet", "sauce", "recipe", "flour", "grater", "stew"),
    "garden": ("seed", "soil", "hedge", "compost", "rose", "lawn", "spade", "tulip", "mulch", "rake"),
    "office": ("printer", "stapler", "envelope", "copier", "memo", "desk"),
}
# The logged router goes by the cards, which name these things; the office has their documents.
MISTAKEN = {"kettle": "kitchen", "teapot": "kitchen", "hose": "garden", "bucket": "garden"}
BEFORE = {"kitchen": 1.0, "garden": 1.0, "office": 1.0}
NOW = {"kitchen": 0.6, "garden": 1.6, "office": 0.4, "mistaken": 1.4}


def write_served_log(
    path: Path,
    count: int,
    shares: Mapping[str, float],
    seed: int,
    epsilon: float = 0.5,
    feedback: bool = True,
    several: bool = False,
) -> Path:
    """``count`` decisions over things of each home ("mistaken" for those above) in these shares; outcomes on own lines.

    Exploration asks one agent, or with ``several`` any set of them.
    """
    rng, agents = random.Random(seed), list(HOMES)
    actions = [(a,) for a in agents]
    if several:
        actions += [*itertools.combinations(agents, 2), tuple(agents)]
    lines = []
    for number in range(count):
        kind = rng.choices(list(shares), list(shares.values()))[0]
        thing = rng.choice(list(MISTAKEN) if kind == "mistaken" else HOMES[kind])
        greedy, home = (MISTAKEN.get(thing, kind),), "office" if kind == "mistaken" else kind
        explored = rng.random() < epsilon
        chosen = rng.choice(actions) if explored else greedy
        name = f"{path.stem}-{seed}-{number}"
        lines.append({
            "query": f"{rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {thing}", "reference_date": "2025-06-15",
            "decision": {"agents": list(chosen), "bitmask": "".join("01"[a in chosen] for a in agents)},
            "request_id": name, "router": "search-router", "model_version": "logged", "explored": explored,
            "propensity": (1 - epsilon) * (chosen == greedy) + epsilon / len(actions),
            "timestamp": "2026-11-01T00:00:00+00:00",
        })  # fmt: skip
        if feedback:
            outcome = {agent: float(agent == home) for agent in chosen}
            lines.append({"request_id": name, "router": "search-router", "outcome": outcome})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
