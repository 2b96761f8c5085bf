"""What an ensemble router's questions are made of, in one folder: the profile's task files, and which families it names."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from routewright import tracking
from routewright.ensemble_router.dataset import DESCRIPTION, synthesize
from routewright.ensemble_router.profile import EnsembleProfile, FileSection
from routewright.ensemble_router.task_files import load_tasks
from routewright.ensemble_router.verify import check_sandbox
from routewright.errors import BadInput

SCORED_BY_EXTRA = ("math", "reasoning-gym", "instructions")
"""Checks that packages of the ensemble extra score; of the instructions, those about the language."""


def fetch_tasks(out: Path, profile: EnsembleProfile) -> dict[str, Any]:
    """Read the profile's task files, copy them to ``out`` as they are, and return what dataset.json holds.

    Families are made by the synthesize stage; the version of reasoning-gym decides what they are. BadInput: a file that
    cannot be read (file, line and field are named), or tasks whose scorer is not installed.
    """
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    scored = bool(profile.tasks.families or profile.tasks.out_of_distribution)
    for number, file in enumerate(profile.tasks.files):
        tasks = load_tasks(file.path, file.domain)
        check_sandbox(tasks)
        counts[str(file.path)] = len(tasks)
        scored = scored or any(task.check in SCORED_BY_EXTRA for task in tasks)
        place = fetched(out, number, file)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.path, place)
    if scored:
        for package in ("langdetect", "math-verify", "reasoning-gym"):
            _version(package)
    (out / DESCRIPTION).unlink(missing_ok=True)
    described: dict[str, Any] = {
        "tasks": counts,
        "families": [one.model_dump() for one in (*profile.tasks.families, *profile.tasks.out_of_distribution)],
        "reasoning_gym": reasoning_gym_version(profile),
        "md5": tracking.md5_of(out),
    }
    write_description(out, described)
    return described


def fetched(folder: Path, number: int, file: FileSection) -> Path:
    """Where the profile's file of that number, counted from 0, lies in the fetched folder; rows are named after the file."""
    return folder / f"file-{number}" / file.path.name


def reasoning_gym_version(profile: EnsembleProfile) -> str:
    """The version of reasoning-gym, "" for a profile without families; BadInput where it is missing."""
    if not (profile.tasks.families or profile.tasks.out_of_distribution):
        return ""
    return _version("reasoning-gym")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise BadInput(f"{package} is not installed: expected `pip install 'routewright[ensemble]'`") from None


def synthesize_tasks(dataset: Path, out: Path, profile: EnsembleProfile, seed: int) -> None:
    """`synthesize` with the task files that `fetch_tasks` brought to ``dataset``, wherever the profile found them."""
    own = profile.tasks.files
    files = tuple(file.model_copy(update={"path": fetched(dataset, number, file)}) for number, file in enumerate(own))
    here = profile.model_copy(update={"tasks": profile.tasks.model_copy(update={"files": files})})
    out.mkdir(parents=True, exist_ok=True)
    described = synthesize(here, out, seed)
    # Where a run keeps its files is no part of its configuration.
    write_description(out, {**described, "config_sha256": profile.digest})


def write_description(folder: Path, described: dict[str, Any]) -> None:
    """Replace dataset.json as a whole."""
    partial = folder / f"{DESCRIPTION}.partial"
    partial.write_text(json.dumps(described, indent=1), encoding="utf-8")
    os.replace(partial, folder / DESCRIPTION)
