"""The query log: one JSON line a request, appended by production, read by SFT and by the off-policy estimates.

What ``routewright serve --log`` writes is one: a decision a line, and what came of it on a later line of its own.
"""

from __future__ import annotations

import logging
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from routewright.errors import BadInput
from routewright.pools.decision_log import log_lines

_log = logging.getLogger(__name__)

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class QueryLogEntry(BaseModel):
    """One logged request; only ``query`` is always there, keys this model does not know are skipped.

    ``start``/``end`` are the closed interval of days asked for, ``qrels`` {agent: {document: grade >= 0}}, ``outcome``
    {agent: 0..1}, ``decision`` the router's answer as it was sent, ``propensity`` the probability in (0, 1] with which
    the logged action was taken, exploration included, ``largest`` the number of agents up to which exploration could have
    asked any set instead, ``redacted`` how the query was made unreadable.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    query: str
    reference_date: date | None = None
    agents: list[str] = []
    keywords: list[str] = []
    start: date | None = None
    end: date | None = None
    qrels: dict[str, dict[str, Annotated[int, Field(ge=0)]]] = {}
    outcome: dict[str, Share] = {}
    request_id: str | None = None
    router: str | None = None
    model_version: str | None = None
    decision: dict[str, Any] | None = None
    explored: bool = False
    propensity: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    largest: Annotated[int, Field(ge=1)] | None = None
    timestamp: AwareDatetime | None = None
    redacted: str | None = None

    @property
    def learnable(self) -> bool:
        """Whether the search router can learn from it: its query was kept, and no other router decided."""
        return self.redacted is None and self.router not in ("step-router", "ensemble-router")

    @model_validator(mode="after")
    def _ends_after_it_starts(self) -> QueryLogEntry:
        if self.start and self.end and self.end < self.start:
            raise ValueError(f"expected an end not before the start {self.start}, found {self.end}")
        return self


class _Feedback(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    request_id: str
    outcome: dict[str, Share]


def read_query_log(path: Path) -> list[QueryLogEntry]:
    """All entries of a query log (.jsonl or .jsonl.gz), what it was rotated to first, or of all logs in a folder.

    A line with ``request_id`` and ``outcome`` but no ``query`` is feedback: its outcome becomes that of the entry with this
    id, of several the last. BadInput names file, line and field of the first broken line. A last line without its newline
    that does not parse was being written when the log was read: it is left out with a warning.
    """
    path = Path(path)
    entries, outcomes = [], {}
    for file, number, line in log_lines(path):
        try:
            entries.append(QueryLogEntry.model_validate_json(line))
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            if fault["type"] == "json_invalid" and not line.endswith(b"\n"):
                _log.warning("%s, line %d: the last line is torn and left out", file, number)
            elif (fault["type"], fault["loc"]) == ("missing", ("query",)) and (feedback := _feedback(line)):
                outcomes[feedback.request_id] = feedback.outcome
            else:
                field = ".".join(str(part) for part in fault["loc"])
                reason = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
                raise BadInput(f"{file}, line {number}: {field + ': ' if field else ''}{reason}") from None
    return [
        entry.model_copy(update={"outcome": outcomes[entry.request_id]}) if entry.request_id in outcomes else entry
        for entry in entries
    ]


def _feedback(line: bytes) -> _Feedback | None:
    try:
        return _Feedback.model_validate_json(line)
    except ValidationError:
        return None
