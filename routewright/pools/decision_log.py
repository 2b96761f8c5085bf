"""What a served router logged, joined with what came of it: decisions and, on lines of their own, outcomes.

A line with a ``query`` is a decision, one with ``request_id`` and ``outcome`` but no ``query`` feedback on it; of several,
the last counts. A log FILE is read together with what it was rotated to: FILE.000001, FILE.000002 … A folder is a log
that several servers write, each its own FILE.jsonl. A server may go on writing, rotating and pruning while a log is read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from routewright.errors import BadInput
from routewright.pools.pool import numbered_lines

_log = logging.getLogger(__name__)
_PART = ".[0-9][0-9][0-9][0-9][0-9][0-9]"


def rotated(path: Path) -> list[Path]:
    """The files that a log was rotated to, oldest first."""
    return sorted(file for file in path.parent.glob(path.name + _PART) if file.is_file())


def log_files(path: Path) -> list[Path]:
    """The files of a log, what each was rotated to before it: of FILE, or of every FILE.jsonl in a folder."""
    return [part for file in _logs(path) for part in [*rotated(file), file]]


def _logs(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    # A FILE that is being rotated has parts only, for a moment.
    return sorted({*path.glob("*.jsonl"), *(part.with_suffix("") for part in path.glob("*.jsonl" + _PART))})


def log_lines(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """File, line number and line of all that a log holds, oldest first; BadInput where it cannot be read.

    Each FILE gives what was in it and its parts when its first line was read, whatever becomes of them meanwhile.
    """
    for file in _logs(path):
        for part, lines in _opened(file):
            for number, line in lines:
                yield part, number, line
                if not line.endswith(b"\n"):  # being written: its rest would pass for a line
                    break


def _opened(file: Path) -> list[tuple[Path, Iterator[tuple[int, bytes]]]]:
    """The lines of FILE and its parts, oldest first, all open: that they are renamed or deleted no longer matters."""
    while True:
        parts = rotated(file)
        opened: list[tuple[Path, Iterator[tuple[int, bytes]]]] = []
        for part in [*parts, file]:
            lines = numbered_lines(part)
            try:
                opened.append((part, chain(list(islice(lines, 1)), lines)))  # the first line opens the file
            except BadInput as error:  # pruned since it was listed, or FILE between the two renames of a rotation
                if not isinstance(error.__context__, FileNotFoundError) or not rotated(file):
                    raise
        if rotated(file)[-1:] == parts[-1:]:  # else FILE is not the one that follows these parts
            return opened


def _rows(path: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    for file, number, line in log_lines(path):
        try:
            row = json.loads(line)
        except ValueError:
            if not line.endswith(b"\n"):
                _log.warning("%s, line %d: the last line is torn and left out", file, number)
                continue
            raise BadInput(f"{file}, line {number}: expected a JSON object") from None
        if not isinstance(row, dict):
            raise BadInput(f"{file}, line {number}: expected a JSON object, found {type(row).__name__}")
        yield file, number, row


def read_decisions(path: Path) -> Iterator[dict[str, Any]]:
    """The decisions of a log, file by file, each with its ``outcome`` where there is one.

    BadInput names file and line of one that is not JSON, or whose outcome is none; a last line without its newline was
    being written, or cut off by a kill, and is left out with a warning.
    """
    path = Path(path)
    outcomes = {}
    for file, number, row in _rows(path):
        if "query" not in row:
            if not isinstance(row.get("request_id"), str) or not isinstance(row.get("outcome"), dict):
                raise BadInput(f"{file}, line {number}: expected a query, or a request_id and its outcome")
            outcomes[row["request_id"]] = row["outcome"]
    for _, _, row in _rows(path):
        if "query" in row:
            known = outcomes.get(row.get("request_id"))
            yield row if known is None else {**row, "outcome": known}


def write_step_feedback(path: Path, out: Path) -> int:
    """Write a step router's log as the feedback log that `step_router.client.read_feedback` reads; returns the entries.

    An outcome counts for every decision of its episode; what has none is left out.
    """
    rows = [row for row in read_decisions(path) if row.get("router") == "step-router"]
    ended: dict[str, float] = {}
    for row in rows:
        if row.get("outcome"):
            ended[row.get("episode", row["request_id"])] = next(iter(row["outcome"].values()))
    kept = (
        "request_id", "step", "router", "model_version", "features", "risk", "benefit", "threshold", "escalate", "explored",
        "propensity", "timestamp",
    )  # fmt: skip
    return _write(out, (
        {**{name: row[name] for name in kept}, "episode": episode, "outcome": ended[episode]}
        for row in rows
        if (episode := row.get("episode", row["request_id"])) in ended
    ))  # fmt: skip


def _write(out: Path, rows: Iterator[dict[str, Any]]) -> int:
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    count = 0
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    os.replace(partial, out)
    return count
