"""A prompted language model as the router: the optional evaluation rows ``llm:<model>``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model, model_validator
from rich.progress import track

from routewright.language_models.chat import (
    DATA_RULE,
    AnswerInvalid,
    ChatClient,
    Message,
    ServerFailed,
    delimited,
)
from routewright.pools.pool import Pool
from routewright.search_router.decision import Decision


class _Interval(BaseModel):
    start: date | None
    end: date | None

    @model_validator(mode="after")
    def _in_order(self) -> _Interval:
        if self.start and self.end and self.end < self.start:
            raise ValueError("the interval ends before it starts")
        return self


@dataclass(frozen=True)
class LLMDecision:
    """A decision with its price: ``valid`` 0 where the fallback stands in, milliseconds as first asked, tokens.

    ``latency_ms`` is None where the server failed to answer.
    """

    decision: Decision
    valid: int
    latency_ms: float | None
    tokens: int


def llm_decide(client: ChatClient, pool: Pool, queries: Sequence[Mapping[str, Any]]) -> list[LLMDecision]:
    """Decisions for rows with ``query`` and optional ``reference_date`` (ISO), in their order.

    Asked one at a time, since a latency measured among parallel questions would not be one decision's. Raises BadInput
    for a wrong URL or key and BudgetExceeded: a row of fallbacks for want of budget would say nothing about the model.
    """
    names = pool.names
    schema = _schema(names)
    rule = (
        f"You route search queries to the agents that answer them. {DATA_RULE} The agents are:\n"
        + "\n".join(f"- {json.dumps(agent.name)}: {' '.join(agent.card.split())}" for agent in pool.agents)
        + "\nGive agents, the names of the one or few agents to search, most fitting first; keywords, up to five words or "
        "phrases of the query that say what is sought; start and end, the first and last day (YYYY-MM-DD) of the time that "
        "the query asks for, reckoned from the reference date, null where it is open or not asked for."
    )
    version = f"llm:{client.model}"
    decisions = []
    for row in track(queries, "asking the language model"):
        content = f"Reference date: {row.get('reference_date') or 'unknown'}\n{delimited('query', row['query'])}"
        messages: list[Message] = [{"role": "system", "content": rule}, {"role": "user", "content": content}]
        try:
            answer = client.ask_measured(messages, schema)
        except (AnswerInvalid, ServerFailed) as error:
            decision = _decision([pool.fallback], names, [], None, None, version)
            seconds, tokens = (error.seconds, error.tokens) if isinstance(error, AnswerInvalid) else (None, 0)
            decisions.append(LLMDecision(decision, 0, None if seconds is None else 1000 * seconds, tokens))
            continue
        value: Any = answer.value
        decision = _decision(value.agents, names, value.keywords, value.start, value.end, version)
        decisions.append(LLMDecision(decision, 1, 1000 * answer.seconds, answer.tokens))
    return decisions


def _schema(names: list[str]) -> type[BaseModel]:
    literal: Any = Literal  # names known at run time only
    name: Any = literal[tuple(names)]
    agents: Any = (list.__class_getitem__(name), Field(min_length=1))
    return create_model("Route", __base__=_Interval, agents=agents, keywords=(list[str], ...))


def _decision(
    agents: Sequence[str], names: list[str], keywords: list[str], start: date | None, end: date | None, version: str
) -> Decision:
    chosen = list(dict.fromkeys(agents))  # in the model's order: the first leads where results are fused
    bitmask = "".join("1" if name in chosen else "0" for name in names)
    return Decision(chosen, bitmask, keywords=keywords, start=start, end=end, model_version=version)
