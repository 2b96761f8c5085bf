"""Re-executed episodes: each decision is the small model's or, where its rule says so, the teacher's.

An escalated step is carried out with the teacher's action from the true state; nothing is assumed to succeed. All rules
play the same (task, seed) pairs and mostly walk the same way, so a decision, named by (task, seed, actions so far), is
proposed, described and carried out once for all of them, and the proposals that are due in many episodes are one batch.

Environments only know reset and step, so another branch is reached by replaying its actions. Text games and programs
remember what they did and replay in microseconds; a shell runs the commands of a branch anew, which is slow but correct.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from routewright.errors import BadInput, StageFailed
from routewright.language_models.chat import named_model
from routewright.pools.pool import numbered_lines
from routewright.step_router.environments.code_env import CodeEnvironment
from routewright.step_router.environments.protocol import Environment, Observation, Outcome
from routewright.step_router.environments.shell_env import ShellEnvironment
from routewright.step_router.environments.textworld_env import GameSpec, TextWorldEnvironment
from routewright.step_router.escalation import ALWAYS, ENTROPY, Coin, Decision, Signal
from routewright.step_router.features import NAMES, Candidate, Context, PastStep, compute_features
from routewright.step_router.perturbations import Perturbed
from routewright.step_router.situations import Proposer, Situation

TREES = 32  # (task, seed) pairs played side by side, and kept together in one file
SEEDS_TOGETHER = 4  # of one task: they share the game's states
PROPOSALS_KEPT = 10_000  # a process

Finite = Annotated[float, Field(allow_inf_nan=False)]
Row = Annotated[tuple[Finite, ...], Field(min_length=len(NAMES), max_length=len(NAMES))]


@dataclass(frozen=True)
class Turn:
    """One decision: the action, who chose it, the features (15, in the order of NAMES), and what struck, for tables only.

    ``agreed``: under a coin, whether the small model and the LLM would have taken the same action; None elsewhere.
    """

    action: str
    by: Literal["slm", "llm"]
    features: Row
    struck: tuple[str, ...]
    agreed: bool | None = None


@dataclass(frozen=True)
class Episode:
    """One episode under one rule.

    ``threshold`` is None for the rows that have none (never or always). ``kind``: quest, cooking, code or shell; ``seed``
    the perturbation seed. ``steps`` counts decisions, ``llm_calls`` those that went to the LLM, even where a tool failure
    lost its action. ``turns`` is empty unless the rule keeps them.
    """

    row: str
    threshold: Finite | None
    task: str
    kind: str
    seed: int
    success: bool
    steps: int
    llm_calls: int
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Escalate iff signal(decision) > threshold; ``NEVER`` and ``ALWAYS`` do not ask the signal."""

    row: str
    signal: Signal
    threshold: float
    keep: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.threshold):  # which would silently never escalate
            raise ValueError(f"rule {self.row}: the threshold is not a number")

    @property
    def recorded(self) -> float | None:
        """The threshold as an `Episode` has it."""
        return self.threshold if math.isfinite(self.threshold) else None


Make = Callable[[], tuple[Proposer, Environment]]
_EPISODE = TypeAdapter(Episode)


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    """Write episodes as JSONL, one a line, atomically."""
    _write(path, (_EPISODE.dump_json(episode) for episode in episodes))


def read_episodes(path: Path) -> list[Episode]:
    """All episodes of a log (.jsonl or .jsonl.gz), in file order; BadInput names file, line and field of a broken line."""
    episodes = []
    for number, line in numbered_lines(path):
        try:
            episodes.append(_EPISODE.validate_json(line, strict=True))
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            if fault["type"] == "json_invalid":
                told = "expected an episode as JSON, the line is cut off or damaged"
                raise BadInput(f"{path}, line {number}: {told}") from None
            name = ".".join(str(part) for part in fault["loc"])
            reason = fault["msg"].replace("Input should be", "expected")
            raise BadInput(f"{path}, line {number}: {name + ': ' if name else ''}{reason}") from None
    return episodes


def play(
    make: Make,
    rules: Sequence[Rule],
    tasks: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    workers: int,
    title: str,
    each: int | None = None,
) -> list[Episode]:
    """One episode for every task, seed and rule, in this order (rules vary fastest).

    With ``each``, a task plays so many of the seeds only, the next task the following ones, round and round: more seeds at
    the same cost.

    ``make`` is picklable and called once a process; with ``workers`` = 1 that is this one. The environment is normally a
    `Perturbed`. The result depends neither on ``workers`` nor on what is played side by side, but for a model's rounding:
    log-probabilities and scores have four digits, and where one lies between two, another batch may tip it.

    Finished chunks of episodes are kept in ``out`` (0000.jsonl ...), and a run that was killed repeats only the others.
    They are known by rows, thresholds, tasks, seeds and the LLM that teaches; for another policy, verifier or environment
    use another ``out``.
    StageFailed where a process dies; BadInput and StageFailed of the proposer and the environment are passed on.
    """
    if len({(rule.row, rule.recorded) for rule in rules}) < len(rules):
        raise ValueError("rules: expected each row and threshold once; NEVER and ALWAYS of one row read the same in a log")
    out.mkdir(parents=True, exist_ok=True)
    pairs = {task: _rotated(seeds, number, each) for number, task in enumerate(tasks)}
    teacher = named_model()
    chunks = [_Chunk(out / f"{number:04d}.jsonl", trees, teacher) for number, trees in enumerate(_blocks(pairs))]
    finished = {chunk.path: episodes for chunk in chunks if (episodes := _read_chunk(chunk, rules)) is not None}
    due = [chunk for chunk in chunks if chunk.path not in finished]
    progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress:
        known = sum(len(episodes) for episodes in finished.values())
        bar = progress.add_task(title, total=sum(map(len, pairs.values())) * len(rules), completed=known)
        for chunk in _here(make, rules, due) if workers == 1 else _in_processes(make, rules, due, workers):
            progress.advance(bar, len(chunk.trees) * len(rules))
    played: dict[tuple[str, int], list[Episode]] = {}
    for chunk in chunks:
        episodes = finished.get(chunk.path) or _read_chunk(chunk, rules)
        if episodes is None:
            raise StageFailed(f"{chunk.path}: was changed or removed while episodes were played")
        for number, tree in enumerate(chunk.trees):
            played[tree] = episodes[number * len(rules) : (number + 1) * len(rules)]
    return [episode for task in tasks for seed in pairs[task] for episode in played[task, seed]]


@dataclass(frozen=True)
class _Chunk:
    path: Path
    trees: tuple[tuple[str, int], ...]
    teacher: str | None

    def header(self, rules: Sequence[Rule]) -> bytes:
        """The first line of the chunk's file: a digest of what it holds."""
        settings = [[[rule.row, rule.threshold, rule.keep] for rule in rules], self.trees]
        if self.teacher is not None:
            settings.append(self.teacher)
        return json.dumps({"digest": hashlib.sha256(json.dumps(settings).encode()).hexdigest()}).encode()


def _rotated(seeds: Sequence[int], number: int, each: int | None) -> list[int]:
    """The seeds of the task with this number."""
    count = len(seeds) if each is None else min(each, len(seeds))
    return [seeds[(number * count + i) % len(seeds)] for i in range(count)]


def _blocks(pairs: dict[str, list[int]]) -> Iterator[tuple[tuple[str, int], ...]]:
    tasks, most = list(pairs), max(map(len, pairs.values()), default=0)
    together = max(1, min(SEEDS_TOGETHER, most, TREES))
    size = TREES // together
    for first in range(0, len(tasks), size):
        for second in range(0, most, together):
            yield tuple((task, seed) for task in tasks[first : first + size] for seed in pairs[task][second:][:together])


def _write(path: Path, lines: Iterable[bytes]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
    os.replace(partial, path)


def _read_chunk(chunk: _Chunk, rules: Sequence[Rule]) -> list[Episode] | None:
    """The chunk's episodes; None where they are absent, incomplete or of other settings, and are to be played again."""
    if not chunk.path.is_file():
        return None
    header, *lines = chunk.path.read_bytes().splitlines() or [b""]
    if header != chunk.header(rules) or len(lines) != len(chunk.trees) * len(rules):
        return None
    try:
        return [_EPISODE.validate_json(line, strict=True) for line in lines]
    except ValidationError:
        return None


def _here(make: Make, rules: Sequence[Rule], chunks: Sequence[_Chunk]) -> Iterator[_Chunk]:
    if chunks:
        player = _Player(*make(), rules)
        for chunk in chunks:
            player.play_chunk(chunk)
            yield chunk


def _in_processes(make: Make, rules: Sequence[Rule], chunks: Sequence[_Chunk], workers: int) -> Iterator[_Chunk]:
    if not chunks:
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would copy a parent with threads
    pool = ProcessPoolExecutor(min(workers, len(chunks)), spawn, _start, (make, rules))
    try:
        futures = {pool.submit(_work, chunk): chunk for chunk in chunks}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    except BrokenProcessPool:
        raise StageFailed(
            "a process that plays episodes died (killed, or out of memory): start again to go on, with fewer workers if "
            "memory is short"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_begin: tuple[Make, Sequence[Rule]] | None = None  # of this worker process
_player: _Player | None = None


def _start(make: Make, rules: Sequence[Rule]) -> None:
    global _begin
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _begin = make, rules


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # a killed parent leaves its workers waiting for ever
    os._exit(1)


def _work(chunk: _Chunk) -> None:
    global _player
    assert _begin is not None
    try:
        if _player is None:
            make, rules = _begin
            _player = _Player(*make(), rules)
        _player.play_chunk(chunk)
    except StageFailed as error:
        raise StageFailed(str(error)) from None  # some of its kinds do not survive the way to another process


@dataclass
class _Run:
    """One rule on its way through one (task, seed)."""

    rule: Rule
    steps: int = 0
    llm_calls: int = 0
    success: bool = False
    turns: list[Turn] = field(default_factory=list)


@dataclass
class _Node:
    """A decision that is due, and the runs that have come to it."""

    task: str
    seed: int
    actions: tuple[str, ...]
    observation: Observation
    struck: tuple[str, ...]
    history: tuple[PastStep, ...]
    first: np.ndarray | None
    runs: list[_Run]

    def decision(self, candidates: Sequence[Candidate]) -> Decision:
        shown = self.observation
        context = Context(shown.objective, shown.text, candidates, shown.step, shown.max_steps, self.history)
        features = compute_features(context)
        return Decision(self.task, self.seed, context, features, features if self.first is None else self.first)


class _Player:
    """Plays chunks in one process."""

    def __init__(self, proposer: Proposer, environment: Environment, rules: Sequence[Rule]) -> None:
        self.proposer, self.environment, self.rules = proposer, environment, rules
        self._proposals: OrderedDict[Situation, list[Candidate]] = OrderedDict()
        self._place: tuple[str, int, tuple[str, ...]] | None = None  # where the environment is

    def play_chunk(self, chunk: _Chunk) -> None:
        try:
            episodes = self._episodes(chunk.trees)
        finally:
            self._place = None
            self.environment.close()
        _write(chunk.path, [chunk.header(self.rules), *(_EPISODE.dump_json(episode) for episode in episodes)])

    def _episodes(self, trees: Sequence[tuple[str, int]]) -> list[Episode]:
        """The episodes of all rules, tree after tree; all trees advance together, a decision at a time."""
        runs = {tree: [_Run(rule) for rule in self.rules] for tree in trees}
        due = []
        for (task, seed), some in runs.items():
            observation = self._reset(task, seed)
            due.append(_Node(task, seed, (), observation, self._struck(), (), None, some))
        while due:
            candidates = self._propose([Situation(node.observation, node.actions) for node in due])
            decisions = [node.decision(some) for node, some in zip(due, candidates, strict=True)]
            values = _signals(due, decisions)
            due = [child for way in zip(due, decisions, values, strict=True) for child in self._advance(*way)]
        return [
            Episode(
                run.rule.row, run.rule.recorded, task, self._kind(task), seed, run.success, run.steps, run.llm_calls,
                tuple(run.turns),
            )
            for (task, seed), some in runs.items()
            for run in some
        ]  # fmt: skip

    def _propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        new = [situation for situation in dict.fromkeys(situations) if situation not in self._proposals]
        found = dict(zip(new, self.proposer.propose(new), strict=True)) if new else {}
        answers = [found[situation] if situation in found else self._proposals[situation] for situation in situations]
        self._proposals.update(found)
        while len(self._proposals) > PROPOSALS_KEPT:
            self._proposals.popitem(last=False)
        return answers

    def _advance(self, node: _Node, decision: Decision, values: dict[int, float]) -> list[_Node]:
        """Carry out what the runs at this decision do; the decisions that follow."""
        place = node.task, node.seed, node.actions
        calls = [_escalates(run.rule, values) for run in node.runs]
        small, teacher = decision.context.candidates[0].action, ""
        tossed = [isinstance(run.rule.signal, Coin) for run in node.runs]
        if any(calls) or any(tossed):
            self._go(*place)
            teacher = self.environment.teacher()
        row = tuple(decision.features.tolist())
        ways: dict[str, list[_Run]] = {}
        for run, call, coin in zip(node.runs, calls, tossed, strict=True):
            action = teacher if call else small
            run.steps += 1
            run.llm_calls += call
            if run.rule.keep:
                agreed = small == teacher if coin else None
                run.turns.append(Turn(action, "llm" if call else "slm", row, node.struck, agreed))
            ways.setdefault(action, []).append(run)
        following = []
        for action, runs in ways.items():
            self._go(*place)
            outcome = self._step(action)
            if outcome.done:
                for run in runs:
                    run.success = outcome.success
                continue
            past = PastStep(action, node.observation.text, float(decision.features[ENTROPY]))
            following.append(
                _Node(
                    node.task, node.seed, (*node.actions, action), outcome.observation, self._struck(),
                    (*node.history, past), decision.first, runs,
                )
            )  # fmt: skip
        return following

    def _go(self, task: str, seed: int, actions: tuple[str, ...]) -> None:
        """Bring the environment to the decision after these actions."""
        if self._place != (task, seed, actions):
            self._reset(task, seed)
            for action in actions:
                self._step(action)

    def _reset(self, task: str, seed: int) -> Observation:
        observation = self.environment.reset(task, seed)
        self._place = task, seed, ()
        return observation

    def _step(self, action: str) -> Outcome:
        assert self._place is not None
        task, seed, actions = self._place
        outcome = self.environment.step(action)
        self._place = task, seed, (*actions, action)
        return outcome

    def _struck(self) -> tuple[str, ...]:
        return tuple(getattr(self.environment, "struck", ()))

    def _kind(self, task: str) -> str:
        true = self.environment.environment if isinstance(self.environment, Perturbed) else self.environment
        if isinstance(true, TextWorldEnvironment):
            return GameSpec.parse(task).kind
        return {CodeEnvironment: "code", ShellEnvironment: "shell"}.get(type(true), type(true).__name__)


def _signals(nodes: Sequence[_Node], decisions: Sequence[Decision]) -> list[dict[int, float]]:
    """What the rules at each decision ask for, by the signal's id."""
    values: list[dict[int, float]] = [{} for _ in nodes]
    asked: dict[int, tuple[Signal, list[int]]] = {}
    for number, node in enumerate(nodes):
        signals = {id(run.rule.signal): run.rule.signal for run in node.runs if run.rule.recorded is not None}
        for key, signal in signals.items():
            asked.setdefault(key, (signal, []))[1].append(number)
    for key, (signal, numbers) in asked.items():
        some = [decisions[number] for number in numbers]
        many = getattr(signal, "many", None)
        for number, value in zip(numbers, many(some) if many else map(signal, some), strict=True):
            if math.isnan(value):
                raise ValueError(f"signal {signal}: not a number for {decisions[number]}")
            values[number][key] = float(value)
    return values


def _escalates(rule: Rule, values: dict[int, float]) -> bool:
    if rule.recorded is None:
        return rule.threshold == ALWAYS
    return values[id(rule.signal)] > rule.threshold
