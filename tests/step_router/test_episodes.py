"""Episodes: computed by hand, shared among rules, the same however they are cut up, and resumed."""

from __future__ import annotations

import json
import os
import random
import re
import signal as signals
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from routewright.errors import BadInput, StageFailed
from routewright.language_models.chat import AnswerInvalid
from routewright.step_router import episodes as module
from routewright.step_router import escalation
from routewright.step_router.environments.protocol import Environment, Observation, Outcome
from routewright.step_router.environments.textworld_env import GameSpec, TextWorldEnvironment
from routewright.step_router.episodes import Episode, Rule, Turn, play, read_episodes, write_episodes
from routewright.step_router.escalation import ALWAYS, NEVER, Coin, Decision, QueryLevel, Risk
from routewright.step_router.features import NAMES, Candidate, Context, PastStep, compute_features
from routewright.step_router.perturbations import Perturbation, Perturbed, active
from routewright.step_router.risk import RiskModel
from routewright.step_router.situations import Proposer, Situation

SLM, LLM = Rule("slm", escalation.time, NEVER, keep=True), Rule("llm", escalation.time, ALWAYS, keep=True)
LATE = Rule("time", escalation.time, 1.5, keep=True)
TASKS = [f"reach {goal}" for goal in (2, 3, 4)]


class Lane:
    """From 0 to the task's number within 5 steps, a step up or down each; the teacher says up."""

    def reset(self, task: str, seed: int) -> Observation:
        if task == "killed":
            os.kill(os.getpid(), signals.SIGKILL)
        if task.startswith("stuck "):
            Path(task.removeprefix("stuck ")).touch()
            time.sleep(600)
        self.task, self.seed, self.value, self.steps = task, seed, 0, 0
        return self._observe()

    def step(self, action: str | None) -> Outcome:
        self.steps += 1
        self.value += {"up": 1, "down": -1}.get(action or "", 0)
        won = self.value == int(self.task.split()[1])
        return Outcome(self._observe(), won, won or self.steps == 5)

    def teacher(self) -> str:
        if self.task == "nonsense 1":
            raise AnswerInvalid("the teacher answered nonsense", 3, 0.1)
        return "up"

    def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        return Observation(self.task, f"You are at {self.value} in lane {self.seed}.", "", None, self.steps, 5)


class Hesitant:
    """Goes up, but waits where it sees that its position equals the lane's number modulo 3."""

    def __init__(self) -> None:
        self.batches: list[list[Situation]] = []

    def propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        self.batches.append(list(situations))
        return [self._candidates(situation) for situation in situations]

    def _candidates(self, situation: Situation) -> list[Candidate]:
        rng = random.Random(repr(situation))
        seen = [int(number) for number in re.findall(r"-?\d+", situation.observation.text)]
        actions = ("wait", "up") if seen and seen[0] == seen[1] % 3 else ("up", "down")
        return [Candidate(action, [-rng.random()], rng.random()) for action in actions]


def lanes(perturbations: Sequence[Perturbation] = ()) -> tuple[Proposer, Environment]:
    return Hesitant(), Perturbed(Lane(), perturbations)


class Guessing:
    """Takes any admissible action."""

    def propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        answers = []
        for situation in situations:
            rng = random.Random(repr(situation))
            chosen = [rng.choice(situation.observation.admissible or ("look",)) for _ in range(3)]
            answers.append([Candidate(action, [-rng.random()], rng.random()) for action in chosen])
        return answers


def alone(proposer: Proposer, environment: Environment, rule: Rule, task: str, seed: int, kind: str) -> Episode:
    """The plain loop that `play` must agree with."""
    observation, actions, history, turns, first = environment.reset(task, seed), [], [], [], None
    while True:
        struck = environment.struck if isinstance(environment, Perturbed) else ()
        candidates = proposer.propose([Situation(observation, tuple(actions))])[0]
        context = Context(
            observation.objective, observation.text, candidates, observation.step, observation.max_steps, tuple(history)
        )
        features = compute_features(context)
        first = features if first is None else first
        call = rule.signal(Decision(task, seed, context, features, first)) > rule.threshold
        action = environment.teacher() if call else candidates[0].action
        turns.append(Turn(action, "llm" if call else "slm", tuple(features.tolist()), struck))
        history.append(PastStep(action, observation.text, features[NAMES.index("entropy")]))
        actions.append(action)
        outcome = environment.step(action)
        observation = outcome.observation
        if outcome.done:
            calls = sum(turn.by == "llm" for turn in turns)
            kept = tuple(turns) if rule.keep else ()
            return Episode(rule.row, rule.recorded, task, kind, seed, outcome.success, len(turns), calls, kept)


def many_rules() -> list[Rule]:
    """Every signal at several thresholds."""
    model = RiskModel()
    rows = np.random.default_rng(0).normal(size=(50, len(NAMES)))
    rows[:, NAMES.index("evidence")] = 0.0
    model.standardise(rows)
    risk, query = Risk(model.eval()), QueryLevel(model)
    half = model.risks(rows).mean()
    return [
        SLM, LLM, LATE,
        *(Rule("random", escalation.random, level) for level in (0.3, 0.6)),
        *(Rule("entropy", escalation.entropy, level, keep=True) for level in (0.8, 0.95)),
        Rule("verifier", escalation.verifier, -0.5), Rule("repeat", escalation.repeat, 0.5),
        *(Rule("risk", risk, half + shift, keep=True) for shift in (-0.01, 0.0, 0.01)), Rule("query-level", query, half),
    ]  # fmt: skip


def told(episodes: Iterable[Episode]) -> list[tuple[object, ...]]:
    return [(episode.row, episode.success, episode.steps, episode.llm_calls) for episode in episodes]


def actions(episode: Episode) -> str:
    return " ".join(turn.action if turn.by == "slm" else turn.action.upper() for turn in episode.turns)


def test_episodes_by_hand(tmp_path: Path) -> None:
    """In lane 1 the small model waits at 1 for ever; the others start there."""
    repeat = Rule("repeat", escalation.repeat, 0.5, keep=True)
    played = play(lanes, [SLM, LLM, LATE, repeat], ["reach 3"], [1], tmp_path, 1, "episodes")
    assert [actions(episode) for episode in played] == [
        "up wait wait wait wait", "UP UP UP", "up wait UP UP", "up wait UP UP",
    ]  # fmt: skip
    assert told(played) == [("slm", False, 5, 0), ("llm", True, 3, 3), ("time", True, 4, 2), ("repeat", True, 4, 2)]
    assert [episode.threshold for episode in played] == [None, None, 1.5, 0.5]
    assert {(episode.task, episode.seed, episode.kind) for episode in played} == {("reach 3", 1, "Lane")}
    step, repeats = NAMES.index("step"), NAMES.index("repeats")
    assert [turn.features[step] for turn in played[0].turns] == [0, 1, 2, 3, 4]
    assert [turn.features[repeats] for turn in played[0].turns] == [0, 0, 1, 2, 3]


def test_every_rule_task_and_seed_in_order(tmp_path: Path) -> None:
    played = play(lanes, [SLM, LLM], TASKS, [4, 3], tmp_path, 1, "episodes")
    assert [(episode.task, episode.seed, episode.row) for episode in played] == [
        (task, seed, row) for task in TASKS for seed in (4, 3) for row in ("slm", "llm")
    ]


def test_a_decision_is_proposed_once_whatever_passes_through_it(tmp_path: Path) -> None:
    proposer, environment = Hesitant(), Perturbed(Lane(), ())
    play(lambda: (proposer, environment), [SLM, LLM, LATE], ["reach 3"], [1, 4], tmp_path, 1, "episodes")
    # (), u, uw, uww, uwww of slm, uu of llm, uwu of time: seven decisions in each lane, five batches of both
    asked = [situation for batch in proposer.batches for situation in batch]
    assert len(asked) == len(set(asked)) == 14
    assert [len(batch) for batch in proposer.batches] == [2, 2, 4, 4, 2]


def test_equal_situations_of_several_episodes_are_proposed_once(tmp_path: Path) -> None:
    class Blind(Lane):
        def _observe(self) -> Observation:
            return Observation(self.task, "", "", None, self.steps, 5)

    proposer = Hesitant()
    play(lambda: (proposer, Blind()), [SLM], ["reach 3"], range(40), tmp_path, 1, "episodes")
    assert [len(batch) for batch in proposer.batches[:3]] == [1, 1, 1]  # three steps up, 32 episodes side by side
    assert len(proposer.batches) == 3  # the other eight have nothing new


def test_rules_together_equal_rules_one_by_one_and_the_plain_loop(tmp_path: Path) -> None:
    table = [Perturbation("tool_failure", 0.3, 1.0), Perturbation("stale", 0.3, 1.0), Perturbation("timeout", 0.2, 1.0)]
    make, seeds, rules = partial(lanes, table), range(7), many_rules()
    together = play(make, rules, TASKS, seeds, tmp_path / "together", 1, "episodes")
    apart = []
    for number, rule in enumerate(rules):
        rows = play(make, [rule], TASKS, seeds, tmp_path / str(number), 1, "episodes")
        assert rows == together[number :: len(rules)]
        apart.append(rows)
    proposer, environment = make()
    plain = [alone(proposer, environment, rule, task, seed, "Lane") for task in TASKS for seed in seeds for rule in rules]
    assert together == plain
    assert len({repr(told(rows)) for rows in apart}) > 6  # the rules do differ
    assert {kind for episode in together for turn in episode.turns for kind in turn.struck} >= {"tool_failure", "stale"}


def test_tasks_take_the_seeds_in_turns(tmp_path: Path) -> None:
    """Three tasks, two of five seeds each: 0 1, 2 3, 4 0; more than there are is all of them."""
    tasks = ["reach 1", "reach 2", "reach 3"]
    played = play(lanes, [LLM], tasks, range(5), tmp_path, 1, "episodes", each=2)
    assert [(e.task, e.seed) for e in played] == [
        ("reach 1", 0), ("reach 1", 1), ("reach 2", 2), ("reach 2", 3), ("reach 3", 4), ("reach 3", 0),
    ]  # fmt: skip
    every = play(lanes, [LLM], tasks, range(2), tmp_path / "all", 1, "episodes", each=9)
    assert [e.seed for e in every if e.task == "reach 2"] == [0, 1]


def test_the_same_for_any_workers_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [Perturbation("tool_failure", 0.3, 1.0), Perturbation("missing", 0.3, 0.0)]
    seeds, rules = range(5), many_rules()

    def result(folder: str, workers: int) -> list[Episode]:
        return play(partial(lanes, table), rules, TASKS, seeds, tmp_path / folder, workers, "episodes")

    together = result("together", 1)
    monkeypatch.setattr(module, "TREES", 2)
    monkeypatch.setattr(module, "SEEDS_TOGETHER", 1)
    assert result("small", 1) == together
    assert len(list((tmp_path / "small").iterdir())) == 10
    assert result("processes", 2) == together
    files = [sorted((tmp_path / folder).glob("*.jsonl")) for folder in ("small", "processes")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_a_lost_action_of_the_teacher_is_a_call_all_the_same(tmp_path: Path) -> None:
    table = [Perturbation("tool_failure", 0.5, 1.0)]
    lost = {seed: [bool(active(table, seed, step)) for step in (1, 2, 3, 4, 5)] for seed in range(100)}
    seed = next(seed for seed, failed in lost.items() if failed[:4] == [False, True, False, False])
    hopeless = next(seed for seed, failed in lost.items() if sum(failed) >= 3)
    played = play(partial(lanes, table), [LLM], ["reach 3"], [seed, hopeless], tmp_path, 1, "episodes")
    assert told(played) == [("llm", True, 4, 4), ("llm", False, 5, 5)]
    assert [turn.struck for turn in played[0].turns] == [(), (), ("tool_failure",), ()]


def test_under_a_coin_it_is_told_where_both_would_do_the_same(tmp_path: Path) -> None:
    """`agreed`: the small model's first candidate is the teacher's action, whoever acted; other rules do not ask."""
    coins = [Rule(f"coin-{draw}", Coin(draw), 0.5, keep=True) for draw in range(3)]
    slm = replace(SLM, keep=True)
    played = play(lanes, [*coins, slm, LLM], TASKS, range(3), tmp_path, 1, "episodes")
    proposer, environment = lanes()
    seen = set()
    for episode in played:
        if not episode.row.startswith("coin"):
            assert all(turn.agreed is None for turn in episode.turns)
            continue
        observation, actions = environment.reset(episode.task, episode.seed), ()
        for turn in episode.turns:
            small = proposer.propose([Situation(observation, actions)])[0][0].action
            assert turn.agreed == (small == environment.teacher())
            seen.add((turn.by, turn.agreed))
            observation, actions = environment.step(turn.action).observation, (*actions, turn.action)
    assert seen == {("slm", True), ("slm", False), ("llm", True), ("llm", False)}


def test_a_killed_run_repeats_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TREES", 2)
    proposer, environment = Hesitant(), Perturbed(Lane(), ())
    rules = [SLM, LATE]

    def run() -> list[Episode]:
        proposer.batches.clear()
        return play(lambda: (proposer, environment), rules, TASKS, range(4), tmp_path, 1, "episodes")

    def asked() -> set[tuple[str, str]]:
        found = {situation.observation for batch in proposer.batches for situation in batch}
        return {(shown.objective, shown.text.split()[-1]) for shown in found}

    undisturbed = run()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"{number:04d}.jsonl" for number in range(6)]
    contents = [file.read_bytes() for file in files]
    assert run() == undisturbed
    assert not proposer.batches

    for file in files[::2]:
        file.unlink()
    assert run() == undisturbed
    assert asked() == {(task, lane) for task in TASKS for lane in ("0.", "1.")}  # chunks 0, 2 and 4

    files[1].write_bytes(contents[1][: len(contents[1]) - 40])  # in the middle of the last line
    files[2].write_bytes(b"".join(contents[2].splitlines(keepends=True)[:-1]))  # at the end of a line
    files[5].write_bytes(b"")
    assert run() == undisturbed
    assert asked() == {("reach 2", "2."), ("reach 2", "3."), ("reach 3", "0."), ("reach 3", "1."), ("reach 4", "2."),
                       ("reach 4", "3.")}  # fmt: skip
    assert [file.read_bytes() for file in files] == contents


@pytest.mark.parametrize(
    ("rules", "tasks", "seeds"),
    [
        ([SLM, Rule("time", escalation.time, 2.5, keep=True)], TASKS, [0, 1]),
        ([SLM, Rule("later", escalation.time, 1.5, keep=True)], TASKS, [0, 1]),
        ([SLM, Rule("time", escalation.time, 1.5)], TASKS, [0, 1]),
        ([SLM, LATE], TASKS[::-1], [0, 1]),
        ([SLM, LATE], TASKS, [0, 2]),
    ],
)
def test_chunks_of_other_settings_are_not_taken(
    tmp_path: Path, rules: list[Rule], tasks: list[str], seeds: list[int]
) -> None:
    play(lanes, [SLM, LATE], TASKS, [0, 1], tmp_path / "kept", 1, "episodes")
    again = play(lanes, rules, tasks, seeds, tmp_path / "kept", 1, "episodes")
    assert again == play(lanes, rules, tasks, seeds, tmp_path / "fresh", 1, "episodes")


def test_ambiguous_rules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each row and threshold once"):
        play(lanes, [SLM, Rule("slm", escalation.time, ALWAYS)], TASKS, [0], tmp_path, 1, "episodes")
    with pytest.raises(ValueError, match="not a number"):
        Rule("risk", escalation.time, float("nan"))


def nothing(decision: Decision) -> float:
    return float("nan")


def test_a_signal_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"signal .*nothing.*: not a number"):
        play(lanes, [Rule("nothing", nothing, 0.5)], TASKS, [0], tmp_path, 1, "episodes")


def test_a_dead_process_is_told(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="a process that plays episodes died"):
        play(lanes, [SLM], ["killed"], [0], tmp_path, 2, "episodes")


def test_a_failure_in_a_process_is_passed_on_and_finished_chunks_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TREES", 1)
    with pytest.raises(StageFailed, match=r"^the teacher answered nonsense$"):
        play(lanes, [LLM], ["reach 2", "nonsense 1"], [0], tmp_path, 2, "episodes")
    assert [episode.task for episode in play(lanes, [LLM], ["reach 2"], [0], tmp_path, 1, "episodes")] == ["reach 2"]


def test_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom test_episodes import SLM, lanes, play\n"
        f"play(lanes, [SLM], ['stuck {begun}'], [0], Path({str(tmp_path)!r}), 2, 'episodes')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not begun.exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.communicate(timeout=120)  # until all that write to the pipe have ended; the worker sleeps far longer


def test_text_games(tmp_path: Path) -> None:
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    games = [GameSpec("quest", 1, 3, 3).task, GameSpec("cooking", 3, 6, 1).task]
    rules = [SLM, LLM, LATE, Rule("random", escalation.random, 0.5, keep=True)]
    environment = TextWorldEnvironment(tmp_path / "games")
    played = play(lambda: (Guessing(), Perturbed(environment)), rules, games, [0, 1, 2], tmp_path, 1, "episodes")
    kinds = dict(zip(games, ("quest", "cooking"), strict=True))
    assert played == [
        alone(Guessing(), Perturbed(environment), rule, task, seed, kinds[task])
        for task in games for seed in (0, 1, 2) for rule in rules
    ]  # fmt: skip
    assert len({actions(episode) for episode in played}) > 12
    undisturbed = play(lambda: (Guessing(), environment), [LLM], games, [0], tmp_path / "plain", 1, "episodes")
    assert [episode.success for episode in undisturbed] == [True, True]


def test_a_log_is_read_back(tmp_path: Path) -> None:
    played = play(lanes, many_rules(), TASKS, [0], tmp_path / "chunks", 1, "episodes")
    write_episodes(tmp_path / "episodes.jsonl", played)
    assert read_episodes(tmp_path / "episodes.jsonl") == played


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    log = tmp_path / "episodes.jsonl"
    write_episodes(log, play(lanes, [SLM, LLM], ["reach 3"], [1], tmp_path / "chunks", 1, "episodes"))
    whole = log.read_bytes()
    first, second = whole.splitlines()
    log.write_bytes(whole[:-30])
    with pytest.raises(BadInput, match=r"episodes\.jsonl, line 2: expected an episode as JSON, the line is cut off"):
        read_episodes(log)

    def damaged(**change: object) -> None:
        log.write_bytes(first + b"\n" + json.dumps({**json.loads(second), **change}).encode() + b"\n")

    damaged(success="yes")
    with pytest.raises(BadInput, match=r"line 2: success: expected a valid boolean"):
        read_episodes(log)
    damaged(turns=[{"action": "up", "by": "slm", "features": [0.0] * 14, "struck": []}])
    with pytest.raises(BadInput, match=r"line 2: turns\.0\.features: .*15 items"):
        read_episodes(log)
    damaged(turns=[{"action": "up", "by": "slm", "features": [float("nan")] * 15, "struck": []}])
    with pytest.raises(BadInput, match=r"line 2: turns\.0\.features\.0: expected a finite number"):
        read_episodes(log)
    with pytest.raises(BadInput, match=r"none\.jsonl: the file cannot be read"):
        read_episodes(tmp_path / "none.jsonl")
