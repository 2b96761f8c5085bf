"""What docs/operations.md says of served traffic leads to the folder that the schedule of `retrain` reads."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from rendering import ROOT, of_kind, overlay

from pipelines.cli import pipelines_app
from pipelines.compile import read_placement
from pipelines.plan import typed_parameters
from pipelines.schedule import load_schedule
from serving.promotion.deployment import Deployment
from serving.promotion.inference_service import predictor

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SECTION = OPERATIONS.partition("## From traffic to retraining\n")[2].partition("\n## ")[0]
SCHEDULE = load_schedule(ROOT / "configs" / "schedules" / "retrain.yaml")


def logging_deployment() -> Deployment:
    """The search router's deployment file with the lines of the page."""
    (lines,) = re.findall(r"^```yaml\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    file = of_kind(overlay("production"), "ConfigMap")["routewright-deploy"]["data"]["search-router.yaml"]
    return Deployment.model_validate({**yaml.safe_load(file), **yaml.safe_load(lines)})


@pytest.mark.parametrize("name", ["single-gpu", "gpu-pool"])
def test_what_the_pods_write_is_what_the_stage_reads(name: str) -> None:
    pod = predictor(logging_deployment(), "search-router", "1", "0" * 64, "s3://bucket/1")
    (container,) = pod["containers"]
    (volume,) = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
    stage = read_placement(name).of("drift-check").work
    assert stage is not None
    assert (volume["persistentVolumeClaim"]["claimName"], stage.sub_path) == (stage.claim, "")
    log = container["args"][container["args"].index("--log") + 1]
    assert log == f"{mount['mountPath']}/$(POD_NAME).jsonl"
    assert SCHEDULE.params["decisions"] == f"{stage.mount}/{mount['subPath']}"
    assert SCHEDULE.params["reference"] == f"{SCHEDULE.params['decisions']}/reference"
    assert f"cd {mount['mountPath']}; mkdir -p reference.new" in SECTION
    assert "--epsilon" in container["args"]


def test_the_reference_is_what_pods_logged_that_are_gone(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^(pods=.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
    (tmp_path / "kubectl").write_text(
        "#!/bin/sh\ncase $1 in\n"
        "get) echo pod/router-2-x; echo pod/router-2-y ;;\n"
        'exec) [ "$2 $3 $4 $5" = "router-2-x -c kserve-container --" ] && shift 5 && exec "$@" ;;\nesac\n'
    )
    (tmp_path / "kubectl").chmod(0o755)
    logs = tmp_path / "logs"
    (logs / "reference").mkdir(parents=True)
    (logs / "reference" / "router-0.jsonl").write_text("")

    def tidy() -> set[str]:
        script = commands.replace("/var/log/routewright", str(logs))
        path = f"{tmp_path}:{os.environ['PATH']}"
        subprocess.run(["sh", "-euc", script], env={"PATH": path}, check=True)
        return {file.relative_to(logs).as_posix() for file in logs.rglob("*") if file.is_file()}

    # A pod that logs but has had no traffic for long.
    living = {f"router-2-{pod}.jsonl{part}" for pod in "xy" for part in ("", ".000001", ".key", ".lock")}
    for name in living:
        (logs / name).write_text("")
        os.utime(logs / name, (0, 0))
    assert tidy() == living | {"reference/router-0.jsonl"}, "no pod is gone"

    kept = {"router-1.jsonl.key", "router-1.jsonl.lock"}
    for name in {"router-1.jsonl", "router-1.jsonl.000001", *kept}:
        (logs / name).write_text("")
    assert tidy() == living | kept | {"reference/router-1.jsonl", "reference/router-1.jsonl.000001"}


def test_the_key_s_secret_is_told_and_made() -> None:
    log = logging_deployment().log
    assert log is not None
    secret, key = log.key.split("/")
    assert re.search(rf"^\| `{secret}` \| `{key}` \|", OPERATIONS, re.MULTILINE)
    assert f"kubectl create secret generic {secret} --from-literal {key}=" in SECTION


def test_the_command_that_retrains_now_is_what_the_schedule_does() -> None:
    (command,) = re.findall(r"^routewright (submit retrain .*?[^\\])$", SECTION, re.MULTILINE | re.DOTALL)
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    context = typer.main.get_command(pipelines_app).commands["submit"].make_context("submit", arguments)  # type: ignore[attr-defined]
    given = dict(text.split("=", 1) for text in context.params["param"])
    assert (context.params["placement"], given) == (SCHEDULE.placement, SCHEDULE.params)
    spec = yaml.safe_load((ROOT / "pipelines" / "compiled" / "retrain.yaml").read_text())
    assert typed_parameters(spec, given)
