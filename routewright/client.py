"""Clients of served routers over HTTP, sync and async.

    router = SearchRouterClient("http://127.0.0.1:8080")
    decision = router.decide("how do I rotate a key", reference_date=date(2024, 5, 31))
    router.feedback(decision.request_id, {"security": 1.0})

`StepRouterClient` and `EnsembleRouterClient` are alike, and each has an async one (`AsyncSearchRouterClient` …) with the
same methods as coroutines. A server that is overloaded (429, 503) or cannot be reached is asked again, after the pause it
names in Retry-After or growing ones; a refused input (400) is a `BadInput` with the server's sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import tenacity
from pydantic import TypeAdapter, ValidationError

from routewright.errors import BadInput
from routewright.search_router.decision import Decision

MAX_PAUSE_S = 30.0
D = TypeVar("D")


class ServerUnavailable(Exception):
    """The server gave no decision: it could not be reached, stayed overloaded, or answered with something else."""


@dataclass(frozen=True, kw_only=True)
class SearchDecision(Decision):
    """A served search decision; ``request_id`` is what feedback names."""

    request_id: str


@dataclass(frozen=True, kw_only=True)
class StepDecision:
    """A served step decision, its fields those of `routewright.step_router.client.Decision`, and who made it."""

    request_id: str
    model_version: str
    escalate: bool
    take: str | None
    risk: float
    benefit: float
    threshold: float
    features: dict[str, float]
    explored: bool
    propensity: float
    timestamp: datetime


@dataclass(frozen=True, kw_only=True)
class EnsembleDecision:
    """A served ensemble decision.

    ``agents`` answer, the most familiar first; ``familiarity`` of every agent, in (0, 1]; ``cumulative`` its sum over those
    that answer. Answers are combined by a vote weighted with the familiarity.
    """

    request_id: str
    model_version: str
    agents: list[str]
    familiarity: dict[str, float]
    cumulative: float


class _Busy(Exception):
    """Worth another try: what the server answered, or None where it could not be reached."""

    def __init__(self, response: httpx.Response | None, said: str) -> None:
        super().__init__(said)
        self.response = response


def _pause(state: tenacity.RetryCallState) -> float:
    """What Retry-After says in seconds, else 0.2, 0.4, 0.8 … with jitter; at most MAX_PAUSE_S."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, _Busy) and error.response is not None:
        told = error.response.headers.get("Retry-After", "")
        if told.isascii() and told.isdigit():
            return min(float(told), MAX_PAUSE_S)
    return tenacity.wait_exponential_jitter(multiplier=0.2, max=MAX_PAUSE_S, jitter=0.1)(state)


def _checked(response: httpx.Response) -> httpx.Response:
    """The response if it is a 200; `_Busy` for 429 and 503, BadInput for other 4xx, ServerUnavailable for the rest."""
    if response.status_code == 200:
        return response
    try:
        said = str(response.json()["error"])[:500]
    except (ValueError, KeyError, TypeError):
        said = f"HTTP {response.status_code}"
    if response.status_code in (429, 503):
        raise _Busy(response, f"{response.request.url}: {said}")
    if 400 <= response.status_code < 500:
        raise BadInput(said)
    raise ServerUnavailable(f"{response.request.url}: {said}")


def _predictions(response: httpx.Response, kind: type[D], count: int) -> list[D]:
    try:
        found: list[D] = TypeAdapter(list[kind]).validate_python(response.json()["predictions"])  # type: ignore[valid-type]
    except (ValueError, KeyError, TypeError, ValidationError):
        raise ServerUnavailable(f"{response.request.url}: the answer holds no decisions of a router") from None
    if len(found) != count:
        raise ServerUnavailable(f"{response.request.url}: {len(found)} decisions for {count} instances")
    return found


def _written(http: httpx.Client | httpx.AsyncClient, method: str, path: str, body: Any) -> httpx.Request:
    """The request with its body as JSON; BadInput where JSON in UTF-8 has no form for a value."""
    try:
        return http.build_request(method, path, json=body)
    except ValueError as error:
        raise BadInput(f"request: expected whole characters and finite numbers ({error})") from None


def _base(url: str) -> httpx.URL:
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL:
        base = httpx.URL("")
    if base.scheme not in ("http", "https") or not base.host:
        raise BadInput(f"url: expected one such as http://127.0.0.1:8080, found {url[:200]!r}")
    return base


def _stop(attempts: int) -> Any:
    if attempts < 1:
        raise BadInput(f"attempts: expected at least 1, found {attempts}")
    return tenacity.stop_after_attempt(attempts)


class _Client:
    """Connections, retries and errors of a client that waits."""

    router: str

    def __init__(self, url: str, timeout_s: float = 10.0, attempts: int = 4) -> None:
        """``timeout_s`` is each attempt's; ``attempts`` counts the first. BadInput: not an http(s) URL."""
        self._retrying = tenacity.Retrying(
            stop=_stop(attempts), wait=_pause, retry=tenacity.retry_if_exception_type(_Busy), reraise=True
        )
        self._http = httpx.Client(base_url=_base(url), timeout=timeout_s)

    def _request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        request = _written(self._http, method, path, body)

        def attempt() -> httpx.Response:
            try:
                return _checked(self._http.send(request))
            except httpx.TransportError as error:
                raise _Busy(None, f"{self._http.base_url}: {type(error).__name__}") from error

        try:
            return self._retrying(attempt)
        except _Busy as error:
            raise ServerUnavailable(str(error)) from error

    def _decide(self, instances: Sequence[dict[str, Any]], kind: type[D]) -> list[D]:
        response = self._request("POST", f"/v1/models/{self.router}:predict", {"instances": instances})
        return _predictions(response, kind, len(instances))

    def feedback(self, request_id: str, outcome: Mapping[str, float]) -> None:
        """Attach an outcome, {agent: 0..1}, to a decision; a later one replaces it. BadInput: unknown id or agent."""
        self._request("POST", "/v1/feedback", {"request_id": request_id, "outcome": dict(outcome)})

    def close(self) -> None:
        """Close the connections; a `with` block does it too."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class _AsyncClient:
    """Connections, retries and errors of a client that is awaited."""

    router: str

    def __init__(self, url: str, timeout_s: float = 10.0, attempts: int = 4) -> None:
        """As the sync client's."""
        self._retrying = tenacity.AsyncRetrying(
            stop=_stop(attempts), wait=_pause, retry=tenacity.retry_if_exception_type(_Busy), reraise=True
        )
        self._http = httpx.AsyncClient(base_url=_base(url), timeout=timeout_s)

    async def _request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        request = _written(self._http, method, path, body)

        async def attempt() -> httpx.Response:
            try:
                return _checked(await self._http.send(request))
            except httpx.TransportError as error:
                raise _Busy(None, f"{self._http.base_url}: {type(error).__name__}") from error

        try:
            return await self._retrying(attempt)
        except _Busy as error:
            raise ServerUnavailable(str(error)) from error

    async def _decide(self, instances: Sequence[dict[str, Any]], kind: type[D]) -> list[D]:
        response = await self._request("POST", f"/v1/models/{self.router}:predict", {"instances": instances})
        return _predictions(response, kind, len(instances))

    async def feedback(self, request_id: str, outcome: Mapping[str, float]) -> None:
        """Attach an outcome, {agent: 0..1}, to a decision; a later one replaces it. BadInput: unknown id or agent."""
        await self._request("POST", "/v1/feedback", {"request_id": request_id, "outcome": dict(outcome)})

    async def close(self) -> None:
        """Close the connections; an `async with` block does it too."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()


def _search_instance(query: str, reference_date: date | None) -> dict[str, Any]:
    return {"query": query} if reference_date is None else {"query": query, "reference_date": reference_date.isoformat()}


def _step_instance(
    observation: str,
    candidates: Sequence[Any],
    step: int,
    max_steps: int,
    budget_left: int | None,
    objective: str,
    history: Sequence[Any],
    episode: str | None,
) -> dict[str, Any]:
    def plain(item: Any) -> dict[str, Any]:
        return dict(item) if isinstance(item, Mapping) else dict(vars(item))

    return {
        "observation": observation,
        "candidates": [
            {key: list(value) if key == "token_logprobs" and value is not None else value for key, value in plain(c).items()}
            for c in candidates
        ],
        "step": step,
        "max_steps": max_steps,
        "budget_left": budget_left,
        "objective": objective,
        "history": [plain(past) for past in history],
        "episode": episode,
    }


class SearchRouterClient(_Client):
    """Asks a served search router which agents answer a query."""

    router = "search-router"

    def decide(self, query: str, reference_date: date | None = None) -> SearchDecision:
        """Decide one query; relative times count from ``reference_date`` (the server's today if None)."""
        return self.decide_many([(query, reference_date)])[0]

    def decide_many(self, queries: Sequence[tuple[str, date | None]]) -> list[SearchDecision]:
        """Decide several (query, reference date) in one request, at most 32; all or none."""
        return self._decide([_search_instance(*query) for query in queries], SearchDecision)


class AsyncSearchRouterClient(_AsyncClient):
    """`SearchRouterClient`, awaited."""

    router = "search-router"

    async def decide(self, query: str, reference_date: date | None = None) -> SearchDecision:
        """Decide one query; relative times count from ``reference_date`` (the server's today if None)."""
        return (await self.decide_many([(query, reference_date)]))[0]

    async def decide_many(self, queries: Sequence[tuple[str, date | None]]) -> list[SearchDecision]:
        """Decide several (query, reference date) in one request, at most 32; all or none."""
        return await self._decide([_search_instance(*query) for query in queries], SearchDecision)


class StepRouterClient(_Client):
    """Asks a served step router whether the small model takes a step."""

    router = "step-router"

    def decide(
        self,
        observation: str,
        candidates: Sequence[Any],
        step: int,
        max_steps: int,
        budget_left: int | None,
        *,
        objective: str = "",
        history: Sequence[Any] = (),
        episode: str | None = None,
    ) -> StepDecision:
        """Decide one step.

        ``candidates`` are `Candidate`s or mappings of their fields, what the small model would do first; ``budget_left``
        the LLM calls left in this episode, None for no limit. The server keeps no episode: ``objective`` and ``history``
        (`PastStep`s or mappings, oldest first) are what the features about them are computed from.
        """
        instance = _step_instance(observation, candidates, step, max_steps, budget_left, objective, history, episode)
        return self._decide([instance], StepDecision)[0]


class AsyncStepRouterClient(_AsyncClient):
    """`StepRouterClient`, awaited."""

    router = "step-router"

    async def decide(
        self,
        observation: str,
        candidates: Sequence[Any],
        step: int,
        max_steps: int,
        budget_left: int | None,
        *,
        objective: str = "",
        history: Sequence[Any] = (),
        episode: str | None = None,
    ) -> StepDecision:
        """Decide one step; the arguments are `StepRouterClient.decide`'s."""
        instance = _step_instance(observation, candidates, step, max_steps, budget_left, objective, history, episode)
        return (await self._decide([instance], StepDecision))[0]


class EnsembleRouterClient(_Client):
    """Asks a served ensemble router which agents answer a query."""

    router = "ensemble-router"

    def decide(self, query: str) -> EnsembleDecision:
        """Decide one query, written as the agents are asked it."""
        return self.decide_many([query])[0]

    def decide_many(self, queries: Sequence[str]) -> list[EnsembleDecision]:
        """Decide several queries in one request, at most 32; all or none."""
        return self._decide([{"query": query} for query in queries], EnsembleDecision)


class AsyncEnsembleRouterClient(_AsyncClient):
    """`EnsembleRouterClient`, awaited."""

    router = "ensemble-router"

    async def decide(self, query: str) -> EnsembleDecision:
        """Decide one query, written as the agents are asked it."""
        return (await self.decide_many([query]))[0]

    async def decide_many(self, queries: Sequence[str]) -> list[EnsembleDecision]:
        """Decide several queries in one request, at most 32; all or none."""
        return await self._decide([{"query": query} for query in queries], EnsembleDecision)
