"""A handful of games, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from routewright.step_router.environments.textworld_env import TextWorldEnvironment


@pytest.fixture(scope="session")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    return tmp_path_factory.mktemp("games")


@pytest.fixture
def textworld_env(games: Path) -> TextWorldEnvironment:
    return TextWorldEnvironment(games)
