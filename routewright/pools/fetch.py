"""Bring a pool's files into one folder: what the pipelines read, with the md5 of every file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from routewright.data_versions import Source, fetch_version, parse_source
from routewright.errors import BadInput
from routewright.pools.pool import BM25Search, load_pool

EMBEDDED = "aws-docs"


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _copy_pool(source: Path, out: Path) -> None:
    """Copy a pool file and every file it names under new relative paths; files shared by agents stay shared."""
    pool = load_pool(source)
    content: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8-sig"))
    names: dict[Path, str] = {}

    def bring(file: Path) -> str:
        real = Path(os.path.realpath(file))
        if real not in names:
            names[real] = f"files/{len(names):03d}-{real.name}"
            (out / "files").mkdir(exist_ok=True)
            shutil.copyfile(real, out / names[real])
        return names[real]

    for agent, raw in zip(pool.agents, content["agents"], strict=True):
        if isinstance(agent.search, BM25Search):
            raw["search"]["corpus"] = bring(agent.search.corpus)
        if agent.queries:
            raw["queries"]["file"] = bring(agent.queries.file)
            for split, file in agent.queries.qrels:
                if file is not None:
                    raw["queries"]["qrels"][split] = bring(file)
    (out / "pool.yaml").write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _bring_version(source: Source, out: Path) -> dict[str, str]:
    """Fetch the folder of a pool and all its files as they are; what dataset.json records of where they come from.

    BadInput where a file does not have the md5 that the folder's own dataset.json tells, or lies outside the folder.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}-") as temporary:
        folder = Path(temporary) / "version"
        facts = fetch_version(source, folder)
        if not (folder / "pool.yaml").is_file():
            raise BadInput(f"{source}: expected a folder with pool.yaml")
        told = folder / "dataset.json"
        if told.is_file():
            for name, md5 in json.loads(told.read_text(encoding="utf-8"))["files"].items():
                if not (folder / name).is_file() or _md5(folder / name) != md5:
                    raise BadInput(f"{source}: {name}: corrupted or missing, expected the md5 {md5} of its dataset.json")
            told.unlink()
        for agent in load_pool(folder / "pool.yaml").agents:
            files = [agent.search.corpus] if isinstance(agent.search, BM25Search) else []
            if agent.queries:
                files += [agent.queries.file, *(file for _, file in agent.queries.qrels if file is not None)]
            for file in files:
                if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder)):
                    raise BadInput(f"{source}: pool.yaml: agent {agent.name}: {file.name}: expected a file in the folder")
        shutil.copytree(folder, out, dirs_exist_ok=True, copy_function=shutil.move)
    return facts


def fetch_dataset(pool: str, out: Path) -> None:
    """Write a self-contained folder `out`: pool.yaml, its files, and dataset.json with their md5s.

    `pool` is the embedded pool's name (`aws-docs`), the path of a pool file, or a version of a pool's folder (see
    `routewright.data_versions`), whose revision and md5 dataset.json keeps too. A finished folder is left as it is.
    BadInput where the pool file or one of its files is wrong.
    """
    manifest = out / "dataset.json"
    if manifest.is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    version: dict[str, str] = {}
    if (source := parse_source(pool)) is not None:
        version = _bring_version(source, out)
    elif pool == EMBEDDED:
        from routewright.pools.aws_docs import write_pool

        write_pool(out)
    elif Path(pool).is_file():
        _copy_pool(Path(pool), out)
    else:
        raise BadInput(f"pool '{pool}': expected '{EMBEDDED}' or the path of a pool file")
    loaded = load_pool(out / "pool.yaml")
    files = {str(file.relative_to(out)): _md5(file) for file in sorted(out.rglob("*")) if file.is_file()}
    summary = hashlib.md5(json.dumps(files, sort_keys=True).encode(), usedforsecurity=False).hexdigest()
    facts = {"pool": loaded.name, "source": pool, "pool_digest": loaded.digest, "md5": summary, "files": files}
    partial = manifest.with_suffix(".partial")
    partial.write_text(json.dumps(facts | version, indent=1), encoding="utf-8")
    partial.rename(manifest)
