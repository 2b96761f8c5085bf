"""Canary steps, abort and rollback of an InferenceService.

What is to be done next is read off the cluster each time, so a killed rollout or rollback is finished by starting it
again, and one that is finished changes nothing. The way back is written into the object itself, before any traffic moves.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from routewright.errors import BadInput, StageFailed
from serving.promotion.inference_service import (
    DIGEST,
    MODE,
    PREDICTOR,
    PREVIOUS,
    ROLLED_BACK,
    VERSION,
    Canary,
    Deployment,
    hash_of,
    standard_canary,
)
from serving.promotion.traffic import Load, complaint, reader

GROUP, API_VERSION, PLURAL = "serving.kserve.io", "v1beta1", "inferenceservices"
CONFLICTS = 5  # tries to change an object that others change too
READS = 12  # tries to read metrics, poll_s apart: Prometheus needs up to a minute to restart
_REQUEST_S = 15
_OWN = (VERSION, DIGEST, PREDICTOR)
_BROKEN = {"BlockedByFailedLoad", "InvalidSpec"}

Object = dict[str, Any]
Say = Callable[[str], None]
T = TypeVar("T")


class NotReady(Exception):
    """A step did not come to what was asked for; the message says why."""


class Unreachable(Exception):
    """The API server did not answer, or with 429 or 5xx; it may later."""


class Conflict(Exception):
    """Somebody else changed the object."""


@dataclass(frozen=True)
class Step:
    """One canary step as it was watched; loads are None where no metrics are configured."""

    percent: int
    candidate: Load | None
    champion: Load | None


@dataclass(frozen=True)
class Rollout:
    """How a rollout ended. ``aborted``: a metric was worse, or the new version did not become ready; traffic is back."""

    outcome: Literal["unchanged", "deployed", "rolled-out", "aborted"]
    reason: str
    gate: bool = False
    """A metric stopped it, not a failure."""
    steps: list[Step] = field(default_factory=list)


def connect_cluster() -> Any:
    """The API of the cluster that KUBECONFIG or the pod's service account names; BadInput where there is neither."""
    from kubernetes import client, config

    given = os.environ.get("KUBECONFIG")
    try:
        # The library reads the variable once, at its import, and falls back to print what it does.
        if given or (Path.home() / ".kube" / "config").is_file():
            config.load_kube_config(given)
        else:
            config.load_incluster_config()
    except (config.ConfigException, OSError) as error:
        raise BadInput(f"KUBECONFIG: no cluster is configured ({' '.join(str(error).split())})") from None
    return client.CustomObjectsApi()


def call(deployment: Deployment, verb: str, request: Callable[[], Any]) -> Any:
    """Do a request; BadInput for what the account or the namespace lacks, StageFailed for a manifest that is refused."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    where = f"inferenceservices in namespace {deployment.namespace}"
    try:
        return request()
    except ApiException as error:
        if error.status in (401, 403):
            raise BadInput(f"Kubernetes: the account may not {verb} {where} ({error.status} {error.reason})") from None
        if error.status == 404:
            raise BadInput(f"Kubernetes: cannot {verb} {where}: no such namespace, or KServe is not installed") from None
        if error.status == 409:
            raise Conflict from None
        if error.status == 429 or error.status >= 500:
            raise Unreachable(f"the API server answers {error.status} {error.reason}") from None
        raise StageFailed(f"Kubernetes refused to {verb} {deployment.service}: {_message(error)}") from None
    except HTTPError as error:
        raise Unreachable(f"no API server answers ({type(error).__name__})") from None


def _message(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def deployed(api: Any, deployment: Deployment) -> Object | None:
    """The InferenceService as it is now, None where there is none."""
    from kubernetes.client.exceptions import ApiException

    def request() -> Any:
        try:
            return api.get_namespaced_custom_object(*_address(deployment), deployment.service, _request_timeout=_REQUEST_S)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    return cast("Object | None", call(deployment, "get", request))


def _address(deployment: Deployment) -> tuple[str, str, str, str]:
    return GROUP, API_VERSION, deployment.namespace, PLURAL


def reachable(action: Callable[[], Any]) -> Any:
    """The action's result; BadInput where the API server cannot be reached at the start of it all."""
    try:
        return action()
    except Unreachable as error:
        raise BadInput(f"Kubernetes: {error}; expected the cluster that KUBECONFIG names") from None


def change(api: Any, deployment: Deployment, edit: Callable[[Object], None], expected: str) -> Object:
    """Read, edit and replace the InferenceService, again where somebody else was quicker; unchanged is not written.

    StageFailed where its model is no longer ``expected`` (the hash that PREDICTOR holds): another promotion took over.
    """
    for _ in range(CONFLICTS):
        live = deployed(api, deployment)
        if live is None:
            raise StageFailed(f"{deployment.service} was deleted meanwhile; start the promotion again")
        if annotation(live, PREDICTOR) != expected:
            raise StageFailed(f"{deployment.service} was changed by another promotion meanwhile; look at it and start again")
        wanted = copy.deepcopy(live)
        edit(wanted)
        if wanted == live:
            return live
        wanted.pop("status", None)
        body = wanted

        def request(body: Object = body) -> Any:
            return api.replace_namespaced_custom_object(
                *_address(deployment), deployment.service, body, field_validation="Strict", _request_timeout=_REQUEST_S
            )

        try:
            return cast(Object, call(deployment, "update", request))
        except Conflict:
            continue
    raise StageFailed(f"{deployment.service} was changed by others {CONFLICTS} times while it was updated; start again")


def annotation(live: Object, name: str) -> str:
    """An annotation of the object, "" where it has none."""
    return str((live["metadata"].get("annotations") or {}).get(name, ""))


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


def roll_out(api: Any, deployment: Deployment, manifest: Object, say: Say) -> Rollout:
    """Bring all traffic to the manifest's predictor step by step, or back to where it was.

    The first deployment has nothing to be compared with and takes all traffic once it is ready, as does the one after a
    version that is not ready. BadInput where the mode differs or another version's rollout is under way; StageFailed where
    the way back did not work either.
    """
    live = reachable(lambda: deployed(api, deployment))
    spec = manifest["spec"]["predictor"]
    wanted = hash_of(spec)
    if live is None:
        try:
            reachable(lambda: call(deployment, "create", lambda: _create(api, deployment, manifest)))
        except Conflict:
            raise StageFailed(f"{deployment.service} was created by another promotion meanwhile; start again") from None
        say(f"created {deployment.service}, waiting until it is ready")
        return _settled(api, deployment, "deployed", "the first version, so there was no canary")
    check_mode(live, deployment)
    percent, own = canary_percent(live, deployment.mode), _is_rolling_out(live, deployment, spec)
    if percent is None and annotation(live, PREDICTOR) == wanted:
        return _settled(api, deployment, "unchanged", "this version already has all traffic")
    served = reachable(lambda: _served(api, deployment, live))
    if served is None:
        left = annotation(live, VERSION)
        say(f"version {left} is not ready: this one takes all traffic once it is")
        reachable(lambda: _replace(api, deployment, manifest, live))
        return _settled(api, deployment, "deployed", f"version {left} is not ready, so there was no canary")
    if percent == 0 and deployment.mode == "Knative":
        raise BadInput(f"{deployment.service}: a rollback is not finished; finish it with routewright rollback")
    if percent is not None and not own:
        raise BadInput(f"{deployment.service}: another version is being rolled out; finish it or take it back first")
    steps: list[Step] = []
    champion = _stable_revision(served, deployment)
    try:
        for share in deployment.canary.steps:
            if percent is not None and share < percent:
                continue
            expected = annotation(deployed(api, deployment) or live, PREDICTOR)
            change(api, deployment, _step_edit(deployment, manifest, share), expected)
            say(f"{share} % of the traffic: waiting until it is ready")
            now = wait(api, deployment, lambda found, share=share: _step_pending(found, deployment, spec, share))  # type: ignore[misc]
            steps.append(_watch(api, deployment, spec, share, now, champion, steps, say))
        change(api, deployment, _final_edit(deployment, manifest), annotation(deployed(api, deployment) or live, PREDICTOR))
        wait(api, deployment, _pending)
    except (NotReady, _Worse) as stopped:
        say(f"taking it back: {stopped}")
        restore(api, deployment, say)
        return Rollout("aborted", str(stopped), isinstance(stopped, _Worse), steps)
    except Unreachable as error:
        raise StageFailed(f"{error}; the rollout stands at its last step, start it again to go on") from None
    return Rollout("rolled-out", f"all steps passed: {', '.join(f'{step.percent} %' for step in steps)}", False, steps)


class _Worse(Exception):
    """A metric of the candidate is worse than allowed."""


def _create(api: Any, deployment: Deployment, manifest: Object) -> Any:
    # Strict: an unknown field is refused by name, which the server would otherwise drop without a word.
    return api.create_namespaced_custom_object(
        *_address(deployment), manifest, field_validation="Strict", _request_timeout=_REQUEST_S
    )


def _settled(api: Any, deployment: Deployment, outcome: Literal["deployed", "unchanged"], reason: str) -> Rollout:
    try:
        wait(api, deployment, _pending)
    except NotReady as error:
        return Rollout("aborted", f"{error}; there is no earlier version to go back to")
    except Unreachable as error:
        raise StageFailed(f"{error}; start the promotion again to go on") from None
    return Rollout(outcome, reason)


def _served(api: Any, deployment: Deployment, live: Object) -> Object | None:
    """The object once it serves; None where no version of it ever did, or in Standard mode does within ``ready_s``.

    Nothing can be compared with such a version, and as long as it is not ready, no canary step would come to an end.
    """
    if deployment.mode == "Knative" and _component(live).get("latestRolledoutRevision"):
        return live
    if deployment.mode == "Standard" and canary_percent(live, "Standard") is not None:
        return live
    try:
        # Also one that only restarts is not ready for a while.
        return wait(api, deployment, _pending)
    except NotReady:
        return None


def _replace(api: Any, deployment: Deployment, manifest: Object, live: Object) -> None:
    """Put the manifest's predictor in place of the live one, with no way back in the object: the registry has one."""
    marks, left = _own_marks(manifest), annotation(live, VERSION)
    change(api, deployment, lambda found: _put(found, marks, {ROLLED_BACK: left}), annotation(live, PREDICTOR))


def _is_rolling_out(live: Object, deployment: Deployment, spec: Object) -> bool:
    if deployment.mode == "Knative":
        return annotation(live, PREDICTOR) == hash_of(spec)
    return bool(_canary_of(live).get("name") == spec["name"])


def _canary_of(live: Object) -> Object:
    """The predictor of the canary in Standard mode; empty where there is none."""
    return (live["spec"].get("canary") or [{}])[0].get("predictor") or {}


def _stable_revision(live: Object, deployment: Deployment) -> str:
    """What serves the champion: its Knative revision, or in Standard mode its service."""
    if deployment.mode == "Standard":
        return _service_name(deployment, live["spec"]["predictor"].get("name"))
    found = _component(live)
    traffic = [t for t in found.get("traffic") or [] if not t.get("latestRevision") and t.get("percent")]
    if canary_percent(live, "Knative") is not None and traffic:
        return str(traffic[0].get("revisionName", ""))
    return str(found.get("latestReadyRevision", ""))


def _service_name(deployment: Deployment, name: str | None) -> str:
    return "-".join([deployment.service, *([name] if name else []), "predictor"])


def _candidate_revision(live: Object, deployment: Deployment, spec: Object) -> str:
    if deployment.mode == "Standard":
        return _service_name(deployment, spec.get("name"))
    return str(_component(live).get("latestReadyRevision", ""))


def _component(live: Object) -> Object:
    return cast(Object, ((live.get("status") or {}).get("components") or {}).get("predictor") or {})


def _own_marks(live: Object) -> Object:
    """What a rollback needs of an object: predictor, and the labels and annotations that belong to it."""
    predictor = {name: value for name, value in live["spec"]["predictor"].items() if name != "canaryTrafficPercent"}
    metadata = live["metadata"]
    kept = {
        kind: {name: value for name, value in (metadata.get(kind) or {}).items() if name in _OWN}
        for kind in ("labels", "annotations")
    }
    return {"predictor": predictor, **kept}


def _put(found: Object, marks: Object, more: dict[str, str]) -> None:
    """Give the object that predictor and its marks; ``more`` are annotations beside them."""
    found["spec"]["predictor"] = copy.deepcopy(marks["predictor"])
    for kind in ("labels", "annotations"):
        others = {n: v for n, v in (found["metadata"].get(kind) or {}).items() if n not in (*_OWN, PREVIOUS, ROLLED_BACK)}
        found["metadata"][kind] = {**others, **marks[kind]}
    found["metadata"]["annotations"] |= more


def _step_edit(deployment: Deployment, manifest: Object, share: int) -> Callable[[Object], None]:
    wanted = _own_marks(manifest)

    def knative(found: Object) -> None:
        if annotation(found, PREDICTOR) != wanted["annotations"][PREDICTOR]:
            # Written once, with the predictor: every other change of an annotation would make one more revision.
            _put(found, wanted, {PREVIOUS: json.dumps(_own_marks(found), sort_keys=True)})
        found["spec"]["predictor"]["canaryTrafficPercent"] = share

    def standard(found: Object) -> None:
        found["spec"]["canary"] = [standard_canary(manifest["spec"]["predictor"], share)]

    return knative if deployment.mode == "Knative" else standard


def _final_edit(deployment: Deployment, manifest: Object) -> Callable[[Object], None]:
    wanted = _own_marks(manifest)

    def knative(found: Object) -> None:
        found["spec"]["predictor"].pop("canaryTrafficPercent", None)

    def standard(found: Object) -> None:
        # Naming the canary's predictor promotes its pods as they are.
        _put(found, wanted, {PREVIOUS: json.dumps(_own_marks(found), sort_keys=True)})
        found["spec"].pop("canary", None)

    return knative if deployment.mode == "Knative" else standard


def _unseen(found: Object) -> str:
    seen = int((found.get("status") or {}).get("observedGeneration") or 0)
    return "the controller has not seen the change" if seen < int(found["metadata"].get("generation") or 0) else ""


def _pending(found: Object) -> str:
    """Why the object is not what was asked for yet; empty where it is. NotReady where it never will be."""
    if unseen := _unseen(found):
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


def _step_pending(found: Object, deployment: Deployment, spec: Object, share: int) -> str:
    pending = _pending(found)
    if pending:
        return pending
    if deployment.mode == "Standard":
        return _canary_pending(found, deployment, spec, share)
    component = _component(found)
    if component.get("latestReadyRevision") != component.get("latestCreatedRevision"):
        return f"revision {component.get('latestCreatedRevision')} is not ready"
    latest = component.get("latestReadyRevision")
    given = sum(
        int(t.get("percent") or 0)
        for t in component.get("traffic") or []
        if t.get("revisionName") == latest or t.get("latestRevision")
    )
    return "" if given == share else f"revision {latest} has {given} % of the traffic"


def _canary_pending(found: Object, deployment: Deployment, spec: Object, share: int) -> str:
    names = {spec["name"], _service_name(deployment, spec["name"])}
    canary = next((c for c in found["status"].get("canaryStatuses") or [] if c["name"] in names), None)
    if canary is None or not canary["ready"]:
        return "the canary is not ready"
    return "" if canary["trafficPercent"] == share else f"the canary has {canary['trafficPercent']} % of the traffic"


def wait(api: Any, deployment: Deployment, pending: Callable[[Object], str]) -> Object:
    """The object once ``pending`` finds nothing; NotReady after ``canary.ready_s``, Unreachable if nobody answered then."""
    deadline = time.monotonic() + deployment.canary.ready_s
    while True:
        unreachable, why = None, ""
        try:
            found = deployed(api, deployment)
            if found is None:
                raise StageFailed(f"{deployment.service} was deleted meanwhile; start the promotion again")
            why = pending(found)
            if not why:
                return found
        except Unreachable as error:
            unreachable = error
        if time.monotonic() >= deadline:
            if unreachable is not None:
                raise unreachable
            raise NotReady(f"{why} after {deployment.canary.ready_s:g} s")
        time.sleep(deployment.canary.poll_s)


def _watch(
    api: Any,
    deployment: Deployment,
    spec: Object,
    share: int,
    now: Object,
    champion: str,
    earlier: list[Step],
    say: Say,
) -> Step:
    """Hold a step for its time; _Worse as soon as a metric is, NotReady where it or the metrics are gone for too long."""
    canary = deployment.canary
    candidate = _candidate_revision(now, deployment, spec)
    read = _readable(canary, share, lambda: reader(canary, candidate, champion))
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        own = other = None
        if read is not None:
            own, other = _readable(canary, share, lambda: read(time.monotonic() - started))
            # With all traffic on the candidate, the champion's last numbers are those of the step before.
            known = [step.champion for step in earlier if step.champion is not None and step.champion.requests]
            if not other.requests and known:
                other = known[-1]
            worse = complaint(canary, own, other)
            if worse:
                raise _Worse(f"at {share} %: {worse}")
        if waited >= canary.hold_s:
            break
        time.sleep(min(canary.poll_s, max(0.0, canary.hold_s - waited)))
    wait(api, deployment, lambda found: _step_pending(found, deployment, spec, share))
    if own is not None and own.requests < canary.min_requests:
        raise _Worse(f"at {share} %: {own.requests:.0f} requests in {canary.hold_s:g} s, expected {canary.min_requests}")
    shown = "ready" if own is None else f"{own.requests:.0f} requests, error rate {own.error_rate:.1%}"
    say(f"{share} % of the traffic: {shown}")
    return Step(share, own, other)


def _readable(canary: Canary, share: int, read: Callable[[], T]) -> T:
    """What ``read`` returns, at the latest at its last try; NotReady where the metrics cannot be read then either."""
    for attempt in range(READS):
        try:
            return read()
        except StageFailed as error:
            why = str(error)
        if attempt + 1 < READS:
            time.sleep(canary.poll_s)
    raise NotReady(f"at {share} %: the metrics could not be read {READS} times in a row: {why}")


def restore(api: Any, deployment: Deployment, say: Say) -> str:
    """Give all traffic back to the previous version and return its version, "" where nothing was to be done.

    Takes back a rollout that is under way, else the last one. BadInput where there is no way back; StageFailed where the
    previous version did not become ready (traffic then stays where it is).
    """
    with _finished_by_the_next(deployment):
        live = deployed(api, deployment)
        if live is None:
            raise BadInput(f"{deployment.service}: not deployed in namespace {deployment.namespace}, nothing to roll back")
        check_mode(live, deployment)
        return (_restore_knative if deployment.mode == "Knative" else _restore_standard)(api, deployment, live, say)


def redeploy(api: Any, deployment: Deployment, manifest: Object) -> None:
    """Give all traffic to the manifest's predictor, without steps, once it is ready; until then it stays where it is.

    The way back where the object has none: what an aborted rollout left in Knative mode says only which version had all
    traffic before that one, what took the place of a version that was not ready says nothing. StageFailed where the
    predictor does not become ready.
    """
    with _finished_by_the_next(deployment):
        live = deployed(api, deployment)
        if live is None:
            raise StageFailed(f"{deployment.service} was deleted meanwhile; start the promotion again")
        if deployment.mode == "Standard":
            _bring_back(api, deployment, live, _own_marks(manifest))
        else:
            _replace(api, deployment, manifest, live)
            wait(api, deployment, _latest_not_ready)


@contextmanager
def _finished_by_the_next(deployment: Deployment) -> Iterator[None]:
    """StageFailed where the new state does not come, or nobody answers; both are finished by the same command again."""
    try:
        yield
    except NotReady as error:
        raise StageFailed(
            f"the rollback of {deployment.service} is not finished: {error}; start it again to go on"
        ) from None
    except Unreachable as error:
        raise StageFailed(f"Kubernetes: {error}; start the rollback again to go on") from None


def _no_way_back(live: Object, deployment: Deployment) -> None:
    if not annotation(live, ROLLED_BACK):
        raise BadInput(f"{deployment.service}: it has no previous version to go back to")


def _restore_knative(api: Any, deployment: Deployment, live: Object, say: Say) -> str:
    percent = canary_percent(live, "Knative")
    if not annotation(live, PREVIOUS):
        _no_way_back(live, deployment)
        if percent is None:
            wait(api, deployment, _latest_not_ready)
            return ""
    else:
        marks = json.loads(annotation(live, PREVIOUS))
        current, version = annotation(live, PREDICTOR), annotation(live, VERSION)
        # Traffic first: 0 % points it at the last revision that had all of it, which is still there.
        change(api, deployment, lambda found: found["spec"]["predictor"].update(canaryTrafficPercent=0), current)
        wait(api, deployment, _latest_has_traffic)
        say("traffic is back at the previous revision")

        def put_back(found: Object) -> None:
            _put(found, marks, {ROLLED_BACK: version})
            # Still at 0 %: without it the newest ready revision, the one to be left, would get all traffic again.
            found["spec"]["predictor"]["canaryTrafficPercent"] = 0

        live = change(api, deployment, put_back, current)
    wait(api, deployment, _latest_not_ready)
    current = annotation(live, PREDICTOR)
    change(api, deployment, lambda found: found["spec"]["predictor"].pop("canaryTrafficPercent", None), current)
    wait(api, deployment, _pending)
    return annotation(live, VERSION)


def _latest_has_traffic(found: Object) -> str:
    """Whether the newest revision still gets traffic; it need not be ready, that may be why it is taken back."""
    if unseen := _unseen(found):
        return unseen
    component = _component(found)
    latest = {component.get("latestReadyRevision"), component.get("latestCreatedRevision")}
    traffic = [t for t in component.get("traffic") or [] if int(t.get("percent") or 0) > 0]
    if component.get("latestCreatedRevision") != component.get("latestReadyRevision"):
        latest = {component.get("latestCreatedRevision")}
    still = [t for t in traffic if t.get("revisionName") in latest]
    return f"revision {still[0].get('revisionName')} still has {still[0]['percent']} % of the traffic" if still else ""


def _latest_not_ready(found: Object) -> str:
    component = _component(found)
    pending = _pending(found)
    if pending or component.get("latestReadyRevision") == component.get("latestCreatedRevision"):
        return pending
    return f"revision {component.get('latestCreatedRevision')} is not ready"


def _restore_standard(api: Any, deployment: Deployment, live: Object, say: Say) -> str:
    canary = _canary_of(live)
    # By the mark of a rollback: a rollout may also be of the previous predictor.
    if canary and ROLLED_BACK not in (canary.get("annotations") or {}):
        change(api, deployment, lambda found: found["spec"].pop("canary", None), annotation(live, PREDICTOR))
        wait(api, deployment, _pending)
        return annotation(live, VERSION)
    if not annotation(live, PREVIOUS):
        _no_way_back(live, deployment)
        return ""
    live = _bring_back(api, deployment, live, json.loads(annotation(live, PREVIOUS)))
    say("traffic is back at the previous version")
    return annotation(live, VERSION)


def _bring_back(api: Any, deployment: Deployment, live: Object, marks: Object) -> Object:
    """The object of Standard mode with an earlier predictor in its place again."""
    current, version = annotation(live, PREDICTOR), annotation(live, VERSION)
    # The old pods are gone: they start beside the new ones and take over once they are ready.
    spec = {
        **marks["predictor"],
        "name": marks["predictor"].get("name") or "previous",
        "annotations": {**(marks["predictor"].get("annotations") or {}), ROLLED_BACK: version},
    }
    change(api, deployment, lambda found: found["spec"].update(canary=[standard_canary(spec, 100)]), current)
    # The version that is left need not be ready, that may be why it is left.
    wait(api, deployment, lambda found: _unseen(found) or _canary_pending(found, deployment, spec, 100))

    def put_back(found: Object) -> None:
        _put(found, {**marks, "predictor": spec}, {ROLLED_BACK: version})
        found["spec"].pop("canary", None)

    change(api, deployment, put_back, current)
    return wait(api, deployment, _pending)
