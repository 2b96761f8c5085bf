"""The way back of an InferenceService, in both modes; a rollback that was killed is finished by starting it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from routewright.errors import BadInput, StageFailed
from serving.promotion.deployment import Deployment
from serving.promotion.inference_service import PREVIOUS, ROLLED_BACK, VERSION, standard_canary
from serving.promotion.kserve_api import NotReady, Object, Unreachable, annotation, change, deployed, wait
from serving.promotion.live import (
    canary_of,
    canary_percent,
    check_mode,
    component_of,
    own_marks,
    put_predictor,
    why_canary_waits,
    why_not_ready,
    why_unseen,
)

Say = Callable[[str], None]


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
        return _restore_from(api, deployment, live, say)


def take_back(api: Any, deployment: Deployment, last: Object, say: Say) -> None:
    """`restore` of the rollout that left the object as ``last``; StageFailed where someone else was quicker."""
    with _finished_by_the_next(deployment):
        _restore_from(api, deployment, last, say)


def _restore_from(api: Any, deployment: Deployment, live: Object, say: Say) -> str:
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
            _bring_back(api, deployment, live, own_marks(manifest))
        else:
            wait(api, deployment, _latest_not_ready, replace_predictor(api, deployment, manifest, live))


def replace_predictor(api: Any, deployment: Deployment, manifest: Object, live: Object) -> Object:
    """Put the manifest's predictor in place of the live one, with no way back in the object: the registry has one."""
    marks, left = own_marks(manifest), annotation(live, VERSION)
    return change(api, deployment, lambda found: put_predictor(found, marks, {ROLLED_BACK: left}), live)


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
            wait(api, deployment, _latest_not_ready, live)
            return ""
    else:
        marks, version = json.loads(annotation(live, PREVIOUS)), annotation(live, VERSION)
        # Traffic first: 0 % points it at the last revision that had all of it, which is still there.
        live = change(api, deployment, lambda found: found["spec"]["predictor"].update(canaryTrafficPercent=0), live)
        wait(api, deployment, _latest_has_traffic, live)
        say("traffic is back at the previous revision")

        def put_back(found: Object) -> None:
            put_predictor(found, marks, {ROLLED_BACK: version})
            # Still at 0 %: without it the newest ready revision, the one to be left, would get all traffic again.
            found["spec"]["predictor"]["canaryTrafficPercent"] = 0

        live = change(api, deployment, put_back, live)
    wait(api, deployment, _latest_not_ready, live)
    live = change(api, deployment, lambda found: found["spec"]["predictor"].pop("canaryTrafficPercent", None), live)
    wait(api, deployment, why_not_ready, live)
    return annotation(live, VERSION)


def _latest_has_traffic(found: Object) -> str:
    """Whether the newest revision still gets traffic; it need not be ready, that may be why it is taken back."""
    if unseen := why_unseen(found):
        return unseen
    component = component_of(found)
    latest = {component.get("latestReadyRevision"), component.get("latestCreatedRevision")}
    traffic = [t for t in component.get("traffic") or [] if int(t.get("percent") or 0) > 0]
    if component.get("latestCreatedRevision") != component.get("latestReadyRevision"):
        latest = {component.get("latestCreatedRevision")}
    still = [t for t in traffic if t.get("revisionName") in latest]
    return f"revision {still[0].get('revisionName')} still has {still[0]['percent']} % of the traffic" if still else ""


def _latest_not_ready(found: Object) -> str:
    component = component_of(found)
    pending = why_not_ready(found)
    if pending or component.get("latestReadyRevision") == component.get("latestCreatedRevision"):
        return pending
    return f"revision {component.get('latestCreatedRevision')} is not ready"


def _restore_standard(api: Any, deployment: Deployment, live: Object, say: Say) -> str:
    canary = canary_of(live)
    # By the mark of a rollback: a rollout may also be of the previous predictor.
    if canary and ROLLED_BACK not in (canary.get("annotations") or {}):
        live = change(api, deployment, lambda found: found["spec"].pop("canary", None), live)
        wait(api, deployment, why_not_ready, live)
        return annotation(live, VERSION)
    if not annotation(live, PREVIOUS):
        _no_way_back(live, deployment)
        return ""
    live = _bring_back(api, deployment, live, json.loads(annotation(live, PREVIOUS)))
    say("traffic is back at the previous version")
    return annotation(live, VERSION)


def _bring_back(api: Any, deployment: Deployment, live: Object, marks: Object) -> Object:
    """The object of Standard mode with an earlier predictor in its place again."""
    version = annotation(live, VERSION)
    # The old pods are gone: they start beside the new ones and take over once they are ready.
    spec = {
        **marks["predictor"],
        "name": marks["predictor"].get("name") or "previous",
        "annotations": {**(marks["predictor"].get("annotations") or {}), ROLLED_BACK: version},
    }
    live = change(api, deployment, lambda found: found["spec"].update(canary=[standard_canary(spec, 100)]), live)
    # The version that is left need not be ready, that may be why it is left.
    wait(api, deployment, lambda found: why_unseen(found) or why_canary_waits(found, deployment, spec, 100), live)

    def put_back(found: Object) -> None:
        put_predictor(found, {**marks, "predictor": spec}, {ROLLED_BACK: version})
        found["spec"].pop("canary", None)

    live = change(api, deployment, put_back, live)
    return wait(api, deployment, why_not_ready, live)
