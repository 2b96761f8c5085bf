"""Stage `coevolve`: one backbone and one start, and for each rule of the profile agents and a router of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from routewright.ensemble_router.agents import Base, load_adapters, save_adapters
from routewright.ensemble_router.coevolve import DONE, coevolve, states_of
from routewright.ensemble_router.dataset import DESCRIPTION, load_split
from routewright.ensemble_router.familiarity import FusedHeads, load_heads, nearest
from routewright.ensemble_router.profile import EnsembleProfile
from routewright.ensemble_router.prompts import encode_prompt
from routewright.ensemble_router.router import save_ensemble_router
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.vllm_generation import vllm_engine
from routewright.ensemble_router.warm_up import base_model, warm_adapters, warm_generalist
from routewright.errors import BadInput
from routewright.evaluation.drift import ROUTES

BASE, WARM, GENERALIST, RULES_FOLDER, ROUTER, IDENTITY = "base", "warm", "generalist", "rules", "router", "coevolution.json"
SERVED = "familiarity"


def coevolve_rules(dataset: Path, out: Path, profile: EnsembleProfile, seed: int) -> None:
    """Train every rule of the profile from the same warm agents on the same budget; what is finished is not repeated.

    Writes base/ (base-1/ …), warm/<agent>/, rules/<rule>/ and, last, router/: the co-evolved heads and adapters as they are
    served, with how often each agent is the most familiar one on the dev questions, which drift is measured from.
    `one-model` begins from generalist/, one adapter with the warm-up of all, and `frozen-router` with the router that
    `frozen-agents` learnt.
    A killed run goes on from its checkpoints. BadInput where `out` is of another profile, seed or dataset.
    """
    out.mkdir(parents=True, exist_ok=True)
    check_identity(out, identity_of(dataset, profile, seed))
    tasks = load_split(dataset, "train")
    if not (out / WARM / DONE).is_file():
        for number in range(len(profile.backbones)):
            base, tokenizer = base_model(profile, tasks, base_folder(out, number), seed, number)
            save_adapters(warm_adapters(base, tokenizer, tasks, profile, seed, profile.names_on(number)), out / WARM)
        (out / WARM / DONE).write_text("{}", encoding="utf-8")
    alone = "one-model" in profile.coevolve.rules and profile.warm_up is not None
    if alone and not (out / GENERALIST / DONE).is_file():
        base, tokenizer = base_model(profile, tasks, base_folder(out, 0), seed)
        shutil.copytree(out / WARM, out / GENERALIST, ignore=shutil.ignore_patterns(DONE), dirs_exist_ok=True)
        # beside it the warm ones, which are never asked
        save_adapters(warm_generalist(base, tokenizer, tasks, profile, seed), out / GENERALIST)
        (out / GENERALIST / DONE).write_text("{}", encoding="utf-8")
    folders = {rule: out / RULES_FOLDER / rule for rule in profile.coevolve.rules}
    left = [rule for rule, folder in folders.items() if not (folder / DONE).is_file()]
    left.sort(key="frozen-router".__eq__)  # after frozen-agents
    engines = [vllm_engine(one, profile.agents, number) for number, one in enumerate(profile.backbones) if left]
    for rule in left:
        start = out / (GENERALIST if rule == "one-model" and alone else WARM)
        agents = load_agents(profile, tasks, out, start, seed)
        bases = [replace(base, engine=engine) for base, engine in zip(agents, engines, strict=True)]
        heads = load_heads(folders["frozen-agents"] / "router")[0] if rule == "frozen-router" else None
        coevolve(profile, tasks, bases, folders[rule], rule, seed, heads)
    if not (out / ROUTER / ROUTES).is_file():
        run = out / RULES_FOLDER / SERVED
        bases = load_agents(profile, tasks, out, run / "adapters", seed)
        kept = [base_folder(out, number) for number in range(len(bases))]
        routes = first_choices(bases[0], run / "router", load_split(dataset, "dev"))
        save_ensemble_router(out / ROUTER, run, kept, profile, routes)


def base_folder(out: Path, number: int) -> Path:
    """Where the base model of that number is kept: base, base-1 …"""
    return out / (f"{BASE}-{number}" if number else BASE)


def load_agents(profile: EnsembleProfile, tasks: Sequence[Task], out: Path, adapters: Path, seed: int) -> list[Base]:
    """Each base model, read anew because PEFT changes the one that it is given, with its agents' saved adapters."""
    found = []
    for number in range(len(profile.backbones)):
        model, tokenizer = base_model(profile, tasks, base_folder(out, number), seed, number)
        names = profile.names_on(number)
        found.append(Base(load_adapters(model, adapters, names).eval(), tokenizer, names))
    return found


def first_choices(base: Base, router: Path, questions: Sequence[Task]) -> dict[str, int]:
    """{agent: on how many of the questions it is the most familiar one}, with the heads of the folder `router`."""
    heads = FusedHeads(load_heads(router)[0])
    states = states_of(base, [encode_prompt(base.tokenizer, task.prompt) for task in questions])
    counts = np.bincount(nearest(heads, states), minlength=len(heads.agents))
    return {name: int(count) for name, count in zip(heads.agents, counts, strict=True)}


def identity_of(dataset: Path, profile: EnsembleProfile, seed: int) -> dict[str, Any]:
    """What a training depends on, beside the code."""
    path = Path(dataset) / DESCRIPTION
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{path}: expected what the synthesize stage writes") from None
    return {"training_sha256": profile.training_digest, "seed": seed, "tasks_sha256": tasks}


def weights_digest(out: Path, folders: Sequence[Path]) -> str:
    """sha256 of the base models that `out` keeps and of the weights in folders."""
    digest = hashlib.sha256()
    for folder in [*sorted(out.glob(f"{BASE}*")), *folders]:
        for file in sorted(folder.rglob("*.safetensors")):
            digest.update(file.relative_to(out).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


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
