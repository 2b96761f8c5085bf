"""The rules that docker/Dockerfile keeps to, read from its text: they hold where no engine can build it, too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
TARGETS = ("serve", "train", "train-cpu")


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined and comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, arguments.strip()) for name, _, arguments in found]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, those of the stage it starts from first."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for instruction, arguments in instructions():
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            found[name] = [*found.get(base, []), ("FROM", base)]
        elif name:
            found[name].append((instruction, arguments))
    return found


def values(stage: str, instruction: str) -> list[str]:
    return [arguments for name, arguments in stages()[stage] if name == instruction]


def test_the_base_is_pinned_and_is_the_only_one() -> None:
    (default,) = [value for name, value in instructions() if name == "ARG" and value.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11[-.\w]*(@sha256:[0-9a-f]{64})?", default)
    outside = {base for stage in stages().values() for name, base in stage if name == "FROM"} - stages().keys()
    assert outside == {"${PYTHON_IMAGE}"}
    assert ":latest" not in DOCKERFILE.read_text()


def test_a_base_by_digest_reaches_every_build(tmp_path: Path) -> None:
    docker, log = tmp_path / "docker", tmp_path / "log"
    docker.write_text(f'#!/bin/sh\necho "$*" >>{log}\n[ "$1" = image ] && echo 1000000\nexit 0\n')
    docker.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON_IMAGE": "python@sha256:" + "5" * 64}
    subprocess.run([ROOT / "docker" / "build.sh"], env=environment, check=True, capture_output=True)
    builds = [line for line in log.read_text().splitlines() if line.startswith("build ")]
    assert len(builds) == len(TARGETS)
    assert all(f"--build-arg PYTHON_IMAGE={environment['PYTHON_IMAGE']} " in line for line in builds)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_as_a_number_and_writes_to_one_volume(target: str) -> None:
    user = values(target, "USER")[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "the kubelet cannot tell that a name is not root"
    (volume,) = values(target, "VOLUME")
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(values(target, "ENV"))))
    for variable in ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME"):
        assert environment[variable].startswith(volume), variable
    labels = " ".join(values(target, "LABEL"))
    for label in ("title", "description", "licenses", "version", "revision", "base.name"):
        assert f"org.opencontainers.image.{label}=" in labels


def test_only_the_server_has_an_entry_point() -> None:
    assert {target: values(target, "ENTRYPOINT") for target in TARGETS} == {
        "serve": ['["routewright"]'], "train": [], "train-cpu": []
    }  # fmt: skip


def test_what_the_shell_tasks_use_is_in_the_images_that_run_them() -> None:
    for target in TARGETS:
        installed = [text for text in values(target, "RUN") if re.search(r"apt-get install .*\bgit\b", text)]
        assert bool(installed) == (target != "serve"), target


def test_every_installation_keeps_to_the_constraints() -> None:
    commands = [part for name, text in instructions() if name == "RUN" for part in text.split("&&") if "pip install" in part]
    assert commands
    for command in commands:
        assert "-c /opt/build/constraints.txt" in command or command.strip() == "pip install --quiet --no-deps -e ."


def test_the_server_has_its_own_extra_alone_and_the_code_it_needs() -> None:
    text = " ".join(values("build-serve", "RUN"))
    assert "pyproject.toml serve >" in text
    assert "pyproject.toml train" not in text
    copied = {source for value in values("build-serve", "COPY") for source in value.split()[:-1]}
    assert {"routewright", "serving", "configs"} <= copied
    assert not {"components", "pipelines"} & copied


def test_no_secret_and_no_address_of_a_build_machine_gets_in() -> None:
    declared = [value for name, value in instructions() if name in ("ARG", "ENV")]
    assert not [value for value in declared if re.search(r"TOKEN|SECRET|PASSWORD|_KEY|PROXY", value.upper())]
    assert not re.search(r"127\.0\.0\.1|localhost|https?://[^/\s]*@|\.env\b", DOCKERFILE.read_text())
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*", "what is copied is named, so that nothing else can get in"


def test_what_is_copied_is_in_the_build_context() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [value.split()[:-1] for name, value in instructions() if name == "COPY" and "--from" not in value]
    sources = {source for names in copied for source in names}
    assert sources <= kept
    assert all((ROOT / source).exists() for source in sources)


def test_the_requirements_are_those_of_the_extras() -> None:
    command = [sys.executable, "docker/requirements.py", "pyproject.toml", "serve", "textworld"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert printed == [*project["dependencies"], *extras["serve"], *extras["textworld"]]
    assert not {"trl", "kfp", "mlflow"} & {re.split(r"[<>=\[]", name)[0] for name in printed}


def test_the_entry_point_is_read_as_a_list() -> None:
    assert json.loads(values("serve", "ENTRYPOINT")[0]) == ["routewright"]
