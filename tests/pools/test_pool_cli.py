from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_pool import Endpoint, hits_body
from typer.testing import CliRunner

from routewright.pools.cli import app

WritePool = Callable[[Any], Path]

runner = CliRunner()


def test_check_a_sound_pool(write_pool: WritePool, pool_content: dict[str, Any], endpoint: Endpoint) -> None:
    endpoint.answer = lambda payload: (200, hits_body("a"), 0.0)
    pool_content["agents"].append({"name": "remote", "card": "x", "search": {"kind": "http", "url": endpoint.url}})
    result = runner.invoke(app, ["check", str(write_pool(pool_content))])
    assert result.exit_code == 0, result.output
    assert "birds  4 documents" in result.stdout
    assert "remote  answers in" in result.stdout
    assert "tiny: 3 agents, fallback boats" in result.stdout
    assert len(endpoint.received) == 1


def test_check_a_pool_with_a_dead_agent(write_pool: WritePool, pool_content: dict[str, Any], dead_url: str) -> None:
    pool_content["agents"].append({"name": "remote", "card": "x", "search": {"kind": "http", "url": dead_url}})
    result = runner.invoke(app, ["check", str(write_pool(pool_content))])
    assert result.exit_code == 1
    assert "1 of 3 agents did not answer" in result.stderr


@pytest.mark.parametrize("command", ["check", "stats"])
def test_bad_input_is_one_sentence_and_exit_2(
    write_pool: WritePool, pool_content: dict[str, Any], command: str, tmp_path: Path
) -> None:
    path = write_pool(pool_content)
    with (tmp_path / "boats.jsonl").open("a") as file:
        file.write("{broken\n")
    result = runner.invoke(app, [command, str(path)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"{tmp_path}/boats.jsonl, line 4: expected one JSON object")
    assert result.stderr.count("\n") == 1
    assert runner.invoke(app, [command, str(tmp_path / "none.yaml")]).exit_code == 2


def test_stats(write_pool: WritePool, pool_content: dict[str, Any], dead_url: str) -> None:
    pool_content["agents"].append({"name": "remote", "card": "x", "search": {"kind": "http", "url": dead_url}})
    result = runner.invoke(app, ["stats", str(write_pool(pool_content))])
    assert result.exit_code == 0, result.output
    rows = {cells[1]: cells[2:-1] for line in result.stdout.splitlines()
            if len(cells := [cell.strip() for cell in line.split("│")]) > 3}
    assert rows["birds"][:6] == ["4", "75%", "4", "–", "1", "–"]
    assert rows["boats"][:6] == ["3", "0%", "4", "–", "–", "–"]
    assert rows["remote"][0] == "http"
    assert rows["remote"][-1] == "failed"
