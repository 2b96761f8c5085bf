"""Proposals that outlive a process: where a small model writes its actions, one decision takes it seconds."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from routewright.step_router.features import Candidate
from routewright.step_router.situations import Proposer, Situation


@dataclass
class Remembered:
    """A proposer whose written actions are kept in ``folder``, so that no play and no later start writes them again.

    Listed actions pass by. Several processes may share the folder: each reads what is there when it begins, and appends
    to a file of its own. For another policy or verifier use another folder.
    """

    proposer: Proposer
    folder: Path
    _known: dict[str, list[Candidate]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                    self._known[row["situation"]] = [Candidate(**candidate) for candidate in row["candidates"]]
                except (ValueError, KeyError, TypeError):
                    continue  # cut off by a kill: written again
        self._own = self.folder / f"{secrets.token_hex(8)}.jsonl"

    def propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        """The proposer's candidates, asked for one situation at a time where they have to be written."""
        listed = [situation for situation in situations if situation.observation.admissible]
        told = iter(self.proposer.propose(listed) if listed else [])
        return [next(told) if s.observation.admissible else self._written(s) for s in situations]

    def _written(self, situation: Situation) -> list[Candidate]:
        key = hashlib.sha256(json.dumps(asdict(situation)).encode()).hexdigest()
        if key not in self._known:
            (candidates,) = self.proposer.propose([situation])
            self.folder.mkdir(parents=True, exist_ok=True)
            row = {"situation": key, "candidates": [asdict(candidate) for candidate in candidates]}
            with self._own.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self._known[key] = candidates
        return self._known[key]
