"""The risk router r_ψ: P(the small model alone fails this episode | the features of this step) (arXiv 2605.16604).

That probability says how bad things are, not what a call of the LLM changes: it is highest late in an episode that nothing
rescues any more. So the network has two more outputs, P(failure | this step is the small model's) and P(failure | it is
the LLM's), learnt where a coin decided who acts (`Explored`); their difference is the benefit that the router escalates on.

Objective of the first output, its three terms on one scale (costs of 1 and 50 as in the paper would drown a Brier score in
[0, 1]):

    Brier(p, y) + w · E[e] + λ · (CVaR_α(F) − ε)
    e_t = σ((p_t − τ)/T),   F_z = mean over the episodes of seed z of (1 − S) · Π_t (1 − e_t)

e_t is a soft escalation, so E[e] = (E[cost] − c_SLM) / (c_LLM − c_SLM); S is the outcome of the small model alone. F_z
counts an escalated failure as rescued: in training only, evaluation re-executes. λ = softplus(ρ) rises by dual ascent
while the worst seeds fail too often. At the predecessor's ε = 0.3 they hardly ever do: Π_t over the steps of an episode is
near 0 as soon as one p_t passes τ or many come near it, so F_z counts failures that no step foresaw (CVaR 0.006 to 0.024 in
text games, from the first training step on: λ only falls). The term acts on this output, which the rule `failure-risk`
escalates on; the other two have it through the shared layers alone. Every episode weighs the same, however long it dragged
on. Cost and constraint bend p, so `calibrate` comes after. The other two outputs add `actor_brier_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit, logit
from torch import nn
from torch.nn.functional import softplus

from routewright.described_weights import fill, read_described, save_described
from routewright.errors import BadInput
from routewright.step_router.features import NAMES, check_features
from routewright.step_router.frontier import worst_count

DESCRIPTION, WEIGHTS = "risk.json", "model.safetensors"
EVIDENCE = NAMES.index("evidence")
OUTPUTS = ("alone", "slm", "llm")


@dataclass(frozen=True)
class Rollouts:
    """Steps of episodes that the small model ran alone.

    ``features`` (n, 15); ``episode`` (n,) the index of each step's episode; ``failed`` (E,) 0 or 1; ``seed`` (E,) the
    perturbation seed of each episode, any integers. To train for agents with and without log-probabilities, add both
    views as two episodes.
    """

    features: np.ndarray
    episode: np.ndarray
    failed: np.ndarray
    seed: np.ndarray

    def __post_init__(self) -> None:
        check_features(self.features)
        episodes = len(self.failed)
        if len(self.features) != len(self.episode) or len(self.seed) != episodes:
            raise BadInput(
                f"rollouts: {len(self.features)} feature rows need as many episode numbers, found {len(self.episode)}; "
                f"{episodes} outcomes need as many seeds, found {len(self.seed)}"
            )
        if not np.array_equal(np.unique(self.episode), np.arange(episodes)):
            raise BadInput(
                f"rollouts.episode: expected every number from 0 to {episodes - 1} at least once and no other"
            )
        if not np.isin(self.failed, (0, 1)).all():
            raise BadInput("rollouts.failed: expected 0 or 1 for every episode")


@dataclass(frozen=True)
class Explored:
    """Steps of episodes in which a coin, the same at every step, decided whether the small model or the LLM acts.

    ``features`` (n, 15); ``by_llm`` (n,) 0 or 1, independent of the features given the episode's past; ``failed`` (n,) 0 or
    1, of the step's episode. The difference of mean failure between the two actors is then what the LLM's acting causes.
    ``agreed`` (n,) 0 or 1: both would have taken the same action, so that this difference is nought. ``rate`` in (0, 1) is
    P(the LLM acts).
    """

    features: np.ndarray
    by_llm: np.ndarray
    failed: np.ndarray
    agreed: np.ndarray
    rate: float

    def __post_init__(self) -> None:
        check_features(self.features)
        if not 0 < self.rate < 1:
            raise BadInput(f"explored.rate: expected a probability between 0 and 1, got {self.rate}")
        for name, values in (("by_llm", self.by_llm), ("failed", self.failed), ("agreed", self.agreed)):
            if values.shape != (len(self.features),) or not np.isin(values, (0, 1)).all():
                raise BadInput(f"explored.{name}: expected 0 or 1 for each of {len(self.features)} steps")


@dataclass(frozen=True)
class RiskSettings:
    """Training settings; those of the paper's predecessor where it gives any."""

    alpha: float = 0.2
    """CVaR averages the worst ⌈α|Z|⌉ seeds."""
    epsilon: float = 0.3
    """Bound on the CVaR of the soft failure rates."""
    dual_lr: float = 1e-2
    """Of Adam on ρ, λ from ln 2. Plain ascent at this rate hardly lets λ go within 300 full-batch steps."""
    tau: float = 0.5
    """Threshold of the soft escalation."""
    sharpness: float = 0.05
    """T of σ((p − τ)/T). Softer, the many steps of an episode add up to an escalation that no threshold would make."""
    cost_weight: float = 0.1
    """w: what escalating every step would cost, in failures."""
    constrained: bool = True
    """False leaves the λ term out: the rows `failure-no-cvar` and `risk-no-cvar`."""
    steps: int = 300
    lr: float = 1e-3
    weight_decay: float = 1.0
    dropout: float = 0.2


class RiskModel(nn.Module):
    """MLP 15 → 128 → 64 → 3 with GELU and dropout on standardised features.

    Outputs: z of P(failure of the small model alone) = σ(z/T), and the logits of P(failure) if the small model or the LLM
    acts now and a coin decides from then on.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        width = len(NAMES)
        self.layers = nn.Sequential(
            nn.Linear(width, 128), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(128, 64), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(64, len(OUTPUTS)),
        )  # fmt: skip
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("evidence", torch.zeros(3))
        self.mean: torch.Tensor
        self.scale: torch.Tensor
        """1/standard deviation; 0 for a feature that was constant in training, which then never counts."""
        self.temperature: torch.Tensor
        self.evidence: torch.Tensor
        """1 where the evidence flag −1, 0, 1 occurred in training."""

    def standardise(self, features: np.ndarray) -> None:
        """Take mean, scale and the kinds of evidence from training rows (n, 15)."""
        mean, std = features.mean(axis=0), features.std(axis=0)
        constant = std <= 1e-9 * np.maximum(1.0, np.abs(mean))
        self.mean = torch.tensor(mean, dtype=torch.float32)
        self.scale = torch.tensor(np.where(constant, 0.0, 1 / np.where(constant, 1.0, std)), dtype=torch.float32)
        self.evidence = torch.tensor([float((features[:, EVIDENCE] == flag).any()) for flag in (-1, 0, 1)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (n, 3) in the order of OUTPUTS of raw features (n, 15); beyond 5 standard deviations they count as 5."""
        logits: torch.Tensor = self.layers(((features - self.mean) * self.scale).clamp(-5, 5))
        return logits

    @torch.inference_mode()
    def predict(self, features: np.ndarray) -> np.ndarray:
        """P(failure) (n, 3), float64 in [0, 1], in the order of OUTPUTS, of raw feature rows (n, 15).

        BadInput names a feature that is not finite, and refuses evidence of a kind that was not in training.
        """
        rows = check_features(features)
        for row, flag in enumerate(rows[:, EVIDENCE]):
            if flag not in (-1.0, 0.0, 1.0) or not self.evidence[int(flag) + 1]:
                known = [value for value, seen in zip((-1, 0, 1), self.evidence.tolist(), strict=True) if seen]
                raise BadInput(f"features[{row}].evidence: expected one of {known}, as in training, found {flag:g}")
        self.eval()
        z = self(torch.from_numpy(rows).float()).double()
        z[:, 0] /= self.temperature
        return torch.sigmoid(z).numpy()

    def risks(self, features: np.ndarray) -> np.ndarray:
        """P(the small model alone fails), float64 (n,), of raw feature rows (n, 15); errors of `predict`."""
        risks: np.ndarray = self.predict(features)[:, 0]
        return risks

    def benefits(self, features: np.ndarray) -> np.ndarray:
        """p_SLM − p_LLM, float64 (n,) in [−1, 1]: how much the LLM's acting now lowers P(failure); errors of `predict`."""
        predicted = self.predict(features)
        benefits: np.ndarray = predicted[:, OUTPUTS.index("slm")] - predicted[:, OUTPUTS.index("llm")]
        return benefits

    def risk(self, row: np.ndarray) -> float:
        """P(failure) of one feature row (15,)."""
        return float(self.risks(row[None, :])[0])


def episode_mean(values: torch.Tensor, episode: torch.Tensor, episodes: int) -> torch.Tensor:
    """Mean of each episode's values, (E,); `values` and `episode` (n,)."""
    zero = torch.zeros(episodes, dtype=values.dtype)
    counts = torch.bincount(episode, minlength=episodes)
    return zero.index_add(0, episode, values) / counts


def brier_loss(p: torch.Tensor, failed: torch.Tensor, episode: torch.Tensor) -> torch.Tensor:
    """Mean over episodes of the mean over their steps of (p_t − y)²."""
    return episode_mean((p - failed[episode]) ** 2, episode, len(failed)).mean()


def soft_escalation(p: torch.Tensor, tau: float, sharpness: float) -> torch.Tensor:
    """e_t = σ((p_t − τ)/T), the step function of p_t > τ with a gradient."""
    return torch.sigmoid((p - tau) / sharpness)


def scaled_cost(p: torch.Tensor, episode: torch.Tensor, episodes: int, tau: float, sharpness: float) -> torch.Tensor:
    """(E[cost] − c_SLM)/(c_LLM − c_SLM) of a step = mean soft escalation, in [0, 1], episodes weighing the same."""
    return episode_mean(soft_escalation(p, tau, sharpness), episode, episodes).mean()


def soft_failure_rates(
    p: torch.Tensor, failed: torch.Tensor, episode: torch.Tensor, seed: torch.Tensor, tau: float, sharpness: float
) -> torch.Tensor:
    """F_z = mean over the seed's episodes of (1 − S)·Π_t (1 − σ((p_t − τ)/T)), (Z,); `seed` (E,) holds 0 … Z − 1.

    1 − S = `failed`. The product is the chance that no step is escalated, taken in logs: log(1 − σ(u)) = −softplus(u).
    """
    log_kept = torch.zeros(len(failed), dtype=p.dtype).index_add(0, episode, -softplus((p - tau) / sharpness))
    return episode_mean(failed * log_kept.exp(), seed, int(seed.max()) + 1)


def soft_cvar(rates: torch.Tensor, alpha: float) -> torch.Tensor:
    """CVaR_α = mean of the ⌈α|Z|⌉ largest of `rates` (Z,); its gradient reaches those seeds alone."""
    return rates.topk(worst_count(alpha, len(rates))).values.mean()


def actor_brier_loss(
    logits: torch.Tensor, by_llm: torch.Tensor, failed: torch.Tensor, agreed: torch.Tensor, rate: float
) -> torch.Tensor:
    """½ · mean over steps of Σ_a w_a·(p_a − y)²; ``logits`` (n, 2) of small model and LLM, the others (n,).

    An outcome counts for the actor who acted, weighted by 1/P(he acts) = 1/(1 − rate) or 1/rate; where both would have
    done the same it is the outcome of either, with weight 1, and says without noise that the two do not differ there.
    """
    squared = (torch.sigmoid(logits) - failed[:, None]) ** 2
    acted = torch.where(by_llm > 0, squared[:, 1] / rate, squared[:, 0] / (1 - rate))
    return torch.where(agreed > 0, squared.sum(1), acted).mean() / 2


def fit_risk(
    rollouts: Rollouts, explored: Explored | None, settings: RiskSettings, seed: int
) -> tuple[RiskModel, list[dict[str, float]]]:
    """Train on SLM-only rollouts, full batch with AdamW; returns the uncalibrated model and a history row a step.

    Without ``explored`` only the first output is trained, and `RiskModel.benefits` means nothing.

    The games must not be those the policy was trained on: it hardly fails there, and nothing is learnt. Where all episodes
    end alike, only the benefit is (see `constant_risk`).
    """
    features = check_features(rollouts.features)
    failed = torch.tensor(rollouts.failed, dtype=torch.float32)
    episode = torch.tensor(rollouts.episode, dtype=torch.long)
    seeds = torch.tensor(np.unique(rollouts.seed, return_inverse=True)[1], dtype=torch.long)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = RiskModel(settings.dropout)
    model.standardise(features)
    inputs = torch.tensor(features, dtype=torch.float32)
    coin = None if explored is None else [
        torch.tensor(part, dtype=torch.float32)
        for part in (explored.features, explored.by_llm, explored.failed, explored.agreed)
    ]  # fmt: skip
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    rho = torch.zeros((), requires_grad=True)
    dual = torch.optim.Adam([rho], lr=settings.dual_lr, maximize=True)
    history = []
    model.train()
    for step in range(1, settings.steps + 1):
        p = torch.sigmoid(model(inputs)[:, 0])
        brier = brier_loss(p, failed, episode)
        cost = scaled_cost(p, episode, len(failed), settings.tau, settings.sharpness)
        worst = soft_cvar(
            soft_failure_rates(p, failed, episode, seeds, settings.tau, settings.sharpness), settings.alpha
        )
        loss = brier + settings.cost_weight * cost
        if settings.constrained:  # one Lagrangian: the network descends on it, ρ ascends
            loss = loss + softplus(rho) * (worst - settings.epsilon)
        multiplier = softplus(rho).item() if settings.constrained else 0.0
        if explored is not None and coin is not None:
            loss = loss + actor_brier_loss(model(coin[0])[:, 1:], coin[1], coin[2], coin[3], explored.rate)
        optimiser.zero_grad()
        dual.zero_grad()
        loss.backward()
        optimiser.step()
        dual.step()
        history.append(
            {"step": step, "brier": brier.item(), "cost": cost.item(), "cvar": worst.item(), "lambda": multiplier}
        )
    torch.set_rng_state(generator_state)  # a caller's random numbers do not depend on whether a router was fitted
    return model.eval(), history


def constraint_told(history: Sequence[Mapping[str, float]], epsilon: float) -> str:
    """A sentence on whether the CVaR constraint bound: at how many training steps of `fit_risk` CVaR exceeded ε."""
    values = [row["cvar"] for row in history]
    above = sum(value > epsilon for value in values)
    return (
        f"The CVaR constraint (at most {epsilon:g}) {'bound' if above else 'never bound'}: above it at {above} of "
        f"{len(values)} training steps, largest {max(values):.3f}."
    )


def both_outcomes(rollouts: Rollouts) -> bool:
    """Whether some episodes failed and some did not."""
    return len(np.unique(rollouts.failed)) > 1


def constant_risk(model: RiskModel, rollouts: Rollouts) -> None:
    """Make the risk (failures + 1)/(episodes + 2) whatever the features, where all of E episodes ended alike, in place.

    Laplace's rule of succession: one kind of outcome tells nothing apart, and E of it do not make it certain.
    """
    rate = (float(rollouts.failed.sum()) + 1) / (len(rollouts.failed) + 2)
    final = model.layers[-1]
    assert isinstance(final, nn.Linear)
    with torch.no_grad():
        final.weight[0] = 0.0
        final.bias[0] = float(logit(rate))
        model.temperature.fill_(1.0)


def calibrate(model: RiskModel, rollouts: Rollouts) -> None:
    """Temperature scaling (Guo et al. 2017) on episodes the model was not fitted on, changing it in place.

    Least episode-weighted log loss of σ(z/T + b); b undoes the level shift that cost and constraint leave and goes into
    the last layer's bias, so the form stays σ(z/T). T > 0: the order of steps, hence the escalation at a matched rate,
    does not change. BadInput where all episodes end alike.
    """
    if not both_outcomes(rollouts):
        raise BadInput("rollouts.failed: expected failed and successful episodes, found only one kind")
    with torch.inference_mode():
        model.eval()
        z = model(torch.tensor(check_features(rollouts.features), dtype=torch.float32))[:, 0].double().numpy()
    y = np.asarray(rollouts.failed, dtype=float)[rollouts.episode]
    weight = 1.0 / np.bincount(rollouts.episode)[rollouts.episode] / len(rollouts.failed)

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        slope, shift = np.exp(parameters[0]), parameters[1]
        u = slope * z + shift
        gradient = weight * (expit(u) - y)
        value = float((weight * (np.logaddexp(0.0, u) - y * u)).sum())
        return value, np.array([(gradient * slope * z).sum(), gradient.sum()])

    found = minimize(loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=[(-5, 5), (-20, 20)])
    temperature = float(np.exp(-found.x[0]))
    final = model.layers[-1]
    assert isinstance(final, nn.Linear)
    with torch.no_grad():
        final.bias[0] += float(found.x[1]) * temperature
        model.temperature.fill_(temperature)


def save_risk(model: RiskModel, folder: Path, settings: RiskSettings, facts: dict[str, Any]) -> None:
    """Write model.safetensors and, last, risk.json: digest, feature names, settings, `facts` (thresholds, data)."""
    told = {**facts, "router": "step-router", "features": list(NAMES), "settings": asdict(settings)}
    save_described(model.state_dict(), folder, WEIGHTS, DESCRIPTION, told)


def load_risk(folder: Path) -> tuple[RiskModel, dict[str, Any]]:
    """A saved router and its risk.json; BadInput names a file that is missing, unreadable, changed since or too old."""
    folder = Path(folder)
    state, description = read_described(folder, "risk router", WEIGHTS, DESCRIPTION, "calibrate")
    names = description.get("features")
    if names != list(NAMES):
        raise BadInput(f"risk router {folder}: features in {DESCRIPTION} are {names}, expected {list(NAMES)}")
    model = RiskModel()
    fill(model, state, f"risk router {folder}: {WEIGHTS}", "calibrate")
    return model.eval(), description


def stack(parts: Sequence[Rollouts]) -> Rollouts:
    """Several sets of rollouts as one, episode numbers shifted; e.g. with and without log-probabilities."""
    offsets = np.cumsum([0, *(len(part.failed) for part in parts[:-1])])
    return Rollouts(
        features=np.concatenate([part.features for part in parts]),
        episode=np.concatenate([part.episode + offset for part, offset in zip(parts, offsets, strict=True)]),
        failed=np.concatenate([part.failed for part in parts]),
        seed=np.concatenate([part.seed for part in parts]),
    )
