"""Submit a compiled pipeline: upload its version once, start a run, and tell how it goes."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.endpoint import REQUEST_S, Conflict, Unreachable, by_name, refusals, run_link
from pipelines.plan import Compiled, check_images
from routewright.errors import StageFailed

if TYPE_CHECKING:
    import kfp

FINAL = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
_BLINKS = 20  # reads of a run in a row that may fail while it is waited for
Say = Callable[[str], None]


def upload(client: kfp.Client, url: str, namespace: str, compiled: Compiled) -> tuple[str, str]:
    """The ids of the pipeline and of the version that holds ``compiled``; what is there already is not uploaded again.

    BadInput for a pipeline whose image is a placeholder.
    """
    check_images(compiled.spec)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "pipeline.yaml")
        Path(file).write_text(compiled.text, encoding="utf-8")

        def find_pipeline() -> Any:
            return first(client.list_pipelines(filter=by_name(compiled.pipeline), namespace=namespace).pipelines)

        pipeline = find_or_make(
            url, f"upload pipeline {compiled.pipeline}", find_pipeline,
            lambda: client.upload_pipeline(file, compiled.pipeline, namespace=namespace),
        ).pipeline_id  # fmt: skip

        def find_version() -> Any:
            listed = client.list_pipeline_versions(pipeline, filter=by_name(compiled.version))
            return first(listed.pipeline_versions)

        version = find_or_make(
            url, f"upload version {compiled.version}", find_version,
            lambda: client.upload_pipeline_version(file, compiled.version, pipeline_id=pipeline),
        )  # fmt: skip
    return pipeline, version.pipeline_version_id


def find_experiment(client: kfp.Client, url: str, namespace: str, name: str) -> str:
    """The id of the experiment, which is made where it is missing."""

    def find() -> Any:
        return first(client.list_experiments(filter=by_name(name), namespace=namespace).experiments)

    return str(
        find_or_make(
            url, f"create experiment {name}", find, lambda: client.create_experiment(name, namespace=namespace)
        ).experiment_id
    )


def find_or_make(url: str, what: str, find: Callable[[], Any], make: Callable[[], Any]) -> Any:
    """What ``find`` finds, else what ``make`` makes; where somebody else was quicker, what they made."""
    # The client prints links of its own.
    with contextlib.redirect_stdout(io.StringIO()):
        with refusals(url, what):
            if (found := find()) is not None:
                return found
        try:
            with refusals(url, what):
                return make()
        except Conflict as conflict:
            with refusals(url, what):
                if (found := find()) is None:
                    raise StageFailed(str(conflict)) from None
                return found


def first(found: list[Any] | None) -> Any:
    """The first of a list of KFP's, which may be None."""
    return found[0] if found else None


def submit(
    client: kfp.Client, url: str, namespace: str, compiled: Compiled, parameters: Mapping[str, Any],
    experiment: str, run_name: str, service_account: str | None,
) -> str:  # fmt: skip
    """Start a run of the version that holds ``compiled`` and return its id."""
    pipeline, version = upload(client, url, namespace, compiled)
    experiment_id = find_experiment(client, url, namespace, experiment)
    with refusals(url, f"start {compiled.pipeline}"), contextlib.redirect_stdout(io.StringIO()):
        run = client.run_pipeline(
            experiment_id, run_name, params=dict(parameters), pipeline_id=pipeline, version_id=version,
            service_account=service_account,
        )  # fmt: skip
    return str(run.run_id)


def wait(client: kfp.Client, url: str, run_id: str, stages: Sequence[str], say: Say, poll_s: float) -> str:
    """Say what the stages do until the run is over, and return its final state.

    kfp's own wait_for_run_completion never ends when a run is cancelled. BadInput when the token expires meanwhile,
    StageFailed when the endpoint is away for long; the run goes on in both cases.
    """
    shown: dict[str, str] = {}
    blinks = 0
    while True:
        try:
            with refusals(url, "show the run"):
                run = client.runs.run_service_get_run(run_id, _request_timeout=REQUEST_S)
        except Unreachable as error:
            blinks += 1
            if blinks >= _BLINKS:
                raise StageFailed(f"{error}; the run goes on: {run_link(url, run_id)}") from None
            time.sleep(poll_s)
            continue
        blinks = 0
        for task in (run.run_details and run.run_details.task_details) or []:
            # What drives a stage is a task as well.
            if task.display_name in stages and task.state and shown.get(task.display_name) != task.state:
                shown[task.display_name] = task.state
                why = f": {task.error.message}" if task.error and task.error.message else ""
                say(f"{task.display_name} {task.state.lower()}{why}")
        if run.state in FINAL:
            if run.error and run.error.message:
                say(run.error.message)
            return str(run.state)
        time.sleep(poll_s)
