"""Bring a pool's files into one folder: what the pipelines read, with the md5 of every file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

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


def fetch_dataset(pool: str, out: Path) -> None:
    """Write a self-contained folder `out`: pool.yaml, its files, and dataset.json with their md5s.

    `pool` is the embedded pool's name (`aws-docs`) or the path of a pool file. A finished folder is left as it is.
    BadInput where the pool file or one of its files is wrong.
    """
    manifest = out / "dataset.json"
    if manifest.is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    if pool == EMBEDDED:
        from routewright.pools.aws_docs import write_pool

        write_pool(out)
    elif Path(pool).is_file():
        _copy_pool(Path(pool), out)
    else:
        raise BadInput(f"pool '{pool}': expected '{EMBEDDED}' or the path of a pool file")
    loaded = load_pool(out / "pool.yaml")
    files = {str(file.relative_to(out)): _md5(file) for file in sorted(out.rglob("*")) if file.is_file()}
    summary = hashlib.md5(json.dumps(files, sort_keys=True).encode(), usedforsecurity=False).hexdigest()
    content = {"pool": loaded.name, "source": pool, "pool_digest": loaded.digest, "md5": summary, "files": files}
    partial = manifest.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    partial.rename(manifest)
