"""Reading Prometheus, and metrics that stop a canary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from api_server import ApiServer
from quick_deployment import deployment_with
from stand_in import StandIn, StandInHandler
from test_rollout import promote, serving

from routewright.errors import StageFailed
from serving.promotion.deployment import Canary
from serving.promotion.rollout import READS
from serving.promotion.traffic import Load, complaint, load_between, parse_page, quantile, reader

PAGES: dict[str, Any] = {"min_requests": 20}


class MetricsServer(StandIn):
    """Serves what ``answer`` says for a path and query, or a status."""

    def __init__(self) -> None:
        self.answer: Callable[[str], str | int] = lambda path: 404
        server = self

        class Handler(StandInHandler):
            def do_GET(self) -> None:
                found = server.answer(self.path)
                self.send(*((found,) if isinstance(found, int) else (200, found)))

        super().__init__(Handler)


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = MetricsServer()
    yield server
    server.close()


def page(good: int, failed: int = 0, slow: int = 0, refused: int = 0, feedback: int = 0) -> str:
    """A page as prometheus_client writes it; ``slow`` of the requests took 0.1 to 0.2 s, the others up to 0.1 s."""
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

    registry = CollectorRegistry()
    requests = Counter("routewright_requests", "r", ["router", "protocol", "outcome"], registry=registry)
    latency = Histogram("routewright_latency_seconds", "l", ["router", "phase"], buckets=(0.1, 0.2), registry=registry)
    for outcome, count in (("ok", good), ("error", failed), ("bad_input", refused)):
        requests.labels("search-router", "v1", outcome).inc(count)
    requests.labels("search-router", "feedback", "ok").inc(feedback)
    requests.labels("search-router", "feedback", "error").inc(feedback)
    for i in range(good + failed + refused):
        latency.labels("search-router", "total").observe(0.15 if i < slow else 0.05)
        latency.labels("search-router", "queue").observe(9)
    return generate_latest(registry).decode()


def test_a_page_is_read_as_the_server_writes_it() -> None:
    found = parse_page(page(90, failed=10, slow=50, refused=100))
    assert (found.requests, found.failures) == (200, 10)
    assert found.buckets == {0.1: 150, 0.2: 200, float("inf"): 200}
    load = load_between(parse_page(page(40)), found)
    assert load.requests == 160
    assert load.error_rate == 10 / 160
    # 152 of 160 lie at 0.1 + 0.1·(152 − 110)/50.
    assert load.p95_s == pytest.approx(0.1 + 0.1 * 42 / 50)
    assert load_between(parse_page(page(500)), found).requests == 200, "a restarted server counts from 0"


def test_feedback_is_no_request() -> None:
    found = parse_page(page(90, failed=10, feedback=50))
    assert (found.requests, found.failures) == (100, 10)


@pytest.mark.parametrize(
    "place",
    [f"base/deploy/{router}-router.yaml" for router in ("search", "step", "ensemble")]
    + ["components/gpu/ensemble-router.yaml", "components/monitoring/alerts.yaml"],
)
def test_the_shipped_expressions_leave_feedback_out(place: str) -> None:
    text = (Path(__file__).parents[3] / "manifests" / place).read_text()
    selectors = re.findall(r"routewright_requests_total[^\[]*", text)
    assert len(selectors) >= 3
    assert [selector for selector in selectors if not re.search("protocol ?!= ?['\"]feedback['\"]", selector)] == []


def test_the_servers_own_metrics_have_these_names() -> None:
    from serving import metrics
    from serving.promotion import traffic

    assert f"{next(iter(metrics.REQUESTS.describe())).name}_total" == traffic.REQUESTS
    assert f"{next(iter(metrics.LATENCY.describe())).name}_bucket" == traffic.LATENCY


def test_quantiles_by_hand() -> None:
    assert quantile({0.1: 0, 0.2: 10, float("inf"): 10}, 0.5) == pytest.approx(0.15)
    assert quantile({0.1: 5, float("inf"): 10}, 0.95) == 0.1
    assert quantile({0.1: 0, float("inf"): 0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_what_is_worse_and_what_is_not() -> None:
    canary = Canary(error_rate_rise=0.02, p95_ratio=1.5, min_requests=50)
    champion = Load(1000, 0.01, 0.1)
    assert complaint(canary, Load(100, 0.02, 0.14), champion) == ""
    assert complaint(canary, Load(100, 0.04, 0.1), champion) == "error rate 4.0%, champion's 1.0%"
    assert complaint(canary, Load(100, 0.0, 0.2), champion) == "p95 latency 200 ms, champion's 100 ms"
    assert complaint(canary, Load(49, 1.0, 9.0), champion) == "", "too few to tell"


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (lambda count: page(30 * count, failed=10 * count), "at 5 %: error rate 25.0%, champion's 0.0%"),
        (lambda count: page(40 * count, slow=40 * count), "at 5 %: p95 latency 195 ms, champion's 95 ms"),
        (lambda count: page(count), "at 5 %: 1 requests in 0 s, expected 20"),
    ],
)
def test_a_worse_candidate_is_taken_back(
    cluster: ApiServer, api: Any, metrics: MetricsServer, candidate: Callable[[int], str | int], reason: str
) -> None:
    reads = {"/candidate": 0, "/champion": 0}

    def answer(path: str) -> str | int:
        reads[path] += 1
        return candidate(reads[path]) if path == "/candidate" else page(100 * reads[path])

    metrics.answer = answer
    pages = {name: f"{metrics.url}/{name}" for name in ("candidate", "champion")}
    promote(api, "Knative", "1")
    found = promote(api, "Knative", "2", pages=pages, **PAGES)
    assert found.outcome == "aborted"
    assert found.gate
    assert reason in found.reason
    assert serving(api, "Knative") == ("s3://b/1", None)


@pytest.mark.parametrize("lost", [READS - 1, READS])
def test_metrics_that_cannot_be_read_for_a_while_and_for_too_long(
    cluster: ApiServer, api: Any, metrics: MetricsServer, lost: int
) -> None:
    reads = {"/candidate": 0, "/champion": 0}

    def answer(path: str) -> str | int:
        reads[path] += 1
        if path == "/candidate" and 1 < reads[path] <= 1 + lost:
            return 500
        return page((40 if path == "/candidate" else 100) * reads[path])

    metrics.answer = answer
    pages = {name: f"{metrics.url}/{name}" for name in ("candidate", "champion")}
    promote(api, "Knative", "1")
    found = promote(api, "Knative", "2", pages=pages, **PAGES)
    if lost < READS:
        assert found.outcome == "rolled-out"
        return
    assert (found.outcome, found.gate) == ("aborted", False), "no metric said no"
    assert "at 5 %: the metrics could not be read 12 times in a row: metrics at http" in found.reason
    assert serving(api, "Knative") == ("s3://b/1", None)


def test_a_candidate_that_is_as_good_goes_through(cluster: ApiServer, api: Any, metrics: MetricsServer) -> None:
    reads = {"/candidate": 0, "/champion": 0}

    def answer(path: str) -> str:
        reads[path] += 1
        # The last step leaves no request to the champion.
        return page(40 * reads[path]) if path == "/candidate" else page(min(400, 100 * reads[path]))

    metrics.answer = answer
    pages = {name: f"{metrics.url}/{name}" for name in ("candidate", "champion")}
    promote(api, "Standard", "1")
    found = promote(api, "Standard", "2", pages=pages, **PAGES)
    assert found.outcome == "rolled-out"
    assert [step.candidate.requests for step in found.steps if step.candidate] == [40, 40, 40]
    assert [step.champion.requests for step in found.steps if step.champion] == [100, 100, 100]


def test_prometheus_is_asked_about_the_revisions(cluster: ApiServer, api: Any, metrics: MetricsServer) -> None:
    asked = []

    def answer(path: str) -> str:
        text = parse_qs(urlsplit(path).query)["query"][0]
        asked.append(text)
        number = {"requests": "60", "errors": "0.5" if "00002" in text else "0.0", "p95": "NaN"}[text.partition("{")[0]]
        result = [{"metric": {}, "value": [0, number]}]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})

    metrics.answer = answer
    prometheus = {
        "url": metrics.url, "requests": 'requests{revision="{revision}"}[{window}]',
        "error_rate": 'errors{revision="{revision}"}', "p95": 'p95{revision="{revision}"}',
    }  # fmt: skip
    promote(api, "Knative", "1")
    found = promote(api, "Knative", "2", prometheus=prometheus)
    assert found.reason == "at 5 %: error rate 50.0%, champion's 0.0%"
    assert asked[0] == 'requests{revision="search-router-predictor-00002"}[1s]'
    assert 'p95{revision="search-router-predictor-00001"}' in asked


@pytest.mark.parametrize("body", [500, "<html>", '{"status": "error"}', '{"data": {"resultType": "vector", "result": 1}}'])
def test_a_prometheus_that_gives_no_answer(metrics: MetricsServer, body: str | int) -> None:
    metrics.answer = lambda path: body
    given = {"url": metrics.url, "requests": "a", "error_rate": "b", "p95": "c"}
    read = reader(deployment_with(prometheus=given).canary, "new", "old")
    assert read is not None
    with pytest.raises(StageFailed, match="does not answer a query"):
        read(1.0)
