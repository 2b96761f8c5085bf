"""``routewright promote``, ``rollback`` and ``status`` with a real MLflow store and a cluster in the test process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer
from evaluated_run import write_search_run
from promotion_commands import call
from quick_deployment import DEPLOY, QUICK

from routewright import model_registry as registry

NAME = "search-router"


def deploy_file(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({**DEPLOY, "canary": QUICK, "volumes": {str(tmp_path): "models"}, **changes}))
    return file


def decision(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "promotion" / "decision.json").read_text())
    return found


def test_without_a_cluster_a_first_model_is_registered_and_becomes_champion(store, tmp_path, monkeypatch, capsys) -> None:
    run = write_search_run(tmp_path / "run")
    assert call(monkeypatch, "promote", NAME, "--run", run) == 0
    shown = capsys.readouterr().out
    assert "no champion to compare with: absolute gates only" in shown
    assert "no deployment was given, so it is registered and nothing is served" in shown
    assert registry.aliases(store, NAME) == {"champion": "1"}
    found = decision(run)
    assert (found["outcome"], found["champion"]) == ("promoted", None)
    assert [check["name"] for check in found["checks"]] == [
        "quality − best-single, lower end", "ECE", "p99 latency, ms", "valid decisions"
    ]  # fmt: skip
    card = (run / "promotion" / "MODEL_CARD.md").read_text()
    for part in (
        "# Search router m1",
        "## What",
        "## Data",
        "## Numbers",
        "## Limits",
        found["digest"],
        "absolute gates only",
    ):
        assert part in card
    assert store.get_model_version(NAME, "1").description == card
    artifacts = {file.path for file in store.list_artifacts(store.get_model_version(NAME, "1").run_id)}
    assert artifacts >= {"decision.json", "decision.md", "MODEL_CARD.md", "evidence.json"}
    assert call(monkeypatch, "promote", NAME, "--run", run) == 0
    assert "unchanged: version 1 is already the champion" in capsys.readouterr().out
    assert len(store.search_model_versions(f"name = '{NAME}'")) == 1


def test_a_worse_model_is_refused_with_exit_code_3(store, tmp_path, monkeypatch, capsys) -> None:
    call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / "one"))
    worse = write_search_run(tmp_path / "two", "m2", quality=0.7)
    gates = tmp_path / "gates.yaml"
    gates.write_text("latency_ratio: 1000\n")
    assert call(monkeypatch, "promote", NAME, "--run", worse, "--gates", gates) == 3
    shown = capsys.readouterr().out
    assert "✗ quality − champion, lower end: -0.1 (bound -0.01; mean -0.1000" in shown
    assert decision(worse)["outcome"] == "refused"
    assert decision(worse)["champion"] == "1"
    # The champion's latency was measured in its own run; a ratio of two runs says nothing.
    latency = next(check for check in decision(worse)["checks"] if check["name"].startswith("p99"))
    assert (latency["passed"], latency["value"]) == (False, None)
    assert "**no**" in (worse / "promotion" / "decision.md").read_text()
    assert registry.aliases(store, NAME) == {"champion": "1"}
    assert len(store.search_model_versions(f"name = '{NAME}'")) == 1, "what was refused is not registered"


def test_a_model_too_large_for_kserve_is_refused_before_anything_is_registered(store, tmp_path, monkeypatch, capsys) -> None:
    deploy = deploy_file(tmp_path, storage_initializer_gib=1e-9)
    assert call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / "run"), "--deploy", deploy) == 2
    assert "more than the storage initializer's memory" in capsys.readouterr().err
    assert registry.aliases(store, NAME) == {}


def same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all latencies as measured in one run, as they are where the champion answers again."""
    from serving.promotion import promote

    known = promote.read_evidence
    monkeypatch.setattr(promote, "read_evidence", lambda *given: known(*given).model_copy(update={"measured_in": "one run"}))


@pytest.mark.parametrize("mode", ["Knative", "Standard"])
def test_deploy_canary_rollback_and_status(cluster: ApiServer, store, tmp_path, monkeypatch, capsys, mode: str) -> None:
    same_run(monkeypatch)
    deploy = deploy_file(tmp_path, mode=mode)
    one, two = write_search_run(tmp_path / "one"), write_search_run(tmp_path / "two", "m2")
    assert call(monkeypatch, "promote", NAME, "--run", one, "--deploy", deploy) == 0
    assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    assert [step["percent"] for step in decision(two)["rollout"]["steps"]] == [5, 25, 100]
    live = cluster.objects[NAME]
    assert live["metadata"]["annotations"]["routewright/model-digest"] == decision(two)["digest"]
    assert any(e["value"].startswith("pvc://models/") for e in live["spec"]["predictor"]["containers"][0]["env"])
    capsys.readouterr()
    assert call(monkeypatch, "status", NAME, "--deploy", deploy) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["aliases"] == {"champion": "2", "previous": "1"}
    assert (shown["service"]["version"], shown["service"]["ready"], shown["service"]["canary"]) == ("2", "True", None)
    writes = len(cluster.writes)
    assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 0
    assert "unchanged" in capsys.readouterr().out
    assert len(cluster.writes) == writes
    for told in ("version 1 is the champion again", "version 1 is the champion and has all traffic"):
        assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
        assert told in capsys.readouterr().out
        assert registry.aliases(store, NAME) == {"champion": "1"}
        assert cluster.objects[NAME]["metadata"]["annotations"]["routewright/model-version"] == "1"


def test_a_model_that_never_becomes_ready_leaves_everything_as_it_was(
    cluster: ApiServer, store, tmp_path, monkeypatch, capsys
) -> None:
    same_run(monkeypatch)
    deploy = deploy_file(tmp_path)
    call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / "one"), "--deploy", deploy)
    two = write_search_run(tmp_path / "two", "m2")
    monkeypatch.setattr(cluster, "_ready", lambda predictor: predictor["labels"]["routewright/model-version"] == "1")
    assert call(monkeypatch, "promote", NAME, "--run", two, "--deploy", deploy) == 1
    assert "traffic and aliases are as before" in capsys.readouterr().err
    assert registry.aliases(store, NAME) == {"champion": "1"}
    assert decision(two)["outcome"] == "aborted"
    assert cluster.objects[NAME]["metadata"]["annotations"]["routewright/model-version"] == "1"


@pytest.mark.parametrize("mode", ["Knative", "Standard"])
def test_after_an_aborted_rollout_the_champion_can_still_be_rolled_back(
    cluster: ApiServer, store, tmp_path, monkeypatch, capsys, mode: str
) -> None:
    same_run(monkeypatch)
    deploy = deploy_file(tmp_path, mode=mode)
    for version in ("m1", "m2"):
        call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / version, version), "--deploy", deploy)
    three = write_search_run(tmp_path / "m3", "m3")

    def only(*versions: str) -> None:
        monkeypatch.setattr(cluster, "_ready", lambda spec: spec["labels"]["routewright/model-version"] in versions)

    only("1", "2")
    assert call(monkeypatch, "promote", NAME, "--run", three, "--deploy", deploy) == 1
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    only("2")
    assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 1, "version 1 does not become ready"
    assert "rollback of search-router is not finished" in capsys.readouterr().err
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    only("1", "2")
    cluster.objects[NAME]["status"].pop("observedGeneration")  # the controller looks again
    for told in ("version 1 is the champion again", "version 1 is the champion and has all traffic"):
        assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
        assert told in capsys.readouterr().out
        assert registry.aliases(store, NAME) == {"champion": "1"}
        assert cluster.objects[NAME]["metadata"]["annotations"]["routewright/model-version"] == "1"
        assert [state.split()[-1] for state in cluster.history[-1]] == ["100"]


class Killed(Exception):
    pass


def test_a_rollback_in_a_rollout_leaves_the_champion(cluster: ApiServer, store, tmp_path, monkeypatch, capsys) -> None:
    from serving.promotion import rollout

    same_run(monkeypatch)
    deploy = deploy_file(tmp_path)
    for version in ("m1", "m2"):
        call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / version, version), "--deploy", deploy)
    three = write_search_run(tmp_path / "m3", "m3")
    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_watch", lambda *given: (_ for _ in ()).throw(Killed))
        assert call(monkeypatch, "promote", NAME, "--run", three, "--deploy", deploy) == 1
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1", "challenger": "3"}
    assert cluster.objects[NAME]["spec"]["predictor"]["canaryTrafficPercent"] == 5
    assert call(monkeypatch, "rollback", NAME, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    assert cluster.objects[NAME]["metadata"]["annotations"]["routewright/model-version"] == "2"
    # Killed at the same place, the same command goes on instead.
    with monkeypatch.context() as patched:
        patched.setattr(rollout, "_watch", lambda *given: (_ for _ in ()).throw(Killed))
        call(monkeypatch, "promote", NAME, "--run", three, "--deploy", deploy)
    assert call(monkeypatch, "promote", NAME, "--run", three, "--deploy", deploy) == 0
    assert registry.aliases(store, NAME) == {"champion": "3", "previous": "2"}
    assert len(store.search_model_versions(f"name = '{NAME}'")) == 3


def test_a_dry_run_writes_nothing_and_shows_manifest_and_diff(
    cluster: ApiServer, store, tmp_path, monkeypatch, capsys
) -> None:
    run, deploy = write_search_run(tmp_path / "run"), deploy_file(tmp_path)
    assert call(monkeypatch, "promote", NAME, "--run", run, "--deploy", deploy, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "kind: InferenceService" in shown
    assert "--- deployed: nothing" in shown
    assert "would promote" in shown
    assert cluster.writes == []
    assert registry.aliases(store, NAME) == {}
    assert not (run / "promotion").exists()
    call(monkeypatch, "promote", NAME, "--run", run, "--deploy", deploy)
    capsys.readouterr()
    assert call(monkeypatch, "promote", NAME, "--run", run, "--deploy", deploy, "--dry-run") == 0
    assert "no difference from what is deployed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda run: (run / "summary.json").unlink(), "summary.json: cannot be read"),
        (lambda run: (run / "summary.json").write_text("{}"), "summary.json: pipeline: Field required"),
        (lambda run: (run / "model" / "model.safetensors").unlink(), "no .safetensors file"),
        (lambda run: (run / "model" / "router.json").write_text("{}"), "router.json: expected a trained search-router"),
        (lambda run: (run / "evaluation" / "records.jsonl").write_text("{"), "records.jsonl, line 1: not a JSON object"),
        (
            lambda run: (run / "evaluation" / "records.jsonl").write_text("{}"),
            "not those of an evaluated search-router ('row')",
        ),
        (lambda run: (run / "evaluation" / "records.jsonl").write_text(""), "row 'sft+rl' has no records"),
        (lambda run: (run / "evaluation" / "queries.jsonl").unlink(), "queries.jsonl: cannot be read"),
    ],
)
def test_a_broken_run_is_one_sentence_and_exit_code_2(store, tmp_path, monkeypatch, capsys, break_it, sentence) -> None:
    run = write_search_run(tmp_path / "run")
    break_it(run)
    assert call(monkeypatch, "promote", NAME, "--run", run) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.strip().splitlines()) == 1
    assert registry.aliases(store, NAME) == {}


def test_other_bad_input(store, tmp_path, monkeypatch, capsys) -> None:
    run = write_search_run(tmp_path / "run")
    for arguments, sentence in (
        (["promote", "step-router", "--run", run], "pipeline: expected step-router, found search-router"),
        (["promote", NAME, "--run", run, "--deploy", tmp_path / "no.yaml"], "no.yaml: cannot be read"),
        (["promote", NAME, "--run", run, "--gates", tmp_path / "no.yaml"], "no.yaml: cannot be read"),
        (["rollback", NAME], "no version has the alias champion, nothing to roll back"),
    ):
        assert call(monkeypatch, *arguments) == 2
        assert sentence in capsys.readouterr().err
    call(monkeypatch, "promote", NAME, "--run", run)
    assert call(monkeypatch, "rollback", NAME) == 2
    assert "no version has the alias previous" in capsys.readouterr().err
