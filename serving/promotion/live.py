"""What an InferenceService of the cluster says: its mode, its rollout, what serves, and why it is not ready yet."""

from __future__ import annotations

import copy
from typing import cast

from routewright.errors import BadInput
from serving.promotion.deployment import Deployment
from serving.promotion.inference_service import DIGEST, MODE, PREDICTOR, PREVIOUS, ROLLED_BACK, VERSION, hash_of
from serving.promotion.kserve_api import NotReady, Object, annotation

_OWN = (VERSION, DIGEST, PREDICTOR)
_BROKEN = {"BlockedByFailedLoad", "InvalidSpec"}


def canary_percent(live: Object, mode: str) -> int | None:
    """The traffic of a rollout that is under way, None where none is."""
    if mode == "Knative":
        percent = live["spec"]["predictor"].get("canaryTrafficPercent")
    else:
        percent = (live["spec"].get("canary") or [{}])[0].get("trafficPercent")
    return None if percent is None else int(percent)


def check_mode(live: Object, deployment: Deployment) -> None:
    """BadInput where the object runs in another mode than the deployment says: the canary would be ignored."""
    found = annotation(live, MODE)
    if found != deployment.mode:
        raise BadInput(
            f"mode: {deployment.service} runs with {MODE} {found or 'not set'}, the deployment file says {deployment.mode}"
        )


def is_rolling_out(live: Object, deployment: Deployment, spec: Object) -> bool:
    if deployment.mode == "Knative":
        return annotation(live, PREDICTOR) == hash_of(spec)
    return bool(canary_of(live).get("name") == spec["name"])


def canary_of(live: Object) -> Object:
    """The predictor of the canary in Standard mode; empty where there is none."""
    return (live["spec"].get("canary") or [{}])[0].get("predictor") or {}


def canary_version(live: Object | None) -> str:
    """The version of a canary that is open beside the served one in Standard mode, "" where none is."""
    return "" if live is None else str((canary_of(live).get("annotations") or {}).get(VERSION, ""))


def stable_revision(live: Object, deployment: Deployment) -> str:
    """What serves the champion: its Knative revision, or in Standard mode its service."""
    if deployment.mode == "Standard":
        return _service_name(deployment, live["spec"]["predictor"].get("name"))
    found = component_of(live)
    traffic = [t for t in found.get("traffic") or [] if not t.get("latestRevision") and t.get("percent")]
    if canary_percent(live, "Knative") is not None and traffic:
        return str(traffic[0].get("revisionName", ""))
    return str(found.get("latestReadyRevision", ""))


def _service_name(deployment: Deployment, name: str | None) -> str:
    return "-".join([deployment.service, *([name] if name else []), "predictor"])


def candidate_revision(live: Object, deployment: Deployment, spec: Object) -> str:
    if deployment.mode == "Standard":
        return _service_name(deployment, spec.get("name"))
    return str(component_of(live).get("latestReadyRevision", ""))


def component_of(live: Object) -> Object:
    return cast(Object, ((live.get("status") or {}).get("components") or {}).get("predictor") or {})


def own_marks(live: Object) -> Object:
    """What a rollback needs of an object: predictor, and the labels and annotations that belong to it."""
    predictor = {name: value for name, value in live["spec"]["predictor"].items() if name != "canaryTrafficPercent"}
    metadata = live["metadata"]
    kept = {
        kind: {name: value for name, value in (metadata.get(kind) or {}).items() if name in _OWN}
        for kind in ("labels", "annotations")
    }
    return {"predictor": predictor, **kept}


def put_predictor(found: Object, marks: Object, more: dict[str, str]) -> None:
    """Give the object that predictor and its marks; ``more`` are annotations beside them."""
    found["spec"]["predictor"] = copy.deepcopy(marks["predictor"])
    for kind in ("labels", "annotations"):
        others = {n: v for n, v in (found["metadata"].get(kind) or {}).items() if n not in (*_OWN, PREVIOUS, ROLLED_BACK)}
        found["metadata"][kind] = {**others, **marks[kind]}
    found["metadata"]["annotations"] |= more


def why_unseen(found: Object) -> str:
    seen = int((found.get("status") or {}).get("observedGeneration") or 0)
    return "the controller has not seen the change" if seen < int(found["metadata"].get("generation") or 0) else ""


def why_not_ready(found: Object) -> str:
    """Why the object is not what was asked for yet; empty where it is. NotReady where it never will be."""
    if unseen := why_unseen(found):
        return unseen
    status = found["status"]
    model = status.get("modelStatus") or {}
    if model.get("transitionStatus") in _BROKEN:
        why = (model.get("lastFailureInfo") or {}).get("message") or "no message"
        raise NotReady(f"the new version cannot be loaded ({model['transitionStatus']}: {why})")
    ready = next((c for c in status.get("conditions") or [] if c["type"] == "Ready"), None)
    if ready is None or ready["status"] != "True":
        return f"not ready ({(ready or {}).get('message') or (ready or {}).get('reason') or 'no condition Ready'})"
    return ""


def why_step_waits(found: Object, deployment: Deployment, spec: Object, share: int) -> str:
    pending = why_not_ready(found)
    if pending:
        return pending
    if deployment.mode == "Standard":
        return why_canary_waits(found, deployment, spec, share)
    component = component_of(found)
    if component.get("latestReadyRevision") != component.get("latestCreatedRevision"):
        return f"revision {component.get('latestCreatedRevision')} is not ready"
    latest = component.get("latestReadyRevision")
    given = sum(
        int(t.get("percent") or 0)
        for t in component.get("traffic") or []
        if t.get("revisionName") == latest or t.get("latestRevision")
    )
    return "" if given == share else f"revision {latest} has {given} % of the traffic"


def why_canary_waits(found: Object, deployment: Deployment, spec: Object, share: int) -> str:
    names = {spec["name"], _service_name(deployment, spec["name"])}
    canary = next((c for c in found["status"].get("canaryStatuses") or [] if c["name"] in names), None)
    if canary is None or not canary["ready"]:
        return "the canary is not ready"
    return "" if canary["trafficPercent"] == share else f"the canary has {canary['trafficPercent']} % of the traffic"
