"""Games are the same everywhere, the expert wins and replans, wrong moves can be final."""

from __future__ import annotations

import builtins
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_games import BRIEF, COOKING, QUEST

from routewright.errors import BadInput
from routewright.step_router.environments.protocol import Outcome
from routewright.step_router.environments.textworld_env import (
    SPLITS,
    GameSpec,
    TextWorldEnvironment,
    game_specs,
    make_game,
    step_limit,
)


def follow_teacher(environment: TextWorldEnvironment) -> Outcome:
    while True:
        outcome = environment.step(environment.teacher())
        if outcome.done:
            return outcome


@pytest.mark.parametrize("task", [QUEST, BRIEF, COOKING])
def test_the_teacher_wins_within_the_limit(textworld_env: TextWorldEnvironment, task: str) -> None:
    start = textworld_env.reset(task, 0)
    assert textworld_env.teacher() in (start.admissible or ())
    outcome = follow_teacher(textworld_env)
    assert outcome.success
    assert step_limit(outcome.observation.step) == start.max_steps


@pytest.mark.parametrize("task", [QUEST, BRIEF])
def test_the_teacher_replans_after_wrong_moves(textworld_env: TextWorldEnvironment, task: str) -> None:
    wins = 0
    for seed in range(4):
        rng = random.Random(seed)
        start = textworld_env.reset(task, seed)
        assert start.admissible
        wrong = next(a for a in rng.sample(start.admissible, len(start.admissible)) if a != textworld_env.teacher())
        textworld_env.step(wrong)
        wins += follow_teacher(textworld_env).success
    assert wins == 4


def test_cooking_has_moves_that_are_final(textworld_env: TextWorldEnvironment) -> None:
    textworld_env.reset(COOKING, 0)
    while not (move := textworld_env.teacher()).startswith("cook "):
        assert not textworld_env.step(move).done
    wrong = move.replace("oven", "stove") if "oven" in move else move.replace("stove", "oven")
    assert wrong != move
    outcome = textworld_env.step(wrong)
    assert outcome.done
    assert not outcome.success
    assert textworld_env.teacher() == "look"
    with pytest.raises(ValueError, match="over"):
        textworld_env.step("look")


def test_the_recipe_is_told(textworld_env: TextWorldEnvironment) -> None:
    assert "Directions:" in textworld_env.reset(COOKING, 0).objective


def test_same_task_seed_and_actions_same_observations(games: Path) -> None:
    def play() -> list[object]:
        environment = TextWorldEnvironment(games)
        observation = environment.reset(QUEST, 5)
        seen: list[object] = [observation]
        rng = random.Random(0)
        for _ in range(5):
            outcome = environment.step(rng.choice(observation.admissible or ("look",)))
            observation = outcome.observation
            seen.append(outcome)
            if outcome.done:
                break
        return seen

    assert play() == play()


def test_the_seed_orders_the_actions(textworld_env: TextWorldEnvironment) -> None:
    first, second = (textworld_env.reset(QUEST, seed).admissible or () for seed in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


def test_states_do_not_depend_on_the_way_they_are_reached(games: Path) -> None:
    """Memoised states equal those of a fresh environment, also after jumping between histories."""
    jumping, moves = TextWorldEnvironment(games), []
    jumping.reset(BRIEF, 0)
    for _ in range(4):
        moves.append(jumping.teacher())
        jumping.step(moves[-1])
    for length in (4, 2, 3):
        jumping.reset(BRIEF, 0)
        fresh = TextWorldEnvironment(games)
        fresh.reset(BRIEF, 0)
        for move in moves[:length]:
            a, b = jumping.step(move), fresh.step(move)
        assert a == b
        assert jumping.executed == fresh.executed == tuple(moves[:length])


def test_useless_steps_are_spent(textworld_env: TextWorldEnvironment) -> None:
    start = textworld_env.reset(QUEST, 0)
    for action in ("fly to the moon", "look", None):
        outcome = textworld_env.step(action)
        assert textworld_env.executed == ()
    assert outcome.observation.step == 3
    assert sorted(outcome.observation.admissible or ()) == sorted(start.admissible or ())
    for _ in range(start.max_steps - 3):
        outcome = textworld_env.step("look")
    assert outcome.done
    assert not outcome.success


def test_closed_containers_keep_their_secrets(textworld_env: TextWorldEnvironment) -> None:
    textworld_env.reset(BRIEF, 0)
    for move in ("go east", "go north"):
        before = textworld_env.step(move).observation.text
    after = textworld_env.step("open box").observation.text
    assert "type 7 key" not in before
    assert "box (with type 7 key)" in after


def test_games_are_cached(games: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GameSpec.parse(QUEST)
    path = make_game(spec, games)
    monkeypatch.setattr("routewright.step_router.environments.textworld_env._generate", lambda *a: pytest.fail("made again"))
    assert make_game(spec, games) == path
    assert [name for name in os.listdir(path.parent) if not name.endswith(".json")] == []


def test_another_version_of_textworld_makes_its_own_games(games: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = GameSpec.parse(QUEST)
    before = make_game(spec, games).read_bytes()
    monkeypatch.setattr("textworld.__version__", "99.0")
    monkeypatch.setattr("routewright.step_router.environments.textworld_env._generate", lambda *a: pytest.fail("made again"))
    with pytest.raises(pytest.fail.Exception, match="made again"):
        make_game(spec, games)
    laid_out = games / "dataset"  # a run's own games are played as they are
    laid_out.mkdir()
    (laid_out / f"{QUEST}.json").write_bytes(before)
    assert TextWorldEnvironment(laid_out).reset(QUEST, 0).admissible


@pytest.mark.parametrize("task", [QUEST, COOKING])
def test_another_process_makes_the_same_game(games: Path, tmp_path: Path, task: str) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from routewright.step_router.environments.textworld_env import GameSpec, make_game\n"
        "make_game(GameSpec.parse(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, task, str(tmp_path)], check=True, env=environment)
    (other,) = tmp_path.rglob(f"{task}.json")
    assert make_game(GameSpec.parse(task), games).read_bytes() == other.read_bytes()
    seen = []
    for folder in (games, tmp_path):
        environment_ = TextWorldEnvironment(folder)
        seen.append([environment_.reset(task, 0), follow_teacher(environment_)])
    assert seen[0] == seen[1]


def test_splits_share_no_game() -> None:
    specs = {split: game_specs(split, 50) for split in SPLITS}
    tasks = [spec.task for split in SPLITS for spec in specs[split]]
    assert len({GameSpec.parse(task).seed for task in tasks}) == 200
    assert {spec.kind for spec in specs["test"]} == {"quest", "cooking"}
    assert all(GameSpec.parse(task).task == task for task in tasks)
    assert game_specs("test", 50)[:10] == game_specs("test", 10)
    with pytest.raises(BadInput, match="split"):
        game_specs("validation", 3)


@pytest.mark.parametrize("task", ["chess", "quest-1-r9-n4-detailed", "cooking-1-r6-n9-brief", "quest-1-r4-n4", "../x"])
def test_unknown_tasks_are_bad_input(textworld_env: TextWorldEnvironment, task: str) -> None:
    with pytest.raises(BadInput, match="expected"):
        textworld_env.reset(task, 0)


def test_a_broken_game_file_is_bad_input(tmp_path: Path) -> None:
    pytest.importorskip("textworld")
    (tmp_path / f"{QUEST}.json").write_text('{"half": ')
    with pytest.raises(BadInput, match=r"quest-1.*delete the file"):
        TextWorldEnvironment(tmp_path).reset(QUEST, 0)


def test_without_the_extra_one_sentence_tells_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "textworld":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(BadInput, match=r"pip install 'routewright\[textworld\]'"):
        TextWorldEnvironment(tmp_path)
