"""What a stage prints, on its way to the terminal and to its log; and the events the local runner reads.

``ROUTEWRIGHT_EVENTS`` (``tty`` or ``plain``) is set by the local runner, which then finds one JSON event a line on
stdout, everything a stage prints included: line-wise pipes would garble a progress bar.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

EVENT = "::routewright:: "
# Progress bars print from their own thread.
ONE_EVENT_AT_A_TIME = threading.Lock()


def emit(**event: Any) -> None:
    """Send one event to the local runner; nothing where there is none (in a pod)."""
    if "ROUTEWRIGHT_EVENTS" not in os.environ or sys.__stdout__ is None:
        return
    try:
        with ONE_EVENT_AT_A_TIME:
            sys.__stdout__.write(EVENT + json.dumps(event) + "\n")
            sys.__stdout__.flush()
    except BrokenPipeError:
        # The runner was killed: stop at once, before a new run works in the same folder.
        os._exit(1)


def stop_when_orphaned() -> None:
    """Ask once a second whether the local runner still reads; without it the stage would go on unseen."""
    if "ROUTEWRIGHT_EVENTS" not in os.environ:
        return

    def beat() -> None:
        while True:
            time.sleep(1)
            emit()

    threading.Thread(target=beat, daemon=True).start()


class Console(io.TextIOBase):
    """stdout and stderr of a stage: all of it goes to the runner or the pod's log, its lines to a file as well."""

    def __init__(self, terminal: TextIO, lines: PlainLines) -> None:
        self._terminal, self._lines = terminal, lines

    def write(self, text: str) -> int:
        if "ROUTEWRIGHT_EVENTS" in os.environ:
            emit(text=text)
        else:
            self._terminal.write(text)
        self._lines.write(text)
        return len(text)

    def flush(self) -> None:
        self._terminal.flush()

    def isatty(self) -> bool:
        return os.environ.get("ROUTEWRIGHT_EVENTS") == "tty"


class PlainLines:
    """What a terminal would show after all overwriting, as plain lines in a file: progress bars leave one line each."""

    TOKEN = re.compile(r"\x1b\[(\d*)A|(\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07)|(\r)|(\n)|([^\x1b\r\n]+|\x1b)")
    SCREEN = 100

    def __init__(self, file: TextIO) -> None:
        self._file, self._rows, self._row, self._overwrite = file, [""], 0, False

    def write(self, text: str) -> None:
        for up, escape, carriage, newline, words in self.TOKEN.findall(text):
            if words:
                self._rows[self._row] = words if self._overwrite else self._rows[self._row] + words
                self._overwrite = False
            elif carriage:
                self._overwrite = True
            elif newline:
                self._row, self._overwrite = self._row + 1, self._row + 1 < len(self._rows)
                if self._row == len(self._rows):
                    self._rows.append("")
            elif escape in ("\x1b[2K", "\x1b[K"):
                self._rows[self._row] = ""
            elif not escape:
                self._row, self._overwrite = max(0, self._row - int(up or 1)), True
        while len(self._rows) > self.SCREEN and self._row > 0:
            self._file.write(self._rows.pop(0).rstrip() + "\n")
            self._row -= 1

    def close(self) -> None:
        rest = "\n".join(row.rstrip() for row in self._rows).rstrip("\n")
        self._file.write(rest + "\n" if rest else "")
        self._file.flush()


@contextlib.contextmanager
def console_to(log: Path) -> Iterator[None]:
    """While the body runs, append what it prints to ``log``, and pass it on."""
    with log.open("a", encoding="utf-8") as file:
        lines = PlainLines(file)
        out, err = Console(sys.stdout, lines), Console(sys.stderr, lines)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                yield
            finally:
                lines.close()
