"""Evaluations of several training seeds taken together: over new questions, and over new trainings."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from routewright.evaluation.bootstrap import RESAMPLES, Estimate, macro_interval

Pairs = Sequence[tuple[np.ndarray, np.ndarray]]
"""A value of two rows on each of a seed's questions, (n,) and (n,), a pair a seed."""


@dataclass(frozen=True)
class Records:
    """What a row made of each question of an evaluation, in their order: reward and generated tokens, (n,)."""

    reward: np.ndarray
    tokens: np.ndarray


def read_records(file: Path) -> dict[str, Records]:
    """{row: its records} of a file that the evaluation wrote; none where there is no such file."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            found[told["row"]].append((told["reward"], told["tokens"]))
    return {row: Records(*np.array(values).T) for row, values in found.items()}


def pooled_difference(pairs: Pairs, seed: int) -> Estimate:
    """Mean over the seeds of the mean of a − b, every seed weighing the same; the interval resamples questions within seeds.

    It holds for these trainings; what another one may give is `over_trainings`.
    """
    differences = [a - b for a, b in pairs]
    groups = [number for number, values in enumerate(differences) for _ in values]
    return macro_interval(np.concatenate(differences), groups, seed)


def over_trainings(pairs: Pairs) -> Estimate:
    """Mean of a − b with Student's 95 % interval over the seeds' means, (mean ± t · s / √seeds): what a further training
    may give. ``n`` counts trainings; ValueError with fewer than two.
    """
    means = [float(np.mean(a - b)) for a, b in pairs]
    if len(means) < 2:
        raise ValueError("over_trainings: expected two trainings or more")
    mean, error = float(np.mean(means)), float(np.std(means, ddof=1) / np.sqrt(len(means)))
    half = float(stats.t.ppf(0.975, len(means) - 1)) * error
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=len(means))


def tokens_saved(pairs: Pairs, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """1 − tokens of a ÷ tokens of b, both means over seeds of a question's mean; a and b are resampled together.

    ValueError where b generated nothing.
    """
    generator = np.random.default_rng(seed)
    means, drawn = np.zeros(2), np.zeros((resamples, 2))
    for a, b in pairs:
        both = np.stack([a, b], axis=1)
        means += both.mean(axis=0)
        drawn += generator.multinomial(len(a), np.full(len(a), 1 / len(a)), size=resamples) @ both / len(a)
    if means[1] == 0:
        raise ValueError("tokens_saved: expected a row that generated tokens to compare with")
    low, high = np.quantile(1 - drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return Estimate(mean=float(1 - means[0] / means[1]), low=float(low), high=float(high), n=sum(len(a) for a, _ in pairs))
