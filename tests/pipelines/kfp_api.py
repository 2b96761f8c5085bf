"""A Kubeflow Pipelines API server over real HTTP: the part of v2beta1 that submitting and scheduling need.

Strict: paths, query parameters and fields that it does not know are errors, pipelines are parsed with KFP's own schema, and
parameters are checked against them. As in the real one, 64-bit integers are answered as strings. A run moves on by one
stage at every read of it, so nothing depends on the clock.
"""

from __future__ import annotations

import copy
import dataclasses
import email
import email.policy
import json
import threading
from email.message import Message
from graphlib import TopologicalSorter
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2
from stand_in import StandIn, StandInHandler

from components.image import IMAGE
from pipelines.plan import Compiled

Answer = tuple[int, Any]
PREFIX = "/apis/v2beta1/"
LIST = {"page_token", "page_size", "sort_by", "filter", "namespace"}
REFERENCE, RUNTIME = {"pipeline_id", "pipeline_version_id"}, {"parameters", "pipeline_root"}
EXPERIMENT = {"display_name", "description", "namespace"}
RUN = {"experiment_id", "display_name", "description", "pipeline_version_reference", "runtime_config", "service_account"}
RECURRING = RUN | {"max_concurrency", "trigger", "mode", "no_catchup"}
CODES = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 429: 8, 500: 13, 503: 14}
TYPES: dict[str, tuple[type, ...]] = {
    "STRING": (str,), "NUMBER_INTEGER": (int,), "NUMBER_DOUBLE": (int, float), "BOOLEAN": (bool,), "LIST": (list,),
    "STRUCT": (dict,),
}  # fmt: skip


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class KfpApi(StandIn):
    """Namespaces ``team`` (allowed) and ``others`` (403); no token but ``token`` is taken.

    ``failures`` holds statuses for the next requests that write, ``flaky`` for the next reads of a run. Stages in
    ``broken`` fail; ``cancelled`` ends a run when it is looked at. The next list of each kind in ``hidden`` is empty, as
    for one who looks a moment too early; ``rival`` is called before a recurring run is created, which is refused then.
    Requests with the verb ``killed`` fail.
    """

    def __init__(self, multi_user: bool = True) -> None:
        self.token, self.multi_user = "kfp-very-secret", multi_user
        self.kept: dict[str, dict[str, dict[str, Any]]] = {
            name: {} for name in ("experiments", "pipelines", "versions", "runs", "recurringruns")
        }
        self.requests: list[str] = []
        self.failures: list[int] = []
        self.flaky: list[int] = []
        self.broken: set[str] = set()
        self.rival: Any = None
        self.hidden: set[str] = set()
        self.cancelled = False
        self.killed = ""
        self.login_page = False
        self._uploads: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        server = self

        class Handler(StandInHandler):
            def _answer(self) -> None:
                body = self.body()
                if server.login_page:
                    self.send(200, "<html>sign in</html>", {"Content-Type": "text/html"})
                    return
                with server._lock:
                    try:
                        status, answer = server._handle(self.command, self.path, self.headers, body)
                    except Refused as refusal:
                        # A careless server that repeats the key in its error.
                        text = f"{refusal.text} [{self.headers.get('Authorization', '')}]"
                        status, answer = refusal.status, {"code": CODES[refusal.status], "message": text, "details": []}
                self.send(status, answer)

            do_GET = do_POST = do_DELETE = _answer

        super().__init__(Handler)

    def _handle(self, verb: str, address: str, headers: Message, body: bytes) -> Answer:
        url = urlsplit(address)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.requests.append(f"{verb} {url.path.removeprefix(PREFIX)}")
        if not url.path.startswith(PREFIX):
            raise Refused(404, "Not Found")
        if headers.get("Authorization") != f"Bearer {self.token}":
            raise Refused(401, "Request header error: the token is expired or not valid")
        if verb == self.killed:
            raise Refused(500, "as the test wants it")
        if verb != "GET" and self.failures:
            raise Refused(self.failures.pop(0), "as the test wants it")
        parts = url.path.removeprefix(PREFIX).split("/")
        match verb, parts:
            case "GET", ["healthz"]:
                return 200, {"multi_user": self.multi_user}
            case "POST", ["pipelines", "upload" | "upload_version" as kind]:
                return self._upload(kind, query, headers, body)
            case "GET", ["pipelines", pipeline, "versions"]:
                self._get("pipelines", pipeline)
                kept = [v for v in self.kept["versions"].values() if v["pipeline_id"] == pipeline]
                return self._list("pipeline_versions", kept, query, LIST - {"namespace"})
            case "GET", ["experiments" | "pipelines" | "runs" | "recurringruns" as kind]:
                self._namespace(query.get("namespace"))
                found = list(self.kept[kind].values())
                return self._list("recurringRuns" if kind == "recurringruns" else kind, found, query, LIST)
            case "POST", ["experiments" | "runs" | "recurringruns" as kind]:
                known(query, set(), "query parameter")
                return 200, getattr(self, f"_create_{kind}")(json.loads(body))
            case "GET", ["runs", name]:
                return 200, self._read_run(name)
            case "GET", ["experiments" | "recurringruns" as kind, name]:
                return 200, self._get(kind, name)
            case "POST", ["runs" | "recurringruns" as kind, action] if ":" in action:
                name, _, word = action.partition(":")
                states = {"runs": {"terminate": {"state": "CANCELED"}}, "recurringruns": {
                    "enable": {"mode": "ENABLE", "status": "ENABLED"},
                    "disable": {"mode": "DISABLE", "status": "DISABLED"},
                }}[kind]  # fmt: skip
                if word not in states:
                    raise Refused(404, "Not Found")
                self._get(kind, name).update(states[word])
                return 200, {}
            case "DELETE", ["recurringruns", name]:
                self._get("recurringruns", name)
                del self.kept["recurringruns"][name]
                return 200, {}
        raise Refused(404, "Not Found")

    def _get(self, kind: str, name: str) -> dict[str, Any]:
        if name not in self.kept[kind]:
            raise Refused(404, f"{kind} {name} not found")
        return self.kept[kind][name]

    def _keep(self, kind: str, id_field: str, fields: dict[str, Any]) -> dict[str, Any]:
        name = f"{kind[:3]}-{sum(map(len, self.kept.values())) + len(self.requests)}"
        self.kept[kind][name] = {id_field: name, "created_at": "2026-01-05T08:00:00Z", **fields}
        return self.kept[kind][name]

    def _namespace(self, namespace: str | None) -> None:
        if not self.multi_user:
            return
        if not namespace:
            raise Refused(400, "Namespace cannot be empty in multi-user mode")
        if namespace != "team":
            raise Refused(403, f"User is not authorized in namespace {namespace}")

    def _list(self, label: str, found: list[dict[str, Any]], query: dict[str, str], parameters: set[str]) -> Answer:
        known(query, parameters, "query parameter")
        for predicate in json.loads(query.get("filter") or "{}").get("predicates", []):
            known(predicate, {"operation", "key", "stringValue", "string_value"}, "predicate field")
            if predicate["operation"] not in ("EQUALS", 1):
                raise Refused(400, "Invalid filter")
            found = [one for one in found if one[predicate["key"]] == predicate["stringValue"]]
        if label in self.hidden:
            self.hidden.remove(label)
            found = []
        start, size = int(query.get("page_token") or 0), int(query.get("page_size") or 20)
        answer: dict[str, Any] = {label: found[start : start + size], "total_size": len(found)}
        if start + size < len(found):
            answer["next_page_token"] = str(start + size)
        return 200, answer

    def _upload(self, kind: str, query: dict[str, str], headers: Message, body: bytes) -> Answer:
        known(query, {"name", "display_name", "description", "namespace", "pipelineid"}, "query parameter")
        head = f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode()
        (part,) = email.message_from_bytes(head + body, policy=email.policy.HTTP).iter_parts()
        assert part.get_param("name", header="content-disposition") == "uploadfile"
        spec, *platform = yaml.safe_load_all(part.get_content() if part.get_content_type() == "text/plain" else
                                             part.get_payload(decode=True))  # fmt: skip
        try:
            json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
            for document in platform:
                json_format.ParseDict(document, pipeline_spec_pb2.PlatformSpec())
        except json_format.ParseError as error:
            raise Refused(400, f"Invalid pipeline spec: {error}") from None
        if kind == "upload":
            self._namespace(query.get("namespace"))
            self._unique("pipelines", query["name"], lambda one: True)
            kept = self._keep("pipelines", "pipeline_id", {"display_name": query["name"], "name": query["name"]})
            self._version(kept["pipeline_id"], query["name"], spec, platform)
            return 200, kept
        self._get("pipelines", query["pipelineid"])
        self._unique("versions", query["name"], lambda one: one["pipeline_id"] == query["pipelineid"])
        return 200, self._version(query["pipelineid"], query["name"], spec, platform)

    def _version(self, pipeline: str, name: str, spec: Any, platform: list[Any]) -> dict[str, Any]:
        kept = self._keep("versions", "pipeline_version_id", {"pipeline_id": pipeline, "display_name": name, "name": name})
        self._uploads[kept["pipeline_version_id"]] = {"spec": spec, "platform": platform[0] if platform else None}
        return kept

    def _unique(self, kind: str, name: str, among: Any) -> None:
        if any(one["display_name"] == name and among(one) for one in self.kept[kind].values()):
            raise Refused(409, f"The name {name} already exists")

    def uploaded(self, reference: dict[str, str]) -> dict[str, Any]:
        """The pipeline spec and platform spec of a version."""
        return self._uploads[reference["pipeline_version_id"]]

    def _create_experiments(self, given: dict[str, Any]) -> dict[str, Any]:
        known(given, EXPERIMENT, "field")
        self._namespace(given.get("namespace"))
        self._unique("experiments", given["display_name"], lambda one: True)
        return self._keep("experiments", "experiment_id", given)

    def _create_runs(self, given: dict[str, Any]) -> dict[str, Any]:
        known(given, RUN, "field")
        self._check_pipeline(given)
        return self._keep("runs", "run_id", {**given, "state": "PENDING"})

    def _create_recurringruns(self, given: dict[str, Any]) -> dict[str, Any]:
        known(given, RECURRING, "field")
        if self.rival is not None:
            rival, self.rival = self.rival, None
            rival(copy.deepcopy(given))
            raise Refused(409, f"The name {given['display_name']} already exists")
        self._check_pipeline(given)
        ((kind, trigger),) = given["trigger"].items()
        known(trigger, {"cron_schedule": {"cron", "start_time", "end_time"},
                        "periodic_schedule": {"interval_second", "start_time", "end_time"}}[kind], "field")  # fmt: skip
        if kind == "cron_schedule" and len(trigger["cron"].split()) != 6:
            raise Refused(400, "Schedule cron is not a valid format")
        if kind == "periodic_schedule":
            trigger["interval_second"] = str(int(trigger["interval_second"]))
        if not 1 <= int(given["max_concurrency"]) <= 10:
            raise Refused(400, "The max concurrency of the recurring run is out of range. Support 1-10")
        given["max_concurrency"] = str(given["max_concurrency"])
        status = {"ENABLE": "ENABLED", "DISABLE": "DISABLED"}[given["mode"]]
        return self._keep("recurringruns", "recurring_run_id", {**given, "status": status, "namespace": "team"})

    def _check_pipeline(self, given: dict[str, Any]) -> None:
        self._get("experiments", given["experiment_id"])
        known(given["pipeline_version_reference"], REFERENCE, "field")
        known(given["runtime_config"], RUNTIME, "field")
        self._get("versions", given["pipeline_version_reference"]["pipeline_version_id"])
        inputs = self.uploaded(given["pipeline_version_reference"])["spec"]["root"]["inputDefinitions"]["parameters"]
        parameters = given["runtime_config"].get("parameters", {})
        known(parameters, set(inputs), "parameter")
        for name, kind in inputs.items():
            if name not in parameters and not kind.get("isOptional") and "defaultValue" not in kind:
                raise Refused(400, f"parameter {name} is required")
        for name, value in parameters.items():
            taken = TYPES[inputs[name]["parameterType"]]
            if not isinstance(value, taken) or (isinstance(value, bool) and bool not in taken):
                raise Refused(400, f"input parameter {name} requires type {inputs[name]['parameterType']}")

    def _read_run(self, name: str) -> dict[str, Any]:
        if self.flaky:
            raise Refused(self.flaky.pop(0), "as the test wants it")
        run = self._get("runs", name)
        before = copy.deepcopy(run)
        if self.cancelled:
            run["state"] = "CANCELED"
        if run["state"] not in ("SUCCEEDED", "FAILED", "CANCELED"):
            dag = self.uploaded(run["pipeline_version_reference"])["spec"]["root"]["dag"]["tasks"]
            stages = list(TopologicalSorter({n: t.get("dependentTasks", []) for n, t in dag.items()}).static_order())
            run["state"] = "RUNNING"
            # As the real one: what drives a stage is a task too.
            tasks = run.setdefault("run_details", {"task_details": [{"display_name": "root-driver", "state": "SUCCEEDED"}]})
            details = tasks["task_details"]
            if details[-1]["state"] == "RUNNING":
                stage = details[-1]["display_name"]
                details[-1]["state"] = "FAILED" if stage in self.broken else "SUCCEEDED"
                if stage in self.broken:
                    run["state"], run["error"] = "FAILED", {"code": 2, "message": f"{stage} ended with exit code 1"}
            done = len(details) - 1
            if run["state"] == "RUNNING" and done == len(stages):
                run["state"] = "SUCCEEDED"
            elif run["state"] == "RUNNING":
                details.append({"display_name": stages[done], "state": "RUNNING"})
        return before


def known(given: dict[str, Any], names: set[str], what: str) -> None:
    if extra := sorted(given.keys() - names):
        raise Refused(400, f"unknown {what} {extra[0]}")


def pushed(made: Compiled) -> Compiled:
    """The pipeline as if its image were in a registry; that of a checkout is a placeholder, which is not submitted."""
    text = made.text.replace(IMAGE, "registry.example/train@sha256:" + "1" * 64)
    return dataclasses.replace(made, text=text, spec=next(yaml.safe_load_all(text)))
