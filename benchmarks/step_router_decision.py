"""What a decision of the step router costs on one core, beside the features it reads.

    python benchmarks/step_router_decision.py [--decisions 500]

Medians over single decisions (batch 1), in milliseconds and as a ratio to the same network in bare numpy, timed in turn
with it. `client` is what an agent calls: candidates checked, features, risk, paced budgets of an episode and of a day.
A decision must cost at most 2 ms beyond the features; the last line says whether it does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import erf, expit
from torch import nn

from routewright.step_router.budget import EpisodeBudget, escalate
from routewright.step_router.client import Decision, StepRouter
from routewright.step_router.features import Candidate, Context, PastStep, compute_features
from routewright.step_router.risk import RiskModel

BOUND_MS = 2.0


def context(rng: np.random.Generator, words: int = 80, history: int = 15, candidates: int = 8) -> Context:
    """A late step of an episode: 8 candidates of 12 tokens, 15 earlier observations of 80 words."""

    def text(n: int) -> str:
        return " ".join(f"word{i}" for i in rng.integers(0, 400, n))

    return Context(
        objective=text(40),
        observation=text(words),
        candidates=[Candidate(text(4), (-rng.random(12)).tolist(), float(rng.random())) for _ in range(candidates)],
        step=history,
        max_steps=history + 5,
        history=[PastStep(text(4), text(words), float(rng.random())) for _ in range(history)],
    )


def bare_network(model: RiskModel) -> Callable[[np.ndarray], float]:
    """The same arithmetic in numpy, without checks."""
    layers = [
        (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy()) for layer in model.layers
        if isinstance(layer, nn.Linear)
    ]  # fmt: skip
    mean, scale, temperature = model.mean.numpy(), model.scale.numpy(), model.temperature.item()

    def risk(row: np.ndarray) -> float:
        x = np.clip((row.astype(np.float32) - mean) * scale, -5, 5)
        for i, (weight, bias) in enumerate(layers):
            x = x @ weight + bias
            if i < len(layers) - 1:
                x = 0.5 * x * (1 + erf(x / np.sqrt(2)))
        return float(expit(x[0] / temperature))

    return risk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=500)
    decisions = parser.parse_args().decisions
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    contexts = [context(rng) for _ in range(20)]
    rows = np.stack([compute_features(c) for c in contexts])
    model = RiskModel()
    model.standardise(rows)
    model.eval()
    bare = bare_network(model)
    assert np.allclose(model.risks(rows), [bare(row) for row in rows], atol=1e-5)
    past = model.risks(rows).tolist()
    router = StepRouter(model, "", 0.4, 20, 1.0, 50.0, past * 50, calls_per_day=10**9, decisions_per_day=2e9)

    def decide(i: int) -> bool:
        return escalate(model.risk(rows[i]), 5, EpisodeBudget(3, 0.4, 20, past))

    def client(i: int) -> Decision:
        episode = router.episode(contexts[i].objective, contexts[i].max_steps, calls=3)
        episode._history.extend(contexts[i].history)
        return episode.decide(contexts[i].observation, contexts[i].candidates)

    parts: dict[str, Callable[[int], object]] = {
        "bare numpy network": lambda i: bare(rows[i]),
        "risk": lambda i: model.risk(rows[i]),
        "decision (risk, budget)": decide,
        "features": lambda i: compute_features(contexts[i]),
        "client (all of it)": client,
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for i in range(decisions):
        for name, part in parts.items():
            start = time.perf_counter()
            part(i % len(contexts))
            times[name].append(1000 * (time.perf_counter() - start))
    medians = {name: float(np.median(values)) for name, values in times.items()}
    reference = medians["bare numpy network"]
    print(f"{'':26}{'median ms':>10}{'ratio':>8}")
    for name, median in medians.items():
        print(f"{name:26}{median:10.3f}{median / reference:8.1f}")
    decision = medians["client (all of it)"] - medians["features"]
    print(f"a decision beyond the features: {decision:.3f} ms, bound {BOUND_MS} ms: {decision <= BOUND_MS}")


if __name__ == "__main__":
    main()
