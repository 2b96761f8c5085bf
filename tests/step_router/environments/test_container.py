"""Tasks with an image: built, played and checked in containers that hold what untrusted commands try.

What needs an engine skips where none answers; the rest pretends that one does, or does not.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from routewright.errors import BadInput
from routewright.sandbox import FLOOD, MAX_COMMAND
from routewright.step_router.environments import container, shell_env
from routewright.step_router.environments.container import LABEL, LIMITS, Container, engine_answers, image_of
from routewright.step_router.environments.shell_env import SUBMIT, ShellEnvironment, load_task, load_tasks

BASE = "python:3.11-slim"
QUICK = replace(LIMITS, wall_s=120.0, cpu_s=5, memory_bytes=200 << 20, file_bytes=8 << 20, disk_bytes=20 << 20, processes=24)
CHECK = "from pathlib import Path\n\n\ndef test_answer():\n    assert Path('/srv/answer.txt').read_text() == '42\\n'\n"
TOML = 'version = "1.0"\n'
DOCKERFILE = f"FROM {BASE}\nRUN mkdir /srv/made\nCOPY data.txt /srv/\nWORKDIR /srv\n"


def make(folder: Path, **files: str) -> Path:
    named = {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    for name, text in {"task.toml": TOML, "instruction.md": "Write 42 to answer.txt\n", **named}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names() -> set[str]:
    told = subprocess.run(
        ["docker", "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"], capture_output=True, check=True
    )
    return set(told.stdout.decode().split())


def until(gone: str) -> bool:
    """Whether a container goes within half a minute."""
    for _ in range(150):
        if gone not in names():
            return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def base() -> str:
    if not engine_answers():
        pytest.skip("no Docker engine answers")
    try:
        image_of(BASE)
    except BadInput as error:
        pytest.skip(str(error))
    return BASE


@pytest.fixture
def made(base: str) -> Iterator[Container]:
    running = Container(base, limits=QUICK)
    yield running
    running.close()


def test_runs_and_keeps_files(made: Container) -> None:
    result = made.run("printf 'b\\na\\n' > /tmp/words; sort /tmp/words; echo oops >&2; echo done; exit 3")
    assert (result.exit_code, result.ended, result.output) == (3, "exit", "a\nb\noops\ndone\n")
    assert made.run(["cat", "/tmp/words"]).output == "b\na\n"
    assert made.run("no-such-program").exit_code == 127
    assert made.run("kill -9 $$").exit_code == 137
    assert made.run("x=(1 2); [[ ${x[1]} == 2 ]]").ok
    assert made.run("x" * (MAX_COMMAND + 1)).exit_code == 126
    assert made.run("hostname").output == "task\n"


def test_no_network_but_loopback(made: Container) -> None:
    assert made.run("ls /sys/class/net").output == "lo\n"
    connect = "import socket; socket.create_connection(('{}', 53), 5)"
    assert "Network is unreachable" in made.run(["python3", "-c", connect.format("192.0.2.1")]).output
    assert "Connection refused" in made.run(["python3", "-c", connect.format("127.0.0.1")]).output


def test_few_privileges_and_a_clean_environment(made: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    status = dict(line.split(":\t") for line in made.run("cat /proc/self/status").output.splitlines() if ":\t" in line)
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0b1110_1011  # CHOWN, DAC_OVERRIDE, FOWNER, KILL, SET*ID
    assert status["NoNewPrivs"] == "1"
    for command in ("mount -t tmpfs x /mnt", "mknod /tmp/sda b 8 0", "echo 1 > /proc/sys/kernel/panic", "chroot / true"):
        assert not made.run(command).ok, command
    assert str(Path(__file__).parent) not in made.run("cat /proc/self/mounts").output
    assert made.run("chown 7 /tmp && touch /etc/mine && su nobody -s /bin/sh -c true").ok
    monkeypatch.setenv("A_SECRET", "rosebud")
    assert "rosebud" not in made.run("env").output


def test_a_configured_proxy_stays_outside(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"proxies": {"default": {"httpProxy": "http://me:rosebud@proxy.example"}}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    configured = Container(base)
    told = configured.run("env").output
    configured.close()
    assert "HTTP_PROXY=\n" in told
    assert "rosebud" not in told


def test_fork_bomb(made: Container) -> None:
    made.limits = replace(QUICK, wall_s=3.0)
    assert made.run("f() { f | f & }; f; sleep 60").ended in ("wall", "exit")
    made.limits = QUICK
    assert int(made.run("ls -d /proc/[0-9]* | wc -l").output) < 10  # sleep, shells, ls, wc
    assert "all started" not in made.run("sh -c 'for i in $(seq 60); do sleep 99 & done; echo all started'").output


def test_daemon_that_outlives_the_step(made: Container) -> None:
    started = made.run("(setsid sh -c 'touch /tmp/born; sleep 4; touch /tmp/late' &); sleep 1; echo started")
    assert started.output == "started\n"
    time.sleep(4)
    assert made.run("ls /tmp").output == "born\n"
    assert made.run("python3 -m http.server & echo up").ended == "exit"
    assert "http.server" not in made.run("cat /proc/[0-9]*/cmdline").output.replace("/cmdline", "")


def test_limits(made: Container) -> None:
    assert made.run("head -c 9000000 /dev/zero > /tmp/big").exit_code == 128 + 25  # SIGXFSZ
    assert made.run("python3 -c 'x = bytearray(400 << 20)'").exit_code == 137
    assert made.run("while :; do :; done").exit_code == 137  # the CPU limit
    assert made.run("for i in $(seq 4); do head -c 6000000 /dev/zero > /tmp/f$i; done").ended == "disk"
    made.limits = replace(QUICK, wall_s=1.0)
    assert made.run("rm /tmp/*; sleep 60").ended == "wall"


def test_ten_gigabyte_print(made: Container) -> None:
    result = made.run("echo first; head -c 10000000000 /dev/zero | tr '\\0' x")
    assert result.ended == "output"
    assert FLOOD < result.printed_bytes < 2 * FLOOD
    assert result.output.startswith("first\nx")
    assert len(result.output) < QUICK.output_bytes + 100


def test_first_process_neither_logs_nor_keeps_the_next_run_from_coming(made: Container) -> None:
    made.run("echo rosebud > /proc/1/fd/1")
    logs = subprocess.run(["docker", "logs", made._name], capture_output=True)
    assert b"rosebud" not in logs.stdout + logs.stderr
    subprocess.run(["docker", "kill", made._name], check=True, capture_output=True)
    assert made.run("echo again").output == "again\n"


def test_nothing_is_left_after_close_or_death(base: str, tmp_path: Path) -> None:
    running = Container(base)
    assert running._name in names()
    running.close()
    assert running._name not in names()
    code = "import sys, time; from routewright.step_router.environments.container import Container as C\n"
    code += f"made = C({base!r}); print(made._name, flush=True); time.sleep(60)\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    with process:
        assert process.stdout is not None
        name = process.stdout.readline().decode().strip()
        assert name in names()
        os.kill(process.pid, signal.SIGKILL)
    assert until(name)


def test_what_cannot_be_built_or_started(base: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nRUN exit 9\n")
    with pytest.raises(BadInput, match=r"Dockerfile: expected a Dockerfile that builds, Docker says: .*9"):
        image_of(tmp_path / "Dockerfile")
    with pytest.raises(BadInput, match=r"image 'Not A Name': expected one that is here"):
        image_of("Not A Name")
    with pytest.raises(BadInput, match=r"image '--help': expected one that is here"):
        image_of("--help")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    before = names()
    with pytest.raises(BadInput, match="expected an image with sleep, sh: "):
        Container(tmp_path / "empty" / "Dockerfile")
    with pytest.raises(BadInput, match="sh, no-such-thing: no no-such-thing in it"):
        Container(base, ["no-such-thing"])
    assert names() <= before


def test_terminal_bench_folders_in_containers(base: str, tmp_path: Path) -> None:
    reward = "if grep -qx 42 answer.txt; then r=1; else r=0; fi\n[ -f /tests/key ]; echo $r > /logs/verifier/reward.txt\n"
    files = {"Dockerfile": DOCKERFILE, "data_dot_txt": "d\n", "solution_dot_sh": "echo 42 > answer.txt\n"}
    make(tmp_path / "python", tests__test_outputs_dot_py=CHECK, **files)
    files = {f"environment__{name}" if name != "solution_dot_sh" else name: text for name, text in files.items()}
    make(tmp_path / "reward", tests__test_dot_sh=reward, tests__key="", **files)
    image = f'[environment]\ndocker_image = "{base}"\n'
    check, solution = "grep -qx 42 /tmp/answer.txt\n", "cd /tmp; echo 42 > answer.txt\n"
    make(tmp_path / "named", task_dot_toml=image, tests__test_dot_sh=check, solution_dot_sh=solution)
    environment = ShellEnvironment(load_tasks(tmp_path))
    told = set()
    for _ in range(2):
        environment.reset("python", 0)
        told.add(environment.step("pwd; ls; ls /tests; echo 41 > answer.txt").observation.text)
        environment._outputs.clear()
        environment.close()
    assert told == {"/srv\ndata.txt\nmade\nls: cannot access '/tests': No such file or directory\n[exit code 0]"}
    for task in ("python", "reward", "named"):
        environment.reset(task, 0)
        environment.step("echo 41 > answer.txt; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
        assert not environment.step(SUBMIT).success
        environment.reset(task, 0)
        outcome = environment.step(environment.teacher())
        assert (outcome.success, outcome.done) == (False, False)
        assert environment.teacher() == SUBMIT
        assert environment.step(SUBMIT).success
    environment.close()


def test_where_a_task_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"tests__test_dot_sh": "true\n"}
    complex_one = make(tmp_path / "complex", Dockerfile=DOCKERFILE, data_dot_txt="", **good)
    named = make(tmp_path / "named", task_dot_toml='[environment]\ndocker_image = "some/image:1"\n', **good)
    compose = "services:\n  client:\n    image: {}\n"
    composed = make(tmp_path / "composed", **good)
    (composed / "docker-compose.yaml").write_text(compose.format("other/image"))
    built = make(tmp_path / "built", environment__Dockerfile="FROM x\nCOPY a .\n", environment__a="", **good)
    (built / "docker-compose.yaml").write_text(compose.format("${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}"))
    plain = make(tmp_path / "plain", **good)
    own = make(tmp_path / "own", setup_dot_py="pass\n", Dockerfile="FROM x\nRUN y\n", **good)
    monkeypatch.setattr(shell_env, "engine_answers", lambda: True)
    images = [load_task(folder).image for folder in (complex_one, named, composed, built, plain)]
    assert images == [complex_one / "Dockerfile", "some/image:1", "other/image", built / "environment" / "Dockerfile", None]
    assert [task.image for task in (load_task(own), *load_tasks())] == [None] * 11
    monkeypatch.setattr(shell_env, "engine_answers", lambda: False)
    assert [load_task(folder).image for folder in (built, plain)] == [None, None]
    assert [place for place, _ in load_task(built).files] == ["a"]
    with pytest.raises(BadInput, match=r"Dockerfile: 'RUN mkdir /srv/made' needs Docker"):
        load_task(complex_one)
    with pytest.raises(BadInput, match=r"named: image 'some/image:1' needs Docker"):
        load_task(named)
    (composed / "docker-compose.yaml").write_text("services:\n  client:\n    image: a\n  db:\n    image: b\n")
    with pytest.raises(BadInput, match=r"docker-compose.yaml: field services: expected one service"):
        load_task(composed)
    (named / "task.toml").write_text("[environment]\ndocker_image = 3\n")
    with pytest.raises(BadInput, match=r"task.toml: field environment.docker_image: expected an image's name, got 3"):
        load_task(named)


def test_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "engine_answers", engine_answers.__wrapped__)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / secrets.token_hex(4)}")
    assert not container.engine_answers()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not container.engine_answers()
