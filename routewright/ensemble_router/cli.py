"""``routewright ensemble``: what is done to a trained ensemble router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Change a trained ensemble router.", no_args_is_help=True)


@app.callback()
def ensemble() -> None:
    """Change a trained ensemble router."""


@app.command(name="add-agent")
def add_agent(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A trained ensemble router's folder.")],
    log: Annotated[
        Path, typer.Option(metavar="FILE", help='JSON lines {"query": …, "outcome": {AGENT: 0 to 1}}, or a decision log.')
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the larger router goes; a new folder.", file_okay=False)],
    name: Annotated[str, typer.Option(metavar="NAME", help="The new agent, as the log's outcomes call it.")],
    adapter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The agent's LoRA adapter, as PEFT writes it.", file_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the head's start and of the order of the queries.")] = 0,
) -> None:
    """Attach an agent to a trained router and train its familiarity head alone; all others stay as they are."""
    from routewright.ensemble_router.add_agent import add_agent as attach

    told = attach(model, log, out, name, adapter, seed)
    typer.echo(f"{name}: head trained for {told['steps']} steps on {counted(told['queries'])} with an outcome of its own")
    for group, meaning in (("above", "at least as good as the average"), ("below", "worse than the average")):
        if told[group]:
            typer.echo(
                f"familiarity where it is {meaning} ({counted(told[group]['queries'])}): "
                f"{told[group]['before']:.3f} → {told[group]['after']:.3f}"
            )
    typer.echo(f"Serve it: routewright serve ensemble-router --model {out}")


def counted(queries: int) -> str:
    """1 query, 2 queries."""
    return "1 query" if queries == 1 else f"{queries:,} queries"
