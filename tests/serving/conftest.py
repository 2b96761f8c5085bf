"""Tiny routers, and applications that serve them within the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kserve", reason="the extra serve is not installed")

from tiny_routers import save_search_router, save_step_router

from serving.exploration import Exploration
from serving.predictor import Predictor
from serving.search_router import SearchRouter
from serving.step_router import StepRouterPredictor


@pytest.fixture(scope="session")
def search_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_search_router(tmp_path_factory.mktemp("search-router"))


@pytest.fixture(scope="session")
def step_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_step_router(tmp_path_factory.mktemp("step-router"))


@pytest.fixture
def serve(search_folder: Path, step_folder: Path) -> Iterator[Callable[..., Predictor]]:
    """Makes warm predictors, which are stopped after the test."""
    made: list[Predictor] = []

    def make(
        router: str = "search-router", epsilon: float = 0.0, cap: float = 1.0, redaction: Any = "none", **settings: Any
    ) -> Predictor:
        exploration = Exploration(epsilon, cap, seed=0)
        served: Any = (
            SearchRouter(search_folder, exploration, redaction)
            if router == "search-router"
            else StepRouterPredictor(step_folder, exploration)
        )
        made.append(Predictor(served, **{"deadline_s": 60.0, **settings}))  # on a busy machine nothing is refused
        made[-1].load()
        return made[-1]

    yield make
    for predictor in made:
        predictor.stop()
