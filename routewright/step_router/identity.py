"""What a stage's folder is made of, so that the results of other settings or inputs are never taken for its own."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path

from routewright.errors import BadInput
from routewright.language_models.chat import named_model
from routewright.step_router.profile import StepRouterProfile

IDENTITY = "stage.identity"  # not .json: a registered model's version is a digest of the files that it is served from
RESUMING = "checkpoints"  # in a stage's folder: for resuming, not for whoever reads the artifact


def folder_digest(folder: Path, but: Collection[str] = (RESUMING, "proposals")) -> str:
    """SHA-256 over names and contents of the files under a folder, ``but`` what a stage keeps there for resuming."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_file() and name.parts[0] not in but and "__pycache__" not in name.parts:
            with file.open("rb") as stream:
                digest.update(f"{name.as_posix()}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()


def check_stage(out: Path, finished: str, profile: StepRouterProfile, seed: int, **inputs: Path) -> bool:
    """`check_identity` of a stage by profile, seed and the content of its input folders.

    ``workers`` does not count: no result depends on it, and a run that lacked memory goes on with fewer. An LLM that
    teaches counts, but for stages that learn from examples: the teacher is asked no more.
    """
    told = profile.model_dump_json(exclude={"workers"})
    identity = {"profile": hashlib.sha256(told.encode()).hexdigest(), "seed": str(seed)}
    if "examples" not in inputs and (teacher := named_model()) is not None:
        identity["teacher"] = teacher
    return check_identity(out, finished, identity | {name: folder_digest(folder) for name, folder in inputs.items()})


def check_identity(out: Path, finished: str, identity: dict[str, str]) -> bool:
    """Whether the stage has written its last file ``finished`` into ``out``; a folder that is begun gets the identity.

    BadInput where the folder has another identity, or is finished and has none.
    """
    file = out / IDENTITY
    if not file.is_file():
        if (out / finished).exists():
            raise BadInput(
                f"{out}: holds a finished {finished} but no {IDENTITY}, so nobody knows of which profile, seed and inputs: "
                "expected another folder, or this one emptied"
            )
        out.mkdir(parents=True, exist_ok=True)
        partial = out / f"{secrets.token_hex(8)}.partial"  # several nodes may begin at once
        partial.write_text(json.dumps(identity, indent=1), encoding="utf-8")
        os.replace(partial, file)
    try:
        known = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise BadInput(f"{file}: expected what the folder was made of as JSON, found something else") from None
    if other := sorted(name for name in {*known, *identity} if known.get(name) != identity.get(name)):
        raise BadInput(f"{out}: was made with another {', '.join(other)}: expected another folder, or this one emptied")
    return (out / finished).is_file()
