"""dvc.yaml: every stage is the component's function, knows what it depends on, and DVC takes the file as it is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from routewright.stages import function_of, history_of, numbers_of

ROOT = Path(__file__).parents[1]
STAGES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())


def names(entries: list[Any]) -> list[str]:
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def outs(stage: dict[str, Any]) -> list[str]:
    return [name for kind in ("outs", "metrics", "plots") for name in names(stage.get(kind, []))]


def component_functions() -> set[str]:
    found: set[str] = set()
    for file in (ROOT / "components").glob("*/metadata.yaml"):
        functions = yaml.safe_load(file.read_text())["function"]
        found |= set(functions.values()) if isinstance(functions, dict) else {functions}
    return found


@pytest.mark.parametrize("name", [name for name in STAGES if not name.startswith("fetch-")])
def test_a_stage_calls_the_function_of_its_component(name: str) -> None:
    function = function_of(name)  # type: ignore[arg-type]
    assert f"{function.__module__}.{function.__name__}" in component_functions()


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_all_that_it_reads_and_makes_all_that_it_writes(name: str) -> None:
    stage = STAGES[name]
    words = stage["cmd"].split()
    assert words[:4] == ["python", "-m", "routewright.stages", name]
    read = [word for word in words[4 : words.index("--out")]]
    made = {out for other in STAGES.values() for out in outs(other)}
    assert read == [dep for dep in stage["deps"] if dep in made], "in the function's order"
    assert [words[words.index(option) + 1] for option in ("--out", "--metrics", "--plots") if option in words] == outs(stage)
    assert all(out.startswith("runs/dvc/") for out in outs(stage)), "git ignores runs/"
    for dep in stage["deps"]:
        if dep not in made:
            assert (ROOT / dep.replace("${profile}", PARAMS["profile"])).exists()
    used = {*re.findall(r"\$\{([a-z.]+)\}", stage["cmd"])}
    assert set(stage["params"]) == used, "a change reruns what depends on it, and only that"


def test_there_are_stages_for_the_three_routers() -> None:
    assert {"synthesize-search", "synthesize-step", "synthesize-ensemble"} <= set(STAGES)
    assert {"evaluate-search", "evaluate-step", "evaluate-ensemble"} <= set(STAGES)
    assert all("metrics" in STAGES[f"evaluate-{router}"] for router in ("search", "step", "ensemble"))
    assert PARAMS["profile"] == "smoke", "the first dvc repro takes minutes, not hours"


def test_dvc_reads_the_file(tmp_path: Path) -> None:
    pytest.importorskip("dvc", reason="dvc is not installed")
    from dvc.repo import Repo

    for file in ("dvc.yaml", "params.yaml", ".dvcignore"):
        shutil.copyfile(ROOT / file, tmp_path / file)
    with Repo.init(str(tmp_path), no_scm=True) as repo:
        repo.index.check_graph()
        assert {stage.addressing.rpartition("dvc.yaml:")[2] for stage in repo.index.stages} == set(STAGES)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "routewright.stages", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_stage_runs_on_folders_and_bad_input_is_one_sentence(tmp_path: Path) -> None:
    done = run("fetch-step", "--out", str(tmp_path / "dataset"), "--profile", "smoke", "--source", "shell")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "dataset" / "tasks.json").read_text())["environment"] == "shell"
    failed = run("fetch-search", "--out", str(tmp_path / "pool"), "--source", "nowhere.yaml")
    assert failed.returncode == 2
    assert failed.stderr == "error: pool 'nowhere.yaml': expected 'aws-docs' or the path of a pool file\n"
    failed = run("fetch-step", "--out", str(tmp_path / "dataset"), "--source", "shell")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: profile '' does not exist: expected one of gpu, ")


def test_what_dvc_shows(tmp_path: Path) -> None:
    (tmp_path / "stats.json").write_text(
        '{"train": 3, "share": 0.5, "by": {"a": 1, "b": "no"}, "texts": {"c": "d"}, "list": [1]}'
    )
    assert numbers_of(tmp_path) == {"train": 3, "share": 0.5, "by": {"a": 1}}
    rows = [{"name": "sft", "metrics": {"ndcg@10": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 9}}}]
    (tmp_path / "summary.json").write_text(json.dumps({"rows": rows}))
    assert numbers_of(tmp_path) == {"sft": {"ndcg@10": 0.5}}
    (tmp_path / "history.jsonl").write_text('{"step": 1, "loss": 2.0}\n\n{"step": 2, "loss": 1.0}\n')
    assert history_of(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
