"""Perturbations: pure, composable, biting, on seeds that no two splits share."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from routewright.errors import BadInput
from routewright.step_router.environments.protocol import Observation, Outcome
from routewright.step_router.perturbations import (
    FAILED,
    FALSE_ACTIONS,
    MISSING,
    SPLITS,
    TABLE,
    TIMED_OUT,
    UNSEEN,
    Perturbation,
    Perturbed,
    active,
    perturb,
    perturbation_seeds,
    without,
)

BEFORE = Observation("reach 9", "You are at 3.", "a pen", ("up", "down", "look"), 3, 9)
NOW = Observation("reach 9", "You are at 4. A door is here.", "a pen, a cup", ("up", "down", "open", "close", "look"), 4, 9)


class Counter:
    """A counter to be brought to 9 within 20 steps; the teacher says up."""

    def reset(self, task: str, seed: int) -> Observation:
        self.value, self.steps = 0, 0
        return self._observe()

    def step(self, action: str | None) -> Outcome:
        self.steps += 1
        self.value += {"up": 1, "down": -1}.get(action or "", 0)
        return Outcome(self._observe(), self.value == 9, self.value == 9 or self.steps == 20)

    def teacher(self) -> str:
        return "up"

    def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        return Observation("reach 9", f"You are at {self.value}.", f"{self.value}", ("up", "down", "look"), self.steps, 20)


def only(kind: str, strength: float = 1.0) -> list[Perturbation]:
    """One kind, which strikes at (nearly) every step."""
    return [Perturbation(kind, 1.0, strength)]  # type: ignore[arg-type]


def struck(kind: str, strength: float = 1.0) -> Observation:
    perturbations = only(kind, strength)
    step = next(step for step in range(100) if active(perturbations, 1, step))
    return perturb([BEFORE, NOW], perturbations, 1, step)


def test_the_table_has_every_kind_and_its_own_key() -> None:
    assert list(TABLE) == ["tool_failure", "timeout", "stale", "truncated", "missing", "distractor", "injection"]
    assert all(kind == perturbation.kind for kind, perturbation in TABLE.items())


def test_each_kind_changes_what_is_shown() -> None:
    assert struck("tool_failure").text == FAILED
    assert struck("timeout").text == TIMED_OUT
    assert struck("timeout").admissible == BEFORE.admissible
    stale = struck("stale")
    assert (stale.text, stale.inventory, stale.admissible) == (BEFORE.text, BEFORE.inventory, BEFORE.admissible)
    assert struck("stale", 0.0).admissible == NOW.admissible
    assert (struck("missing").text, struck("missing").inventory) == (MISSING, "unknown")
    assert struck("missing", 0.0).inventory == NOW.inventory


def test_truncation_reaches_text_inventory_and_candidates() -> None:
    cut = struck("truncated", 0.6)
    assert cut.text.endswith(" ...")
    assert NOW.text.startswith(cut.text[:-4])
    assert len(cut.inventory) < len(NOW.inventory) + 4
    assert cut.admissible is not None
    assert len(cut.admissible) == 2
    assert [action for action in (NOW.admissible or ()) if action in cut.admissible] == list(cut.admissible)
    assert len(struck("truncated", 1.0).admissible or ()) == 1
    assert struck("truncated", 0.0) == NOW


def test_distractors_reach_text_inventory_and_candidates() -> None:
    noisy = struck("distractor", 0.5)
    assert NOW.text in noisy.text
    assert noisy.text != NOW.text
    assert noisy.inventory.startswith(NOW.inventory + ", ")
    assert set(noisy.admissible or ()) > set(NOW.admissible or ())
    assert set(noisy.admissible or ()) - set(NOW.admissible or ()) <= set(FALSE_ACTIONS)


def test_injection_orders_something_and_keeps_the_rest() -> None:
    injected = struck("injection")
    assert injected.text.endswith(NOW.text)
    assert struck("injection", 0.0).text.startswith(NOW.text)
    assert any(action in injected.text[: -len(NOW.text)] for action in NOW.admissible or ())
    assert replace(injected, text=NOW.text) == NOW


@pytest.mark.parametrize("kind", list(TABLE))
def test_objective_and_steps_stay_true_and_open_actions_stay_open(kind: str) -> None:
    shown = struck(kind)
    assert (shown.objective, shown.step, shown.max_steps) == (NOW.objective, NOW.step, NOW.max_steps)
    perturbations = only(kind)
    step = next(step for step in range(100) if active(perturbations, 1, step))
    free = perturb([replace(BEFORE, admissible=None), replace(NOW, admissible=None)], perturbations, 1, step)
    assert free.admissible is None


def test_a_pure_function_of_seed_and_step() -> None:
    table = list(TABLE.values())
    first = [[perturb([BEFORE, NOW], table, seed, step) for step in range(20)] for seed in range(10)]
    again = [[perturb([BEFORE, NOW], table, seed, step) for step in reversed(range(20))] for seed in reversed(range(10))]
    assert first == [row[::-1] for row in again[::-1]]
    assert len({repr(row) for row in first}) == 10


def test_the_same_in_another_process() -> None:
    code = (
        "from routewright.step_router.perturbations import *\n"
        "print([[p.kind for p in active(list(TABLE.values()), 7, step)] for step in range(30)])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str([[p.kind for p in active(list(TABLE.values()), 7, step)] for step in range(30)])


def test_kinds_strike_independently_of_each_other() -> None:
    """Leaving a kind out changes nothing about the others, so tables by kind compare like with like."""
    for seed in range(20):
        for step in range(20):
            all_kinds = [p.kind for p in active(list(TABLE.values()), seed, step)]
            fewer = [p.kind for p in active(without(UNSEEN), seed, step)]
            assert fewer == [kind for kind in all_kinds if kind not in UNSEEN]


def test_several_strike_together_in_table_order() -> None:
    both = [Perturbation("injection", 1.0, 1.0), Perturbation("missing", 1.0, 1.0)]
    step = next(step for step in range(100) if len(active(both, 1, step)) == 2)
    assert perturb([BEFORE, NOW], both, 1, step).text.endswith(MISSING)


def test_rates_hold_and_seeds_differ_in_severity() -> None:
    table = [Perturbation("missing", 0.2, 1.0)]
    rates = [sum(bool(active(table, seed, step)) for step in range(200)) / 200 for seed in range(100)]
    assert sum(rates) / 100 == pytest.approx(0.22, abs=0.02)
    assert max(rates) > 2 * min(rates)
    assert not any(active([Perturbation("missing", 0.0, 1.0)], seed, 1) for seed in range(100))


def test_splits_share_no_seed() -> None:
    blocks = [set(perturbation_seeds(split, 10_000)) for split in SPLITS]
    assert len(set.union(*blocks)) == 40_000
    assert perturbation_seeds("test", 3) == range(30_000, 30_003)
    for split, count in (("dev", 1), ("test", 10_001), ("test", -1)):
        with pytest.raises(BadInput, match="perturbation seeds"):
            perturbation_seeds(split, count)


def test_a_tool_failure_loses_the_action() -> None:
    environment = Perturbed(Counter(), only("tool_failure"))
    environment.reset("count", 1)
    for _ in range(20):
        before, step = environment.environment.value, environment.environment.steps + 1  # type: ignore[attr-defined]
        outcome = environment.step("up")
        failed = bool(active(environment.perturbations, 1, step))
        assert environment.environment.value == before + (not failed)  # type: ignore[attr-defined]
        assert (outcome.observation.text == FAILED) == failed == (environment.struck == ("tool_failure",))
        if outcome.done:
            break


def test_a_timeout_costs_a_further_step_and_hides_the_result() -> None:
    environment = Perturbed(Counter(), only("timeout"))
    environment.reset("count", 1)
    costs = []
    while True:
        outcome = environment.step("up")
        costs.append(outcome.cost)
        if environment.struck:
            assert outcome.observation.text == TIMED_OUT
        if outcome.done:
            break
    assert 2.0 in costs
    assert sum(costs) == outcome.observation.step


def test_stale_shows_the_step_before() -> None:
    environment = Perturbed(Counter(), only("stale"))
    environment.reset("count", 1)
    for value in range(1, 9):
        shown = environment.step("up").observation
        assert shown.text == f"You are at {value - 1 if environment.struck else value}."


def test_perturbed_episodes_repeat() -> None:
    def play(seed: int) -> list[Outcome]:
        environment, outcomes = Perturbed(Counter()), []
        environment.reset("count", seed)
        while not outcomes or not outcomes[-1].done:
            outcomes.append(environment.step(environment.teacher()))
        return outcomes

    assert play(3) == play(3)
    assert play(3) != play(4)


def test_unperturbed_is_the_environment_itself() -> None:
    environment, plain = Perturbed(Counter(), []), Counter()
    assert environment.reset("count", 0) == plain.reset("count", 0)
    assert environment.step("up") == plain.step("up")


@pytest.mark.parametrize(
    ("kind", "rate", "strength"), [("gremlins", 0.1, 1.0), ("missing", 1.5, 1.0), ("missing", 0.5, float("nan"))]
)
def test_bad_parameters(kind: str, rate: float, strength: float) -> None:
    with pytest.raises(BadInput, match=r"expected|must lie"):
        Perturbation(kind, rate, strength)  # type: ignore[arg-type]
