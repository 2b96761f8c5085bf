"""One stage on folders, without KFP and MLflow: what ``dvc repro`` runs (dvc.yaml), by the functions of the components.

python -m routewright.stages sft DATASET EXAMPLES --out FOLDER --profile smoke --seed 0
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from routewright.errors import BadInput, StageFailed

Stage = Literal[
    "fetch-search", "synthesize-search", "sft", "rl", "evaluate-search",
    "fetch-step", "synthesize-step", "distill-bc", "verifier", "distill-dpo", "calibrate", "evaluate-step",
    "fetch-ensemble", "synthesize-ensemble", "coevolve", "evaluate-ensemble",
]  # fmt: skip
ROUTERS: dict[str, tuple[Stage, ...]] = {
    "search": ("fetch-search", "synthesize-search", "sft", "rl", "evaluate-search"),
    "ensemble": ("fetch-ensemble", "synthesize-ensemble", "coevolve", "evaluate-ensemble"),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    stage: Annotated[Stage, typer.Argument(metavar="STAGE", help="A stage of dvc.yaml.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where its result goes.", file_okay=False)],
    inputs: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER…", help="Results of earlier stages, in the function's order.")
    ] = None,
    profile: Annotated[str, typer.Option(help="smoke, laptop, gpu, or a profile file; fetch-search needs none.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
    source: Annotated[str, typer.Option(help="fetch-search: a pool. fetch-step: an environment.")] = "",
    metrics: Annotated[Path | None, typer.Option(metavar="FILE", help="Numbers for dvc metrics.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="FILE", help="Curves for dvc plots.")] = None,
) -> None:
    """Run one stage on folders."""
    out.mkdir(parents=True, exist_ok=True)
    given, settled = inputs or [], profile_for(stage, profile)
    match stage:
        case "fetch-search":
            from routewright.pools.fetch import fetch_dataset

            fetch_dataset(source, out)
        case "fetch-step":
            from routewright.step_router.fetch import fetch_dataset as fetch_step

            fetch_step(source, out, settled)
        case "fetch-ensemble":
            from routewright.ensemble_router.fetch import fetch_tasks

            fetch_tasks(out, settled)
        case _:
            function_of(stage)(*given, out, settled, seed)
    if metrics is not None:
        write_json(metrics, numbers_of(out))
    if plots is not None:
        write_json(plots, history_of(out))


def profile_for(stage: Stage, profile: str) -> Any:
    """The profile of that name or file among those of the stage's router; None where a pool is all that is asked for."""
    from routewright.config import load_profile
    from routewright.ensemble_router.profile import load_ensemble_profile
    from routewright.step_router.profile import load_step_profile

    if stage == "fetch-search":
        return None
    if stage in ROUTERS["search"]:
        return load_profile(profile)
    return (load_ensemble_profile if stage in ROUTERS["ensemble"] else load_step_profile)(profile)


def function_of(stage: Stage) -> Callable[..., Any]:
    """The function of a stage: (folders of earlier stages …, out, profile, seed)."""
    from importlib import import_module

    module, function = {
        "synthesize-search": ("search_router.synthesis", "synthesize"),
        "sft": ("search_router.sft", "train_sft"),
        "rl": ("search_router.rl", "train_rl"),
        "evaluate-search": ("search_router.evaluate", "evaluate"),
        "synthesize-step": ("step_router.synthesis", "synthesize"),
        "distill-bc": ("step_router.bc", "distill_bc"),
        "verifier": ("step_router.verifier", "train_verifier"),
        "distill-dpo": ("step_router.dpo", "distill_dpo"),
        "calibrate": ("step_router.calibration", "calibrate_router"),
        "evaluate-step": ("step_router.evaluation_run", "evaluate"),
        "synthesize-ensemble": ("ensemble_router.fetch", "synthesize_tasks"),
        "coevolve": ("ensemble_router.coevolve_rules", "coevolve_rules"),
        "evaluate-ensemble": ("ensemble_router.evaluation_run", "evaluate_ensemble"),
    }[stage]
    found: Callable[..., Any] = getattr(import_module(f"routewright.{module}"), function)
    return found


def numbers_of(folder: Path) -> dict[str, Any]:
    """{row: {metric: mean}} of a summary.json, else all numbers of a stats.json, nested as they are."""
    if (folder / "summary.json").is_file():
        rows = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rows"]
        return {row["name"]: {name: value["mean"] for name, value in row["metrics"].items()} for row in rows}
    return only_numbers(json.loads((folder / "stats.json").read_text(encoding="utf-8")))


def only_numbers(content: dict[str, Any]) -> dict[str, Any]:
    """What is a number, or an object of numbers."""
    kept = {name: only_numbers(value) if isinstance(value, dict) else value for name, value in content.items()}
    return {
        name: value for name, value in kept.items() if isinstance(value, int | float) or (isinstance(value, dict) and value)
    }


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of history.jsonl."""
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def write_json(file: Path, content: Any) -> None:
    """Write a file that DVC reads."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        app()
    except (BadInput, StageFailed) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2 if isinstance(error, BadInput) else 1)
