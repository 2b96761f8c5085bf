"""The search router behind an endpoint: instances {query, reference_date?} to decisions."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from routewright.client import SearchDecision
from routewright.errors import BadInput
from routewright.search_router.router import load_router
from serving.decision_log import Redaction, redact
from serving.exploration import Exploration
from serving.input_drift import RunningDrift, route_reference
from serving.predictor import Answer, Timing

NAME = "search-router"
FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2199, 12, 31)


def _day(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d{2}-\d{2}", value, re.ASCII):
        try:
            if FIRST_DAY <= date.fromisoformat(value) <= LAST_DAY:
                return date.fromisoformat(value)
        except ValueError:
            pass
    if value is None:
        return None
    raise ValueError(f"expected a date such as 2024-05-31, from {FIRST_DAY} to {LAST_DAY}")


class SearchInstance(BaseModel):
    """One query to route."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: Annotated[
        str,
        Field(
            min_length=1,
            description="What a person asks; its first 4,000 characters count.",
            json_schema_extra={"pattern": r"\S"},
        ),
    ]
    reference_date: Annotated[
        date | None,
        BeforeValidator(_day),
        Field(
            description=f"What relative times count from, {FIRST_DAY} to {LAST_DAY}; today if not given.",
            json_schema_extra={"pattern": "^(19|20|21)[0-9]{2}-[0-9]{2}-[0-9]{2}$"},
        ),
    ] = None

    @field_validator("query")
    @classmethod
    def _not_blank(cls, query: str) -> str:
        if not query.strip():
            raise ValueError("expected a text with at least one character that is not a blank")
        return query


class SearchRouter:
    """Decides queries with a trained model; `decide` is for one thread."""

    name, in_loop = NAME, False
    instance = SearchInstance
    decision = SearchDecision
    examples: Sequence[dict[str, Any]] = (
        {"query": "how do I rotate a key", "reference_date": "2024-05-31"},
        {"query": "what has changed in the storage service since last year and how much does it cost"},
    )

    def __init__(self, folder: Path, exploration: Exploration, redaction: Redaction = "none") -> None:
        """BadInput where the folder holds no sound search router."""
        try:
            self.router = load_router(folder)
        except RuntimeError as error:  # torch's list of what does not fit
            fault = str(error).splitlines()[-1].strip()
            raise BadInput(f"model folder {folder}: model.safetensors does not fit config.json ({fault})") from None
        if self.router.description.get("agents") != self.router.names:
            raise BadInput(f"model folder {folder}: router.json: agents: expected those of config.json, in their order")
        self.exploration, self.redaction = exploration, redaction
        reference = route_reference(Path(folder), self.router.names)
        self.drift = None if reference is None else RunningDrift(reference)

    @property
    def model_version(self) -> str:
        return self.router.model_version

    @property
    def agents(self) -> list[str]:
        """Who may be named in an outcome."""
        return self.router.names

    def check(self, instance: SearchInstance) -> None:
        """Nothing more: of a query of any length, the start counts."""

    def decide(self, instances: Sequence[SearchInstance], timing: Timing) -> list[Answer]:
        """One forward pass over all instances."""
        today = date.today()
        references = [instance.reference_date or today for instance in instances]
        started = time.perf_counter()
        features = [self.router.featurizer(i.query, day) for i, day in zip(instances, references, strict=True)]
        read = time.perf_counter()
        probabilities = self.router.probabilities(features)
        timing.features, timing.forward = read - started, time.perf_counter() - read
        return [
            self._answer(instance, day, self.router.decision(row, p))
            for instance, day, row, p in zip(instances, references, features, probabilities, strict=True)
        ]

    def _answer(self, instance: SearchInstance, day: date, decided: Any) -> Answer:
        names = self.router.names
        greedy = [names.index(name) for name in decided.agents]
        draw = self.exploration.draw_agents(greedy, len(names))
        if draw.explore:
            decided = replace(
                decided,
                agents=sorted((names[i] for i in draw.taken), key=lambda name: -decided.scores[name]),
                bitmask="".join("1" if i in draw.taken else "0" for i in range(len(names))),
                abstained=False,
            )
        sent = decided.to_json()
        return Answer(
            decision=sent,
            agents=decided.agents,
            abstained=decided.abstained,
            explored=draw.explore,
            propensity=draw.propensity,
            epsilon=draw.epsilon,
            largest=draw.largest,
            drift=None if self.drift is None else self.drift.add(names[greedy[0]]),
            context=(instance, day),
        )

    def logged(self, answer: Answer, key: bytes) -> dict[str, Any]:
        """What the log keeps of a decision; keywords are the query's words and go where it goes."""
        instance, day = answer.context
        sent = dict(answer.decision)
        if self.redaction != "none":
            del sent["keywords"]
        line = {"query": redact(instance.query, self.redaction, key), "reference_date": day.isoformat(), "decision": sent}
        return line if self.redaction == "none" else {**line, "redacted": self.redaction}
