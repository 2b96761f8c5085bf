"""The embedded pool `aws-docs`: operation documentation from the service models that ship inside botocore.

Ten specialists each own a handful of services; `general` indexes the operations of the unassigned services and a third of
the rest, names and first sentences only. Queries are written from text that no agent indexes: parameter, error and shape
documentation. Documents are undated: a service's API version says nothing about an operation.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import yaml
from dateutil.relativedelta import relativedelta

SEED = 20260801
QUERIES = 8000
SERVICE_SHARE = 0.05  # no service writes more than this share of the queries
UNASSIGNED_SHARE = 0.10  # queries answered by no specialist
SERVICE_NAMED = 0.7  # share of queries that name their service
TIMED = 0.25  # share of queries that carry a time expression
SPLITS = (("train", 0.70), ("dev", 0.15), ("test", 0.15))

AGENTS: dict[str, tuple[str, list[str]]] = {
    "compute": (
        "Virtual servers, instances, machine images, containers, Kubernetes clusters, serverless functions, batch jobs, "
        "scaling of fleets.",
        ["ec2", "lambda", "ecs", "eks", "autoscaling", "batch", "lightsail", "elasticbeanstalk", "apprunner"],
    ),
    "storage": (
        "Object storage buckets, file systems, volumes, snapshots, archives, backups, storage gateways, data transfer.",
        ["s3", "s3control", "efs", "fsx", "glacier", "storagegateway", "backup", "ebs", "datasync"],
    ),
    "database": (
        "Relational databases, key-value tables, caches, data warehouse clusters, graph and document databases, "
        "database migration.",
        ["rds", "dynamodb", "elasticache", "redshift", "docdb", "neptune", "memorydb", "keyspaces", "dms"],
    ),
    "networking": (
        "Virtual private clouds, subnets, route tables, gateways, load balancers, DNS, content delivery, API gateways, "
        "dedicated connections.",
        ["route53", "cloudfront", "elbv2", "vpc-lattice", "directconnect", "globalaccelerator", "network-firewall",
         "networkmanager", "apigateway", "route53resolver"],
    ),
    "security": (
        "Identities, users, roles, policies, encryption keys, secrets, certificates, firewalls, threat findings, "
        "vulnerability scans.",
        ["iam", "kms", "secretsmanager", "guardduty", "wafv2", "inspector2", "macie2", "securityhub", "acm",
         "cognito-idp"],
    ),
    "analytics": (
        "Queries over data lakes, extract-transform-load jobs, data catalogs, streams, dashboards, search clusters, "
        "big data processing.",
        ["athena", "glue", "emr", "kinesis", "firehose", "quicksight", "lakeformation", "opensearch", "kafka"],
    ),
    "machine-learning": (
        "Model training and endpoints, foundation models, image and video recognition, text analysis, speech, "
        "translation, recommendations, chat bots.",
        ["sagemaker", "bedrock", "rekognition", "comprehend", "textract", "transcribe", "polly", "personalize",
         "lexv2-models"],
    ),
    "messaging": (
        "Queues, topics, push notifications, e-mail sending, message brokers, events and event buses, workflows.",
        ["sqs", "sns", "sesv2", "mq", "events", "pinpoint", "stepfunctions", "scheduler"],
    ),
    "developer-tools": (
        "Source repositories, builds, deployments, release pipelines, packages, infrastructure templates, tracing, "
        "device tests, feature configuration.",
        ["codebuild", "codecommit", "codedeploy", "codepipeline", "codeartifact", "cloudformation", "amplify", "xray",
         "devicefarm", "appconfig"],
    ),
    "iot": (
        "Connected devices, things, device fleets, gateways, industrial assets, edge components, wireless devices.",
        ["iot", "greengrassv2", "iotsitewise", "iotwireless", "iotfleetwise", "iottwinmaker"],
    ),
}  # fmt: skip
UNASSIGNED = [
    "appstream", "budgets", "ce", "cloudtrail", "cloudwatch", "config", "connect", "controltower", "ds", "fis",
    "gamelift", "health", "license-manager", "location", "logs", "mediaconvert", "medialive", "organizations",
    "ram", "resource-groups", "service-quotas", "servicecatalog", "ssm", "sso-admin", "support", "synthetics",
    "transfer", "wellarchitected", "workmail", "workspaces",
]  # fmt: skip
GENERAL_CARD = (
    "Anything about AWS at a glance: accounts, billing, monitoring, logs, compliance, operations, end-user computing, "
    "contact centres, media, games and all other services, names and summaries only."
)

_TAG = re.compile(r"<[^>]+>")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9-]+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_STOP = frozenset(
    [
        "a",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "been",
        "by",
        "can",
        "cannot",
        "could",
        "do",
        "does",
        "each",
        "either",
        "else",
        "for",
        "from",
        "has",
        "have",
        "how",
        "i",
        "if",
        "in",
        "is",
        "it",
        "its",
        "may",
        "more",
        "must",
        "no",
        "not",
        "of",
        "on",
        "only",
        "or",
        "our",
        "such",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "use",
        "used",
        "uses",
        "using",
        "value",
        "values",
        "was",
        "we",
        "were",
        "when",
        "where",
        "which",
        "whether",
        "who",
        "will",
        "with",
        "within",
        "would",
        "you",
        "your",
        "specified",
        "specify",
        "following",
        "request",
        "response",
        "operation",
        "action",
        "parameter",
        "example",
        "information",
        "valid",
        "name",
        "names",
        "aws",
        "amazon",
    ]
)


def _plain(documentation: str | None) -> str:
    return re.sub(r"\s+", " ", html.unescape(_TAG.sub(" ", documentation or ""))).strip()


def _words(identifier: str) -> str:
    return _CAMEL.sub(" ", identifier).lower()


def _content(text: str) -> list[str]:
    return [word for word in _WORD.findall(text) if word.lower() not in _STOP and len(word) > 2]


@dataclass(frozen=True)
class Operation:
    """One API operation: what is indexed (title, text, summary) and what only queries are made of (hints, errors)."""

    service: str
    service_name: str
    name: str
    text: str
    hints: tuple[str, ...]  # parameter documentation
    errors: tuple[tuple[str, str], ...]  # (error name in words, its documentation)

    @property
    def id(self) -> str:
        return f"{self.service}.{self.name}"

    @property
    def verb(self) -> str:
        return _words(self.name).split(" ", 1)[0]

    @property
    def noun(self) -> str:
        parts = _words(self.name).split(" ", 1)
        return parts[1] if len(parts) == 2 else parts[0]


def _model_file(service: str) -> Path:
    import botocore

    folder = Path(botocore.__file__).parent / "data" / service
    files = sorted(folder.glob("*/service-2.json*"))
    if not files:
        raise FileNotFoundError(f"botocore carries no service model for '{service}'")
    return files[-1]


def operations(service: str) -> Iterator[Operation]:
    """The operations of one botocore service model that carry documentation."""
    path = _model_file(service)
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    model = json.loads(raw)
    shapes = model["shapes"]
    service_name = re.sub(r"^(AWS|Amazon) ", "", model["metadata"].get("serviceFullName", service))
    for name, operation in model["operations"].items():
        text = _plain(operation.get("documentation"))
        if len(text) < 20:
            continue
        members = shapes.get(operation.get("input", {}).get("shape", ""), {}).get("members", {})
        hints = []
        for member, reference in members.items():
            # the shape's own documentation stands in where the member has none
            documentation = _plain(reference.get("documentation")) or _plain(
                shapes[reference["shape"]].get("documentation")
            )
            if len(documentation) > 20:
                hints.append(f"{_words(member)}: {documentation[:400]}")
        errors = tuple(
            (
                _words(error["shape"]),
                _plain(error.get("documentation") or shapes[error["shape"]].get("documentation"))[:300],
            )
            for error in operation.get("errors", [])
        )
        yield Operation(service, service_name, name, text, tuple(hints), errors)


def _available(services: list[str]) -> list[str]:
    import botocore

    data = Path(botocore.__file__).parent / "data"
    return [service for service in services if (data / service).is_dir()]


def documents(rng: random.Random) -> tuple[list[dict[str, Any]], dict[str, Operation]]:
    """BEIR documents of all operations, each with the agents that index it, and the operations by document id."""
    rows: list[dict[str, Any]] = []
    by_id: dict[str, Operation] = {}
    owners = {service: agent for agent, (_, services) in AGENTS.items() for service in services}
    for service in [*owners, *_available(UNASSIGNED)]:
        for operation in operations(service):
            agents = [owners[service]] if service in owners else []
            if not agents or rng.random() < 1 / 3:
                agents.append("general")
            by_id[operation.id] = operation
            title = f"{operation.service_name}: {_words(operation.name)}"
            rows.append(
                {
                    "_id": operation.id,
                    "title": title,
                    "text": operation.text,
                    "summary": f"{_words(operation.name)}. {_SENTENCE.split(operation.text)[0][:160]}",
                    "metadata": {"service": service, "agent": agents},
                }
            )
    return rows, by_id


@dataclass(frozen=True)
class TimePhrase:
    """A time expression written from an interval that was drawn first, so its label needs no parser."""

    text: str
    start: date | None
    end: date | None


_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six"]


def time_phrase(reference: date, rng: random.Random) -> TimePhrase:
    """Draw an interval of days before `reference` and say it in English."""
    kind = rng.randrange(8)
    count = rng.randint(2, 6)
    number = rng.choice([str(count), _NUMBERS[count]])
    if kind == 0:
        unit, days = rng.choice([("days", 1), ("weeks", 7)])
        return TimePhrase(
            f"in the {rng.choice(['last', 'past'])} {number} {unit}", reference - timedelta(count * days), reference
        )
    if kind == 1:
        return TimePhrase(f"over the last {number} months", reference - relativedelta(months=count), reference)
    if kind == 2:
        year = reference.year - rng.randint(1, 6)
        return TimePhrase(f"since {year}", date(year, 1, 1), None)
    if kind == 3:
        first = date(reference.year - rng.randint(1, 4), rng.randint(1, 6), 1)
        last = first + relativedelta(months=rng.randint(1, 6))
        text = f"between {first:%B} and {last:%B} {last.year}"
        return TimePhrase(text, first, last + relativedelta(months=1, days=-1))
    if kind == 4:
        first = date(reference.year - rng.randint(1, 5), rng.randint(1, 12), 1)
        return TimePhrase(f"in {first:%B} {first.year}", first, first + relativedelta(months=1, days=-1))
    if kind == 5:
        day = reference - timedelta(1)
        return TimePhrase("yesterday", day, day)
    if kind == 6:
        first = reference.replace(day=1) - relativedelta(months=1)
        return TimePhrase("last month", first, first + relativedelta(months=1, days=-1))
    day = reference - timedelta(rng.randint(10, 400))
    return TimePhrase(f"after {day.isoformat()}", day + timedelta(1), None)


def _snippet(text: str, words: int, rng: random.Random) -> str:
    content = _content(text)
    start = rng.randint(0, max(0, min(len(content) - words, 8)))
    return " ".join(content[start : start + words]).lower()


def write_query(operation: Operation, rng: random.Random) -> tuple[str, str]:
    """A query for the operation and its style; only un-indexed text beside the operation's own name."""
    named = f" in {operation.service_name}" if rng.random() < SERVICE_NAMED else ""
    hint = rng.choice(operation.hints)
    member, _, documentation = hint.partition(": ")
    style = rng.choices(["how-to", "keywords", "fault"], [0.5, 0.3, 0.2])[0]
    if style == "fault" and operation.errors:
        error, explanation = rng.choice(operation.errors)
        told = (rng.random() < 0.5 and _snippet(explanation, 4, rng)) or error.replace(" exception", "")
        return f"{told} error when I {operation.verb} {operation.noun}{named} with {member}", "fault"
    if style == "keywords":
        service = operation.service_name.lower() + " " if named else ""
        head = operation.noun if rng.random() < 0.5 else f"{operation.verb} {operation.noun}"
        return f"{service}{head} {_snippet(documentation, 4, rng)}", "keywords"
    opening = rng.choice(["how do I", "how can we", "I need to", "what is the way to", "is it possible to"])
    tail = rng.choice(["with", "by", "and set", "for"])
    return f"{opening} {operation.verb} {operation.noun}{named} {tail} {_snippet(documentation, 5, rng)}", "how-to"


def queries(by_id: dict[str, Operation], agents_of: dict[str, list[str]], rng: random.Random) -> list[dict[str, Any]]:
    """`QUERIES` queries, one relevant operation each, split by resource (service and noun)."""
    pool = [operation for operation in by_id.values() if operation.hints]
    assigned = [operation for operation in pool if agents_of[operation.id] != ["general"]]
    unassigned = [operation for operation in pool if agents_of[operation.id] == ["general"]]
    limit = int(QUERIES * SERVICE_SHARE)
    per_service: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < QUERIES:
        operation = rng.choice(unassigned if rng.random() < UNASSIGNED_SHARE else assigned)
        text, style = write_query(operation, rng)
        if per_service.get(operation.service, 0) >= limit or text in seen:
            continue
        seen.add(text)
        per_service[operation.service] = per_service.get(operation.service, 0) + 1
        reference = date(2023, 1, 1) + timedelta(rng.randint(0, 1300))
        phrase = time_phrase(reference, rng) if rng.random() < TIMED else None
        group = f"{operation.service}:{operation.noun}"
        rows.append(
            {
                "_id": f"q{len(rows):05d}",
                "text": f"{text} {phrase.text}" if phrase else text,
                "metadata": {
                    "style": style,
                    "group": group,
                    "document": operation.id,
                    "reference_date": reference.isoformat(),
                    "start": phrase.start.isoformat() if phrase and phrase.start else None,
                    "end": phrase.end.isoformat() if phrase and phrase.end else None,
                    "split": split_of(group),
                },
            }
        )
    return rows


def split_of(group: str) -> str:
    """train, dev or test from the hash of a document group: stable whatever else is in the pool."""
    position = int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
    for name, share in SPLITS:
        if position < share:
            return name
        position -= share
    return SPLITS[-1][0]


def card(agent: str) -> str:
    """The capability card: what it says it covers, then the names of its services."""
    summary, services = (GENERAL_CARD, _available(UNASSIGNED)) if agent == "general" else AGENTS[agent]
    names = [next(operations(service)).service_name for service in services]
    return f"{summary} Services: {', '.join(dict.fromkeys(names))}."


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    # mtime=0: the same pool has the same bytes, and so the same digest
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def write_pool(out: Path) -> Path:
    """Write the pool's files (pool.yaml, corpus, queries, qrels) into the folder `out`; returns the pool file."""
    rng = random.Random(SEED)
    out.mkdir(parents=True, exist_ok=True)
    rows, by_id = documents(rng)
    agents_of = {row["_id"]: row["metadata"]["agent"] for row in rows}
    _write_jsonl(out / "operations.jsonl.gz", rows)
    asked = queries(by_id, agents_of, rng)
    _write_jsonl(out / "queries.jsonl.gz", asked)
    agents: list[dict[str, Any]] = []
    for name in [*AGENTS, "general"]:
        qrels = {}
        for split, _ in SPLITS:
            file = out / "qrels" / name / f"{split}.tsv"
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [
                f"{row['_id']}\t{row['metadata']['document']}\t1\n"
                for row in asked
                if row["metadata"]["split"] == split and name in agents_of[row["metadata"]["document"]]
            ]
            file.write_text("query-id\tcorpus-id\tscore\n" + "".join(lines), encoding="utf-8")
            qrels[split] = f"qrels/{name}/{split}.tsv"
        search: dict[str, Any] = {"kind": "bm25", "corpus": "operations.jsonl.gz", "include": {"agent": name}}
        if name == "general":
            search["fields"] = ["summary"]
        agents.append(
            {
                "name": name,
                "card": card(name),
                "search": search,
                "queries": {"file": "queries.jsonl.gz", "qrels": qrels},
            }
        )
    pool_file = out / "pool.yaml"
    pool_file.write_text(
        yaml.safe_dump({"name": "aws-docs", "fallback": "general", "agents": agents}, sort_keys=False, width=120),
        encoding="utf-8",
    )
    return pool_file
