"""The tasks of a step router: text games, programming problems or shell tasks, split by task."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import Progress

from routewright.errors import BadInput
from routewright.language_models.backbone import cache_folder
from routewright.step_router.environments.code_env import CodeEnvironment, load_problems
from routewright.step_router.environments.protocol import Environment
from routewright.step_router.environments.shell_env import OWN_TASKS, ShellEnvironment, load_tasks
from routewright.step_router.environments.textworld_env import (
    SPLITS,
    GameSpec,
    TextWorldEnvironment,
    game_specs,
    make_game,
)
from routewright.step_router.identity import check_identity, folder_digest
from routewright.step_router.profile import StepRouterProfile, TasksSection

TASKS, GAMES, PROBLEMS, FOLDERS = "tasks.json", "games", "problems.jsonl", "tasks"
ROUTER_TASKS = 2  # at least: one that the risk router is fitted on, and one for its temperature


@dataclass(frozen=True)
class Tasks:
    """What `fetch_tasks` wrote. ``environment``: textworld, code or shell; ``splits``: task names by split."""

    folder: Path
    environment: str
    splits: dict[str, list[str]]


def fetch_tasks(source: str, out: Path, profile: StepRouterProfile) -> None:
    """Lay out the tasks of a source as a folder that needs nothing else. BadInput where it holds those of another.

    ``source``: "textworld" (games are made, seconds each, and kept in the cache), "shell" (our own tasks), a .jsonl or
    .jsonl.gz file of programming problems, or a folder of Terminal-Bench task folders.
    """
    wanted = profile.tasks
    told = wanted.model_dump_json()
    if source == "textworld":
        check_identity(out, TASKS, {"environment": source, "tasks": told})
        splits = _make_games(out / GAMES, wanted, profile.workers)
        environment = "textworld"
    elif source.endswith((".jsonl", ".jsonl.gz")):
        problems = load_problems(Path(source))
        name = PROBLEMS + (".gz" if source.endswith(".gz") else "")
        environment, splits = "code", split_tasks([problem.id for problem in problems], wanted)
        content = hashlib.sha256(Path(source).read_bytes()).hexdigest()
        check_identity(out, TASKS, {"environment": f"{name} {content}", "tasks": told})
        shutil.copyfile(source, out / name)
    else:
        folder = OWN_TASKS if source == "shell" else Path(source)
        if not folder.is_dir():
            raise BadInput(
                f"environment '{source}': expected textworld, shell, a .jsonl file of problems or a folder of task folders"
            )
        names = [task.name for task in load_tasks(folder)]
        environment, splits = "shell", split_tasks(names, wanted)
        copied = shutil.ignore_patterns("__pycache__")
        check_identity(out, TASKS, {"environment": f"{FOLDERS} {folder_digest(folder, ())}", "tasks": told})
        shutil.copytree(folder, out / FOLDERS, dirs_exist_ok=True, ignore=copied)
    partial_file = out / f"{TASKS}.partial"
    partial_file.write_text(json.dumps({"source": source, "environment": environment, "splits": splits}, indent=1))
    os.replace(partial_file, out / TASKS)


def split_tasks(names: Sequence[str], wanted: TasksSection) -> dict[str, list[str]]:
    """Disjoint splits of a fixed set of tasks, in the profile's proportions where there are fewer than it asks for.

    The router's holds at least two: one to fit it on and one for its temperature. BadInput where there are too few tasks.
    """
    least = {split: ROUTER_TASKS if split == "router" else 1 for split in SPLITS}
    if len(names) < sum(least.values()):
        raise BadInput(
            f"environment: expected at least {sum(least.values())} tasks, {ROUTER_TASKS} for the router split and one for "
            f"each other, found {len(names)}"
        )
    shuffled = sorted(names)
    random.Random("split").shuffle(shuffled)
    sizes = [getattr(wanted, split) for split in SPLITS]
    share = min(1.0, len(names) / sum(sizes))
    counts = [max(least[split], int(size * share)) for split, size in zip(SPLITS, sizes, strict=True)]
    while sum(counts) > len(names):
        largest = max(range(len(SPLITS)), key=lambda i: (counts[i] > least[SPLITS[i]], counts[i]))
        counts[largest] -= 1
    splits, start = {}, 0
    for split, count in zip(SPLITS, counts, strict=True):
        splits[split] = shuffled[start : start + count]
        start += count
    return splits


def _make_games(folder: Path, wanted: TasksSection, workers: int) -> dict[str, list[str]]:
    specs = {split: game_specs(split, getattr(wanted, split), wanted.cooking, wanted.moves) for split in SPLITS}
    everything = [spec for split in specs.values() for spec in split]
    cache = cache_folder() / "textworld"
    folder.mkdir(parents=True, exist_ok=True)
    with Progress() as progress, ProcessPoolExecutor(workers) as pool:
        task = progress.add_task("games", total=len(everything))
        for path in pool.map(partial(_made, cache), everything):
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
            progress.advance(task)
    return {split: [spec.task for spec in chosen] for split, chosen in specs.items()}


def _made(cache: Path, spec: GameSpec) -> Path:
    return make_game(spec, cache)


def read_tasks(dataset: Path) -> Tasks:
    """The tasks of a folder; BadInput where it was not written by `fetch_tasks`."""
    file = dataset / TASKS
    try:
        content = json.loads(file.read_text())
        return Tasks(dataset, content["environment"], {split: content["splits"][split] for split in SPLITS})
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{file}: expected the tasks that the fetch-dataset stage writes") from None


def make_environment(tasks: Tasks) -> Environment:
    """The environment that plays these tasks."""
    if tasks.environment == "textworld":
        return TextWorldEnvironment(tasks.folder / GAMES)
    if tasks.environment == "code":
        plain = tasks.folder / PROBLEMS
        return CodeEnvironment(load_problems(plain if plain.is_file() else plain.with_name(PROBLEMS + ".gz")))
    return ShellEnvironment(load_tasks(tasks.folder / FOLDERS))
