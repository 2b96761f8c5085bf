"""The InferenceService in the cluster's API: read, create, change, wait."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from routewright.errors import BadInput, StageFailed
from serving.promotion.deployment import Deployment
from serving.promotion.inference_service import PREDICTOR

GROUP, API_VERSION, PLURAL = "serving.kserve.io", "v1beta1", "inferenceservices"
CONFLICTS = 5  # tries to change an object that others change too
_REQUEST_S = 15

Object = dict[str, Any]


class NotReady(Exception):
    """A step did not come to what was asked for; the message says why."""


class Unreachable(Exception):
    """The API server did not answer, or with 429 or 5xx; it may later."""


class Conflict(Exception):
    """Somebody else changed the object."""


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


def _address(deployment: Deployment) -> tuple[str, str, str, str]:
    return GROUP, API_VERSION, deployment.namespace, PLURAL


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


def reachable(action: Callable[[], Any]) -> Any:
    """The action's result; BadInput where the API server cannot be reached at the start of it all."""
    try:
        return action()
    except Unreachable as error:
        raise BadInput(f"Kubernetes: {error}; expected the cluster that KUBECONFIG names") from None


def create(api: Any, deployment: Deployment, manifest: Object) -> Any:
    # Strict: an unknown field is refused by name, which the server would otherwise drop without a word.
    return api.create_namespaced_custom_object(
        *_address(deployment), manifest, field_validation="Strict", _request_timeout=_REQUEST_S
    )


def change(api: Any, deployment: Deployment, edit: Callable[[Object], None], last: Object) -> Object:
    """Read, edit and replace the InferenceService, again where somebody else was quicker; unchanged is not written.

    StageFailed where its predictor or canary is no longer that of ``last``, the object as it was left or found before.
    """
    for _ in range(CONFLICTS):
        live = _undisturbed(api, deployment, last)
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


def _undisturbed(api: Any, deployment: Deployment, last: Object) -> Object:
    """The object as it is now; StageFailed where someone else took the rollout back, or moved it on, since ``last``."""
    live = deployed(api, deployment)
    if live is None:
        raise StageFailed(f"{deployment.service} was deleted meanwhile; start the promotion again")
    if _rollout_of(live) != _rollout_of(last):
        raise StageFailed(
            f"{deployment.service} was rolled back or out by someone else meanwhile; traffic and aliases stay as they are"
        )
    return live


def _rollout_of(live: Object) -> tuple[Any, ...]:
    """The predictor that was asked for, and the canary's predictor and share, in whichever mode."""
    spec = live["spec"]
    canaries = [(canary["predictor"].get("name"), canary.get("trafficPercent")) for canary in spec.get("canary") or []]
    return annotation(live, PREDICTOR), spec["predictor"].get("canaryTrafficPercent"), canaries


def wait(api: Any, deployment: Deployment, pending: Callable[[Object], str], last: Object) -> Object:
    """The object once ``pending`` finds nothing; NotReady after ``canary.ready_s``, Unreachable if nobody answered then.

    StageFailed as `change` has it.
    """
    deadline = time.monotonic() + deployment.canary.ready_s
    while True:
        unreachable, why = None, ""
        try:
            found = _undisturbed(api, deployment, last)
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


def annotation(live: Object, name: str) -> str:
    """An annotation of the object, "" where it has none."""
    return str((live["metadata"].get("annotations") or {}).get(name, ""))
