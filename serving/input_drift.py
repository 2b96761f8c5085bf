"""A running drift score for the metrics page; what decides whether to retrain is `routewright.evaluation.drift`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from routewright.errors import BadInput
from routewright.evaluation.drift import ROUTES, population_stability_index

WINDOW = 500
_EVERY = 25  # decisions between two scores


class RunningDrift:
    """Population stability index of the last `WINDOW` decisions' bins against the reference's counts, {bin: count}."""

    def __init__(self, reference: Mapping[Any, int]) -> None:
        self._bins = {name: i for i, name in enumerate(reference)}
        self._reference = list(reference.values())
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._seen = 0

    def add(self, name: Any) -> float | None:
        """Count a decision; the new score, every 25 decisions once the window is full."""
        self._recent.append(self._bins[name])
        self._seen += 1
        if len(self._recent) < WINDOW or self._seen % _EVERY:
            return None
        counts = [0] * len(self._bins)
        for i in self._recent:
            counts[i] += 1
        return population_stability_index(self._reference, counts)


def route_reference(folder: Path, agents: Sequence[str]) -> dict[str, int] | None:
    """How often each agent was the first choice on the reference queries, from routes.json; None without that file."""
    path = folder / ROUTES
    if not path.is_file():
        return None
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
        found = {name: int(counts.get(name, 0)) for name in agents}
    except (ValueError, AttributeError, TypeError):
        raise BadInput(f"{path}: expected an object of agents and their counts") from None
    if not any(found.values()) or min(found.values()) < 0:
        raise BadInput(f"{path}: expected counts of at least 0 for the model's agents, not all of them 0")
    return found
