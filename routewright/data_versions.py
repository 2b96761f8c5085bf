"""Versions of data: where a dataset comes from, fetched by revision or URI, its md5 checked.

A source is ``{repo: URL or folder, rev: tag or commit, path: file or folder}``, which DVC or git resolves, or a URI:
``s3://bucket/path`` (boto3's chain of credentials) or ``file:///path``, with ``#md5=…`` after it where the md5 is known. The
md5 of a folder is DVC's: that of its sorted listing of md5 and path, with ``.dir`` after it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routewright.data_store import reaching, use_dvc
from routewright.errors import BadInput

_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")


class Revision(BaseModel):
    """A file or folder of a git repository at a tag, branch or commit, under DVC or in git itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    repo: str = Field(min_length=1)
    rev: str = Field(min_length=1)
    path: str = Field(min_length=1)

    def __str__(self) -> str:
        return f"{{repo: {self.repo}, rev: {self.rev}, path: {self.path}}}"


class Location(BaseModel):
    """A URI of a file or folder, and the md5 that it must have, "" where none is told."""

    model_config = ConfigDict(frozen=True)

    uri: str
    md5: str = ""

    def __str__(self) -> str:
        return self.uri


Source = Revision | Location


def parse_source(text: str) -> Source | None:
    """The versioned source that a text names; None for anything else, such as a name or a path.

    BadInput where it looks like one and is none: a key too many or too few, another scheme, a password in it.
    """
    if text.lstrip().startswith("{"):
        try:
            content = yaml.safe_load(text)
            source = Revision.model_validate(content)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            field = ".".join(map(str, fault["loc"])) or "source"
            raise BadInput(f"source {text}: {field}: {fault['msg']}, expected {{repo: …, rev: …, path: …}}") from None
        except (yaml.YAMLError, ValueError):  # ValueError: a date that does not exist
            raise BadInput(f"source {text}: expected {{repo: …, rev: …, path: …}}") from None
        parts = urlsplit(source.repo)
        if parts.password or (parts.username and parts.scheme in ("http", "https")):
            raise BadInput(f"source of {source.path}: repo: expected no user or password in the URL, git asks its helper")
        if PurePosixPath(source.path).is_absolute() or ".." in PurePosixPath(source.path).parts:
            raise BadInput(f"source {source}: path: expected a path inside the repository")
        return source.model_copy(update={"path": str(PurePosixPath(source.path))})
    if "://" not in text:
        return None
    uri, _, fragment = text.partition("#")
    parts = urlsplit(uri)
    remote = parts.scheme == "s3"
    if parts.scheme not in ("s3", "file") or not parts.path.strip("/") or parts.query or remote != bool(parts.netloc):
        raise BadInput(f"source {uri}: expected s3://bucket/path or file:///path")
    md5 = fragment.removeprefix("md5=")
    if fragment and (md5 == fragment or not _MD5.fullmatch(md5)):
        raise BadInput(f"source {uri}: expected #md5= and 32 hex digits (with .dir for a folder), found #{fragment}")
    return Location(uri=uri.rstrip("/"), md5=md5)


def md5_of_file(path: Path) -> str:
    """32 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def dvc_md5(path: Path) -> str:
    """The md5 that DVC gives a file, or a folder with all files under it."""
    if path.is_file():
        return md5_of_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return md5_of_listing({file.relative_to(path).as_posix(): md5_of_file(file) for file in files})


def md5_of_listing(files: Mapping[str, str]) -> str:
    """DVC's md5 of a folder from {relative path: md5}."""
    listing = [{"md5": md5, "relpath": name} for name, md5 in sorted(files.items())]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def pinned(source: Source) -> dict[str, str]:
    """What decides the content of a source now: the commit and md5 of a revision, the md5 or the ETags of a URI."""
    if isinstance(source, Revision):
        with reaching(str(source)):
            filesystem = open_revision(source)
            return _facts_of_revision(source, filesystem, _tracked_md5(filesystem, source.path))
    told = {"source": source.uri}
    if source.md5:
        return {**told, "source_md5": source.md5}
    if source.uri.startswith("file:"):
        return {**told, "source_md5": dvc_md5(_local(source))}
    with reaching(source.uri):
        etags = {name: found["ETag"].strip('"') for name, found in _objects(source).items()}
        return {**told, "etags": md5_of_listing(etags).removesuffix(".dir")}


def fetch_version(source: Source, out: Path) -> dict[str, str]:
    """Bring a source's folder (or its one file) into the folder ``out``; facts to record: source, source_md5, dvc_revision.

    Whatever does not have the md5 that DVC or the URI tells is refused before anything appears in ``out``. BadInput where
    the source, the revision, an object or the credentials are wrong; StageFailed where a server does not answer.
    """
    partial = out.with_name(f"{out.name}.download")
    shutil.rmtree(partial, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with reaching(str(source)):
            facts = _fetch_revision(source, partial) if isinstance(source, Revision) else _fetch_location(source, partial)
        out.mkdir(parents=True, exist_ok=True)
        for entry in partial.iterdir():
            target = out / entry.name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
            entry.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return facts


def _fetch_revision(source: Revision, out: Path) -> dict[str, str]:
    filesystem = open_revision(source)
    expected = _tracked_md5(filesystem, source.path)
    if filesystem.isdir(source.path):
        files = filesystem.find(source.path, detail=True)
        filesystem.get(source.path, str(out), recursive=True)
        for file, info in files.items():
            name = PurePosixPath(file).relative_to(source.path).as_posix()
            _same(f"{source}: {name}", info.get("md5") or "", md5_of_file(out / name))
        found = dvc_md5(out)
    else:
        out.mkdir()
        name = PurePosixPath(source.path).name
        filesystem.get(source.path, str(out / name))
        found = dvc_md5(out / name)
    _same(str(source), expected, found)
    return _facts_of_revision(source, filesystem, found)


def _facts_of_revision(source: Revision, filesystem: Any, md5: str) -> dict[str, str]:
    return {"source": str(source), "dvc_revision": filesystem.repo.get_rev(), "source_md5": md5}


def _tracked_md5(filesystem: Any, path: str) -> str:
    """The md5 that DVC keeps of a file or folder; "" for what git keeps itself."""
    info = filesystem.info(path)
    return str((info.get("dvc_info") or {}).get("md5") or info.get("md5") or "")


def _same(what: str, expected: str, found: str) -> None:
    if expected and found != expected:
        raise BadInput(f"{what}: the stored data is corrupted: expected the md5 {expected}, found {found}")


def _local(source: Location) -> Path:
    path = Path(unquote(urlsplit(source.uri).path))
    if not path.exists():
        raise BadInput(f"source {source}: no such file or folder")
    return path


def _objects(source: Location) -> dict[str, dict[str, Any]]:
    """The object of an s3:// URI, or all under it as a folder: {relative path: listing}."""
    import boto3

    parts = urlsplit(source.uri)
    key = parts.path.strip("/")
    found = {}
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=parts.netloc, Prefix=key)
    for entry in (entry for page in pages for entry in page.get("Contents", [])):
        if entry["Key"] == key:
            return {PurePosixPath(key).name: entry}
        name = entry["Key"].removeprefix(f"{key}/")
        if name != entry["Key"] and name and not name.endswith("/"):
            if ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise BadInput(f"source {source}: object {entry['Key']}: expected a path without '..'")
            found[name] = entry
    if not found:
        raise BadInput(f"source {source}: no such object or folder in the bucket")
    return found


def _fetch_location(source: Location, out: Path) -> dict[str, str]:
    out.mkdir()
    if source.uri.startswith("file:"):
        path = _local(source)
        single = path.is_file()
        if single:
            shutil.copyfile(path, out / path.name)
        else:
            shutil.copytree(path, out, dirs_exist_ok=True)
        names = [path.name]
    else:
        import boto3

        s3, bucket, objects = boto3.client("s3"), urlsplit(source.uri).netloc, _objects(source)
        names = list(objects)
        single = len(names) == 1 and objects[names[0]]["Key"] == urlsplit(source.uri).path.strip("/")
        for name, entry in objects.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, entry["Key"], str(out / name))
    found = dvc_md5(out / names[0] if single else out)
    _same(f"source {source}", source.md5, found)
    return {"source": source.uri, "source_md5": found}


def open_revision(source: Revision) -> Any:
    """DVC's file system over a clone of the repository at the revision."""
    use_dvc()
    from dvc.api import DVCFileSystem

    # A folder is cloned too: opened in place, DVC would write to its cache and read what was never pushed.
    local = Path(source.repo).expanduser()
    return DVCFileSystem(local.resolve().as_uri() if local.is_dir() else source.repo, rev=source.rev)
