"""Placement: faulty files end in one sentence, and every task of a pipeline is compiled to where the file puts it."""

from pathlib import Path
from typing import Any

import kfp
import pytest
import yaml
from kfp import compiler, dsl

from pipelines.compile import PIPELINES, read_placement
from pipelines.placement import Placement, StagePlacement, load_placement, placed, shipped_placements, stages_of
from routewright.errors import BadInput

STAGES = {"train", "judge", "promote"}
FULL = """
service_account: runner
claims:
  work: {size: 10Gi, storage_class: fast, access_modes: [ReadWriteMany]}
  data: {size: 1Ti, storage_class: slow}
defaults:
  cpu: {request: 500m, limit: "2"}
  memory: {request: 1Gi, limit: 8Gi}
  work: {claim: work, mount: /work}
  node_selector: {pool: cpu}
  env: {HF_HOME: /work/hub}
  secrets: [{name: llm, env: {OPENAI_API_KEY: key}, optional: true}]
  config_maps: [{name: settings, env: {MLFLOW_TRACKING_URI: uri}}, {name: files, mount: /etc/files}]
  image_pull_secrets: [registry]
  labels: {team: routing}
  timeout_s: 600
  retry: {count: 3, backoff_s: 10, factor: 3, max_s: 100}
stages:
  train:
    gpu: {count: 4}
    shm: 4Gi
    node_selector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
    node_affinity: [{key: zone, values: [a, b], weight: 10}]
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
    volumes: [{claim: data, mount: /data, sub_path: pools}]
    empty_dirs: [{name: scratch, mount: /scratch, size: 20Gi}]
    run_as_user: 20000
  promote: {retry: null, work: null, timeout_s: 60, env: {HF_HOME: /work/hub, OMP_NUM_THREADS: "1"}}
"""


@dsl.component(base_image="python@sha256:" + "0" * 64, packages_to_install=[], install_kfp_package=False)
def train(seed: int) -> int:
    return seed


@dsl.component(base_image="python@sha256:" + "0" * 64, packages_to_install=[], install_kfp_package=False)
def judge(seed: int) -> None:
    print(seed)


@dsl.component(base_image="python@sha256:" + "0" * 64, packages_to_install=[], install_kfp_package=False)
def promote() -> None:
    print("promoted")


@dsl.pipeline(name="toy", description="Two seeds, judged, perhaps promoted.")
def toy(seed: int, wanted: bool = False) -> None:
    """Train and judge.

    Args:
        seed: Seed of all random choices.
        wanted: Promote.
    """
    judge(seed=train(seed=seed).output)
    train(seed=2)
    with dsl.If(wanted == True, "wanted"):  # noqa: E712
        judge(seed=1)
        with dsl.If(seed > 3, "large"):
            promote()


def written(folder: Path, text: str) -> str:
    file = folder / "mine.yaml"
    file.write_text(text)
    return str(file)


def compiled(folder: Path, placement: Placement) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The compiled toy: its spec, {executor: container} and {executor: what Kubernetes adds}."""
    compiler.Compiler().compile(placed(toy, placement), str(folder / "toy.yaml"))
    spec, platform = yaml.safe_load_all((folder / "toy.yaml").read_text())
    containers = {name: executor["container"] for name, executor in spec["deploymentSpec"]["executors"].items()}
    return spec, containers, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def test_every_task_is_placed_also_in_nested_conditions(tmp_path: Path) -> None:
    placement = load_placement(written(tmp_path, FULL), STAGES)
    assert (placement.name, placement.service_account) == ("mine", "runner")
    spec, containers, pods = compiled(tmp_path, placement)
    assert set(containers) == set(pods) == {"exec-train", "exec-train-2", "exec-judge", "exec-judge-2", "exec-promote"}
    for name, pod in pods.items():
        user = "20000" if "train" in name else "10001"
        assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": "10001"}
        assert pod["podMetadata"] == {"labels": {"team": "routing"}}
        assert pod["imagePullSecret"][0]["secretName"] == "registry"
        (secret,) = pod["secretAsEnv"]
        assert (secret["secretName"], secret["optional"]) == ("llm", True)
        assert secret["keyToEnv"] == [{"secretKey": "key", "envVar": "OPENAI_API_KEY"}]
        assert pod["configMapAsEnv"][0]["keyToEnv"] == [{"configMapKey": "uri", "envVar": "MLFLOW_TRACKING_URI"}]
        assert pod["configMapAsVolume"][0]["mountPath"] == "/etc/files"
        assert containers[name]["resources"]["resourceCpuRequest"] == "500m"
        assert containers[name]["resources"]["resourceMemoryLimit"] == "8Gi"
        env = {variable["name"]: variable["value"] for variable in containers[name]["env"]}
        assert env["HF_HOME"] == "/work/hub"
        assert env["OMP_NUM_THREADS"] == ("1" if "promote" in name else "2")
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters["seed"]["description"] == "Seed of all random choices."


def test_a_stage_takes_its_own_fields_and_the_rest_from_the_defaults(tmp_path: Path) -> None:
    spec, containers, pods = compiled(tmp_path, load_placement(written(tmp_path, FULL), STAGES))
    train, judged, promoted = (pods[f"exec-{name}"] for name in ("train-2", "judge", "promote"))
    accelerator = containers["exec-train-2"]["resources"]["accelerator"]
    assert (accelerator["resourceType"], accelerator["resourceCount"]) == ("nvidia.com/gpu", "4")
    assert train["nodeSelector"] == {"labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}
    assert train["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    expression = {"key": "zone", "operator": "In", "values": ["a", "b"]}
    assert train["nodeAffinity"] == [{"matchExpressions": [expression], "weight": 10}]
    assert train["emptyDirMounts"] == [
        {"volumeName": "scratch", "mountPath": "/scratch", "sizeLimit": "20Gi"},
        {"volumeName": "shm", "mountPath": "/dev/shm", "medium": "Memory", "sizeLimit": "4Gi"},
    ]
    assert [(m["constant"], m["mountPath"], m.get("subPath")) for m in train["pvcMount"]] == [
        ("work", "/work", None), ("data", "/data", "pools")
    ]  # fmt: skip
    assert judged["nodeSelector"] == {"labels": {"pool": "cpu"}}
    assert "accelerator" not in containers["exec-judge"]["resources"]
    assert judged["activeDeadlineSeconds"] == "600"
    assert {"name": "ROUTEWRIGHT_WORK", "value": "/work"} in containers["exec-judge"]["env"]
    assert promoted["activeDeadlineSeconds"] == "60"
    assert "pvcMount" not in promoted
    assert "ROUTEWRIGHT_WORK" not in [variable["name"] for variable in containers["exec-promote"]["env"]]
    retries = {name: task.get("retryPolicy") for name, task in spec["root"]["dag"]["tasks"].items()}
    waits = {"backoffDuration": "10s", "backoffFactor": 3.0, "backoffMaxDuration": "100s", "maxRetryCount": 3}
    assert retries["train"] == retries["judge"] == waits
    nested = spec["components"]["comp-condition-2"]["dag"]["tasks"]["promote"]
    assert "retryPolicy" not in nested


@pytest.mark.parametrize("name", shipped_placements())
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_shipped_placement_puts_training_on_gpus_and_the_rest_on_cpus(name: str, pipeline: str) -> None:
    placement = read_placement(name)
    for stage in stages_of(PIPELINES[pipeline]):
        where = placement.of(stage)
        assert where.memory
        assert where.memory.limit
        assert where.cpu
        assert where.cpu.limit
        assert where.timeout_s
        assert where.retry
        assert where.retry.count
        assert where.work
        assert bool(where.shm) == bool(where.gpu)
        if stage in ("fetch-dataset", "synthesize", "evaluate", "promote"):
            assert where.gpu is None
        if stage in ("sft", "rl", "distill-bc", "verifier", "distill-dpo", "calibrate", "coevolve"):
            assert where.gpu


def test_the_pool_placement_has_two_kinds_of_gpus_and_evaluates_without_where_no_small_model_plays() -> None:
    pool = read_placement("gpu-pool")
    products = {pool.of(stage).node_selector["nvidia.com/gpu.product"] for stage in ("sft", "distill-bc", "rl", "coevolve")}
    assert products == {"NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3"}
    for stage in ("synthesize", "evaluate", "evaluate-ensemble"):
        assert pool.of(stage).gpu is None
        assert pool.of(stage).node_selector == {"routewright/pool": "cpu"}


@pytest.mark.parametrize("name", ["gpu-pool", "single-gpu"])
def test_episodes_are_played_where_the_step_profiles_policy_and_verifier_fit(name: str) -> None:
    """On a GPU in bfloat16; in a CPU pod they would be float32, twice the size, once a worker."""
    placement = read_placement(name)
    assert all(placement.of(stage).gpu for stage in ("calibrate", "evaluate-step-router"))


def with_stage(fields: str, defaults: str = "{}") -> str:
    return (
        "service_account: a\nclaims: {work: {size: 1Gi, storage_class: fast}}\n"
        f"defaults: {defaults}\nstages: {{train: {fields}}}\n"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[", "expected a YAML placement"),
        ("hello", "expected a mapping with service_account, defaults and stages"),
        ("stages: {}", "field service_account: missing key"),
        ("service_account: a\nstage: {}", "field stage: unknown key, expected one of name, service_account, "),
        ("service_account: a\nstages: {tarin: {}}", "field stages.tarin: no pipeline has that stage, expected one of judge"),
        ("service_account: a\nstages: {train: 3}", "field stages.train: expected a mapping"),
        ("service_account: a\ndefaults: [1]", "field defaults: expected a mapping"),
        ("service_account: a\ndefaults: {gpus: 1}", "field defaults.gpus: unknown key, expected one of cpu, memory, gpu, "),
        (with_stage("{gpu: {count: 0}}"), "field stages.train.gpu: expected a count of at least 1, found 0"),
        (with_stage("{gpu: {count: two}}"), "field stages.train.gpu.count: expected a valid integer"),
        (with_stage("{gpu: {number: 1}}"), "field stages.train.gpu.number: unknown key, expected one of count, type"),
        (with_stage("{gpu: 1}"), "field stages.train.gpu: expected a mapping, found 1"),
        (
            with_stage("{tolerations: [{key: nvidia.com/gpu, operator: Exists}]}"),
            "field stages.train: gpu: expected a count of at least 1, the stage asks for GPU nodes",
        ),
        (
            with_stage("{gpu: null, node_selector: {nvidia.com/gpu.product: A100}}", "{gpu: {count: 1}}"),
            "field stages.train: gpu: expected a count of at least 1",
        ),
        (with_stage("{cpu: {request: '4', limit: 500m}}"), "field stages.train.cpu: expected a request of at most"),
        (with_stage("{memory: {request: 2Gi, limit: 2G}}"), "field stages.train.memory: expected a request of at most"),
        (with_stage("{memory: {limit: 2 GB}}"), "field stages.train.memory.limit: expected a text that matches ^[0-9]"),
        (with_stage("{shm: 4Gi, memory: {limit: 4Gi}}"), "shm: expected less than the memory limit 4Gi"),
        (with_stage("{run_as_user: 0}"), "field stages.train.run_as_user: expected greater than or equal to 1"),
        (with_stage("{run_as_user: routewright}"), "field stages.train.run_as_user: expected a valid integer"),
        (with_stage("{env: {OPENAI_API_KEY: sk-1}}"), "env.OPENAI_API_KEY: expected no secret here"),
        (with_stage("{secrets: [{name: llm, env: {}}]}"), "field stages.train.secrets.0.env: Dictionary should"),
        (
            with_stage("{secrets: [{name: llm, env: {A: key, B: key}}]}"),
            "env: expected each key for one variable, found key",
        ),
        (with_stage("{config_maps: [{name: a, env: {A: k, B: k}}]}"), "config_maps.0: env: expected each key for one"),
        (with_stage("{config_maps: [{name: a}]}"), "field stages.train.config_maps.0: expected either env or mount"),
        (with_stage("{work: {claim: lost, mount: /work}}"), "field stages.train: claim lost is not under claims"),
        (with_stage("{work: {claim: work, mount: work}}"), "field stages.train.work.mount: expected a text that matches ^/"),
        (
            with_stage("{work: {claim: work, mount: /w}, volumes: [{claim: work, mount: /w}]}"),
            "field stages.train: /w is mounted more than once",
        ),
        ("service_account: a\nclaims: {work: {size: 1Gi}}", "field claims.work.storage_class: missing key"),
        (with_stage("{distributed: 2}"), "distributed: expected a work volume"),
        (with_stage("{distributed: 1}"), "field stages.train.distributed: expected greater than or equal to 2"),
        (with_stage("{}", "{distributed: 2}"), "field defaults.distributed: expected under the stages"),
        (
            "service_account: a\nstages: {judge: {distributed: 2}}",
            "field stages.judge.distributed: expected for these stages only: train",
        ),
        (
            "service_account: a\nstages: {judge: {sharded: true}}",
            "field stages.judge.sharded: expected for these stages only: train",
        ),
        (with_stage("{}", "{sharded: true}"), "field defaults.sharded: expected under the stages"),
        (with_stage("{sharded: true, gpu: {count: 1}}"), "sharded: expected distributed and gpu"),
        (
            with_stage("{sharded: true, distributed: 2, work: {claim: work, mount: /work}}"),
            "sharded: expected distributed and gpu",
        ),
        (with_stage("{tolerations: [{operator: Exists, value: a}]}"), "expected no value with operator Exists"),
        (with_stage("{tolerations: [{value: a}]}"), "expected a key, or operator Exists"),
    ],
)
def test_a_faulty_file_ends_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(BadInput) as caught:
        load_placement(file, STAGES, {"train"}, {"train"})
    assert str(caught.value).startswith(f"{file}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_placement_that_is_not_there_names_the_shipped_ones() -> None:
    with pytest.raises(BadInput, match="placement 'gpu' does not exist: expected one of gpu-pool, single-gpu, or a file"):
        load_placement("gpu", STAGES)


def test_a_name_that_no_version_can_carry_is_refused(tmp_path: Path) -> None:
    (tmp_path / "My_GPUs.yaml").write_text("service_account: a\n")
    with pytest.raises(BadInput, match=r"field name: expected a text that matches"):
        load_placement(str(tmp_path / "My_GPUs.yaml"), STAGES)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 16])
def test_other_gpu_counts_are_what_kfp_allows(count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = with_stage(f"{{gpu: {{count: {count}}}}}")
    gpu = load_placement(written(tmp_path, text), STAGES).of("train").gpu
    assert gpu
    assert gpu.count == count
    monkeypatch.setattr(kfp, "__version__", "2.16.1")
    if count in (3, 6):
        with pytest.raises(BadInput, match=f"expected a count of 1, 2, 4, 8, 16: {count} needs kfp 2.17 or newer"):
            load_placement(written(tmp_path, text), STAGES)
    else:
        load_placement(written(tmp_path, text), STAGES)


def test_a_pipeline_in_a_pipeline_is_refused() -> None:
    @dsl.pipeline(name="outer")
    def outer() -> None:
        toy(seed=1)

    with pytest.raises(ValueError, match="toy is a pipeline"):
        placed(outer, Placement(name="p", service_account="a", stages={"train": StagePlacement()}))
