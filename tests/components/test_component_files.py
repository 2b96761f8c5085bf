"""Every component is thin, self-contained at the top, described, and runs in an image named by digest."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.image import image_reference
from routewright.errors import BadInput

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "components").glob("*/component.py"))
# The image's name is shared; all else is imported where the code runs.
ALLOWED = {*sys.stdlib_module_names, "kfp", "components.image"}


def top_level_imports(source: str) -> set[str]:
    """Modules imported outside function bodies; absolute names, ``kfp`` for ``kfp.dsl``."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        for inner in [node] if isinstance(node, ast.FunctionDef) else ast.walk(node):
            if isinstance(inner, ast.Import):
                names |= {alias.name for alias in inner.names}
            elif isinstance(inner, ast.ImportFrom):
                names.add("." * inner.level + (inner.module or ""))
    return {name if name.startswith("components") else name.split(".")[0] or name for name in names}


def test_there_is_a_component_for_every_stage() -> None:
    search = {"fetch_dataset", "synthesize", "sft", "rl", "evaluate", "promote"}
    step = {"distill_bc", "verifier", "distill_dpo", "calibrate", "evaluate_step_router"}
    assert {folder.name for folder in FOLDERS} >= search | step


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_component_is_thin_and_imports_nothing_heavy_at_the_top(folder: Path) -> None:
    source = (folder / "component.py").read_text()
    assert len(source.splitlines()) <= 80
    assert top_level_imports(source) <= ALLOWED


def test_the_import_guard_sees_what_it_forbids() -> None:
    source = "import torch\nfrom kfp import dsl\nif True:\n    from routewright import tracking\n"
    source += "def f():\n    import numpy\n"
    assert top_level_imports(source) == {"torch", "kfp", "routewright"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_metadata_says_what_the_component_is(folder: Path) -> None:
    component = getattr(importlib.import_module(f"components.{folder.name}.component"), folder.name)
    metadata = yaml.safe_load((folder / "metadata.yaml").read_text())
    spec = component.component_spec
    assert metadata["name"] == spec.name
    assert metadata["parameters"] + metadata["inputs"] == sorted(
        spec.inputs or {}, key=(metadata["parameters"] + metadata["inputs"]).index
    )
    assert metadata["output"] in spec.outputs
    assert "log" in spec.outputs, "logs vanish with pods"
    documented = inspect.getdoc(component.python_func) or ""
    for name in [*(spec.inputs or {}), *spec.outputs]:
        assert f"{name}: " in documented
    assert (folder / "README.md").read_text().startswith(f"# {metadata['name']}\n")
    functions = metadata["function"]
    for path in functions.values() if isinstance(functions, dict) else [functions]:
        module, _, function = path.rpartition(".")
        source = (folder / "component.py").read_text()
        assert re.search(rf"^ *from {re.escape(module)} import .*\b{function}\b", source, re.MULTILINE)


def test_only_digests_name_an_image() -> None:
    digest = "registry.example/team/train@sha256:" + "a" * 64
    assert image_reference(digest) == digest
    for reference in ("train:latest", "train", "train@sha256:abc", "train:1.0@sha256:" + "A" * 64, digest + " "):
        with pytest.raises(BadInput, match="ROUTEWRIGHT_IMAGE"):
            image_reference(reference)


def test_the_environment_names_the_image() -> None:
    program = "from components.sft.component import sft; print(sft.component_spec.implementation.container.image)"
    digest = "registry.example/train@sha256:" + "b" * 64
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={"ROUTEWRIGHT_IMAGE": digest, "PATH": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.strip() == digest
