"""Names as variables: what a small model trained from nothing reads instead of words it has hardly ever seen.

A model of a million parameters learns the few names of its training games by heart and copies no other. So names
become one of `SLOTS` tokens, drawn anew for every situation: the model can only learn what to do with *a* name.
(Delexicalisation, as in Henderson et al. 2014 for dialogue state tracking.) Pretrained models read the words.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

SLOTS = 64
_WORD = re.compile(r"\w+")


def slot(number: int) -> str:
    """The token that stands for a name."""
    return f"<n{number}>"


def known_words(texts: Iterable[tuple[str, str]], actions: Iterable[tuple[str, str]]) -> list[str]:
    """The words that are read as they are: verbs, prepositions, and whatever else recurs from task to task.

    ``texts`` and ``actions``: (task, text). A word of an action is a name where it occurs in less than 30 % of the
    tasks, any other word where it occurs in less than 2 %.
    """
    names = _tasks_of(actions)
    everything = _tasks_of([*texts, *actions])
    tasks = max(len(found) for found in everything.values())
    return sorted(word for word, found in everything.items() if len(found) / tasks >= (0.3 if word in names else 0.02))


def _tasks_of(texts: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for task, text in texts:
        for word in _WORD.findall(text.lower()):
            found.setdefault(word, set()).add(task)
    return found


def name_slots(texts: Sequence[str], known: frozenset[str], draw: int = 0) -> list[str]:
    """The texts of one situation with every unknown word as a slot, the same word the same slot.

    The slots are drawn from the first text and the number ``draw``, so equal situations read equal and training can see
    one situation with many draws. Beyond `SLOTS` names they are shared.
    """
    words = Counter(word for text in texts for word in _WORD.findall(text.lower()) if word not in known)
    slots = list(range(SLOTS))
    random.Random(f"{draw}/{texts[0]}").shuffle(slots)
    by_name = {word: slot(slots[place % SLOTS]) for place, word in enumerate(words)}

    def replaced(match: re.Match[str]) -> str:
        word = match[0].lower()
        return by_name.get(word, word)

    return [_WORD.sub(replaced, text) for text in texts]
