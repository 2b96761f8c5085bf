"""How far probabilities can be taken at their word: Brier score, reliability bins, expected calibration error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class ReliabilityBin:
    """The predictions with low < probability ≤ high (the first bin holds 0 too)."""

    low: float
    high: float
    n: int
    probability: float
    """Mean predicted probability of the bin."""
    frequency: float
    """Share of the bin's predictions that came true."""


def _checked(probabilities: ArrayLike, outcomes: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    predicted = np.asarray(probabilities, dtype=float)
    happened = np.asarray(outcomes, dtype=float)
    if predicted.ndim != 1 or predicted.shape != happened.shape or predicted.size == 0:
        raise ValueError(
            f"calibration needs two non-empty vectors of one length, got shapes {predicted.shape} and {happened.shape}"
        )
    if not ((predicted >= 0) & (predicted <= 1)).all():
        raise ValueError("a probability lies outside [0, 1] or is NaN")
    if not np.isin(happened, (0.0, 1.0)).all():
        raise ValueError("an outcome is neither 0 nor 1")
    return predicted, happened


def brier_score(probabilities: ArrayLike, outcomes: ArrayLike) -> float:
    """Mean squared difference of probability and outcome (Brier 1950), in [0, 1]; vectors (n,), outcomes 0 or 1."""
    predicted, happened = _checked(probabilities, outcomes)
    return float(np.mean((predicted - happened) ** 2))


def reliability_bins(probabilities: ArrayLike, outcomes: ArrayLike, bins: int = 15) -> list[ReliabilityBin]:
    """Equal-width bins over [0, 1], empty ones left out, in ascending order."""
    predicted, happened = _checked(probabilities, outcomes)
    edges = np.linspace(0.0, 1.0, bins + 1)
    index = np.searchsorted(edges[1:-1], predicted, side="left")
    return [
        ReliabilityBin(
            low=float(edges[i]),
            high=float(edges[i + 1]),
            n=int(members.sum()),
            probability=float(predicted[members].mean()),
            frequency=float(happened[members].mean()),
        )
        for i in range(bins)
        if (members := index == i).any()
    ]


def expected_calibration_error(probabilities: ArrayLike, outcomes: ArrayLike, bins: int = 15) -> float:
    """ECE = Σ_b n_b/n · |frequency_b − probability_b| over equal-width bins (Guo et al. 2017), in [0, 1]."""
    filled = reliability_bins(probabilities, outcomes, bins)
    total = sum(b.n for b in filled)
    return sum(b.n * abs(b.frequency - b.probability) for b in filled) / total
