"""The Kubeflow Pipelines endpoint: where it is, who asks, and one sentence for every way in which it refuses."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routewright.errors import BadInput, StageFailed

if TYPE_CHECKING:
    import kfp

HOST, TOKEN, UI = "KF_PIPELINES_ENDPOINT", "KF_PIPELINES_TOKEN", "KF_PIPELINES_UI_ENDPOINT"
# Where the kubelet puts the token for KFP's API into a pod, and what another place is called.
TOKEN_FILE, TOKEN_FILE_NAMED = Path("/var/run/secrets/kubeflow/pipelines/token"), "KF_PIPELINES_SA_TOKEN_PATH"
# The page's server passes the API on, with and without several users, and shows what run_link names.
IN_CLUSTER = "http://ml-pipeline-ui.kubeflow.svc.cluster.local"
REQUEST_S = 15
_RENEW = f"set {TOKEN} to a fresh one (kubectl create token ACCOUNT --audience pipelines.kubeflow.org)"


class Conflict(Exception):
    """The server holds something of that name already (409)."""


class Unreachable(StageFailed):
    """The endpoint does not answer, or with 429 or 5xx; it may later."""


def endpoint(host: str | None) -> str:
    """The URL of KFP's API: as given, from KF_PIPELINES_ENDPOINT, or the service inside a cluster; BadInput without any."""
    found = host or os.environ.get(HOST) or (IN_CLUSTER if token_file().is_file() else None)
    if found is None:
        raise BadInput(
            f"--host: missing, expected the URL of KFP's API (or {HOST}), for example http://127.0.0.1:8080 after "
            "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80"
        )
    if not found.startswith(("http://", "https://")):
        raise BadInput(f"--host {found}: expected a URL that starts with http:// or https://")
    return found.rstrip("/")


def token_file() -> Path:
    """Where a pod finds its token for KFP."""
    return Path(os.environ.get(TOKEN_FILE_NAMED) or TOKEN_FILE)


def connect(url: str) -> kfp.Client:
    """A client of the endpoint, which has answered; the token comes from the environment or the pod's account.

    BadInput where nothing answers, what answers is not KFP, or it does not take the token.
    """
    from kfp import client
    from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials

    # A connection that is refused would be told three times before the sentence that says it.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    token, file = os.environ.get(TOKEN) or None, token_file()
    credentials = ServiceAccountTokenVolumeCredentials(str(file)) if token is None and file.is_file() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        # Made with the namespace "kubeflow", it would first ask for health five times, 5 s apart.
        found = client.Client(url, namespace="-", existing_token=token, credentials=credentials)
    try:
        with refusals(url, "ask for health"):
            health = found.healthzs.healthz_service_get_healthz(_request_timeout=REQUEST_S, _preload_content=False)
    except Unreachable as error:
        raise BadInput(f"{error}; expected KFP's API at --host or {HOST}") from None
    if "json" not in health.headers.get("Content-Type", ""):
        raise BadInput(f"KFP at {url}: answers with a page instead of its API, as a login does: {_RENEW}")
    return found


@contextlib.contextmanager
def refusals(url: str, what: str) -> Iterator[None]:
    """A request inside that fails ends in one sentence: BadInput where a person can mend it, else one of the others here."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        where, said = f"KFP at {url}", message(error)
        if error.status == 401:
            raise BadInput(f"{where}: the token is missing, not accepted or has expired (401): {_RENEW}") from None
        if error.status == 403:
            raise BadInput(f"{where}: this account may not {what} (403{said}): ask for the role in that namespace") from None
        if error.status == 409:
            raise Conflict(f"{where} cannot {what}: it is there already (409{said})") from None
        if error.status in (400, 404):
            raise BadInput(f"{where} refuses to {what} ({error.status}{said})") from None
        if error.status in (0, 429) or error.status >= 500:
            raise Unreachable(f"{where} does not {what} ({error.status} {error.reason}{said})") from None
        raise StageFailed(f"{where} refuses to {what} ({error.status}{said})") from None
    except HTTPError as error:
        cause = getattr(error, "reason", None) or error
        raise Unreachable(f"KFP at {url} does not answer ({type(cause).__name__})") from None


def message(error: Any) -> str:
    """What the server said, as ``: text`` without a token that it may repeat, or nothing."""
    try:
        said = str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return ""
    for secret in secrets():
        said = said.replace(secret, "…")
    return f": {' '.join(said.split())[:300]}"


def secrets() -> list[str]:
    """The tokens that no line may show."""
    file = token_file()
    return [text for text in (os.environ.get(TOKEN), file.read_text().strip() if file.is_file() else "") if text]


def by_name(name: str) -> str:
    """A filter of KFP's lists: the display name is this."""
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})


def run_link(url: str, run: str) -> str:
    """Where KFP's pages show a run."""
    return f"{(os.environ.get(UI) or url).rstrip('/')}/#/runs/details/{run}"
