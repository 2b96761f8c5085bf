"""Profiles of the ensemble router: the shipped ones load, wrong ones are told by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from routewright.ensemble_router.profile import PROFILES, load_ensemble_profile
from routewright.errors import BadInput


@pytest.mark.parametrize("name", ["smoke", "laptop", "gpu"])
def test_shipped_profiles_load_and_differ_by_digest(name: str) -> None:
    profile = load_ensemble_profile(name)
    assert profile.name == name
    assert len(profile.agents.names) == profile.agents.count
    assert all(
        profile.digest != load_ensemble_profile(other).digest for other in ("smoke", "laptop", "gpu") if other != name
    )


@pytest.mark.parametrize(
    ("section", "change", "told"),
    [
        ("router", {"tau": 5.0}, "router.tau must be at most the number of agents 3"),
        ("agents", {"count": 1}, "agents.count"),
        ("agents", {"buffer": 2}, "agents.buffer must hold at least agents.prompts"),
        ("tasks", {"families": []}, "at least one family or file"),
        ("coevolve", {"router_first": 96}, "coevolve.router_first must be less than"),
    ],
)
def test_a_wrong_value_is_told(tmp_path: Path, section: str, change: dict[str, Any], told: str) -> None:
    content = yaml.safe_load((PROFILES / "smoke.yaml").read_text(encoding="utf-8"))
    content[section].update(change)
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(BadInput, match=told):
        load_ensemble_profile(str(path))
