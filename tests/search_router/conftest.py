"""The household pool as a data set, its examples, and routers trained on it once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from household import profile_with, read_splits, write_household

from routewright.config import Profile
from routewright.pools.fetch import fetch_dataset
from routewright.pools.pool import Pool, load_pool
from routewright.search_router.examples import Example
from routewright.search_router.synthesis import synthesize


@pytest.fixture(scope="session")
def profile() -> Profile:
    """Smoke with enough updates to see a reward rise; what the words say is what reinforcement learning finds out."""
    return profile_with(
        synthesis={"queries_per_agent": 0},
        sft={"queries": 120, "epochs": 6},
        rl={"outcomes": 120, "epochs": 20, "batch_size": 24, "samples": 16, "lr": 1e-5, "head_lr": 1e-5, "word_lr": 0.1},
    )


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("household")
    fetch_dataset(str(write_household(folder / "source")), folder / "dataset")
    return folder / "dataset"


@pytest.fixture(scope="session")
def pool(dataset: Path) -> Pool:
    return load_pool(dataset / "pool.yaml")


@pytest.fixture(scope="session")
def examples(dataset: Path, profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    synthesize(dataset, folder, profile, seed=0)
    return folder


@pytest.fixture(scope="session")
def splits(examples: Path) -> dict[str, list[Example]]:
    return read_splits(examples)


@pytest.fixture(scope="session")
def sft_folder(dataset: Path, examples: Path, profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from routewright.search_router.sft import train_sft

    folder = tmp_path_factory.mktemp("sft")
    train_sft(dataset, examples, folder, profile, seed=0)
    return folder


@pytest.fixture(scope="session")
def rl_folder(
    dataset: Path, examples: Path, sft_folder: Path, profile: Profile, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    from routewright.search_router.rl import train_rl

    folder = tmp_path_factory.mktemp("rl")
    train_rl(dataset, examples, sft_folder, folder, profile, seed=0)
    return folder


@pytest.fixture(scope="session")
def evaluated(
    dataset: Path, examples: Path, sft_folder: Path, rl_folder: Path, profile: Profile,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:  # fmt: skip
    from routewright.search_router.evaluate import evaluate

    folder = tmp_path_factory.mktemp("evaluated")
    evaluate(dataset, examples, sft_folder, rl_folder, folder, profile, seed=0)
    return folder
