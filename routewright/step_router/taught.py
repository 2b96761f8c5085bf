"""The environment of a stage: perturbed, and taught by its own expert or by an LLM behind a URL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from routewright.language_models.backbone import cache_folder
from routewright.language_models.chat import chat_client_from_environment
from routewright.step_router.dataset import Tasks, make_environment
from routewright.step_router.environments.protocol import Environment, Observation, Outcome
from routewright.step_router.environments.shell_env import SUBMIT
from routewright.step_router.llm import LlmTeacher
from routewright.step_router.perturbations import Perturbation, Perturbed
from routewright.step_router.situations import Situation

SPENT = "llm-spent"  # the folder where the clients of a stage count, beside what it keeps for resuming
# What an action is where any text is one.
RULES = {
    "code": (
        "An action is Python source code and nothing else, no prose and no code fences: the whole function asked for, from "
        "its def on, with the imports it needs. The tests run on each action alone; where they failed, answer with all of "
        "the code again, repaired."
    ),
    "shell": (
        "An action is one command line for /bin/sh and nothing else, no prose, prompt or code fences. It runs without a "
        "terminal, each in a shell of its own that starts in the working folder: files stay, variables and cd do not. When "
        f"all is done, the action is the word {SUBMIT} alone."
    ),
}


class LlmTaught(Perturbed):
    """A perturbed environment whose teacher is an LLM, which sees what is shown and not the true state."""

    def __init__(
        self, environment: Environment, perturbations: Sequence[Perturbation], teacher: LlmTeacher
    ) -> None:
        super().__init__(environment, perturbations)
        self._llm = teacher
        self._situation: Situation | None = None

    def reset(self, task: str, seed: int) -> Observation:
        shown = super().reset(task, seed)
        self._situation = Situation(shown)
        return shown

    def step(self, action: str | None) -> Outcome:
        outcome = super().step(action)
        assert self._situation is not None
        self._situation = Situation(outcome.observation, (*self._situation.actions, action or ""))
        return outcome

    def teacher(self) -> str:
        if self._situation is None:
            raise ValueError("no episode has begun, reset first")
        return self._llm.action(self._situation)


def taught_environment(tasks: Tasks, perturbations: Sequence[Perturbation], spent: Path | None = None) -> Perturbed:
    """The environment of these tasks. With ``ROUTEWRIGHT_LLM_BASE_URL`` set, that LLM is the teacher.

    ``spent``: the folder in which a stage counts its calls and tokens (see `ChatClient`).
    """
    environment = make_environment(tasks)
    client = chat_client_from_environment(cache_folder() / "step-router-teacher", spent)
    if client is None:
        return Perturbed(environment, perturbations)
    return LlmTaught(environment, perturbations, LlmTeacher(client, RULES.get(tasks.environment, "")))
