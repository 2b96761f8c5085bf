"""The shipped profiles of the step router."""

from __future__ import annotations

import pytest

from routewright.step_router.profile import PROFILES, load_step_profile

SHIPPED = sorted(file.stem for file in PROFILES.glob("*.yaml"))
GPU = {
    "gpu": "Qwen/Qwen2.5-7B-Instruct",
    "gpu-llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "gpu-gemma-2-9b": "google/gemma-2-9b-it",
    "gpu-qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
}


def test_these_profiles_are_shipped() -> None:
    assert set(SHIPPED) >= {"smoke", "laptop", *GPU}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_loads(name: str) -> None:
    profile = load_step_profile(name)
    assert profile.name == name
    assert profile == load_step_profile(str(PROFILES / f"{name}.yaml")), "by path as by name"


@pytest.mark.parametrize(("name", "hub"), GPU.items())
def test_the_gpu_profiles_are_the_paper(name: str, hub: str) -> None:
    """arXiv 2605.16604: BC 2e-5 × 3 epochs, LoRA r64 / α128; K 8, gap 0.1, β 0.1, 5e-6, JSD 0.1; 20 seeds; costs 1, 50."""
    profile = load_step_profile(name)
    assert (profile.backbone.source, profile.backbone.name, profile.backbone.dtype) == ("hub", hub, "bfloat16")
    assert profile.backbone.layers is None, "the whole model"
    assert (profile.bc.lr, profile.bc.epochs, profile.synthesis.seeds) == (2e-5, 3, 20)
    for section in (profile.bc, profile.verifier, profile.dpo):
        assert section.lora is not None
        assert (section.lora.r, section.lora.alpha) == (64, 128)
    dpo, router = profile.dpo, profile.router
    assert (dpo.lr, dpo.beta, dpo.jsd, dpo.samples, dpo.gap) == (5e-6, 0.1, 0.1, 8, 0.1)
    assert (router.alpha, router.epsilon, router.c_slm, router.c_llm) == (0.2, 0.3, 1, 50)


def test_the_gpu_profiles_differ_in_the_model_alone() -> None:
    first = load_step_profile("gpu")
    for name in GPU:
        profile = load_step_profile(name)
        alike = {"name": first.name, "backbone": first.backbone, "workers": first.workers}
        assert profile.model_copy(update=alike) == first


@pytest.mark.parametrize(
    ("name", "billions"), [("gpu", 7.6), ("gpu-llama-3.1-8b", 8.0), ("gpu-gemma-2-9b", 9.2), ("gpu-qwen2.5-14b", 14.8)]
)
def test_every_workers_policy_and_verifier_fit_on_one_gpu(name: str, billions: float) -> None:
    """Two bytes a weight, two models a worker, and at least 12 of 80 GB for the passes and CUDA itself."""
    assert load_step_profile(name).workers * 2 * 2 * billions <= 80 - 12


@pytest.mark.parametrize("name", ["smoke", "laptop"])
def test_a_laptop_needs_no_download(name: str) -> None:
    assert load_step_profile(name).backbone.source in ("packaged", "architecture")
