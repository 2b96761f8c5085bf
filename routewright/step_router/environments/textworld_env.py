"""TextWorld games, made offline and played in process: quests in 3-5 rooms, and cooking, where moves are final.

Games are made by the `textworld` package (Côté et al., arXiv 1806.11532), an extra, and kept on disk by its version
and their parameters. The package's interpreter needs a compiled game for its prose; the observations here are written
from the game's facts instead, which needs no compiler and costs milliseconds.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from routewright.errors import BadInput
from routewright.step_router.environments.protocol import Observation, Outcome

if TYPE_CHECKING:
    from textworld.generator.game import Game, GameProgression

SPLITS = ("policy", "router", "threshold", "test")  # disjoint sets of games
SPLIT_SIZE = 100_000  # game seeds a split owns
GAMES_KEPT, STATES_KEPT = 128, 64  # loaded games; live states a game, older ones are replayed
ATTEMPTS = 20  # some seeds give no quest of the length asked for
DETAILED = 0.75  # share of quests whose objective tells every move
PASSIVE = ("look", "inventory")  # change nothing
COMPASS = ("north", "east", "south", "west")
FOOD = ("raw", "fried", "roasted", "grilled", "burned", "chopped", "sliced", "diced")


@dataclass(frozen=True)
class GameSpec:
    """The parameters of one game, and its name as a task.

    ``length`` is a quest's number of moves or a recipe's number of ingredients; cooking always has six rooms.
    ``detailed``: the objective tells every move; otherwise only the last, and the rest is to be found out.
    """

    kind: Literal["quest", "cooking"]
    seed: int
    rooms: int
    length: int
    detailed: bool = True

    @property
    def task(self) -> str:
        return f"{self.kind}-{self.seed}-r{self.rooms}-n{self.length}-{'detailed' if self.detailed else 'brief'}"

    @staticmethod
    def parse(task: str) -> GameSpec:
        """The inverse of ``task``; BadInput for anything else."""
        match = re.fullmatch(r"(quest|cooking)-(\d{1,9})-r(\d{1,2})-n(\d)-(detailed|brief)", task)
        if match is None:
            raise BadInput(f"task {task!r}: expected a game such as quest-7-r4-n5-detailed or cooking-7-r6-n2-detailed")
        kind, seed, rooms, length, told = match.groups()
        spec = GameSpec("quest" if kind == "quest" else "cooking", int(seed), int(rooms), int(length), told == "detailed")
        ranges = {"quest": (range(3, 6), range(1, 7)), "cooking": (range(6, 7), range(1, 4))}[spec.kind]
        if spec.rooms not in ranges[0] or spec.length not in ranges[1]:
            raise BadInput(
                f"task {task!r}: expected 3-5 rooms and 1-6 moves (quest), or 6 rooms and 1-3 ingredients (cooking)"
            )
        return spec


def game_specs(
    split: str, count: int, cooking: float = 0.25, moves: tuple[int, int] = (3, 6)
) -> list[GameSpec]:
    """``count`` games of a split, about a share ``cooking`` of them cooking games; no game is in two splits.

    ``moves``: the shortest and the longest quest.
    """
    if split not in SPLITS or not 0 <= count <= SPLIT_SIZE:
        raise BadInput(
            f"games: expected a split of {', '.join(SPLITS)} and at most {SPLIT_SIZE} games, got {count} of {split!r}"
        )
    specs = []
    for seed in range(SPLITS.index(split) * SPLIT_SIZE, SPLITS.index(split) * SPLIT_SIZE + count):
        rng = random.Random(f"game/{seed}")
        if rng.random() < cooking:
            specs.append(GameSpec("cooking", seed, 6, rng.randint(1, 2)))
        else:
            specs.append(GameSpec("quest", seed, rng.randint(3, 5), rng.randint(*moves), rng.random() < DETAILED))
    return specs


def _textworld() -> Any:
    try:
        import textworld
        import textworld.challenges.tw_cooking.cooking
        import textworld.generator
        import textworld.generator.chaining
        import textworld.generator.data
        import textworld.generator.game
        import textworld.generator.inform7
    except ImportError:
        raise BadInput(
            "the TextWorld environment needs the package textworld: install it with pip install 'routewright[textworld]'"
        ) from None
    return textworld


def make_game(spec: GameSpec, cache: Path) -> Path:
    """The game's file in the cache, made (seconds) if it is not there. BadInput without the textworld package.

    Other versions of textworld make other games of the same parameters: each has a folder of its own in the cache.
    """
    textworld = _textworld()
    cache = cache / str(textworld.__version__)
    path = cache / f"{spec.task}.json"
    if path.is_file():
        return path
    for attempt in range(ATTEMPTS):
        try:
            game = _generate(textworld, spec, spec.seed + 1_000_000_000 * attempt)
        except textworld.generator.chaining.QuestGenerationError:
            continue
        if textworld.generator.game.GameProgression(game).winning_policy:
            break
    else:
        raise BadInput(f"task {spec.task!r}: no such game could be made in {ATTEMPTS} attempts, try another seed")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:  # complete or absent, whoever makes it at the same time
        game.save(os.path.join(folder, "game.json"))
        _in_order(Path(folder, "game.json"))
        os.replace(os.path.join(folder, "game.json"), path)
    return path


def _in_order(file: Path) -> None:
    """Sort what textworld saves in the order of a set, which differs from process to process: one game, one digest."""
    game = json.loads(file.read_text(encoding="utf-8"))
    game["grammar"]["names_to_exclude"].sort(key=str)
    for quest in game["quests"]:
        quest["fail_events"].sort(key=json.dumps)
    file.write_text(json.dumps(game), encoding="utf-8")


@cache
def _knowledge_base() -> Any:
    """The package's default, which is parsed anew for every game otherwise: three quarters of a game's time."""
    return _textworld().generator.data.KnowledgeBase.load()


def _generate(textworld: Any, spec: GameSpec, seed: int) -> Game:
    options = textworld.GameOptions()
    options.seeds = seed % (1 << 31)
    if spec.kind == "cooking":
        settings = {
            "recipe": spec.length, "take": spec.length, "go": spec.rooms, "open": True, "cook": True, "cut": True,
            "drop": False, "recipe_seed": 0, "split": None,
        }  # fmt: skip
        return textworld.challenges.tw_cooking.cooking.make(settings, options)
    options.kb = _knowledge_base()
    options.nb_rooms, options.nb_objects, options.quest_length = spec.rooms, spec.rooms + 6, spec.length
    options.grammar.only_last_action = not spec.detailed
    return textworld.generator.make_game(options)


@dataclass(frozen=True)
class _State:
    text: str
    inventory: str
    admissible: tuple[str, ...]
    won: bool
    lost: bool
    plan: tuple[str, ...]  # the expert's commands from here; empty at the end or where winning is out of reach


class _Played:
    """A loaded game and what is known of its states, by the actions executed since its start."""

    def __init__(self, path: Path) -> None:
        textworld = _textworld()
        try:
            self.game = textworld.generator.game.Game.load(str(path))
        except (ValueError, KeyError, TypeError) as error:
            told = type(error).__name__
            raise BadInput(f"{path}: expected a game made by textworld, got {told}: delete the file") from None
        self._inform7 = textworld.generator.inform7.Inform7Game(self.game)
        self._states: dict[tuple[str, ...], _State] = {}
        self._live: OrderedDict[tuple[str, ...], GameProgression] = OrderedDict()
        self._live[()] = textworld.generator.game.GameProgression(self.game)
        recipe = str(self.game.metadata.get("recipe", ""))
        self.objective = " ".join(f"{self.game.objective} {recipe}".split())

    def state(self, executed: tuple[str, ...]) -> _State:
        """The state after these (admissible) actions; each is computed once."""
        if executed not in self._states:
            self._states[executed] = self._describe(self._progression(executed))
        return self._states[executed]

    def _progression(self, executed: tuple[str, ...]) -> GameProgression:
        known = len(executed)
        while executed[:known] not in self._live:
            known -= 1
        self._live.move_to_end(executed[:known])
        for end in range(known + 1, len(executed) + 1):
            progression = self._live[executed[: end - 1]].copy()
            commands = self._inform7.gen_commands_from_actions(progression.valid_actions)
            progression.update(progression.valid_actions[commands.index(executed[end - 1])])
            self._live[executed[:end]] = progression
            while len(self._live) > STATES_KEPT:
                oldest = next(key for key in self._live if key and key != executed[:end])
                del self._live[oldest]
        return self._live[executed]

    def _describe(self, progression: GameProgression) -> _State:
        commands = self._inform7.gen_commands_from_actions(progression.valid_actions)
        # everything in sight is told at every step, so examining would only lengthen the list
        admissible = sorted({str(command) for command in commands if not command.startswith("examine ")})
        plan = self._inform7.gen_commands_from_actions(progression.winning_policy or ())
        text, inventory = describe(self.game, progression)
        return _State(
            text, inventory, tuple(admissible), bool(progression.completed), bool(progression.failed),
            tuple(str(command) for command in plan),
        )  # fmt: skip


def describe(game: Game, progression: GameProgression) -> tuple[str, str]:
    """The player's room with what is in sight, and what the player carries."""
    facts: dict[str, list[tuple[str, ...]]] = {}
    for fact in progression.state.facts:
        facts.setdefault(str(fact.name), []).append(tuple(str(argument.name) for argument in fact.arguments))
    for rows in facts.values():
        rows.sort()
    conditions: dict[str, list[str]] = {}
    for condition in ("open", "closed", "locked", *FOOD):
        for arguments in facts.get(condition, []):
            conditions.setdefault(arguments[0], []).append(condition)

    def called(entity: str) -> str:
        name = str(game.infos[entity].name)
        return " ".join([*conditions.get(entity, []), name])

    def listed(relation: str, place: str) -> str:
        return ", ".join(called(thing) for thing, where in facts.get(relation, []) if where == place)

    room = next(where for who, where in facts["at"] if who == "P")
    seen = []
    for thing, where in facts["at"]:
        if where == room and thing != "P":
            inside = listed("on", thing) or ("" if "open" not in conditions.get(thing, []) else listed("in", thing))
            seen.append(f"{called(thing)} (with {inside})" if inside else called(thing))
    doors = {(here, there): door for here, door, there in facts.get("link", [])}
    exits = []
    for direction in COMPASS:
        for there, here in facts.get(f"{direction}_of", []):
            if here == room:
                door = doors.get((room, there))
                exits.append(f"{direction} ({called(door)})" if door else direction)
    sight, ways = ", ".join(seen) or "nothing", ", ".join(exits) or "none"
    return f"You are in the {game.infos[room].name}. You see: {sight}. Exits: {ways}.", listed("in", "I") or "nothing"


class TextWorldEnvironment:
    """Games by the names of their parameters (`GameSpec.task`): files of the folder, else made in it as in a cache.

    A step that is not admissible changes nothing and is spent. The step limit is 1.5 times the expert's number of
    moves plus one, so that waiting is not free. The seed sets the order of the admissible actions.
    """

    def __init__(self, folder: Path) -> None:
        _textworld()
        self._folder = folder
        self._games: OrderedDict[str, _Played] = OrderedDict()
        self._executed: tuple[str, ...] = ()
        self._step, self._limit, self._seed = 0, 0, 0
        self._played: _Played | None = None

    def reset(self, task: str, seed: int) -> Observation:
        """Begin the game; made first if it is not there."""
        if task not in self._games:
            spec, file = GameSpec.parse(task), self._folder / f"{task}.json"
            self._games[task] = _Played(file if file.is_file() else make_game(spec, self._folder))
            if len(self._games) > GAMES_KEPT:
                self._games.popitem(last=False)
        self._games.move_to_end(task)
        self._played, self._executed, self._step, self._seed = self._games[task], (), 0, seed
        self._limit = step_limit(len(self._played.state(()).plan))
        return self._observe("")

    @property
    def executed(self) -> tuple[str, ...]:
        """The actions that changed the game's state: with the task it names the state."""
        return self._executed

    def step(self, action: str | None) -> Outcome:
        """Take an action; blanks around it are ignored."""
        state = self._state()
        if state.won or state.lost or self._step >= self._limit:
            raise ValueError("the episode is over, reset first")
        self._step += 1
        action = action.strip() if action is not None else None
        if action is None or action in PASSIVE:
            told = ""
        elif action in state.admissible:
            self._executed, told = (*self._executed, action), f"You {action}. "
        else:
            told = "That is not possible. "
        state = self._state()
        done = state.won or state.lost or self._step >= self._limit
        return Outcome(self._observe(told), state.won, done)

    def teacher(self) -> str:
        """The first move of the plan from the present state, replanned after wrong moves; "look" where none is left."""
        plan = self._state().plan
        return plan[0] if plan else "look"

    def close(self) -> None:
        """Nothing is held open."""

    def _state(self) -> _State:
        if self._played is None:
            raise ValueError("no episode has begun, reset first")
        return self._played.state(self._executed)

    def _observe(self, told: str) -> Observation:
        state = self._state()
        assert self._played is not None
        actions = list(state.admissible)
        random.Random(f"order/{self._seed}/{self._step}").shuffle(actions)
        return Observation(
            self._played.objective, told + state.text, state.inventory, tuple(actions), self._step, self._limit
        )


def step_limit(moves: int) -> int:
    """ceil(1.5 · the expert's moves) + 1."""
    return math.ceil(1.5 * moves) + 1
