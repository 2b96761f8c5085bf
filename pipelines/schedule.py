"""Recurring runs from files: applied as often as one likes, listed, paused.

KFP cannot edit a recurring run, so one that differs from its file is replaced: the new one is made paused, the old one is
deleted, then the new one is enabled. Never do two run, and what was killed half way is finished by applying again.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipelines.endpoint import Conflict, by_name, refusals
from pipelines.plan import Compiled
from pipelines.submit import find_experiment, upload
from routewright.errors import BadInput, StageFailed
from routewright.validation import fault

if TYPE_CHECKING:
    import kfp

# Seconds first, as in the library that KFP uses; with five fields it would take the minute for the second.
CRON_FIELDS = {
    "second": (0, 59), "minute": (0, 59), "hour": (0, 23), "day of month": (1, 31), "month": (1, 12), "day of week": (0, 6),
}  # fmt: skip
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class Schedule(BaseModel):
    """One schedule file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
    pipeline: str
    placement: str = Field(description="a shipped placement, or the path of a placement file")
    cron: str | None = Field(default=None, description="six fields, seconds first, UTC unless the server is set otherwise")
    interval_s: int | None = Field(default=None, ge=60, description="seconds from one start to the next")
    params: dict[str, Any] = Field(default={}, description="the pipeline's parameters")
    experiment: str | None = Field(default=None, description="the pipeline's name if not given")
    enabled: bool = True
    max_concurrency: int = Field(default=1, ge=1, le=10, description="runs at the same time")
    catchup: bool = Field(default=False, description="start every run that was missed while it was paused")

    @field_validator("cron")
    @classmethod
    def _six_fields(cls, cron: str | None) -> str | None:
        if cron is not None and (fault := cron_fault(cron)):
            raise ValueError(fault)
        return cron

    @model_validator(mode="after")
    def _one_trigger(self) -> Schedule:
        if (self.cron is None) == (self.interval_s is None):
            raise ValueError("expected either cron or interval_s")
        return self


def cron_fault(cron: str) -> str:
    """What is wrong with a cron expression, "" for nothing."""
    fields = cron.split()
    if len(fields) != len(CRON_FIELDS):
        return f"expected six fields ({', '.join(CRON_FIELDS)}), found {len(fields)}"
    for text, (what, (low, high)) in zip(fields, CRON_FIELDS.items(), strict=True):
        names = {"month": MONTHS, "day of week": DAYS}.get(what, ())
        for part in text.lower().split(","):
            for number, name in enumerate(names, low):
                part = part.replace(name, str(number))
            found = re.fullmatch(r"(?:\*|\?|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", part)
            ends = [int(end) for end in found.group(1, 2) if end] if found else []
            if not found or not all(low <= end <= high for end in ends) or ends != sorted(ends):
                return f"{what} {text}: expected *, numbers from {low} to {high}, ranges or steps of them"
    return ""


def load_schedule(path: Path) -> Schedule:
    """The schedule of a YAML file; BadInput names file and field."""
    try:
        given = yaml.safe_load(path.read_bytes())
        return Schedule.model_validate(given)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}), expected a YAML file with name, pipeline, …") from None
    except ValidationError as error:
        raise BadInput(f"{path}: {fault(error, Schedule)}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise BadInput(f"{path}: not YAML ({' '.join(str(error).split())})") from None


@dataclass(frozen=True)
class Applied:
    """What ``apply`` did and the recurring run's id."""

    outcome: str
    id: str


def apply(
    client: kfp.Client, url: str, namespace: str, schedule: Schedule, compiled: Compiled,
    parameters: Mapping[str, Any], service_account: str | None,
) -> Applied:  # fmt: skip
    """Make the namespace's recurring run of that name what the file says; nothing is written where it is already."""
    pipeline, version = upload(client, url, namespace, compiled)
    experiment = find_experiment(client, url, namespace, schedule.experiment or schedule.pipeline)
    wanted = {
        "experiment": experiment, "version": version, "parameters": dict(parameters), "cron": schedule.cron,
        "interval_s": schedule.interval_s, "max_concurrency": schedule.max_concurrency, "catchup": schedule.catchup,
    }  # fmt: skip
    if service_account:
        wanted["service_account"] = service_account

    def same(run: Any) -> bool:
        return {**essence(run), **wanted} == essence(run)

    def create() -> Any:
        # The client takes None for one run at a time, and starts what was missed unless told not to.
        return client.create_recurring_run(
            experiment, schedule.name, description=f"routewright schedule apply, placement {compiled.placement.name}",
            cron_expression=schedule.cron, interval_second=schedule.interval_s, no_catchup=not schedule.catchup,
            max_concurrency=schedule.max_concurrency, params=dict(parameters), pipeline_id=pipeline, version_id=version,
            enabled=schedule.enabled and not found, service_account=service_account,
        )  # fmt: skip

    found = recurring_runs(client, url, namespace, schedule.name)
    outcome = "replaced" if found else "created"
    kept = next((run for run in found if same(run)), None)
    if kept is None:
        try:
            with refusals(url, f"create schedule {schedule.name}"), contextlib.redirect_stdout(io.StringIO()):
                kept = create()
        except Conflict as conflict:
            found = recurring_runs(client, url, namespace, schedule.name)
            kept = next((run for run in found if same(run)), None)
            if kept is None:
                raise StageFailed(
                    f"{conflict}: another one named {schedule.name} was made meanwhile and differs from the file; "
                    "apply again to replace it"
                ) from None
            outcome = "unchanged"
    else:
        outcome = "unchanged"
    kept_id = str(kept.recurring_run_id)
    with refusals(url, f"replace schedule {schedule.name}"):
        for run in found:
            if run.recurring_run_id != kept_id:
                client.delete_recurring_run(run.recurring_run_id)
        if (kept.mode == "ENABLE") != schedule.enabled:
            switch = client.enable_recurring_run if schedule.enabled else client.disable_recurring_run
            switch(kept_id)
            if outcome == "unchanged":
                outcome = "resumed" if schedule.enabled else "paused"
    return Applied(outcome, kept_id)


def essence(run: Any) -> dict[str, Any]:
    """What a file decides of a recurring run; its 64-bit numbers come as texts."""
    trigger = run.trigger
    cron = trigger.cron_schedule.cron if trigger.cron_schedule else None
    interval = trigger.periodic_schedule.interval_second if trigger.periodic_schedule else None
    return {
        "experiment": run.experiment_id,
        "version": run.pipeline_version_reference and run.pipeline_version_reference.pipeline_version_id,
        "parameters": (run.runtime_config and run.runtime_config.parameters) or {},
        "cron": cron,
        "interval_s": int(interval) if interval else None,
        "max_concurrency": int(run.max_concurrency or 1),
        "catchup": not run.no_catchup,
        "service_account": run.service_account,
    }


def recurring_runs(client: kfp.Client, url: str, namespace: str, name: str | None = None) -> list[Any]:
    """The recurring runs of a namespace, or those of one name."""
    found: list[Any] = []
    page = ""
    while True:
        with refusals(url, "list schedules"):
            listed = client.list_recurring_runs(
                page_token=page, page_size=100, namespace=namespace, filter=by_name(name) if name else None
            )
        found += listed.recurring_runs or []
        page = listed.next_page_token
        if not page:
            return found


def switch(client: kfp.Client, url: str, namespace: str, name: str, enabled: bool) -> None:
    """Pause or resume the schedule of that name; BadInput where there is none."""
    found = recurring_runs(client, url, namespace, name)
    if not found:
        names = ", ".join(sorted({run.display_name for run in recurring_runs(client, url, namespace)})) or "none"
        raise BadInput(f"schedule {name}: namespace {namespace} has none of that name, it has {names}")
    if enabled and len(found) > 1:
        raise BadInput(f"schedule {name}: there are {len(found)} of that name, apply its file to be left with one")
    with refusals(url, f"{'resume' if enabled else 'pause'} schedule {name}"):
        for run in found:
            (client.enable_recurring_run if enabled else client.disable_recurring_run)(run.recurring_run_id)


def line(run: Any) -> str:
    """A recurring run in one line: name, state, when, how many at once, id."""
    shown = essence(run)
    when = f"cron {shown['cron']}" if shown["cron"] else f"every {shown['interval_s']} s"
    state = "enabled" if run.mode == "ENABLE" else "paused"
    return f"{run.display_name}  {state}  {when}  at most {shown['max_concurrency']}  {run.recurring_run_id}"
