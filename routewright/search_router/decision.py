"""The decision of the search router, as services and logs see it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any


@dataclass(frozen=True)
class Interval:
    """A closed interval of days; either end may be open (None), never both."""

    start: date | None
    end: date | None

    def __post_init__(self) -> None:
        if self.start is None and self.end is None:
            raise ValueError("an interval needs a start or an end")
        if self.start is not None and self.end is not None and self.end < self.start:
            raise ValueError(f"the interval ends ({self.end}) before it starts ({self.start})")


@dataclass(frozen=True)
class Decision:
    """Which agents search, with which extra keywords, in which interval of days.

    ``bitmask`` has one character an agent in pool order; ``scores`` are probabilities in [0, 1].
    """

    agents: list[str]
    bitmask: str
    keywords: list[str] = field(default_factory=list)
    start: date | None = None
    end: date | None = None
    scores: dict[str, float] = field(default_factory=dict)
    abstained: bool = False
    model_version: str = ""

    def to_json(self) -> dict[str, Any]:
        """The contract's JSON: ISO dates or null."""
        row = asdict(self)
        row["start"] = self.start.isoformat() if self.start else None
        row["end"] = self.end.isoformat() if self.end else None
        return row
