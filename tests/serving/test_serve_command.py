"""`routewright serve` as a person starts it: real ports, real signals, gRPC, what it imports, what a kill loses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hostile_bodies import at_random
from kserve.protocol.grpc.grpc_predict_v2_pb2 import (
    ModelInferRequest,
    ModelReadyRequest,
    RepositoryModelUnloadRequest,
    ServerReadyRequest,
)
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from routewright.errors import BadInput
from routewright.pools.decision_log import read_decisions
from serving.server import serve

ROOT = Path(__file__).resolve().parents[2]
QUERY = {"query": "clean the oven", "reference_date": "2024-05-31"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A served model folder in a process of its own, once it says that it is ready."""

    def __init__(self, router: str, folder: Path, *options: str, grpc_port: int = 0) -> None:
        command = [sys.executable, "-m", "routewright.cli", "serve", router, "--model", str(folder), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
        self.process = subprocess.Popen(
            [*command, "--grpc-port", str(grpc_port), "--deadline-ms", "60000", *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        if not self.said:
            raise AssertionError(self.process.communicate()[1])
        self.curl = self.process.stdout.readline()
        self.url = self.said.split(" ready at ")[1].split(",")[0].strip()
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        """Exit code, what else it said, and its errors."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        said, errors = self.process.communicate(timeout=60)
        return self.process.returncode, said, errors


@pytest.fixture(scope="module")
def server(search_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "d.jsonl"
    server = Server("search-router", search_folder, "--log", str(log), grpc_port=free_port())
    yield server
    server.stop()


def test_what_it_prints_can_be_pasted(server: Server) -> None:
    assert "gRPC at 127.0.0.1:" in server.said
    words = shlex.split(server.curl)
    assert (words[0], words[2], words[4]) == ("curl", "-H", "-d")
    name, _, value = words[3].partition(": ")
    response = httpx.post(words[1], headers={name: value}, content=words[5])
    assert response.status_code == 200
    assert response.json()["predictions"][0]["agents"]


def test_malformed_http_and_bodies_over_a_socket(server: Server) -> None:
    """Whole hostile requests on one connection, and bytes that are no HTTP: an answer or a closed connection, no 500."""
    for path, body in at_random("search-router", 300, seed=1):
        response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404)
    host, port = server.url.removeprefix("http://").split(":")
    path = b"/v1/models/search-router:predict"
    for raw in (
        b"\x00" * 100,
        b"GET\r\n\r\n",
        b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
        b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
        b"POST " + path + b" HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            try:
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(4096)
            except (ConnectionResetError, BrokenPipeError):
                continue
            status = answer[9:12]
            assert not status.startswith(b"5"), (raw[:80], answer)
    assert server.http.post(path.decode(), json={"instances": [QUERY]}).status_code == 200


def test_grpc(server: Server) -> None:
    address = server.said.split("gRPC at ")[1].strip()
    expected = server.http.post("/v1/models/search-router:predict", json={"instances": [QUERY]}).json()["predictions"][0]

    def request(*texts: bytes, raw: bytes | None = None, **changes: Any) -> ModelInferRequest:
        tensor = {"name": "instance", "shape": [len(texts) or 1], "datatype": "BYTES"} | changes
        if raw is not None:
            return ModelInferRequest(model_name="search-router", inputs=[tensor], raw_input_contents=[raw])
        return ModelInferRequest(model_name="search-router", inputs=[{**tensor, "contents": {"bytes_contents": texts}}])

    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(ServerReadyRequest()).ready
        assert stub.ModelReady(ModelReadyRequest(name="search-router")).ready
        text = json.dumps(QUERY).encode()
        for asked in (request(text), request(raw=len(text).to_bytes(4, "little") + text)):
            answered = stub.ModelInfer(asked)
            (output,) = answered.outputs
            assert (output.name, list(output.shape)) == ("decision", [1])
            decision = json.loads(output.contents.bytes_contents[0])
            assert {**decision, "request_id": ""} == {**expected, "request_id": ""}
        faulty = {
            "instance[0].query: missing": request(b"{}"),
            "instance[0]: expected JSON": request(b"{"),
            "inputs[0]: expected each element": request(raw=b"\xff\xff\xff\xff"),
            "inputs[0].datatype": request(text, datatype="FP32"),
            "inputs: expected": request(text, datatype="NONSENSE"),
            "inputs[0].shape": request(text, shape=[7]),
            "inputs[0].shape: expected the shape of 1": request(text, shape=[2**62] * 100_000),
            "inputs: expected one tensor": ModelInferRequest(model_name="search-router"),
        }
        for said, asked in faulty.items():
            with pytest.raises(grpc.RpcError) as error:
                stub.ModelInfer(asked, timeout=30)
            assert (error.value.code(), error.value.details()[: len(said)]) == (grpc.StatusCode.INVALID_ARGUMENT, said)
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(ModelInferRequest(model_name="other"))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as error:
            stub.RepositoryModelUnload(RepositoryModelUnloadRequest(model_name="search-router"))
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(request(b" " * 2**21))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.ModelInfer(request(text)).model_name == "search-router"


def test_a_port_in_use(server: Server, search_folder: Path) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    grpc_port = int(server.said.strip().rsplit(":", 1)[1])
    for ports, said in (
        ({"port": port, "grpc_port": 0}, f"^--port {port}: 127.0.0.1:{port} cannot be listened on, address already in use$"),
        ({"port": 0, "grpc_port": grpc_port}, f"^--grpc-port {grpc_port}: 127.0.0.1:{grpc_port} cannot be listened on"),
    ):
        with pytest.raises(BadInput, match=said):
            serve("search-router", search_folder, **ports)
    with pytest.raises(BadInput, match=r"^--port 1: nowhere\.invalid:1 cannot be listened on"):
        serve("search-router", search_folder, host="nowhere.invalid", port=1)


def test_a_wrong_folder_is_one_sentence_and_exit_code_2(tmp_path: Path, step_folder: Path) -> None:
    with pytest.raises(BadInput, match=r"^model folder .*nowhere: no such folder"):
        serve("search-router", tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"^risk router .*: model.safetensors is missing"):
        serve("step-router", tmp_path)
    command = [sys.executable, "-m", "routewright.cli", "serve", "search-router", "--model", str(step_folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: model folder ")


def test_sigterm_refuses_nobody_and_ends_cleanly(step_folder: Path) -> None:
    server = Server("step-router", step_folder)
    body = {"instances": [{"observation": "x", "candidates": [{"action": "go", "verifier_score": 0.5}], "step": 0,
                           "max_steps": 5, "budget_left": None}] * 32}  # fmt: skip
    codes: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for _ in range(200):
                try:
                    codes.append(client.post("/v1/models/step-router:predict", json=body).status_code)
                except httpx.TransportError:
                    return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(codes) < 20:
        time.sleep(0.01)
    code, said, errors = server.stop(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert (code, said, errors) == (0, "stopped\n", "")
    assert set(codes) == {200}


def test_ctrl_c(step_folder: Path) -> None:
    assert Server("step-router", step_folder).stop(signal.SIGINT) == (0, "stopped\n", "")


def test_a_kill_loses_no_decision_that_was_answered(search_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    server = Server("search-router", search_folder, "--log", str(path))
    answered: list[str] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while True:
                try:
                    response = client.post("/v1/models/search-router:predict", json={"instances": [QUERY]})
                except httpx.TransportError:
                    return
                if response.status_code == 200:
                    answered.append(response.json()["predictions"][0]["request_id"])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    while len(answered) < 100:
        time.sleep(0.01)
    assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    for thread in threads:
        thread.join()
    logged = {row["request_id"] for row in read_decisions(path)}
    assert logged >= set(answered)
    assert len(logged) - len(answered) <= 6  # decided, not yet answered
    again = Server("search-router", search_folder, "--log", str(path))
    known = {"request_id": answered[0], "outcome": {"kitchen": 1.0}}
    assert again.http.post("/v1/feedback", json=known).status_code == 200
    again.stop()
    assert next(row for row in read_decisions(path) if row["request_id"] == answered[0])["outcome"] == {"kitchen": 1.0}


def test_serving_imports_no_trainer() -> None:
    code = (
        "import sys; sys.argv = sys.argv[:1]; import serving.server, serving.search_router, serving.step_router;"
        "print([name for name in ('trl', 'peft', 'datasets', 'kfp', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_command_line_imports_no_server() -> None:
    code = "import sys, routewright.cli; print([n for n in ('kserve', 'fastapi', 'torch', 'httpx') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
