"""What a decision of the ensemble router costs on one core, beside the backbone pass that every answer begins with.

    python benchmarks/ensemble_decision.py [--decisions 200] [--agents 16]

Medians over single decisions, in milliseconds: from the query state to the activated agents (heads of all agents,
familiarity, order, cut-off). `separate` evaluates the heads one by one as modules; `max |Δd|` is against that. Bounds at 16
agents: 2 ms at hidden 128, 5 ms at 576; the last line says whether the default layout (int8) keeps them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from routewright.ensemble_router.activation import activated
from routewright.ensemble_router.familiarity import FamiliarityHeads, FusedHeads, distance, familiarity

BOUNDS_MS = {128: 2.0, 576: 5.0}
LAMBDA, TAU = 2.0, 0.7

Distances = Callable[[torch.Tensor], torch.Tensor]


def separate(heads: FamiliarityHeads) -> Distances:
    """Each predictor and target called alone."""

    @torch.inference_mode()
    def distances(state: torch.Tensor) -> torch.Tensor:
        pairs = zip(heads.predictors, heads.targets, strict=True)

        def out(head: torch.nn.Module) -> torch.Tensor:
            first, second, norm = (head.get_submodule(name) for name in ("first", "second", "norm"))
            return second(torch.nn.functional.silu(first(norm(state))))

        return torch.stack([distance(out(predictor), out(target)) for predictor, target in pairs])

    return distances


def decide(distances: Distances, state: torch.Tensor) -> list[int]:
    """The agents that answer."""
    f = familiarity(distances(state), LAMBDA).numpy()
    return activated(f, f, TAU)


def milliseconds(distances: Distances, states: torch.Tensor) -> np.ndarray:
    """Of each decision, after ten that warm up."""
    for state in states[:10]:
        decide(distances, state)
    spent = []
    for state in states:
        start = time.perf_counter()
        decide(distances, state)
        spent.append((time.perf_counter() - start) * 1e3)
    return np.array(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=200)
    parser.add_argument("--agents", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = []
    print(f"{arguments.agents} agents, {arguments.decisions} decisions, one thread, torch {torch.__version__}")
    print(f"{'hidden':>6} {'layout':<16} {'median':>7} {'p95':>7} {'best':>7} {'max |Δd|':>9}")
    for hidden, bound in BOUNDS_MS.items():
        heads = FamiliarityHeads(2 * hidden, [f"agent-{number}" for number in range(arguments.agents)], seed=0)
        states = torch.randn(arguments.decisions, 2 * hidden, generator=torch.Generator().manual_seed(0))
        reference = separate(heads)
        layouts: list[tuple[str, Distances]] = [
            ("separate", reference), ("fused float32", FusedHeads(heads, torch.float32)),
            ("fused bfloat16", FusedHeads(heads, torch.bfloat16)), ("fused int8", FusedHeads(heads)),
        ]  # fmt: skip
        for name, distances in layouts:
            spent = milliseconds(distances, states)
            off = max(float((distances(state) - reference(state)).abs().max()) for state in states[:50])
            median, p95, best = np.median(spent), np.quantile(spent, 0.95), spent.min()
            print(f"{hidden:>6} {name:<16} {median:>7.2f} {p95:>7.2f} {best:>7.2f} {off:>9.1e}")
        kept.append(f"hidden {hidden}: {median:.2f} ms, bound {bound:g} ms, {'kept' if median <= bound else 'MISSED'}")
    print("; ".join(kept))


if __name__ == "__main__":
    main()
