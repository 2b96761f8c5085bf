"""What MLflow holds after a run, on a real SQLite store."""

from __future__ import annotations

import json
import socket
import sys
import types
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from routewright import tracking
from routewright.errors import BadInput
from routewright.search_router.decision import Decision


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests here: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def client(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    for name in ("MLFLOW_RUN_ID", tracking.PARENT, "ROUTEWRIGHT_EVENTS", "ROUTEWRIGHT_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROUTEWRIGHT_GIT_SHA", "f00d")
    tracking.connect()
    yield mlflow.MlflowClient()
    while mlflow.active_run():
        mlflow.end_run()


PARAMS = {"profile": "smoke", "seed": 3}


def test_a_stage_is_nested_in_its_pipeline_with_lineage_data_metrics_and_model(client, tmp_path, monkeypatch) -> None:
    from routewright.config import load_profile

    data, model = tmp_path / "data", tmp_path / "model"
    data.mkdir()
    (data / "dataset.json").write_text(json.dumps({"md5": "d41d8cd98f00b204e9800998ecf8427e", "dvc_revision": "v7"}))
    model.mkdir()
    (model / "weights.safetensors").write_bytes(b"0")
    history = tmp_path / "history.jsonl"
    history.write_text("".join(json.dumps({"step": i, "loss": 1 / (i + 1), "note": "x"}) + "\n" for i in range(1500)))
    with tracking.pipeline_run("search-router", "key-1", PARAMS) as parent:
        monkeypatch.setenv(tracking.PARENT, parent)
    # In the pipeline the stages are other processes and end before the parent does.
    client.update_run(parent, status="RUNNING")
    profile = load_profile("smoke")
    with tracking.stage_run("sft", "key-2", PARAMS, profile) as fresh:
        assert fresh
        tracking.log_dataset(data, "dataset", "training")
        tracking.log_history(history)
        tracking.log_search_model(model, "router")
    (run,) = client.search_runs([client.get_run(parent).info.experiment_id], f"tags.mlflow.parentRunId = '{parent}'")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"profile": "smoke", "seed": "3"}
    assert run.data.tags["git_sha"] == "f00d"
    assert run.data.tags["image"] == "none (local)"
    assert run.data.tags["config_hash"] == profile.digest
    assert run.data.tags["md5.dataset"] == "d41d8cd98f00b204e9800998ecf8427e"
    assert run.data.tags["dvc_revision.dataset"] == "v7"
    assert run.data.tags["base_model"].endswith(profile.backbone.name)
    assert run.data.tags["base_model_revision"]
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["dataset"]
    curve = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in sorted(curve, key=lambda point: point.step)] == list(range(1500))
    assert min(point.value for point in curve) == pytest.approx(1 / 1500)

    with tracking.stage_run("sft", "key-2", PARAMS) as fresh:
        assert not fresh, "a finished stage is recorded once"
    with tracking.pipeline_run("search-router", "key-1", PARAMS) as again:
        assert again == parent, "a repeated run goes on in its run"
    monkeypatch.delenv(tracking.PARENT)


def test_the_logged_model_has_a_signature_and_loads_without_pickle(client, tmp_path, monkeypatch) -> None:
    import mlflow
    import pandas as pd

    class FakeRouter:
        def decide(self, query: str, reference_date: date) -> Decision:
            return Decision([f"{query} {reference_date}"], "1")

    fake = types.ModuleType("routewright.search_router.router")
    fake.load_router = lambda folder: FakeRouter() if (folder / "weights").read_text() == "0" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "routewright.search_router.router", fake)
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("0")
    with tracking.stage_run("rl", "key-model", PARAMS):
        tracking.log_search_model(model, "router")
    (logged,) = mlflow.search_logged_models(
        [tracking.experiment_id("search-router")], filter_string="name = 'router'", output_format="list",
        order_by=[{"field_name": "creation_time", "ascending": False}], max_results=1,
    )  # fmt: skip
    info = mlflow.models.get_model_info(logged.model_uri)
    assert info.signature.inputs.input_names() == ["query", "reference_date"]
    assert info.signature.inputs.required_input_names() == ["query"]
    local = Path(mlflow.artifacts.download_artifacts(logged.model_uri))
    assert not [file for file in local.rglob("*") if file.suffix in (".pkl", ".pickle", ".bin")]
    table = pd.DataFrame({"query": ["a", "b"], "reference_date": ["2024-05-31", None]})
    answers = [json.loads(answer) for answer in mlflow.pyfunc.load_model(logged.model_uri).predict(table)]
    assert answers[0]["agents"] == ["a 2024-05-31"]
    assert answers[1]["agents"] == [f"b {date.today()}"]


def test_the_logged_risk_router_has_a_signature_and_answers_as_the_model_does(client, tmp_path) -> None:
    import mlflow
    import numpy as np
    import pandas as pd

    from routewright.step_router.features import NAMES
    from routewright.step_router.profile import load_step_profile
    from routewright.step_router.risk import EVIDENCE, RiskModel, RiskSettings, save_risk

    rows = np.random.default_rng(0).normal(size=(6, len(NAMES)))
    rows[:, EVIDENCE] = 0.0
    model, folder, profile = RiskModel().eval(), tmp_path / "router", load_step_profile("smoke")
    model.standardise(rows)
    facts = {"thresholds": {"bayes": 0.5}, "operating": "bayes", "c_slm": 1.0, "c_llm": 50.0, "max_steps": 10}
    save_risk(model, folder, RiskSettings(), facts)
    (folder / "rollouts.jsonl").write_text("large")
    with tracking.stage_run("calibrate", "key-risk", PARAMS, profile, "step-router"):
        tracking.log_risk_model(folder, "step-router")
    (run,) = client.search_runs([tracking.experiment_id("step-router")], "tags.`routewright.key` = 'key-risk'")
    assert run.data.tags["config_hash"] == profile.digest
    assert run.data.tags["base_model"] == f"architecture: {profile.backbone.name}"
    (logged,) = mlflow.search_logged_models([tracking.experiment_id("step-router")], output_format="list")
    signature = mlflow.models.get_model_info(logged.model_uri).signature
    assert signature.inputs.input_names() == list(NAMES)
    assert {str(kind) for kind in signature.inputs.input_types()} == {"DataType.double"}
    assert signature.outputs.input_names() == ["risk", "benefit", "escalate"]
    local = Path(mlflow.artifacts.download_artifacts(logged.model_uri))
    files = {file.name for file in local.rglob("*") if file.is_file()}
    assert {"risk.json", "model.safetensors"} <= files
    assert not {"rollouts.jsonl"} & files
    assert not [name for name in files if name.endswith((".pkl", ".pickle", ".bin"))]
    answer = mlflow.pyfunc.load_model(logged.model_uri).predict(pd.DataFrame(rows, columns=list(NAMES)))
    assert answer["risk"].tolist() == model.risks(rows).tolist()
    assert answer["escalate"].tolist() == (model.benefits(rows) > 0.5).tolist()


def test_a_failed_stage_is_marked_failed_and_a_retry_continues_its_run(client) -> None:
    with pytest.raises(ZeroDivisionError), tracking.stage_run("rl", "key-3", PARAMS):
        raise ZeroDivisionError
    (failed,) = client.search_runs([tracking.experiment_id("search-router")], "tags.`routewright.key` = 'key-3'")
    assert failed.info.status == "FAILED"
    with tracking.stage_run("rl", "key-3", PARAMS) as fresh:
        assert fresh
    assert client.get_run(failed.info.run_id).info.status == "FINISHED"


def test_a_run_that_kfp_opened_is_resumed_and_left_open(client, monkeypatch) -> None:
    import os

    given = client.create_run(tracking.experiment_id("kfp"))
    monkeypatch.setenv("MLFLOW_RUN_ID", given.info.run_id)
    with tracking.stage_run("sft", "key-4", PARAMS) as fresh:
        assert fresh
    after = client.get_run(given.info.run_id)
    assert after.info.status == "RUNNING"
    assert after.data.params["seed"] == "3"
    assert os.environ["MLFLOW_RUN_ID"] == given.info.run_id
    with tracking.pipeline_run("search-router", "key-5", PARAMS) as parent:
        assert parent == given.info.run_id


def test_an_unreachable_server_is_one_sentence_without_its_password(monkeypatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for scheme in ("http", "postgresql"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{scheme}://someone:secret@127.0.0.1:{port}")
        with pytest.raises(BadInput) as caught:
            tracking.connect()
        assert str(caught.value).startswith(f"MLFLOW_TRACKING_URI: no tracking server answers at {scheme}://127.0.0.1")
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["ftp://someone:secret@host/runs", "s3://bucket/runs", "models:/router", "posgresql://a/b"])
def test_a_scheme_that_mlflow_does_not_know_is_one_sentence(uri: str, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(BadInput, match=f"^MLFLOW_TRACKING_URI: MLflow keeps no runs at {uri.split(':')[0]}://, ") as caught:
        tracking.connect()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["http://host:secret", "http://[::1", "http://someone:secret@host:99999999", "http://a b"])
def test_an_address_that_is_none_is_one_sentence(uri: str, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(BadInput, match=r"^MLFLOW_TRACKING_URI: ") as caught:
        tracking.connect()
    assert "secret" not in str(caught.value)


def test_metric_names_are_made_fit_for_mlflow() -> None:
    assert tracking.mlflow_name("sft+rl/ndcg@10/mismatch") == "sft_rl/ndcg_at_10/mismatch"


def test_the_local_store_lies_under_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert tracking.tracking_uri() == f"sqlite:///{tmp_path}/runs/mlflow.db"


def test_the_md5_of_a_folder_follows_names_and_contents(tmp_path) -> None:
    (tmp_path / "a").write_text("1")
    first = tracking.md5_of(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    second = tracking.md5_of(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, second, tracking.md5_of(tmp_path)}) == 3


def test_the_git_sha_is_the_checkouts_unless_an_image_names_it(monkeypatch) -> None:
    monkeypatch.setenv("ROUTEWRIGHT_GIT_SHA", "abc")
    assert tracking.git_sha() == "abc"
    monkeypatch.delenv("ROUTEWRIGHT_GIT_SHA")
    monkeypatch.setenv("PATH", "")
    assert tracking.git_sha() == "unknown"
