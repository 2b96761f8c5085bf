"""One answer from several agents: a familiarity-weighted vote, or the most familiar agent's for open tasks.

An empty or unparsable completion is an abstention: it votes for nothing. Of two agents the heavier vote always wins, so a
vote of two is top-1 by construction unless the heavier one abstains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routewright.ensemble_router.answers import choice_letter, final_answer, last_number, normalised
from routewright.ensemble_router.tasks import Check, Task
from routewright.ensemble_router.verify import equal_expressions

OPEN: tuple[Check, ...] = ("code", "instructions")
"""Checks of open tasks: two right texts need not be the same, so there is nothing to count."""


@dataclass(frozen=True)
class Vote:
    """``winner``: place of the completion that stands for the ensemble, −1 where all abstained.

    ``answer``: its answer, "" then. ``weight``: the familiarity behind it, as a share of all that was cast, in [0, 1].
    ``abstained``: places of completions without an answer.
    """

    winner: int
    answer: str
    weight: float
    abstained: tuple[int, ...]


def vote(task: Task, completions: Sequence[str], familiarities: Sequence[float]) -> Vote:
    """The ensemble's answer; ``completions`` of the activated agents and their familiarities f, in one order.

    Deterministic tasks: the answer with the largest Σ f, equal answers counting as one (for `math` also those equal as
    expressions); the completion of the most familiar agent behind it stands for it. Open tasks: the completion of the agent
    with the largest f that wrote anything. Ties: the answer with more agents, then the one whose most familiar agent is
    more familiar, then the earlier. ValueError where numbers of completions and familiarities differ.
    """
    if len(completions) != len(familiarities):
        raise ValueError(f"expected one familiarity a completion, found {len(familiarities)} for {len(completions)}")
    if task.check in OPEN:
        answers = [text.strip() for text in completions]
    else:
        answers = [answer_key(task.check, text) for text in completions]
    abstained = tuple(place for place, answer in enumerate(answers) if not answer)
    groups: list[list[int]] = []
    for place, answer in enumerate(answers):
        if not answer:
            continue
        group = None
        if task.check not in OPEN:
            group = next((g for g in groups if _same(task.check, answers[g[0]], answer)), None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    if not groups:
        return Vote(-1, "", 0.0, abstained)

    def standing(group: list[int]) -> tuple[float, int, float, int]:
        cast = sum(familiarities[place] for place in group)
        return round(cast, 9), len(group), max(familiarities[place] for place in group), -group[0]

    best = max(groups, key=standing)
    winner = max(best, key=lambda place: (familiarities[place], -place))
    total = sum(familiarities[place] for group in groups for place in group)
    share = sum(familiarities[place] for place in best) / total if total > 0 else 0.0
    return Vote(winner, answers[winner], share, abstained)


def answer_key(check: Check, completion: str) -> str:
    """What of a completion is counted; "" is an abstention."""
    answer = final_answer(completion)
    if check == "number":
        value = last_number(answer)
        return "" if value is None else f"{(value + 0).normalize():f}"
    if check == "choice":
        return choice_letter(answer)
    return answer if check == "math" else normalised(answer)


def _same(check: Check, one: str, other: str) -> bool:
    return equal_expressions(one, other) if check == "math" else one == other
