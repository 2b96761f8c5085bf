"""The query log: one JSON line a request, appended by production, read by SFT and by the off-policy estimates."""

from __future__ import annotations

import logging
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from routewright.errors import BadInput
from routewright.pools.pool import numbered_lines

_log = logging.getLogger(__name__)

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class QueryLogEntry(BaseModel):
    """One logged request; only ``query`` is always there, keys this model does not know are skipped.

    ``start``/``end`` are the closed interval of days asked for, ``qrels`` {agent: {document: grade >= 0}}, ``outcome``
    {agent: 0..1}, ``decision`` the router's answer as it was sent, ``propensity`` the probability in (0, 1] with which
    the logged action was taken, exploration included, ``largest`` the number of agents up to which exploration could have
    asked any set instead.
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

    @model_validator(mode="after")
    def _ends_after_it_starts(self) -> QueryLogEntry:
        if self.start and self.end and self.end < self.start:
            raise ValueError(f"expected an end not before the start {self.start}, found {self.end}")
        return self


def read_query_log(path: Path) -> list[QueryLogEntry]:
    """All entries of a query log (.jsonl or .jsonl.gz), in file order.

    BadInput names file, line and field of the first broken line. A last line without its newline that does not parse
    was being written when the log was read: it is left out with a warning.
    """
    entries = []
    for number, line in numbered_lines(path):
        try:
            entries.append(QueryLogEntry.model_validate_json(line))
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            if fault["type"] == "json_invalid" and not line.endswith(b"\n"):
                _log.warning("%s, line %d: the last line is torn and left out", path, number)
                continue
            field = ".".join(str(part) for part in fault["loc"])
            reason = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
            raise BadInput(f"{path}, line {number}: {field + ': ' if field else ''}{reason}") from None
    return entries
