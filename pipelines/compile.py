"""Compile every pipeline to KFP's intermediate representation."""

from __future__ import annotations

from pathlib import Path

from kfp import compiler

from pipelines.search_router import search_router
from pipelines.step_router import step_router

PIPELINES = {"search-router": search_router, "step-router": step_router}


def compile_all(out: Path) -> list[Path]:
    """Write ``<pipeline>.yaml`` for every pipeline to ``out`` and return the files."""
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for name, pipeline in PIPELINES.items():
        file = out / f"{name}.yaml"
        compiler.Compiler().compile(pipeline, str(file))
        files.append(file)
    return files
