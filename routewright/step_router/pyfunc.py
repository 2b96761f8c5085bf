"""How MLflow loads a risk router: `mlflow.pyfunc.load_model(uri).predict(table)`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from routewright.step_router.features import NAMES

if TYPE_CHECKING:
    import pandas as pd

    from routewright.step_router.risk import RiskModel


class RiskRouterModel:
    """Rows of the 15 named features in; P(failure), benefit and whether to escalate at the operating threshold out."""

    def __init__(self, model: RiskModel, threshold: float) -> None:
        self._model, self._threshold = model, threshold

    def predict(self, table: pd.DataFrame) -> pd.DataFrame:
        """Columns risk, in [0, 1], benefit, in [−1, 1], and escalate, one row a decision.

        BadInput names a feature that is not finite.
        """
        import pandas as pd

        alone, slm, llm = self._model.predict(table[list(NAMES)].to_numpy(dtype=float)).T
        columns = {"risk": alone, "benefit": slm - llm, "escalate": slm - llm > self._threshold}
        return pd.DataFrame(columns, index=table.index)


def _load_pyfunc(path: str) -> RiskRouterModel:
    """MLflow calls this with the folder of the model's files."""
    from routewright.step_router.client import StepRouter
    from routewright.step_router.risk import load_risk

    model, _ = load_risk(Path(path))
    return RiskRouterModel(model, StepRouter.load(path).threshold)
