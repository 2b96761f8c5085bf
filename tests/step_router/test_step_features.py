"""The 15 features against hand-worked numbers, both ways of computing them, and input that must be refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routewright.errors import BadInput
from routewright.step_router.features import (
    FEATURES,
    NAMES,
    Candidate,
    Context,
    PastStep,
    check_features,
    compute_features,
    from_named,
    named,
    without_logprobs,
)

CONTEXT = Context(
    objective="Put the brass key into the chest, then open the red door.",
    observation="You are in the kitchen. A red door leads east.",
    candidates=[
        Candidate("open red door", [-0.1, -0.3], 0.6),
        Candidate("open  red door ", [-0.1, -0.3], 0.6),
        Candidate("go east", [-0.2, -0.2 - math.log(3)], 0.8),
        Candidate("take knife", [-1.0, -40.0], 0.2),
    ],
    step=3,
    max_steps=12,
    history=[
        PastStep("go east", "You are in the hall.", 0.25),
        PastStep("open red door", "A red door leads east.", 0.5),
        PastStep("open red door", "It is locked.", 0.0),
    ],
)


def features(context: Context) -> dict[str, float]:
    return named(compute_features(context))


def test_there_are_exactly_fifteen_named_and_documented_features() -> None:
    assert len(NAMES) == len(set(NAMES)) == 15
    assert all(len(text) > 15 and text.endswith(".") for text in FEATURES.values())
    assert compute_features(CONTEXT).shape == (15,)


def test_nothing_in_a_context_names_the_perturbation_or_the_outcome() -> None:
    fields = (
        set(Context.__dataclass_fields__) | set(Candidate.__dataclass_fields__) | set(PastStep.__dataclass_fields__)
    )
    for word in ("perturb", "seed", "kind", "success", "reward", "done", "failed"):
        assert not [name for name in (*fields, *NAMES) if word in name]


def test_policy_features_by_hand() -> None:
    """Three distinct actions with log p −0.4, −0.4 − ln 3 and −41: the policy is (3/4, 1/4, 0)."""
    found = features(CONTEXT)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(3)
    assert found["entropy"] == pytest.approx(entropy)
    assert found["entropy_history"] == pytest.approx((0.25 + 0.5 + 0.0 + entropy) / 4)
    assert found["surprisal"] == pytest.approx(0.2)
    assert found["evidence"] == 0


def test_verifier_features_by_hand() -> None:
    """Scores 0.6, 0.6, 0.8, 0.2: mean 0.55, population variance (0.05² + 0.05² + 0.25² + 0.35²)/4 = 0.0475."""
    found = features(CONTEXT)
    assert found["verifier_mean"] == pytest.approx(0.55)
    assert found["verifier_spread"] == pytest.approx(math.sqrt(0.0475))
    assert found["verifier_best"] == 0.8
    assert found["verifier_worst"] == 0.2
    assert found["verifier_margin"] == pytest.approx(-0.2)


def test_trajectory_features_by_hand() -> None:
    found = features(CONTEXT)
    assert found["consistency"] == pytest.approx((1 + 0 + 0) / 3)
    assert found["repeats"] == 2
    assert found["time"] == 0.25
    assert found["step"] == 3
    # {you are in the kitchen a red door leads east} has 10 words, all 5 of "A red door leads east." among them, and
    # {you are in the} in common with {you are in the hall}: 5/10, 4/11 and 0.
    assert found["observation_novelty"] == pytest.approx(0.5)
    assert found["objective_overlap"] == 1
    other = replace(CONTEXT, candidates=[CONTEXT.candidates[2], CONTEXT.candidates[0]])
    assert features(other)["objective_overlap"] == 0
    assert features(other)["verifier_margin"] == pytest.approx(0.2)
    # a second sample of the same action does not compete with it, whatever its score
    twice = [Candidate("wait", [-1.0], 0.3), Candidate("wait", [-1.0], 0.9), Candidate("go", [-1.0], 0.2)]
    assert features(replace(CONTEXT, candidates=twice))["verifier_margin"] == pytest.approx(0.1)


def test_pseudo_entropy_by_hand() -> None:
    """Scores 0.6, 0.8, 0.2 at temperature 0.1 are logits 6, 8, 2."""
    found = features(without_logprobs(CONTEXT))
    weights = np.exp([6.0, 8.0, 2.0])
    p = weights / weights.sum()
    assert found["entropy"] == pytest.approx(-(p * np.log(p)).sum() / math.log(3))
    assert found["surprisal"] == pytest.approx(-math.log(p[0]))
    assert found["evidence"] == 1
    same = set(NAMES) - {"entropy", "entropy_history", "surprisal", "evidence"}
    assert {n: found[n] for n in same} == {n: features(CONTEXT)[n] for n in same}


def test_without_a_verifier_scores_are_likelihoods() -> None:
    candidates = [replace(c, verifier_score=None) for c in CONTEXT.candidates]
    found = features(replace(CONTEXT, candidates=candidates))
    assert found["evidence"] == -1
    assert found["verifier_best"] == pytest.approx(math.exp(-0.2))
    assert found["verifier_worst"] == pytest.approx(math.exp(-20.5))
    assert found["entropy"] == features(CONTEXT)["entropy"]


def test_one_candidate_without_logprobs_makes_all_of_them_pseudo() -> None:
    first, *rest = CONTEXT.candidates
    partly = replace(CONTEXT, candidates=[first, *(replace(c, token_logprobs=None) for c in rest)])
    assert features(partly) == features(without_logprobs(CONTEXT))


def test_a_lone_candidate_at_the_first_step() -> None:
    found = features(Context("", "", [Candidate("wait", [-0.5], 0.4)], 0, 10))
    expected = {
        "entropy": 0, "entropy_history": 0, "surprisal": 0.5, "evidence": 0, "verifier_mean": 0.4, "verifier_spread": 0,
        "verifier_best": 0.4, "verifier_worst": 0.4, "verifier_margin": 0, "consistency": 1, "repeats": 0, "time": 0,
        "step": 0, "observation_novelty": 1, "objective_overlap": 0,
    }  # fmt: skip
    assert found == expected


def test_a_uniform_policy_has_entropy_one() -> None:
    candidates = [Candidate(f"go {way}", [-2.0], 0.5) for way in ("north", "south", "east", "west")]
    assert features(Context("", "", candidates, 0, 10))["entropy"] == pytest.approx(1)


def test_a_long_print_costs_no_more_than_its_beginning() -> None:
    long = replace(CONTEXT, observation="word " * 2_000_000)
    assert features(long)["observation_novelty"] == 1


@given(
    st.lists(
        st.builds(
            Candidate,
            st.text(max_size=20),
            st.lists(st.floats(-1e6, 0), min_size=1, max_size=5),
            st.floats(-1e6, 1e6),
        ),
        min_size=1,
        max_size=6,
    ),
    st.text(max_size=50),
    st.integers(0, 9),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_any_valid_context_gives_finite_features_in_range(
    candidates: list[Candidate], text: str, step: int, blind: bool
) -> None:
    context = Context(text, text[::-1], candidates, step, 9, [PastStep(text, text, 0.5)])
    row = compute_features(without_logprobs(context) if blind else context)
    assert np.isfinite(row).all()
    found = named(row)
    for name in ("entropy", "entropy_history", "consistency", "time", "observation_novelty", "objective_overlap"):
        assert -1e-9 <= found[name] <= 1 + 1e-9, name
    assert found["surprisal"] >= 0
    assert np.array_equal(from_named(found), row)


@pytest.mark.parametrize(
    ("changes", "named_field"),
    [
        ({"candidates": []}, "candidates"),
        ({"candidates": [Candidate("a", [-1.0], math.nan)]}, r"candidates\[0\].verifier_score"),
        (
            {"candidates": [Candidate("a", [-1.0], 0.1), Candidate("b", [-1.0], math.inf)]},
            r"candidates\[1\].verifier_score",
        ),
        ({"candidates": [Candidate("a", [-1.0, -math.inf], 0.1)]}, r"candidates\[0\].token_logprobs\[1\]"),
        ({"candidates": [Candidate("a", [0.5], 0.1)]}, r"candidates\[0\].token_logprobs\[0\]"),
        ({"candidates": [Candidate("a", [], 0.1)]}, r"candidates\[0\].token_logprobs"),
        ({"candidates": [Candidate("a")]}, "token_logprobs on every candidate or verifier_score"),
        ({"step": -1}, "^step: "),
        ({"step": 13}, "^step: "),
        ({"max_steps": 0}, "^max_steps: "),
        ({"history": [PastStep("a", "b", math.nan)]}, r"history\[0\].entropy"),
    ],
)
def test_bad_contexts_name_the_field(changes: dict, named_field: str) -> None:
    with pytest.raises(BadInput, match=named_field):
        compute_features(replace(CONTEXT, **changes))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["entropy", "repeats", "objective_overlap"])
def test_a_feature_that_is_not_finite_is_named(name: str, value: float) -> None:
    rows = np.zeros((3, 15))
    rows[1, NAMES.index(name)] = value
    with pytest.raises(BadInput, match=rf"features\[1\]\.{name}: expected a finite number"):
        check_features(rows)
    with pytest.raises(BadInput, match=rf"features\.{name}: expected a finite number"):
        from_named(dict.fromkeys(NAMES, 0.0) | {name: value})


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(BadInput, match="15 numbers"):
        check_features(np.zeros((2, 14)))
    with pytest.raises(BadInput, match=r"features\.entropy: missing"):
        from_named({})
    with pytest.raises(BadInput, match=r"features\.kind: unknown"):
        from_named(dict.fromkeys(NAMES, 0.0) | {"kind": 1.0})
    with pytest.raises(BadInput, match=r"features\.step: .* found 'three'"):
        from_named(dict.fromkeys(NAMES, 0.0) | {"step": "three"})  # type: ignore[dict-item]
