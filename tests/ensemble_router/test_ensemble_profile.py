"""Profiles of the ensemble router: the shipped ones load, wrong ones are told by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from routewright.ensemble_router.profile import PROFILES, EnsembleProfile, load_ensemble_profile
from routewright.errors import BadInput

SHIPPED = ("smoke", "laptop", "gpu", "gpu-mixed")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_load_and_differ_by_digest(name: str) -> None:
    profile = load_ensemble_profile(name)
    assert profile.name == name
    assert len(profile.agents.names) == profile.agents.count
    assert all(profile.digest != load_ensemble_profile(other).digest for other in SHIPPED if other != name)


def test_several_base_models_have_an_agent_each() -> None:
    profile = load_ensemble_profile("gpu-mixed")
    assert [one.name for one in profile.backbones] == [
        "Qwen/Qwen3-4B", "meta-llama/Llama-3.2-3B-Instruct", "microsoft/Phi-4-mini-instruct",
    ]  # fmt: skip
    assert [profile.names_on(number) for number in range(3)] == [["agent-0"], ["agent-1"], ["agent-2"]]
    content = profile.model_dump()
    content["agents"]["count"] = 5
    more = EnsembleProfile.model_validate(content)
    assert [more.names_on(number) for number in range(3)] == [["agent-0", "agent-3"], ["agent-1", "agent-4"], ["agent-2"]]
    assert more.training_digest != profile.training_digest


def test_a_profile_with_one_base_model_has_the_digest_it_had_before_there_could_be_more() -> None:
    """So that finished trainings stay valid."""
    profile = load_ensemble_profile("laptop")
    assert "more_backbones" not in profile.model_dump()
    content = {**profile.model_dump(), "more_backbones": [{"source": "path", "name": "x"}]}
    assert EnsembleProfile.model_validate(content).training_digest != profile.training_digest


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


def test_more_base_models_than_agents_are_told(tmp_path: Path) -> None:
    content = yaml.safe_load((PROFILES / "gpu-mixed.yaml").read_text(encoding="utf-8"))
    content["agents"]["count"] = 2
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(BadInput, match="more_backbones: expected an agent for each of the 3 base models"):
        load_ensemble_profile(str(path))
