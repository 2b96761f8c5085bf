"""A deployment on the test cluster whose waits are short."""

from __future__ import annotations

from typing import Any

from serving.promotion.deployment import Deployment

IMAGE = "registry.example/routewright/serve@sha256:" + "a" * 64
DEPLOY = {"namespace": "models", "service": "search-router", "mode": "Knative", "image": IMAGE}
QUICK = {"ready_s": 0.3, "hold_s": 0, "poll_s": 0.01}


def deployment_with(mode: str = "Knative", **canary: Any) -> Deployment:
    """A deployment on the test cluster."""
    return Deployment.model_validate({**DEPLOY, "mode": mode, "canary": {**QUICK, **canary}})
