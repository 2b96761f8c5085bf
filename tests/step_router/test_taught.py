import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_policy import tiny_profile

from routewright.language_models.chat import BudgetExceeded
from routewright.step_router import escalation, rollouts, taught
from routewright.step_router.dataset import Tasks, fetch_tasks, read_tasks
from routewright.step_router.environments.protocol import Observation, Outcome
from routewright.step_router.episodes import Rule, play
from routewright.step_router.escalation import ALWAYS
from routewright.step_router.features import Candidate
from routewright.step_router.perturbations import TABLE
from routewright.step_router.rollouts import player, spent_folder
from routewright.step_router.situations import Situation
from routewright.step_router.taught import LlmTaught, taught_environment


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


@pytest.fixture
def big(chat_server, tmp_path, monkeypatch):
    monkeypatch.setenv("ROUTEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ROUTEWRIGHT_LLM_BASE_URL", chat_server.url)
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "big")
    return chat_server


@pytest.mark.parametrize(
    ("environment", "says"),
    [("code", ["Python source code", "whole"]), ("shell", ["command line", "/bin/sh", "submit"])],
)
def test_the_llm_is_told_what_an_action_is(big, tmp_path, environment, says):
    source = environment
    if environment == "code":
        rows = [{"id": f"p{i}", "prompt": "Say 1.", "answer": "x = 1", "tests": "assert x == 1"} for i in range(6)]
        source = str(tmp_path / "mine.jsonl")
        Path(source).write_text("".join(json.dumps(row) + "\n" for row in rows))
    fetch_tasks(source, tmp_path / "data", tiny_profile())
    tasks = read_tasks(tmp_path / "data")
    perturbed = taught_environment(tasks, (), tmp_path / "spent")
    big.answer = lambda request: '{"action": "x = 1"}'
    perturbed.reset(tasks.splits["policy"][0], 0)
    assert perturbed.teacher() == "x = 1"
    perturbed.close()
    told = big.requests[0]["messages"][0]["content"]
    assert all(word in told for word in says), told


class Fixed:
    """Proposes to wait."""

    def propose(self, situations):
        return [[Candidate("wait", [-0.1], 0.5)] for _ in situations]


class Teachable(Corridor):
    """A corridor whose teacher says what it is made to say."""

    def __init__(self, says: str) -> None:
        self.says = says

    def teacher(self) -> str:
        return self.says


def test_episodes_of_another_teacher_are_played_again(big, tmp_path, monkeypatch):
    rule = Rule("llm", escalation.time, ALWAYS, keep=True)

    def actions(says):
        (episode,) = play(lambda: (Fixed(), Teachable(says)), [rule], ["corridor"], [0], tmp_path / "kept", 1, "episodes")
        return {turn.action for turn in episode.turns}

    assert actions("east") == {"east"}
    assert actions("wait") == {"east"}, "kept"
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "bigger")
    assert actions("wait") == {"wait"}
    for name in ("BASE_URL", "MODEL"):
        monkeypatch.delenv(f"ROUTEWRIGHT_LLM_{name}")
    assert actions("east") == {"east"}


def test_all_plays_of_a_stage_count_in_one_place(tmp_path):
    folder = tmp_path / "checkpoints"
    assert spent_folder(folder / "proposals") == spent_folder(folder / "no-jsd" / "proposals")
    assert spent_folder(folder / "proposals").parent == folder


def test_players_of_a_stage_share_its_budget(big, tmp_path, monkeypatch):
    for name in ("load_policy", "load_verifier"):
        monkeypatch.setattr(rollouts, name, lambda folder: None)
    monkeypatch.setattr(rollouts, "read_tasks", lambda dataset: Tasks(dataset, "corridor", {}))
    monkeypatch.setattr(taught, "make_environment", lambda tasks: Corridor())
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MAX_CALLS", "1")
    big.answer = lambda request: '{"number": 1}'
    checkpoints = tmp_path / "checkpoints"
    for seed, memory in enumerate((checkpoints / "proposals", checkpoints / "no-jsd" / "proposals")):
        _, environment = player(tmp_path, tmp_path, tmp_path, 3, memory)()
        environment.reset(f"corridor {seed}", 0)
        environment.environment.seen = replace(environment.environment.seen, objective=f"Reach end {seed}.")
        environment.step("wait")
        if seed == 0:
            assert environment.teacher() == "east"
        else:
            with pytest.raises(BudgetExceeded, match="the budget of 1 calls to big is used up"):
                environment.teacher()
    assert len(big.requests) == 1
