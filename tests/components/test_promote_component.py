"""The promotion at the end of a pipeline, in KFP's local runner, without a cluster."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl
from rich.console import Console

from components.promote.component import promote
from pipelines.run_local import run_local
from routewright import model_registry as registry
from routewright import tracking
from routewright.errors import BadInput

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "serving" / "promotion"))


@dsl.component(base_image="python:3.11")
def trained(
    quality: float,
    model: dsl.Output[dsl.Model],
    evaluation: dsl.Output[dsl.Artifact],
    dataset: dsl.Output[dsl.Dataset],
    examples: dsl.Output[dsl.Dataset],
) -> None:
    """A trained router with made-up numbers."""
    import shutil
    import tempfile
    from pathlib import Path

    from evaluated_run import write_search_run

    out = write_search_run(Path(tempfile.mkdtemp()), quality=quality)
    shutil.copytree(out / "model", model.path)
    shutil.copytree(out / "evaluation", evaluation.path)
    for artifact in (dataset, examples):
        Path(artifact.path).mkdir(parents=True)


@dsl.pipeline(name="promotion")
def promotion(quality: float, switch: bool = False, challenger: bool = False, deploy: str = "") -> None:
    made = trained(quality=quality)
    with dsl.If(switch == True, "promote"):  # noqa: E712
        promote(
            dataset=made.outputs["dataset"], examples=made.outputs["examples"], model=made.outputs["model"],
            evaluation=made.outputs["evaluation"], router="search-router", deploy=deploy, challenger=challenger,
        )  # fmt: skip


def test_a_pipeline_promotes_a_refusal_is_a_result_and_the_switch_is_off_by_default(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "serving" / "promotion")]))
    monkeypatch.chdir(tmp_path)

    def run(**arguments: Any) -> dict[str, Path]:
        return run_local(promotion, "promotion", arguments, tmp_path / "out", Console(file=io.StringIO(), width=100))

    assert run(quality=0.8) == {}
    assert run(quality=0.3, switch=True).keys() == {"promote"}
    client = registry.registry_client()
    assert registry.aliases(client, "search-router") == {}, "worse than a rule that needs no training"
    folder = run(quality=0.8, switch=True)["promote"]
    found = json.loads((folder / "decision.json").read_text())
    assert found["outcome"] == "promoted"
    assert "no deployment was given, so it is registered and nothing is served" in found["reason"]
    assert registry.aliases(client, "search-router") == {"champion": "1"}
    version = client.get_model_version("search-router", "1")
    tags = client.get_run(version.run_id).data.tags
    assert tags["routewright.stage"] == "promote"
    assert tags["mlflow.parentRunId"], "the promotion belongs to the pipeline's run"
    assert pytest.approx(0.8, abs=0.1) == next(c["value"] for c in found["checks"] if "best-single" in c["name"]) + 0.4
    assert tracking.PARENT not in os.environ


def test_a_challenger_leaves_the_champion_and_takes_no_deployment(tmp_path, monkeypatch) -> None:
    from evaluated_run import write_search_run

    from routewright.evaluation.gates import GateBounds
    from serving.promotion.promote import Candidate
    from serving.promotion.promote import promote as decide

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)

    def candidate(version: str, quality: float) -> Candidate:
        out = write_search_run(tmp_path / version, version=version, quality=quality, latency_ms=None)
        return Candidate("search-router", out / "model", out / "evaluation")

    def judge(candidate: Candidate, **more: Any) -> Any:
        return decide(candidate, None, GateBounds(), tmp_path / "decision", print, **more)

    first, second = candidate("m1", 0.7), candidate("m2", 0.8)
    assert judge(first).outcome == "promoted"
    client = registry.registry_client()
    for _ in range(2):
        found = judge(second, challenger=True)
        assert found.outcome == "challenger", found.reason
        assert "version 2 is the challenger; it is registered and nothing is served" in found.reason
        assert registry.aliases(client, "search-router") == {"champion": "1", "challenger": "2"}
    assert judge(candidate("m3", 0.3), challenger=True).outcome == "refused"
    assert registry.aliases(client, "search-router") == {"champion": "1", "challenger": "2"}
    assert judge(first, challenger=True).outcome == "unchanged", "the champion does not become its own challenger"
    assert registry.aliases(client, "search-router") == {"champion": "1", "challenger": "2"}
    assert judge(second).outcome == "promoted", "and a challenger can be promoted"
    assert registry.aliases(client, "search-router") == {"champion": "2", "previous": "1"}
    with pytest.raises(BadInput, match="challenger: expected no deployment file, a challenger is registered and not served"):
        decide(second, object(), GateBounds(), tmp_path / "decision", print, challenger=True)  # type: ignore[arg-type]
