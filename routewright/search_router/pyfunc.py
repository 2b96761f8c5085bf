"""How MLflow loads a search router: `mlflow.pyfunc.load_model(uri).predict(table)`."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from routewright.search_router.router import Router


class SearchRouterModel:
    """Rows of (query, reference_date or null) in, one decision a row out."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def predict(self, table: pd.DataFrame) -> list[str]:
        """The decision of every row as JSON; today is the reference date where a row has none."""
        decisions = []
        for row in table.to_dict("records"):
            given = row.get("reference_date")
            reference = date.fromisoformat(given) if isinstance(given, str) else date.today()
            decisions.append(json.dumps(self._router.decide(row["query"], reference).to_json()))
        return decisions


def _load_pyfunc(path: str) -> SearchRouterModel:
    """MLflow calls this with the folder of the model's files."""
    from routewright.search_router.router import load_router

    return SearchRouterModel(load_router(Path(path)))
