"""Profiles of the step router: every shipped one loads, wrong fields are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tiny_policy import tiny_profile

from routewright.errors import BadInput
from routewright.step_router.profile import PROFILES, load_step_profile


def changed(tmp_path: Path, section: str, **fields: object) -> str:
    """The smoke profile as a file with some fields set."""
    content = yaml.safe_load((PROFILES / "smoke.yaml").read_text())
    content[section] = content[section] | fields
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_all_shipped_profiles_load_and_differ() -> None:
    names = [file.stem for file in sorted(PROFILES.glob("*.yaml"))]
    profiles = [load_step_profile(name) for name in names]
    assert [profile.name for profile in profiles] == names
    assert len({profile.digest for profile in profiles}) == len(names)


@pytest.mark.parametrize(
    ("section", "field", "value", "told"),
    [
        ("bc", "speed", 3, "bc.speed"),
        ("bc", "lr", 0, "bc.lr"),
        ("bc", "actions", 1, "bc.actions"),
        ("tasks", "cooking", 1.5, "tasks.cooking"),
        ("router", "delta", 1, "router.delta"),
        ("dpo", "gap", -0.1, "dpo.gap"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, section: str, field: str, value: object, told: str) -> None:
    with pytest.raises(BadInput, match=rf"own\.yaml: field {told}: "):
        load_step_profile(changed(tmp_path, section, **{field: value}))


def test_an_unknown_section_and_a_missing_one_are_named(tmp_path: Path) -> None:
    content = yaml.safe_load((PROFILES / "smoke.yaml").read_text())
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content | {"teacher": {}}))
    with pytest.raises(BadInput, match="field teacher: "):
        load_step_profile(str(path))
    del content["verifier"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(BadInput, match="field verifier: "):
        load_step_profile(str(path))


def test_an_llm_cheaper_than_the_small_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"router\.c_llm must be at least router\.c_slm"):
        load_step_profile(changed(tmp_path, "router", c_slm=2.0, c_llm=1.0))
    assert load_step_profile(changed(tmp_path, "router", c_slm=2.0, c_llm=2.0)).router.c_llm == 2.0


def test_the_digest_follows_every_field() -> None:
    assert tiny_profile().digest == tiny_profile().digest
    assert tiny_profile(dpo={"beta": 0.2}).digest != tiny_profile().digest
