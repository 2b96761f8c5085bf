"""A step router's tasks from a name, a path or a version, in one folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from routewright.data_versions import fetch_version, parse_source
from routewright.errors import BadInput
from routewright.step_router.dataset import ROUTER_TASKS, TASKS, fetch_tasks, read_tasks
from routewright.step_router.profile import StepRouterProfile


def fetch_dataset(source: str, out: Path, profile: StepRouterProfile) -> None:
    """`fetch_tasks` of a name or path, or of a version (see `routewright.data_versions`) of what it takes or wrote.

    A version's revision and md5 are kept in dataset.json. Tasks that `fetch_tasks` wrote come as they are, whatever the
    profile asks for; BadInput where the router has a single one of them.
    """
    version = parse_source(source)
    if version is None:
        fetch_tasks(source, out, profile)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "version"
        facts = fetch_version(version, folder)
        entries = list(folder.iterdir())
        if (folder / TASKS).is_file():
            found = len(read_tasks(folder).splits["router"])
            if found < ROUTER_TASKS:  # of before this was checked where tasks are split
                raise BadInput(f"{source}: {TASKS}: splits.router: expected at least {ROUTER_TASKS} tasks, found {found}")
            shutil.copytree(folder, out, dirs_exist_ok=True)
        elif len(entries) == 1 and entries[0].is_file():
            fetch_tasks(str(entries[0]), out, profile)
        else:
            fetch_tasks(str(folder), out, profile)
    (out / "dataset.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
