"""Preflight of what a pipeline talks to: the tracking server, the object store, and the registry of its image."""

from __future__ import annotations

import base64
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path

import httpx

from components.image import BUILD_IT, is_placeholder
from pipelines.check import REQUEST_S, Finding
from routewright.errors import BadInput

TRACKING = "MLFLOW_TRACKING_URI"
_MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1", "oci.image.manifest.v1", "docker.distribution.manifest.list.v2",
        "docker.distribution.manifest.v2",
    )
)  # fmt: skip


def check_mlflow(uri: str | None) -> Finding:
    """The tracking server answers a search, with the credentials of the environment."""
    what = "MLflow"
    if not uri:
        return Finding(what, None, "not checked, no address", f"name it with --mlflow, or {TRACKING} in the placement's env")
    if not uri.startswith(("http://", "https://")):
        return Finding(what, False, f"{uri.partition(':')[0]} is no server", f"set {TRACKING} to an http(s) URL")
    user, token = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_TOKEN")
    auth = (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None
    headers = {"Authorization": f"Bearer {token}"} if token and not user else {}
    try:
        answer = httpx.get(
            f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search", params={"max_results": 1}, auth=auth, headers=headers,
            timeout=REQUEST_S,
        )  # fmt: skip
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Finding(what, False, f"{shown(uri)} does not answer ({type(error).__name__})",
                       "from outside the cluster: kubectl port-forward, and --mlflow with that address")  # fmt: skip
    if answer.status_code in (401, 403):
        return Finding(what, False, f"{shown(uri)} does not take the credentials ({answer.status_code})",
                       "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN")  # fmt: skip
    if answer.status_code != 200:
        return Finding(what, False, f"{shown(uri)} answers {answer.status_code}", "look into the server's log")
    return Finding(what, True, f"{shown(uri)} answers")


def shown(uri: str) -> str:
    """A URL without the password that it may hold."""
    return re.sub(r"//[^/@]*@", "//", uri)


def check_store(address: str | None) -> Finding:
    """The bucket takes an object and lets go of it; credentials are boto3's, the endpoint AWS_ENDPOINT_URL."""
    if address is None:
        return Finding("object store", None, "not checked, no address", "name it with --store s3://bucket/prefix")
    found = re.fullmatch(r"s3://([^/]+)/?(.*)", address)
    if found is None:
        raise BadInput(f"--store {address}: expected s3://bucket or s3://bucket/prefix")
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    what, bucket = f"object store {address}", found[1]
    key = "/".join(filter(None, (found[2].strip("/"), f"routewright-check-{uuid.uuid4().hex}")))
    config = Config(connect_timeout=REQUEST_S, read_timeout=REQUEST_S, retries={"max_attempts": 1})
    verb = "reach"
    try:
        s3 = boto3.client("s3", config=config)
        verb = "read"
        s3.head_bucket(Bucket=bucket)
        verb = "write to"
        s3.put_object(Bucket=bucket, Key=key, Body=b"routewright check")
        verb = "delete from"
        s3.delete_object(Bucket=bucket, Key=key)
    except ClientError as error:
        code = error.response["Error"]["Code"]
        mend = "allow these credentials s3:PutObject and s3:DeleteObject there" if verb != "read" else (
            f"create the bucket: aws s3 mb s3://{bucket}" if code in ("404", "NoSuchBucket") else
            "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL")  # fmt: skip
        return Finding(what, False, f"cannot {verb} it ({code})", mend)
    except (BotoCoreError, ValueError) as error:
        return Finding(what, False, f"cannot {verb} it ({type(error).__name__})",
                       "check AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")  # fmt: skip
    return Finding(what, True, "an object was written and deleted")


def check_image(image: str) -> Finding:
    """The registry has the image's manifest; credentials are those of docker login."""
    what = f"image {image}"
    name, _, digest = image.partition("@")
    if is_placeholder(image):
        return Finding(what, False, "is a placeholder", BUILD_IT)
    registry, repository = registry_of(re.sub(r":[^:/]+$", "", name))
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    try:
        with httpx.Client(timeout=REQUEST_S, follow_redirects=True) as http:
            url, headers = f"{scheme}://{registry}/v2/{repository}/manifests/{digest}", {"Accept": _MANIFESTS}
            answer = http.head(url, headers=headers)
            if answer.status_code == 401:
                permit = permit_of(http, answer.headers.get("WWW-Authenticate", ""), login(registry))
                answer = http.head(url, headers={**headers, **permit})
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return Finding(what, False, f"{registry} does not answer ({type(error).__name__})", "check the registry's name")
    if answer.status_code in (401, 403):
        return Finding(what, False, f"{registry} does not let this account pull it ({answer.status_code})",
                       f"docker login {registry} here, and image_pull_secrets in the placement")  # fmt: skip
    if answer.status_code == 404:
        return Finding(what, False, f"{registry} has no such image", "push it, set ROUTEWRIGHT_IMAGE to name@digest")
    if answer.status_code != 200:
        return Finding(what, False, f"{registry} answers {answer.status_code}", "try again later")
    return Finding(what, True, "can be pulled from here")


def registry_of(name: str) -> tuple[str, str]:
    """Registry and repository of an image's name, as docker reads it."""
    first, slash, rest = name.partition("/")
    if slash and (first == "localhost" or re.search(r"[.:]", first)):
        return ("registry-1.docker.io" if first == "docker.io" else first), rest
    return "registry-1.docker.io", name if slash else f"library/{name}"


def login(registry: str) -> dict[str, str]:
    """The Authorization header that docker login stored for a registry, or nothing."""
    file = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    name = "https://index.docker.io/v1/" if registry == "registry-1.docker.io" else registry
    stored = json.loads(file.read_text()).get("auths", {}).get(name, {}).get("auth") if file.is_file() else None
    return {"Authorization": f"Basic {base64.b64encode(base64.b64decode(stored)).decode()}"} if stored else {}


def permit_of(http: httpx.Client, challenge: str, credentials: Mapping[str, str]) -> dict[str, str]:
    """What a registry wants beside the request: a token from the service that it names, or the credentials."""
    asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    if not challenge.lower().startswith("bearer ") or "realm" not in asked:
        return dict(credentials)
    given = http.get(asked["realm"], params={k: asked[k] for k in ("service", "scope") if k in asked}, headers=credentials)
    answer = given.json() if given.status_code == 200 else {}
    token = answer.get("token") or answer.get("access_token")
    return {"Authorization": f"Bearer {token}"} if token else {}
