"""The MLflow model registry: one version a model folder, and the aliases champion, challenger and previous.

Every function can be repeated: one that was killed half-way is finished by calling it again, one that is done changes
nothing. A version is known by the digest of its files (tag ``routewright.digest``), whichever run made it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from routewright import tracking
from routewright.errors import BadInput

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
DIGEST = "routewright.digest"
ROLLED_BACK = "routewright.rolled_back_from"
MODEL_CARD = "MODEL_CARD.md"
_SERVED = {".json", ".safetensors", ".txt", ".jinja", ".model", ".yaml"}
# What training leaves in the folder beside the router; serving does not need it.
_UNSERVED = {"roc.json", "thresholds.json", "training.json"}
# Folders of an ensemble router: its base models, and an adapter for each agent.
_PARTS = ("base", "base-*", "adapters/*")
_CLUSTER_SCHEMES = ("s3", "gs", "hf", "https", "http", "pvc", "abfs", "azure")


@dataclass(frozen=True)
class RegisteredVersion:
    """A version, the aliases that point at it, and the digest of its files ("" where it was registered elsewhere)."""

    name: str
    version: str
    digest: str
    aliases: tuple[str, ...]


def served_files(folder: Path) -> list[Path]:
    """The files of a model folder that a version is made of, by path; BadInput where there are no weights."""
    if not folder.is_dir():
        raise BadInput(f"model folder {folder}: no such folder, expected what rl or calibrate wrote")
    parts = [folder, *(part for pattern in _PARTS for part in folder.glob(pattern) if part.is_dir())]
    files = sorted(
        file
        for part in parts
        for file in part.iterdir()
        if file.is_file() and file.suffix in _SERVED and file.name not in _UNSERVED
    )
    if not any(file.suffix == ".safetensors" for file in files):
        raise BadInput(f"model folder {folder}: no .safetensors file, expected what rl or calibrate wrote")
    return files


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of the served files, 64 hex digits."""
    digest = hashlib.sha256()
    for file in served_files(folder):
        with file.open("rb") as stream:
            name = file.relative_to(folder).as_posix()
            digest.update(f"{name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\0".encode())
    return digest.hexdigest()


def registry_client() -> MlflowClient:
    """A client of the registry that ``MLFLOW_TRACKING_URI`` names; BadInput if nothing answers there."""
    tracking.connect()
    import mlflow

    return mlflow.MlflowClient()


def registered_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """The registered model of that name, None where there is none."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise BadInput(f"model '{name}': the registry refused: {str(error).splitlines()[0]}") from None


def aliases(client: MlflowClient, name: str) -> dict[str, str]:
    """{alias: version} of a registered model; empty where it does not exist."""
    model = registered_model(client, name)
    return {} if model is None else {alias: str(version) for alias, version in model.aliases.items()}


def version_with_digest(client: MlflowClient, name: str, digest: str) -> RegisteredVersion | None:
    """The newest version of the model whose files have that digest."""
    found = client.search_model_versions(f"name = '{name}' and tags.`{DIGEST}` = '{digest}'")
    return described(client, max(found, key=lambda version: int(version.version))) if found else None


def version_at(client: MlflowClient, name: str, alias: str) -> RegisteredVersion | None:
    """The version that an alias points at, None where it points nowhere."""
    number = aliases(client, name).get(alias)
    return None if number is None else described(client, client.get_model_version(name, number))


def described(client: MlflowClient, version: ModelVersion) -> RegisteredVersion:
    """What this module says of a version."""
    number = str(version.version)
    pointing = tuple(sorted(alias for alias, target in aliases(client, version.name).items() if target == number))
    return RegisteredVersion(version.name, number, version.tags.get(DIGEST, ""), pointing)


def register(
    client: MlflowClient,
    name: str,
    folder: Path,
    log_model: Callable[[Path, str], None],
    card: str,
    tags: Mapping[str, str],
) -> RegisteredVersion:
    """The version that holds the folder's files; registered from the active run if there is none yet.

    ``log_model(folder, name)`` logs the model to the active run (``tracking.log_search_model``). ``card``, Markdown, goes
    with the files as MODEL_CARD.md and becomes the version's description.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    digest = folder_digest(folder)
    found = version_with_digest(client, name, digest)
    if found is not None:
        return found
    run = mlflow.active_run()
    if run is None:
        raise RuntimeError("register needs an active run")
    with tempfile.TemporaryDirectory() as temporary:
        alone = Path(temporary) / name
        alone.mkdir()
        for file in served_files(folder):
            place = alone / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        (alone / MODEL_CARD).write_text(card, encoding="utf-8")
        log_model(alone, name)
    logged = mlflow.search_logged_models(
        [run.info.experiment_id], f"source_run_id = '{run.info.run_id}'", output_format="list",
        order_by=[{"field_name": "creation_time", "ascending": False}], max_results=1,
    )[0]  # fmt: skip
    try:
        if registered_model(client, name) is None:
            client.create_registered_model(name)
    except MlflowException as error:
        # Another promotion may have made it between the two calls.
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name, logged.model_uri, run.info.run_id, {DIGEST: digest, **tags}, description=card, model_id=logged.model_id
    )
    return described(client, version)


def set_challenger(client: MlflowClient, name: str, version: str) -> None:
    """Point ``challenger`` at a version that is about to be tried."""
    if aliases(client, name).get(CHALLENGER) != version:
        client.set_registered_model_alias(name, CHALLENGER, version)


def drop_challenger(client: MlflowClient, name: str, version: str) -> None:
    """Take ``challenger`` away from that version; another one's stays."""
    if aliases(client, name).get(CHALLENGER) == version:
        client.delete_registered_model_alias(name, CHALLENGER)


def set_champion(client: MlflowClient, name: str, version: str) -> None:
    """Make a version the champion; the one before becomes ``previous``, ``challenger`` goes if it was this version."""
    now = aliases(client, name)
    champion = now.get(CHAMPION)
    # In this order a killed call leaves either the old champion or the new one with its way back.
    if champion != version:
        if champion is not None and now.get(PREVIOUS) != champion:
            client.set_registered_model_alias(name, PREVIOUS, champion)
        elif champion is None and PREVIOUS in now:
            client.delete_registered_model_alias(name, PREVIOUS)
        client.set_registered_model_alias(name, CHAMPION, version)
    drop_challenger(client, name, version)
    model = registered_model(client, name)
    if model is not None and ROLLED_BACK in model.tags:
        client.delete_registered_model_tag(name, ROLLED_BACK)


def restore_previous(client: MlflowClient, name: str) -> RegisteredVersion:
    """Make ``previous`` the champion again and return it; ``previous`` then points nowhere.

    Done before and repeated, it changes nothing. BadInput where there is no previous version to go back to.
    """
    model = registered_model(client, name)
    if model is None:
        raise BadInput(f"model '{name}': not registered, so there is nothing to roll back")
    now = aliases(client, name)
    if PREVIOUS in now:
        if now.get(CHAMPION) not in (None, now[PREVIOUS]):
            client.set_registered_model_tag(name, ROLLED_BACK, now[CHAMPION])
            client.set_registered_model_alias(name, CHAMPION, now[PREVIOUS])
        client.delete_registered_model_alias(name, PREVIOUS)
    elif ROLLED_BACK not in model.tags:
        raise BadInput(f"model '{name}': no version has the alias {PREVIOUS}, so there is nothing to go back to")
    champion = version_at(client, name, CHAMPION)
    if champion is None:
        raise BadInput(f"model '{name}': no version has the alias {CHAMPION}")
    return champion


def files_uri(client: MlflowClient, name: str, version: str) -> str:
    """Where a version's model folder lies: ``data/<name>`` under its artifacts, as the python_function flavour has it."""
    return f"{client.get_model_version_download_uri(name, version).rstrip('/')}/data/{name}"


def concrete_uri(client: MlflowClient, name: str, version: str, volumes: Mapping[str, str] | None = None) -> str:
    """The storage URI of a version's model folder that KServe can read: s3://…, pvc://claim/… and the like.

    ``volumes`` maps folders to the persistent volume claims mounted there: {"/mnt/mlflow": "mlflow"} turns
    file:///mnt/mlflow/x into pvc://mlflow/x. BadInput for artifacts that lie where no cluster can read them.
    """
    location = files_uri(client, name, version)
    parts = urlsplit(location)
    if parts.scheme in ("", "file"):
        path = unquote(parts.path)
        for mount, claim in (volumes or {}).items():
            if Path(path).is_relative_to(mount):
                return f"pvc://{claim}/{Path(path).relative_to(mount).as_posix()}"
        raise BadInput(
            f"model '{name}' version {version}: its files lie at {path}, which a cluster cannot read; expected artifacts at "
            "s3://…, or the folder among the volumes of the deployment file"
        )
    if parts.scheme not in _CLUSTER_SCHEMES:
        raise BadInput(
            f"model '{name}' version {version}: KServe has no storage scheme {parts.scheme}:; start the tracking server "
            "with --no-serve-artifacts --default-artifact-root s3://…"
        )
    return location
