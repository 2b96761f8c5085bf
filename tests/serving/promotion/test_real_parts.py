"""Register, promote, serve from s3://, canary and roll back with MLflow on PostgreSQL and a real S3 server."""

from __future__ import annotations

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from api_server import ApiServer
from evaluated_run import write_search_run
from promotion_commands import call
from quick_deployment import DEPLOY, QUICK
from real_servers import ACCESS, SECRET, mlflow_server, postgresql, s3_server

from routewright import model_registry as registry
from routewright import tracking
from routewright.client import SearchRouterClient

NAME, BUCKET = "search-router", "mlflow"


def run_with(model: Path, out: Path, second: float) -> Path:
    """A run whose model is that folder with another threshold, hence another digest."""
    write_search_run(out, latency_ms=None)
    shutil.rmtree(out / "model")
    shutil.copytree(model, out / "model")
    file = out / "model" / "router.json"
    described = json.loads(file.read_text()) | {"second": second, "model_version": f"second-{second}"}
    file.write_text(json.dumps(described))
    return out


def download(s3: Any, uri: str, folder: Path) -> Path:
    """What KServe's storage initializer does: everything under an s3:// URI, into a folder."""
    parts = urlsplit(uri)
    prefix = parts.path.strip("/") + "/"
    listed = s3.list_objects_v2(Bucket=parts.netloc, Prefix=prefix)["Contents"]
    for found in listed:
        target = folder / found["Key"].removeprefix(prefix)
        target.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(parts.netloc, found["Key"], str(target))
    return folder


def served_uri(cluster: ApiServer) -> str:
    container = cluster.objects[NAME]["spec"]["predictor"]["containers"][0]
    return next(str(entry["value"]) for entry in container["env"] if entry["name"] == "STORAGE_URI")


def test_from_a_trained_router_to_a_rollback(
    cluster: ApiServer, search_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    from test_serve_command import Server

    from routewright.search_router.router import load_router

    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_RUN_ID", tracking.PARENT):
        monkeypatch.delenv(name, raising=False)
    with postgresql(tmp_path) as database, s3_server(tmp_path) as endpoint:
        for name, value in (
            ("AWS_ACCESS_KEY_ID", ACCESS), ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_DEFAULT_REGION", "us-east-1"),
            ("MLFLOW_S3_ENDPOINT_URL", endpoint), ("AWS_ENDPOINT_URL", endpoint),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        s3 = boto3.client("s3", endpoint_url=endpoint)
        s3.create_bucket(Bucket=BUCKET)
        with mlflow_server(tmp_path, database, f"s3://{BUCKET}/artifacts") as address:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
            deploy = tmp_path / "deploy.yaml"
            deploy.write_text(yaml.safe_dump({**DEPLOY, "canary": QUICK}))
            one = run_with(search_folder, tmp_path / "one", 0.9)
            two = run_with(search_folder, tmp_path / "two", 0.8)
            assert call(monkeypatch, "promote", NAME, "--run", one, "--deploy", deploy) == 0
            first = served_uri(cluster)
            assert first.startswith(f"s3://{BUCKET}/artifacts/")
            assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 0
            client = registry.registry_client()
            assert registry.aliases(client, NAME) == {"champion": "2", "previous": "1"}
            second = served_uri(cluster)
            assert second != first
            shares = [dict(part.rsplit(" ", 1) for part in state).get(second) for state in cluster.history]
            assert shares == [None, "5", "25", "100", "100"]

            folder = download(s3, second, tmp_path / "served")
            digest = cluster.objects[NAME]["metadata"]["annotations"]["routewright/model-digest"]
            assert registry.folder_digest(folder) == digest == registry.folder_digest(two / "model")
            # KServe runs this on the folder that the storage initializer has filled.
            server = Server(NAME, folder)
            with SearchRouterClient(server.url) as asked:
                decision = asked.decide("clean the oven", date(2025, 6, 15))
            assert server.stop() == (0, "stopped\n", "")
            expected = load_router(two / "model").decide("clean the oven", date(2025, 6, 15))
            assert (decision.agents, decision.scores) == (expected.agents, pytest.approx(expected.scores, abs=1e-5))
            assert decision.model_version == "second-0.8"
            assert (folder / "MODEL_CARD.md").read_text().startswith("# Search router second-0.8")

            # A third version whose pods never become ready: the canary is taken back, nothing else has changed.
            three = run_with(search_folder, tmp_path / "three", 0.7)
            with monkeypatch.context() as patched:
                patched.setattr(cluster, "_ready", lambda spec: spec["labels"]["routewright/model-version"] != "3")
                assert call(monkeypatch, "promote", NAME, "--run", three, "--deploy", deploy) == 1
            assert registry.aliases(client, NAME) == {"champion": "2", "previous": "1"}
            assert (served_uri(cluster), cluster.history[-1]) == (second, (f"{second} 100",))
            told = json.loads((three / "promotion" / "decision.json").read_text())
            assert (told["outcome"], told["version"], told["gate"]) == ("aborted", "3", False)

            assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
            assert served_uri(cluster) == first
            assert registry.aliases(client, NAME) == {"champion": "1"}
            assert cluster.history[-1] == (f"{first} 100",)
