"""KServe predictors of the trained routers. Stands on the routers' inference parts only: nothing here trains."""
