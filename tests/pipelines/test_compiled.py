"""The checked-in YAML is what the code compiles to, small enough, and free of what bites in KFP."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler, dsl

from pipelines.plan import dags

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "pipelines" / "compiled"
FILES = sorted(COMPILED.glob("*.yaml"))
SIZE_BUDGET = 200_000


@dsl.component(base_image="python:3.11")
def number() -> int:
    return 1


@dsl.component(base_image="python:3.11")
def use(given: int, item: int) -> None:
    print(given, item)


@dsl.pipeline(name="loop")
def loop() -> None:
    one = number()
    with dsl.ParallelFor([1, 2]) as item:
        use(given=one.output, item=item)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "ROUTEWRIGHT_IMAGE"}
    command = [sys.executable, "-m", "routewright.cli", "compile", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder


def test_the_golden_files_are_up_to_date(fresh: Path) -> None:
    assert [file.name for file in FILES] == sorted(file.name for file in fresh.iterdir())
    for file in FILES:
        assert file.read_text() == (fresh / file.name).read_text(), "run `make compile` and commit the result"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_compiled_pipeline_is_small_and_names_images_by_digest(file: Path) -> None:
    assert file.stat().st_size <= SIZE_BUDGET
    executors = load(file)["deploymentSpec"]["executors"].values()
    assert executors
    for executor in executors:
        assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", executor["container"]["image"])
        assert "pip install" not in " ".join(executor["container"]["command"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_stage_is_cached_by_the_text_of_a_path_or_a_tag(file: Path) -> None:
    # What lies behind it may be another now, the champion too; what a stage makes of its output is as new as that.
    spec = load(file)
    tasks = {name: task for dag in dags(spec) for name, task in dag["tasks"].items()}
    assert {"fetch-dataset", "synthesize", "promote"} <= tasks.keys()
    assert [name for name, task in tasks.items() if task.get("cachingOptions", {}).get("enableCache")] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_loop_takes_an_upstream_output_parameter(file: Path) -> None:
    assert loop_output_parameters(load(file)) == []


def test_the_loop_check_sees_what_it_forbids(tmp_path: Path) -> None:
    compiler.Compiler().compile(loop, str(tmp_path / "loop.yaml"))
    (found,) = loop_output_parameters(load(tmp_path / "loop.yaml"))
    assert found.endswith(": number.Output")


def test_the_search_pipeline_chains_its_stages() -> None:
    tasks = load(COMPILED / "search-router.yaml")["root"]["dag"]["tasks"]
    needs = {name: sorted(task.get("dependentTasks", [])) for name, task in tasks.items()}
    assert needs == {
        "fetch-dataset": [],
        "synthesize": ["fetch-dataset"],
        "sft": ["fetch-dataset", "synthesize"],
        "rl": ["fetch-dataset", "sft", "synthesize"],
        "evaluate": ["fetch-dataset", "rl", "sft", "synthesize"],
        "condition-1": ["evaluate", "fetch-dataset", "rl", "synthesize"],
    }


@pytest.mark.parametrize(("name", "router"), [("search-router", "rl.model"), ("step-router", "calibrate.router")])
def test_a_pipeline_promotes_only_where_it_is_told_to(name: str, router: str) -> None:
    spec = load(COMPILED / f"{name}.yaml")
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters["promote"]["defaultValue"] is False
    assert parameters["deploy"]["defaultValue"] == ""
    condition = spec["root"]["dag"]["tasks"]["condition-1"]
    assert condition["triggerPolicy"]["condition"] == "inputs.parameter_values['pipelinechannel--promote'] == true"
    assert router in artifact_sources(condition).values()
    (promotion,) = spec["components"]["comp-condition-1"]["dag"]["tasks"].values()
    assert promotion["inputs"]["parameters"]["router"] == {"runtimeValue": {"constant": name}}
    assert set(promotion["inputs"]["artifacts"]) == {"dataset", "examples", "model", "evaluation"}


def test_the_step_pipeline_chains_its_stages() -> None:
    root = load(COMPILED / "step-router.yaml")["root"]
    parameters = root["inputDefinitions"]["parameters"]
    assert {name: kind["parameterType"] for name, kind in parameters.items()} == {
        "environment": "STRING", "profile": "STRING", "seed": "NUMBER_INTEGER", "promote": "BOOLEAN", "deploy": "STRING"
    }  # fmt: skip
    tasks = {name: task for name, task in root["dag"]["tasks"].items() if name != "condition-1"}
    sources = {name: artifact_sources(task) for name, task in tasks.items()}
    data = {"dataset": "fetch-dataset.dataset"}
    taught = {**data, "examples": "synthesize.examples"}
    bc, scores, policy = "distill-bc.model", "verifier.model", "distill-dpo.model"
    assert sources == {
        "fetch-dataset": {},
        "synthesize": data,
        "distill-bc": taught,
        "verifier": {**taught, "bc": bc},
        "distill-dpo": {**taught, "bc": bc, "verifier": scores},
        "calibrate": {**data, "policy": policy, "verifier": scores},
        "evaluate-step-router": {**data, "policy": policy, "verifier": scores, "router": "calibrate.router"},
    }
    for name, task in tasks.items():
        given = task["inputs"]["parameters"]
        assert given["profile"] == {"componentInputParameter": "profile"}
        if name == "fetch-dataset":
            assert given["environment"] == {"componentInputParameter": "environment"}
        else:
            assert given["seed"] == {"componentInputParameter": "seed"}
        if name in ("fetch-dataset", "synthesize"):
            assert given["router"] == {"runtimeValue": {"constant": "step-router"}}


def artifact_sources(task: dict[str, Any]) -> dict[str, str]:
    """Where a task's input artifacts come from: {input: "task.output"}."""
    given = task["inputs"].get("artifacts", {})
    outputs = {name: source["taskOutputArtifact"] for name, source in given.items()}
    return {name: f"{output['producerTask']}.{output['outputArtifactKey']}" for name, output in outputs.items()}


def load(file: Path) -> dict[str, Any]:
    return next(yaml.safe_load_all(file.read_text()))


def loop_output_parameters(spec: dict[str, Any]) -> list[str]:
    """Upstream output parameters that enter a ParallelFor: kfp.local silently puts the loop item in their place."""
    found = []
    for dag in dags(spec):
        for name, task in dag["tasks"].items():
            iterator = task.get("parameterIterator") or task.get("artifactIterator")
            if not iterator:
                continue
            items = iterator.get("items", {}).get("inputParameter")
            for label, source in task.get("inputs", {}).get("parameters", {}).items():
                output = source.get("taskOutputParameter")
                if output and label != items:
                    found.append(f"{name}: {output['producerTask']}.{output['outputParameterKey']}")
    return found
