"""Has the traffic changed? Population stability of the routes and a kernel two-sample test of the query embeddings.

The thresholds are the quantiles of both statistics between disjoint random parts of the reference itself, so they need no
distribution and no table; the allowed false alarm rate is halved where both are looked at (Bonferroni).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from routewright.errors import BadInput

ROUTES = "routes.json"
"""In a model's folder: {agent: its first choices on the dev queries}, which the served decisions are compared with."""
MIN_QUERIES = 50
MAX_EMBEDDED = 1000
"""Embeddings of at most so many queries of each side are compared: the kernel's cost is quadratic."""
_SMOOTHING = 0.5  # added to every route's count: a route that one side never took must not make the index infinite


def write_routes(folder: Path, counts: Mapping[str, int]) -> None:
    """Write the first choices on the dev queries into a model's folder."""
    partial = folder / f"{ROUTES}.partial"
    partial.write_text(json.dumps(dict(counts), indent=1), encoding="utf-8")
    os.replace(partial, folder / ROUTES)


@dataclass(frozen=True)
class Drift:
    """What was compared and whether it is drift; ``dataclasses.asdict`` gives JSON.

    ``psi`` is the population stability index of the routes, ``mmd`` the squared maximum mean discrepancy of the embeddings
    (both at least 0), each None where not looked at; ``drifted`` where either is above its threshold. ``shares`` is
    {route: (share of the reference, share of now)}. The index looks at ``window`` of the current queries: at random half as
    many as the reference has, where they are more.
    """

    drifted: bool
    reason: str
    reference: int
    window: int
    false_alarm_rate: float
    psi: float | None
    psi_threshold: float | None
    mmd: float | None
    mmd_threshold: float | None
    shares: dict[str, tuple[float, float]]


def population_stability_index(reference: ArrayLike, current: ArrayLike) -> float:
    """Σ (p − q) ln(p / q) over routes (Kullback's J divergence), of counts (k,) smoothed by ½; at least 0."""
    counts = [np.asarray(side, dtype=float) for side in (reference, current)]
    if counts[0].ndim != 1 or counts[0].shape != counts[1].shape or counts[0].size == 0:
        raise ValueError(f"expected two vectors of counts of the same routes, got {counts[0].shape} and {counts[1].shape}")
    if not all(np.isfinite(side).all() and (side >= 0).all() and side.any() for side in counts):
        raise ValueError("a count is negative or not finite, or a side has no queries at all")
    p, q = ((side + _SMOOTHING) / (side + _SMOOTHING).sum() for side in counts)
    return float(((p - q) * np.log(p / q)).sum())


def gaussian_kernel(embeddings: np.ndarray, bandwidth: float) -> np.ndarray:
    """exp(−‖x − y‖² / (2 bandwidth²)) of all pairs, float (n, n); embeddings (n, d)."""
    return np.asarray(np.exp(-_squared_distances(embeddings) / (2 * bandwidth**2)))


def median_bandwidth(embeddings: np.ndarray) -> float:
    """The median distance of different queries (Gretton et al. 2012); 1 where all embeddings are the same."""
    distances = np.sqrt(_squared_distances(embeddings)[np.triu_indices(len(embeddings), 1)])
    return float(np.median(distances[distances > 0])) if (distances > 0).any() else 1.0


def _squared_distances(embeddings: np.ndarray) -> np.ndarray:
    norms = (embeddings**2).sum(axis=1)
    return np.asarray((norms[:, None] + norms[None, :] - 2 * embeddings @ embeddings.T).clip(0))


def maximum_mean_discrepancy(kernel: np.ndarray, first: ArrayLike) -> float:
    """MMD² between the queries marked True and the others: mean k(x, x′) + mean k(y, y′) − 2 mean k(x, y).

    The V-statistic (Gretton et al. 2012, equation 5) over a kernel matrix (n, n); ``first`` is bool (n,), both kinds occur.
    """
    marked = np.asarray(first, dtype=bool)
    weights = np.where(marked, 1 / marked.sum(), -1 / (~marked).sum())
    return float(weights @ kernel @ weights)


def detect_drift(
    reference_routes: Sequence[str],
    current_routes: Sequence[str],
    reference_embeddings: np.ndarray | None = None,
    current_embeddings: np.ndarray | None = None,
    false_alarm_rate: float = 0.01,
    resamples: int = 1000,
    seed: int = 0,
) -> Drift:
    """Compare current traffic with a reference: the routes taken (names) and, where given, the queries' embeddings (n, d).

    Of unchanged traffic a share of about ``false_alarm_rate`` in (0, 0.5] is called drift. BadInput where a side has fewer
    than 50 queries, routes and embeddings differ in number, or an embedding is not finite.
    """
    if not 0 < false_alarm_rate <= 0.5:
        raise BadInput(f"false alarm rate: expected a number in (0, 0.5], got {false_alarm_rate}")
    for name, count in (("reference", len(reference_routes)), ("current", len(current_routes))):
        if count < MIN_QUERIES:
            raise BadInput(f"{name} traffic: expected at least {MIN_QUERIES} queries, got {count}")
    embedded = _embeddings(reference_embeddings, current_embeddings, len(reference_routes), len(current_routes))
    rng = np.random.default_rng(seed)
    window = min(len(current_routes), len(reference_routes) // 2)
    tests = 1 if embedded is None else 2
    level = 1 - false_alarm_rate / tests

    names = sorted({*reference_routes, *current_routes})
    place = {name: index for index, name in enumerate(names)}
    reference, current = (np.array([place[route] for route in side]) for side in (reference_routes, current_routes))
    psi, psi_threshold = _route_index(reference, current, len(names), window, level, resamples, rng)
    mmd = mmd_threshold = None
    if embedded is not None:
        mmd, mmd_threshold = _embedding_discrepancy(*embedded, level, resamples, rng)

    found = []
    if psi > psi_threshold:
        found.append(f"route shares moved (index {psi:.3f} above {psi_threshold:.3f})")
    if mmd is not None and mmd_threshold is not None and mmd > mmd_threshold:
        found.append(f"queries changed (discrepancy {mmd:.4f} above {mmd_threshold:.4f})")
    shares = {
        name: (float((reference == index).mean()), float((current == index).mean())) for index, name in enumerate(names)
    }
    return Drift(
        drifted=bool(found), reason="; ".join(found) or "no statistic is above its threshold",
        reference=len(reference), window=window, false_alarm_rate=false_alarm_rate,
        psi=psi, psi_threshold=psi_threshold, mmd=mmd, mmd_threshold=mmd_threshold, shares=shares,
    )  # fmt: skip


def _embeddings(
    reference: np.ndarray | None, current: np.ndarray | None, n_reference: int, n_current: int
) -> tuple[np.ndarray, np.ndarray] | None:
    if reference is None and current is None:
        return None
    if reference is None or current is None:
        raise BadInput("embeddings: expected them for the reference and for current traffic, got one of them")
    sides = []
    for name, side, count in (("reference", reference, n_reference), ("current", current, n_current)):
        matrix = np.asarray(side, dtype=float)
        if matrix.ndim != 2 or len(matrix) != count:
            raise BadInput(f"{name} embeddings: expected one row for each of {count} queries, got shape {matrix.shape}")
        if not np.isfinite(matrix).all():
            raise BadInput(f"{name} embeddings: row {int(np.argwhere(~np.isfinite(matrix))[0][0])} is not finite")
        sides.append(matrix)
    if sides[0].shape[1] != sides[1].shape[1]:
        raise BadInput(
            f"embeddings: expected one size, got {sides[0].shape[1]} for the reference and {sides[1].shape[1]} for current "
            "traffic"
        )
    return sides[0], sides[1]


def _route_index(
    reference: np.ndarray,
    current: np.ndarray,
    routes: int,
    window: int,
    level: float,
    resamples: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """The index of the current routes, and its quantile between disjoint parts of the reference of the same sizes."""

    def index_of(rest: np.ndarray, part: np.ndarray) -> float:
        return population_stability_index(np.bincount(rest, minlength=routes), np.bincount(part, minlength=routes))

    null = []
    for _ in range(resamples):
        order = rng.permutation(reference)
        null.append(index_of(order[window:], order[:window]))
    # Sizes as in the resamples, else the statistic of unchanged traffic would not be distributed as theirs.
    found = index_of(rng.permutation(reference)[window:], rng.permutation(current)[:window])
    return found, float(np.quantile(null, level, method="higher"))


def _embedding_discrepancy(
    reference: np.ndarray, current: np.ndarray, level: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """MMD² of the current embeddings, and its quantile between disjoint parts of the reference of the same sizes."""
    drawn = rng.permutation(reference)[: 2 * MAX_EMBEDDED]
    window = min(len(current), len(drawn) // 2, MAX_EMBEDDED)
    bandwidth = median_bandwidth(drawn[:MAX_EMBEDDED])
    kernel = gaussian_kernel(drawn, bandwidth)
    signs = np.full((resamples, len(drawn)), -1 / (len(drawn) - window))
    for row in signs:
        row[rng.permutation(len(drawn))[:window]] = 1 / window
    null = np.einsum("ij,ij->i", signs @ kernel, signs)
    rest = rng.permutation(drawn)[window:]
    both = np.concatenate([rng.permutation(current)[:window], rest])
    found = maximum_mean_discrepancy(gaussian_kernel(both, bandwidth), np.arange(len(both)) < window)
    return found, float(np.quantile(null, level, method="higher"))
