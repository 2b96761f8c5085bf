"""The risk router as MLflow loads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from routewright.errors import BadInput
from routewright.step_router.features import NAMES
from routewright.step_router.pyfunc import _load_pyfunc
from routewright.step_router.risk import EVIDENCE, RiskModel, RiskSettings, save_risk


def features(count: int) -> np.ndarray:
    rows = np.random.default_rng(0).normal(size=(count, len(NAMES)))
    rows[:, EVIDENCE] = 0.0
    return rows


def save(folder: Path, threshold: float | None) -> RiskModel:
    """A router whose operating threshold is not the only one."""
    torch.manual_seed(0)
    model = RiskModel().eval()
    model.standardise(features(50))
    thresholds = {"budget": 0.9, "guaranteed": threshold}
    facts = {"thresholds": thresholds, "operating": "guaranteed", "c_slm": 1.0, "c_llm": 50.0, "max_steps": 10}
    save_risk(model, folder, RiskSettings(), facts)
    return model


def test_predictions_are_the_model_s_risks_and_escalate_above_the_threshold(tmp_path: Path) -> None:
    rows = features(20)
    model = save(tmp_path, 0.5)
    risks, benefits = model.risks(rows), model.benefits(rows)
    threshold = float(np.sort(benefits)[11])
    save(tmp_path, threshold)
    table = pd.DataFrame(rows, columns=list(NAMES), index=range(100, 120))[[*reversed(NAMES)]]
    answer = _load_pyfunc(str(tmp_path)).predict(table)
    assert answer["risk"].tolist() == risks.tolist()
    assert answer["benefit"].tolist() == benefits.tolist()
    assert answer["escalate"].tolist() == (benefits > threshold).tolist()
    assert answer["escalate"].sum() == 8, "a benefit that equals the threshold is not escalated"
    assert answer.index.tolist() == table.index.tolist()


def test_without_a_threshold_every_step_is_escalated(tmp_path: Path) -> None:
    save(tmp_path, None)
    answer = _load_pyfunc(str(tmp_path)).predict(pd.DataFrame(features(3), columns=list(NAMES)))
    assert answer["escalate"].tolist() == [True, True, True]


def test_a_feature_that_is_not_finite(tmp_path: Path) -> None:
    save(tmp_path, 0.5)
    table = pd.DataFrame(features(2), columns=list(NAMES))
    table.loc[1, "entropy"] = np.nan
    with pytest.raises(BadInput, match=r"features\[1\]\.entropy: expected a finite number"):
        _load_pyfunc(str(tmp_path)).predict(table)


def test_an_operating_threshold_that_is_not_there(tmp_path: Path) -> None:
    save_risk(RiskModel(), tmp_path, RiskSettings(), {"thresholds": {}, "operating": "bayes", "c_slm": 1.0, "c_llm": 50.0,
                                                      "max_steps": 10})  # fmt: skip
    with pytest.raises(BadInput, match=r"risk\.json: operating: expected one of"):
        _load_pyfunc(str(tmp_path))
