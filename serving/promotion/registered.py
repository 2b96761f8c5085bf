"""Promotion of a version that is in the registry already: a challenger, or one that was taken back.

It has been judged against a champion, last when its run was promoted. That counts while there is no other champion.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from routewright import model_registry as registry
from routewright import tracking
from routewright.errors import BadInput
from serving.promotion.decision import Decision, log_decision, recorded_decision, write_decision
from serving.promotion.deployment import Deployment
from serving.promotion.promote import (
    Candidate,
    Router,
    Say,
    carry_out,
    champion_files,
    check_cluster,
    check_model,
    show_manifest,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient


def promote_version(
    router: Router, number: str, deployment: Deployment | None, out: Path, say: Say, dry_run: bool = False
) -> Decision:
    """Roll out a registered version and make it the champion; decision.json, decision.md and MODEL_CARD.md go to ``out``.

    Its gates are those of the last decision for it; the champion itself has none and takes new settings of its
    deployment. BadInput where there is no such version, or it was compared with another champion than the one there is.
    """
    check_cluster(deployment)
    client = registry.registry_client()
    version, card = registered(client, router, number)
    champion = registry.version_at(client, router, registry.CHAMPION)
    judged = recorded_decision(client, version)
    if champion is not None and champion.version == version.version:
        judged = judged.model_copy(update={"champion": None, "checks": []})
    elif judged.champion != (now := None if champion is None else champion.version):
        then, there = (f"version {other}" if other else "no champion" for other in (judged.champion, now))
        raise BadInput(
            f"model '{router}' version {number}: it was compared with {then}, the champion is {there}; expected the folder "
            "of its run, with --run, to be judged again"
        )
    with champion_files(client, version) as folder:
        candidate = Candidate(router, folder, folder)
        check_model(folder, deployment)
        if dry_run:
            if deployment is not None:
                show_manifest(client, candidate, version.digest, deployment, say)
            return judged.model_copy(update={"outcome": "would promote", "reason": "all gates passed; dry run"})
        key = tracking.settings_hash({"digest": version.digest, "champion": judged.champion, "version": number})
        with tracking.stage_run("promote", key, {"digest": version.digest[:16]}, None, router, once=False):
            decision = carry_out(client, candidate, card, judged, deployment, say)
            write_decision(decision, card, out)
            log_decision(out)
    return decision


def registered(client: MlflowClient, router: str, number: str) -> tuple[registry.RegisteredVersion, str]:
    """A version and its model card; BadInput where there is none."""
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_model_version(router, number)
    except MlflowException as error:
        raise BadInput(f"model '{router}' version {number}: not in the registry ({error.error_code})") from None
    return registry.described(client, found), found.description or ""
