"""The decision of a promotion: what it says, its files, and what the registry keeps of it with the version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from routewright import model_registry as registry
from routewright import tracking
from routewright.errors import BadInput
from routewright.evaluation.gates import Check
from serving.promotion.model_card import checks_markdown

if TYPE_CHECKING:
    from mlflow import MlflowClient

JUDGED = "judged.json"
"""The decision that is kept with a version, as it was before anything was done: what was killed goes on by it."""
Outcome = Literal["promoted", "challenger", "unchanged", "refused", "aborted", "would promote"]


class Decision(BaseModel):
    """``decision.json``: what was decided and why. Exit code 3 for refused, 0 for what was done or is to be done."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    router: str
    outcome: Outcome
    reason: str
    model_version: str
    digest: str
    version: str | None = None
    champion: str | None = None
    """The registry's version that was the champion; None for a first model, which meets absolute gates only."""
    checks: list[Check]
    rollout: dict[str, Any] | None = None
    gate: bool = False
    """A gate or a canary's metric said no."""
    decided: str

    def text(self) -> str:
        """``decision.md``."""
        against = f"the champion, version {self.champion}" if self.champion else "no champion: absolute gates only"
        lines = [
            f"# {self.router}: {self.outcome}", "", self.reason, "",
            f"Candidate `{self.model_version}` (SHA-256 `{self.digest}`), judged against {against}; {self.decided}.", "",
            checks_markdown(self.checks),
        ]  # fmt: skip
        for step in (self.rollout or {}).get("steps", []):
            load = step["candidate"]
            seen = f"{load['requests']:.0f} requests, error rate {load['error_rate']:.1%}" if load else "readiness only"
            lines.append(f"\n{step['percent']} % of the traffic: {seen}.")
        return "\n".join(lines) + "\n"


def write_decision(decision: Decision, card: str, out: Path) -> None:
    """decision.json, decision.md and MODEL_CARD.md."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / registry.MODEL_CARD).write_text(card, encoding="utf-8")
        (out / "decision.md").write_text(decision.text(), encoding="utf-8")
        (out / "decision.json").write_text(decision.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--out {out}: cannot write there ({error.strerror})") from None


def log_decision(out: Path) -> None:
    """The written files as artifacts of the active run."""
    tracking.log_files([out / name for name in ("decision.json", "decision.md", registry.MODEL_CARD)])


def record_decision(client: MlflowClient, name: str, version: str, decision: Decision) -> None:
    """Keep a decision with the version in its run, in place of an earlier one."""
    client.log_text(str(client.get_model_version(name, version).run_id), decision.model_dump_json(), JUDGED)


def recorded_decision(client: MlflowClient, version: registry.RegisteredVersion) -> Decision:
    """The last decision for a version, as it was before anything was done; BadInput where its run has none."""
    import mlflow
    from mlflow.exceptions import MlflowException

    run = client.get_model_version(version.name, version.version).run_id
    try:
        file = Path(mlflow.artifacts.download_artifacts(run_id=run, artifact_path=JUDGED))
        found = Decision.model_validate_json(file.read_text(encoding="utf-8"))
    except (MlflowException, OSError, ValueError) as error:
        raise BadInput(
            f"model '{version.name}' version {version.version}: its run has no judged.json with its gates "
            f"({type(error).__name__})"
        ) from None
    if found.digest != version.digest or not all(check.passed for check in found.checks):
        raise BadInput(f"model '{version.name}' version {version.version}: its judged.json does not say that it passed")
    return found.model_copy(update={"outcome": "promoted", "reason": "", "gate": False, "rollout": None})
