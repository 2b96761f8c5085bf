"""What is checked in for each placement is what the code compiles to, small enough, and what a strict server takes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from crd_schemas import crd_validator

from pipelines.compile import PIPELINES, compile_all, pipeline_resources, read_placement
from pipelines.placement import shipped_placements
from routewright.errors import BadInput

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "pipelines" / "compiled"
PLACED = sorted(COMPILED.glob("*/*.yaml"))
RESOURCES = sorted(file for file in COMPILED.glob("*/gitops/*.yaml") if file.stem in PIPELINES)
CLAIMS = sorted(COMPILED.glob("*/gitops/claims.yaml"))
SIZE_BUDGET = 200_000


def load(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def name_of(file: Path) -> str:
    return str(file.relative_to(COMPILED))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled in a process of its own: the image is fixed when the components are imported."""
    folder = tmp_path_factory.mktemp("placed")
    environment = {name: value for name, value in os.environ.items() if name != "ROUTEWRIGHT_IMAGE"}
    program = f"import pathlib, pipelines.compile as c; c.compile_all(pathlib.Path({str(folder)!r}), 'all')"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder


def test_the_golden_files_of_every_placement_are_up_to_date(fresh: Path) -> None:
    ours = {str(file.relative_to(COMPILED)): file.read_text() for file in COMPILED.rglob("*.yaml")}
    new = {str(file.relative_to(fresh)): file.read_text() for file in fresh.rglob("*.yaml")}
    assert ours.keys() == new.keys(), "run `make compile` and commit the result"
    assert [name for name in new if new[name] != ours[name]] == [], "run `make compile` and commit the result"


def test_every_pipeline_is_there_with_every_placement() -> None:
    assert {name_of(file) for file in PLACED} == {f"{p}/{name}.yaml" for p in shipped_placements() for name in PIPELINES}
    assert len(RESOURCES) == len(PLACED)


@pytest.mark.parametrize("file", [*PLACED, *RESOURCES], ids=name_of)
def test_a_placed_pipeline_is_small_and_names_images_by_digest(file: Path) -> None:
    assert file.stat().st_size < SIZE_BUDGET
    found = re.findall(r"\bimage: (\S+)", file.read_text())
    assert found
    assert all(re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", image) for image in found)


@pytest.mark.parametrize("file", PLACED, ids=name_of)
def test_no_task_was_left_out_and_none_runs_as_root(file: Path) -> None:
    spec, platform = load(file)
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert pods.keys() == spec["deploymentSpec"]["executors"].keys()
    for name, pod in pods.items():
        assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": "10001", "runAsGroup": "10001"}, name
        assert int(pod["activeDeadlineSeconds"]) > 0
        assert pod["pvcMount"][0]["mountPath"] == "/work"
    bare = load(COMPILED / file.name)[0]
    assert bare["root"]["inputDefinitions"] == spec["root"]["inputDefinitions"]
    assert bare["pipelineInfo"] == spec["pipelineInfo"]
    assert bare["components"].keys() == spec["components"].keys()


@pytest.mark.parametrize("file", RESOURCES, ids=name_of)
def test_the_resources_pass_a_strict_server(file: Path) -> None:
    pipeline, version = load(file)
    crd_validator("pipelines.pipelines.kubeflow.org", "v2beta1").validate(pipeline)
    crd_validator("pipelineversions.pipelines.kubeflow.org", "v2beta1").validate(version)
    for found in (pipeline, version):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", found["metadata"]["name"])
    placed = load(file.parent.parent / file.name)
    assert [version["spec"]["pipelineSpec"], version["spec"]["platformSpec"]] == placed
    assert version["spec"]["pipelineName"] == pipeline["metadata"]["name"] == file.stem


def test_the_strict_schema_sees_an_unknown_field() -> None:
    _, version = load(RESOURCES[0])
    version["spec"]["plaformSpec"] = {}
    validator = crd_validator("pipelineversions.pipelines.kubeflow.org", "v2beta1")
    assert [error.message for error in validator.iter_errors(version)] == [
        "Additional properties are not allowed ('plaformSpec' was unexpected)"
    ]


@pytest.mark.parametrize("file", CLAIMS, ids=name_of)
def test_a_claim_states_its_storage_class(file: Path) -> None:
    claims = [made for made in load(file) if made["kind"] == "PersistentVolumeClaim"]
    assert [claim["metadata"]["name"] for claim in claims] == ["routewright-work"]
    for claim in claims:
        kubernetes_validate.validate(claim, "1.30", strict=True)
        assert claim["spec"]["storageClassName"]
        assert claim["spec"]["resources"]["requests"]["storage"]


@pytest.mark.parametrize("file", CLAIMS, ids=name_of)
def test_a_job_gives_the_work_volume_to_the_group_of_the_steps(file: Path) -> None:
    claim, job = load(file)
    kubernetes_validate.validate(job, "1.30", strict=True)
    steps = load(file.parent.parent / "search-router.yaml")[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    template = job["spec"]["template"]
    pod = template["spec"]
    assert pod["securityContext"] == {"fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch"}
    assert {step["securityContext"]["runAsGroup"] for step in steps.values()} == {str(pod["securityContext"]["fsGroup"])}
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (container,) = pod["containers"]
    assert (container["command"], container["volumeMounts"][0]["mountPath"]) == (["test", "-w", "/work"], "/work")
    # as the namespace's restricted standard and its quota want it
    security = container["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["allowPrivilegeEscalation"]) == (True, 10001, False)
    assert (security["capabilities"], security["seccompProfile"]) == ({"drop": ["ALL"]}, {"type": "RuntimeDefault"})
    assert container["resources"]["limits"].keys() == {"cpu", "memory"}
    assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
    assert job["metadata"]["name"].startswith(claim["metadata"]["name"]), "and another one where it is another"


def test_a_version_has_another_name_as_soon_as_it_is_another(tmp_path: Path) -> None:
    placement = read_placement("single-gpu")
    compiled = COMPILED / "single-gpu" / "search-router.yaml"
    changed = tmp_path / "search-router.yaml"
    changed.write_text(compiled.read_text().replace("resourceCpuLimit: '8'", "resourceCpuLimit: '9'"))
    one, same, other = (
        pipeline_resources("search-router", placement, file)[1]["metadata"]["name"]  # type: ignore[index]
        for file in (compiled, compiled, changed)
    )
    assert one == same
    assert one != other
    assert one.startswith("search-router-single-gpu-")


def test_a_placement_of_ones_own_is_compiled_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("service_account: me\ndefaults: {timeout_s: 77}\n")
    made = compile_all(tmp_path / "out", str(file))
    names = [str(path.relative_to(tmp_path / "out")) for path in made]
    assert names == [found for name in PIPELINES for found in (f"mine/{name}.yaml", f"mine/gitops/{name}.yaml")]
    pods = load(made[0])[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {pod["activeDeadlineSeconds"] for pod in pods.values()} == {"77"}


def test_a_stage_that_no_pipeline_has_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("service_account: me\nstages: {tarin: {}}\n")
    with pytest.raises(BadInput, match=r"mine.yaml: field stages.tarin: no pipeline has that stage"):
        compile_all(tmp_path / "out", str(file))
    assert not (tmp_path / "out").exists()
