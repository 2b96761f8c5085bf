"""Promotion: gates, registration, canary, aliases, in this order, and the artifact that says why.

Every part finds out for itself what is done already, so a promotion that was killed is finished by repeating it, and one
that is finished changes nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from routewright import model_registry as registry
from routewright import tracking
from routewright.errors import BadInput, StageFailed
from routewright.evaluation.gates import Check, Evidence, GateBounds, promotion_gates
from serving.promotion.decision import Decision, log_decision, record_decision, recorded_decision, write_decision
from serving.promotion.deployment import Deployment, check_size
from serving.promotion.evidence import ROWS, answer_again, description_of, read_evidence, read_summary
from serving.promotion.inference_service import (
    ROLLED_BACK,
    VERSION,
    inference_service,
    manifest_diff,
    manifest_text,
    predictor,
)
from serving.promotion.kserve_api import annotation, connect_cluster, deployed, reachable
from serving.promotion.latency import latency_check, not_measured
from serving.promotion.live import canary_percent, canary_version, check_mode
from serving.promotion.model_card import model_card
from serving.promotion.rollback import redeploy, restore
from serving.promotion.rollout import roll_out

if TYPE_CHECKING:
    from mlflow import MlflowClient

Router = Literal["search-router", "step-router", "ensemble-router"]
Say = Callable[[str], None]
LOG_MODEL = {
    "search-router": tracking.log_search_model, "step-router": tracking.log_risk_model,
    "ensemble-router": tracking.log_ensemble_model,
}  # fmt: skip
PENDING = "(assigned when registered)"
"""Stands for the version of a model that a dry run did not register."""


@dataclass(frozen=True)
class Candidate:
    """A trained router and its evaluation; with ``dataset`` and ``examples`` a search champion answers the same queries.

    Step and ensemble champions decide the inputs in ``examples`` in turn with it, for the latency gate alone.
    """

    router: Router
    model: Path
    evaluation: Path
    dataset: Path | None = None
    examples: Path | None = None


def candidate_of_run(router: Router, out: Path) -> Candidate:
    """The candidate in the output folder of ``routewright run``; BadInput where a part is missing."""
    summary = read_summary(out)
    if summary.pipeline != router:
        raise BadInput(f"{out / 'summary.json'}: pipeline: expected {router}, found {summary.pipeline}")
    if "model" not in summary.artifacts or "evaluate" not in summary.artifacts:
        raise BadInput(f"{out / 'summary.json'}: artifacts: expected model and evaluate, as routewright run writes them")
    places = {name: out / path for name, path in summary.artifacts.items()}
    return Candidate(
        router, places["model"], places["evaluate"], places.get("fetch-dataset"), places.get("synthesize")
    )  # fmt: skip


def promote(
    candidate: Candidate,
    deployment: Deployment | None,
    bounds: GateBounds,
    out: Path,
    say: Say,
    dry_run: bool = False,
    challenger: bool = False,
) -> Decision:
    """Judge, register and roll out a candidate; decision.json, decision.md and MODEL_CARD.md are written to ``out``.

    Without a deployment the model is registered and becomes the champion, nothing is served; with ``challenger`` it only
    gets that alias. A dry run writes nothing but says the manifest and how it differs from what is deployed. BadInput for
    faulty input; StageFailed where the cluster is left in between.
    """
    if challenger and deployment is not None:
        raise BadInput("challenger: expected no deployment file, a challenger is registered and not served")
    router, digest = candidate.router, registry.folder_digest(candidate.model)
    description = description_of(router, candidate.model)
    own_version = str(description["model_version"])
    summary = read_summary(candidate.evaluation)
    check_model(candidate.model, deployment)
    live = check_cluster(deployment)
    client = registry.registry_client()
    champion = registry.version_at(client, router, registry.CHAMPION)
    other = champion.version if champion is not None and champion.digest != digest else None
    if champion is not None and champion.digest == digest:
        checks: list[Check] = []
    else:
        begun = checks_of_begun(client, router, digest, other, live)
        checks = begun or judge(candidate, own_version, client, champion, bounds)
    decision = Decision(
        router=router, outcome="promoted", reason="", model_version=own_version, digest=digest, champion=other,
        checks=checks, decided=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip
    card = model_card(router, description, summary, checks, digest, other is None)
    failed = [check.name for check in checks if not check.passed]
    if failed:
        decision = decision.model_copy(
            update={"outcome": "refused", "gate": True, "reason": f"said no: {'; '.join(failed)}"}
        )
    elif dry_run:
        decision = decision.model_copy(update={"outcome": "would promote", "reason": "all gates passed; dry run"})
    if dry_run:
        if deployment is not None:
            show_manifest(client, candidate, digest, deployment, say)
        return decision
    key = tracking.settings_hash({"digest": digest, "champion": other, "bounds": bounds.model_dump()})
    # Not once: what was refused or taken back, and rolled back later, may be promoted yet.
    with tracking.stage_run("promote", key, {"digest": digest[:16]}, None, router, once=False):
        if not failed:
            decision = carry_out(client, candidate, card, decision, deployment, say, challenger)
        write_decision(decision, card, out)
        log_decision(out)
    return decision


def check_cluster(deployment: Deployment | None) -> dict[str, Any] | None:
    """The InferenceService, None where there is none; BadInput for a cluster that cannot be reached, or in another mode."""
    live = None if deployment is None else look_at(deployment)
    if deployment is not None and live is not None:
        check_mode(live, deployment)
    return live


def checks_of_begun(
    client: MlflowClient, router: Router, digest: str, champion: str | None, live: dict[str, Any] | None
) -> list[Check]:
    """The gates that a candidate passed before its rollout began; empty where none has, or against another champion.

    Judged anew, with another p99 ratio, it could be refused half-way, and its canary would stay open with nobody watching.
    """
    found = registry.version_with_digest(client, router, digest)
    if live is None or found is None or found.version != (canary_version(live) or annotation(live, VERSION)):
        return []
    recorded = recorded_decision(client, found)
    return recorded.checks if recorded.champion == champion else []


def judge(
    candidate: Candidate,
    own_version: str,
    client: MlflowClient,
    champion: registry.RegisteredVersion | None,
    bounds: GateBounds,
) -> list[Check]:
    """The gates of a candidate against the champion, or absolute ones where there is none."""
    router, (row, simple) = candidate.router, ROWS[candidate.router]
    own = read_evidence(router, candidate.evaluation, row, own_version)
    if champion is None:
        baseline = read_evidence(router, candidate.evaluation, simple, simple)
        checks = promotion_gates(own, None, baseline, bounds)
        untimed = own.p99_ms() is None
        return [*checks, not_measured("no champion to compare with", True, bounds)] if untimed else checks
    theirs = f"version {champion.version}"
    if router != "search-router":
        checks = promotion_gates(own, recorded_evidence(client, champion), None, bounds)
        with champion_files(client, champion) as folder:
            folders = {own_version: candidate.model, theirs: folder}
            return [*checks, latency_check(router, candidate.examples, folders, bounds)]
    if candidate.dataset is None or candidate.examples is None:
        return promotion_gates(own, recorded_evidence(client, champion), None, bounds)
    with champion_files(client, champion) as folder, tempfile.TemporaryDirectory() as work:
        folders = {own_version: candidate.model, theirs: folder}
        found = answer_again(candidate.dataset, candidate.examples, folders, Path(work))
    own = found[own_version].model_copy(update={"metrics": own.metrics})
    return promotion_gates(own, found[theirs], None, bounds)


@contextmanager
def champion_files(client: MlflowClient, champion: registry.RegisteredVersion) -> Iterator[Path]:
    """A folder with the champion's files; BadInput where they do not match the digest of the registry."""
    import mlflow

    with tempfile.TemporaryDirectory() as temporary:
        location = registry.files_uri(client, champion.name, champion.version)
        folder = Path(mlflow.artifacts.download_artifacts(location, dst_path=temporary))
        found = registry.folder_digest(folder)
        if champion.digest and found != champion.digest:
            raise BadInput(
                f"model '{champion.name}' version {champion.version}: its files have the digest {found[:16]}…, the registry "
                f"says {champion.digest[:16]}…"
            )
        yield folder


def recorded_evidence(client: MlflowClient, champion: registry.RegisteredVersion) -> Evidence:
    """What was recorded of the champion when it was registered; BadInput where nothing was."""
    import mlflow
    from mlflow.exceptions import MlflowException

    run = client.get_model_version(champion.name, champion.version).run_id
    try:
        file = Path(mlflow.artifacts.download_artifacts(run_id=run, artifact_path="evidence.json"))
        return Evidence.model_validate_json(file.read_text(encoding="utf-8"))
    except (MlflowException, OSError, ValueError) as error:
        raise BadInput(
            f"model '{champion.name}' version {champion.version}: its run has no evidence.json to compare with "
            f"({type(error).__name__})"
        ) from None


def check_model(model: Path, deployment: Deployment | None) -> None:
    """`check_size` of the files that a model is served from; nothing without a deployment."""
    if deployment is not None:
        check_size(sum(file.stat().st_size for file in registry.served_files(model)), deployment)


def carry_out(
    client: MlflowClient,
    candidate: Candidate,
    card: str,
    decision: Decision,
    deployment: Deployment | None,
    say: Say,
    challenger: bool = False,
) -> Decision:
    """Register, roll out and set the aliases of a candidate that passed."""
    router, digest = candidate.router, decision.digest
    tags = {"routewright.model_version": decision.model_version, "git_sha": tracking.git_sha()}
    found = registry.version_with_digest(client, router, digest)
    if found is None:
        # Before the version is there: a repetition takes a version that it finds as complete.
        evidence = read_evidence(router, candidate.evaluation, ROWS[router][0], decision.model_version)
        log_text(evidence.model_dump_json(), "evidence.json")
        found = registry.register(client, router, candidate.model, LOG_MODEL[router], card, tags)
        say(f"registered {router} version {found.version}")
    version = found.version
    serving = registry.CHAMPION in found.aliases
    update: dict[str, Any] = {"version": version}
    if not serving:
        record_decision(client, router, version, decision)
        registry.set_challenger(client, router, version)
    if challenger and not serving:
        reason = f"all gates passed: version {version} is the challenger; it is registered and nothing is served"
        return decision.model_copy(update={**update, "outcome": "challenger", "reason": reason})
    if deployment is not None:
        uri = registry.concrete_uri(client, router, version, deployment.volumes)
        manifest = inference_service(deployment, predictor(deployment, router, version, digest, uri))
        rollout = roll_out(connect_cluster(), deployment, manifest, say)
        update |= {"rollout": asdict(rollout), "gate": rollout.gate}
        if rollout.outcome == "aborted":
            registry.drop_challenger(client, router, version)
            return decision.model_copy(update={**update, "outcome": "aborted", "reason": rollout.reason})
    registry.set_champion(client, router, version)
    told = served_sentence(update.get("rollout"), deployment)
    same = serving and (deployment is None or update["rollout"]["outcome"] == "unchanged")
    reason = f"version {version} is already the champion" if same else f"all gates passed: version {version} is the champion"
    outcome = "unchanged" if same else "promoted"
    return decision.model_copy(update={**update, "outcome": outcome, "reason": f"{reason}; {told}"})


def served_sentence(rollout: dict[str, Any] | None, deployment: Deployment | None) -> str:
    """What became of the service."""
    if rollout is None or deployment is None:
        return "no deployment was given, so it is registered and nothing is served"
    return f"{deployment.service} in {deployment.namespace}: {rollout['reason']}"


def show_manifest(client: MlflowClient, candidate: Candidate, digest: str, deployment: Deployment, say: Say) -> None:
    """Say the InferenceService of a candidate and how it differs from what is deployed."""
    found = registry.version_with_digest(client, candidate.router, digest)
    if found is None:
        version, uri = "0", f"s3://{PENDING}"
    else:
        version = found.version
        uri = registry.concrete_uri(client, candidate.router, version, deployment.volumes)
    manifest = inference_service(deployment, predictor(deployment, candidate.router, version, digest, uri))
    live = look_at(deployment)
    say(manifest_text(manifest))
    say(manifest_diff(live, manifest) or "no difference from what is deployed")


def roll_back(router: Router, deployment: Deployment | None, say: Say) -> str:
    """Traffic and aliases back to the previous version; the sentence that says what happened. Repeated, it changes nothing.

    The champion is afterwards what has all traffic, also where the service served another version than the champion.
    BadInput where there is nothing to go back to; StageFailed where the cluster is left in between.
    """
    client = registry.registry_client()
    now = registry.aliases(client, router)
    if registry.CHAMPION not in now:
        raise BadInput(f"model '{router}': no version has the alias {registry.CHAMPION}, nothing to roll back")
    if deployment is not None:
        canary = canary_version(look_at(deployment))
        taken_back = restore(connect_cluster(), deployment, say)
        live = look_at(deployment) or {"metadata": {}}
        served, left = annotation(live, VERSION), {canary, annotation(live, ROLLED_BACK)}
        # The champion is the previous version too where the aliases were being moved as this was killed.
        if served == now[registry.CHAMPION] != now.get(registry.PREVIOUS):
            # What was taken back had not become the champion: a rollout under way, or the aliases were done before.
            if taken_back or now.get(registry.CHALLENGER) in left or registry.PREVIOUS not in now:
                for version in left:
                    registry.drop_challenger(client, router, version)
                return f"version {served} is the champion and has all traffic"
            served = deploy_previous(client, router, deployment, say)
        elif served and served != now.get(registry.PREVIOUS):
            client.set_registered_model_alias(router, registry.PREVIOUS, served)
        say(f"version {served} has all traffic")
    champion = registry.restore_previous(client, router)
    told = "" if deployment is not None else "; no deployment was given, so nothing served was touched"
    return f"version {champion.version} is the champion again{told}"


def deploy_previous(client: MlflowClient, router: Router, deployment: Deployment, say: Say) -> str:
    """Serve the version ``previous`` again, from the registry, where the service does not know it; that version."""
    version = registry.version_at(client, router, registry.PREVIOUS)
    assert version is not None
    uri = registry.concrete_uri(client, router, version.version, deployment.volumes)
    spec = predictor(deployment, router, version.version, version.digest, uri)
    say(f"version {version.version} starts again, and has all traffic once it is ready")
    redeploy(connect_cluster(), deployment, inference_service(deployment, spec))
    return version.version


def look_at(deployment: Deployment) -> dict[str, Any] | None:
    """The InferenceService as it is now, None where there is none; BadInput where no cluster answers."""
    api = connect_cluster()
    found: dict[str, Any] | None = reachable(lambda: deployed(api, deployment))
    return found


def log_text(text: str, name: str) -> None:
    """A text as an artifact of the active run."""
    import mlflow

    mlflow.log_text(text, name)


def status(router: Router, deployment: Deployment | None) -> dict[str, Any]:
    """Aliases and versions of a router, and what its InferenceService serves, as JSON."""
    client = registry.registry_client()
    found: dict[str, Any] = {"router": router, "aliases": registry.aliases(client, router)}
    if deployment is not None:
        found["service"] = service_status(deployment)
    return found


def service_status(deployment: Deployment) -> dict[str, Any] | None:
    """Version, traffic and readiness of the InferenceService; None where there is none."""
    live = look_at(deployment)
    if live is None:
        return None
    conditions = (live.get("status") or {}).get("conditions") or []
    ready = next((condition["status"] for condition in conditions if condition["type"] == "Ready"), "Unknown")
    percent = canary_percent(live, deployment.mode)
    return {
        "name": deployment.service, "namespace": deployment.namespace, "mode": deployment.mode, "ready": ready,
        "version": annotation(live, VERSION), "canary": percent, "url": (live.get("status") or {}).get("url"),
    }  # fmt: skip


def raise_unless_done(decision: Decision) -> None:
    """StageFailed for a rollout that failed without a gate's doing."""
    if decision.outcome == "aborted" and not decision.gate:
        raise StageFailed(f"{decision.router}: {decision.reason}; traffic and aliases are as before")
