from dataclasses import replace

import pytest

from routewright.step_router.environments.protocol import Observation, Outcome
from routewright.step_router.perturbations import TABLE
from routewright.step_router.situations import Situation
from routewright.step_router.taught import LlmTaught


class Corridor:
    """Walk east three times."""

    def reset(self, task: str, seed: int) -> Observation:
        self.seen = Observation("Reach the end.", "At 0.", "nothing", ("east", "wait"), 0, 5)
        return self.seen

    def step(self, action: str | None) -> Outcome:
        step = self.seen.step + 1
        self.seen = replace(self.seen, text=f"At {step}.", step=step)
        return Outcome(self.seen, False, step >= 5)

    def teacher(self) -> str:
        return "east"

    def close(self) -> None:
        pass


class Listener:
    """Records what an LLM would be told."""

    def __init__(self) -> None:
        self.told: list[Situation] = []

    def action(self, situation: Situation) -> str:
        self.told.append(situation)
        return "wait"


def test_the_llm_sees_what_is_shown_and_what_was_sent():
    listener = Listener()
    environment = LlmTaught(Corridor(), (replace(TABLE["missing"], rate=1.0),), listener)
    shown = environment.reset("corridor", 1)
    assert environment.teacher() == "wait"
    assert listener.told[-1] == Situation(shown, ())
    assert "At 0" not in shown.text
    later = environment.step("east").observation
    environment.teacher()
    assert listener.told[-1] == Situation(later, ("east",))


def test_no_episode_no_teacher():
    with pytest.raises(ValueError, match="reset first"):
        LlmTaught(Corridor(), (), Listener()).teacher()
