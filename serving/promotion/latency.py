"""Champion and challenger timed in turn, in one run, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from routewright.evaluation.gates import Check, GateBounds

LATENCY_INPUTS, CHUNK = 200, 25
ROUNDS = 3
"""Of each input the fastest of so many decisions counts: those of a step router are shorter than what interrupts them."""
CANDIDATES = 8
"""Most candidates of a step, as many as the gpu profiles propose."""
GATE = "p99 latency / champion's"


def latencies_in_turn(
    deciders: Mapping[str, Callable[[Any], object]], inputs: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Milliseconds of one decision, {version: {input: ms}}: in turn, so that what else the machine does meets all."""
    from routewright.search_router.evaluate import decision_latencies

    found: dict[str, dict[str, float]] = {version: {} for version in deciders}
    names = list(inputs)
    for start in range(0, len(names), CHUNK):
        chunk = {name: inputs[name] for name in names[start : start + CHUNK]}
        for version, decide in deciders.items():
            found[version] |= decision_latencies(decide, chunk)
    return found


def latency_check(router: str, examples: Path | None, folders: Mapping[str, Path], bounds: GateBounds) -> Check:
    """The gate on step or ensemble routers, {version: folder}, the candidate before the champion.

    Without inputs it cannot be measured, and fails as every such gate does.
    """
    made = {"step-router": _steps, "ensemble-router": _questions}[router](examples) if examples is not None else []
    if not made:
        return not_measured("the run has no inputs that the synthesize stage wrote", False, bounds)
    load = {"step-router": _step_decider, "ensemble-router": _ensemble_decider}[router]
    deciders = {version: load(folder) for version, folder in folders.items()}
    inputs = {str(place): asked for place, asked in enumerate(spread(made, LATENCY_INPUTS))}
    rounds = [latencies_in_turn(deciders, inputs) for _ in range(ROUNDS)]
    own, theirs = (
        float(np.percentile([min(found[version][name] for found in rounds) for name in inputs], 99)) for version in deciders
    )
    return Check(
        name=GATE, passed=own / theirs <= bounds.latency_ratio, value=own / theirs, bound=bounds.latency_ratio,
        why=f"{own:.4g} ms, champion's {theirs:.4g} ms",
    )  # fmt: skip


def not_measured(reason: str, passed: bool, bounds: GateBounds) -> Check:
    """The gate where no ratio is known."""
    return Check(name=GATE, passed=passed, value=None, bound=bounds.latency_ratio, why=f"not measured: {reason}")


def spread(asked: Sequence[Any], count: int) -> list[Any]:
    """At most so many inputs, evenly from first to last: neighbours are of one task or family."""
    if len(asked) <= count:
        return list(asked)
    return [asked[i] for i in np.linspace(0, len(asked) - 1, count).round().astype(int)]


def _step_decider(folder: Path) -> Callable[[Any], object]:
    from routewright.step_router.client import StepRouter
    from routewright.step_router.features import compute_features

    router = StepRouter.load(folder)
    # As the endpoint decides: features, network, threshold.
    return lambda context: router.predict(compute_features(context))[1] > router.threshold


def _ensemble_decider(folder: Path) -> Callable[[Any], object]:
    from routewright.ensemble_router.router import load_ensemble_router

    return load_ensemble_router(folder).decide


def _questions(examples: Path) -> list[Any]:
    """The held-out questions that the evaluation asked; none where there is no such file."""
    from routewright.ensemble_router.dataset import load_split

    if not (examples / "test.jsonl").is_file():
        return []
    return [task.prompt for task in load_split(examples, "test")]


def _steps(examples: Path) -> list[Any]:
    """The recorded states with what came before them; none where there is no such file.

    Candidates are the teacher's action and others that were shown or taken. No log-probability or score was recorded with
    them: they are made up, since no decision takes longer for another number.
    """
    from routewright.step_router.features import Candidate, Context, PastStep
    from routewright.step_router.synthesis import STATES, read_states

    if not (examples / STATES).is_file():
        return []
    seen: dict[tuple[str, int, int], str] = {}
    asked = []
    for state in read_states(examples):
        shown, actions = state.situation.observation, state.situation.actions
        seen[state.task, state.seed, len(actions)] = shown.text
        others = shown.admissible or actions
        candidates = [
            Candidate(action, [-0.1 * (place + 1)] * len(action.split() or [""]), 1 / (place + 1))
            for place, action in enumerate(list(dict.fromkeys((state.teacher, *others)))[:CANDIDATES])
        ]
        past = [
            PastStep(action, seen[state.task, state.seed, step], 0.5)
            for step, action in enumerate(actions)
            if (state.task, state.seed, step) in seen
        ]
        asked.append(Context(shown.objective, shown.text, candidates, shown.step, shown.max_steps, past))
    return asked
