"""The first process of a sandbox: it builds the walls, runs one command behind them, and kills what is left.

`routewright.sandbox` runs this file as a script (``python -I -S``), so it imports nothing but the standard library.
Stdin holds the order as JSON, and one JSON report goes to the descriptor that the order names. The chain is script ->
namespace maker -> init (process 1 of the sandbox) -> command; every link dies with the one before it. Where
namespaces are refused the script runs nothing, or, if the order allows that ("open"), the command itself, with limits
and, as root, under a user of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import stat
import sys
import time
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR, MNT_DETACH = -100, 0x8000, 442, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

NO_WALLS = 97  # the namespace maker's exit code where the kernel refuses a namespace or a mount
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
DEVICES = ("null", "zero", "full", "random", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [value.encode() if value is not None else None for value in (source, target, kind, data)]
    _checked(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))


def _bind(source: str, target: str, attributes: int) -> None:
    """Bind a file or folder with all mounts below it, and set the attributes on every one of them."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, MS_BIND | MS_REC)
    if attributes:
        values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
        _checked(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, values, 32))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def enter_namespaces() -> None:
    """Own users, mounts, processes, network, IPC and host name; `map_users` must follow, from outside."""
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    _checked(libc.unshare(flags))


def map_users(pid: int) -> None:
    """Every user keeps its number in the namespace of a process: all of them as root, else only this one."""
    if os.geteuid() != 0:
        _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/uid_map", f"{os.geteuid()} {os.geteuid()} 1")
        _write(f"/proc/{pid}/gid_map", f"{os.getegid()} {os.getegid()} 1")
        return
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            rows = [line.split() for line in file]
        _write(f"/proc/{pid}/{name}", "".join(f"{first} {first} {count}\n" for first, _, count in rows))


def build_root(order: dict[str, Any]) -> None:
    """A file tree of read-only system folders, the scratch folders (read-write) and a fresh /proc; nothing else."""
    root, locked = order["root"], MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=2k,mode=755")
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            _bind(path, root + path, locked | MOUNT_ATTR_RDONLY)
    for target, source in order["readonly"].items():
        _bind(source, root + target, locked | MOUNT_ATTR_RDONLY)
    for target, source in order["writable"].items():
        _bind(source, root + target, locked)
    os.makedirs(root + "/etc", exist_ok=True)
    uid, gid = order["uid"], order["gid"]
    _write(root + "/etc/passwd", f"root:x:0:0::/:/bin/sh\nsandbox:x:{uid}:{gid}::{order['cwd']}:/bin/sh\n")
    _write(root + "/etc/group", f"root:x:0:\nsandbox:x:{gid}:\n")
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}", 0)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    os.symlink("/tmp", root + "/dev/shm")
    os.makedirs(root + "/proc", exist_ok=True)
    _mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # a namespace within could mount memory that nobody counts
    _write(root + "/proc/sys/user/max_user_namespaces", "0")
    os.chdir(root)
    _checked(libc.pivot_root(b".", b"."))
    _checked(libc.umount2(b".", MNT_DETACH))
    _mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _limit(kind: int, value: int) -> None:
    """Soft and hard limit; what is stricter already stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def start_command(order: dict[str, Any], processes: int) -> int:
    """Fork the command: own session, limits, no privileges, no inherited descriptors; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        for name in ("CPU", "AS", "FSIZE", "NOFILE", "CORE"):
            _limit(getattr(resource, f"RLIMIT_{name}"), order["rlimits"][name])
        _limit(resource.RLIMIT_NPROC, processes)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.closerange(3, 1024)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(order["gid"], order["gid"], order["gid"])
            os.setresuid(order["uid"], order["uid"], order["uid"])
        _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        os.umask(0o022)
        os.chdir(order["cwd"])
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and ignored signals stay so over exec
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(order["argv"][0], order["argv"], order["env"])
    except OSError as error:
        os.write(2, f"cannot run {order['argv'][0]}: {error.strerror}\n".encode())
    finally:  # never back into the supervisor's code
        os._exit(127)


def _processes() -> dict[int, int]:
    """Parent of each process in sight."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # gone meanwhile
                continue
    return parents


def _descendants(uid: int | None) -> set[int]:
    """All processes below this one, and all of the sandbox's own user."""
    parents, found, size = _processes(), {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    if uid is not None:
        for pid in parents:
            if _owner(pid) == uid:
                found.add(pid)
    return found - {os.getpid()}


def _memory(pids: set[int]) -> int:
    """Bytes that the processes hold for themselves (resident less shared)."""
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                fields = file.read().split()
        except OSError:  # gone meanwhile
            continue
        pages += max(0, int(fields[1]) - int(fields[2]))
    return pages * resource.getpagesize()


def _nameless(pids: set[int]) -> int:
    """Bytes in files without a name, removed ones and memfds, that the processes hold open."""
    held = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # gone meanwhile
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    file = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(file.st_mode) and file.st_nlink == 0:
                        held[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(held.values())


def _disk(folders: list[str], pids: set[int], stop: int) -> int:
    """Bytes on disk below the folders, at least 4 KiB a file, and in the processes' nameless files.

    Counting ends above ``stop``. What cannot be looked into, such as a folder too deep for a path, is above it.
    """
    total, stack = _nameless(pids), list(folders)
    while stack and total <= stop:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                        if entry.is_dir(follow_symlinks=False):
                            stack.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            continue
        except OSError:
            return stop + 1
    return total


def supervise(child: int, order: dict[str, Any], alone: bool, folders: list[str]) -> tuple[int, str]:
    """Wait for the command within its limits, then kill and reap every process of the sandbox.

    ``alone``: this is process 1 of its namespace. Returns the exit code (128 + signal) and why it ended.
    """
    deadline = time.monotonic() + order["wall_s"]
    uid = None if alone or os.geteuid() != 0 else order["uid"]
    status, ended, pause, rounds = None, "exit", 0.005, 0
    while status is None:
        signals = {signal.SIGCHLD, signal.SIGTERM}
        caught = signal.sigtimedwait(signals, max(0.0, min(pause, deadline - time.monotonic())))
        status = _reap(child)
        if status is not None:
            break
        pause, rounds = min(0.1, pause * 1.5), rounds + 1
        inside = set(_processes()) - {1} if alone else _descendants(uid)
        if caught is not None and caught.si_signo == signal.SIGTERM:  # the reader has had enough
            ended = "output"
        elif time.monotonic() >= deadline:
            ended = "wall"
        elif _memory(inside) > order["memory_bytes"]:
            ended = "memory"
        elif rounds % 4 == 0 and _disk(folders, inside, order["disk_bytes"]) > order["disk_bytes"]:
            ended = "disk"
        else:
            continue
        break
    while True:
        if alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:  # stopped first, for what forks meanwhile would slip away
            left = _descendants(uid)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            time.sleep(0.005)
        if pid == child and status is None:
            status = code
    if ended == "exit" and _disk(folders, set(), order["disk_bytes"]) > order["disk_bytes"]:
        ended = "disk"
    if status is None:
        return 128 + signal.SIGKILL, ended
    code = os.waitstatus_to_exitcode(status)
    return (code if code >= 0 else 128 - code), ended


def _reap(child: int) -> int | None:
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = code


def _report(order: dict[str, Any], isolation: list[str], code: int, ended: str) -> None:
    os.write(order["report"], json.dumps({"isolation": isolation, "exit_code": code, "ended": ended}).encode())


def _in_namespaces(order: dict[str, Any], ready: int, mapped: int) -> None:
    """The namespace maker: exits with 0 after a run, with NO_WALLS where something was refused before it."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        enter_namespaces()
        os.write(ready, b"1")
        if not os.read(mapped, 1):
            os._exit(NO_WALLS)
        init = os.fork()
    except OSError:
        os._exit(NO_WALLS)
    if init:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        build_root(order)
    except OSError:
        os._exit(NO_WALLS)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.close(mapped)
    os.close(ready)
    child = start_command(order, order["processes"])
    code, ended = supervise(child, order, True, list(order["writable"]))
    _report(order, ["network", "processes", "files", "user"], code, ended)
    os._exit(0)


def _in_the_open(order: dict[str, Any]) -> None:
    """Limits and one process tree, and as root a user of its own; the network and readable files stay in reach."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the command may be of the same user, and the report goes out from here
    root = os.geteuid() == 0
    processes = order["processes"]
    if not root:  # the limit counts all that the user runs
        processes += sum(_threads(pid) for pid in _processes() if _owner(pid) == os.geteuid())
    writable = order["writable"]
    order = {**order, "cwd": writable[order["cwd"]], "env": {**order["env"], **order["open_env"]}}
    child = start_command(order, processes)
    code, ended = supervise(child, order, False, list(writable.values()))
    _report(order, ["user"] if root else [], code, ended)


def _owner(pid: int) -> int:
    """The real user of a process, also where /proc gives the process's files to root (not dumpable); -1 if it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return int(next(line for line in file if line.startswith(b"Uid:")).split()[1])
    except (OSError, StopIteration):
        return -1


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def main() -> None:
    order = json.load(sys.stdin)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    if order["namespaces"]:
        ready, made = os.pipe()
        mapped, go = os.pipe()
        maker = os.fork()
        if maker == 0:
            os.close(go)
            _in_namespaces(order, made, mapped)
        os.close(made)
        with contextlib.suppress(OSError):  # refused: the maker reads the end of the pipe and gives up
            if os.read(ready, 1):
                map_users(maker)
                os.write(go, b"1")
        os.close(go)
        if os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) != NO_WALLS:
            return
    if order["open"]:
        _in_the_open(order)
    else:
        _report(order, [], 126, "refused")


if __name__ == "__main__":
    main()
