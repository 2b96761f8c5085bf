"""Questions of reasoning-gym families: made offline, split by a hash of what is asked, in full or stripped wording."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from routewright.ensemble_router.tasks import Generator, Split, Task
from routewright.errors import BadInput

# What a question asks, without its wording; the same under every wording a family varies.
ASKED = {
    "basic_arithmetic": r"([-(0-9].*?)[ .=?]*$",
    "base_conversion": r"convert the (.*)\n",
    "binary_alternation": r": ([01]+)\s*$",
    "caesar_cipher": r": ([A-Z ]+)",
    "chain_sum": r": (.*?) =?$",
    "count_bits": r"number ([0-9]+)\?",
    "fraction_simplification": r"fraction (\S+) ",
    "gcd": r": ([0-9, ]+)\.",
    "isomorphic_strings": r"\n\n(?:.*\n)*(.+ .+)\s*$",
    "lcm": r": ([0-9, ]+)$",
    "leg_counting": r"you have (.*)\?",
    "letter_counting": r'letter ("\w" appear in the text: ".*")\?',
    "number_format": r"Now, pick the (.*)",
    "number_sequence": r"(.*)",
    "products": r": (.*?)\.",
    "rotate_matrix": r"below by ((?:.|\n)*[0-9])",
    "simple_equations": r": (.*)$",
    "simple_geometry": r"angles are: (.*?)\. ",
    "spell_backward": r": (\w+)$",
    "string_insertion": r"([A-E]{5,})\s*$",
}
TEST_SHARE, DEV_SHARE = 0.15, 0.05
_MAX_DRAWS = 40  # per wanted question; a family with too few different questions is said so


def asked(family: str, question: str) -> str:
    """What a question asks without its wording; the whole question where the family has no stripped template."""
    pattern = ASKED.get(family)
    if pattern is None:
        return question
    found = re.search(pattern, question)
    return found.group(1).strip() if found else question


def split_of(family: str, question: str) -> Split:
    """By a hash of what is asked, so that no wording, seed or order brings a test question into training."""
    text = f"{family}\n{asked(family, question)}"
    place = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12
    return "test" if place < TEST_SHARE else "dev" if place < TEST_SHARE + DEV_SHARE else "train"


def reasoning_gym_tasks(
    family: str, split: Split, size: int, seed: int, parameters: dict[str, Any] | None = None, stripped: bool = False
) -> list[Task]:
    """``size`` different questions of one family and split; the same arguments give the same tasks.

    ``parameters`` go to the family's configuration (values of JSON only); ``stripped`` replaces the wording by the family's
    name and what is asked. BadInput: an unknown family or parameter, no stripped template, no answer to check against, or
    fewer different questions than asked for.
    """
    dataset = _dataset(family, seed, size * _MAX_DRAWS, parameters or {})
    if stripped and family not in ASKED:
        raise BadInput(f"reasoning-gym family {family!r}: it has no stripped template, expected one of {sorted(ASKED)}")
    tasks: dict[str, Task] = {}
    for index in range(size * _MAX_DRAWS):
        entry = dataset[index]
        question = entry["question"]
        key = asked(family, question)
        if key in tasks or split_of(family, question) != split:
            continue
        answer = entry["answer"]
        if answer is None:
            raise BadInput(
                f"reasoning-gym family {family!r}: question {index} stores no answer, expected a family that does"
            )
        tasks[key] = Task(
            id=f"{family}-{seed}-{index}",
            prompt=f"{family} {key}" if stripped else question,
            answer=str(answer),
            domain=family,
            check="reasoning-gym",
            split=split,
            generator=Generator(family=family, seed=seed, index=index, parameters=parameters or {}),
        )
        if len(tasks) == size:
            return list(tasks.values())
    raise BadInput(
        f"reasoning-gym family {family!r}: found {len(tasks)} different {split} questions, expected {size}; "
        "ask for fewer or widen its parameters"
    )


def _dataset(family: str, seed: int, size: int, parameters: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise BadInput("reasoning-gym is not installed: expected `pip install 'routewright[ensemble]'`") from None
    if family not in DATASETS:
        raise BadInput(f"reasoning-gym family {family!r}: there is no such family")
    try:
        return reasoning_gym.create_dataset(family, seed=seed, size=size, **parameters)
    except (TypeError, ValueError, AssertionError) as error:
        raise BadInput(f"reasoning-gym family {family!r}: parameters {parameters}: {' '.join(str(error).split())}") from None
