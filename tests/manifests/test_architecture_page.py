"""docs/architecture.md names stages, functions and files that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import yaml
from rendering import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@cache
def defined(file: Path) -> set[str]:
    """Functions and classes at the top of a module."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_stage_stands_with_its_function() -> None:
    rows = dict(re.findall(r"^\| ([a-z-]+) \| (`[\w.]+`(?:, `[\w.]+`)*) \|$", PAGE, re.M))
    found = {}
    for file in (ROOT / "components").glob("*/metadata.yaml"):
        metadata = yaml.safe_load(file.read_text())
        functions = metadata["function"]
        found[metadata["name"]] = set(functions.values()) if isinstance(functions, dict) else {functions}
    assert {stage: set(re.findall(r"[\w.]+", cell)) for stage, cell in rows.items()} == found


def test_every_function_is_where_the_page_says() -> None:
    named = re.findall(r"`((?:routewright|serving)(?:\.\w+){2,})`", PAGE)
    assert len(named) > 40
    for path in named:
        module, _, name = path.rpartition(".")
        assert name in defined(ROOT / f"{module.replace('.', '/')}.py"), path


def test_every_file_is_there() -> None:
    paths = re.findall(r"`((?:routewright|serving|pipelines|components|manifests)/[\w./-]+)`", PAGE)
    assert len(paths) > 10
    for path in [*paths, "docs/architecture.svg"]:
        assert (ROOT / path).exists(), path


def imported(file: Path) -> set[str]:
    """The packages that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names


def test_the_library_knows_no_cluster() -> None:
    files = [file for file in (ROOT / "routewright").rglob("*.py") if "tasks" not in file.relative_to(ROOT).parts]
    allowed_up = {ROOT / "routewright" / "cli.py"}  # the command line stands on all floors
    for file in files:
        assert not imported(file) & {"kfp", "kubernetes", "kserve"}, file
        assert file in allowed_up or not imported(file) & {"pipelines", "components", "serving"}, file
    assert "kfp" in imported(ROOT / "pipelines" / "search_router.py")
