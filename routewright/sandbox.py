"""Runs untrusted code and commands: no network, a scratch folder, a clean environment, limits, nothing left behind.

The walls are Linux namespaces (`routewright.jail`), made by root or by any user. Where they are refused nothing runs
(`NoWalls`), unless ``ROUTEWRIGHT_SANDBOX=open`` says that the machine may be lost: then only the limits hold. Such a
sandbox is no boundary against hostile code; the result's ``isolation`` says which walls stood, and without ``user`` the
code can even stop the processes of whoever runs it.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Literal

from routewright.errors import BadInput
from routewright.jail import PR_SET_DUMPABLE, libc

HOME = "/app"  # where the scratch folder appears inside
FLOOD = 64 << 20  # a command that prints more bytes is stopped
GRACE_S = 5.0  # beyond the wall limit, before the sandbox's own first process is killed
MAX_COMMAND = 100_000  # characters; the kernel takes 128 KiB an argument
ISOLATED = ("python3", "-P", "-s")  # -I but for -E: the environment is the sandbox's own, and its PYTHONHASHSEED must count
ALLOWED = "ROUTEWRIGHT_SANDBOX"  # the environment variable; "open" lets code run where the walls are refused

REFUSED = (
    "sandbox: this machine refuses the namespaces that keep code which a model wrote from the network and from your files "
    "and secrets: allow user namespaces, use a Docker engine (for task folders that bring an image), or set "
    f"{ALLOWED}=open on a machine that may be lost"
)

Ended = Literal["exit", "wall", "memory", "disk", "output", "lost"]


class NoWalls(BadInput):
    """The sandbox has run nothing, since the machine refuses its walls."""


@dataclass(frozen=True)
class Limits:
    """What one run may use. CPU, address space, file size and open files count per process, the rest per sandbox.

    ``memory_bytes`` bounds each process's address space and what all of them hold together, ``disk_bytes`` the scratch
    folders with what is open without a name, memfds too (both sampled). ``output_bytes`` is kept of the output, its
    beginning and its end.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 64 << 20
    disk_bytes: int = 256 << 20
    processes: int = 64
    output_bytes: int = 16_000


@dataclass(frozen=True)
class Result:
    """How a run ended.

    ``exit_code`` is 128 + signal for a killed command. ``ended``: by itself ("exit"), at a limit ("wall", "memory",
    "disk", "output"), or without word from the sandbox ("lost"). ``output`` is stdout and stderr as they came.
    ``isolation`` holds "network", "processes", "files" and "user": the walls that stood.
    """

    exit_code: int
    ended: Ended
    output: str
    printed_bytes: int
    isolation: tuple[str, ...]
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.exit_code == 0


class Sandbox:
    """A scratch folder and the runs in it; files stay between runs, processes do not. Use as a context manager.

    Inside, the scratch folder is /app (the working folder and HOME), /tmp is private too, and the rest is the read-only
    system. Without the "files" wall the scratch folder has its outside path: use relative paths. ``namespaces=False``
    is a machine that refuses the walls.
    """

    def __init__(self, limits: Limits | None = None, namespaces: bool = True) -> None:
        self.limits = limits or Limits()
        self._namespaces = namespaces
        self._base = Path(tempfile.mkdtemp(prefix="routewright-sandbox-"))
        # a user of its own, from a range that no distribution gives out, so that the process limit counts it alone
        self._uid = 61_000 + secrets.randbelow(3_900) if os.geteuid() == 0 else os.geteuid()
        self._gid = self._uid if os.geteuid() == 0 else os.getegid()
        os.chmod(self._base, 0o711)
        for name in ("app", "tmp", "root"):
            (self._base / name).mkdir(mode=0o700)
            os.chown(self._base / name, self._uid, self._gid)

    @property
    def folder(self) -> Path:
        """The scratch folder as seen from outside; what lies in it may be a trap (links, pipes): use `read`."""
        return self._base / "app"

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove the scratch folder, however deep it is, also where its folders were locked by chmod; never raises."""
        for command in (("rm", "-rf"), ("chmod", "-R", "u+rwx"), ("rm", "-rf")):
            if self._base.exists():
                with suppress(OSError):
                    quiet = subprocess.DEVNULL
                    subprocess.run([*command, str(self._base)], stdin=quiet, stdout=quiet, stderr=quiet, check=False)

    def run(
        self, command: str | Sequence[str], wall_s: float | None = None, readonly: Mapping[str, Path] | None = None
    ) -> Result:
        """Run a shell command line or an argument list in the scratch folder; never raises for what it does.

        `NoWalls`, and nothing has run, where the walls are refused and ``ROUTEWRIGHT_SANDBOX`` is not "open".
        ``readonly`` maps absolute paths inside to files or folders outside, seen by this run alone and only behind the
        "files" wall.
        """
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        if any("\0" in part or len(part) > MAX_COMMAND for part in argv):
            refusal = f"a command must be shorter than {MAX_COMMAND} characters and hold no NUL"
            return Result(126, "exit", refusal, len(refusal), (), 0.0)
        limits = self.limits if wall_s is None else replace(self.limits, wall_s=wall_s)
        order = self._order(argv, limits, readonly or {})
        if order["open"]:  # else a command of the same user reads this process's environment in /proc
            libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        receiver, sender = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("jail.py"))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={}, pass_fds=(sender,), start_new_session=True, cwd="/",
            )  # fmt: skip
        finally:
            os.close(sender)
        with process, open(receiver, "rb") as reports:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it died at once: "lost"
                process.stdin.write(json.dumps({**order, "report": sender}).encode())
                process.stdin.close()
            start = time.monotonic()
            output, printed = self._watch(process, limits)
            told = reports.read()
        wall = time.monotonic() - start
        if not told:
            return Result(128 + signal.SIGKILL, "lost", output, printed, (), wall)
        report = json.loads(told)
        if report["ended"] == "refused":
            raise NoWalls(REFUSED)
        return Result(report["exit_code"], report["ended"], output, printed, tuple(report["isolation"]), wall)

    def _order(self, argv: list[str], limits: Limits, readonly: Mapping[str, Path]) -> dict[str, object]:
        prefix = sys.base_prefix
        seen = {} if f"{prefix}/".startswith("/usr/") else {prefix: prefix}
        seen.update({target: str(Path(source).resolve()) for target, source in readonly.items()})
        path = ":".join(dict.fromkeys([f"{prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]))
        environment = {
            "PATH": path, "HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC", "TERM": "dumb",
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
        }  # fmt: skip
        outside = {"HOME": str(self.folder), "TMPDIR": str(self._base / "tmp")}
        return {
            "argv": argv, "env": environment, "open_env": outside, "cwd": HOME,
            "root": str(self._base / "root"), "readonly": seen,
            "writable": {HOME: str(self.folder), "/tmp": str(self._base / "tmp")},
            "uid": self._uid, "gid": self._gid, "namespaces": self._namespaces, "open": os.environ.get(ALLOWED) == "open",
            "wall_s": limits.wall_s, "memory_bytes": limits.memory_bytes, "disk_bytes": limits.disk_bytes,
            "processes": limits.processes,
            "rlimits": {
                "CPU": limits.cpu_s, "AS": limits.memory_bytes, "FSIZE": limits.file_bytes, "NOFILE": 256, "CORE": 0
            },
        }  # fmt: skip

    def _watch(self, process: subprocess.Popen[bytes], limits: Limits) -> tuple[str, int]:
        """Collect the output until the sandbox ends; ask it to stop when it floods, kill it when it overstays."""
        assert process.stdout is not None
        half = limits.output_bytes // 2
        head, tail, printed = bytearray(), bytearray(), 0
        deadline, flooded = time.monotonic() + limits.wall_s + GRACE_S, False
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(0.05):
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    if not chunk:
                        break
                    printed += len(chunk)
                    taken = chunk[: half - len(head)] if len(head) < half else b""
                    head += taken
                    tail = (tail + chunk[len(taken) :])[-half:]
                elif process.poll() is not None:  # a survivor may hold the pipe open
                    break
                if printed > FLOOD and not flooded:
                    flooded, deadline = True, time.monotonic() + GRACE_S
                    os.killpg(process.pid, signal.SIGTERM)
                elif time.monotonic() > deadline:
                    os.killpg(process.pid, signal.SIGKILL)
                    break
        process.wait()
        left_out = printed - len(head) - len(tail)
        gap = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return bytes(head + gap + tail).decode(errors="replace"), printed

    def write(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        """Put a file into the scratch folder (relative path); ValueError for a path that leads out, also by a link."""
        folder, name = self._parent(path, create=True)
        try:
            with suppress(FileNotFoundError):  # a link or pipe left there by a command is not written through
                os.unlink(name, dir_fd=folder)
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
            with open(file, "wb") as opened:
                opened.write(content.encode() if isinstance(content, str) else content)
                os.fchmod(opened.fileno(), mode)
                os.fchown(opened.fileno(), self._uid, self._gid)
        finally:
            os.close(folder)

    def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        """At most ``limit`` bytes of a regular file in the scratch folder; None if there is none (a link is none)."""
        try:
            folder, name = self._parent(path, create=False)
        except (OSError, ValueError):
            return None
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            return None
        finally:
            os.close(folder)
        with open(file, "rb") as opened:
            return opened.read(limit) if stat.S_ISREG(os.fstat(opened.fileno()).st_mode) else None

    def _parent(self, path: str, create: bool) -> tuple[int, str]:
        parts = PurePosixPath(path).parts
        if not parts or PurePosixPath(path).is_absolute() or ".." in parts:
            raise ValueError(f"{path}: expected a relative path within the scratch folder")
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        for part in parts[:-1]:
            try:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder)
                        os.chown(part, self._uid, self._gid, dir_fd=folder, follow_symlinks=False)
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except NotADirectoryError:
                raise ValueError(f"{path}: {part} is a link or a file, expected a folder") from None
            finally:
                os.close(folder)
            folder = below
        return folder, parts[-1]


@cache
def check_walls() -> None:
    """`NoWalls` where a sandbox would run nothing here; tried once per process, before time is spent on what needs one."""
    with Sandbox() as sandbox:
        sandbox.run("true")
