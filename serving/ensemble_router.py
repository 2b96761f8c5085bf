"""The ensemble router behind an endpoint: a query to the agents that answer it, with their familiarity."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from routewright.client import EnsembleDecision
from routewright.ensemble_router.router import MAX_QUERY_TOKENS, load_ensemble_router
from serving.decision_log import Redaction, redact
from serving.exploration import Exploration
from serving.input_drift import RunningDrift, route_reference
from serving.predictor import Answer, Timing

NAME = "ensemble-router"
MAX_QUERY_CHARACTERS = 4 * MAX_QUERY_TOKENS  # an English text of as many tokens; to count a megabyte's takes a second


class EnsembleInstance(BaseModel):
    """One query to route."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: Annotated[
        str,
        Field(
            min_length=1,
            max_length=MAX_QUERY_CHARACTERS,
            description=f"What the agents are asked, as they are asked it; at most {MAX_QUERY_TOKENS:,} tokens.",
        ),
    ]

    @field_validator("query")
    @classmethod
    def _not_blank(cls, query: str) -> str:
        if not query.strip():
            raise ValueError("expected a text with at least one character that is not a blank")
        return query


class EnsembleRouterPredictor:
    """Decides queries with trained familiarity heads; `decide` is for one thread."""

    name, in_loop = NAME, False
    instance = EnsembleInstance
    decision = EnsembleDecision
    examples: Sequence[dict[str, Any]] = (
        {"query": "What is 17 + 25?"},
        {"query": "Spell the word planet backwards, then count its letters and say which of them occurs most often."},
    )

    def __init__(self, folder: Path, exploration: Exploration, redaction: Redaction = "none") -> None:
        """BadInput where the folder holds no sound ensemble router."""
        self.router = load_ensemble_router(folder)
        self.model_version = str(self.router.description["model_version"])
        self.exploration, self.redaction = exploration, redaction
        reference = route_reference(Path(folder), self.agents)
        self.drift = None if reference is None else RunningDrift(reference)

    @property
    def agents(self) -> list[str]:
        """Who may be named in an outcome."""
        return self.router.agents

    def check(self, instance: EnsembleInstance) -> None:
        """BadInput for a query of too many tokens."""
        self.router.tokens(instance.query)

    def decide(self, instances: Sequence[EnsembleInstance], timing: Timing) -> list[Answer]:
        """One by one, as in process: padded to a batch, a query's state would differ in its last digits.

        Features are the query's state, the backbone's pass; forward is that of the heads.
        """
        decided = []
        for instance in instances:
            started = time.perf_counter()
            state = self.router.state(instance.query)
            read = time.perf_counter()
            decided.append(self.router.route(state))
            timing.features += read - started
            timing.forward += time.perf_counter() - read
        return [self._answer(instance, found) for instance, found in zip(instances, decided, strict=True)]

    def _answer(self, instance: EnsembleInstance, found: Any) -> Answer:
        names = self.agents
        greedy = [names.index(name) for name in found.agents]
        draw = self.exploration.draw_agents(greedy, len(names))
        agents = sorted((names[i] for i in draw.taken), key=lambda name: -found.familiarity[name])
        sent = EnsembleDecision(
            request_id="",
            model_version=self.model_version,
            agents=agents,
            familiarity=found.familiarity,
            cumulative=sum(found.familiarity[name] for name in agents) if draw.explore else found.cumulative,
        )
        return Answer(
            decision={**vars(sent)},
            agents=agents,
            explored=draw.explore,
            propensity=draw.propensity,
            epsilon=draw.epsilon,
            largest=draw.largest,
            drift=None if self.drift is None else self.drift.add(names[greedy[0]]),
            context=instance,
        )

    def logged(self, answer: Answer, key: bytes) -> dict[str, Any]:
        """What the log keeps of a decision."""
        line = {"query": redact(answer.context.query, self.redaction, key), "decision": dict(answer.decision)}
        return line if self.redaction == "none" else {**line, "redacted": self.redaction}
