"""Verifier-guided DPO: pairs and divergence by hand, the first loss, and what must not move."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import (
    ACTIONS,
    history,
    made_states,
    save_policy,
    save_verifier,
    situation,
    tiny_policy,
    tiny_profile,
    write_states,
)

from routewright.errors import BadInput
from routewright.step_router.dpo import Pair, distill_dpo, jensen_shannon, make_pairs, rejected, train_dpo
from routewright.step_router.policy import SmallModel, load_policy
from routewright.step_router.situations import Situation

SCORED = [("a", 0.9), ("b", 0.2), ("c", 0.8)]


def test_the_first_proposal_that_scores_lower_than_the_teachers_action_is_rejected() -> None:
    assert rejected(SCORED, ("t", 0.97), 0.05) == "a"
    assert rejected(SCORED, ("t", 0.97), 0.1) == "b"
    assert rejected(SCORED, ("t", 0.5), 0.15) == "b"


def test_the_teachers_action_is_not_rejected_and_never_what_the_verifier_likes_better() -> None:
    assert rejected(SCORED, ("a ", 0.97), 0.05) == "b", "blanks around it make no other action"
    assert rejected(SCORED, ("t", 0.1), 0.0) is None
    assert rejected([("a", 0.9)], ("a", 0.9), 0.0) is None


def test_the_gap_is_inclusive() -> None:
    assert rejected([("b", 0.5)], ("t", 0.75), 0.25) == "b"
    assert rejected([("b", 0.5)], ("t", 0.75), 0.26) is None


def rows(*probabilities: list[float]) -> torch.Tensor:
    """Log-probabilities with −1e9 for nothing."""
    return torch.tensor(probabilities).log().clamp(min=-1e9)


def test_jensen_shannon_by_hand() -> None:
    """(½, ½) and (1, 0), the mean (¾, ¼): ½·(½ ln ⅔ + ½ ln 2) + ½·ln 4⁄3."""
    half, sure = rows([0.5, 0.5]), rows([1.0, 0.0])
    expected = (0.5 * log(2 / 3) + 0.5 * log(2) + log(4 / 3)) / 2
    assert jensen_shannon(half, sure).tolist() == pytest.approx([expected])
    assert jensen_shannon(sure, half).tolist() == pytest.approx([expected])
    assert jensen_shannon(sure, rows([0.0, 1.0])).tolist() == pytest.approx([log(2)])
    assert jensen_shannon(half, half).tolist() == pytest.approx([0.0], abs=1e-7)


def test_jensen_shannon_of_rows_with_fewer_actions() -> None:
    left = rows([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]).requires_grad_()
    right = rows([1.0, 0.0, 0.0], [0.2, 0.3, 0.5])
    found = jensen_shannon(left, right)
    assert found.tolist() == pytest.approx([(0.5 * log(2 / 3) + 0.5 * log(2) + log(4 / 3)) / 2, 0.0], abs=1e-6)
    found.sum().backward()
    assert left.grad is not None
    assert left.grad.isfinite().all()


class Judge:
    """Likes long actions."""

    def scores(self, situations: Sequence[Situation], actions: Sequence[Sequence[str]]) -> list[list[float]]:
        return [[len(action) / 100 for action in some] for some in actions]


def test_pairs_of_states() -> None:
    """Lengths: press green 11, press red 9, wait 4, look around 11; the teacher's own has 14."""
    states = made_states(2)
    own = replace(states[1], teacher="open the hatch", other=situation(7))
    policy = tiny_policy(scale=0.12)
    proposer, settings = SmallModel(policy, Judge(), 4), tiny_profile(dpo={"gap": 0.04}).dpo  # type: ignore[arg-type]
    first, repaired = make_pairs([states[0], own], proposer, Judge(), settings)
    assert (first.chosen, first.rejected) == (states[0].teacher, "wait"), "the only one shorter by 4"
    ranked = [c.action for c in SmallModel(policy, None, 4).propose([own.situation])[0]]
    assert (repaired.chosen, repaired.rejected) == ("open the hatch", next(a for a in ranked if a in ("press red", "wait")))
    for pair, teacher in ((first, states[0].teacher), (repaired, own.teacher)):
        assert pair.actions[0] == teacher
        assert sorted(pair.actions) == sorted({teacher, *ACTIONS}), "the same set for both views"
    assert repaired.other == situation(7)


@pytest.fixture(scope="module")
def bc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("bc"), scale=0.12)


def pairs(other: bool = True) -> list[Pair]:
    """Green is right; the other view tells another light and deck, or the same."""
    views = [situation(i) for i in range(16)]
    return [
        Pair(view, situation(i + 1, calm=False) if other else view, "press green", "wait", ACTIONS)
        for i, view in enumerate(views)
    ]


def tune(bc: Path, out: Path, jsd: float, some: list[Pair] | None = None, **section: Any) -> Path:
    profile = tiny_profile(dpo={"epochs": 2, "batch_size": 8, "lr": 3e-4} | section)
    train_dpo(pairs() if some is None else some, bc, out, profile, jsd, 0, "dpo")
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.allclose(tensor, other[name], atol=1e-7, rtol=1e-6) for name, tensor in one.items())


@pytest.fixture(scope="module")
def tuned(bc: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four steps with the term, without it, and without it but with other second views."""
    folder = tmp_path_factory.mktemp("dpo")
    return {
        "jsd": tune(bc, folder / "jsd", 1.0),
        "plain": tune(bc, folder / "plain", 0.0),
        "same views": tune(bc, folder / "same", 0.0, pairs(other=False)),
    }


def starts_at_the_reference(folder: Path) -> None:
    first = history(folder)[0]
    assert first["dpo_loss"] == pytest.approx(log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-5)


def test_the_first_loss_is_ln_2(tuned: dict[str, Path]) -> None:
    for folder in tuned.values():
        starts_at_the_reference(folder)
        rows = history(folder)
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
    jsd, plain = history(tuned["jsd"])[0], history(tuned["plain"])[0]
    assert plain["loss"] == pytest.approx(log(2), abs=1e-4)
    assert jsd["loss"] == pytest.approx(log(2) + jsd["jsd"], abs=1e-4)
    assert jsd["jsd"] == pytest.approx(plain["jsd"], abs=1e-6)
    assert jsd["jsd"] > 1e-4


def test_the_preferred_action_gains_on_a_reference_that_stays(bc: Path, tuned: dict[str, Path]) -> None:
    """The last margin is β·(gain of log p of the chosen − that of the rejected) over the untouched folder."""
    last = history(tuned["plain"])[-1]
    assert last["dpo_loss"] < log(2) - 1e-4
    assert last["rewards/margins"] > 0
    views = [pair.situation for pair in pairs()]
    gains = []
    for before, after in zip(
        load_policy(bc).log_probs(views, [["press green", "wait"]] * 16),
        load_policy(tuned["plain"]).log_probs(views, [["press green", "wait"]] * 16),
        strict=True,
    ):
        green, wait = (sum(a) - sum(b) for a, b in zip(after, before, strict=True))
        gains.append(green - wait)
    assert sum(gains) / 16 > 0


def test_without_weight_the_second_view_changes_nothing(tuned: dict[str, Path]) -> None:
    plain, same, jsd = (weights(tuned[name]) for name in ("plain", "same views", "jsd"))
    assert equal(plain, same)
    assert not equal(plain, jsd)
    assert history(tuned["same views"])[0]["jsd"] == pytest.approx(0.0, abs=1e-6)


def test_the_stage_repeats_and_leaves_its_inputs(bc: Path, tmp_path: Path) -> None:
    verifier = save_verifier(bc, tmp_path / "verifier", scale=0.2)
    examples = write_states(made_states(8), tmp_path / "examples")
    (bc / "history.jsonl").write_text('{"step": 1}\n')
    profile = tiny_profile(dpo={"epochs": 1, "batch_size": 8, "lr": 3e-4, "gap": 0.0, "states": 8})
    before = {file: hashlib.sha256(file.read_bytes()).digest() for folder in (bc, verifier) for file in folder.iterdir()}
    for name in ("one", "two"):
        distill_dpo(Path("unused"), examples, bc, verifier, tmp_path / name, profile, 0)
    after = {file: hashlib.sha256(file.read_bytes()).digest() for folder in (bc, verifier) for file in folder.iterdir()}
    assert before == after
    for policy in ("policy", "policy-no-jsd"):
        starts_at_the_reference(tmp_path / "one" / policy)
        assert equal(weights(tmp_path / "one" / policy), weights(tmp_path / "two" / policy))
        assert not (tmp_path / "one" / policy / "checkpoints").exists()
    assert history(tmp_path / "one") == history(tmp_path / "one" / "policy")
    assert (tmp_path / "one" / "bc-history.jsonl").read_text() == '{"step": 1}\n'


def test_lora_starts_at_the_reference_too(bc: Path, tmp_path: Path) -> None:
    out = tune(bc, tmp_path, 0.5, pairs()[:8], epochs=4, lora={"r": 4, "alpha": 8}, lr=1e-2)
    starts_at_the_reference(out)
    assert history(out)[-1]["dpo_loss"] < log(2)
    assert weights(out).keys() == weights(bc).keys()
    assert not equal(weights(out), weights(bc))


def test_no_pair_is_refused(bc: Path, tmp_path: Path) -> None:
    verifier = save_verifier(bc, tmp_path / "verifier")
    examples = write_states(made_states(4), tmp_path / "examples")
    with pytest.raises(BadInput, match=r"no proposal scores lower than the teacher's action by dpo\.gap = 1\.5"):
        distill_dpo(Path("unused"), examples, bc, verifier, tmp_path / "out", tiny_profile(dpo={"gap": 1.5}), 0)
