"""Verifiers: how right a completion is, whatever the model wrote."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from routewright.ensemble_router import scoring_process
from routewright.ensemble_router.answers import MAX_COMPLETION, choice_letter, final_answer, last_number, normalised, number
from routewright.ensemble_router.instructions import follows
from routewright.ensemble_router.tasks import Task, own_scorer
from routewright.sandbox import Limits, check_walls
from routewright.step_router.environments.code_env import LIMITS, CodeEnvironment, Problem, program

TIMEOUT_S = 10.0
"""Of one score in the scoring process; the first call adds its start."""


def check_sandbox(tasks: Iterable[Task]) -> None:
    """`NoWalls` where some of these tasks run code and the sandbox refuses to: for the start of a stage."""
    if any(task.check == "code" for task in tasks):
        check_walls()


def verify(task: Task, completion: str, timeout_s: float = TIMEOUT_S, limits: Limits = LIMITS) -> float:
    """The reward in [0, 1]: 1 is right. Never raises for what the completion holds, and ends after about the timeout.

    0 for an empty completion, one longer than 200,000 characters and one whose check takes too long. `instructions` gives
    the share followed (all of them: 1, IFEval's strict accuracy); reasoning-gym gives its scorer's value, without the
    default scorer's credit for texts that merely contain the answer ("12" contains "2"). BadInput: no scorer can be started.
    """
    if len(completion) > MAX_COMPLETION or not completion.replace("\0", "").strip():
        return 0.0
    text = completion.replace("\0", "").encode("utf-8", "replace").decode()  # lone surrogates go
    match task.check:
        case "exact":
            return float(normalised(final_answer(text)) == normalised(task.answer or ""))
        case "number":
            found = last_number(final_answer(text))
            return float(found is not None and found == number(task.answer or ""))
        case "choice":
            return float(choice_letter(final_answer(text)) == choice_letter(task.answer or ""))
        case "math":
            return float(equal_expressions(task.answer or "", final_answer(text), timeout_s))
        case "code":
            return float(_passes(task, text, limits))
        case "instructions":
            return sum(follows(one.kind, one.arguments, text) for one in task.instructions) / len(task.instructions)
        case "reasoning-gym":
            return _reasoning_gym(task, final_answer(text), timeout_s)


def equal_expressions(answer: str, found: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether two answers are the same mathematically; False where that cannot be told in time.

    Equal texts and equal plain numbers are told here, the rest by math-verify in the scoring process.
    """
    if not answer or not found:
        return False
    one, two = number(answer), number(found)
    if one is not None and two is not None:
        return one == two
    if normalised(answer) == normalised(found):
        return True
    boxed = f"\\boxed{{{found}}}" if "$" not in found and "\\boxed" not in found else found
    request = {"kind": "math", "answer": answer.strip("$"), "completion": boxed}
    return bool(scoring_process.score(request, timeout_s))


def _reasoning_gym(task: Task, answer: str, timeout_s: float) -> float:
    assert task.generator is not None
    generator = task.generator
    if answer and answer == task.answer:
        return 1.0
    if not answer or not own_scorer(generator.family) or not scoring_process.harmless(generator.family, answer):
        return 0.0
    request = {"kind": "reasoning-gym", **generator.model_dump(), "completion": answer}
    return scoring_process.score(request, timeout_s) or 0.0


def _passes(task: Task, completion: str, limits: Limits) -> bool:
    problem = Problem(
        task.id, task.prompt, task.preamble, task.entry_point, task.answer or "", task.tests or "", task.inputs, task.atol
    )
    if task.standard_input:
        completion = f"SOLUTION = {program(problem, completion)!r}"
    environment = _environment(problem, limits)
    environment.reset(problem.id, 0)
    return environment.step(completion).success


@lru_cache(maxsize=64)
def _environment(problem: Problem, limits: Limits) -> CodeEnvironment:
    """Kept, because a problem without tests runs its reference once to know what is expected."""
    return CodeEnvironment([problem], attempts=1, limits=limits)
