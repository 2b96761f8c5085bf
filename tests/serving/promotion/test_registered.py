"""``routewright promote ROUTER --version N``: a challenger, a version that was taken back, new settings of the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer
from evaluated_run import write_search_run
from promotion_commands import call
from test_promote import NAME, decision, deploy_file, same_run

from routewright import model_registry as registry
from routewright.evaluation.gates import GateBounds
from serving.promotion.promote import candidate_of_run
from serving.promotion.promote import promote as decide


@pytest.fixture
def served(cluster: ApiServer, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The deployment file of version 1, the champion, beside version 2, a challenger whose run folder is not here."""
    same_run(monkeypatch)
    deploy = deploy_file(tmp_path, mode="Standard")
    assert call(monkeypatch, "promote", NAME, "--run", write_search_run(tmp_path / "one"), "--deploy", deploy) == 0
    made = candidate_of_run(NAME, write_search_run(tmp_path / "two", "m2"))
    found = decide(made, None, GateBounds(), tmp_path / "stage", print, challenger=True)
    assert found.outcome == "challenger", found.reason
    (tmp_path / "two").rename(tmp_path / "elsewhere")
    return deploy


def test_a_challenger_becomes_the_champion_by_its_number(
    cluster: ApiServer, store, served, tmp_path, monkeypatch, capsys
) -> None:
    capsys.readouterr()
    assert call(monkeypatch, "promote", NAME, "--version", 2, "--deploy", served, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "✓ quality − champion, lower end" in shown
    assert "would promote" in shown
    assert registry.aliases(store, NAME) == {"champion": "1", "challenger": "2"}
    assert call(monkeypatch, "promote", NAME, "--version", 2, "--deploy", served) == 0
    assert "promoted: all gates passed: version 2 is the champion" in capsys.readouterr().out
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}
    assert cluster.objects[NAME]["metadata"]["annotations"]["routewright/model-version"] == "2"
    found = decision(tmp_path)
    assert [step["percent"] for step in found["rollout"]["steps"]] == [5, 25, 100]
    assert (found["champion"], found["outcome"], found["digest"]) == ("1", "promoted", decision_digest(store, "2"))
    assert (tmp_path / "promotion" / "MODEL_CARD.md").read_text().startswith("# Search router m2")
    assert call(monkeypatch, "promote", NAME, "--version", 2, "--deploy", served) == 0
    assert "unchanged: version 2 is already the champion" in capsys.readouterr().out
    assert call(monkeypatch, "rollback", NAME, "--deploy", served) == 0
    assert call(monkeypatch, "promote", NAME, "--version", 2, "--deploy", served) == 0
    assert registry.aliases(store, NAME) == {"champion": "2", "previous": "1"}


def decision_digest(store: Any, number: str) -> str:
    return str(store.get_model_version(NAME, number).tags[registry.DIGEST])


def test_new_settings_of_the_champion_need_no_run_folder(cluster: ApiServer, store, served, monkeypatch, capsys) -> None:
    served.write_text(yaml.safe_dump({**yaml.safe_load(served.read_text()), "memory": "4Gi"}))
    assert call(monkeypatch, "promote", NAME, "--version", 1, "--deploy", served) == 0
    (container,) = cluster.objects[NAME]["spec"]["predictor"]["containers"]
    assert container["resources"]["limits"]["memory"] == "4Gi"
    assert registry.aliases(store, NAME) == {"champion": "1", "challenger": "2"}


def test_a_registered_version_too_large_for_kserve_is_refused(store, served, monkeypatch, capsys) -> None:
    served.write_text(yaml.safe_dump({**yaml.safe_load(served.read_text()), "storage_initializer_gib": 1e-9}))
    assert call(monkeypatch, "promote", NAME, "--version", 2, "--deploy", served) == 2
    assert "more than the storage initializer's memory" in capsys.readouterr().err
    assert registry.aliases(store, NAME) == {"champion": "1", "challenger": "2"}


def test_a_version_that_was_not_judged_against_this_champion(store, served, tmp_path, monkeypatch, capsys) -> None:
    three = write_search_run(tmp_path / "three", "m3")
    assert call(monkeypatch, "promote", NAME, "--run", three) == 0
    store.create_model_version(NAME, str(tmp_path / "elsewhere"))
    digest = decision_digest(store, "3")
    run = store.get_model_version(NAME, "3").run_id
    store.create_model_version(NAME, str(tmp_path / "elsewhere"), run, {registry.DIGEST: digest[::-1]})
    capsys.readouterr()
    for arguments, sentence in (
        (["--version", 2], "version 2: it was compared with version 1, the champion is version 3; expected the folder of"),
        (["--version", 1], "version 1: it was compared with no champion, the champion is version 3"),
        (["--version", 4], "version 4: its run has no judged.json with its gates"),
        (["--version", 5], "version 5: its judged.json does not say that it passed"),
        (["--version", 9], "version 9: not in the registry (RESOURCE_DOES_NOT_EXIST)"),
        (["--version", 3, "--run", three], "--version: expected neither --run nor --gates"),
        ([], "promote: expected --run DIR or --version NUMBER"),
    ):
        assert call(monkeypatch, "promote", NAME, *arguments) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert len(error.strip().splitlines()) == 1
