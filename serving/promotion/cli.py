"""``routewright promote``, ``rollback`` and ``status``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from serving.promotion.deployment import Deployment

promotion_app = typer.Typer()

RouterArgument = Annotated[
    Literal["search-router", "step-router", "ensemble-router"],
    typer.Argument(metavar="ROUTER", help="search-router, step-router or ensemble-router."),
]
DeployOption = Annotated[
    Path | None,
    typer.Option(
        "--deploy", metavar="FILE", help="deploy.yaml: namespace, service, mode, image, canary. Without: MLflow only."
    ),
]


@promotion_app.command()
def promote(
    router: RouterArgument,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="What routewright run wrote to --out; or --version.")
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="A version in the registry, as the challenger that retraining leaves there."),
    ] = None,
    deploy: DeployOption = None,
    gates: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML with other bounds for the gates.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="For decision.json, decision.md, MODEL_CARD.md; if not given, promotion in RUN or here."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Judge, and show the manifest and how it differs from what is deployed.")
    ] = False,
) -> None:
    """Judge a trained router against the champion, roll it out in steps and make it the champion. Can be repeated."""
    from routewright import tracking
    from routewright.errors import BadInput
    from routewright.evaluation.gates import GateBounds, load_bounds
    from serving.promotion import promote as promotion
    from serving.promotion.registered import promote_version

    if version is not None:
        if run is not None or gates is not None:
            raise BadInput("--version: expected neither --run nor --gates, a registered version has been judged")
        tracking.expect_store()
        place = out or Path("promotion")
        decision = promote_version(router, str(version), deployment(deploy), place, typer.echo, dry_run)
    elif run is not None:
        bounds = GateBounds() if gates is None else load_bounds(gates)
        candidate = promotion.candidate_of_run(router, run)
        decision = promotion.promote(candidate, deployment(deploy), bounds, out or run / "promotion", typer.echo, dry_run)
    else:
        raise BadInput("promote: expected --run DIR or --version NUMBER")
    for check in decision.checks:
        value = "not measured" if check.value is None else f"{check.value:.4g}"
        typer.echo(f"{'✓' if check.passed else '✗'} {check.name}: {value} (bound {check.bound:g}; {check.why})")
    if decision.champion is None and decision.checks:
        typer.echo("no champion to compare with: absolute gates only")
    typer.echo(f"{decision.outcome}: {decision.reason}")
    promotion.raise_unless_done(decision)
    if decision.gate:
        raise typer.Exit(3)


@promotion_app.command()
def rollback(router: RouterArgument, deploy: DeployOption = None) -> None:
    """Give traffic and the alias champion back to the previous version. Can be repeated."""
    from routewright.tracking import expect_store
    from serving.promotion.promote import roll_back

    expect_store()
    typer.echo(roll_back(router, deployment(deploy), typer.echo))


@promotion_app.command()
def status(router: RouterArgument, deploy: DeployOption = None) -> None:
    """Show the aliases in MLflow and, with --deploy, what the InferenceService serves; one JSON object."""
    import json

    from routewright.tracking import expect_store
    from serving.promotion.promote import status as found

    expect_store()
    typer.echo(json.dumps(found(router, deployment(deploy)), indent=2))


def deployment(file: Path | None) -> Deployment | None:
    """The deployment of that file, None where none is given."""
    if file is None:
        return None
    from serving.promotion.deployment import load_deployment

    return load_deployment(file)
