"""How MLflow loads an ensemble router: `mlflow.pyfunc.load_model(uri).predict(table)`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from routewright.ensemble_router.router import EnsembleRouter


class EnsembleRouterModel:
    """Rows of a query in, one decision a row out."""

    def __init__(self, router: EnsembleRouter) -> None:
        self._router = router

    def predict(self, table: pd.DataFrame) -> list[str]:
        """The decision of every row as JSON."""
        return [json.dumps(asdict(self._router.decide(query))) for query in table["query"]]


def _load_pyfunc(path: str) -> EnsembleRouterModel:
    """MLflow calls this with the folder of the model's files."""
    from routewright.ensemble_router.router import load_ensemble_router

    return EnsembleRouterModel(load_ensemble_router(Path(path)))
