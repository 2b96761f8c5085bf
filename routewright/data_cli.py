"""`routewright data snapshot`: versions of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Versions of datasets (DVC, S3, git tags).", no_args_is_help=True)


@app.command()
def snapshot(
    place: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help="What routewright run wrote, or a dataset's folder.")],
    remote: Annotated[
        str, typer.Option(metavar="URL", help="DVC's remote: s3://bucket/path (boto3's credentials), or /path.")
    ],
    tag: Annotated[str, typer.Option(metavar="NAME", help="The git tag that will name this version.")],
    repo: Annotated[Path, typer.Option(metavar="DIR", help="The git repository; nothing checked out changes.")] = Path(),
) -> None:
    """Push a dataset to a DVC remote and tag it in git. Can be repeated."""
    from routewright.data_snapshot import datasets_of
    from routewright.data_snapshot import snapshot as commit

    made = commit(datasets_of(place), remote, tag, repo)
    for path, md5 in made.md5.items():
        typer.echo(f"{path}  md5 {md5}")
    typer.echo(f"tag {made.tag}, commit {made.commit[:12]}: {'pushed to ' + remote if made.fresh else 'was there already'}")
    for source in made.sources(str(repo.resolve())):
        typer.echo(f"a pipeline reads it as '{source}'; others after git push origin {tag}")
