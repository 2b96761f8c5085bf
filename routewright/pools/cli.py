"""`routewright pool check|stats`: is this pool sound, and what is in it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from routewright.errors import BadInput

if TYPE_CHECKING:
    from routewright.pools.pool import Pool

EMBEDDED = "aws-docs"

app = typer.Typer(help="Look at pools: agents, their corpora and their queries.", no_args_is_help=True)
PoolArgument = Annotated[str, typer.Argument(metavar="POOL", help=f"A pool.yaml, or {EMBEDDED} for the embedded pool.")]


@app.command()
def check(pool: PoolArgument) -> None:
    """Read every file of a pool, probe its HTTP agents, and say what is wrong (exit 2: bad input, 1: a dead agent)."""
    from rich.console import Console
    from rich.markup import escape

    with _loaded(pool) as loaded:
        from routewright.pools.pool import HTTPSearch, check_pool
        from routewright.pools.search import PoolSearch

        check_pool(loaded)
        searches = PoolSearch(loaded)
        console, dead = Console(), 0
        for agent in loaded.agents:
            if isinstance(agent.search, HTTPSearch):
                started = time.perf_counter()
                searches.search(agent.name, agent.card, k=1)
                answer = f"answers in {1000 * (time.perf_counter() - started):.0f} ms"
                faults = searches.failures.get(agent.name)
            else:
                answer, faults = f"{len(searches.index(agent.name).documents):,} documents", None
            dead += bool(faults)
            mark, text = ("[red]✗[/red]", faults[0]) if faults else ("[green]✓[/green]", answer)
            console.print(f"{mark} [bold]{escape(agent.name)}[/bold]  {escape(text)}", highlight=False)
        if dead:
            typer.echo(f"{loaded.path}: {dead} of {len(loaded.agents)} agents did not answer", err=True)
            raise typer.Exit(1)
        console.print(f"{escape(loaded.name)}: {len(loaded.agents)} agents, fallback {escape(loaded.fallback)}, "
                      f"digest {loaded.digest[:12]}", highlight=False)


@app.command()
def stats(pool: PoolArgument) -> None:
    """Documents, dates, queries by split, document length and the latency of one example search, by agent."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    with _loaded(pool) as loaded:
        from routewright.pools.pool import SPLITS, HTTPSearch, check_pool
        from routewright.pools.search import PoolSearch

        check_pool(loaded)
        searches = PoolSearch(loaded)
        table = Table(title=escape(f"{loaded.name} (fallback {loaded.fallback})"))
        table.add_column("agent", overflow="fold")
        for heading in ("documents", "dated", "tokens/doc", *SPLITS, "search ms"):
            table.add_column(heading, justify="right")
        for agent in loaded.agents:
            if isinstance(agent.search, HTTPSearch):
                size = ["http", "", ""]
            else:
                index = searches.index(agent.name)
                count = len(index.documents)
                size = [f"{count:,}", f"{index.dated / count:.0%}", f"{index.mean_length:.0f}"]
            judged = [len(loaded.qrels(agent.name, split)) for split in SPLITS]
            queries = loaded.queries(agent.name)
            started = time.perf_counter()
            searches.search(agent.name, queries[0]["text"] if queries else agent.card)
            latency = f"{1000 * (time.perf_counter() - started):.1f}"
            table.add_row(escape(agent.name), *size, *(str(n) if n else "–" for n in judged),
                          "failed" if searches.failures else latency)
        Console().print(table)


@contextmanager
def _loaded(pool: str) -> Iterator[Pool]:
    """The pool, the embedded one written to a temporary folder; bad input becomes one sentence and exit code 2."""
    from routewright.pools.pool import load_pool

    with tempfile.TemporaryDirectory() as folder:
        try:
            if pool == EMBEDDED:
                from routewright.pools.fetch import fetch_dataset

                fetch_dataset(pool, Path(folder) / EMBEDDED)
                yield load_pool(Path(folder) / EMBEDDED / "pool.yaml")
            else:
                yield load_pool(Path(pool))
        except BadInput as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None
