"""One router as a server: ports, warm-up, signals, a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import kserve
import uvicorn

from routewright.errors import BadInput
from serving.decision_log import DecisionLog, Redaction, open_log
from serving.exploration import LARGEST, Exploration
from serving.grpc_server import grpc_server
from serving.predictor import Predictor, ServedRouter
from serving.protocol import protocol_of
from serving.rest import application

DRAIN_S = 5.0  # after SIGTERM, requests go on coming until everybody who routes here has heard: usually two seconds
GRACE_S = 15  # a body's ten and a deadline's two; with the drain it leaves a preStop ten of Kubernetes' thirty seconds
_SWITCH_S = 0.001  # a thread that waits for the interpreter gets it sooner: refusals must not slow decisions down

T = TypeVar("T")


def in_passing_thread(work: Callable[..., T], *arguments: Any) -> T:
    """The work's result, from a thread that ends with it, and the OpenMP pool that torch keeps for each thread too.

    Beside a second pool, more threads than cores, OpenMP no longer spins at a barrier: a decision takes a quarter longer.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, *arguments).result()


def load_served(router: str, folder: Path, exploration: Exploration, redaction: Redaction = "none") -> ServedRouter:
    """The router of a model folder; BadInput where it is not one of that kind."""
    if router == "search-router":
        from serving.search_router import SearchRouter

        return SearchRouter(folder, exploration, redaction)
    if router == "step-router":
        from serving.step_router import StepRouterPredictor

        return StepRouterPredictor(folder, exploration)
    if router == "ensemble-router":
        from serving.ensemble_router import EnsembleRouterPredictor

        return EnsembleRouterPredictor(folder, exploration, redaction)
    raise BadInput(f"ROUTER {router}: expected search-router, step-router or ensemble-router")


def listening_socket(host: str, port: int, option: str) -> socket.socket:
    """A bound socket; BadInput names the option where the address is in use or cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # named, TCP gets TCP_NODELAY from asyncio; else every answer waits 40 ms for an acknowledgement
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            bound.listen(2048)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"{option} {port}: {host}:{port} cannot be listened on, {reason.lower()}") from None
    bound.setblocking(False)
    return bound


def curl_line(served: ServedRouter, url: str) -> str:
    """How to ask the server for a decision."""
    body = json.dumps({"instances": [served.examples[0]]})
    return f"curl {url}/v1/models/{served.name}:predict -H 'Content-Type: application/json' -d '{body}'"


class _Server(uvicorn.Server):
    """Leaves signals alone: uvicorn raises them again at its end, which would cut off what is still to do."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def run(
    predictor: Predictor,
    http: socket.socket,
    grpc_address: tuple[str, int] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests that are in flight then are answered, for `GRACE_S` seconds at most.

    After SIGTERM it is not ready at once, and decides whatever still comes for `DRAIN_S` seconds, or up to a second signal.
    Live at once, ready after the warm-up (then ``on_ready`` is called). BadInput: the gRPC port cannot be had.
    """
    registered = kserve.ModelServer(enable_grpc=grpc_address is not None)
    for name in ("kserve", "uvicorn.error"):  # KServe has just set them up to tell of every step and every odd request
        logging.getLogger(name).setLevel(logging.ERROR)
    registered.register_model(predictor)
    grpc = None
    if grpc_address is not None:
        grpc = grpc_server(predictor, registered.dataplane)
        host, port = grpc_address
        try:
            grpc.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError:
            raise BadInput(f"--grpc-port {port}: {host}:{port} is in use, another port or 0 for none") from None
        await grpc.start()
    config = uvicorn.Config(
        application(predictor),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=65,  # longer than a proxy's idle timeout, else it meets closed connections
        server_header=False,
        proxy_headers=False,  # nothing here asks who the client is
        http=protocol_of(predictor),
    )
    rest = _Server(config)

    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if number == signal.SIGTERM and predictor.ready:
            predictor.drain()
            config.encoded_headers.append((b"connection", b"close"))  # with its answer, each sender is sent elsewhere
            loop.call_later(DRAIN_S, rest.handle_exit, number, None)
        else:
            predictor.ready = False
            rest.handle_exit(number, None)

    previous = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    warm = asyncio.create_task(asyncio.to_thread(in_passing_thread, predictor.load))

    def warmed(task: asyncio.Task[bool]) -> None:
        if task.cancelled() or task.exception() is not None:
            rest.should_exit = True
        elif on_ready is not None:
            on_ready()

    warm.add_done_callback(warmed)
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop, number)
        await rest.serve(sockets=[http])
        predictor.ready = False
        if grpc is not None:
            await grpc.stop(GRACE_S)
        if warm.done():
            warm.result()  # a fault of the warm-up ends the server, and says why
    finally:
        sys.setswitchinterval(previous)
        await asyncio.to_thread(predictor.stop)


def serve(
    router: str,
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    grpc_port: int = 8081,
    log: str | None = None,
    redaction: Redaction = "none",
    epsilon: float = 0.0,
    epsilon_cap: float = 1.0,
    epsilon_agents: int = LARGEST,
    deadline_s: float = 2.0,
    say: Callable[[str], None] = print,
) -> None:
    """Serve a model folder until told to stop; ``grpc_port`` 0 is none, ``port`` 0 any. BadInput: folder, port or log."""
    exploration = Exploration(epsilon, epsilon_cap, largest=epsilon_agents)
    served = in_passing_thread(load_served, router, model, exploration, redaction)
    http = listening_socket(host, port, "--port")
    if grpc_port:
        listening_socket(host, grpc_port, "--grpc-port").close()  # gRPC binds for itself, and says little when it cannot
    decisions: DecisionLog | None = None if log is None else open_log(log, f"routewright/{router}")
    address = http.getsockname()
    url = f"http://[{address[0]}]:{address[1]}" if ":" in address[0] else f"http://{address[0]}:{address[1]}"

    def ready() -> None:
        say(f"{router} {served.model_version} is ready at {url}" + (f", gRPC at {host}:{grpc_port}" if grpc_port else ""))
        say(curl_line(served, url))

    predictor = Predictor(served, decisions, deadline_s)
    asyncio.run(run(predictor, http, (host, grpc_port) if grpc_port else None, ready))
    say("stopped")
