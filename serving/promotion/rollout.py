"""The canary steps of an InferenceService, and their abort.

What is to be done next is read off the cluster each time, so a killed rollout is finished by starting it again, and one
that is finished changes nothing. The way back is written into the object itself, before any traffic moves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from routewright.errors import BadInput, StageFailed
from serving.promotion.deployment import Canary, Deployment
from serving.promotion.inference_service import PREDICTOR, PREVIOUS, VERSION, hash_of, standard_canary
from serving.promotion.kserve_api import (
    Conflict,
    NotReady,
    Object,
    Unreachable,
    annotation,
    call,
    change,
    create,
    deployed,
    reachable,
    wait,
)
from serving.promotion.live import (
    canary_percent,
    candidate_revision,
    check_mode,
    component_of,
    is_rolling_out,
    own_marks,
    put_predictor,
    stable_revision,
    why_not_ready,
    why_step_waits,
)
from serving.promotion.rollback import Say, replace_predictor, take_back
from serving.promotion.traffic import Load, complaint, reader

READS = 12  # tries to read metrics, poll_s apart: Prometheus needs up to a minute to restart

T = TypeVar("T")


class _Worse(Exception):
    """A metric of the candidate is worse than allowed."""


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


def roll_out(api: Any, deployment: Deployment, manifest: Object, say: Say) -> Rollout:
    """Bring all traffic to the manifest's predictor step by step, or back to where it was.

    The first deployment has nothing to be compared with and takes all traffic once it is ready, as does the one after a
    version that is not ready. BadInput where the mode differs or another version's rollout is under way; StageFailed where
    the way back did not work either, or someone else took the rollout back meanwhile: then nothing more is touched.
    """
    live = reachable(lambda: deployed(api, deployment))
    spec = manifest["spec"]["predictor"]
    wanted = hash_of(spec)
    if live is None:
        try:
            made = reachable(lambda: call(deployment, "create", lambda: create(api, deployment, manifest)))
        except Conflict:
            raise StageFailed(f"{deployment.service} was created by another promotion meanwhile; start again") from None
        say(f"created {deployment.service}, waiting until it is ready")
        return _settled(api, deployment, made, "deployed", "the first version, so there was no canary")
    check_mode(live, deployment)
    percent, own = canary_percent(live, deployment.mode), is_rolling_out(live, deployment, spec)
    if percent is None and annotation(live, PREDICTOR) == wanted:
        return _settled(api, deployment, live, "unchanged", "this version already has all traffic")
    served = reachable(lambda: _served(api, deployment, live))
    if served is None:
        left = annotation(live, VERSION)
        say(f"version {left} is not ready: this one takes all traffic once it is")
        replaced = reachable(lambda: replace_predictor(api, deployment, manifest, live))
        return _settled(api, deployment, replaced, "deployed", f"version {left} is not ready, so there was no canary")
    if percent == 0 and deployment.mode == "Knative":
        raise BadInput(f"{deployment.service}: a rollback is not finished; finish it with routewright rollback")
    if percent is not None and not own:
        raise BadInput(f"{deployment.service}: another version is being rolled out; finish it or take it back first")
    steps: list[Step] = []
    champion = stable_revision(served, deployment)
    try:
        for share in deployment.canary.steps:
            if percent is not None and share < percent:
                continue
            live = change(api, deployment, _step_edit(deployment, manifest, share), live)
            say(f"{share} % of the traffic: waiting until it is ready")
            now = wait(api, deployment, lambda found, share=share: why_step_waits(found, deployment, spec, share), live)  # type: ignore[misc]
            steps.append(_watch(api, deployment, spec, share, now, champion, steps, say))
        live = change(api, deployment, _final_edit(deployment, manifest), live)
        wait(api, deployment, why_not_ready, live)
    except (NotReady, _Worse) as stopped:
        say(f"taking it back: {stopped}")
        take_back(api, deployment, live, say)
        return Rollout("aborted", str(stopped), isinstance(stopped, _Worse), steps)
    except Unreachable as error:
        raise StageFailed(f"{error}; the rollout stands at its last step, start it again to go on") from None
    return Rollout("rolled-out", f"all steps passed: {', '.join(f'{step.percent} %' for step in steps)}", False, steps)


def _settled(
    api: Any, deployment: Deployment, live: Object, outcome: Literal["deployed", "unchanged"], reason: str
) -> Rollout:
    try:
        wait(api, deployment, why_not_ready, live)
    except NotReady as error:
        return Rollout("aborted", f"{error}; there is no earlier version to go back to")
    except Unreachable as error:
        raise StageFailed(f"{error}; start the promotion again to go on") from None
    return Rollout(outcome, reason)


def _served(api: Any, deployment: Deployment, live: Object) -> Object | None:
    """The object once it serves; None where no version of it ever did, or in Standard mode does within ``ready_s``.

    Nothing can be compared with such a version, and as long as it is not ready, no canary step would come to an end.
    """
    if deployment.mode == "Knative" and component_of(live).get("latestRolledoutRevision"):
        return live
    if deployment.mode == "Standard" and canary_percent(live, "Standard") is not None:
        return live
    try:
        # Also one that only restarts is not ready for a while.
        return wait(api, deployment, why_not_ready, live)
    except NotReady:
        return None


def _step_edit(deployment: Deployment, manifest: Object, share: int) -> Callable[[Object], None]:
    wanted = own_marks(manifest)

    def knative(found: Object) -> None:
        if annotation(found, PREDICTOR) != wanted["annotations"][PREDICTOR]:
            # Written once, with the predictor: every other change of an annotation would make one more revision.
            put_predictor(found, wanted, {PREVIOUS: json.dumps(own_marks(found), sort_keys=True)})
        found["spec"]["predictor"]["canaryTrafficPercent"] = share

    def standard(found: Object) -> None:
        found["spec"]["canary"] = [standard_canary(manifest["spec"]["predictor"], share)]

    return knative if deployment.mode == "Knative" else standard


def _final_edit(deployment: Deployment, manifest: Object) -> Callable[[Object], None]:
    wanted = own_marks(manifest)

    def knative(found: Object) -> None:
        found["spec"]["predictor"].pop("canaryTrafficPercent", None)

    def standard(found: Object) -> None:
        # Naming the canary's predictor promotes its pods as they are.
        put_predictor(found, wanted, {PREVIOUS: json.dumps(own_marks(found), sort_keys=True)})
        found["spec"].pop("canary", None)

    return knative if deployment.mode == "Knative" else standard


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
    candidate = candidate_revision(now, deployment, spec)
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
    wait(api, deployment, lambda found: why_step_waits(found, deployment, spec, share), now)
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
