from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from routewright.config import PROFILES, Profile, load_profile
from routewright.errors import BadInput

SHIPPED = sorted(file.stem for file in PROFILES.glob("*.yaml"))


def test_the_three_profiles_are_shipped() -> None:
    assert {"smoke", "laptop", "gpu"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_loads(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.rl.outcomes > 0
    assert profile == load_profile(str(PROFILES / f"{name}.yaml")), "by path as by name"


def test_the_gpu_profile_is_the_paper() -> None:
    """arXiv 2608.00030: Qwen3-0.6B, LoRA r16 / α32, bf16; 2 epochs of 56k; RL on 11k, KL 0.15, lr 5e-6, batch 32, T 1."""
    gpu = load_profile("gpu")
    assert (gpu.backbone.source, gpu.backbone.name, gpu.backbone.dtype) == ("hub", "Qwen/Qwen3-0.6B", "bfloat16")
    assert gpu.backbone.layers is None, "the whole model"
    assert (gpu.sft.queries, gpu.sft.epochs) == (56_000, 2)
    for section in (gpu.sft, gpu.rl):
        assert section.lora is not None
        assert (section.lora.r, section.lora.alpha) == (16, 32)
    assert (gpu.rl.outcomes, gpu.rl.beta, gpu.rl.lr, gpu.rl.batch_size, gpu.rl.temperature) == (11_000, 0.15, 5e-6, 32, 1.0)


def test_the_laptop_profile_needs_no_download() -> None:
    assert load_profile("laptop").backbone.source == "packaged"
    assert load_profile("smoke").backbone.source == "architecture"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("epochs", "epoch", "field sft.epoch: unknown key, expected one of queries, epochs, batch_size, lr, "),
        ("backbone:", "bones:", "field bones: unknown key, expected one of name, backbone, synthesis, "),
        ("sft:", "sft: 3  #", "field sft: expected a mapping, found 3"),
        ("queries_per_agent: 10", "queries_per_agent: -1", "field synthesis.queries_per_agent"),
        ("samples: 8", "samples: 1", "field rl: rl.samples must be at least 2"),
        ("source: architecture", "source: internet", "field backbone.source"),
        ("batch_size: 32, lr: 1.0e-3", "batch_size: many, lr: 1.0e-3", "field sft.batch_size"),
        ("evaluation:", "valuation:", "valuation"),
    ],
)
def test_a_faulty_profile(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    text = (PROFILES / "smoke.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadInput) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1, 2", "just words", "- a\n- b", "\ufeff"])
def test_what_is_no_profile_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=r"mine\.yaml: expected"):
        load_profile(str(path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"mine\.yaml: expected a YAML profile"):
        load_profile(str(tmp_path / "mine.yaml"))


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(BadInput, match="'desktop' does not exist: expected one of gpu, laptop, smoke, or a profile file"):
        load_profile("desktop")


def test_updates_are_passes_over_the_outcomes_and_never_too_few() -> None:
    rl = load_profile("smoke").rl.model_copy(update={"epochs": 3, "batch_size": 32, "min_updates": 12})
    assert rl.updates(4000) == 375
    assert rl.updates(130) == 12
    assert rl.updates(1) == 12


def test_one_sample_is_enough_without_a_baseline(tmp_path: Path) -> None:
    content = yaml.safe_load((PROFILES / "smoke.yaml").read_text())
    content["rl"] |= {"samples": 1, "variant": "reinforce++"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    assert load_profile(str(tmp_path / "mine.yaml")).rl.samples == 1


def test_the_digest_follows_every_setting() -> None:
    smoke = load_profile("smoke")
    same = Profile.model_validate(smoke.model_dump())
    assert same.digest == smoke.digest
    other = smoke.model_copy(update={"rl": smoke.rl.model_copy(update={"beta": 0.5})})
    assert other.digest != smoke.digest
