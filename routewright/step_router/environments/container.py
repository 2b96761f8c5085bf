"""Runs untrusted commands in a Docker container, with the promises of `routewright.sandbox` for tasks that bring an image.

The engine is reached through the ``docker`` command line, so ``DOCKER_HOST`` and contexts hold. A container has no
network, no folder of this machine, few capabilities and bounded memory, CPU, processes and files. Its file system is
a throw-away layer, writable because tasks change the system in it. Building an image runs what its Dockerfile says
with a network and without these limits: build task folders of known origin only.
"""

from __future__ import annotations

import os
import secrets
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from routewright.errors import BadInput
from routewright.sandbox import FLOOD, MAX_COMMAND, Ended, Limits, Result

LABEL = "routewright"  # on every container; those left by a killed machine go with the next run's first look, a day later
LIMITS = Limits(wall_s=120.0, cpu_s=120, memory_bytes=2 << 30, file_bytes=1 << 30, disk_bytes=4 << 30, processes=256)
CALL_S, BUILD_S = 120.0, 1_800.0  # for the engine's answer, and for a build or a download
IDLE_S = 3_600  # a container that nobody removed ends by itself
LOOK_S = 1.0  # between looks at how much a running command has written

# What root needs to own, read and stop its own container's files and processes, as in a Terminal-Bench container.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
# The docker command hands a configured proxy, password included, to containers that do not set these themselves.
PROXIES = tuple(f"{name}_proxy" for name in ("http", "https", "ftp", "no", "all"))
# One output stream, so that lines keep their order; what still runs in the end would hold it open.
SHELL = """\
exec 2>/dev/null
"$(command -v bash || echo sh)" -c "$0" 2>&1
code=$?
kill -9 -1
exit $code
"""
# Outlives this process, whatever ends it: the pipe to its input closes then, and the container goes.
GUARD = 'read _; exec docker rm --force --volumes "$0"'


def _docker(*arguments: str, wall_s: float = CALL_S) -> tuple[bool, str]:
    """Whether the command succeeded, and what it printed: all of its output, or the last line of its error."""
    try:
        done = subprocess.run(["docker", *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=wall_s)
    except FileNotFoundError:
        return False, "the docker command is not installed"
    except subprocess.TimeoutExpired:
        return False, f"no answer within {wall_s:.0f} s"
    told = (done.stderr if done.returncode else done.stdout).decode(errors="replace").strip()
    return not done.returncode, told if not done.returncode else (told.splitlines() or ["no reason given"])[-1]


@cache
def engine_answers() -> bool:
    """Whether a Docker engine can be used from here; asked once per process."""
    if not _docker("version", "--format", "{{.Server.Version}}", wall_s=10.0)[0]:
        return False
    _docker("container", "prune", "--force", "--filter", f"label={LABEL}", "--filter", "until=24h")
    return True


@cache
def image_of(source: str | Path) -> str:
    """The id of an image, built from a Dockerfile (with its folder) or found by name, here or in its registry.

    Done once per process; BadInput where that fails.
    """
    if isinstance(source, Path):
        build = ("build", "--quiet", "--force-rm", "--label", LABEL, "--file", str(source), str(source.parent))
        built, told = _docker(*build, wall_s=BUILD_S)
        if not built:
            raise BadInput(f"{source}: expected a Dockerfile that builds, Docker says: {told}")
        return told.splitlines()[-1]
    here = ("image", "inspect", "--format", "{{.Id}}", "--", source)
    found, told = _docker(*here)
    if not found:
        pulled, reason = _docker("pull", "--quiet", "--", source, wall_s=BUILD_S)
        found, told = _docker(*here) if pulled else (False, reason)
    if not found:
        raise BadInput(f"image {source!r}: expected one that is here or in its registry, Docker says: {told}")
    return told


class Container:
    """A container and the runs in it; files stay between runs, processes do not.

    ``source``: an image's name or a Dockerfile; BadInput where it cannot be started or lacks one of the programs that
    it ``needs``. Commands run as the image's user in its working folder. The disk limit does not see what lands on the
    volumes that an image declares.
    """

    def __init__(self, source: str | Path, needs: Sequence[str] = (), limits: Limits = LIMITS) -> None:
        image, self.limits = image_of(source), limits
        self._name = f"{LABEL}-{secrets.token_hex(8)}"
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, self._name], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
        )  # fmt: skip
        memory = str(limits.memory_bytes)
        started, told = _docker(
            "run", "--detach", "--name", self._name, "--label", LABEL, "--hostname", "task", "--network", "none",
            "--memory", memory, "--memory-swap", memory, "--cpus", "1", "--pids-limit", str(limits.processes),
            "--ulimit", f"cpu={limits.cpu_s}", "--ulimit", f"fsize={limits.file_bytes}", "--ulimit", "core=0",
            "--security-opt", "no-new-privileges", "--cap-drop", "ALL", "--no-healthcheck",
            "--log-driver", "none",  # root can write to the first process's output, and so fill the log of this machine
            *(f"--cap-add={capability}" for capability in CAPABILITIES),
            *(f"--env={name}=" for proxy in PROXIES for name in (proxy, proxy.upper())),
            "--entrypoint", "sleep", image, str(IDLE_S),
        )  # fmt: skip
        for need in needs if started else ():
            if not _docker("exec", self._name, "sh", "-c", f"command -v {need}")[0]:
                started, told = False, f"no {need} in it"
        if not started:
            self.close()
            raise BadInput(f"{source}: expected an image with sleep, sh{''.join(f', {n}' for n in needs)}: {told}")

    def close(self) -> None:
        """Kill what runs in the container and remove it."""
        self._guard.communicate()

    def run(self, command: str | Sequence[str], readonly: Mapping[str, Path] | None = None) -> Result:
        """Run a shell command line or an argument list; never raises for what it does, OSError if the engine fails.

        ``readonly`` maps absolute paths inside to folders outside that are copied in first; such a run is root's.
        """
        argv = ["sh", "-c", SHELL, command] if isinstance(command, str) else list(command)
        if any("\0" in part or len(part) > MAX_COMMAND for part in argv):
            refusal = f"a command must be shorter than {MAX_COMMAND} characters and hold no NUL"
            return Result(126, "exit", refusal, len(refusal), (), 0.0)
        self._must("start", self._name)  # it may have ended while nobody used it
        for target, folder in (readonly or {}).items():
            self._must("exec", "--user", "0", self._name, "rm", "-rf", target)  # what a command may have left there
            self._must("cp", f"{folder.resolve()}/.", f"{self._name}:{target}")
        start = time.monotonic()
        user = ["--user", "0"] if readonly else []
        process = subprocess.Popen(
            ["docker", "exec", *user, self._name, *argv],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        with process:
            try:
                ended, output, printed = self._watch(process)
            finally:
                process.kill()
        if ended == "exit" and self._written() > self.limits.disk_bytes:
            ended = "disk"
        self._must("restart", "--time", "0", self._name)  # ends what the command left running, a fork bomb too
        exit_code = process.returncode if ended == "exit" else 137
        return Result(exit_code, ended, output, printed, ("network", "processes", "files"), time.monotonic() - start)

    def _must(self, *arguments: str) -> str:
        worked, told = _docker(*arguments)
        if not worked:
            raise OSError(f"the Docker engine failed: {told}")
        return told

    def _written(self) -> int:
        return int(self._must("container", "inspect", "--size", "--format", "{{.SizeRw}}", self._name))

    def _watch(self, process: subprocess.Popen[bytes]) -> tuple[Ended, str, int]:
        """Collect the output, its beginning and its end, until the command ends or reaches a limit."""
        assert process.stdout is not None
        half, start = self.limits.output_bytes // 2, time.monotonic()
        head, tail, printed, look = bytearray(), bytearray(), 0, start + LOOK_S
        ended: Ended = "exit"
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while ended == "exit":
                if selector.select(0.05):
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    if not chunk:
                        process.wait()
                        break
                    printed += len(chunk)
                    taken = chunk[: half - len(head)] if len(head) < half else b""
                    head += taken
                    tail = (tail + chunk[len(taken) :])[-half:]
                now = time.monotonic()
                if printed > FLOOD:
                    ended = "output"
                elif now > start + self.limits.wall_s:
                    ended = "wall"
                elif now > look:
                    ended, look = "disk" if self._written() > self.limits.disk_bytes else "exit", now + LOOK_S
        left_out = printed - len(head) - len(tail)
        gap = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return ended, bytes(head + gap + tail).decode(errors="replace"), printed
