"""What a model must show before it takes traffic: gates on paired queries or episodes and on whole-run numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routewright.errors import BadInput
from routewright.evaluation.bootstrap import Estimate, paired_difference
from routewright.evaluation.calibration import brier_score, expected_calibration_error
from routewright.evaluation.clustered import clustered_difference
from routewright.evaluation.summary import Gate
from routewright.validation import fault

Share = Annotated[float, Field(ge=0, le=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Judged(_Strict):
    """One held-out query or episode; what does not apply is None.

    ``group``: the task of an episode or the document of a query, whose others resemble it: intervals resample groups.
    ``quality`` is NDCG@10 or success, 0..1. ``probability`` is the model's own for ``outcome``, 0 or 1. ``cost`` and
    ``latency_ms`` are those of its decision.
    """

    id: str
    quality: Share
    mismatch: bool | None = None
    slice: str | None = None
    group: str | None = None
    seed: int | None = None
    probability: Share | None = None
    outcome: Annotated[int, Field(ge=0, le=1)] | None = None
    latency_ms: Annotated[float, Field(ge=0)] | None = None
    cost: Annotated[float, Field(ge=0)] | None = None


class Evidence(_Strict):
    """A model's answers to held-out data.

    ``data`` is the digest of that data and of the prices of its costs. ``measured_in`` names the run that took the times:
    latencies of two runs are not compared. ``metrics`` are whole-run numbers (``valid``, ``brier``, ``ece``).
    """

    model_version: str
    data: str
    measured_in: str
    judged: Annotated[list[Judged], Field(min_length=1)]
    metrics: dict[str, float] = {}

    def numbers(self, field: str) -> list[float]:
        """The values of a field where there are any."""
        return [value for judged in self.judged if (value := getattr(judged, field)) is not None]

    def mean(self, field: str) -> float | None:
        """The mean of a field where it has values."""
        values = self.numbers(field)
        return float(np.mean(values)) if values else None

    def p99_ms(self) -> float | None:
        """The 99th percentile of the decisions' latency."""
        values = self.numbers("latency_ms")
        return float(np.percentile(values, 99)) if values else None

    def calibration(self, metric: str) -> float | None:
        """``brier`` or ``ece`` over the queries that have a probability, else the whole run's number."""
        pairs = [(j.probability, j.outcome) for j in self.judged if j.probability is not None and j.outcome is not None]
        if not pairs:
            return self.metrics.get(metric)
        score = brier_score if metric == "brier" else expected_calibration_error
        return score([p for p, _ in pairs], [o for _, o in pairs])

    def worst_seed(self) -> float | None:
        """The lowest mean quality over seeds; None with fewer than two."""
        seeds = {judged.seed for judged in self.judged if judged.seed is not None}
        if len(seeds) < 2:
            return None
        return min(float(np.mean([j.quality for j in self.judged if j.seed == seed])) for seed in seeds)


class GateBounds(_Strict):
    """Bounds of the gates; ``routewright promote --gates FILE`` takes others."""

    margin: Share = Field(default=0.01, description="quality may be this much below the champion's (lower end)")
    mismatch_margin: Share = Field(default=0.02, description="the same on the mismatch subset")
    worst_seed_margin: Share = Field(default=0.02, description="the worst seed's mean quality may be this much lower")
    slice_margin: Share = Field(default=0.05, description="no slice may be surely (upper end) worse by more than this")
    slice_size: int = Field(default=20, ge=2, description="slices with fewer queries, or tasks of episodes, do not count")
    brier_rise: Share = Field(default=0.01, description="Brier score above the champion's")
    ece_rise: Share = Field(default=0.02, description="ECE above the champion's")
    latency_ratio: float = Field(default=1.2, gt=0, description="p99 latency / the champion's, measured in one run")
    cost_ratio: float = Field(default=1.1, gt=0, description="mean cost / the champion's")
    max_ece: Share = Field(default=0.25, description="ECE of a first model")
    max_latency_ms: float = Field(default=180.0, gt=0, description="p99 latency of a first model, ms")
    min_valid: Share = Field(default=1.0, description="share of valid decisions, of every model")


class Check(Gate):
    """A gate with the sentence that says what was compared."""

    why: str


def load_bounds(path: Path) -> GateBounds:
    """The bounds in a YAML file, defaults for those it leaves out; BadInput names file and field."""
    try:
        given = yaml.safe_load(path.read_bytes()) or {}
        return GateBounds.model_validate(given)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}), expected a YAML file of gate bounds") from None
    except ValidationError as error:
        raise BadInput(f"{path}: {fault(error, GateBounds)}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{path}: not YAML ({' '.join(str(error).split())})") from None


def promotion_gates(
    candidate: Evidence, champion: Evidence | None, baseline: Evidence | None, bounds: GateBounds, seed: int = 0
) -> list[Check]:
    """All gates that apply, each with value, bound and reason.

    Against a champion: 95 % paired bootstrap over the same queries, or over the tasks of the same episodes. Without one,
    absolute gates only: better than ``baseline`` (a rule that needs no training, on the same queries), calibrated, fast. A
    gate that applies but cannot be measured has no value and fails.
    """
    checks = (
        _absolute(candidate, baseline, bounds, seed) if champion is None else _relative(candidate, champion, bounds, seed)
    )
    valid = candidate.metrics.get("valid")
    if valid is not None:
        checks.append(_at_least("valid decisions", valid, bounds.min_valid, "share of the candidate's decisions"))
    return checks


def _absolute(candidate: Evidence, baseline: Evidence | None, bounds: GateBounds, seed: int) -> list[Check]:
    checks = []
    if baseline is not None:
        name = f"quality − {baseline.model_version}, lower end"
        better = _paired(name, candidate, baseline, lambda judged: True, 0.0, seed)
        # More than 0: a router that always decides as the baseline does has an interval of [0, 0].
        checks.append(better.model_copy(update={"passed": better.value is not None and better.value > 0}))
    ece, latency = candidate.calibration("ece"), candidate.p99_ms()
    if ece is not None:
        checks.append(_at_most("ECE", ece, bounds.max_ece, "no champion to compare with"))
    if latency is not None:
        checks.append(_at_most("p99 latency, ms", latency, bounds.max_latency_ms, "no champion to compare with"))
    return checks


def _relative(candidate: Evidence, champion: Evidence, bounds: GateBounds, seed: int) -> list[Check]:
    def is_mismatch(judged: Judged) -> bool:
        return judged.mismatch is True

    checks = [_paired("quality − champion, lower end", candidate, champion, lambda judged: True, -bounds.margin, seed)]
    if any(map(is_mismatch, (*candidate.judged, *champion.judged))):
        name = "quality on mismatches − champion, lower end"
        checks.append(_paired(name, candidate, champion, is_mismatch, -bounds.mismatch_margin, seed))
    worst, theirs = candidate.worst_seed(), champion.worst_seed()
    if worst is not None or theirs is not None:
        name, why = "worst seed − champion's", f"mean quality of the worst seed {_shown(worst)}, champion's {_shown(theirs)}"
        difference = None if worst is None or theirs is None else worst - theirs
        checks.append(_at_least(name, difference, -bounds.worst_seed_margin, why))
    if candidate.numbers("slice") or champion.numbers("slice"):
        checks.append(_slices(candidate, champion, bounds, seed))
    for metric, shown, bound in (("brier", "Brier", bounds.brier_rise), ("ece", "ECE", bounds.ece_rise)):
        own, other = candidate.calibration(metric), champion.calibration(metric)
        if own is not None or other is not None:
            rise = None if own is None or other is None else own - other
            checks.append(_at_most(f"{shown} − champion's", rise, bound, f"{_shown(own)}, champion's {_shown(other)}"))
    own, other = candidate.p99_ms(), champion.p99_ms()
    if own is not None or other is not None:
        why = f"{_shown(own)} ms, champion's {_shown(other)} ms"
        if candidate.measured_in != champion.measured_in:
            own, why = None, "not measured in one run, so the machine may explain any difference"
        checks.append(_at_most("p99 latency / champion's", _ratio(own, other), bounds.latency_ratio, why))
    own, other = candidate.mean("cost"), champion.mean("cost")
    if own is not None or other is not None:
        why = f"mean cost {_shown(own)}, champion's {_shown(other)}"
        checks.append(_at_most("cost / champion's", _ratio(own, other), bounds.cost_ratio, why))
    return checks


def _shared(a: Evidence, b: Evidence, wanted: Callable[[Judged], bool]) -> list[tuple[Judged, Judged]] | str:
    """The same wanted queries as both answered them, or why there are none to pair."""
    if a.data != b.data:
        return f"judged on other data or at other prices than {b.model_version} ({a.data[:12]}, {b.data[:12]})"
    theirs = {judged.id: judged for judged in b.judged}
    mine = {judged.id for judged in a.judged}
    if mine != set(theirs):
        return f"judged on other queries than {b.model_version}: {len(mine ^ set(theirs))} are not in both"
    return [(judged, theirs[judged.id]) for judged in a.judged if wanted(judged)] or "no such queries"


def _groups(pairs: Sequence[tuple[Judged, Judged]]) -> list[str]:
    """What is resampled together: the episodes of one task, the queries about one document."""
    return [judged.group or judged.id for judged, _ in pairs]


def _difference(pairs: Sequence[tuple[Judged, Judged]], seed: int) -> Estimate:
    """Mean difference of quality with its interval over queries, or over their groups."""
    own, other = [judged.quality for judged, _ in pairs], [judged.quality for _, judged in pairs]
    groups = _groups(pairs)
    if len(set(groups)) < len(groups):
        return clustered_difference(own, other, groups, seed)
    return paired_difference(own, other, seed)


def _paired(
    name: str, candidate: Evidence, other: Evidence, wanted: Callable[[Judged], bool], bound: float, seed: int
) -> Check:
    pairs = _shared(candidate, other, wanted)
    if isinstance(pairs, str):
        return Check(name=name, passed=False, value=None, bound=bound, why=pairs)
    difference = _difference(pairs, seed)
    why = f"mean {difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}] over {difference.n}"
    return _at_least(name, difference.low, bound, why)


def _slices(candidate: Evidence, champion: Evidence, bounds: GateBounds, seed: int) -> Check:
    """The slice that is most surely worse; judged by the upper end, as the worst of many is often worse by chance."""
    name, found = "worst slice − champion, upper end", []
    for part in sorted({judged.slice for judged in candidate.judged if judged.slice is not None}):
        pairs = _shared(candidate, champion, lambda judged, part=part: judged.slice == part)  # type: ignore[misc]
        if isinstance(pairs, str):
            return Check(name=name, passed=False, value=None, bound=-bounds.slice_margin, why=pairs)
        if len(set(_groups(pairs))) >= bounds.slice_size:
            found.append((_difference(pairs, seed), part))
    if not found:
        why = f"no slice has {bounds.slice_size} queries"
        return Check(name=name, passed=True, value=None, bound=-bounds.slice_margin, why=why)
    worst, part = min(found, key=lambda item: item[0].high)
    why = f"{part}: mean {worst.mean:+.4f} [{worst.low:+.4f}, {worst.high:+.4f}] over {worst.n}; {len(found)} slices"
    return _at_least(name, worst.high, -bounds.slice_margin, why)


def _at_least(name: str, value: float | None, bound: float, why: str) -> Check:
    return Check(name=name, passed=value is not None and value >= bound, value=value, bound=bound, why=why)


def _at_most(name: str, value: float | None, bound: float, why: str) -> Check:
    return Check(name=name, passed=value is not None and value <= bound, value=value, bound=bound, why=why)


def _ratio(own: float | None, other: float | None) -> float | None:
    """own / other; 1 where both are 0, None where it says nothing."""
    if own is None or other is None or (other == 0 and own > 0):
        return None
    return own / other if other else 1.0


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
