"""Trainings that take no time, as stages have them."""

from __future__ import annotations

import os
from pathlib import Path

from routewright.config import Profile
from routewright.errors import BadInput


def train_toy(dataset: Path, out: Path, profile: Profile, seed: int) -> None:
    """Writes what it was given, and which process of how many it is."""
    if seed == 13:
        raise BadInput(f"{dataset / 'data.txt'}, line 7: expected a number")
    out.mkdir(parents=True, exist_ok=True)
    found = (dataset / "data.txt").read_text()
    process = f"{os.environ.get('RANK', 'none')} of {os.environ.get('WORLD_SIZE', 'none')}"
    seen = ",".join(sorted(path.name for path in out.iterdir()))
    (out / "model.txt").write_text(f"{found} {profile.name} {seed} {process} after {seen}")
    print(f"trained by process {process}")
