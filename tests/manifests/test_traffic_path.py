"""What docs/operations.md says of served traffic leads to the folder that the schedule of `retrain` reads."""

from __future__ import annotations

import re
import shlex

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
    assert f"cd {mount['mountPath']} && rm -rf reference && mkdir reference" in SECTION
    assert "--epsilon" in container["args"]


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
