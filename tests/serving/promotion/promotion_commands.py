"""The promotion commands as a person calls them."""

from __future__ import annotations

import sys

import pytest
import typer

from routewright import cli
from serving.promotion.cli import promotion_app


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of ``routewright ARGUMENTS`` with the promotion commands mounted."""
    app = typer.Typer()
    app.add_typer(promotion_app)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["routewright", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)
