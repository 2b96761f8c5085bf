"""Stage `coevolve`: one backbone and one start, and for each rule of the profile agents and a router of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from routewright.ensemble_router.agents import load_adapters, save_adapters
from routewright.ensemble_router.coevolve import DONE, coevolve
from routewright.ensemble_router.dataset import DESCRIPTION, load_split
from routewright.ensemble_router.profile import EnsembleProfile
from routewright.ensemble_router.router import save_ensemble_router
from routewright.ensemble_router.warm_up import base_model, warm_adapters
from routewright.errors import BadInput

BASE, WARM, RULES_FOLDER, ROUTER, IDENTITY = "base", "warm", "rules", "router", "coevolution.json"
SERVED = "familiarity"


def coevolve_rules(dataset: Path, out: Path, profile: EnsembleProfile, seed: int) -> None:
    """Train every rule of the profile from the same warm agents on the same budget; what is finished is not repeated.

    Writes base/, warm/<agent>/, rules/<rule>/ and, last, router/: the co-evolved heads and adapters as they are served.
    A killed run goes on from its checkpoints. BadInput where `out` is of another profile, seed or dataset.
    """
    out.mkdir(parents=True, exist_ok=True)
    check_identity(out, identity_of(dataset, profile, seed))
    tasks = load_split(dataset, "train")
    base, tokenizer = base_model(profile, tasks, out / BASE, seed)
    if not (out / WARM / DONE).is_file():
        model = warm_adapters(base, tokenizer, tasks, profile, seed)
        save_adapters(model, out / WARM)
        (out / WARM / DONE).write_text("{}", encoding="utf-8")
    for rule in profile.coevolve.rules:
        folder = out / RULES_FOLDER / rule
        if (folder / DONE).is_file():
            continue
        fresh, _ = base_model(profile, tasks, out / BASE, seed)  # PEFT changes the model that it is given
        model = load_adapters(fresh, out / WARM, profile.agents.names)
        coevolve(profile, tasks, model, tokenizer, folder, rule, seed)
    save_ensemble_router(out / ROUTER, out / RULES_FOLDER / SERVED, out / BASE, profile.backbone)


def identity_of(dataset: Path, profile: EnsembleProfile, seed: int) -> dict[str, Any]:
    """What a training depends on, beside the code."""
    path = Path(dataset) / DESCRIPTION
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{path}: expected what the synthesize stage writes") from None
    return {"training_sha256": profile.training_digest, "seed": seed, "tasks_sha256": tasks}


def read_identity(out: Path) -> dict[str, Any] | None:
    """What the folder's training was of; None where there is none."""
    try:
        return dict(json.loads((out / IDENTITY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def check_identity(out: Path, identity: dict[str, Any]) -> None:
    """Write the identity into a fresh folder; BadInput where the folder has another one."""
    path = out / IDENTITY
    if not path.is_file():
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(identity, indent=1), encoding="utf-8")
        os.replace(partial, path)
    if read_identity(out) != identity:
        raise BadInput(f"{path}: the folder is of another profile, seed or dataset, expected {identity}")
