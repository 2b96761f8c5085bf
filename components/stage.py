"""What every stage does around its library function: resume, keep a log, report failure.

``ROUTEWRIGHT_WORK`` names a folder that outlives the task (local, or a mounted volume). A stage works in
``<stage>-<key>`` under it, where the key is a hash of code, settings and input digests, so a repeated run reuses what
is finished and continues what was killed. Without it a stage works in its output path and starts over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import routewright
from components.console import console_to, emit, stop_when_orphaned
from routewright.errors import BadInput, StageFailed

if TYPE_CHECKING:
    from routewright.config import Profile
    from routewright.ensemble_router.profile import EnsembleProfile
    from routewright.step_router.profile import StepRouterProfile

ROUTERS = ("search-router", "step-router", "ensemble-router")
# What stages keep in their folders for resuming, not for whoever reads the artifact; a dataset's own names are its own.
RESUMING = ("checkpoints", "judge/checkpoints", "policy*/checkpoints", "rules/*/checkpoint.safetensors")
# The stages whose result depends on the language model that ROUTEWRIGHT_LLM_BASE_URL and ROUTEWRIGHT_LLM_MODEL name.
ASKS_LLM = {"search-router": ("synthesize", "rl", "evaluate"), "step-router": ("synthesize", "calibrate", "evaluate")}


@dataclass(frozen=True)
class StageFolder:
    """Where a stage works; ``done`` when an earlier run finished it with the same code, settings and inputs.

    ``settings`` is what decides the result beside the inputs, as shown in the tracking server.
    """

    name: str
    key: str
    folder: Path
    done: bool
    settings: dict[str, Any]


def digest_of(path: Path, but: Collection[Path] = ()) -> str:
    """SHA-256 over names and contents of a file or of the files under a folder, ``but`` some files and folders."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        name = file.relative_to(path)
        if any(part in but for part in (file, *file.parents)):
            continue
        with file.open("rb") as stream:
            digest.update(f"{name.as_posix()}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()


def for_resuming(folder: Path) -> set[Path]:
    """The files and folders under a stage's folder that it keeps for resuming."""
    return {path for pattern in RESUMING for path in folder.glob(pattern)}


def stage_key(name: str, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """16 hex digits over the stage's name, its input artifacts' digests, its settings and the library's code."""
    digests = {label: digest_of_artifact(artifact) for label, artifact in inputs.items()}
    text = json.dumps([name, digests, dict(settings), digest_of_code()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_artifact(artifact: Any) -> str:
    """The digest that the stage that made it wrote into its metadata, else computed from its files."""
    folder = Path(artifact.path)
    return str(artifact.metadata.get("digest") or digest_of(folder, for_resuming(folder)))


def pool_digest(pool: str) -> str:
    """What decides the content of a pool: botocore's version for ``aws-docs``, else a hash of all files it names."""
    if pool == "aws-docs":
        return "botocore " + version("botocore")
    from routewright.pools.pool import BM25Search, load_pool

    files = {Path(pool)}
    for agent in load_pool(Path(pool)).agents:
        if isinstance(agent.search, BM25Search):
            files.add(agent.search.corpus)
        if agent.queries:
            qrels = agent.queries.qrels
            files |= {file for file in (agent.queries.file, qrels.train, qrels.dev, qrels.test) if file}
    return hashlib.sha256(json.dumps([digest_of(file) for file in sorted(files)]).encode()).hexdigest()


def environment_digest(environment: str) -> str:
    """What decides the content of a step router's tasks: the version of the package or the digest of the files."""
    if environment == "textworld":
        try:
            return "textworld " + version("textworld")
        except PackageNotFoundError:
            raise BadInput(
                "environment textworld: the package textworld is missing, install it with "
                "pip install 'routewright[textworld]'"
            ) from None
    if environment == "shell":
        from routewright.step_router.environments.shell_env import OWN_TASKS

        return digest_of(OWN_TASKS)
    if not Path(environment).exists():
        raise BadInput(
            f"environment '{environment}': expected textworld, shell, a .jsonl or .jsonl.gz file of problems, "
            "or a folder of task folders"
        )
    return digest_of(Path(environment))


def tasks_digest(profile: str) -> list[str]:
    """What decides the questions of an ensemble router's profile, beside the profile: its task files, reasoning-gym."""
    from routewright.ensemble_router.fetch import reasoning_gym_version
    from routewright.ensemble_router.profile import load_ensemble_profile

    settled = load_ensemble_profile(profile)
    for file in settled.tasks.files:
        if not file.path.is_file():
            raise BadInput(f"tasks.files: {file.path}: no such file, expected JSON lines")
    return [*(digest_of(file.path) for file in settled.tasks.files), reasoning_gym_version(settled)]


def digest_of_code() -> str:
    """SHA-256 over the library's Python files: other code may give other results, so it must not reuse them."""
    digest = hashlib.sha256()
    root = Path(routewright.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def stage(
    name: str,
    inputs: Mapping[str, Any],
    settings: Mapping[str, Any],
    output: Any,
    log: Any,
    router: str = "search-router",
) -> Iterator[StageFolder]:
    """Run the body as stage ``name``; its files end up at ``output.path``, its console lines at ``log.path``.

    ``inputs`` are KFP artifacts by label. ``settings`` is all else that decides the result: the special keys ``pool``
    (a pool name or file), ``environment`` (a name, file or folder), ``profile`` (a name or file of ``router``'s
    profiles), ``tasks`` (a profile of the ensemble router, for what it asks) and ``query_log`` (a file or "") count with
    their content; so does the language model that the environment names, for a stage that asks it. On success the stage
    is marked finished and ``output.metadata["digest"]`` is set. The body's exception is reported to the local runner and
    passes through.
    """
    emit(stage=name, status="started")
    stop_when_orphaned()
    try:
        if router not in ROUTERS:
            raise BadInput(f"router '{router}': expected one of {', '.join(ROUTERS)}")
        content = {label: content_of(label, value, router) for label, value in settings.items()}
        if name in ASKS_LLM.get(router, ()):
            from routewright.language_models.chat import named_model

            if (asked := named_model()) is not None:
                content["language model"] = asked
        key = stage_key(name, inputs, content)
        root = os.environ.get("ROUTEWRIGHT_WORK")
        folder = Path(root) / f"{name}-{key}" if root else Path(output.path)
        marker, kept_log = folder.with_name(folder.name + ".json"), folder.with_name(folder.name + ".log")
        done = bool(root) and marker.exists()
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with console_to(kept_log):
            yield StageFolder(name, key, folder, done, dict(settings))
        if not done:
            seconds = round(time.monotonic() - started, 1)
            write_atomically(marker, json.dumps({"stage": name, "key": key, "seconds": seconds}) + "\n")
        if root:
            publish(folder, Path(output.path))
        link_or_copy(str(kept_log), log.path)
        output.metadata["digest"] = digest_of(Path(output.path), for_resuming(Path(output.path)))
        emit(stage=name, status="reused" if done else "finished", folder=str(folder))
    except (BadInput, StageFailed) as error:
        emit(**{"bad_input" if isinstance(error, BadInput) else "failed": str(error)})
        raise
    except Exception as error:
        emit(failed=f"{type(error).__name__}: {error}")
        raise


def content_of(label: str, value: Any, router: str) -> Any:
    """What a setting stands for: the content of a pool, environment, profile, tasks or query log, else the value itself."""
    if label in ("pool", "environment"):
        from routewright.data_versions import parse_source, pinned

        if (source := parse_source(value)) is not None:
            return pinned(source)
    if label == "pool":
        return pool_digest(value)
    if label == "environment":
        return environment_digest(value)
    if label == "profile":
        return profile_of(router, value).model_dump(mode="json")
    if label == "tasks":
        return tasks_digest(value)
    if label == "query_log" and value:
        from routewright.pools.decision_log import log_files

        digests = [digest_of(file) for file in log_files(Path(value)) if file.is_file()]
        if not digests:
            raise BadInput(f"query log {value}: no such file, expected JSON lines")
        return digests[0] if len(digests) == 1 else digests
    return value


def profile_of(router: str, profile: str) -> Profile | StepRouterProfile | EnsembleProfile:
    """The profile of that name or file among the profiles of a router; BadInput for an unknown router too."""
    if router == "search-router":
        from routewright.config import load_profile

        return load_profile(profile)
    if router == "step-router":
        from routewright.step_router.profile import load_step_profile

        return load_step_profile(profile)
    if router == "ensemble-router":
        from routewright.ensemble_router.profile import load_ensemble_profile

        return load_ensemble_profile(profile)
    raise BadInput(f"router '{router}': expected one of {', '.join(ROUTERS)}")


def publish(folder: Path, out: Path) -> None:
    """Make the finished ``folder`` appear at ``out``, hard-linked where the file system can and readable for all.

    Safetensors writes weights that only their owner reads, and a server runs as somebody else.
    """
    for file in folder.rglob("*"):
        mode, readable = file.stat().st_mode, 0o555 if file.is_dir() else 0o444
        if mode & readable != readable:  # only its owner may change it, and a finished folder may be another user's
            file.chmod(mode | readable)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        shutil.rmtree(out)
    fresh = out.with_name(out.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    own = for_resuming(folder)
    shutil.copytree(
        folder,
        fresh,
        copy_function=link_or_copy,
        ignore=lambda place, names: [name for name in names if Path(place, name) in own],
    )
    fresh.rename(out)


def link_or_copy(source: str, target: str) -> None:
    """Hard link, or copy across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def write_atomically(path: Path, text: str) -> None:
    """Write beside ``path`` and rename, so that a killed process leaves the old file or the new one."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
