"""Escapes: what untrusted commands try, and what must hold afterwards."""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from routewright.jail import PR_SET_DUMPABLE, libc
from routewright.sandbox import FLOOD, Limits, NoWalls, Sandbox

QUICK = Limits(wall_s=4, cpu_s=2, memory_bytes=300 << 20, file_bytes=1 << 20, disk_bytes=4 << 20, processes=24)


@pytest.fixture
def walled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.delenv("ROUTEWRIGHT_SANDBOX", raising=False)
    with Sandbox(QUICK) as made:
        try:
            made.run("true")
        except NoWalls:
            pytest.skip("this machine allows no namespaces")
        yield made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.setenv("ROUTEWRIGHT_SANDBOX", "open")
    with Sandbox(QUICK, namespaces=False) as made:
        yield made
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # what such a run takes from this process


@pytest.fixture(params=["walled", "opened"], ids=["namespaces", "limits-only"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    made: Sandbox = request.getfixturevalue(request.param)
    return made


def alive(marker: str) -> list[int]:
    """Processes of this machine whose command line holds the marker."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_runs_and_keeps_files(sandbox: Sandbox) -> None:
    sandbox.write("in/words.txt", "b\na\n")
    result = sandbox.run("sort in/words.txt > out.txt; cat out.txt; echo oops >&2; exit 3")
    assert (result.exit_code, result.ended, result.output) == (3, "exit", "a\nb\noops\n")
    assert sandbox.read("out.txt") == b"a\nb\n"
    assert sandbox.run(["cat", "out.txt"]).output == "a\nb\n"
    assert sandbox.run(["no-such-program"]).exit_code == 127
    assert sandbox.run("kill -9 $$").exit_code == 137
    assert sandbox.run("true").ok


def test_says_which_walls_stood(walled: Sandbox) -> None:
    assert walled.run("true").isolation == ("network", "processes", "files", "user")


def test_without_walls_nothing_runs_unless_that_is_allowed(opened: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened.run("touch ran").isolation == (("user",) if os.geteuid() == 0 else ())
    assert opened.run("rm ran").ok
    for value in (None, "", "1", "opened"):
        monkeypatch.delenv("ROUTEWRIGHT_SANDBOX") if value is None else monkeypatch.setenv("ROUTEWRIGHT_SANDBOX", value)
        with pytest.raises(NoWalls) as told:
            opened.run("touch ran")
        assert opened.read("ran") is None
    assert "refuses the namespaces" in str(told.value)
    assert "network" in str(told.value)
    assert "ROUTEWRIGHT_SANDBOX=open" in str(told.value)
    assert "\n" not in str(told.value)
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)  # on its way from a worker process


def test_walls_stand_also_where_doing_without_is_allowed(walled: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTEWRIGHT_SANDBOX", "open")
    assert "files" in walled.run("true").isolation


def test_fork_bomb(sandbox: Sandbox) -> None:
    marker = secrets.token_hex(8)
    sandbox.write("bomb.py", "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n")
    result = sandbox.run(f"python3 -I -S bomb.py {marker}", wall_s=1.0)
    assert result.ended != "exit" or result.exit_code != 0
    assert not alive(marker)


def test_number_of_processes(sandbox: Sandbox) -> None:
    result = sandbox.run("for i in $(seq 60); do sleep 3 & done; echo all started")
    assert "all started" not in result.output


def test_daemon_that_outlives_the_step(sandbox: Sandbox) -> None:
    marker = secrets.token_hex(8)
    sandbox.write(
        "daemon.py",
        "import os, sys, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        open('born', 'w').write('1')\n        time.sleep(30)\n        open('late', 'w').write('1')\n"
        "    os._exit(0)\n"
        "while not os.path.exists('born'):\n    time.sleep(0.01)\n",
    )
    assert sandbox.run(f"python3 -I -S daemon.py {marker}").ok
    assert sandbox.read("born") == b"1"
    assert not alive(marker)
    assert sandbox.read("late") is None


def test_endless_loop(sandbox: Sandbox) -> None:
    asleep = sandbox.run("sleep 60", wall_s=0.3)
    assert (asleep.ended, asleep.exit_code) == ("wall", 137)
    busy = sandbox.run("while :; do :; done", wall_s=30)
    assert busy.exit_code == 137  # the CPU limit; the wall limit is far off
    assert busy.ended == "exit"


def test_ten_gigabyte_print(sandbox: Sandbox) -> None:
    result = sandbox.run("echo first; head -c 10000000000 /dev/zero | tr '\\0' x", wall_s=30)
    assert result.ended == "output"
    assert FLOOD < result.printed_bytes < 4 * FLOOD
    assert len(result.output) < QUICK.output_bytes + 100
    assert result.output.startswith("first\n")
    assert not alive("10000000000")


def test_long_output_keeps_both_ends(sandbox: Sandbox) -> None:
    result = sandbox.run("echo first; seq 100000; echo last")
    assert result.ok
    assert result.output.startswith("first\n1\n")
    assert result.output.endswith("\n100000\nlast\n")
    assert "bytes left out" in result.output
    assert len(result.output) < QUICK.output_bytes + 100


def test_memory_of_one_process(sandbox: Sandbox) -> None:
    result = sandbox.run("python3 -I -S -c 'x = bytearray(400 << 20)'")
    assert result.exit_code != 0
    assert "MemoryError" in result.output


def test_memory_of_all_processes(sandbox: Sandbox) -> None:
    hog = "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (120 << 20)\ntime.sleep(20)\n"
    sandbox.write("hog.py", hog)
    assert sandbox.run("python3 -I -S hog.py", wall_s=20).ended == "memory"


def test_big_file_and_full_disk(sandbox: Sandbox) -> None:
    assert sandbox.run("head -c 3000000 /dev/zero > big").exit_code == 128 + 25  # SIGXFSZ
    assert (sandbox.folder / "big").stat().st_size <= QUICK.file_bytes
    assert sandbox.run("for i in $(seq 40); do head -c 900000 /dev/zero > f$i; done").ended == "disk"


DEEP = "import os\nfor _ in range(2100):\n    os.mkdir('d')\n    os.chdir('d')\n"


def test_folders_too_deep_for_a_path(sandbox: Sandbox) -> None:
    """What lies below cannot be counted by its path, nor can the folder be removed level by level on a stack."""
    script = DEEP + "for i in range(40):\n    with open(f'f{i}', 'wb') as file: file.write(bytes(900_000))\n"
    assert sandbox.run(["python3", "-c", script]).ended == "disk"
    sandbox.close()
    assert not sandbox.folder.parent.exists()


@pytest.mark.parametrize(
    "make",
    ["fd = os.open('f', os.O_CREAT | os.O_WRONLY); os.unlink('f')", "fd = os.memfd_create('f')"],
    ids=["removed", "memfd"],
)
def test_files_without_a_name_count(sandbox: Sandbox, make: str) -> None:
    script = f"import os, time\nfor _ in range(40):\n    {make}; os.write(fd, bytes(900_000))\ntime.sleep(60)\n"
    assert sandbox.run(["python3", "-c", script], wall_s=60).ended == "disk"


def test_environment_is_clean(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "rosebud")
    assert "rosebud" not in sandbox.run("env; set").output


def test_parent_environment_cannot_be_read(sandbox: Sandbox) -> None:
    """What /proc shows of this very process, whose real environment holds PATH of the tests."""
    if not sandbox.run("true").isolation:
        pytest.skip("this machine allows neither namespaces nor another user")
    script = "for f in /proc/[0-9]*/environ; do tr '\\0' '\\n' < $f; done 2>/dev/null | grep -c ^PYTEST_; "
    assert sandbox.run(script + f"cat /proc/{os.getpid()}/environ").exit_code != 0
    environment = sandbox.run("cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | sort -u").output
    own = set(sandbox.run("env").output.splitlines())
    assert {line for line in environment.splitlines() if line} <= own


def test_other_processes_are_out_of_sight(walled: Sandbox) -> None:
    numbers = walled.run("ls /proc | grep -c '^[0-9]'").output
    assert int(numbers) <= 5
    assert walled.run(f"kill -9 {os.getppid()}").exit_code != 0


def test_init_cannot_be_killed(walled: Sandbox) -> None:
    assert walled.run("kill -9 1; kill -STOP 1; kill -9 -1; true").ended in ("exit", "wall")


def test_writing_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    if not sandbox.run("true").isolation:
        pytest.skip("this machine allows neither namespaces nor another user")
    target = tmp_path / "outside.txt"
    others = ("/etc/outside.txt", "/usr/outside.txt", "/outside.txt", "../outside.txt", "/proc/sys/kernel/hostname")
    for path in (target, *others):
        assert sandbox.run(f"echo x > {path}").exit_code != 0, path
    assert not target.exists()
    assert not (sandbox.folder.parent / "outside.txt").exists()


def test_outside_files_are_not_even_seen(walled: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "secret").write_text("rosebud")
    assert "rosebud" not in walled.run(f"cat {tmp_path}/secret; ls {tmp_path} /home /var /run").output
    assert walled.run("touch /tmp/mine && cat /tmp/mine").ok


def test_no_network(walled: Sandbox) -> None:
    script = "import socket; socket.create_connection(('127.0.0.1', 22), 1)"
    assert "Network is unreachable" in walled.run(["python3", "-I", "-S", "-c", script]).output
    names = "import socket; print([name for _, name in socket.if_nameindex()])"
    assert "eth" not in walled.run(["python3", "-I", "-S", "-c", names]).output


def test_no_way_to_more_rights(walled: Sandbox) -> None:
    mounting = ("mount -t tmpfs none /tmp", "mount -o remount,rw /usr", "unshare -Urm mount -t tmpfs none /usr")
    for attempt in (*mounting, "chown 0 .", "mknod x c 1 3", "su -c id", "chroot . id"):
        assert walled.run(attempt).exit_code != 0, attempt
    status = walled.run("cat /proc/self/status").output
    assert "NoNewPrivs:\t1" in status
    assert "CapEff:\t0000000000000000" in status


def test_symlink_out(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("rosebud")
    sandbox.run(f"ln -s {secret} result.txt; ln -s {tmp_path} folder; mkfifo pipe; ln -s /proc/1/environ other")
    for path in ("result.txt", "folder/secret", "pipe", "other", "../app/none", "/etc/passwd", "missing", "."):
        assert sandbox.read(path) is None, path
    sandbox.write("result.txt", "mine")
    assert secret.read_text() == "rosebud"
    assert sandbox.read("result.txt") == b"mine"
    for path in ("folder/new.txt", "../new.txt", "/new.txt", ""):
        with pytest.raises(ValueError, match="expected"):
            sandbox.write(path, "x")
    assert sorted(os.listdir(tmp_path)) == ["secret"]


def test_read_is_bounded(sandbox: Sandbox) -> None:
    sandbox.run("truncate -s 1000000 sparse")
    assert sandbox.read("sparse", limit=10) == bytes(10)


def test_readonly_folder(walled: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "check.sh").write_text("echo checked\n")
    assert walled.run("sh /tests/check.sh", readonly={"/tests": tmp_path}).output == "checked\n"
    assert walled.run("echo broken > /tests/check.sh", readonly={"/tests": tmp_path}).exit_code != 0
    assert walled.run("ls /tests").exit_code != 0
    assert (tmp_path / "check.sh").read_text() == "echo checked\n"


def test_closing_removes_locked_folders(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p a/b; touch a/b/c; chmod 0 a/b; chmod 0 a")
    sandbox.close()
    assert not sandbox.folder.parent.exists()
    sandbox.close()  # once more does no harm


@pytest.mark.parametrize("command", ["echo \0", "x" * 200_000, ["true", "a\0b"]])
def test_commands_that_no_kernel_takes(sandbox: Sandbox, command: str | list[str]) -> None:
    result = sandbox.run(command)
    assert result.exit_code == 126
    assert "command" in result.output


INNER = """
import os, sys; sys.path.insert(0, '/source')
from routewright.sandbox import NoWalls, Sandbox
os.environ.pop('ROUTEWRIGHT_SANDBOX', None)
with Sandbox() as inner:
    try:
        inner.run('echo inside')
    except NoWalls as error:
        print(str(error)[:22])
    os.environ['ROUTEWRIGHT_SANDBOX'] = 'open'
    result = inner.run('echo inside; sleep 9', wall_s=0.2)
    print(result.isolation, result.ended, result.output)
    print(inner.run(f'cat /proc/{os.getpid()}/environ; echo; cat /proc/$PPID/fd/*').output)
"""


def test_where_namespaces_are_refused_for_real(walled: Sandbox) -> None:
    """A sandbox inside a sandbox: no namespaces in there. The inner one's user is the outer one's."""
    source = Path(__file__).parents[1] / "routewright"
    result = walled.run(["python3", "-I", "-S", "-c", INNER], readonly={"/source/routewright": source})
    told, open_run, *seen = result.output.strip().split("\n", 2)
    assert told == "sandbox: this machine "
    assert open_run == "() wall inside"
    assert seen[0].count("Permission denied") == 2
    assert "PATH=" not in seen[0]
