"""The ensemble router's questions through the shared components: files are carried along, families count by version."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kfp import dsl

from components import stage as stage_module
from components.fetch_dataset.component import fetch_dataset
from components.stage import content_of, profile_of, tasks_digest
from components.synthesize.component import synthesize
from routewright.ensemble_router.dataset import load_split
from routewright.ensemble_router.profile import PROFILES, load_ensemble_profile
from routewright.errors import BadInput

pytest.importorskip("reasoning_gym", reason="needs pip install 'routewright[ensemble]'")

ROUTER = "ensemble-router"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("MLFLOW_RUN_ID", "ROUTEWRIGHT_PARENT_RUN", "ROUTEWRIGHT_EVENTS", "ROUTEWRIGHT_WORK", "ROUTEWRIGHT_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def artifact(path: Path, **metadata: Any) -> SimpleNamespace:
    return SimpleNamespace(path=str(path), metadata=metadata)


def write_profile(folder: Path, count: int = 40) -> Path:
    """A profile of one family and one file of sums, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(count)]
    with gzip.open(folder / "sums.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    content = yaml.safe_load((PROFILES / "smoke.yaml").read_text(encoding="utf-8"))
    content["tasks"].update(
        {"families": content["tasks"]["families"][:1], "files": [{"path": str(folder / "sums.jsonl.gz")}], "train": 20}
    )
    (folder / "mine.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder / "mine.yaml"


def test_files_are_carried_along_and_the_questions_made_from_the_copy(work: Path) -> None:
    import mlflow

    profile = write_profile(work / "there")
    dataset, examples, metrics = artifact(work / "dataset"), artifact(work / "examples"), dsl.Metrics()
    fetch_dataset.python_func(dataset=dataset, log=artifact(work / "log"), router=ROUTER, profile=str(profile))
    assert dataset.metadata["tasks"] == {str(work / "there" / "sums.jsonl.gz"): 40}
    assert [family["family"] for family in dataset.metadata["families"]] == ["spell_backward"]
    assert {"md5", "digest", "reasoning_gym"} <= set(dataset.metadata)
    (work / "there" / "sums.jsonl.gz").unlink()
    synthesize.python_func(
        dataset=dataset, profile=str(profile), seed=0, examples=examples, metrics=metrics, log=artifact(work / "log"),
        router=ROUTER,
    )  # fmt: skip
    train = load_split(work / "examples", "train")
    assert {task.domain for task in train} == {"spell_backward", "sums"}
    assert next(task for task in train if task.domain == "sums").id.startswith("sums/"), "named after the file"
    described = json.loads((work / "examples" / "dataset.json").read_text(encoding="utf-8"))
    assert described["config_sha256"] == load_ensemble_profile(str(profile)).digest
    assert metrics.metadata["majority answer sums"] == described["majority_answer"]["sums"]
    client = mlflow.MlflowClient(f"sqlite:///{work}/mlflow.db")
    experiment = client.get_experiment_by_name(ROUTER)
    assert experiment is not None
    runs = {run.data.tags["routewright.stage"]: run for run in client.search_runs([experiment.experiment_id])}
    assert runs["fetch-dataset"].data.params == {"profile": str(profile)}
    assert runs["fetch-dataset"].data.tags["md5.dataset"] == dataset.metadata["md5"]
    assert runs["synthesize"].data.params == {"profile": str(profile), "seed": "0"}


def test_questions_count_with_the_files_content_and_the_package_s_version(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = str(write_profile(work / "there"))
    before = tasks_digest(profile)
    assert content_of("tasks", profile, ROUTER) == before == tasks_digest(profile)
    assert type(profile_of(ROUTER, profile)).__name__ == "EnsembleProfile"
    assert "coevolve" in content_of("profile", "smoke", ROUTER)
    write_profile(work / "there", 41)
    assert tasks_digest(profile)[0] != before[0]
    monkeypatch.setattr("routewright.ensemble_router.fetch.version", lambda package: {"reasoning-gym": "99"}[package])
    assert tasks_digest(profile)[1] == "99"
    monkeypatch.setattr(stage_module, "digest_of", lambda path: "same")
    assert tasks_digest("smoke") == ["99"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (None, "sums.jsonl.gz: no such file, expected JSON lines"),
        ('{"prompt": "1 + 1 ="}', "sums.jsonl.gz, line 1: answer: expected text"),
        ("nonsense", "sums.jsonl.gz, line 1: expected one JSON object"),
    ],
)
def test_a_file_that_cannot_be_used(work: Path, line: str | None, sentence: str) -> None:
    profile = write_profile(work / "there")
    file = work / "there" / "sums.jsonl.gz"
    if line is None:
        file.unlink()
    else:
        file.write_bytes(gzip.compress(line.encode()))
    with pytest.raises(BadInput) as caught:
        fetch_dataset.python_func(
            dataset=artifact(work / "dataset"), log=artifact(work / "log"), router=ROUTER, profile=str(profile)
        )
    assert sentence in str(caught.value)
