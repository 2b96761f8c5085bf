"""A small Kubernetes API server over real HTTP: InferenceServices, strictly validated, and a controller that acts on them.

Unknown fields are errors, as on a strict server, and clients must ask for that; so are two entries of one key in a list
that is a map, an object of another kind or name than its address, and a request without the account's token. The
controller plays KServe in both modes: revisions and their traffic, canaries, conditions, ``observedGeneration``. It moves
on at every read of the object, so nothing depends on the clock.
"""

from __future__ import annotations

import copy
import gzip
import json
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import yaml
from crd_schemas import strict
from stand_in import StandIn, StandInHandler

ROOT = Path(__file__).parents[3]
CRD = ROOT.parent / "shared" / "crds" / "inferenceservices.serving.kserve.io.json.gz"
COLLECTION = "/apis/serving.kserve.io/v1beta1/namespaces/models/inferenceservices"
MODE = "serving.kserve.io/deploymentMode"
TOKEN = "very-secret"


def inference_service_schema() -> dict[str, Any]:
    """The strict schema; ``metadata`` has the fields that clients write and servers answer."""
    schema: dict[str, Any] = strict(json.loads(gzip.decompress(CRD.read_bytes()))["versions"]["v1beta1"])
    strings = {"type": "object", "additionalProperties": {"type": "string"}}
    names = ("name", "namespace", "uid", "resourceVersion")
    metadata: dict[str, Any] = {name: {"type": "string"} for name in names}
    metadata |= {"labels": strings, "annotations": strings, "generation": {"type": "integer"}}
    schema["properties"]["metadata"] = {"type": "object", "properties": metadata, "additionalProperties": False}
    return schema


class ApiServer(StandIn):
    """One namespace, ``models``. ``broken`` holds images that never become ready, ``failures`` the next statuses to
    answer writes with; ``touch`` changes the object behind the client's back before its next writes."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self.touch = 0
        self.broken: set[str] = set()
        self.load_error = ""
        self.history: list[tuple[str, ...]] = []
        self._schema = jsonschema.Draft202012Validator(inference_service_schema())
        self._lock = threading.Lock()
        server = self

        class Handler(StandInHandler):
            def _answer(self) -> None:
                body = self.body()
                with server._lock:
                    if self.headers["Authorization"] != f"Bearer {TOKEN}":
                        status, answer = refusal(401, "Unauthorized")
                    else:
                        status, answer = server.handle(self.command, self.path, json.loads(body) if body else None)
                self.send(status, answer)

            do_GET = do_POST = do_PUT = _answer

        super().__init__(Handler)

    def kubeconfig(self, path: Path) -> Path:
        """A kubeconfig file that names this server."""
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {"token": TOKEN}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(config))
        return path

    def handle(self, verb: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        place = urlsplit(path)
        name = place.path.removeprefix(COLLECTION).strip("/")
        if not re.fullmatch(re.escape(COLLECTION) + r"(/[^/]+)?", place.path):
            return refusal(404, "the server could not find the requested resource")
        if self.failures and verb != "GET":
            return refusal(self.failures.pop(0), "as the test wants it")
        if verb == "GET":
            if name not in self.objects:
                return refusal(404, f"{name} not found")
            self.act(self.objects[name])
            return 200, copy.deepcopy(self.objects[name])
        if parse_qs(place.query).get("fieldValidation") != ["Strict"]:
            return refusal(400, "this server drops unknown fields unless fieldValidation=Strict")
        faults = [f"{'.'.join(map(str, f.path))}: {f.message}" for f in self._schema.iter_errors(body)]
        faults += label_faults(body["metadata"]) + address_faults(body, name or body["metadata"]["name"])
        faults += repeated_keys(body, self._schema.schema)
        faults = faults or canary_faults(body["spec"])
        if faults:
            return refusal(422, f"InferenceService is invalid: {faults[0]}")
        if verb == "POST":
            name = body["metadata"]["name"]
            if name in self.objects:
                return refusal(409, "already exists")
            stored = copy.deepcopy(body)
            stored["metadata"] |= {"uid": "u-1", "resourceVersion": "1", "generation": 1}
            stored["status"] = {}
        else:
            old = self.objects[name]
            if self.touch:
                self.touch -= 1
                self._bump(old)
            if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
                return refusal(409, "the object has been modified")
            stored = copy.deepcopy(body)
            stored["status"] = old["status"]
            changed = stored["spec"] != old["spec"]
            stored["metadata"]["generation"] = old["metadata"]["generation"] + changed
            self._bump(stored)
        self.objects[name] = stored
        self.writes.append(copy.deepcopy(body))
        return 200, copy.deepcopy(stored)

    def _bump(self, stored: dict[str, Any]) -> None:
        stored["metadata"]["resourceVersion"] = str(int(stored["metadata"]["resourceVersion"]) + 1)

    def act(self, found: dict[str, Any]) -> None:
        """The controller: once for every state that was written."""
        status, generation = found["status"], found["metadata"]["generation"]
        if status.get("observedGeneration") == generation:
            return
        mode = found["metadata"]["annotations"][MODE]
        status["observedGeneration"] = generation
        ready = self._knative(found) if mode == "Knative" else self._standard(found)
        status["conditions"] = [{"type": "Ready", "status": str(ready), "message": "" if ready else "pods are not ready"}]
        status["modelStatus"] = {"transitionStatus": "UpToDate"}
        if not ready and self.load_error:
            failure = {"reason": "ModelLoadFailed", "message": self.load_error}
            status["modelStatus"] = {"transitionStatus": "BlockedByFailedLoad", "lastFailureInfo": failure}

    def _ready(self, predictor: dict[str, Any]) -> bool:
        return not any(c["name"] == "STORAGE_URI" and c["value"] in self.broken for c in predictor["containers"][0]["env"])

    def _knative(self, found: dict[str, Any]) -> bool:
        predictor = dict(found["spec"]["predictor"])
        percent = predictor.pop("canaryTrafficPercent", None)
        component = found["status"].setdefault("components", {}).setdefault("predictor", {})
        template = json.dumps([predictor, found["metadata"]["annotations"]], sort_keys=True)
        revisions = found["status"].setdefault("annotations", {})
        name = component.get("latestCreatedRevision")
        if name is None or revisions[name] != template:
            name = f"{found['metadata']['name']}-predictor-{len(revisions) + 1:05d}"
            revisions[name] = template
            component["latestCreatedRevision"] = name
        ready = self._ready(predictor)
        if ready:
            component["latestReadyRevision"] = name
        latest, rolled = component.get("latestReadyRevision"), component.get("latestRolledoutRevision")
        traffic = [{"revisionName": latest, "percent": 100, "latestRevision": True}] if latest else []
        if percent is not None and rolled is not None:
            # As in KServe: a revision that has been rolled out already goes back to the one before it.
            if latest == rolled == name and percent < 100 and component.get("previousRolledoutRevision"):
                rolled = component["latestRolledoutRevision"] = component["previousRolledoutRevision"]
            traffic[0]["percent"] = percent
            if percent < 100:
                traffic.append({"revisionName": rolled, "percent": 100 - percent, "tag": "prev"})
        if traffic and traffic[0]["percent"] == 100 and rolled != latest:
            component["previousRolledoutRevision"], component["latestRolledoutRevision"] = rolled or "", latest
        component["traffic"] = traffic
        self.history.append(tuple(f"{self._uri_of(revisions[t['revisionName']])} {t['percent']}" for t in traffic))
        return ready

    def _uri_of(self, template: str) -> str:
        return re.findall(r'"name": "STORAGE_URI", "value": "([^"]+)"', template)[0]

    def _standard(self, found: dict[str, Any]) -> bool:
        spec = found["spec"]
        ready, canaries = self._ready(spec["predictor"]), spec.get("canary") or []
        found["status"]["canaryStatuses"] = [
            {"name": c["predictor"]["name"], "ready": self._ready(c["predictor"]), "trafficPercent": c["trafficPercent"]}
            for c in canaries
        ]
        given = sum(c["trafficPercent"] for c in canaries)
        uris = [(spec["predictor"], 100 - given), *((c["predictor"], c["trafficPercent"]) for c in canaries)]
        self.history.append(tuple(f"{self._uri_of(json.dumps(p, sort_keys=True))} {share}" for p, share in uris if share))
        return ready and all(c["ready"] for c in found["status"]["canaryStatuses"])


def label_faults(metadata: dict[str, Any]) -> list[str]:
    """What a server finds wrong with labels, and with the names of annotations."""
    value = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
    key = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
    faults = [f"metadata.labels: {text!r}" for text in metadata.get("labels", {}).values() if not value.fullmatch(text)]
    names = [*metadata.get("labels", {}), *metadata.get("annotations", {})]
    return faults + [f"metadata: {name!r}" for name in names if not key.fullmatch(name)]


def address_faults(body: dict[str, Any], name: str) -> list[str]:
    """Where an object is not what its address says."""
    expected = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService"}
    found = {key: body.get(key) for key in expected}
    faults = [f"{key}: {found[key]!r} is not {expected[key]!r}" for key in expected if found[key] != expected[key]]
    metadata = {"name": name, "namespace": "models"}
    return faults + [f"metadata.{key}" for key, value in metadata.items() if body["metadata"].get(key) != value]


def canary_faults(spec: dict[str, Any]) -> list[str]:
    """What KServe's webhook refuses: two predictors of one name, and a canary that scales for itself."""
    canaries = [canary["predictor"] for canary in spec.get("canary") or []]
    names = [predictor.get("name") for predictor in (spec["predictor"], *canaries)]
    faults = [f"spec.canary: name {name!r} is there twice" for name in set(names) if names.count(name) > 1]
    scaling = {field for canary in canaries for field in ("minReplicas", "maxReplicas") if field in canary}
    return faults + [f"spec.canary: {field} belongs to the stable predictor" for field in sorted(scaling)]


def repeated_keys(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """Lists that are maps by their schema and hold two entries of one key, as two variables of one name."""
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        parts = {key: known.get(key, others if isinstance(others, dict) else {}) for key in value}
        return [fault for key in value for fault in repeated_keys(value[key], parts[key], f"{where}.{key}")]
    if not isinstance(value, list):
        return []
    entry = schema.get("items", {})
    faults = [fault for i, item in enumerate(value) for fault in repeated_keys(item, entry, f"{where}[{i}]")]
    if names := schema.get("x-kubernetes-list-map-keys"):
        defaults = {name: schema["items"]["properties"][name].get("default") for name in names}
        keys = [tuple(item.get(name, defaults[name]) for name in names) for item in value]
        faults += [f"{where}: {key} is there twice" for key in {key for key in keys if keys.count(key) > 1}]
    return faults


def refusal(status: int, message: str) -> tuple[int, dict[str, Any]]:
    """A Kubernetes error."""
    return status, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}
