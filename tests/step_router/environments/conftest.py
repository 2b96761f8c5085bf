"""A handful of games, made once a session, and a machine that refuses the sandbox its walls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from routewright.sandbox import Sandbox, check_walls
from routewright.step_router.environments.textworld_env import TextWorldEnvironment


@pytest.fixture(scope="session")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    return tmp_path_factory.mktemp("games")


@pytest.fixture
def textworld_env(games: Path) -> TextWorldEnvironment:
    return TextWorldEnvironment(games)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every sandbox is refused its walls, and nobody allowed to do without."""
    monkeypatch.delenv("ROUTEWRIGHT_SANDBOX", raising=False)
    monkeypatch.setattr(Sandbox.__init__, "__defaults__", (None, False))
    check_walls.cache_clear()
    yield
    check_walls.cache_clear()
