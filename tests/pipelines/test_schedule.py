"""routewright schedule: files, and recurring runs that become what their file says, on KFP's API with the real client."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kfp_api import KfpApi, pushed
from typer.testing import CliRunner

from pipelines import plan
from pipelines.cli import pipelines_app
from pipelines.schedule import Schedule, cron_fault, load_schedule
from routewright.errors import BadInput, StageFailed

ROOT = Path(__file__).parents[2]
FILE = """\
name: weekly
pipeline: search-router
placement: single-gpu
cron: "0 30 3 * * mon"
params: {pool: aws-docs, profile: gpu, seed: 3}
"""
compile_placeholder = plan.compiled


@functools.cache
def compiled_once(pipeline: str, placement: str) -> plan.Compiled:
    return pushed(compile_placeholder(pipeline, placement))


@pytest.fixture
def kfp(monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpApi]:
    server = KfpApi()
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    monkeypatch.setenv("KF_PIPELINES_TOKEN", server.token)
    monkeypatch.setattr(plan, "compiled", compiled_once)
    yield server
    server.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "schedule.yaml"
    path.write_text(FILE)
    return path


def schedule(*arguments: object) -> str:
    """What ``routewright schedule ARGUMENTS`` prints for the namespace; its error is raised."""
    result = CliRunner().invoke(pipelines_app, ["schedule", *map(str, arguments), "--namespace", "team"])
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout  # stderr has what the fake server says when a client leaves


def recurring(kfp: KfpApi) -> dict[str, Any]:
    (only,) = kfp.kept["recurringruns"].values()
    return only


def writes(kfp: KfpApi) -> list[str]:
    return [request for request in kfp.requests if not request.startswith("GET")]


def test_an_image_that_no_registry_has_is_not_scheduled(kfp: KfpApi, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "compiled", compile_placeholder)
    with pytest.raises(BadInput, match=r"^image \S+@sha256:0{64}: is a placeholder, build it with docker/build.sh"):
        schedule("apply", file)
    assert not any(kfp.kept.values())


def test_applying_a_file_makes_a_recurring_run_once(kfp: KfpApi, file: Path) -> None:
    assert schedule("apply", file).startswith("schedule weekly created (rec-")
    made = recurring(kfp)
    assert made["trigger"] == {"cron_schedule": {"cron": "0 30 3 * * mon"}}
    assert made["runtime_config"]["parameters"]["seed"] == 3
    assert made["runtime_config"]["parameters"]["query_log"] == "", "a default that changes later changes no schedule"
    assert (made["mode"], made["max_concurrency"], made["no_catchup"]) == ("ENABLE", "1", True)
    assert made["service_account"]
    version = kfp.kept["versions"][made["pipeline_version_reference"]["pipeline_version_id"]]
    assert version["display_name"].startswith("search-router-single-gpu-")

    before = len(writes(kfp))
    assert schedule("apply", file).startswith("schedule weekly unchanged (rec-")
    assert len(writes(kfp)) == before, "nothing is written where it is so already"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('cron: "0 30 3 * * mon"', "interval_s: 86400"),
        ("seed: 3", "seed: 4"),
        ("placement: single-gpu", "placement: gpu-pool"),
        ("pipeline:", "max_concurrency: 2\npipeline:"),
        ("pipeline:", "catchup: true\npipeline:"),
        ("pipeline:", "experiment: nightly\npipeline:"),
    ],
)
def test_a_changed_file_replaces_it_and_never_do_two_run(kfp: KfpApi, file: Path, old: str, new: str) -> None:
    schedule("apply", file)
    first = recurring(kfp)["recurring_run_id"]
    file.write_text(FILE.replace(old, new))
    assert schedule("apply", file).startswith("schedule weekly replaced")
    assert recurring(kfp)["recurring_run_id"] != first
    assert recurring(kfp)["mode"] == "ENABLE"
    made = [request for request in writes(kfp) if "recurringruns" in request][1:]
    second = recurring(kfp)["recurring_run_id"]
    assert made == ["POST recurringruns", f"DELETE recurringruns/{first}", f"POST recurringruns/{second}:enable"]
    assert schedule("apply", file).startswith("schedule weekly unchanged")


def test_a_profile_that_no_stage_takes_makes_no_schedule(kfp: KfpApi, file: Path) -> None:
    file.write_text(FILE.replace("profile: gpu", "profile: big"))
    with pytest.raises(BadInput, match=r"schedule.yaml: parameter profile: expected gpu, laptop, smoke, .* got 'big'$"):
        schedule("apply", file)
    assert kfp.requests == []


def test_a_replacement_that_was_killed_half_way_is_finished(kfp: KfpApi, file: Path) -> None:
    schedule("apply", file)
    file.write_text(FILE.replace("seed: 3", "seed: 4"))
    kfp.killed = "DELETE"
    with pytest.raises(StageFailed):
        schedule("apply", file)
    assert sorted(run["mode"] for run in kfp.kept["recurringruns"].values()) == ["DISABLE", "ENABLE"]
    kfp.killed = ""
    schedule("apply", file)
    assert (recurring(kfp)["mode"], recurring(kfp)["runtime_config"]["parameters"]["seed"]) == ("ENABLE", 4)


def test_pausing_and_resuming_do_not_replace(kfp: KfpApi, file: Path) -> None:
    schedule("apply", file)
    made = recurring(kfp)["recurring_run_id"]
    assert schedule("pause", "weekly") == "schedule weekly paused\n"
    assert recurring(kfp)["mode"] == "DISABLE"
    assert "weekly  paused  cron 0 30 3 * * mon  at most 1" in schedule("list")
    assert schedule("resume", "weekly") == "schedule weekly resumed\n"
    assert "weekly  enabled" in schedule("list")
    file.write_text(FILE + "enabled: false\n")
    assert schedule("apply", file).startswith("schedule weekly paused (")
    file.write_text(FILE)
    assert schedule("apply", file).startswith("schedule weekly resumed (")
    assert recurring(kfp)["recurring_run_id"] == made
    with pytest.raises(BadInput, match=r"^schedule daily: namespace team has none of that name, it has weekly$"):
        schedule("pause", "daily")


def test_a_schedule_that_starts_paused(kfp: KfpApi, file: Path) -> None:
    file.write_text(FILE + "enabled: false\n")
    schedule("apply", file)
    assert recurring(kfp)["status"] == "DISABLED"


def test_a_409_is_compared_again(kfp: KfpApi, file: Path) -> None:
    # Somebody applies the same file at the same moment.
    kfp.rival = lambda given: kfp._keep("recurringruns", "recurring_run_id", {**given, "max_concurrency": "1"})
    assert schedule("apply", file).startswith("schedule weekly unchanged")
    assert recurring(kfp)["mode"] == "ENABLE"


def test_a_409_over_another_schedule_is_one_sentence_and_applying_again_replaces_it(kfp: KfpApi, file: Path) -> None:
    other = {"parameters": {"pool": "mine"}}
    kfp.rival = lambda given: kfp._keep(
        "recurringruns", "recurring_run_id", {**given, "max_concurrency": "1", "runtime_config": other}
    )
    with pytest.raises(StageFailed, match=r"^KFP at .* \(409.*\): another one named weekly was made meanwhile and differs"):
        schedule("apply", file)
    assert schedule("apply", file).startswith("schedule weekly replaced")
    assert recurring(kfp)["runtime_config"]["parameters"]["pool"] == "aws-docs"


def test_every_page_of_schedules_is_listed(kfp: KfpApi, file: Path) -> None:
    schedule("apply", file)
    made = recurring(kfp)
    for number in range(230):
        kfp._keep("recurringruns", f"id-{number}", {**made, "display_name": f"copy-{number}"})
    assert len(schedule("list").splitlines()) == 231


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("name: weekly", "name: Weekly run", "schedule.yaml: name: expected a text that matches"),
        ("name: weekly\n", "", "schedule.yaml: name: missing key"),
        ("cron:", "crom:", "schedule.yaml: crom: unknown key, expected one of"),
        ("cron:", "interval_s: 3600\ncron:", "schedule.yaml: content: expected either cron or interval_s"),
        ('cron: "0 30 3 * * mon"\n', "", "schedule.yaml: content: expected either cron or interval_s"),
        ("0 30 3 * * mon", "30 3 * * mon", r"schedule.yaml: cron: expected six fields \(second, minute, .*\), found 5"),
        ("0 30 3 * * mon", "0 30 24 * * mon", "schedule.yaml: cron: hour 24: expected .* numbers from 0 to 23"),
        ("pipeline:", "max_concurrency: 11\npipeline:", "schedule.yaml: max_concurrency: .* less than or equal to 10"),
        ("pipeline: search-router", "pipeline: searcher", "schedule.yaml: pipeline searcher: expected one of"),
        ("placement: single-gpu", "placement: moon", "schedule.yaml: placement 'moon' does not exist"),
        ("seed: 3", "seed: three", "schedule.yaml: parameter seed: expected a whole number, got 'three'"),
        ("name: weekly", "name: [", "schedule.yaml: not YAML"),
        ("name: weekly", "name: 2026-13-45", r"schedule.yaml: not YAML \(month must be in 1..12\)"),
    ],
)
def test_a_faulty_file_names_the_field(kfp: KfpApi, file: Path, old: str, new: str, sentence: str) -> None:
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(BadInput, match=sentence):
        schedule("apply", file)
    assert kfp.requests == []


def test_a_file_that_is_not_there(kfp: KfpApi, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none.yaml: cannot be read \(No such file"):
        schedule("apply", tmp_path / "none.yaml")


@pytest.mark.parametrize("cron", ["0 0 3 * * 1", "*/30 0-15,30 * ? jan-mar mon-fri", "0 0 0 1/5 * ?"])
def test_cron_expressions_that_are_taken(cron: str) -> None:
    assert cron_fault(cron) == ""


@pytest.mark.parametrize(
    "cron", ["60 0 3 * * 1", "0 0 3 0 * 1", "0 0 3 * 13 1", "0 0 3 * * 7", "0 0 3 * * fri-mon", "0 */0 3 * * 1"]
)
def test_cron_expressions_that_are_not(cron: str) -> None:
    assert "expected" in cron_fault(cron)


SHIPPED = sorted((ROOT / "configs" / "schedules").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_schedule_can_be_applied(kfp: KfpApi, path: Path) -> None:
    assert isinstance(load_schedule(path), Schedule)
    assert "created" in schedule("apply", path)


def test_a_schedule_is_shipped() -> None:
    assert SHIPPED
