"""What Prometheus sees of the routers, on the same /metrics page as KServe's own numbers. Labels are never free text."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter(
    "routewright_requests",
    "Requests by router, protocol (v1, v2, grpc, feedback) and outcome "
    "(ok, bad_input, too_large, overloaded, deadline, not_ready, not_found, error).",
    ["router", "protocol", "outcome"],
)
LATENCY = Histogram(
    "routewright_latency_seconds",
    "Seconds a decision waited (queue), seconds of a batch (features, forward), and of a request altogether (total; not of "
    "those that are refused unread).",
    ["router", "phase"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.18, 0.25, 0.5, 1, 2, 5),
)
BATCH = Histogram("routewright_batch_size", "Decisions made in one forward pass.", ["router"], buckets=(1, 2, 4, 8, 16, 32))
DECISIONS = Counter("routewright_decisions", "Decisions that chose an agent.", ["router", "agent"])
ABSTENTIONS = Counter("routewright_abstentions", "Decisions that left the query to the fallback.", ["router"])
ESCALATIONS = Counter("routewright_escalations", "Steps that were given to the LLM.", ["router"])
EXPLORED = Counter("routewright_explored", "Decisions drawn at random.", ["router"])
LOG_LOST = Counter("routewright_log_lines_lost", "Decision log lines that could not be written or delivered.")
DRIFT = Gauge(
    "routewright_input_drift",
    "Population stability index of the last decisions against the model folder's reference; absent without one.",
    ["router"],
)
