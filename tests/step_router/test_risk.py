"""The risk router: formulas by hand, gradients by finite differences, training on known risk, files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from routewright.described_weights import save_described
from routewright.errors import BadInput
from routewright.evaluation.calibration import expected_calibration_error
from routewright.step_router.features import NAMES
from routewright.step_router.frontier import brier_skill, cvar, seed_failure_rates
from routewright.step_router.risk import (
    Explored,
    RiskModel,
    RiskSettings,
    Rollouts,
    actor_brier_loss,
    both_outcomes,
    brier_loss,
    calibrate,
    constant_risk,
    constraint_told,
    episode_mean,
    fit_risk,
    load_risk,
    save_risk,
    scaled_cost,
    soft_cvar,
    soft_escalation,
    soft_failure_rates,
    stack,
)

FAST = RiskSettings(steps=100, lr=3e-3)


@pytest.fixture
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- Formulas by hand


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_episodes_weigh_the_same() -> None:
    """Episode 0 (failed): 0.5² and 0.1², mean 0.13. Episode 1: 0.2² = 0.04. Brier 0.085, not the steps' 0.1."""
    p, failed, episode = torch.tensor([0.5, 0.9, 0.2]), torch.tensor([1.0, 0.0]), torch.tensor([0, 0, 1])
    assert episode_mean(p, episode, 2).tolist() == pytest.approx([0.7, 0.2])
    assert brier_loss(p, failed, episode).item() == pytest.approx(0.085)


def test_scaled_cost_by_hand() -> None:
    """σ(0) = 0.5 and σ((0.9 − 0.5)/0.1) = σ(4) in episode 0, σ(−3) in episode 1."""
    p, episode = torch.tensor([0.5, 0.9, 0.2]), torch.tensor([0, 0, 1])
    expected = ((0.5 + sigmoid(4)) / 2 + sigmoid(-3)) / 2
    assert scaled_cost(p, episode, 2, 0.5, 0.1).item() == pytest.approx(expected)
    always, never = torch.full((3,), 1.0), torch.zeros(3)
    assert scaled_cost(always, episode, 2, 0.0, 1e-3).item() == pytest.approx(1)  # c_LLM on every step
    assert scaled_cost(never, episode, 2, 0.5, 1e-3).item() == pytest.approx(0)  # c_SLM on every step


def test_soft_failure_rates_by_hand() -> None:
    """Seed 0: one failed (σ(0) and σ(1)), one not: 0.5·(1 − σ(1))/2. Seed 1: one failed, 1 − σ(−1)."""
    p, episode = torch.tensor([0.5, 0.6, 0.9, 0.4]), torch.tensor([0, 0, 1, 2])
    failed, seed = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1])
    found = soft_failure_rates(p, failed, episode, seed, tau=0.5, sharpness=0.1)
    assert found.tolist() == pytest.approx([0.5 * (1 - sigmoid(1)) / 2, 1 - sigmoid(-1)])


def test_a_sharp_soft_rate_is_the_rate_of_episodes_never_escalated() -> None:
    p, episode = torch.tensor([0.4, 0.6, 0.3, 0.2, 0.45, 0.1]), torch.tensor([0, 0, 1, 1, 2, 3])
    failed, seed = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert soft_failure_rates(p, failed, episode, seed, 0.5, 1e-3).tolist() == pytest.approx([0.5, 0.5])
    assert soft_failure_rates(p, failed, episode, seed, 0.05, 1e-3).tolist() == pytest.approx([0.0, 0.0], abs=1e-9)


def test_the_product_does_not_underflow_into_nan() -> None:
    p = torch.full((5000,), 0.999, requires_grad=True)
    rates = soft_failure_rates(p, torch.ones(1), torch.zeros(5000, dtype=torch.long), torch.tensor([0]), 0.1, 0.01)
    rates.sum().backward()
    assert rates.item() == 0
    assert torch.isfinite(p.grad).all()


def test_soft_cvar_is_the_cvar_and_reaches_the_worst_seeds_alone() -> None:
    rates = torch.tensor([0.1, 0.5, 0.2, 0.4, 0.3], requires_grad=True)
    for alpha in (0.2, 0.3, 0.5, 1.0):
        assert soft_cvar(rates, alpha).item() == pytest.approx(cvar(rates.detach().numpy(), alpha))
    soft_cvar(rates, 0.3).backward()
    assert rates.grad.tolist() == [0, 0.5, 0, 0.5, 0]


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradients_equal_finite_differences(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    episode = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5, 5])
    failed, seeds = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([0, 1, 1, 2, 0, 2])
    p = torch.rand(10, generator=generator)

    def terms(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            soft_cvar(soft_failure_rates(x, failed, episode, seeds, 0.5, 0.1), 0.5),
            scaled_cost(x, episode, 6, 0.5, 0.1),
            brier_loss(x, failed, episode),
        ]

    for term in range(3):
        x = p.clone().requires_grad_()
        terms(x)[term].backward()
        numeric = []
        for i in range(10):
            h = torch.zeros(10)
            h[i] = 1e-6
            numeric.append(((terms(p + h)[term] - terms(p - h)[term]) / 2e-6).item())
        assert x.grad.abs().max() > 1e-3
        np.testing.assert_allclose(x.grad.numpy(), numeric, atol=1e-8)


def test_soft_escalation_is_the_threshold_rule_in_the_limit() -> None:
    assert soft_escalation(torch.tensor([0.49, 0.5, 0.51]), 0.5, 1e-4).tolist() == pytest.approx([0, 0.5, 1])


# --- A population with known risk


@dataclass
class Population:
    """Episodes of 10 perturbation seeds, two of them hard; the risk shows in two noisy features.

    An episode of a hard seed fails with probability 0.4 and shows in feature `observation_novelty`. Of the others a
    quarter fails with 0.6 and shows in `repeats`, the rest with 0.05. For the mean, repeats should be escalated first;
    for the worst seeds, novelty.
    """

    rollouts: Rollouts
    group: list[int]


def population(episodes: int, seed: int, evidence: tuple[int, ...] = (0,)) -> Population:
    rng = np.random.default_rng(seed)
    perturbation = np.arange(episodes) % 10
    hard = perturbation < 2
    risky = ~hard & (rng.random(episodes) < 0.25)
    failed = rng.random(episodes) < np.where(hard, 0.4, np.where(risky, 0.6, 0.05))
    episode = np.repeat(np.arange(episodes), 3 + 3 * failed)  # failing episodes are longer
    rows = rng.normal(size=(len(episode), len(NAMES)))
    rows[:, NAMES.index("observation_novelty")] = hard[episode] + 0.2 * rng.normal(size=len(episode))
    rows[:, NAMES.index("repeats")] = risky[episode] + 0.2 * rng.normal(size=len(episode))
    rows[:, NAMES.index("evidence")] = rng.choice(evidence, episodes)[episode]
    return Population(Rollouts(rows, episode, failed.astype(int), perturbation), list(range(episodes)))


def fitted(settings: RiskSettings, seed: int, evidence: tuple[int, ...] = (0,)) -> RiskModel:
    model, _ = fit_risk(population(500, 3 * seed, evidence).rollouts, None, settings, seed)
    calibrate(model, population(500, 3 * seed + 1, evidence).rollouts)
    return model


def worst_seeds_at_rate(model: RiskModel, fresh: Rollouts, rate: float) -> float:
    """CVaR₀.₂ of the failure rates when the riskiest `rate` of episodes is escalated and the LLM rescues 19 of 20."""
    highest = np.zeros(len(fresh.failed))
    np.maximum.at(highest, fresh.episode, model.risks(fresh.features))
    escalated = highest > np.quantile(highest, 1 - rate)
    rescued = escalated & (np.random.default_rng(0).random(len(escalated)) < 0.95)
    success = ~(fresh.failed.astype(bool) & ~rescued)
    return cvar(list(seed_failure_rates(success, fresh.seed.tolist()).values()), 0.2)


def test_training_earns_brier_skill_on_fresh_episodes_and_is_calibrated() -> None:
    model = fitted(FAST, seed=0)
    fresh = population(600, 99)
    risks = model.risks(fresh.rollouts.features)
    skill = brier_skill(risks, fresh.rollouts.failed, fresh.rollouts.episode, fresh.group, seed=0)
    assert skill.low > 0.05
    first = np.unique(fresh.rollouts.episode, return_index=True)[1]  # one step an episode
    assert expected_calibration_error(risks[first], fresh.rollouts.failed, bins=5) < 0.1


def test_the_constraint_helps_the_worst_seeds_at_the_same_escalation() -> None:
    fresh = population(1000, 98).rollouts
    settings = replace(FAST, tau=0.7, epsilon=0.1)
    gains = []
    for seed in range(3):
        free, bound = fitted(replace(settings, constrained=False), seed), fitted(settings, seed)
        gains.append(worst_seeds_at_rate(free, fresh, 0.2) - worst_seeds_at_rate(bound, fresh, 0.2))
    assert min(gains) > 0
    assert np.mean(gains) > 0.05


def test_the_multiplier_rises_while_the_bound_is_broken_and_falls_below_it() -> None:
    data = population(200, 5).rollouts
    strict = [row["lambda"] for row in fit_risk(data, None, replace(FAST, steps=20, epsilon=0.0), 0)[1]]
    loose = [row["lambda"] for row in fit_risk(data, None, replace(FAST, steps=20, epsilon=1.0), 0)[1]]
    assert strict[0] == loose[0] == pytest.approx(math.log(2))
    assert all(b > a for a, b in pairwise(strict))
    assert all(b < a for a, b in pairwise(loose))
    free = fit_risk(data, None, replace(FAST, steps=3, constrained=False), 0)[1]
    assert {row["lambda"] for row in free} == {0.0}


def test_the_same_seed_gives_the_same_router_and_leaves_the_callers_random_numbers_alone() -> None:
    data = population(60, 6).rollouts
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, _ = fit_risk(data, None, replace(FAST, steps=5), seed=4)
    assert torch.equal(torch.rand(3), expected)
    two, _ = fit_risk(data, None, replace(FAST, steps=5), seed=4)
    other, _ = fit_risk(data, None, replace(FAST, steps=5), seed=5)
    assert np.array_equal(one.risks(data.features), two.risks(data.features))
    assert not np.array_equal(one.risks(data.features), other.risks(data.features))


def test_a_constant_feature_never_counts_and_a_far_one_is_held() -> None:
    data = population(60, 7).rollouts
    rows = data.features.copy()
    rows[:, NAMES.index("step")] = 4.0
    model, _ = fit_risk(replace(data, features=rows), None, replace(FAST, steps=5), seed=0)
    moved = rows.copy()
    moved[:, NAMES.index("step")] = 400.0
    assert np.array_equal(model.risks(rows), model.risks(moved))
    far, farther = rows[:1].copy(), rows[:1].copy()
    far[0, 0], farther[0, 0] = 10, 1e30  # the feature has deviation 1
    assert np.array_equal(model.risks(far), model.risks(farther))


# --- The benefit of calling the LLM


def test_actor_brier_loss_by_hand() -> None:
    """The small model acted (of chance 0.75) with p 0.5 and failed, the LLM (0.25) with p 0.75 and did not.

    (0.5²/0.75 + 0.75²/0.25)/2 a step and half of that; where both agree, the failed step counts for p 0.5 and p 0.75.
    """
    logits = torch.tensor([[0.0, 9.0], [9.0, math.log(3)]], requires_grad=True)
    by_llm, failed, differ = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), torch.zeros(2)
    loss = actor_brier_loss(logits, by_llm, failed, differ, 0.25)
    assert loss.item() == pytest.approx((0.25 / 0.75 + 0.5625 / 0.25) / 2 / 2)
    loss.backward()
    assert logits.grad is not None
    assert ((logits.grad != 0).tolist()) == [[True, False], [False, True]]
    same = torch.tensor([[0.0, math.log(3)]])
    agreed = actor_brier_loss(same, by_llm[:1], failed[:1], torch.ones(1), 0.25)
    assert agreed.item() == pytest.approx((0.25 + 0.0625) / 2)


def test_actor_brier_loss_of_all_coins_is_that_of_both_outcomes() -> None:
    """Averaged over the coin, the weighted loss is the loss with both outcomes seen: weights are 1/probability."""
    logits, rate = torch.tensor([[0.3, -1.2]]), 0.65
    outcome = {0.0: 1.0, 1.0: 0.0}
    tossed = {
        by: actor_brier_loss(logits, torch.tensor([by]), torch.tensor([failed]), torch.zeros(1), rate).item()
        for by, failed in outcome.items()
    }
    p = torch.sigmoid(logits)[0].tolist()
    both = ((p[0] - outcome[0.0]) ** 2 + (p[1] - outcome[1.0]) ** 2) / 2
    assert (1 - rate) * tossed[0.0] + rate * tossed[1.0] == pytest.approx(both)


def tossed(steps: int, seed: int) -> tuple[Explored, np.ndarray]:
    """Steps of a coin, and P(failure) by which the LLM's acting lowers: 0.4 where `repeats` shows it, else 0.

    A hopeless half (`step`) fails with 0.9 whoever acts: the highest risk and no benefit.
    """
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(steps, len(NAMES)))
    rows[:, NAMES.index("evidence")] = 0.0
    hopeless, rescued = rows[:, NAMES.index("step")] > 0, rows[:, NAMES.index("repeats")] > 0.5
    by_llm = (rng.random(steps) < 0.35).astype(float)
    gain = np.where(~hopeless & rescued, 0.4, 0.0)
    agreed = (gain == 0) & (rng.random(steps) < 0.5)
    failed = rng.random(steps) < np.where(hopeless, 0.9, 0.5) - gain * by_llm
    return Explored(rows, by_llm, failed.astype(float), agreed.astype(float), 0.35), gain


def test_the_benefit_is_where_the_llm_changes_the_outcome_not_where_the_risk_is_highest() -> None:
    explored, _ = tossed(6000, 0)
    alone = Rollouts(explored.features, np.arange(6000), explored.failed, np.arange(6000) % 5)
    model, _ = fit_risk(alone, explored, replace(FAST, steps=200, constrained=False), 0)
    fresh, gain = tossed(4000, 1)
    benefits, risks = model.benefits(fresh.features), model.risks(fresh.features)
    assert benefits.mean() == pytest.approx(gain.mean(), abs=0.04)
    assert benefits[gain > 0].mean() - benefits[gain == 0].mean() > 0.2
    top, riskiest = np.argsort(-benefits)[:600], np.argsort(-risks)[:600]
    assert gain[top].mean() > 2 * gain.mean()
    assert gain[riskiest].mean() < gain.mean() / 2
    assert np.abs(benefits).max() <= 1
    assert model.predict(fresh.features)[:, 0].tolist() == risks.tolist()


def test_steps_of_a_coin_that_do_not_fit_together_are_refused() -> None:
    explored, _ = tossed(5, 0)
    with pytest.raises(BadInput, match=r"explored\.by_llm: expected 0 or 1 for each of 5 steps"):
        replace(explored, by_llm=np.full(5, 0.35))
    with pytest.raises(BadInput, match=r"explored\.failed: expected 0 or 1 for each of 5 steps"):
        replace(explored, failed=np.zeros(4))
    with pytest.raises(BadInput, match=r"explored\.agreed: expected 0 or 1"):
        replace(explored, agreed=np.full(5, np.nan))
    with pytest.raises(BadInput, match=r"explored\.rate: expected a probability between 0 and 1, got 1\.0"):
        replace(explored, rate=1.0)


def test_steps_at_which_both_agree_make_the_benefit_surer() -> None:
    """400 steps only: told where both agree, the router orders fresh steps by their gain better than without."""
    fresh, gain = tossed(4000, 1)
    found = {True: 0.0, False: 0.0}
    for draw in range(3):
        explored, _ = tossed(400, 10 + draw)
        alone = Rollouts(explored.features, np.arange(400), explored.failed, np.arange(400) % 5)
        for told in found:
            data = explored if told else replace(explored, agreed=np.zeros(400))
            model, _ = fit_risk(alone, data, replace(FAST, steps=150, constrained=False), draw)
            found[told] += gain[np.argsort(-model.benefits(fresh.features))[:600]].mean()
    assert found[True] > found[False]


# --- Calibration


def test_calibration_recovers_temperature_and_level() -> None:
    """Labels drawn from σ((z − 1)/2), z the model's own output: what is fitted is T = 2 and a shift of −1/2."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20_000, len(NAMES)))
    rows[:, NAMES.index("evidence")] = 0
    torch.manual_seed(0)
    model = RiskModel()
    model.standardise(rows)
    with torch.no_grad():
        for layer in (model.layers[0], model.layers[3], model.layers[6]):
            layer.weight *= 3
        z = model.eval()(torch.tensor(rows, dtype=torch.float32))[:, 0].double().numpy()
    assert z.std() > 0.5
    truth = 1 / (1 + np.exp(-(z - 1) / 2))
    n = len(rows)
    calibrate(model, Rollouts(rows, np.arange(n), (rng.random(n) < truth).astype(int), np.zeros(n, dtype=int)))
    assert model.temperature.item() == pytest.approx(2, rel=0.15)
    assert np.abs(model.risks(rows) - truth).max() < 0.05
    after = model(torch.tensor(rows, dtype=torch.float32))[:, 0].detach().numpy()
    assert np.array_equal(np.argsort(z), np.argsort(after))


def test_calibration_weighs_episodes_not_steps() -> None:
    """One failed episode of 99 steps and one success of one, all features alike: P(failure) is 1/2."""
    rows = np.zeros((100, len(NAMES)))
    model = RiskModel()
    model.standardise(rows)
    calibrate(model, Rollouts(rows, np.array([0] * 99 + [1]), np.array([1, 0]), np.array([0, 0])))
    assert model.risk(rows[0]) == pytest.approx(0.5, abs=1e-3)


# --- With and without log-probabilities


def test_a_router_trained_both_ways_works_both_ways_and_another_refuses() -> None:
    both = fitted(FAST, seed=0, evidence=(0, 1))
    for flag in (0, 1):
        fresh = population(400, 97, (flag,))
        risks = both.risks(fresh.rollouts.features)
        assert brier_skill(risks, fresh.rollouts.failed, fresh.rollouts.episode, fresh.group, seed=0).low > 0
    only, _ = fit_risk(population(60, 8).rollouts, None, replace(FAST, steps=2), seed=0)
    with pytest.raises(BadInput, match=r"features\[0\]\.evidence: expected one of \[0\]"):
        only.risks(fresh.rollouts.features)
    with pytest.raises(BadInput, match="evidence"):
        only.risk(np.full(len(NAMES), 0.5))


def test_stack_shifts_episode_numbers() -> None:
    one, two = population(5, 0).rollouts, population(7, 1).rollouts
    both = stack([one, two])
    assert both.failed.tolist() == [*one.failed, *two.failed]
    assert both.episode.tolist() == [*one.episode, *(two.episode + 5)]
    assert both.features.shape == (len(one.features) + len(two.features), 15)


# --- Files


def test_a_saved_router_comes_back_the_same(tmp_path: Path) -> None:
    model = fitted(replace(FAST, steps=5), seed=0)
    save_risk(model, tmp_path / "risk", FAST, {"threshold": 0.4})
    loaded, description = load_risk(tmp_path / "risk")
    rows = population(20, 3).rollouts.features
    assert np.array_equal(model.risks(rows), loaded.risks(rows))
    assert description["threshold"] == 0.4
    assert description["features"] == list(NAMES)
    assert description["settings"]["epsilon"] == 0.3
    assert description["weights_sha256"].startswith(description["model_version"])
    assert sorted(p.name for p in (tmp_path / "risk").iterdir()) == ["model.safetensors", "risk.json"]


def test_a_changed_or_missing_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "risk"
    with pytest.raises(BadInput, match=r"no such folder"):
        load_risk(folder)
    folder.mkdir()
    with pytest.raises(BadInput, match=r"model.safetensors is missing"):
        load_risk(folder)
    save_risk(RiskModel(), folder, FAST, {})
    description = json.loads((folder / "risk.json").read_text())

    (folder / "risk.json").write_text("{")
    with pytest.raises(BadInput, match=r"risk.json is unreadable"):
        load_risk(folder)
    (folder / "risk.json").write_text("{}")
    with pytest.raises(BadInput, match="weights_sha256"):
        load_risk(folder)
    (folder / "risk.json").write_text(json.dumps(description | {"features": ["entropy"]}))
    with pytest.raises(BadInput, match="features"):
        load_risk(folder)
    (folder / "risk.json").write_text(json.dumps(description))
    weights = load_file(folder / "model.safetensors")
    weights["temperature"] = torch.tensor(2.0)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(BadInput, match="does not match the digest"):
        load_risk(folder)
    other = {name: value for name, value in RiskModel().state_dict().items()}
    other["layers.6.bias"] = torch.zeros(1)  # one output, as before the benefit
    save_described(other, folder, "model.safetensors", "risk.json", {"features": list(NAMES)})
    with pytest.raises(BadInput, match=r"another model than this version's \(layers\.6\.bias differs\), run the calibrate"):
        load_risk(folder)


# --- Bad input


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_features_that_are_not_finite_are_named(value: float) -> None:
    data = population(10, 0).rollouts
    rows = data.features.copy()
    rows[2, NAMES.index("verifier_margin")] = value
    with pytest.raises(BadInput, match=r"features\[2\]\.verifier_margin"):
        replace(data, features=rows)
    with pytest.raises(BadInput, match=r"features\[2\]\.verifier_margin"):
        RiskModel().risks(rows)
    with pytest.raises(BadInput, match=r"features\[0\]\.verifier_margin"):
        RiskModel().risk(rows[2])


def test_rollouts_that_do_not_fit_together_are_refused() -> None:
    data = population(10, 0).rollouts
    with pytest.raises(BadInput, match="as many episode numbers"):
        replace(data, episode=data.episode[1:])
    with pytest.raises(BadInput, match="as many seeds"):
        replace(data, seed=data.seed[1:])
    with pytest.raises(BadInput, match=r"rollouts.episode: expected every number"):
        replace(data, episode=np.where(data.episode == 3, 4, data.episode))
    with pytest.raises(BadInput, match=r"rollouts.failed: expected 0 or 1"):
        replace(data, failed=data.failed * 0.5)
    with pytest.raises(BadInput, match="only one kind"):
        calibrate(RiskModel(), replace(data, failed=np.zeros(10, dtype=int)))


@pytest.mark.parametrize(("outcome", "risk"), [(1, 11 / 12), (0, 1 / 12)])
def test_the_risk_of_episodes_that_all_end_alike_is_constant(outcome: int, risk: float) -> None:
    """Ten failures: (10 + 1)/(10 + 2). The benefit, learnt elsewhere, stays as it is."""
    data = population(10, 0).rollouts
    alike = replace(data, failed=np.full(10, outcome))
    assert both_outcomes(data)
    assert not both_outcomes(alike)
    model, _ = fit_risk(alike, None, FAST, seed=0)
    benefits = model.benefits(data.features)
    constant_risk(model, alike)
    assert model.risks(data.features) == pytest.approx(risk)
    assert np.array_equal(model.benefits(data.features), benefits)
    assert np.ptp(benefits) > 0


def test_whether_the_constraint_bound_is_told() -> None:
    history = [{"cvar": value} for value in (0.31, 0.3, 0.024)]
    assert constraint_told(history, 0.3) == (
        "The CVaR constraint (at most 0.3) bound: above it at 1 of 3 training steps, largest 0.310."
    )
    assert constraint_told(history[1:], 0.3) == (
        "The CVaR constraint (at most 0.3) never bound: above it at 0 of 2 training steps, largest 0.300."
    )
