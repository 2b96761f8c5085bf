"""What Prometheus says of a candidate and the champion while a canary runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from routewright.errors import StageFailed
from serving.promotion.deployment import Canary, MetricPages, Prometheus
from serving.promotion.inference_service import revision_of

REQUESTS, LATENCY = "routewright_requests_total", "routewright_latency_seconds_bucket"
FAILURES = {"overloaded", "deadline", "not_ready", "error"}
"""Outcomes that are the server's fault; a bad request is its sender's."""
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Load:
    """Requests since a step began, the share of them that failed, and their p95 latency in seconds (None: none seen)."""

    requests: float
    error_rate: float
    p95_s: float | None


@dataclass(frozen=True)
class Page:
    """The counters of one /metrics page; ``buckets`` is {upper bound in seconds: requests at most that slow}."""

    requests: float
    failures: float
    buckets: dict[float, float]


def parse_page(text: str) -> Page:
    """The router's counters in Prometheus' text format, summed over routers and protocols; feedback is no request."""
    from prometheus_client.parser import text_string_to_metric_families

    requests = failures = 0.0
    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == REQUESTS and sample.labels.get("protocol") != "feedback":
                requests += sample.value
                failures += sample.value if sample.labels.get("outcome") in FAILURES else 0
            elif sample.name == LATENCY and sample.labels.get("phase") == "total":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0) + sample.value
    return Page(requests, failures, buckets)


def load_between(before: Page, after: Page) -> Load:
    """What happened between two readings of a page; a server that restarted in between is read from its start."""
    if after.requests < before.requests:
        before = Page(0, 0, {})
    requests = after.requests - before.requests
    counts = {bound: count - before.buckets.get(bound, 0) for bound, count in after.buckets.items()}
    return Load(requests, (after.failures - before.failures) / requests if requests else 0.0, quantile(counts, 0.95))


def quantile(counts: dict[float, float], q: float) -> float | None:
    """The q-quantile of a cumulative histogram, linear inside its bucket as Prometheus' histogram_quantile has it.

    None where nothing was counted; the last finite bound where the quantile lies beyond it.
    """
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    rank, low, below = q * counts[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return low


def read_page(url: str) -> Page:
    """The page at a URL; StageFailed where it cannot be read."""
    try:
        answer = httpx.get(url, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        return parse_page(answer.text)
    except (httpx.HTTPError, ValueError) as error:
        raise StageFailed(f"metrics at {url} cannot be read ({type(error).__name__})") from None


def query(prometheus: Prometheus, expression: str, revision: str, window_s: float) -> float | None:
    """The value of a PromQL expression; None where there are no samples, StageFailed where the server does not answer."""
    text = expression.replace("{revision}", revision_of(revision)).replace("{window}", f"{max(1, round(window_s))}s")
    try:
        answer = httpx.get(f"{prometheus.url.rstrip('/')}/api/v1/query", params={"query": text}, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        data = answer.json()["data"]
        found = data["result"] if data["resultType"] == "scalar" else [*data["result"], {"value": [0, "NaN"]}][0]["value"]
        value = float(found[1])
    except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
        raise StageFailed(f"Prometheus at {prometheus.url} does not answer a query ({type(error).__name__})") from None
    return value if math.isfinite(value) else None


Reader = Callable[[float], tuple[Load, Load]]
"""Seconds since the step began → the candidate's and the champion's load."""


def reader(canary: Canary, candidate: str, champion: str) -> Reader | None:
    """Reads the load of both from now on; None where no metrics are configured. The names are those of the revisions."""
    if isinstance(canary.pages, MetricPages):
        pages = canary.pages
        before = [read_page(url) for url in (pages.candidate, pages.champion)]

        def from_pages(seconds: float) -> tuple[Load, Load]:
            own, other = (
                load_between(page, read_page(url))
                for page, url in zip(before, (pages.candidate, pages.champion), strict=True)
            )
            return own, other

        return from_pages
    if canary.prometheus is not None:
        prometheus = canary.prometheus

        def load(revision: str, seconds: float) -> Load:
            requests, errors, p95 = (
                query(prometheus, expression, revision, seconds)
                for expression in (prometheus.requests, prometheus.error_rate, prometheus.p95)
            )
            return Load(requests or 0.0, errors or 0.0, p95)

        return lambda seconds: (load(candidate, seconds), load(champion, seconds))
    return None


def complaint(canary: Canary, candidate: Load, champion: Load) -> str:
    """Why the candidate must not get more traffic; empty where it may or where it has too few requests to tell."""
    if candidate.requests < canary.min_requests:
        return ""
    if candidate.error_rate > champion.error_rate + canary.error_rate_rise:
        return f"error rate {candidate.error_rate:.1%}, champion's {champion.error_rate:.1%}"
    if candidate.p95_s is not None and champion.p95_s and candidate.p95_s > canary.p95_ratio * champion.p95_s:
        return f"p95 latency {1000 * candidate.p95_s:.0f} ms, champion's {1000 * champion.p95_s:.0f} ms"
    return ""
