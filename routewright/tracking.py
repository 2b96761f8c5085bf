"""MLflow records of pipeline runs: a parent run with one nested run a stage, datasets, metrics over steps, models.

The store is ``runs/mlflow.db`` (SQLite) in the current directory, artifacts beside it, unless ``MLFLOW_TRACKING_URI``
names a server or a database. Kubeflow Pipelines can open the runs itself: it then sets ``MLFLOW_RUN_ID`` to the nested
run of the task, which is resumed and left open, for KFP ends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from routewright.errors import BadInput

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.types import Schema

    from routewright.config import BackboneSection

LOCAL_STORE = Path("runs")
PARENT = "ROUTEWRIGHT_PARENT_RUN"
CONNECT_SECONDS = 5


class TrainedProfile(Protocol):
    """What a run records of a profile, whichever router it trains."""

    @property
    def digest(self) -> str:
        """The config hash."""

    @property
    def backbone(self) -> BackboneSection:
        """Where the base model's weights come from."""


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or the SQLite file under ``runs/`` of the current directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or local_store_uri()


def local_store_uri() -> str:
    """The SQLite file under ``runs/`` of the current directory."""
    return f"sqlite:///{(LOCAL_STORE / 'mlflow.db').resolve()}"


def connect() -> None:
    """Point MLflow at the store; BadInput within seconds if nothing answers there."""
    # A dead server must cost seconds, not MLflow's default of seven retries with two minutes each.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    uri = tracking_uri()
    reach(uri)
    import logging

    import mlflow

    # Alembic and MLflow tell of every table they make; a person watching a run has no use for it.
    for name in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
        logging.getLogger(name).setLevel(logging.WARNING)
    mlflow.set_tracking_uri(uri)


def expect_store() -> None:
    """BadInput where the store is a SQLite file that is not there: to open it would make it, and nothing is in it."""
    scheme, _, place = tracking_uri().partition(":///")
    file = Path(place.partition("?")[0])
    if scheme.startswith("sqlite") and place and not file.exists():
        raise BadInput(
            f"{file}: no such file, expected the tracked runs; run this where the models were trained, or set "
            "MLFLOW_TRACKING_URI"
        )


def reach(uri: str) -> None:
    """One attempt to reach the tracking store at ``uri``; BadInput with the address, without its password."""
    try:
        parts = urlsplit(uri)
        shown = f"{parts.scheme}://{parts.hostname or ''}" + (f":{parts.port}" if parts.port else "")
    except ValueError:  # its message would repeat the address
        raise BadInput("MLFLOW_TRACKING_URI: expected an address such as http://127.0.0.1:5000") from None
    sentence = f"MLFLOW_TRACKING_URI: no tracking server answers at {shown}; start it, or unset the variable"
    if parts.scheme in ("http", "https"):
        import httpx

        try:
            httpx.get(f"{shown}{parts.path.rstrip('/')}/health", timeout=CONNECT_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BadInput(f"{sentence} ({type(error).__name__})") from None
    elif parts.scheme.startswith("sqlite"):
        file = Path(uri.split(":///", 1)[-1])
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"MLFLOW_TRACKING_URI: cannot make the folder of {file} ({error.strerror})") from None
    elif parts.scheme.split("+")[0] in ("postgresql", "mysql", "mssql"):
        import sqlalchemy

        try:
            sqlalchemy.create_engine(uri).connect().close()
        except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
            raise BadInput(f"{sentence} ({type(error).__name__})") from None
    elif parts.scheme not in ("", "file", "databricks"):
        raise BadInput(
            f"MLFLOW_TRACKING_URI: MLflow keeps no runs at {parts.scheme}://, expected http, https, sqlite, postgresql, "
            "mysql, mssql or file"
        )


def experiment_id(name: str) -> str:
    """The experiment of that name, made if it is new; local artifacts lie beside the local database."""
    import mlflow
    from mlflow.exceptions import MlflowException

    local = tracking_uri() == local_store_uri()
    location = (LOCAL_STORE / "mlartifacts").resolve().as_uri() if local else None
    try:
        experiment = mlflow.get_experiment_by_name(name)
        if experiment is None:
            return str(mlflow.create_experiment(name, artifact_location=location))
    except MlflowException as error:
        raise BadInput(f"MLFLOW_TRACKING_URI: the tracking server refused: {str(error).splitlines()[0]}") from None
    return str(experiment.experiment_id)


@contextlib.contextmanager
def pipeline_run(pipeline: str, key: str, params: Mapping[str, Any]) -> Iterator[str]:
    """The parent run of one pipeline run; yields its id and ends it FINISHED or FAILED.

    The same ``key`` (out folder, pipeline and settings) resumes the run of an earlier, killed attempt. With
    ``MLFLOW_RUN_ID`` set that run is resumed instead and left open.
    """
    connect()
    import mlflow

    given = os.environ.get("MLFLOW_RUN_ID")
    if given:
        with left_open(given) as run:
            mlflow.log_params(dict(params))
            mlflow.set_tags(lineage())
            yield run.info.run_id
        return
    experiment = experiment_id(pipeline)
    name = "-".join([pipeline, *(str(params[part]) for part in ("profile", "seed") if part in params)])
    found = earlier_run(experiment, f"tags.`routewright.key` = '{key}' and tags.`routewright.stage` = 'pipeline'")
    with mlflow.start_run(
        run_id=found.info.run_id if found else None,
        experiment_id=experiment,
        run_name=None if found else name,
    ) as run:
        mlflow.set_tags({"routewright.stage": "pipeline", "routewright.key": key, **lineage()})
        mlflow.log_params(dict(params))
        yield run.info.run_id


@contextlib.contextmanager
def stage_run(
    stage: str,
    key: str,
    params: Mapping[str, Any],
    profile: TrainedProfile | None = None,
    pipeline: str = "search-router",
    once: bool = True,
) -> Iterator[bool]:
    """The run of one stage, nested in the parent; yields False if an earlier attempt already recorded all of it.

    Without ``once`` an attempt after a finished one has a run of its own; a killed one is resumed all the same. Without a
    parent the run goes to the experiment of the ``pipeline``. Ends the run FINISHED or FAILED, except one that KFP
    opened (``MLFLOW_RUN_ID``).
    """
    connect()
    import mlflow

    given, parent = os.environ.get("MLFLOW_RUN_ID"), os.environ.get(PARENT)
    all_tags = {"routewright.stage": stage, "routewright.key": key, **lineage(profile)}
    if given:
        with left_open(given):
            mlflow.set_tags(all_tags)
            mlflow.log_params(dict(params))
            yield True
        return
    if parent:
        experiment = mlflow.get_run(parent).info.experiment_id
        inside = f" and tags.`mlflow.parentRunId` = '{parent}'"
    else:
        experiment, inside = experiment_id(pipeline), ""
    same = f"tags.`routewright.key` = '{key}' and tags.`routewright.stage` = '{stage}'"
    found = earlier_run(experiment, same + inside)
    if found and found.info.status == "FINISHED":
        if once:
            yield False
            return
        found = None
    with mlflow.start_run(
        run_id=found.info.run_id if found else None,
        experiment_id=experiment,
        run_name=None if found else stage,
        parent_run_id=None if found else parent,
        tags=all_tags,
    ):
        mlflow.log_params(dict(params))
        yield True


@contextlib.contextmanager
def left_open(run_id: str) -> Iterator[Run]:
    """Resume a run that someone else opened and will end: it is RUNNING afterwards too."""
    import mlflow

    run = mlflow.start_run(run_id=run_id)
    try:
        yield run
    finally:
        mlflow.end_run("RUNNING")
        # end_run forgets the variable; the run is still whose it was.
        os.environ["MLFLOW_RUN_ID"] = run_id


def earlier_run(experiment: str, condition: str) -> Run | None:
    """The newest run of the experiment that meets the condition."""
    import mlflow

    runs = mlflow.search_runs([experiment], condition, max_results=1, output_format="list")
    return runs[0] if runs else None


def lineage(profile: TrainedProfile | None = None) -> dict[str, str]:
    """Git SHA of the code, the image that runs, the config's hash and the base model with its revision, as tags.

    An image carries its SHA in ``ROUTEWRIGHT_GIT_SHA``, and pipelines state the image they were compiled for in
    ``ROUTEWRIGHT_IMAGE``; a local run uses no image.
    """
    local = "ROUTEWRIGHT_EVENTS" in os.environ or "ROUTEWRIGHT_IMAGE" not in os.environ
    tags = {"git_sha": git_sha(), "image": "none (local)" if local else os.environ["ROUTEWRIGHT_IMAGE"]}
    if profile is not None:
        backbone = profile.backbone
        tags |= {"config_hash": profile.digest, "base_model": f"{backbone.source}: {backbone.name}"}
        tags["base_model_revision"] = backbone.revision or "none"
        if backbone.source == "packaged":
            tags["base_model_revision"] = version(backbone.name)
    return tags


def git_sha() -> str:
    """``ROUTEWRIGHT_GIT_SHA``, or the checkout's commit with ``-dirty`` after it where files differ, or ``unknown``."""
    if sha := os.environ.get("ROUTEWRIGHT_GIT_SHA"):
        return sha
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        shown = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return shown.stdout.strip() or "unknown"


def settings_hash(settings: Mapping[str, Any]) -> str:
    """16 hex digits over settings; equal settings give equal hashes whatever their order."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]


def log_dataset(folder: Path, name: str, context: str) -> None:
    """Record a dataset folder as an input of the active run, its md5 and DVC revision as tags.

    Both come from the folder's ``dataset.json`` where it has one; data that is not under DVC has no revision.
    """
    import mlflow
    from mlflow.data.dataset_source_registry import resolve_dataset_source
    from mlflow.data.meta_dataset import MetaDataset

    manifest = folder / "dataset.json"
    known = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    digest = known.get("md5") or md5_of(folder)
    with warnings.catch_warnings():
        # MLflow knows two names for the same kind of local source and warns that it takes the first.
        warnings.simplefilter("ignore", UserWarning)
        source = resolve_dataset_source(str(folder))
    dataset = MetaDataset(source, name=name, digest=digest)  # type: ignore[abstract]
    mlflow.log_input(dataset, context=context)
    mlflow.set_tags({f"md5.{name}": digest, f"dvc_revision.{name}": known.get("dvc_revision", "none")})


def md5_of(folder: Path) -> str:
    """md5 over the names and md5 sums of the files under a folder."""
    lines = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with file.open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'md5').hexdigest()}  {file.relative_to(folder).as_posix()}\n")
    return hashlib.md5("".join(lines).encode()).hexdigest()


def log_history(history: Path) -> None:
    """Log a ``history.jsonl`` of {"step": n, metric: number} in batches; other values are left out."""
    import mlflow
    from mlflow.entities import Metric

    metrics: list[Metric] = []
    for row in read_history(history):
        stamp = int(float(row.get("timestamp", 0)) * 1000)
        metrics += [
            Metric(mlflow_name(name), float(value), stamp, int(row["step"]))
            for name, value in row.items()
            if name not in ("step", "timestamp") and isinstance(value, (int, float))
        ]
    run = mlflow.active_run()
    if run is None:
        raise RuntimeError("log_history needs an active run")
    for start in range(0, len(metrics), 1000):
        mlflow.MlflowClient().log_batch(run.info.run_id, metrics=metrics[start : start + 1000])


def read_history(history: Path) -> list[dict[str, Any]]:
    """The rows of a ``history.jsonl``."""
    return [json.loads(line) for line in history.read_text(encoding="utf-8").split("\n") if line.strip()]


def mlflow_name(metric: str) -> str:
    """The metric's name in the characters MLflow allows: ``ndcg@10/mismatch`` becomes ``ndcg_at_10/mismatch``."""
    name = metric.replace("@", "_at_")
    return "".join(c if c.isalnum() or c in "_-./ :" else "_" for c in name)


def log_summary(summary: Mapping[str, Any]) -> None:
    """Log the mean of every metric of every row of a run summary as ``row/metric``."""
    import mlflow

    mlflow.log_metrics(
        {
            mlflow_name(f"{row['name']}/{metric}"): float(value["mean"])
            for row in summary["rows"]
            for metric, value in row["metrics"].items()
        }
    )


def log_files(files: Sequence[Path]) -> None:
    """Log single files as artifacts of the active run."""
    import mlflow

    for file in files:
        mlflow.log_artifact(str(file))


def log_search_model(folder: Path, name: str) -> None:
    """Log a search router's folder as an MLflow model with its signature (query, reference_date? -> decision JSON).

    The files are logged as they are; the ``python_function`` flavour loads them through
    ``routewright.search_router.pyfunc``, so that nothing is pickled.
    """
    from mlflow.types import ColSpec, DataType, Schema

    inputs = Schema([ColSpec(DataType.string, "query"), ColSpec(DataType.string, "reference_date", required=False)])
    outputs = Schema([ColSpec(DataType.string, "decision")])
    log_model(folder, name, "routewright.search_router.pyfunc", inputs, outputs)


def log_risk_model(folder: Path, name: str) -> None:
    """Log a risk router as an MLflow model with its signature (the 15 features as doubles -> risk, benefit, escalate).

    Only the router's own two files of the calibrate stage's folder are logged, and nothing is pickled.
    """
    from mlflow.types import ColSpec, DataType, Schema

    from routewright.step_router.features import NAMES
    from routewright.step_router.risk import DESCRIPTION, WEIGHTS

    inputs = Schema([ColSpec(DataType.double, feature) for feature in NAMES])
    numbers = [ColSpec(DataType.double, name) for name in ("risk", "benefit")]
    outputs = Schema([*numbers, ColSpec(DataType.boolean, "escalate")])
    with tempfile.TemporaryDirectory() as temporary:
        alone = Path(temporary) / name
        alone.mkdir()
        for file in (DESCRIPTION, WEIGHTS):
            shutil.copyfile(folder / file, alone / file)
        log_model(alone, name, "routewright.step_router.pyfunc", inputs, outputs)


def log_ensemble_model(folder: Path, name: str) -> None:
    """Log an ensemble router's folder as an MLflow model with its signature (query -> decision JSON)."""
    from mlflow.types import ColSpec, DataType, Schema

    inputs, outputs = (Schema([ColSpec(DataType.string, column)]) for column in ("query", "decision"))
    log_model(folder, name, "routewright.ensemble_router.pyfunc", inputs, outputs)


def log_model(folder: Path, name: str, loader_module: str, inputs: Schema, outputs: Schema) -> None:
    """Log the files of a folder as an MLflow model that ``loader_module`` loads."""
    import mlflow
    from mlflow.models import ModelSignature

    with warnings.catch_warnings():
        # An input example would make MLflow load the model to try it; the signature is stated by the caller.
        warnings.simplefilter("ignore", UserWarning)
        mlflow.pyfunc.log_model(
            name=name,
            loader_module=loader_module,
            data_path=str(folder),
            signature=ModelSignature(inputs=inputs, outputs=outputs),
            pip_requirements=["routewright"],
        )
