"""What check finds of the tracking server, the object store and the registry, on servers of the test."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from stand_in import StandIn, StandInHandler

from pipelines.check_services import check_image, check_mlflow, check_store, registry_of
from routewright.errors import BadInput

sys.path.append(str(Path(__file__).parents[1] / "serving" / "promotion"))
from real_servers import ACCESS, SECRET, s3_server


class Mlflow(StandIn):
    """A tracking server that wants the user ``me`` with the password ``pass``."""

    def __init__(self) -> None:
        class Handler(StandInHandler):
            def do_GET(self) -> None:
                assert self.path == "/api/2.0/mlflow/experiments/search?max_results=1"
                right = "Basic " + base64.b64encode(b"me:pass").decode()
                self.send(*((200, {"experiments": []}) if self.headers["Authorization"] == right else (401, {})))

        super().__init__(Handler)


class Registry(StandIn):
    """A registry whose images want a token, which its token service gives to those who are logged in."""

    def __init__(self) -> None:
        self.images: set[str] = set()
        self.asked: list[str] = []
        server = self
        login = "Basic " + base64.b64encode(b"robot:registry-secret").decode()

        class Handler(StandInHandler):
            def do_HEAD(self) -> None:
                server.asked.append(self.path)
                assert "application/vnd.oci.image.index.v1+json" in self.headers["Accept"]
                if self.headers["Authorization"] != "Bearer pull":
                    challenge = f'Bearer realm="{server.url}/token",service="test",scope="repository:team/train:pull"'
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", challenge)
                else:
                    name, digest = self.path.removeprefix("/v2/").split("/manifests/")
                    self.send_response(200 if f"{name}@{digest}" in server.images else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                assert self.path == "/token?service=test&scope=repository%3Ateam%2Ftrain%3Apull"
                allowed = self.headers["Authorization"] == login
                self.send(*((200, {"token": "pull"}) if allowed else (401, {"errors": []})))

        super().__init__(Handler)


def test_a_tracking_server_that_does_not_take_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Mlflow()
    finding = check_mlflow(server.url.replace("//", "//someone:wrong@"))
    server.close()
    assert (finding.passed, finding.found) == (False, f"{server.url} does not take the credentials (401)")
    assert "wrong" not in str(finding)


DIGEST = "sha256:" + "ab" * 32


def test_an_image_is_asked_for_at_its_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    host = registry.url.removeprefix("http://")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    image = f"{host}/team/train:1.0@{DIGEST}"
    assert check_image(image).found == f"{host} does not let this account pull it (401)"
    login = base64.b64encode(b"robot:registry-secret").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": login}}}))
    assert check_image(image).found == f"{host} has no such image"
    registry.images.add(f"team/train@{DIGEST}")
    assert check_image(image).passed
    assert set(registry.asked) == {f"/v2/team/train/manifests/{DIGEST}"}
    registry.close()
    assert check_image(image).found == f"{host} does not answer (ConnectError)"


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("python", ("registry-1.docker.io", "library/python")),
        ("team/train", ("registry-1.docker.io", "team/train")),
        ("docker.io/team/train", ("registry-1.docker.io", "team/train")),
        ("ghcr.io/team/train", ("ghcr.io", "team/train")),
        ("localhost:5001/train", ("localhost:5001", "train")),
    ],
)
def test_registries_are_read_off_a_name_as_docker_does(name: str, where: tuple[str, str]) -> None:
    assert registry_of(name) == where


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("weed")) as address:
        yield address


def test_a_bucket_that_may_be_written_one_that_may_not_and_none(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", ACCESS), ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", endpoint), ("AWS_EC2_METADATA_DISABLED", "true"), ("NO_PROXY", "127.0.0.1,localhost"),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")), ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    boto3.setup_default_session()
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="runs")
    written = check_store("s3://runs/some/prefix/")
    assert (written.passed, written.found) == (True, "an object was written and deleted")
    assert s3.list_objects_v2(Bucket="runs").get("Contents", []) == []

    deny = {"Effect": "Deny", "Principal": "*", "Action": ["s3:PutObject"], "Resource": ["arn:aws:s3:::runs/*"]}
    s3.put_bucket_policy(Bucket="runs", Policy=json.dumps({"Version": "2012-10-17", "Statement": [deny]}))
    read_only = check_store("s3://runs")
    assert (read_only.passed, read_only.found) == (False, "cannot write to it (AccessDenied)")
    assert read_only.mend == "allow these credentials s3:PutObject and s3:DeleteObject there"

    assert check_store("s3://walks").mend == "create the bucket: aws s3 mb s3://walks"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    boto3.setup_default_session()
    refused = check_store("s3://runs")
    assert not refused.passed
    assert refused.mend.startswith("check AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert check_store("s3://runs").found == "cannot read it (EndpointConnectionError)"


def test_an_address_that_is_no_bucket_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"^--store gs://b: expected s3://bucket"):
        check_store("gs://b")
    assert check_store(None).passed is None


def test_a_tracking_server_that_takes_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "pass")
    server = Mlflow()
    finding = check_mlflow(server.url + "/")
    server.close()
    assert (finding.passed, finding.found) == (True, f"{server.url}/ answers")
