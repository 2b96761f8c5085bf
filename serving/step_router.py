"""The step router behind an endpoint. It keeps no episode: what it is not told, it takes as not having happened."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from routewright.client import StepDecision
from routewright.errors import BadInput
from routewright.step_router.budget import EpisodeBudget
from routewright.step_router.client import NEVER, StepRouter
from routewright.step_router.features import Candidate, Context, PastStep, compute_features, named
from serving.exploration import Draw, Exploration, escalation_propensity
from serving.input_drift import RunningDrift
from serving.predictor import Answer, Timing

NAME = "step-router"
SLM, LLM = "slm", "llm"
Finite = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class CandidateInstance(BaseModel):
    """An action that the small model proposes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: str
    token_logprobs: Annotated[
        list[Finite] | None, Field(min_length=1, max_length=4096, description="log p of its tokens, nats.")
    ] = None
    verifier_score: Finite | None = None


class PastInstance(BaseModel):
    """A step already taken in this episode."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Annotated[str, Field(description="What was done, whoever chose it.")]
    observation: Annotated[str, Field(description="What was observed before it.")]
    entropy: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, description="features.entropy of its decision.")]


class StepInstance(BaseModel):
    """One step to decide."""

    model_config = ConfigDict(extra="forbid", strict=True)

    observation: str
    candidates: Annotated[
        list[CandidateInstance],
        Field(min_length=1, max_length=64, description="What the small model proposes, what it would do first. All with "
              "token_logprobs, or all with verifier_score."),
    ]  # fmt: skip
    step: Annotated[int, Field(ge=0, le=10**6, description="Steps taken before this one, at most max_steps.")]
    max_steps: Annotated[int, Field(ge=1, le=10**6)]
    budget_left: Annotated[int | None, Field(ge=0, description="LLM calls left in this episode; null for no limit.")]
    objective: Annotated[str, Field(description="The task; without it, objective_overlap is 0.")] = ""
    history: Annotated[
        list[PastInstance],
        Field(max_length=1000, description="Earlier steps, oldest first. Without them nothing is a repeat, every "
              "observation is new, and entropy_history is this step's entropy."),
    ] = []  # fmt: skip
    episode: Annotated[str | None, Field(max_length=128, description="Names the episode in the log.")] = None


def as_context(instance: StepInstance) -> Context:
    """The instance as the features see it; BadInput names the field that contradicts another."""
    if len(instance.history) > instance.step:
        raise BadInput(f"history: expected at most step = {instance.step} past steps, found {len(instance.history)}")
    return Context(
        objective=instance.objective,
        observation=instance.observation,
        candidates=[Candidate(c.action, c.token_logprobs, c.verifier_score) for c in instance.candidates],
        step=instance.step,
        max_steps=instance.max_steps,
        history=[PastStep(past.action, past.observation, past.entropy) for past in instance.history],
    )


class StepRouterPredictor:
    """Decides steps with a calibrated risk model; `decide` is for one thread."""

    name, in_loop = NAME, True
    instance = StepInstance
    decision = StepDecision
    agents: Sequence[str] = (SLM, LLM)
    """Who may be named in an outcome: whoever took the step."""

    def __init__(self, folder: Path, exploration: Exploration) -> None:
        """BadInput where the folder holds no sound step router."""
        self._router = StepRouter.load(folder)
        self.model_version, self.exploration = self._router.model_version, exploration
        past = np.sort(self._router.benefits)
        self._tenths = past[[len(past) * i // 10 for i in range(1, 10)]] if len(past) >= 10 else np.zeros(0)
        bins = Counter(self._bin(value) for value in past)
        self.drift = RunningDrift({i: bins[i] for i in range(10)}) if len(self._tenths) else None
        # a model refuses evidence of a kind that was not in its training: 0 both, 1 scores only, -1 log-probabilities only
        kinds = [kind for kind, seen in zip((-1, 0, 1), self._router.model.evidence.tolist(), strict=True) if seen]
        tokens = {} if kinds[-1:] == [1] else {"token_logprobs": [-0.5]}
        scores = {} if kinds[-1:] == [-1] else {"verifier_score": 0.5}
        proposals = [{"action": action, **tokens, **scores} for action in ("open door", "look")]
        self.examples: Sequence[dict[str, Any]] = (
            {"observation": "a dark room", "candidates": proposals, "step": 0, "max_steps": 10, "budget_left": 3},
        )

    def check(self, instance: StepInstance) -> None:
        """Nothing more: of a text of any length, the start counts."""

    def decide(self, instances: Sequence[StepInstance], timing: Timing) -> list[Answer]:
        """One by one: features cost more than the small network, and each answer is exactly that of a lone request."""
        answers = []
        for instance in instances:
            started = time.perf_counter()
            row = compute_features(as_context(instance))
            read = time.perf_counter()
            try:
                risk, benefit = self._router.predict(row)
            except BadInput as error:
                raise BadInput(str(error).replace("features[0].evidence", "candidates: evidence")) from None
            timing.features += read - started
            timing.forward += time.perf_counter() - read
            answers.append(self._answer(instance, named(row), risk, benefit))
        return answers

    def _bin(self, benefit: float) -> int:
        """Which tenth of the reference's benefits this one falls into, 0 to 9; ties share a bin."""
        return int(np.searchsorted(self._tenths, benefit, side="right"))

    def _answer(self, instance: StepInstance, features: dict[str, float], risk: float, benefit: float) -> Answer:
        router, left = self._router, instance.budget_left
        calls = instance.max_steps + 1 if left is None else left  # more calls than steps: no limit, no pacing
        budget = EpisodeBudget(calls, router.threshold, instance.max_steps, router.benefits)
        threshold = budget.threshold_at(instance.step)
        above = benefit > threshold
        escalate, draw = above, Draw(False, 0.0)
        if threshold < math.inf:  # a budget that is used up says inf: a hard limit, nothing to explore
            draw = self.exploration.draw()
            escalate = self.exploration.random.random() < 0.5 if draw.explore else above
        propensity = escalation_propensity(escalate, above, draw.epsilon)
        sent = StepDecision(
            request_id="",
            model_version=self.model_version,
            escalate=escalate,
            take=None if escalate else instance.candidates[0].action,
            risk=risk,
            benefit=benefit,
            threshold=min(threshold, NEVER),
            features=features,
            explored=draw.explore,
            propensity=propensity,
            timestamp=datetime.now(UTC),
        )
        return Answer(
            decision={**vars(sent), "timestamp": sent.timestamp.isoformat()},
            agents=[LLM if escalate else SLM],
            escalated=escalate,
            explored=draw.explore,
            propensity=propensity,
            epsilon=draw.epsilon,
            drift=None if self.drift is None else self.drift.add(self._bin(benefit)),
            context=instance,
        )

    def logged(self, answer: Answer, key: bytes) -> dict[str, Any]:
        """What the log keeps of a decision: no text at all, hence nothing to redact."""
        instance, sent = answer.context, answer.decision
        names = ("features", "risk", "benefit", "threshold", "escalate")
        line = {name: sent[name] for name in names}
        decision = {name: value for name, value in sent.items() if name not in ("take", "features")}
        episode = {} if instance.episode is None else {"episode": instance.episode}
        return {"query": "", "step": instance.step, **episode, **line, "decision": {**decision, "agents": answer.agents}}
