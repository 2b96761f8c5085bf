"""routewright submit: the plan without a cluster, typed parameters, a run against KFP's API with the real client."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp_api import KfpApi, pushed
from typer.testing import CliRunner, Result

from components.image import IMAGE
from pipelines import plan
from pipelines.cli import pipelines_app
from pipelines.plan import assignments, check_names, load_costs, typed, typed_parameters
from routewright.errors import BadInput, StageFailed

ROOT = Path(__file__).parents[2]
SEARCH = ("submit", "search-router", "--param", "pool=aws-docs", "--param", "profile=gpu")
STAGES = ["fetch-dataset", "synthesize", "sft", "rl", "evaluate"]
PLACEMENT = """\
service_account: trainer
promotion_account: promoter
claims:
  work: {size: 10Gi, storage_class: fast}
defaults:
  cpu: {limit: "4"}
  memory: {limit: 16Gi}
  timeout_s: 3600
stages:
  fetch-dataset: {timeout_s: null}
  sft:
    gpu: {count: 2}
    distributed: 2
    work: {claim: work, mount: /work}
    node_selector: {nvidia.com/gpu.product: A100}
    timeout_s: 7200
  rl: {gpu: {count: 4}, node_selector: {cloud.google.com/gke-accelerator: h100}, timeout_s: 5400}
"""


compile_placeholder = plan.compiled


@functools.cache
def compiled_once(pipeline: str, placement: str, cache: bool = False) -> plan.Compiled:
    """Compiling takes a second, and the same placement makes the same."""
    return pushed(compile_placeholder(pipeline, placement, cache))


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KF_PIPELINES_ENDPOINT", "KF_PIPELINES_TOKEN", "KF_PIPELINES_UI_ENDPOINT", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plan, "compiled", compiled_once)


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("placement") / "pools.yaml"
    file.write_text(PLACEMENT)
    return str(file)


@pytest.fixture
def kfp(monkeypatch: pytest.MonkeyPatch, nothing_set: None) -> Iterator[KfpApi]:
    server = KfpApi()
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    monkeypatch.setenv("KF_PIPELINES_TOKEN", server.token)
    yield server
    server.close()


def run(*arguments: str) -> Result:
    """The command; what main turns into a sentence and an exit code is raised."""
    result = CliRunner().invoke(pipelines_app, arguments)
    if isinstance(result.exception, (BadInput, StageFailed)):
        result.exception.__notes__ = [result.output]
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def test_a_dry_run_shows_parameters_stages_and_gpu_hours_without_a_cluster(placement: str) -> None:
    lines = run(*SEARCH, "--placement", placement, "--param", "seed=7", "--dry-run").stdout.splitlines()
    assert lines[0].startswith("pipeline search-router, placement pools, version search-router-pools-")
    assert lines[1] == "service account trainer"
    assert lines[2] == "image registry.example/train@sha256:" + "1" * 64
    assert '  pool = "aws-docs"' in lines
    assert "  seed = 7" in lines
    assert "  promote = false" in lines, "a default is shown too"
    stages = lines[lines.index("stages") + 1 : -2]
    assert [line.split()[0] for line in stages] == [*STAGES, "promote"]
    assert stages[0].split(None, 1)[1] == "cpu 4, memory 16Gi, no time limit"
    assert stages[2].split(None, 1)[1] == "cpu 4, memory 16Gi, 4 × A100, at most 2 h", "two on each of two nodes"
    assert stages[3].split(None, 1)[1] == "cpu 4, memory 16Gi, 4 × h100, at most 1.5 h"
    assert stages[5].endswith("only if promote == true")
    # 4 GPUs × 2 h + 4 GPUs × 1.5 h
    assert lines[-2] == "GPU-hours: 14 (at most, from the timeouts of one attempt each)"
    assert lines[-1] == "cost: not known, state prices with --costs FILE"


def test_stated_prices_and_expected_hours_make_a_cost(placement: str, tmp_path: Path) -> None:
    costs = tmp_path / "costs.yaml"
    costs.write_text("{currency: EUR, prices: {A100: 2.0, h100: 3.5}, hours: {sft: 0.5}}")
    lines = run(*SEARCH, "--placement", placement, "--costs", str(costs), "--dry-run").stdout.splitlines()
    source = "(from expected hours where stated, else the timeouts of one attempt)"
    # 4 × 0.5 h and 4 × 1.5 h; 2 × 2.0 + 6 × 3.5
    assert lines[-2:] == [f"GPU-hours: 8 {source}", f"cost of the GPUs: 25.00 EUR {source}"]

    costs.write_text("{currency: EUR, prices: {A100: 2.0}}")
    with pytest.raises(BadInput, match="prices: no price for h100, which stage rl asks for"):
        run(*SEARCH, "--placement", placement, "--costs", str(costs), "--dry-run")


def test_gpu_hours_that_nothing_states_are_not_made_up(tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.write_text(PLACEMENT.replace("timeout_s: 7200", "timeout_s: null"))
    lines = run(*SEARCH, "--placement", str(endless), "--dry-run").stdout.splitlines()
    assert lines[-1] == "GPU-hours: not known, neither timeout_s nor expected hours for sft"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{currency: EUR, prices: {A100: cheap}}", r"costs.yaml: field prices.A100: .*valid number"),
        ("{currency: EUR, price: {}}", r"costs.yaml: field price: unknown key, expected one of currency, prices, hours$"),
        ("{currency: EUR, prices: {}, hours: {train: 1}}", r"field hours.train: no such stage, expected one of sft, rl$"),
        ("[", r"costs.yaml: not YAML"),
        ("{currency: 2026-13-45, prices: {}}", r"costs.yaml: not YAML \(month must be in 1..12\)"),
        (None, r"costs.yaml: cannot be read \(No such file"),
    ],
)
def test_faulty_costs_are_bad_input(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "costs.yaml"
    if content:
        file.write_text(content)
    with pytest.raises(BadInput, match=sentence):
        load_costs(file, ["sft", "rl"])


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    """The search router's pipeline."""
    content: dict[str, Any] = next(yaml.safe_load_all((ROOT / "pipelines/compiled/search-router.yaml").read_text()))
    return content


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        (["pool=x", "profile=gpu", "seed=soon"], r"^parameter seed: expected a whole number, got 'soon'$"),
        (["pool=x", "profile=gpu", "seed=1.5"], r"^parameter seed: expected a whole number, got '1.5'$"),
        (["pool=x", "profile=gpu", "seed=true"], r"^parameter seed: expected a whole number, got 'true'$"),
        (["pool=x", "profile=gpu", "promote=1"], r"^parameter promote: expected true or false, got '1'$"),
        (["pool=x", "profile=gpu", "sead=1"], r"^parameter sead: search-router has none of that name, expected one of "),
        (["pool=x"], r"^parameter profile: missing, search-router expects text \(smoke, laptop, gpu"),
        (["pool"], r"^--param pool: expected name=value$"),
        (["pool=x", "pool=y"], r"^--param pool: given twice$"),
    ],
)
def test_a_faulty_parameter_is_named_with_what_was_expected(
    spec: dict[str, Any], parameters: list[str], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        typed_parameters(spec, assignments(parameters))


FILE = "or the absolute path of a file that the stages see"


@pytest.mark.parametrize(
    ("pipeline", "parameter", "value", "expected"),
    [
        ("search-router", "profile", "gpus", f"gpu, laptop, smoke, {FILE}"),
        ("retrain", "profile", "", f"gpu, laptop, smoke, {FILE}"),
        ("step-router", "profile", "mine.yaml", "gpu, gpu-gemma-2-9b, .*, laptop, smoke, " + FILE),
        ("ensemble-router", "profile", "s3://bucket/mine.yaml", f"gpu, gpu-mixed, laptop, smoke, {FILE}"),
        ("search-router", "pool", "aws", f"aws-docs, {FILE}, or a version"),
        ("step-router", "environment", "textwrold", f"textworld, shell, {FILE}, or a version"),
    ],
)
def test_a_name_that_no_stage_takes_is_refused_before_anything_is_sent(
    pipeline: str, parameter: str, value: str, expected: str
) -> None:
    with pytest.raises(BadInput, match=rf"^parameter {parameter}: expected {expected}.*, got '{value}'$"):
        check_names(pipeline, {parameter: value})


@pytest.mark.parametrize("pipeline", ["search-router", "step-router", "ensemble-router", "retrain"])
def test_a_seed_below_zero_is_refused_as_routewright_run_does(pipeline: str) -> None:
    with pytest.raises(BadInput, match=r"^parameter seed: expected a whole number of at least 0, got -1$"):
        check_names(pipeline, {"seed": -1})


@pytest.mark.parametrize(
    ("pipeline", "parameters"),
    [
        ("search-router", {"pool": "aws-docs", "profile": "gpu", "seed": 0}),
        ("retrain", {"pool": "/work/pool.yaml", "profile": "/work/mine.yaml"}),
        ("search-router", {"pool": "{repo: https://host/project.git, rev: v1, path: datasets/pool}", "profile": "smoke"}),
        ("step-router", {"environment": "s3://bucket/problems.jsonl", "profile": "gpu-llama-3.1-8b"}),
        ("ensemble-router", {"profile": "laptop"}),
    ],
)
def test_what_a_stage_takes_is_sent(pipeline: str, parameters: dict[str, Any]) -> None:
    check_names(pipeline, parameters)


def test_a_version_with_a_field_too_few_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^source \{repo: x\}: rev: Field required"):
        check_names("search-router", {"pool": "{repo: x}"})


def test_a_wrong_profile_is_bad_input_with_and_without_a_dry_run(placement: str, kfp: KfpApi) -> None:
    for more in (["--dry-run"], []):
        with pytest.raises(BadInput, match=r"^parameter profile: expected gpu, laptop, smoke"):
            run_here(kfp, placement, *more, pipeline=["submit", "search-router", "-p", "pool=aws-docs", "-p", "profile=big"])
    assert kfp.requests == []


def test_an_image_that_no_registry_has_is_shown_and_not_submitted(
    placement: str, kfp: KfpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "compiled", compile_placeholder)
    lines = run(*SEARCH, "--placement", placement, "--dry-run").stdout.splitlines()
    assert lines[2].startswith(
        f"image {IMAGE} (a placeholder: build it with docker/build.sh, push it, set ROUTEWRIGHT_IMAGE"
    )
    with pytest.raises(BadInput, match=rf"^image {IMAGE}: is a placeholder, build it with docker/build.sh"):
        run_here(kfp, placement)
    assert not any(kfp.kept.values())


def test_only_a_run_that_deploys_has_the_account_that_may(placement: str, kfp: KfpApi) -> None:
    deploys = ["--param", "promote=true", "--param", "deploy=/etc/routewright/deploy/search-router.yaml"]
    for parameters in (deploys[:2], deploys):
        run_here(kfp, placement, *parameters)
    assert [run["service_account"] for run in kfp.kept["runs"].values()] == ["trainer", "promoter"]
    assert "service account promoter" in run(*SEARCH, "--placement", placement, *deploys, "--dry-run").stdout


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("STRING", "1", "1"),
        ("NUMBER_INTEGER", "-3", -3),
        ("NUMBER_DOUBLE", "1e-4", 1e-4),
        ("BOOLEAN", "true", True),
        ("LIST", '["a"]', ["a"]),
        ("STRUCT", '{"a": 1}', {"a": 1}),
    ],
)
def test_a_text_is_read_as_the_type_that_is_expected(kind: str, text: str, value: Any) -> None:
    assert typed("x", kind, text) == value
    with pytest.raises(BadInput, match=r"^parameter x: expected "):
        typed("x", kind, None)


def test_an_unknown_pipeline_and_an_unknown_placement_are_bad_input(placement: str) -> None:
    with pytest.raises(BadInput, match=r"^pipeline searcher: expected one of search-router, step-router"):
        run("submit", "searcher", "--placement", placement, "--dry-run")
    with pytest.raises(BadInput, match=r"^placement 'moon' does not exist: expected one of gpu-pool, single-gpu"):
        run(*SEARCH, "--placement", "moon", "--dry-run")


def test_a_run_is_started_with_typed_parameters_and_its_stages_are_told(placement: str, kfp: KfpApi) -> None:
    output = run_here(kfp, placement, "--param", "seed=7", "--wait", "--run-name", "first").stdout
    (started,) = kfp.kept["runs"].values()
    assert started["runtime_config"]["parameters"] == {
        "deploy": "", "pool": "aws-docs", "profile": "gpu", "promote": False, "query_log": "", "seed": 7
    }  # fmt: skip
    assert started["display_name"] == "first"
    assert started["service_account"] == "trainer"
    assert kfp.kept["experiments"][started["experiment_id"]]["display_name"] == "search-router"
    uploaded = kfp.uploaded(started["pipeline_version_reference"])
    executors = uploaded["platform"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors["exec-rl"]["nodeSelector"]["labels"] == {"cloud.google.com/gke-accelerator": "h100"}
    lines = output.splitlines()
    assert lines[0] == f"run {started['run_id']}: {kfp.url}/#/runs/details/{started['run_id']}"
    told = [line for line in lines[1:-1] if not line.startswith("condition")]
    assert [line for line in told if line.endswith("succeeded")] == [f"{stage} succeeded" for stage in STAGES]
    # A read that the client repeats moves the run on unseen.
    running = [line for line in told if line.endswith("running")]
    assert running
    assert set(running) <= {f"{stage} running" for stage in STAGES}
    assert lines[-1] == f"run {started['run_id']} succeeded"


def run_here(kfp: KfpApi, placement: str, *more: str, pipeline: Sequence[str] = SEARCH) -> Result:
    return run(*pipeline, "--placement", placement, "--namespace", "team", "--host", kfp.url, "--poll-s", "0", *more)


def test_the_same_content_is_one_version_and_other_content_another(placement: str, kfp: KfpApi) -> None:
    for cache in ((), ("--no-cache",), ("--cache",), ("--cache",)):
        compiled_once.cache_clear()
        run_here(kfp, placement, *cache)
    assert len(kfp.kept["runs"]) == 4
    assert len(kfp.kept["experiments"]) == len(kfp.kept["pipelines"]) == 1
    # KFP makes a first version, named like the pipeline, of what a new pipeline is uploaded with.
    _, uncached, cached = kfp.kept["versions"].values()
    used = [run["pipeline_version_reference"]["pipeline_version_id"] for run in kfp.kept["runs"].values()]
    assert used == [uncached["pipeline_version_id"]] * 2 + [cached["pipeline_version_id"]] * 2
    tasks = kfp.uploaded(uncached)["spec"]["root"]["dag"]["tasks"]
    assert not any(task.get("cachingOptions") for task in tasks.values())


def test_kfp_s_cache_is_on_where_it_is_asked_for_but_for_what_changes_by_itself(placement: str) -> None:
    spec = plan.compiled("retrain", placement, cache=True).spec
    cached = {name for dag in plan.dags(spec) for name, task in dag["tasks"].items() if task.get("cachingOptions")}
    stages = {name for name in cached if not name.startswith("condition")}
    assert stages == {"fetch-dataset", "synthesize", "sft", "rl", "evaluate", "off-policy-check"}


def test_what_somebody_else_uploads_meanwhile_is_used(placement: str, kfp: KfpApi) -> None:
    run_here(kfp, placement)
    kfp.hidden = {"pipelines", "pipeline_versions", "experiments"}
    run_here(kfp, placement)
    assert kfp.hidden == set()
    first, second = (run["pipeline_version_reference"] for run in kfp.kept["runs"].values())
    assert first == second
    assert len(kfp.kept["versions"]) == 2


def test_a_failed_stage_ends_the_wait_with_its_sentence(placement: str, kfp: KfpApi) -> None:
    kfp.broken.add("sft")
    with pytest.raises(StageFailed, match=r"^run run-\d+ ended as failed: http://127.*/#/runs/details/run-") as failure:
        run_here(kfp, placement, "--wait")
    assert "sft failed\nsft ended with exit code 1\n" in failure.value.__notes__[0]


def test_a_cancelled_run_ends_the_wait(placement: str, kfp: KfpApi) -> None:
    kfp.cancelled = True
    with pytest.raises(StageFailed, match="ended as canceled"):
        run_here(kfp, placement, "--wait")


def test_an_endpoint_that_is_away_for_a_moment_does_not_end_the_wait(placement: str, kfp: KfpApi) -> None:
    kfp.flaky = [503, 500, 429]
    assert run_here(kfp, placement, "--wait").stdout.endswith("succeeded\n")
    assert kfp.flaky == []
    kfp.flaky = [503] * 30
    with pytest.raises(StageFailed, match=r"does not show the run \(503 .*; the run goes on: http"):
        run_here(kfp, placement, "--wait")


def test_an_expired_token_a_foreign_namespace_and_no_endpoint_are_one_sentence_each(
    placement: str, kfp: KfpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        BadInput, match=r"^KFP at http.*: this account may not .* \(403: User is not authorized in"
    ) as refusal:
        run(*SEARCH, "--placement", placement, "--namespace", "others")
    assert kfp.token not in str(refusal.value), "the server repeated it"
    kfp.token = "renewed"
    with pytest.raises(BadInput, match=r"the token is missing, not accepted or has expired \(401\): set KF_PIPELINES_TOKEN"):
        run_here(kfp, placement)
    kfp.login_page = True
    with pytest.raises(BadInput, match="answers with a page instead of its API, as a login does"):
        run_here(kfp, placement)
    kfp.close()
    with pytest.raises(BadInput, match=r"^KFP at http://127.0.0.1:\d+ does not answer \(NewConnectionError\); expected"):
        run_here(kfp, placement)
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT")
    with pytest.raises(BadInput, match=r"^--host: missing, expected the URL of KFP's API"):
        run(*SEARCH, "--placement", placement)
    with pytest.raises(BadInput, match=r"^--host kfp.example: expected a URL that starts with"):
        run(*SEARCH, "--placement", placement, "--host", "kfp.example")


def test_a_token_that_expires_while_one_waits_says_so(placement: str, kfp: KfpApi) -> None:
    kfp.flaky = [401]
    with pytest.raises(BadInput, match=r"has expired \(401\)"):
        run_here(kfp, placement, "--wait")


def test_a_write_that_fails_at_the_server_is_a_failure_and_not_bad_input(placement: str, kfp: KfpApi) -> None:
    kfp.failures = [500]
    with pytest.raises(
        StageFailed, match=r"does not upload pipeline search-router \(500 Internal Server Error: as the test"
    ):
        run_here(kfp, placement)


def test_a_pod_uses_its_account_and_a_single_user_kfp_needs_no_namespace(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = KfpApi(multi_user=False)
    (tmp_path / "token").write_text(server.token + "\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://kfp.example/pipeline/")
    output = run(*SEARCH, "--placement", placement, "--host", server.url).stdout
    server.close()
    assert output.split(": ")[1].startswith("https://kfp.example/pipeline/#/runs/details/run-")
    assert server.token not in output
