"""Alerts and canary queries ask for metrics that the server exports, and each alert has its runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram
from rendering import ROOT, Object, of_kind, overlay

from serving import metrics
from serving.promotion.traffic import FAILURES

promql = pytest.importorskip("promql_parser")

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
TARGET = {"namespace", "pod", "service", "routewright_model_version"}
"""Labels of the place that was scraped: the operator's, and the ServiceMonitor's targetLabels."""


def exported() -> dict[str, set[str]]:
    """{name of a series: its labels} of everything that serving/metrics.py makes."""
    found = {}
    for metric in vars(metrics).values():
        if isinstance(metric, Counter):
            found[f"{metric._name}_total"] = set(metric._labelnames)
        elif isinstance(metric, Gauge):
            found[metric._name] = set(metric._labelnames)
        elif isinstance(metric, Histogram):
            found |= {f"{metric._name}_{part}": set(metric._labelnames) for part in ("sum", "count")}
            found[f"{metric._name}_bucket"] = {*metric._labelnames, "le"}
    return found


def rules() -> list[Object]:
    """The rules of all groups."""
    (made,) = of_kind(overlay("production"), "PrometheusRule").values()
    return [rule for group in made["spec"]["groups"] for rule in group["rules"]]


def selectors(expression: Any) -> list[Any]:
    """The vector selectors of a parsed expression."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append(node)

    promql.walk(expression, visit)
    return found


def faults(text: str, known: dict[str, set[str]]) -> list[str]:
    """Metrics, labels and label values in an expression that no server exports."""
    parsed, found = promql.parse(text), []
    for selector in selectors(parsed):
        if selector.name not in known:
            found.append(f"metric {selector.name}")
            continue
        labels = known[selector.name] | TARGET
        for matcher in selector.matchers.matchers:
            if matcher.name not in labels:
                found.append(f"label {matcher.name} of {selector.name}")
            values = set(matcher.value.split("|"))
            if (matcher.name == "outcome" and values != FAILURES) or (matcher.name == "phase" and not values <= phases()):
                found.append(f"{matcher.name} {matcher.value}")

    def grouped(node: Any) -> None:
        if isinstance(node, promql.AggregateExpr) and node.modifier:
            below = [known.get(selector.name, set()) | TARGET for selector in selectors(node.expr)]
            found.extend(f"by {label}" for label in node.modifier.labels if not all(label in labels for labels in below))

    promql.walk(parsed, grouped)
    return found


def phases() -> set[str]:
    """The phases that the latency histogram's help names in brackets."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"\((.*?)\)", metrics.LATENCY._documentation))))


def known_series() -> dict[str, set[str]]:
    """What the server exports, and what recording rules make of it."""
    recorded = {rule["record"]: {"namespace", "router", "routewright_model_version"} for rule in rules() if "record" in rule}
    return exported() | recorded


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_is_exported(rule: Object) -> None:
    assert faults(rule["expr"], known_series()) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(routewright_requests[5m])", "metric routewright_requests"),
        ("routewright_input_drift{agent='a'}", "label agent of routewright_input_drift"),
        ("sum by (agent) (routewright_abstentions_total)", "by agent"),
        ("routewright_requests_total{outcome=~'error|bad_input'}", "outcome error|bad_input"),
        ("routewright_latency_seconds_count{phase='waiting'}", "phase waiting"),
    ],
)
def test_the_check_sees_what_is_not_exported(expression: str, fault: str) -> None:
    assert faults(expression, known_series()) == [fault]


def test_every_alert_has_its_runbook() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert alerts.keys() >= {
        "RoutewrightErrorRate", "RoutewrightLatency", "RoutewrightRouteMixDrift", "RoutewrightFallbackRate",
        "RoutewrightCanaryErrors", "RoutewrightCanaryLatency",
    }  # fmt: skip
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", OPERATIONS, re.M)
    }
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operations.md"
        assert anchor in anchors
        assert f"*{name}" in OPERATIONS or f" {name}," in OPERATIONS, "the runbook names its alert"
    for link in re.findall(r"\]\(#([\w-]+)\)", OPERATIONS):
        assert link in anchors


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of the runbooks and of the deployment files that promotion reads."""
    for block in re.findall(r"```promql\n(.*?)```", OPERATIONS, re.S):
        for line in block.splitlines():
            yield "docs/operations.md", line
    for name, text in of_kind(overlay("production"), "ConfigMap")["routewright-deploy"]["data"].items():
        prometheus = yaml.safe_load(text)["canary"]["prometheus"]
        for field in ("requests", "error_rate", "p95"):
            query = prometheus[field].replace("{revision}", "search-router-v7-predictor").replace("{window}", "300s")
            yield f"{name} {field}", query


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_asks_for_what_is_exported(where: str, query: str) -> None:
    assert faults(query, known_series()) == []


def test_versions_are_told_apart_by_the_label_that_promotion_sets() -> None:
    from serving.promotion.inference_service import VERSION

    (monitor,) = of_kind(overlay("production"), "ServiceMonitor").values()
    assert monitor["spec"]["targetLabels"] == [VERSION]
    assert re.sub(r"\W", "_", VERSION) == "routewright_model_version"


def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not there: it comes with Prometheus")
    (made,) = of_kind(overlay("production"), "PrometheusRule").values()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": made["spec"]["groups"]}))
    shutil.copy(Path(__file__).with_name("alerts_promtool.yaml"), tmp_path)
    done = subprocess.run([promtool, "test", "rules", "alerts_promtool.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
