"""Profiles of the step router (configs/step-router/*.yaml): what is distilled and how much of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from routewright.config import BackboneSection, LoraSection, Section, read_profile
from routewright.step_router.perturbations import UNSEEN

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "step-router"


class TasksSection(Section):
    """How many games, problems or task folders each split holds; no task is in two splits."""

    policy: int = Field(gt=0, description="for behaviour cloning, the verifier and DPO")
    router: int = Field(gt=1, description="for the risk router: the policy's own failures on tasks it never saw")
    threshold: int = Field(gt=0, description="for calibration and the threshold")
    test: int = Field(gt=0)
    moves: tuple[int, int] = Field((3, 6), description="TextWorld: moves of the shortest and of the longest quest")
    cooking: float = Field(0.25, ge=0, le=1, description="TextWorld: share of cooking games, where moves are final")

    @model_validator(mode="after")
    def _moves(self) -> TasksSection:
        if not 1 <= self.moves[0] <= self.moves[1] <= 6:
            raise ValueError(f"tasks.moves must be two numbers from 1 to 6, the smaller first, got {list(self.moves)}")
        return self


class SynthesisSection(Section):
    """Teacher episodes under perturbation."""

    episodes_per_task: int = Field(gt=0)
    random_moves: float = Field(0.3, ge=0, le=1, description="an episode's share of random moves is drawn up to this")
    seeds: int = Field(20, gt=0, description="perturbation seeds")
    unseen: tuple[str, ...] = Field(UNSEEN, description="perturbations that training never shows")


class TrainingSection(Section):
    """One language-model training."""

    epochs: float = Field(gt=0)
    batch_size: int = Field(gt=0)
    lr: float = Field(gt=0)
    max_length: int = Field(512, gt=0)
    lora: LoraSection | None = None


class BcSection(TrainingSection):
    """Behaviour cloning."""

    actions: int = Field(16, gt=1, description="listed actions that a pass compares, the teacher's among them")
    token_weight: float = Field(1.0, ge=0, description="weight of the completion's token loss beside the listed one")
    new_tokens: int = Field(256, gt=0, description="tokens of an action that the policy writes, at most")


class VerifierSection(TrainingSection):
    """Process verifier."""

    states: int = Field(gt=0, description="states of the policy split whose candidates are compared")


class DpoSection(TrainingSection):
    """Verifier-guided DPO with the consistency term."""

    states: int = Field(gt=0, description="states of the policy split that pairs are made of")
    samples: int = Field(8, gt=1, description="candidates sampled a state (K)")
    gap: float = Field(0.1, ge=0, description="least difference of verifier scores in a pair")
    beta: float = Field(0.1, gt=0)
    jsd: float = Field(0.1, ge=0, description="weight of the Jensen-Shannon divergence between perturbed views")


class RouterSection(Section):
    """The risk router, its threshold and its guarantee."""

    seeds: int = Field(gt=0, description="perturbation seeds a task of the router and of the threshold split")
    seed_pool: int = Field(20, gt=0, description="perturbation seeds of a split, which its tasks take in turns")
    coins: int = Field(3, gt=0, description="episodes a task and seed in which a coin decides who acts")
    coin_rate: float = Field(0.65, gt=0, lt=1, description="how often the coin calls the LLM: about as the router will")
    candidates: int = Field(8, gt=1, description="candidates a decision")
    alpha: float = Field(0.2, gt=0, le=1)
    epsilon: float = Field(0.3, gt=0, lt=1)
    steps: int = Field(300, gt=0)
    c_slm: float = Field(1.0, ge=0, description="cost of a step of the small model")
    c_llm: float = Field(50.0, gt=0, description="cost of a step of the LLM")
    kappa: float = Field(500.0, gt=0, description="cost of a failed episode")
    call_budget: float = Field(2.0, ge=0, description="LLM calls an episode that the budget threshold allows on average")
    operating: Literal["parity", "bayes", "budget", "guaranteed"] = Field(
        "parity", description="the threshold that is evaluated and served, see `calibration.choose_thresholds`"
    )
    target_failure: float = Field(0.1, gt=0, lt=1, description="failure rate that the guaranteed threshold keeps")
    delta: float = Field(0.05, gt=0, lt=1, description="the guarantee may miss with this probability")


class EvaluationSection(Section):
    """Held-out episodes."""

    seeds: int = Field(gt=0, description="perturbation seeds a test task")
    seed_pool: int = Field(10, gt=0, description="perturbation seeds of the test, which the tasks take in turns")
    settings: int = Field(7, gt=1, description="thresholds on each row's frontier, beside never and always")
    bootstrap: int = Field(2000, gt=0)
    ablations: bool = Field(True, description="also train and evaluate risk-no-jsd")


class StepRouterProfile(Section):
    """One profile file."""

    name: str
    backbone: BackboneSection
    tasks: TasksSection
    synthesis: SynthesisSection
    bc: BcSection
    verifier: VerifierSection
    dpo: DpoSection
    router: RouterSection
    evaluation: EvaluationSection
    workers: int = Field(2, gt=0, description="processes that play episodes")

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON: the config hash that runs record."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @model_validator(mode="after")
    def _costs(self) -> StepRouterProfile:
        if self.router.c_llm < self.router.c_slm:
            raise ValueError("router.c_llm must be at least router.c_slm")
        return self


def load_step_profile(name_or_path: str) -> StepRouterProfile:
    """Read a shipped profile of the step router by name, or any profile file by path."""
    return read_profile(name_or_path, PROFILES, StepRouterProfile)
