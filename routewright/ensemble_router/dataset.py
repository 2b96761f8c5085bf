"""The questions of a run in one folder: train.jsonl, dev.jsonl, test.jsonl, out-of-distribution.jsonl, dataset.json."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routewright.ensemble_router.profile import EnsembleProfile, FamilySection
from routewright.ensemble_router.reasoning_gym_tasks import DEV_SHARE, TEST_SHARE, reasoning_gym_tasks
from routewright.ensemble_router.task_files import load_tasks
from routewright.ensemble_router.tasks import Split, Task, read_tasks, write_tasks
from routewright.errors import BadInput

SPLITS = ("train", "dev", "test")
OUT_OF_DISTRIBUTION = "out-of-distribution"
DESCRIPTION = "dataset.json"


def synthesize(profile: EnsembleProfile, folder: Path, seed: int) -> dict[str, Any]:
    """Make or read all questions and write them; returns what dataset.json holds.

    Families are split by a hash of what is asked, files by the rows' own split or a hash of the prompt. A domain with
    answers gets its majority-answer baseline: the share of test questions that training's most frequent answer is right for.
    BadInput: a family or file that cannot give the questions, or a domain without one in a split.
    """
    wanted = profile.tasks
    sizes: dict[Split, int] = {"train": wanted.train, "dev": wanted.dev, "test": wanted.test}
    splits: dict[str, list[Task]] = {name: [] for name in (*SPLITS, OUT_OF_DISTRIBUTION)}
    for family in wanted.families:
        for split, size in sizes.items():
            splits[split] += _family(profile, family, split, size, seed)
    for family in wanted.out_of_distribution:
        splits[OUT_OF_DISTRIBUTION] += _family(profile, family, "test", wanted.test, seed)
    for file in wanted.files:
        name = file.path.name.split(".")[0]  # two files may number their rows alike
        tasks = [task.model_copy(update={"id": f"{name}/{task.id}"}) for task in load_tasks(file.path, file.domain)]
        if file.out_of_distribution:
            splits[OUT_OF_DISTRIBUTION] += tasks[: wanted.test]
            continue
        for split, size in sizes.items():
            own = [task for task in tasks if (task.split or split_of_prompt(task.prompt)) == split][:size]
            if not own:
                raise BadInput(f"{file.path}: expected at least one {split} question, found none")
            splits[split] += own
    for name, tasks in splits.items():
        twice = [identity for identity, times in Counter(task.id for task in tasks).items() if times > 1]
        if twice:
            raise BadInput(f"tasks.files: two files of one name have a {name} question {twice[0]!r}, expected other names")
        if tasks or name in SPLITS:
            write_tasks(folder / f"{name}.jsonl", tasks)
        else:
            (folder / f"{name}.jsonl").unlink(missing_ok=True)
    digest = hashlib.sha256()
    for tasks in splits.values():
        for task in tasks:
            digest.update(task.model_dump_json().encode() + b"\n")
    description: dict[str, Any] = {
        "profile": profile.name,
        "config_sha256": profile.digest,
        "seed": seed,
        "tasks_sha256": digest.hexdigest(),
        "questions": {name: dict(sorted(Counter(task.domain for task in tasks).items())) for name, tasks in splits.items()},
        "majority_answer": majority_answers(splits["train"], splits["test"]),
    }
    partial = folder / f"{DESCRIPTION}.partial"
    partial.write_text(json.dumps(description, indent=1), encoding="utf-8")
    os.replace(partial, folder / DESCRIPTION)
    return description


def _family(profile: EnsembleProfile, family: FamilySection, split: Split, size: int, seed: int) -> list[Task]:
    tasks = reasoning_gym_tasks(family.family, split, size, seed, family.parameters, profile.tasks.stripped)
    if family.domain:
        tasks = [
            task.model_copy(update={"domain": family.domain, "id": task.id.replace(family.family, family.domain, 1)})
            for task in tasks
        ]
    if profile.tasks.reward == "exact":
        return [task.model_copy(update={"check": "exact", "generator": None}) for task in tasks]
    return tasks


def split_of_prompt(prompt: str) -> Split:
    """By a hash of the prompt, in the shares of the reasoning-gym families."""
    place = int(hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:12], 16) / 16**12
    return "test" if place < TEST_SHARE else "dev" if place < TEST_SHARE + DEV_SHARE else "train"


def majority_answers(train: Sequence[Task], test: Sequence[Task]) -> dict[str, float]:
    """By domain, the share of test questions whose answer is the most frequent one in training (ties: the first seen)."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for task in train:
        if task.answer:
            answers[task.domain][task.answer] += 1
    shares = {}
    for domain, counted in sorted(answers.items()):
        own = [task for task in test if task.domain == domain]
        if own:
            best = counted.most_common(1)[0][0]
            shares[domain] = sum(task.answer == best for task in own) / len(own)
    return shares


def load_split(folder: Path, split: str) -> list[Task]:
    """The questions of one split that `synthesize` wrote; BadInput where the folder holds none."""
    path = Path(folder) / f"{split}.jsonl"
    if not path.is_file():
        raise BadInput(f"{path}: expected the questions that the synthesize stage writes")
    return read_tasks(path)
