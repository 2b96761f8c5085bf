"""Where a server computes: OpenMP keeps a pool for every thread that does, and two of them slow each other down."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serving import server
from serving.predictor import Timing


@pytest.mark.parametrize("router", ["search-router", "step-router"])
def test_the_threads_that_load_and_warm_up_have_ended_once_it_is_ready(
    router: str, search_folder: Path, step_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[threading.Thread] = []
    alive: list[threading.Thread] = []
    load = server.load_served

    def recorded(*given: Any) -> Any:
        computed.append(threading.current_thread())
        served = load(*given)
        decide = served.decide

        def decided(instances: Sequence[Any], timing: Timing) -> Any:
            computed.append(threading.current_thread())
            return decide(instances, timing)

        monkeypatch.setattr(served, "decide", decided)
        return served

    def say(line: str) -> None:
        if " is ready at " in line:
            alive.extend(thread for thread in computed if thread.is_alive())
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(server, "load_served", recorded)
    folder = search_folder if router == "search-router" else step_folder
    server.serve(router, folder, port=0, grpc_port=0, say=say)
    assert len(set(computed)) >= 2
    assert alive == []
