"""Profiles of the ensemble router (configs/ensemble-router/*.yaml): which tasks, which agents, how much training."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from routewright.config import BackboneSection, LoraSection, Section, read_profile
from routewright.ensemble_router.policy_loss import Normaliser, Ratio
from routewright.ensemble_router.tasks import Family

RULES = (
    "familiarity", "no-exploration", "no-margin", "last-layer", "half-lambda", "double-lambda", "frozen-router",
    "frozen-agents", "top-1", "top-2", "all", "random", "one-model", "linucb", "reward-regression", "classifier", "icl",
)  # fmt: skip
"""Rules that train agents of their own; `familiarity` is the paper's, the five after it leave out or change one thing.

`frozen-agents` trains a router over agents that do not learn, and `frozen-router` agents under that router.
"""
PROFILES = Path(__file__).resolve().parents[2] / "configs" / "ensemble-router"


class FamilySection(Section):
    """One reasoning-gym family and its parameters."""

    family: Family
    domain: str = Field("", description="empty: the family's name; needed where a family comes twice")
    parameters: dict[str, Any] = Field(default_factory=dict)


class FileSection(Section):
    """A file of tasks (JSON lines); one that is given as out of distribution is only tested on."""

    path: Path
    domain: str | None = Field(None, description="null: as the rows say, else the file's name")
    out_of_distribution: bool = False


class TasksSection(Section):
    """Where the questions come from and how many of each domain every split holds."""

    families: tuple[FamilySection, ...] = ()
    out_of_distribution: tuple[FamilySection, ...] = Field((), description="families, or ranges of them, only tested on")
    files: tuple[FileSection, ...] = ()
    train: int = Field(gt=0, description="questions a domain, at most, for files")
    dev: int = Field(gt=0)
    test: int = Field(gt=0)
    stripped: bool = Field(False, description="a family's name and what is asked, instead of the full wording")
    reward: Literal["scorer", "exact"] = Field(
        "scorer", description="of families: their own scorer or the stored answer alone"
    )

    @model_validator(mode="after")
    def _some(self) -> TasksSection:
        if not self.families and not any(not file.out_of_distribution for file in self.files):
            raise ValueError("tasks: expected at least one family or file to train on")
        names = [one.domain or one.family for one in (*self.families, *self.out_of_distribution)]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks: expected different families or domains, found {names}")
        return self


class SupervisedSection(Section):
    """Training on the questions' answers; the loss is of the answer's tokens only."""

    steps: int = Field(gt=0)
    batch_size: int = Field(32, gt=0)
    lr: float = Field(3e-3, gt=0)


class WarmUpSection(SupervisedSection):
    """One adapter's start: agent i prefers domain i (modulo the domains), so that the agents begin different."""

    share: float = Field(0.8, gt=0, le=1, description="questions of the preferred domain; the rest come from all")


class AgentsSection(Section):
    """The agents and what an update of one is."""

    count: int = Field(4, gt=1)
    lora: LoraSection = LoraSection(r=16, alpha=32, dropout=0.0)
    samples: int = Field(8, gt=1, description="completions a query and agent (G)")
    prompts: int = Field(16, gt=0, description="queries an update takes from the agent's buffer, newest first")
    buffer: int = Field(64, gt=0, description="queries a buffer holds; the oldest are dropped")
    max_new_tokens: int = Field(16, gt=0)
    rows: int = Field(512, gt=0, description="completions generated in one batch, at most")
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0, description="0: all tokens")
    top_p: float = Field(1.0, gt=0, le=1)
    lr: float = Field(3e-5, gt=0)
    warm_up_updates: int = Field(10, ge=0, description="updates with a rising learning rate; then a cosine over the budget")
    weight_decay: float = Field(1e-3, ge=0)
    clip: float = Field(1.0, gt=0, description="largest norm of an update's gradient")
    ratio: Ratio = "sequence"
    normaliser: Normaliser = "tokens"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    beta: float = Field(1e-4, ge=0, description="weight of the KL to the base model")
    overlong: int = Field(0, ge=0, description="last tokens before max_new_tokens over which a penalty rises to 1; 0: none")

    @model_validator(mode="after")
    def _fits(self) -> AgentsSection:
        if self.buffer < self.prompts:
            raise ValueError("agents.buffer must hold at least agents.prompts queries")
        if self.overlong > self.max_new_tokens:
            raise ValueError("agents.overlong must be at most agents.max_new_tokens")
        return self

    @property
    def names(self) -> list[str]:
        """agent-0 … agent-(N−1)."""
        return [f"agent-{number}" for number in range(self.count)]


class RouterSection(Section):
    """The familiarity router."""

    lam: float = Field(2.0, gt=0, description="λ of f = exp(−λ·d)")
    tau: float = Field(0.7, gt=0, description="familiarity that the activated agents must sum to")
    margin: float = Field(1.0, gt=0, le=2)
    c_ucb: float = Field(2.0, ge=0)
    w_ent: float = Field(2.0, ge=0)
    lr: float = Field(1e-4, gt=0)
    weight_decay: float = Field(1e-3, ge=0)


class CoevolutionSection(Section):
    """The loop."""

    queries: int = Field(16, gt=0, description="queries routed a step")
    budget: int = Field(gt=0, description="answers in all: one is a query sampled by one agent; the same for every rule")
    router_first: int = Field(0, ge=0, description="answers, of the budget, in which only the router learns")
    checkpoint_every: int = Field(20, gt=0, description="steps")
    rules: tuple[str, ...] = Field(
        ("familiarity", "top-1", "frozen-agents", "frozen-router"), description="each trains its own agents"
    )

    @model_validator(mode="after")
    def _known(self) -> CoevolutionSection:
        unknown = sorted(set(self.rules) - set(RULES))
        if unknown:
            raise ValueError(f"coevolve.rules: expected some of {', '.join(RULES)}, found {unknown[0]!r}")
        if "familiarity" not in self.rules:
            raise ValueError("coevolve.rules: expected familiarity among them, it is the router that is served")
        if "frozen-router" in self.rules and "frozen-agents" not in self.rules:
            raise ValueError("coevolve.rules: expected frozen-agents beside frozen-router, which keeps its router")
        return self


class EvaluationSection(Section):
    """Held-out questions."""

    bootstrap: int = Field(2000, gt=0)
    taus: tuple[float, ...] = Field((0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0), description="cut-offs of the accuracy-token curve")


class EnsembleProfile(Section):
    """One profile file."""

    name: str
    backbone: BackboneSection
    more_backbones: tuple[BackboneSection, ...] = Field(
        (), exclude_if=lambda more: not more,
        description="further base models: agent i stands on base i modulo their number, the first reads the queries",
    )  # fmt: skip
    tasks: TasksSection
    pretrain: SupervisedSection | None = Field(None, description="a backbone from a config learns the families' text first")
    warm_up: WarmUpSection | None = None
    agents: AgentsSection
    router: RouterSection
    coevolve: CoevolutionSection
    evaluation: EvaluationSection

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON: the config hash that runs record."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def training_digest(self) -> str:
        """sha256 of what a rule's training depends on: neither the evaluation nor which other rules there are."""
        content = self.model_dump_json(exclude={"evaluation": True, "coevolve": {"rules"}})
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def backbones(self) -> tuple[BackboneSection, ...]:
        """All base models, the one that reads the queries first."""
        return (self.backbone, *self.more_backbones)

    def names_on(self, number: int) -> list[str]:
        """The agents that stand on a base model."""
        return self.agents.names[number :: len(self.backbones)]

    @model_validator(mode="after")
    def _cut_off(self) -> EnsembleProfile:
        if self.router.tau > self.agents.count:
            raise ValueError(f"router.tau must be at most the number of agents {self.agents.count}")
        if len(self.backbones) > self.agents.count:
            raise ValueError(f"more_backbones: expected an agent for each of the {len(self.backbones)} base models")
        if self.coevolve.router_first >= self.coevolve.budget:
            raise ValueError("coevolve.router_first must be less than coevolve.budget")
        return self


def load_ensemble_profile(name_or_path: str) -> EnsembleProfile:
    """Read a shipped profile of the ensemble router by name, or any profile file by path."""
    return read_profile(name_or_path, PROFILES, EnsembleProfile)
