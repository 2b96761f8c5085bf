"""A small API server over real HTTP: Kubeflow Trainer's TrainJobs, strictly validated, their first node's pod and its log.

A job moves on at every read of it, so nothing depends on the clock.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import yaml
from stand_in import StandIn, StandInHandler

JOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/routers/trainjobs"
PODS = "/api/v1/namespaces/routers/pods"
STAMP = "2026-01-01T00:00:{:02d}.000000000Z"


class TrainApi(StandIn):
    """``log`` holds the first node's lines, ``cut`` after how many of them each connection breaks, ``verdict`` how a job
    ends; ``failures`` are statuses that the next requests of a verb get, ``log_failures`` those for a log."""

    def __init__(self, validator: jsonschema.Draft202012Validator | None) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.leaving: dict[str, int] = {}
        self.log = ["step 1", "step 2", "step 3"]
        self.cut: list[int] = []
        self.verdict: tuple[str, str] | None = ("Complete", "all nodes are done")
        self.failures: dict[str, list[int]] = {"GET": [], "POST": [], "DELETE": []}
        self.log_failures: list[int] = []
        self.selectors: set[str] = set()
        self.was_created = threading.Event()
        self._reads = 0
        self._lock = threading.Lock()
        server = self

        class Handler(StandInHandler):
            def _answer(self) -> None:
                body = self.body()
                with server._lock:
                    if self.path.partition("?")[0].endswith("/log"):
                        if server.log_failures:
                            self.send(*refusal(server.log_failures.pop(0), "as the test wants it"))
                        else:
                            server.send_log(self)
                        return
                    answer = server.handle(self.command, self.path, json.loads(body) if body else None, validator)
                self.send(*answer)

            do_GET = do_POST = do_DELETE = _answer

        super().__init__(Handler)

    def kubeconfig(self, path: Path) -> Path:
        """A kubeconfig file that names this server."""
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {"token": "very-secret"}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(config))
        return path

    def handle(
        self, verb: str, path: str, body: Any, validator: jsonschema.Draft202012Validator | None
    ) -> tuple[int, dict[str, Any]]:
        url = urlsplit(path)
        if url.path == PODS:
            self.selectors |= set(parse_qs(url.query)["labelSelector"])
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self.pods()}
        if not url.path.startswith(JOBS):
            return refusal(404, "the server could not find the requested resource")
        name = url.path.removeprefix(JOBS).strip("/")
        if self.failures[verb] and (verb != "GET" or self.created):
            return refusal(self.failures[verb].pop(0), "as the test wants it")
        if verb == "POST":
            name = body["metadata"]["name"]
            if name in self.jobs:
                return refusal(409, "already exists")
            if validator:
                for fault in validator.iter_errors(body):
                    return refusal(422, f"TrainJob is invalid: {fault.message}")
            self.jobs[name] = {**body, "status": {}}
            self.created.append(body)
            self._reads = 0
            self.was_created.set()
            return 201, self.jobs[name]
        if name not in self.jobs:
            return refusal(404, f"trainjobs {name} not found")
        if verb == "DELETE":
            # In the foreground: the job stays until its pods are gone.
            self.deleted.append(name)
            self.leaving[name] = 2
            return 200, self.jobs[name]
        if name in self.leaving:
            self.leaving[name] -= 1
            if not self.leaving[name]:
                del self.jobs[name], self.leaving[name]
                return refusal(404, f"trainjobs {name} not found")
            return 200, self.jobs[name]
        self._reads += 1
        if self._reads >= 3 + len(self.cut) and self.verdict:
            kind, message = self.verdict
            condition = {"type": kind, "status": "True", "reason": "JobSet", "message": message}
            self.jobs[name]["status"] = {"conditions": [condition]}
        return 200, self.jobs[name]

    def pods(self) -> list[dict[str, Any]]:
        """The first node's pod, which waits for its node before it runs."""
        if not self.created:
            return []
        phase = "Pending" if self._reads < 2 else "Running"
        return [{"metadata": {"name": "job-node-0-0-abcde"}, "status": {"phase": phase}}]

    def send_log(self, handler: StandInHandler) -> None:
        """All lines from the start, as the API does, or as many as a connection lives."""
        lines = [f"{STAMP.format(i)} {line}\n".encode() for i, line in enumerate(self.log)]
        whole = b"".join(lines)
        kept = b"".join(lines[: self.cut.pop(0)]) if self.cut else whole
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain")
        handler.send_header("Content-Length", str(len(whole)))
        handler.end_headers()
        handler.wfile.write(kept)
        handler.close_connection = kept != whole


def refusal(status: int, message: str) -> tuple[int, dict[str, Any]]:
    """A Kubernetes error."""
    return status, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}
