"""A cluster in the test process, and an MLflow store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import CRD, ApiServer

from routewright import model_registry as registry
from routewright import tracking


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """The API server, with a KUBECONFIG that names it."""
    if not CRD.is_file():
        pytest.skip("../shared/crds is not there: the InferenceService's schema is needed")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig.yaml")))
    yield server
    server.close()


@pytest.fixture
def api(cluster: ApiServer) -> Any:
    from kubernetes import client, config

    # The client library reads KUBECONFIG when it is imported, which another test may have made it do.
    config.load_kube_config(os.environ["KUBECONFIG"])
    return client.CustomObjectsApi()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: that takes seconds."""
    import mlflow

    folder = tmp_path_factory.mktemp("store")
    mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("MLFLOW_RUN_ID", tracking.PARENT):
        monkeypatch.delenv(name, raising=False)
    return registry.registry_client()
