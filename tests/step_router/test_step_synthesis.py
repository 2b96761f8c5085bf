"""Teacher episodes under perturbation: the teacher's labels, two views of each state, the same however it is cut up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import Climb, situation, tiny_profile, write_states

from routewright.errors import BadInput
from routewright.language_models.chat import AnswerInvalid, BudgetExceeded
from routewright.step_router import synthesis, taught
from routewright.step_router.dataset import Tasks
from routewright.step_router.environments.protocol import Environment, Observation
from routewright.step_router.perturbations import TABLE, Perturbation, Perturbed
from routewright.step_router.synthesis import State, read_states, shown_move, synthesize, teacher_episode, unique

TASKS = Tasks(Path("unused"), "climb", {"policy": [f"climb {i}" for i in (2, 3, 4)]})
LISTED = State("a", 3, situation(1, done=("wait",)), situation(2), "press red")
WRITTEN = State("ü", 0, situation(1, listed=False), situation(1, listed=False), 'print("ö")\n\u2028x')


@pytest.mark.parametrize("state", [LISTED, WRITTEN])
def test_a_state_survives_json(state: State) -> None:
    line = state.to_json()
    assert "\n" not in line
    again = State.from_json(line)
    assert again == state
    assert len({again, state}) == 1, "hashable as before"


def test_states_are_read_back_in_order(tmp_path: Path) -> None:
    states = [LISTED, WRITTEN, LISTED]
    assert read_states(write_states(states, tmp_path)) == states


@pytest.mark.parametrize(
    "damage", ["{", "[]", "7", "{}", LISTED.to_json()[:-20], LISTED.to_json().replace('"text"', '"tixt"')]
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "states.jsonl").write_text(f"{LISTED.to_json()}\n{damage}\n{LISTED.to_json()}\n")
    with pytest.raises(BadInput, match=r"states\.jsonl, line 2: expected a state as JSON"):
        read_states(tmp_path)


def test_missing_states_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"states\.jsonl: no such file"):
        read_states(tmp_path)


def wandered(states: list[State]) -> int:
    """States whose teacher's action was not the one sent."""
    sent = states[-1].situation.actions
    return sum(state.teacher != action for state, action in zip(states, sent, strict=False))


def test_the_teacher_alone_follows_itself() -> None:
    states = teacher_episode(TASKS, Perturbed(Climb(), ()), "climb 3", 5, 6, random_moves=0.0)
    assert [state.teacher for state in states] == ["up"] * 3
    assert [state.situation.actions for state in states] == [(), ("up",), ("up", "up")]
    assert wandered(states) == 0
    assert all(state.other == state.situation for state in states), "nothing is perturbed"


def test_labels_are_the_teachers_where_a_random_move_was_made() -> None:
    """Each state is reached again from its actions; there the teacher says what the label says."""
    perturbations = tuple(TABLE.values())
    different = moves = 0
    for seed in range(40):
        states = teacher_episode(TASKS, Perturbed(Climb(), perturbations), "climb 2", seed, seed + 100, 1.0)
        moves += wandered(states)
        assert len({len(state.situation.actions) for state in states}) == len(states)
        for state in states:
            assert (state.task, state.seed) == ("climb 2", seed)
            again = Perturbed(Climb(), perturbations)
            shown = again.reset("climb 2", seed)
            for action in state.situation.actions:
                shown = again.step(action).observation
            assert state.situation.observation == shown
            assert state.other.observation == again.shown_under(seed + 100)
            assert state.teacher == shown_move(again.teacher(), shown.admissible)
            assert state.other.actions == state.situation.actions
            one, other = state.situation.observation, state.other.observation
            assert (one.objective, one.step, one.max_steps) == (other.objective, other.step, other.max_steps)
            different += one != other
    assert moves > 5
    assert different > 5


def test_a_move_that_is_not_shown_is_not_cloned() -> None:
    assert shown_move("up", ("look", "up")) == "up"
    assert shown_move("up", None) == "up", "any text is an action"
    assert shown_move("up", ("inventory", "down", "look")) == "look", "a step that only shows the state again"
    assert shown_move("up", ("inventory", "down")) == "inventory"
    assert shown_move("up", ("down",)) is None


def test_states_without_a_right_answer_are_left_out() -> None:
    class Hidden(Climb):
        """Shows no move at its first step."""

        def reset(self, task: str, seed: int) -> Observation:  # type: ignore[override]
            return replace(super().reset(task, seed), admissible=("down",))

    states = teacher_episode(TASKS, Perturbed(Hidden(), ()), "climb 3", 5, 6, random_moves=0.0)  # type: ignore[arg-type]
    assert [state.situation.actions for state in states] == [("up",), ("up", "up")]


def test_some_labels_say_down_after_wandering_too_far() -> None:
    """The label is not simply the most frequent one: above its goal the teacher goes back."""

    class TooHigh(Climb):
        def reset(self, task: str, seed: int) -> object:  # type: ignore[override]
            observation = super().reset(task, seed)
            self.height = self.goal + 2
            return observation

    states = teacher_episode(TASKS, Perturbed(TooHigh(), ()), "climb 2", 0, 1, 0.0)  # type: ignore[arg-type]
    assert [state.teacher for state in states] == ["down", "down"]


def test_unique_keeps_one_state_a_view_and_label_in_order() -> None:
    again = replace(LISTED, seed=9, task="b")
    relabelled = replace(LISTED, teacher="wait")
    kept = list(unique([LISTED, WRITTEN, again, relabelled, WRITTEN]))
    assert [(state.situation, state.teacher) for state in kept] == [
        (state.situation, state.teacher) for state in (LISTED, WRITTEN, relabelled)
    ]


def climbing(tasks: Tasks) -> Environment:
    return Climb()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage plays Climb; its worker processes are forks and see the same."""
    monkeypatch.setattr(synthesis, "read_tasks", lambda dataset: TASKS)
    monkeypatch.setattr(taught, "make_environment", climbing)


def run(out: Path, seed: int, workers: int, **settings: object) -> bytes:
    synthesize(Path("unused"), out, tiny_profile(workers=workers, synthesis={"episodes_per_task": 2} | settings), seed)
    return (out / "states.jsonl").read_bytes()


@pytest.mark.usefixtures("scripted")
def test_the_stage_is_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    first = run(tmp_path / "a", 0, 1)
    assert run(tmp_path / "b", 0, 2) == first
    assert run(tmp_path / "c", 1, 1) != first
    states = read_states(tmp_path / "a")
    assert list(dict.fromkeys(state.task for state in states)) == TASKS.splits["policy"], "in the order of the tasks"
    stats = json.loads((tmp_path / "a" / "stats.json").read_text())
    assert stats == {"states": len(states), "tasks": 3, "episodes": 3 * 2, "teacher": "expert"}
    assert sum(not state.situation.actions for state in states) == 6, "each episode begins once"
    (tmp_path / "a" / "states.jsonl").write_text("kept")
    assert run(tmp_path / "a", 0, 1) == b"kept", "a finished stage is not repeated"


@pytest.mark.usefixtures("scripted")
def test_training_does_not_see_the_unseen_perturbations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Perturbation, ...]] = []

    class Noting(Perturbed):
        def __init__(self, environment: Environment, perturbations: tuple[Perturbation, ...]) -> None:
            super().__init__(environment, perturbations)
            seen.append(self.perturbations)

    monkeypatch.setattr(taught, "Perturbed", Noting)
    settings = tiny_profile().synthesis
    states = synthesis._task_states(TASKS, settings, 0, tmp_path / "spent", "climb 2")
    assert {p.kind for p in seen[0]} == set(TABLE) - set(settings.unseen)
    assert {state.seed for state in states} <= set(range(settings.seeds)), "seeds of the policy split"


@pytest.fixture
def big(chat_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment names a model; it always chooses the first action that is shown."""
    monkeypatch.setenv("ROUTEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ROUTEWRIGHT_LLM_BASE_URL", chat_server.url)
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "big")
    chat_server.answer = lambda request: '{"number": 1}'
    return chat_server


@pytest.mark.usefixtures("scripted")
def test_the_budget_holds_for_all_processes_and_starts_of_a_stage(
    big: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MAX_CALLS", "5")
    for _ in range(2):  # a second start has nothing left
        with pytest.raises(BudgetExceeded, match=r"^the budget of 5 calls to big is used up: ROUTEWRIGHT_LLM_MAX_CALLS"):
            run(tmp_path / "a", 0, 2)
        assert len(big.requests) == 5
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MAX_CALLS", "500")
    run(tmp_path / "a", 0, 2)
    spent = len(big.requests)
    assert spent > 10
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MAX_CALLS", "5")
    with pytest.raises(BudgetExceeded):
        run(tmp_path / "b", 1, 1)
    assert len(big.requests) == spent + 5, "a finished stage does not count against another"


@pytest.mark.usefixtures("scripted")
def test_a_teacher_that_answers_nonsense_is_one_sentence(big: Any, tmp_path: Path) -> None:
    big.answer = lambda request: "no idea"
    with pytest.raises(AnswerInvalid, match=r"^the model big at 127\.0\.0\.1:\d+ answered twice without the JSON object"):
        run(tmp_path / "a", 0, 2)


@pytest.mark.usefixtures("scripted")
def test_what_one_teacher_did_is_not_taken_for_anothers(big: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "a", 0, 1)
    assert json.loads((tmp_path / "a" / "stats.json").read_text())["teacher"] == f"big at {big.url}"
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "bigger")
    with pytest.raises(BadInput, match="a: was made with another teacher: expected another folder"):
        run(tmp_path / "a", 0, 1)
    for name in ("BASE_URL", "MODEL"):
        monkeypatch.delenv(f"ROUTEWRIGHT_LLM_{name}")
    with pytest.raises(BadInput, match="a: was made with another teacher"):
        run(tmp_path / "a", 0, 1)
