"""Distributed stages: the TrainJob that a placement asks for, its life seen from the step, and its processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from crd_schemas import CRDS, crd_validator
from kfp import compiler, dsl
from train_api import TrainApi
from training import train_toy

from components import train_job
from components.train_job import run_train_job, train, train_job_for
from pipelines.compile import read_placement
from pipelines.placement import load_placement, placed
from pipelines.trainjob import train_job as manifest_of
from routewright.config import load_profile
from routewright.errors import BadInput, StageFailed

ROOT = Path(__file__).parents[2]
IMAGE = "registry.example.com/train@sha256:" + "1" * 64
PLACEMENT = """
service_account: runner
claims: {work: {size: 10Gi, storage_class: fast}}
defaults:
  work: {claim: work, mount: /work, sub_path: runs}
  env: {HF_HOME: /work/hub}
  secrets: [{name: llm, env: {OPENAI_API_KEY: key}, optional: true}]
  config_maps: [{name: settings, env: {MLFLOW_TRACKING_URI: uri}}, {name: files, mount: /etc/files}]
  image_pull_secrets: [registry]
  labels: {team: routing}
  retry: {count: 1}
stages:
  toy-training:
    distributed: 2
    gpu: {count: 8}
    cpu: {request: "16", limit: "64"}
    memory: {limit: 512Gi}
    shm: 64Gi
    node_selector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
    node_affinity: [{key: zone, values: [a]}, {key: spot, operator: DoesNotExist, weight: 5}]
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
    empty_dirs: [{name: scratch, mount: /scratch, size: 1Ti}]
    timeout_s: 3600
"""


@dsl.component(base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
def toy_training(seed: int) -> None:
    print(seed)


@dsl.pipeline(name="toy", description="One distributed stage.")
def toy(seed: int) -> None:
    toy_training(seed=seed).set_env_variable("ROUTEWRIGHT_IMAGE", IMAGE)


@pytest.fixture
def step(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(container, pod) of the compiled step."""
    (tmp_path / "p.yaml").write_text(PLACEMENT)
    placement = load_placement(str(tmp_path / "p.yaml"), {"toy-training"}, {"toy-training"})
    compiler.Compiler().compile(placed(toy, placement), str(tmp_path / "toy.yaml"))
    spec, platform = yaml.safe_load_all((tmp_path / "toy.yaml").read_text())
    container = spec["deploymentSpec"]["executors"]["exec-toy-training"]["container"]
    return container, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-toy-training"]


@pytest.fixture
def manifest(step: tuple[dict[str, Any], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The placement's TrainJob, in the environment of a step."""
    env = {variable["name"]: variable["value"] for variable in step[0]["env"]}
    for name, value in (("POD_NAME", "toy-1-impl"), ("POD_UID", "uid-7"), ("NAMESPACE", "routers")):
        monkeypatch.setenv(f"ROUTEWRIGHT_{name}", value)
    monkeypatch.setenv("ROUTEWRIGHT_TRAIN_JOB", env["ROUTEWRIGHT_TRAIN_JOB"])
    found: dict[str, Any] = json.loads(env["ROUTEWRIGHT_TRAIN_JOB"])
    return found


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainApi]:
    found = TrainApi(crd_validator("trainjobs.trainer.kubeflow.org", "v1alpha1") if CRDS.is_dir() else None)
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(train_job, "POLL_S", 0.01)
    yield found
    found.close()


def job(manifest: dict[str, Any], name: str = "toy-training-0123456789abcdef") -> dict[str, Any]:
    return train_job_for(manifest, name, Path("/work/call.json"))


def test_the_manifest_passes_a_strict_server(manifest: dict[str, Any]) -> None:
    validator = crd_validator("trainjobs.trainer.kubeflow.org", "v1alpha1")
    made = job(manifest)
    validator.validate(made)
    made["spec"]["trainer"]["numNode"] = 3
    assert [error.message for error in validator.iter_errors(made)] == [
        "Additional properties are not allowed ('numNode' was unexpected)"
    ]


def test_the_nodes_are_what_the_placement_says(manifest: dict[str, Any]) -> None:
    made = job(manifest)
    assert made["metadata"]["labels"] == {"team": "routing"}
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "toy-1-impl", "uid-7")
    spec = made["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    assert spec["activeDeadlineSeconds"] == 3600
    trainer = spec["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == (IMAGE, 2, 8)
    assert trainer["command"] == ["torchrun", "-m", "components.train_node", "/work/call.json"]
    assert trainer["resourcesPerNode"] == {
        "requests": {"cpu": "16", "nvidia.com/gpu": "8"},
        "limits": {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"},
    }
    env = {variable["name"]: variable.get("value") or variable["valueFrom"] for variable in trainer["env"]}
    assert env == {
        "ROUTEWRIGHT_IMAGE": IMAGE, "HF_HOME": "/work/hub", "ROUTEWRIGHT_WORK": "/work",
        "OMP_NUM_THREADS": "8",  # of 64 CPUs, for each of 8 processes
        "OPENAI_API_KEY": {"secretKeyRef": {"name": "llm", "key": "key", "optional": True}},
        "MLFLOW_TRACKING_URI": {"configMapKeyRef": {"name": "settings", "key": "uri", "optional": False}},
    }  # fmt: skip
    (patch,) = spec["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    assert template["metadata"]["labels"] == {"team": "routing", "sidecar.istio.io/inject": "false"}
    pod = template["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    zone, spot = {"key": "zone", "operator": "In", "values": ["a"]}, {"key": "spot", "operator": "DoesNotExist"}
    assert pod["affinity"]["nodeAffinity"] == {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [zone]}]},
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 5, "preference": {"matchExpressions": [spot]}}],
    }
    assert pod["securityContext"] == {"fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch"}
    (container,) = pod["containers"]
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"]: (mount["name"], mount.get("subPath")) for mount in container["volumeMounts"]}
    assert mounts == {
        "/work": ("work", "runs"), "/scratch": ("scratch", None), "/dev/shm": ("shm", None), "/etc/files": ("files", None)
    }  # fmt: skip
    assert {volume["name"] for volume in pod["volumes"]} == {name for name, _ in mounts.values()}


def test_only_a_sharded_stage_has_the_environment_of_fsdp() -> None:
    where = read_placement("single-gpu").of("sft")
    for sharded in (False, True):
        made = manifest_of(where.model_copy(update={"distributed": 2, "sharded": sharded}), "runtime", IMAGE, {"A": "b"})
        env = {variable["name"]: variable.get("value") for variable in made["spec"]["trainer"]["env"]}
        assert env["A"] == "b"
        assert ("ACCELERATE_USE_FSDP" in env) == sharded
        assert env.get("FSDP_VERSION") == ("2" if sharded else None)


def test_the_step_itself_takes_no_gpu_and_knows_its_pod(step: tuple[dict[str, Any], dict[str, Any]]) -> None:
    container, pod = step
    assert "accelerator" not in container["resources"]
    assert not {"nodeSelector", "tolerations", "nodeAffinity", "emptyDirMounts"} & pod.keys()
    assert {field["name"]: field["fieldPath"] for field in pod["fieldPathAsEnv"]} == {
        "ROUTEWRIGHT_POD_NAME": "metadata.name",
        "ROUTEWRIGHT_POD_UID": "metadata.uid",
        "ROUTEWRIGHT_NAMESPACE": "metadata.namespace",
    }
    assert pod["pvcMount"][0]["mountPath"] == "/work"
    assert pod["activeDeadlineSeconds"] == "3600"


def test_a_job_that_ends_well_is_followed_and_deleted(
    server: TrainApi, manifest: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_train_job(job(manifest))
    (made,) = server.created
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-7"
    assert server.deleted == [made["metadata"]["name"]]
    (selector,) = server.selectors
    assert (
        selector == f"jobset.sigs.k8s.io/jobset-name={made['metadata']['name']},batch.kubernetes.io/job-completion-index=0"
    )
    assert capsys.readouterr().out.splitlines()[1:] == ["step 1", "step 2", "step 3"]


def test_a_log_whose_connection_breaks_is_continued_without_repetition(
    server: TrainApi, manifest: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server.cut = [2, 0]
    run_train_job(job(manifest))
    assert capsys.readouterr().out.splitlines()[1:] == ["step 1", "step 2", "step 3"]


def test_a_job_that_fails_fails_the_stage_with_its_reason(server: TrainApi, manifest: dict[str, Any]) -> None:
    server.verdict = ("Failed", "jobset failed: node 1 was evicted")
    with pytest.raises(StageFailed, match=r"^TrainJob toy-training-\w+ failed: jobset failed: node 1 was evicted$"):
        run_train_job(job(manifest))
    assert len(server.deleted) == 1


def test_what_an_earlier_attempt_left_goes_first(server: TrainApi, manifest: dict[str, Any]) -> None:
    made = job(manifest)
    server.jobs[made["metadata"]["name"]] = {**made, "status": {}}
    run_train_job(made)
    assert len(server.created) == 1
    assert server.deleted == [made["metadata"]["name"]] * 2


def test_a_busy_api_server_does_not_end_the_training(server: TrainApi, manifest: dict[str, Any]) -> None:
    server.failures["GET"] = [503, 429]
    run_train_job(job(manifest))
    assert server.failures["GET"] == []


@pytest.mark.parametrize("status", [400, 404])
def test_a_pod_that_goes_or_has_no_log_does_not_end_the_training(
    server: TrainApi, manifest: dict[str, Any], capsys: pytest.CaptureFixture[str], status: int
) -> None:
    server.log_failures = [status]
    run_train_job(job(manifest))
    assert server.log_failures == []
    assert capsys.readouterr().out.splitlines()[1:] == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (403, r"the API server answered 403: as the test wants it$"),
        (404, r"the API server answered 404: as the test wants it \(is Kubeflow Trainer installed\?\)$"),
        (422, r"the API server answered 422: as the test wants it$"),
    ],
)
def test_a_job_that_is_refused_says_why(server: TrainApi, manifest: dict[str, Any], status: int, sentence: str) -> None:
    server.failures["POST"] = [status]
    with pytest.raises(StageFailed, match=sentence):
        run_train_job(job(manifest))


def test_a_job_that_somebody_deletes_is_told(server: TrainApi, manifest: dict[str, Any]) -> None:
    server.failures["GET"] = [404]
    with pytest.raises(StageFailed, match="somebody deleted it while it was running"):
        run_train_job(job(manifest))


def test_a_step_that_is_told_to_end_deletes_its_job(server: TrainApi, manifest: dict[str, Any], tmp_path: Path) -> None:
    server.verdict = None
    (tmp_path / "job.json").write_text(json.dumps(job(manifest)))
    program = (
        "import json, sys; from components import train_job; train_job.POLL_S = 0.05; "
        "train_job.run_train_job(json.load(open(sys.argv[1])))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "job.json")], cwd=ROOT)
    try:
        assert server.was_created.wait(120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    finally:
        process.kill()
    assert server.deleted == ["toy-training-0123456789abcdef"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "data.txt").write_text("data")
    return tmp_path / "dataset"


def test_a_stage_that_is_not_distributed_trains_right_here(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROUTEWRIGHT_TRAIN_JOB", raising=False)
    train(train_toy, dataset, tmp_path / "work" / "toy-1", load_profile("smoke"), 3)
    assert (tmp_path / "work" / "toy-1" / "model.txt").read_text() == "data smoke 3 none of none after "
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["toy-1"]


def nodes(call: str, count: int) -> subprocess.CompletedProcess[str]:
    """What the nodes of a TrainJob do, on this machine."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(count),
        "-m",
        "components.train_node",
        call,
    ]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += ["-m", "components.train_node", call]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_the_nodes_train_and_one_process_writes(
    server: TrainApi, manifest: dict[str, Any], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "work" / "toy-0123"
    out.mkdir(parents=True)
    (out / "checkpoint").write_text("half way")
    done: list[subprocess.CompletedProcess[str]] = []

    def run_on_nodes(made: dict[str, Any]) -> None:
        done.append(nodes(made["spec"]["trainer"]["command"][-1], 2))

    monkeypatch.setattr(train_job, "run_train_job", run_on_nodes)
    train(train_toy, dataset, out, load_profile("smoke"), 3)
    assert done[0].returncode == 0, done[0].stderr[-2000:]
    assert (out / "model.txt").read_text() == "data smoke 3 0 of 2 after checkpoint"
    assert done[0].stdout.splitlines() == ["trained by process 0 of 2"]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["toy-0123"], "inputs and call are taken away"


def test_a_sentence_from_the_nodes_is_the_stages(
    manifest: dict[str, Any], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_on_nodes(made: dict[str, Any]) -> None:
        call = made["spec"]["trainer"]["command"][-1]
        process = subprocess.run(
            [sys.executable, "-m", "components.train_node", call], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])},
        )  # fmt: skip
        assert process.returncode == 2, process.stderr[-2000:]
        raise StageFailed("TrainJob toy failed: BackoffLimitExceeded")

    monkeypatch.setattr(train_job, "run_train_job", run_on_nodes)
    with pytest.raises(BadInput, match=r"inputs/dataset/data.txt, line 7: expected a number$"):
        train(train_toy, dataset, tmp_path / "work" / "toy-1", load_profile("smoke"), 13)
