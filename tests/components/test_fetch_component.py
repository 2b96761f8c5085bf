"""The shared fetch-dataset component, as a pod runs it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.fetch_dataset.component import fetch_dataset
from routewright.errors import BadInput
from routewright.step_router.profile import load_step_profile


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("MLFLOW_RUN_ID", "ROUTEWRIGHT_PARENT_RUN", "ROUTEWRIGHT_EVENTS", "ROUTEWRIGHT_WORK", "ROUTEWRIGHT_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def artifact(path: Path) -> SimpleNamespace:
    return SimpleNamespace(path=str(path), metadata={})


def test_the_step_router_s_tasks_are_fetched_and_recorded_as_its_own(work: Path) -> None:
    import mlflow

    dataset = artifact(work / "dataset")
    settings = {"router": "step-router", "environment": "shell", "profile": "smoke"}
    fetch_dataset.python_func(dataset=dataset, log=artifact(work / "log"), **settings)
    assert dataset.metadata["environment"] == "shell"
    splits = json.loads((work / "dataset" / "tasks.json").read_text())["splits"]
    assert dataset.metadata["tasks"] == {split: len(names) for split, names in splits.items()}
    assert {"md5", "digest"} <= set(dataset.metadata)
    client = mlflow.MlflowClient(f"sqlite:///{work}/mlflow.db")
    assert client.get_experiment_by_name("search-router") is None
    experiment = client.get_experiment_by_name("step-router")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"environment": "shell", "profile": "smoke"}
    assert run.data.tags["config_hash"] == load_step_profile("smoke").digest
    assert run.data.tags["md5.dataset"] == dataset.metadata["md5"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"router": "chess-router"}, "router 'chess-router': expected one of search-router, step-router"),
        ({"router": "step-router", "environment": "nowhere", "profile": "smoke"}, "environment 'nowhere': expected"),
        ({"pool": "nowhere.yaml"}, "nowhere.yaml"),
    ],
)
def test_what_cannot_be_fetched(work: Path, settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        fetch_dataset.python_func(dataset=artifact(work / "dataset"), log=artifact(work / "log"), **settings)
    assert sentence in str(caught.value)
