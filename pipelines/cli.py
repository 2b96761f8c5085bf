"""``routewright submit``, ``schedule`` and ``check``: a pipeline on a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routewright.errors import BadInput, StageFailed

if TYPE_CHECKING:
    from pipelines.check import Finding

pipelines_app = typer.Typer()
schedule_app = typer.Typer(no_args_is_help=True, help="Recurring runs: apply a file, list, pause, resume.")
pipelines_app.add_typer(schedule_app, name="schedule")

PipelineArgument = Annotated[str, typer.Argument(metavar="PIPELINE", help="search-router, step-router, …")]
PlacementOption = Annotated[
    str, typer.Option("--placement", metavar="NAME|FILE", help="Where stages run: single-gpu, gpu-pool, or a file.")
]
HostOption = Annotated[
    str | None,
    typer.Option("--host", metavar="URL", help="KFP's API; KF_PIPELINES_ENDPOINT, or the pod's cluster, if not given."),
]
NamespaceOption = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Where runs go: that of manifests/, or kubeflow where KFP has one user."
    ),
]
DEFAULT_NAMESPACE = "routewright"


@pipelines_app.command()
def submit(
    pipeline: PipelineArgument,
    placement: PlacementOption,
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="A parameter; repeat for more.")
    ] = None,
    host: HostOption = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    experiment: Annotated[str | None, typer.Option(metavar="NAME", help="The pipeline's name if not given.")] = None,
    run_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The version's name and the time if not given.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run and what it costs; asks no cluster.")
    ] = False,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML with currency, prices of a GPU-hour, expected hours.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Tell what the stages do; exit code 1 unless all succeed.")] = False,
    poll_s: Annotated[float, typer.Option(min=0.0, help="Seconds between two looks with --wait.")] = 10.0,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Let KFP reuse what it did for parameters of the same text.")
    ] = False,
) -> None:
    """Run a pipeline on a cluster. The token comes from KF_PIPELINES_TOKEN or the pod's service account."""
    from pipelines.plan import assignments, check_names, compiled, load_costs, plan_lines, stage_plans, typed_parameters

    made = compiled(pipeline, placement, cache)
    parameters = typed_parameters(made.spec, assignments(param or []))
    check_names(pipeline, parameters)
    stages = [plan.name for plan in stage_plans(made)]
    prices = load_costs(costs, stages) if costs else None
    if dry_run:
        for line in plan_lines(made, parameters, prices):
            typer.echo(line)
        return
    from datetime import datetime

    from pipelines import submit as runs
    from pipelines.endpoint import connect, endpoint, run_link

    url = endpoint(host)
    client = connect(url)
    name = run_name or f"{made.version} {datetime.now():%Y-%m-%d %H:%M:%S}"
    account = made.placement.account_for(parameters)
    run_id = runs.submit(client, url, namespace, made, parameters, experiment or pipeline, name, account)
    typer.echo(f"run {run_id}: {run_link(url, run_id)}")
    if wait:
        state = runs.wait(client, url, run_id, stages, typer.echo, poll_s)
        if state != "SUCCEEDED":
            raise StageFailed(f"run {run_id} ended as {state.lower()}: {run_link(url, run_id)}")
        typer.echo(f"run {run_id} succeeded")


@schedule_app.command("apply")
def apply_schedule(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML: name, pipeline, placement, cron or interval_s, params.")
    ],
    host: HostOption = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
) -> None:
    """Make the schedule what its file says. Can be repeated."""
    from pipelines import schedule as schedules
    from pipelines.endpoint import connect, endpoint
    from pipelines.plan import check_names, compiled, typed_parameters

    schedule = schedules.load_schedule(file)
    try:
        made = compiled(schedule.pipeline, schedule.placement)
        parameters = typed_parameters(made.spec, schedule.params)
        check_names(schedule.pipeline, parameters)
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None
    url = endpoint(host)
    account = made.placement.account_for(parameters)
    applied = schedules.apply(connect(url), url, namespace, schedule, made, parameters, account)
    typer.echo(f"schedule {schedule.name} {applied.outcome} ({applied.id}, version {made.version})")


@schedule_app.command("list")
def list_schedules(host: HostOption = None, namespace: NamespaceOption = DEFAULT_NAMESPACE) -> None:
    """Show the schedules of a namespace: name, state, when, how many at once, id."""
    from pipelines.endpoint import connect, endpoint
    from pipelines.schedule import line, recurring_runs

    url = endpoint(host)
    for run in recurring_runs(connect(url), url, namespace):
        typer.echo(line(run))


ScheduleArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


@schedule_app.command("pause")
def pause(name: ScheduleArgument, host: HostOption = None, namespace: NamespaceOption = DEFAULT_NAMESPACE) -> None:
    """Stop starting runs; those that run go on. Applying a file with enabled: true resumes it."""
    switched(name, host, namespace, False)


@schedule_app.command("resume")
def resume(name: ScheduleArgument, host: HostOption = None, namespace: NamespaceOption = DEFAULT_NAMESPACE) -> None:
    """Start runs again."""
    switched(name, host, namespace, True)


def switched(name: str, host: str | None, namespace: str, enabled: bool) -> None:
    """Pause or resume a schedule and say so."""
    from pipelines.endpoint import connect, endpoint
    from pipelines.schedule import switch

    url = endpoint(host)
    switch(connect(url), url, namespace, name, enabled)
    typer.echo(f"schedule {name} {'resumed' if enabled else 'paused'}")


@pipelines_app.command()
def check(
    pipeline: PipelineArgument,
    placement: PlacementOption,
    host: HostOption = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URL", help="The tracking server as seen from here; the placement's if not given.")
    ] = None,
    store: Annotated[str | None, typer.Option(metavar="s3://BUCKET/PREFIX", help="Where an object is tried.")] = None,
    autoscaled: Annotated[bool, typer.Option("--autoscaled", help="A GPU pool without a node is no fault.")] = False,
) -> None:
    """Look for what a run needs before it fails over it; one line a finding, exit code 1 if anything is missing."""
    from pipelines.check import check_cluster, check_endpoint, tracking_uri
    from pipelines.check_services import TRACKING, check_image, check_mlflow, check_store
    from pipelines.endpoint import connect, endpoint
    from pipelines.plan import compiled, images, stage_plans
    from serving.promotion.kserve_api import connect_cluster

    made = compiled(pipeline, placement)
    stages = [plan.name for plan in stage_plans(made)]
    places = [made.placement.of(stage) for stage in stages]
    uri = mlflow or tracking_uri(connect_cluster, namespace, places, TRACKING) or os.environ.get(TRACKING)

    def findings() -> Iterator[Finding]:
        yield check_endpoint(lambda: connect(endpoint(host)))
        yield from check_cluster(connect_cluster, namespace, made.placement, stages, autoscaled)
        yield check_mlflow(uri)
        yield check_store(store)
        yield from map(check_image, images(made.spec))

    failed = 0
    for finding in findings():
        typer.echo(finding)
        failed += finding.passed is False
    if failed:
        raise StageFailed(f"check: {failed} of what {pipeline} needs {'is' if failed == 1 else 'are'} missing")
    typer.echo("nothing is missing")
