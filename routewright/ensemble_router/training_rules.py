"""What the rules that train agents of their own change: who is asked, the margin, λ, and the layers that the heads read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from routewright.ensemble_router.activation import activated
from routewright.ensemble_router.agents import Base
from routewright.ensemble_router.baselines import top_k
from routewright.ensemble_router.familiarity import last_layer, state_layers
from routewright.ensemble_router.profile import EnsembleProfile


def choose(rule: str, f: np.ndarray, s: np.ndarray, tau: float, generator: np.random.Generator) -> list[int]:
    """The agents that answer a training query under a rule; `f` and `s` (N,)."""
    if rule in ("top-1", "top-2"):
        return top_k(s, int(rule[-1]))
    if rule == "all":
        return list(range(len(f)))
    if rule == "random":
        return [int(generator.integers(len(f)))]
    return [0] if rule == "one-model" else activated(f, s, tau)


def margin_of(rule: str, profile: EnsembleProfile) -> float:
    """m of the push; under `no-margin` 2, the largest distance there is: the push never stops."""
    return 2.0 if rule == "no-margin" else profile.router.margin


def lambda_of(rule: str, profile: EnsembleProfile) -> float:
    """λ of f = exp(−λ·d): the profile's, half or double it under the rules that are called so."""
    return profile.router.lam * {"half-lambda": 0.5, "double-lambda": 2.0}.get(rule, 1.0)


def layers_of(rule: str) -> Callable[[int], tuple[int, ...]]:
    """Which layers' states a rule's heads read."""
    return last_layer if rule == "last-layer" else state_layers


def state_width(rule: str, base: Base) -> int:
    """Numbers of a query state under a rule: H a layer."""
    return int(base.model.config.hidden_size) * len(layers_of(rule)(1))
