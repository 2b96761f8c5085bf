"""The command line. Nothing heavy is imported before a command needs it: ``--help`` answers at once."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from datetime import date, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from routewright import __version__
from routewright.data_cli import app as data_app
from routewright.ensemble_router.cli import app as ensemble_app
from routewright.errors import BadInput, StageFailed
from routewright.pools.cli import app as pool_app
from serving.promotion.cli import promotion_app

if TYPE_CHECKING:
    from rich.console import RenderableType

    from routewright.pools.pool import Pool
    from routewright.pools.search import Hit
    from routewright.search_router.decision import Decision

EMBEDDED_POOL = "aws-docs"

app = typer.Typer(
    name="routewright",
    help="Train small language models to route queries and steps between agents, from outcomes.",
    epilog="Start with: [bold]routewright run search-router --pool aws-docs --out runs/search-router[/]",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(pool_app, name="pool")
app.add_typer(ensemble_app, name="ensemble")
app.add_typer(data_app, name="data")
app.add_typer(promotion_app)
if find_spec("pipelines"):  # a serving image has no pipelines
    from pipelines.cli import pipelines_app

    app.add_typer(pipelines_app)

PoolOption = Annotated[str, typer.Option("--pool", metavar="FILE|aws-docs", help="A pool.yaml, or the embedded pool.")]


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(f"routewright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def run(
    pipeline: Annotated[
        Literal["search-router", "step-router", "ensemble-router"],
        typer.Argument(metavar="PIPELINE", help="search-router, step-router or ensemble-router."),
    ],
    out: Annotated[Path, typer.Option(help="Where summary.json, report.html and all else go.", file_okay=False)],
    pool: Annotated[
        str | None,
        typer.Option(metavar="FILE|aws-docs", help="search-router: a pool.yaml, or the embedded pool."),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(
            metavar="textworld|shell|PATH",
            help="step-router: text games (unless given), shell tasks, a .jsonl(.gz) of problems, or a task folder.",
        ),
    ] = None,
    profile: Annotated[str, typer.Option(help="smoke, laptop, gpu, or a profile file.")] = "laptop",
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
    query_log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="search-router: a query log to learn from too.")
    ] = None,
) -> None:
    """Run a pipeline on this machine. Repeated with the same --out, it continues where it was stopped."""
    from rich.console import Console
    from rich.markup import escape

    arguments: dict[str, str | int]
    if pipeline == "search-router":
        arguments = search_arguments(pool, environment, profile, seed, query_log)
    elif pipeline == "step-router":
        arguments = step_arguments(pool, environment, profile, seed, query_log)
    else:
        arguments = ensemble_arguments(pool, environment, profile, seed, query_log)
    # Fixed to this stdout: the runner puts another in its place while KFP talks.
    console = Console(file=sys.stdout)
    chosen = " · ".join(f"{name} [cyan]{escape(str(value))}[/]" for name, value in arguments.items() if value != "")
    console.print(f"[bold]{pipeline}[/]  {chosen}", highlight=False)

    from pipelines.compile import PIPELINES
    from pipelines.run_local import publish_results, run_local
    from routewright.evaluation.summary import Summary, rich_table

    folders = run_local(PIPELINES[pipeline], pipeline, arguments, out, console)
    summary = publish_results(folders, out)
    console.print(rich_table(Summary.model_validate(summary)))
    report, model = escape(str(out / "report.html")), out / "model"
    console.print(f"[bold]{report}[/] shows it all; [bold]make ui[/] opens the tracked runs.", highlight=False)
    if pipeline == "search-router":
        trial = f'routewright route "a question" --pool {pool} --model {model}'
        console.print(f"Try it: {escape(trial)}", highlight=False)
    elif pipeline == "ensemble-router":
        trial = f"routewright serve ensemble-router --model {model}"
        console.print(f"Serve it: {escape(trial)}", highlight=False)
    else:
        console.print("In your agent's loop:")
        console.print(agent_loop(model), markup=False, highlight=False, soft_wrap=True)


def agent_loop(model: Path) -> str:
    """What an agent has to say to ask a trained step router before each step."""
    return f"""\
    from routewright.step_router.client import StepRouter
    router = StepRouter.load({str(model)!r})
    episode = router.episode(objective)
    decision = episode.decide(observation, candidates)  # on every step, the small model's own action first
    action = episode.acted(llm(observation) if decision.escalate else decision.take)"""


def search_arguments(
    pool: str | None, environment: str | None, profile: str, seed: int, query_log: Path | None
) -> dict[str, str | int]:
    """The search router's pipeline arguments; BadInput where an option is missing, another router's or faulty."""
    if environment is not None:
        raise BadInput(f"--environment {environment}: only step-router has an environment, search-router takes --pool")
    if pool is None:
        raise BadInput(f"--pool: missing, search-router expects a pool file or {EMBEDDED_POOL}")
    from routewright.config import load_profile
    from routewright.data_versions import parse_source

    load_profile(profile)
    if parse_source(pool) is None and pool != EMBEDDED_POOL:
        from routewright.pools.pool import load_pool

        load_pool(Path(pool))
    if query_log is not None:
        from routewright.pools.decision_log import log_files
        from routewright.pools.query_log import read_query_log

        if not any(file.is_file() for file in log_files(query_log)):
            raise BadInput(f"--query-log {query_log}: no such file, expected JSON lines")
        read_query_log(query_log)
    return {"pool": pool, "profile": profile, "seed": seed, "query_log": str(query_log or "")}


def step_arguments(
    pool: str | None, environment: str | None, profile: str, seed: int, query_log: Path | None
) -> dict[str, str | int]:
    """The step router's pipeline arguments; BadInput where an option is another router's or faulty."""
    if pool is not None:
        raise BadInput(f"--pool {pool}: only search-router has a pool, step-router takes --environment")
    if query_log is not None:
        raise BadInput(f"--query-log {query_log}: only search-router learns from a query log")
    from routewright.data_versions import parse_source
    from routewright.step_router.profile import load_step_profile

    load_step_profile(profile)
    chosen = environment or "textworld"
    if parse_source(chosen) is None:
        check_environment(chosen)
    return {"environment": chosen, "profile": profile, "seed": seed}


def check_environment(chosen: str) -> None:
    """BadInput where an environment's package, problems or tasks are missing or faulty, or the sandbox is refused."""
    from components.stage import environment_digest

    environment_digest(chosen)
    if chosen == "textworld":
        return
    from routewright.step_router.environments.code_env import CodeEnvironment, load_problems
    from routewright.step_router.environments.shell_env import OWN_TASKS, ShellEnvironment, load_tasks

    if chosen == "shell" or Path(chosen).is_dir():
        ShellEnvironment(load_tasks(OWN_TASKS if chosen == "shell" else Path(chosen)))
    else:
        CodeEnvironment(load_problems(Path(chosen)))


def ensemble_arguments(
    pool: str | None, environment: str | None, profile: str, seed: int, query_log: Path | None
) -> dict[str, str | int]:
    """The ensemble router's pipeline arguments; BadInput where an option is another router's or faulty."""
    if pool is not None:
        raise BadInput(f"--pool {pool}: only search-router has a pool, ensemble-router takes its tasks from the profile")
    if environment is not None:
        raise BadInput(
            f"--environment {environment}: only step-router has an environment, ensemble-router takes its tasks from the "
            "profile"
        )
    if query_log is not None:
        raise BadInput(f"--query-log {query_log}: only search-router learns from a query log")
    from components.stage import tasks_digest

    tasks_digest(profile)
    return {"profile": profile, "seed": seed}


@app.command(name="compile")
def compile_pipelines(
    out: Annotated[Path, typer.Option(help="Folder for the YAML files.", file_okay=False)] = Path("pipelines/compiled"),
    placement: Annotated[
        str | None, typer.Option(metavar="NAME|FILE|all", help="Where the stages run; bare pipelines if not given.")
    ] = None,
) -> None:
    """Compile the pipelines to KFP's YAML. ROUTEWRIGHT_IMAGE names the image, by digest."""
    from pipelines.compile import compile_all

    for file in compile_all(out, placement):
        typer.echo(file)


@app.command()
def route(
    query: Annotated[str, typer.Argument(help="What a person would ask.")],
    pool: PoolOption,
    model: Annotated[Path, typer.Option(metavar="DIR", help="A trained router's folder.")],
    reference_date: Annotated[
        str | None, typer.Option(metavar="YYYY-MM-DD", help='What "last week" counts from; today if not given.')
    ] = None,
    results: Annotated[int, typer.Option(min=1, max=100, help="How many results to show.")] = 10,
) -> None:
    """Decide who answers a query, ask them, and show decision and results."""
    if not query.strip():
        raise BadInput("QUERY: the query is empty, expected a question or keywords")
    reference = date.today() if reference_date is None else iso_date(reference_date)
    from rich.console import Console

    from routewright.pools.search import PoolSearch, fuse
    from routewright.search_router.router import as_interval, load_router, search_query

    router = load_router(model)
    with tempfile.TemporaryDirectory() as folder:
        searched = open_pool(pool, Path(folder))
        if missing := [name for name in router.names if name not in searched.names]:
            raise BadInput(
                f"--pool {pool}: it has no agent {missing[0]!r}, expected the pool {router.description.get('pool')!r} that "
                f"the model {model} was trained on"
            )
        decision = router.decide(query, reference)
        text, interval = search_query(query, decision.keywords), as_interval(decision)
        search = PoolSearch(searched)
        lists = search.search_many([(agent, text, interval) for agent in decision.agents], k=results)
        hits = fuse(lists, depth=results)
    console = Console()
    console.print(decision_panel(query, decision, searched.fallback))
    console.print(results_table(hits, dict(zip(decision.agents, lists, strict=True))))
    for agent in search.failures:
        typer.echo(f"agent {agent} did not answer", err=True)


@app.command()
def serve(
    router: Annotated[
        Literal["search-router", "step-router", "ensemble-router"],
        typer.Argument(metavar="ROUTER", help="search-router, step-router or ensemble-router."),
    ],
    model: Annotated[Path, typer.Option(metavar="DIR", help="A trained router's folder.")],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for everywhere, as in a container.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP: KServe V1 and V2, feedback, metrics.")] = 8080,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC: KServe V2; 0 for none.")] = 8081,
    log: Annotated[
        str | None, typer.Option(metavar="FILE|URL", help="Log decisions and feedback to a file or a collector.")
    ] = None,
    redact: Annotated[Literal["none", "hash", "drop"], typer.Option(help="What the log keeps of a query.")] = "none",
    epsilon: Annotated[float, typer.Option(min=0, max=1, help="Share of decisions drawn at random, to learn from.")] = 0.0,
    epsilon_cap: Annotated[float, typer.Option(min=0, max=1, help="At most this share of 1,000 is drawn.")] = 1.0,
    epsilon_agents: Annotated[int, typer.Option(min=1, max=64, help="Agents of the largest set that is drawn.")] = 3,
    deadline_ms: Annotated[int, typer.Option(min=1, max=60000, help="No request waits longer.")] = 2000,
) -> None:
    """Serve a trained router over HTTP and gRPC until Ctrl-C or SIGTERM."""
    sys.argv = sys.argv[:1]  # importing kserve parses the command line, and takes --log and --model for its own
    # torch keeps a compiled kernel for each length of text in a batch, 1,024 of them, which is most of a gigabyte
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "256")
    try:
        from serving.server import serve as run_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("routewright", "serving"):
            raise
        raise BadInput(f"serve: {error.name} is not installed, pip install 'routewright[serve]' brings it") from None
    run_server(
        router, model, host=host, port=port, grpc_port=grpc_port, log=log, redaction=redact, epsilon=epsilon,
        epsilon_cap=epsilon_cap, epsilon_agents=epsilon_agents, deadline_s=deadline_ms / 1000, say=typer.echo,
    )  # fmt: skip


def open_pool(pool: str, folder: Path) -> Pool:
    """The pool of that file, or the embedded one written to ``folder``."""
    from routewright.pools.pool import load_pool

    if pool != EMBEDDED_POOL:
        return load_pool(Path(pool))
    from routewright.pools.fetch import fetch_dataset

    fetch_dataset(pool, folder / pool)
    return load_pool(folder / pool / "pool.yaml")


def iso_date(text: str) -> date:
    """A date written YYYY-MM-DD; BadInput otherwise."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise BadInput(f"--reference-date {text}: expected a date such as 2024-05-31") from None


def decision_panel(query: str, decision: Decision, fallback: str) -> RenderableType:
    """The decision as a person reads it: every agent's probability as a bar, then keywords and days."""
    from rich.bar import Bar
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    agents = Table.grid(padding=(0, 1))
    for name, score in sorted(decision.scores.items(), key=lambda item: -item[1]):
        chosen = name in decision.agents
        style = "bold green" if chosen else "dim"
        bar = Bar(1.0, 0.0, score, width=24, color="green" if chosen else "bright_black")
        agents.add_row(Text("✓" if chosen else " ", style), Text(name, style), bar, Text(f"{score:.2f}", style))
    notes = Table.grid(padding=(0, 2))
    notes.add_row(Text("keywords", "dim"), Text(" · ".join(decision.keywords) or "none"))
    days = f"{decision.start or '…'} to {decision.end or '…'}" if decision.start or decision.end else "any time"
    notes.add_row(Text("days", "dim"), Text(days))
    if decision.abstained:
        notes.add_row(Text("abstained", "yellow"), Text(f"no agent is likely enough, so {fallback} answers"))
    return Panel(Group(agents, Text(), notes), title=Text(query[:200], "bold"), title_align="left", border_style="cyan")


def results_table(hits: list[Hit], lists: dict[str, list[Hit]]) -> RenderableType:
    """The fused results, each with the agents that found it."""
    from rich.table import Table
    from rich.text import Text

    if not hits:
        return Text("no results", "yellow")
    dated = any(hit.date for hit in hits)
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("#", justify="right", style="dim")
    table.add_column("result", overflow="fold")
    if dated:
        table.add_column("date", no_wrap=True)
    table.add_column("found by", style="green", overflow="fold")
    for rank, hit in enumerate(hits, 1):
        document = (hit.corpus, hit.doc_id)
        found_by = [name for name, found in lists.items() if document in {(h.corpus, h.doc_id) for h in found}]
        title = Text.assemble((hit.title or hit.doc_id, "bold"), ("  " + hit.doc_id if hit.title else "", "dim"))
        table.add_row(str(rank), title, *([hit.date or ""] if dated else []), Text(", ".join(found_by)))
    return table


def main() -> None:
    """Run the command line; every failure is one sentence on stderr and an exit code of the contract."""
    try:
        app()
    except BadInput as error:
        fail(str(error), 2)
    except StageFailed as error:
        fail(str(error), 1)
    except Exception as error:
        # The whole story goes to a file: a person gets one sentence, whoever mends it gets the traceback.
        with tempfile.NamedTemporaryFile("w", prefix="routewright-", suffix=".log", delete=False) as log:
            log.write(traceback.format_exc())
        fail(f"unexpected {type(error).__name__}: {error}; traceback in {log.name}", 1)


def fail(sentence: str, code: int) -> None:
    """Say one sentence on stderr and exit with the code."""
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(" ".join(sentence.split()), err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
