"""docs/cluster.md: its commands can be parsed, its files are valid, and what it names is there."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from pipelines.cli import pipelines_app
from pipelines.compile import PIPELINES, read_placement
from pipelines.plan import load_costs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition(" # ")[0].replace("$namespace", "team").strip()
    for kind, text in BLOCKS
    if kind == "sh"
    for line in text.replace("\\\n", " ").splitlines()
    if re.match(r"routewright (submit|schedule|check) ", line)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command: str) -> None:
    _, *arguments = shlex.split(command)
    parsed = typer.main.get_command(pipelines_app)
    while isinstance(parsed, typer.core.TyperGroup):
        name = arguments.pop(0)
        parsed = parsed.commands[name]
    context = parsed.make_context(command, arguments)  # exits where an option or an argument is unknown
    assert not context.args


def test_there_are_commands_for_all_that_the_page_promises() -> None:
    kinds = {" ".join(command.split()[1:3]) for command in COMMANDS}
    assert {"submit search-router", "schedule apply", "schedule list", "schedule pause", "check search-router"} <= kinds


def file(name: str, folder: Path) -> Path:
    """The YAML block of the page that starts with the file's name, written to a folder."""
    (text,) = (text for kind, text in BLOCKS if kind == "yaml" and text.startswith(f"# {name}"))
    (folder / name).write_text(text)
    return folder / name


def test_the_placement_for_kind_is_valid_and_needs_no_gpu(tmp_path: Path) -> None:
    placement = read_placement(str(file("kind.yaml", tmp_path)))
    assert placement.name == "kind"
    assert placement.of("sft").gpu is None
    *same, mounted = placement.of("promote").config_maps
    assert same == list(placement.of("sft").config_maps)
    assert f"deploy={mounted.mount}/search-router.yaml" in PAGE


def test_the_prices_are_valid(tmp_path: Path) -> None:
    assert load_costs(file("costs.yaml", tmp_path), ["sft", "rl"]).hours == {"sft": 0.5, "rl": 3.0}


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"(?<![\w/])((?:configs|manifests|docker|tests)/[\w./-]+\w)", PAGE))
    links = {f"docs/{path}" for path in re.findall(r"\]\(([^)#:]+)", PAGE)}
    assert len(named) > 5
    assert [path for path in sorted(named | links) if not (ROOT / path).exists()] == []


def test_inline_manifests_are_yaml() -> None:
    inline = re.findall(r"<<'END'\n(apiVersion|kind)(.*?)^END", PAGE, re.MULTILINE | re.DOTALL)
    made = [manifest for first, rest in inline for manifest in yaml.safe_load_all(first + rest)]
    assert {"Profile", "Cluster", "Gateway"} <= {manifest["kind"] for manifest in made}
    assert all("apiVersion" in manifest for manifest in made)


def test_what_the_overlay_is_applied_to_is_installed_before() -> None:
    installed, applied = PAGE.index("charts/kserve-crd"), PAGE.index("kubectl apply --server-side -k $overlay")
    assert installed < PAGE.index("routewright/calls-routers=true") < applied
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = set(re.findall(r"charts/kserve-\w+ --version v([\d.]+)", PAGE))
    assert f"kserve=={version}\n" in constraints


def test_every_parameter_of_retrain_is_told() -> None:
    told = PAGE.partition("`retrain` has the parameters")[2].partition("\n\n")[0]
    parameters = inspect.signature(PIPELINES["retrain"].pipeline_func).parameters
    assert [name for name in parameters if f"`{name}`" not in told] == []
