"""The step router in an agent's loop.

    router = StepRouter.load("runs/step-router/calibrate")
    episode = router.episode(objective, max_steps=20, calls=3)
    while not done:
        decision = episode.decide(observation, small_model(observation))
        action = episode.acted(big_model(observation) if decision.take is None else decision.take)
        observation, done = environment(action)
    episode.finished(success=True)

The small model proposes on every step, since the decision reads its candidates: a decision is one call of it, an
escalation one call of the LLM on top.
"""

from __future__ import annotations

import math
import os
import random
import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from numbers import Real
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from routewright.errors import BadInput
from routewright.pools.pool import numbered_lines
from routewright.step_router.budget import DayBudget, EpisodeBudget, check_calls
from routewright.step_router.features import Candidate, Context, PastStep, compute_features, from_named, named
from routewright.step_router.risk import DESCRIPTION, RiskModel, load_risk

ALWAYS, NEVER = -1.0, 1.0  # thresholds: risks lie in [0, 1], and only a risk above the threshold escalates
_CANDIDATE = ("action", "token_logprobs", "verifier_score")

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Difference = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Facts(BaseModel):
    """What the calibrate stage leaves in risk.json for a live router; other keys are not for it."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    model_version: str
    thresholds: dict[str, float | None]
    operating: str
    benefits: list[Difference] = []
    c_slm: Price
    c_llm: Price
    max_steps: int = Field(ge=1)


class FeedbackEntry(BaseModel):
    """One decision of a finished episode, a line of the feedback log.

    ``propensity`` is the probability in (0, 1] of the logged ``escalate``, exploration included; ``outcome`` the
    episode's, 1 for success; ``threshold`` 1 where the budget was used up; ``timestamp`` the decision's.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    request_id: str
    episode: str
    step: int = Field(ge=0)
    router: Literal["step-router"] = "step-router"
    model_version: str
    features: dict[str, float]
    risk: Probability
    benefit: Difference
    threshold: Annotated[float, Field(allow_inf_nan=False)]
    escalate: bool
    explored: bool
    propensity: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    outcome: Probability
    timestamp: AwareDatetime

    @field_validator("features")
    @classmethod
    def _all_fifteen(cls, features: dict[str, float]) -> dict[str, float]:
        try:
            from_named(features)
        except BadInput as error:
            raise ValueError(str(error)) from None
        return features


def read_feedback(path: Path) -> list[FeedbackEntry]:
    """All decisions of a feedback log (.jsonl or .jsonl.gz), in file order.

    BadInput names file, line and field of the first broken line, be it the last one, cut in half.
    """
    entries = []
    for number, line in numbered_lines(path):
        try:
            entries.append(FeedbackEntry.model_validate_json(line))
        except ValidationError as error:
            raise BadInput(f"{path}, line {number}: {_fault(error)}") from None
    return entries


def _fault(error: ValidationError) -> str:
    """The first fault as `field: what was expected`."""
    fault = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    reason = re.sub("^Value error, |^Input should (be|have)", lambda m: "expected" if m[1] else "", fault["msg"])
    return f"{field}: {reason}" if field and not reason.startswith(f"{field}.") else reason


class Calls(NamedTuple):
    """Calls of the small model and of the LLM."""

    slm: int
    llm: int


class Totals(NamedTuple):
    """What a router's episodes came to so far; ``cost`` in the unit of its two prices."""

    episodes: int
    calls: Calls
    cost: float


@dataclass(frozen=True)
class Decision:
    """One decision.

    ``escalate``: the LLM is to act; otherwise ``take`` is the action, the first candidate's (None on escalation).
    ``risk`` is P(the small model alone fails the episode); ``benefit`` by how much the LLM's acting now lowers P(failure),
    ``threshold`` what that was compared with, in [−1, 1] (1 never escalates: the budget is used up); ``features`` the 15 by
    name, ``propensity`` the probability of this answer.
    """

    request_id: str
    escalate: bool
    take: str | None
    risk: float
    benefit: float
    threshold: float
    features: dict[str, float]
    explored: bool
    propensity: float
    timestamp: datetime


def parse_candidates(candidates: Sequence[Candidate | Mapping[str, Any]]) -> list[Candidate]:
    """Candidates from objects or from mappings {"action", "token_logprobs"?, "verifier_score"?}, types checked.

    BadInput names the field. Ranges, and that there is a candidate at all, are `compute_features`' to check.
    """
    if not isinstance(candidates, Sequence) or isinstance(candidates, str | bytes):
        raise BadInput(f"candidates: expected a list, found {type(candidates).__name__}")
    parsed = []
    for i, candidate in enumerate(candidates):
        where = f"candidates[{i}]"
        if isinstance(candidate, Mapping):
            for name in candidate:
                if name not in _CANDIDATE:
                    raise BadInput(f"{where}.{str(name)[:40]}: unknown, expected only {', '.join(_CANDIDATE)}")
            if "action" not in candidate:
                raise BadInput(f"{where}.action: missing, expected a text")
            candidate = Candidate(**candidate)
        elif not isinstance(candidate, Candidate):
            raise BadInput(f"{where}: expected a Candidate or a mapping, found {type(candidate).__name__}")
        tokens, score = candidate.token_logprobs, candidate.verifier_score
        if tokens is not None:
            if not isinstance(tokens, Sequence | np.ndarray) or isinstance(tokens, str | bytes):
                raise BadInput(f"{where}.token_logprobs: expected a list of numbers, found {type(tokens).__name__}")
            tokens = [_number(value, f"{where}.token_logprobs[{t}]") for t, value in enumerate(tokens)]
        if score is not None:
            score = _number(score, f"{where}.verifier_score")
        parsed.append(Candidate(_text(candidate.action, f"{where}.action"), tokens, score))
    return parsed


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{where}: expected a text, found {type(value).__name__}")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadInput(f"{where}: expected a number, found {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise BadInput(f"{where}: expected a number, found one that is too large") from None


def _utc_now() -> datetime:
    return datetime.now(UTC)


class StepRouter:
    """A calibrated risk router with its threshold, budgets and log. Threads may share one."""

    def __init__(
        self,
        model: RiskModel,
        model_version: str,
        threshold: float,
        max_steps: int,
        c_slm: float,
        c_llm: float,
        benefits: Sequence[float] = (),
        *,
        calls_per_day: int | None = None,
        decisions_per_day: float | None = None,
        epsilon: float = 0.0,
        log: Path | None = None,
        seed: int | None = None,
        clock: Callable[[], datetime] = _utc_now,
    ) -> None:
        """`load` says what the arguments mean; ``benefits`` are past ones that budgets are paced by."""
        if not 0 <= epsilon <= 1:
            raise BadInput(f"epsilon: expected a probability, found {epsilon}")
        for name, price in (("c_slm", c_slm), ("c_llm", c_llm)):
            if not 0 <= price < math.inf:
                raise BadInput(f"{name}: expected a price of at least 0, found {price}")
        if math.isnan(threshold):
            raise BadInput("threshold: expected a number, found NaN")
        self.model_version, self.max_steps = model_version, max_steps
        self.threshold = min(max(threshold, ALWAYS), NEVER)
        self.c_slm, self.c_llm = c_slm, c_llm
        self.model = model
        # once: a list would become an array on every decision
        self.benefits = cast(Sequence[float], np.asarray(benefits, dtype=float))
        self._epsilon, self._random, self._clock = epsilon, random.Random(seed), clock
        self._log = None if log is None else Path(log)
        self._day: DayBudget | None = None
        if calls_per_day is not None:
            if decisions_per_day is None:
                raise BadInput("decisions_per_day: missing, a day's budget is spread over about so many decisions")
            self._day = DayBudget(calls_per_day, self.threshold, decisions_per_day, self.benefits)
        self._lock = RLock()
        self._totals = Totals(0, Calls(0, 0), 0.0)

    @classmethod
    def load(
        cls, folder: str | Path, *, operating: str | None = None, c_slm: float | None = None, c_llm: float | None = None,
        **settings: Any,
    ) -> StepRouter:  # fmt: skip
        """The router in a folder that the calibrate stage wrote, at its operating threshold.

        ``operating`` names another of the folder's thresholds: ``parity`` with the LLM, ``bayes`` (from costs), ``budget``
        (calls an episode) or ``guaranteed``. One of null means that none could be vouched for: every step goes to the LLM.
        ``c_slm`` and ``c_llm`` are prices of a call in any unit, those of training unless given. ``settings``:
        ``calls_per_day`` caps the LLM calls of all episodes from midnight to midnight in the clock's time zone, paced for
        about ``decisions_per_day``; with probability ``epsilon`` a decision is drawn at random, for off-policy estimates;
        ``log`` is the file that finished episodes are appended to; ``seed`` is for exploration; ``clock`` tells the
        time, with a time zone. BadInput names a file or field that is missing or wrong.
        """
        folder = Path(folder)
        model, description = load_risk(folder)
        try:
            facts = _Facts.model_validate(description)
        except ValidationError as error:
            raise BadInput(f"{folder / DESCRIPTION}: {_fault(error)}") from None
        name = facts.operating if operating is None else operating
        if name not in facts.thresholds:
            raise BadInput(
                f"{folder / DESCRIPTION}: operating: expected one of {', '.join(facts.thresholds)}, found {name!r}"
            )
        threshold = facts.thresholds[name]
        return cls(
            model,
            facts.model_version,
            ALWAYS if threshold is None else threshold,
            facts.max_steps,
            facts.c_slm if c_slm is None else c_slm,
            facts.c_llm if c_llm is None else c_llm,
            facts.benefits,
            **settings,
        )

    def episode(self, objective: str, max_steps: int | None = None, calls: int | None = None) -> Episode:
        """A new episode of at most ``max_steps`` steps (the longest limit of the calibration tasks unless given).

        Steps beyond are decided as the last one. ``calls`` is its budget of LLM calls: None for no limit, 0 for none at all.
        """
        steps = self.max_steps if max_steps is None else max_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise BadInput(f"max_steps: expected a whole number of at least 1, found {steps!r}")
        limit = sys.maxsize if calls is None else check_calls(calls)  # more calls than steps: no limit, no pacing
        budget = EpisodeBudget(limit, self.threshold, steps, self.benefits)
        episode = Episode(self, _text(objective, "objective"), budget)
        with self._lock:
            self._totals = self._totals._replace(episodes=self._totals.episodes + 1)
        return episode

    @property
    def totals(self) -> Totals:
        """Episodes begun, calls and cost of all of them, this process."""
        with self._lock:
            return self._totals

    def predict(self, features: np.ndarray) -> tuple[float, float]:
        """P(the small model alone fails) and the benefit of calling the LLM now, of one feature row (15,)."""
        alone, slm, llm = self.model.predict(features[None, :])[0]
        return float(alone), float(slm - llm)

    def _choose(self, benefit: float, step: int, episode: EpisodeBudget) -> tuple[datetime, float, bool, bool, float]:
        """Time, threshold, escalate, explored and propensity; a call is spent from every budget."""
        with self._lock:  # nobody else may take the day's last call between the look and the spending
            now = self._clock()
            threshold = episode.threshold_at(step)
            if self._day is not None:
                threshold = max(threshold, self._day.threshold_at(now))
            left = threshold < math.inf  # a budget that is used up says inf, and nothing else does
            above = benefit > threshold
            explored = left and self._random.random() < self._epsilon
            escalate = self._random.random() < 0.5 if explored else above
            if escalate:
                episode.spent += 1
                if self._day is not None:
                    self._day.spent += 1
            calls = Calls(self._totals.calls.slm + 1, self._totals.calls.llm + escalate)
            self._totals = Totals(self._totals.episodes, calls, self._cost(calls))
        other = self._epsilon / 2 if left else 0.0  # P(the answer that the threshold does not give)
        return now, min(threshold, NEVER), escalate, explored, 1 - other if escalate == above else other

    def _cost(self, calls: Calls) -> float:
        return self.c_slm * calls.slm + self.c_llm * calls.llm


class Episode:
    """One episode of an agent: `decide`, `acted`, `decide`, `acted` …, `finished`. For one thread."""

    def __init__(self, router: StepRouter, objective: str, budget: EpisodeBudget) -> None:
        self.id = uuid.uuid4().hex
        self.calls = Calls(0, 0)
        self._router, self._objective, self._budget = router, objective, budget
        self._decisions: list[Decision] = []
        self._history: list[PastStep] = []
        self._pending: PastStep | None = None
        self._steps = 0  # taken, of the limit
        self._finished = False

    @property
    def cost(self) -> float:
        """c_slm for each call of the small model and c_llm for each of the LLM."""
        return self._router._cost(self.calls)

    def decide(self, observation: str, candidates: Sequence[Candidate | Mapping[str, Any]]) -> Decision:
        """Whether the small model takes this step: ``candidates`` are what it proposes, what it would do first.

        BadInput names the field of a bad candidate; nothing is spent then.
        """
        if self._finished:
            raise BadInput("decide: the episode is finished, expected a new one")
        if self._pending is not None:
            raise BadInput("decide: the last decision led to no action yet, expected a call of acted before")
        parsed = parse_candidates(candidates)
        seen, step = _text(observation, "observation"), self._steps
        limit = max(step, self._budget.max_steps)  # an agent that goes on beyond its limit is at the end of it: time 1
        context = Context(self._objective, seen, parsed, step, limit, self._history)
        row = compute_features(context)
        features = named(row)
        risk, benefit = self._router.predict(row)
        now, threshold, escalate, explored, propensity = self._router._choose(benefit, step, self._budget)
        take = None if escalate else parsed[0].action
        decision = Decision(uuid.uuid4().hex, escalate, take, risk, benefit, threshold, features, explored, propensity, now)
        self._decisions.append(decision)
        self._pending = PastStep("", seen, features["entropy"])
        self.calls = Calls(self.calls.slm + 1, self.calls.llm + escalate)
        return decision

    def acted(self, action: str, steps: int = 1) -> str:
        """Report the action that was taken after a decision, whoever chose it; returned as it is.

        ``steps`` of the limit that it cost: more than 1 where waiting for a result that timed out took further ones, as
        in training. The features ``step`` and ``time`` count them.
        """
        if self._pending is None:
            raise BadInput("acted: expected a decision before every action")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise BadInput(f"steps: expected a whole number of at least 1, found {steps!r}")
        self._history.append(PastStep(_text(action, "action"), self._pending.observation, self._pending.entropy))
        self._pending, self._steps = None, self._steps + steps
        return action

    def finished(self, success: bool) -> None:
        """The feedback: the episode is over. Its decisions are appended to the router's log, if it has one."""
        if self._finished:
            raise BadInput("finished: the episode is finished already")
        if not isinstance(success, bool | np.bool_):
            raise BadInput(f"success: expected true or false, found {type(success).__name__}")
        self._finished = True
        if self._router._log is not None and self._decisions:
            entries = [
                FeedbackEntry(
                    request_id=decision.request_id,
                    episode=self.id,
                    step=step,
                    model_version=self._router.model_version,
                    features=decision.features,
                    risk=decision.risk,
                    benefit=decision.benefit,
                    threshold=decision.threshold,
                    escalate=decision.escalate,
                    explored=decision.explored,
                    propensity=decision.propensity,
                    outcome=float(success),
                    timestamp=decision.timestamp,
                )
                for step, decision in enumerate(self._decisions)
            ]
            _append(self._router._log, "".join(f"{entry.model_dump_json()}\n" for entry in entries))


def _append(path: Path, lines: str) -> None:
    """Append in one write, which other appending processes cannot interrupt; OSError if the disk takes only a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = lines.encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if os.write(file, data) != len(data):
            raise OSError(f"{path}: the feedback of an episode was written in part only")
    finally:
        os.close(file)
