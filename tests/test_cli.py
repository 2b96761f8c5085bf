"""The command line: what a person sees, and the exit codes of the contract."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from routewright import cli
from routewright.errors import BadInput, StageFailed
from routewright.pools.search import Hit
from routewright.sandbox import Sandbox, check_walls
from routewright.search_router.decision import Decision

ROOT = Path(__file__).parents[1]
RUN = ["run", "search-router", "--profile", "smoke", "--out", "out"]
STEP = ["run", "step-router", "--profile", "smoke", "--out", "out"]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``routewright ARGUMENTS``, run in this process."""
    monkeypatch.setattr(sys, "argv", ["routewright", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['routewright', '--help']\n"
        "from routewright.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'pandas', 'numpy', 'mlflow', 'kfp', 'plotly', 'sklearn'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "HEAVY []" in shown.stdout
    for command in ("run", "compile", "route", "pool", "serve", "promote", "rollback", "status"):
        assert f" {command} " in shown.stdout


def test_version(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("routewright 0.")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*RUN, "--pool", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "search-router", "--pool", "aws-docs", "--profile", "huge", "--out", "out"], "profile 'huge'"),
        ([*RUN, "--pool", "aws-docs", "--query-log", "no.jsonl"], "--query-log no.jsonl: no such file"),
        (RUN, "--pool: missing, search-router expects a pool file or aws-docs"),
        ([*RUN, "--pool", "aws-docs", "--environment", "shell"], "--environment shell: only step-router has"),
        ([*STEP, "--pool", "aws-docs"], "--pool aws-docs: only search-router has a pool"),
        ([*STEP, "--query-log", "log.jsonl"], "--query-log log.jsonl: only search-router learns from a query log"),
        ([*STEP, "--environment", "chess"], "environment 'chess': expected textworld, shell"),
        (["run", "step-router", "--profile", "huge", "--out", "out"], "profile 'huge' does not exist: expected one of gpu"),
        (["route", " ", "--pool", "aws-docs", "--model", "m"], "QUERY: the query is empty"),
        (["route", "q", "--pool", "p", "--model", "m", "--reference-date", "31.5.2024"], "--reference-date 31.5.2024"),
        (["pool", "check", "nowhere.yaml"], "nowhere.yaml"),
        (["status", "search-router"], "runs/mlflow.db: no such file, expected the tracked runs"),
        (["rollback", "search-router"], "runs/mlflow.db: no such file"),
        (["promote", "search-router", "--version", "1"], "runs/mlflow.db: no such file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_environment_is_read_before_anything_is_written(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "problems.jsonl").write_text('{"task_id": "a/1"}\n')
    (tmp_path / "tasks" / "empty").mkdir(parents=True)
    for environment, sentence in (("problems.jsonl", "problems.jsonl, line 1"), ("tasks", "expected a task folder")):
        assert call(monkeypatch, *STEP, "--environment", environment) == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_machine_that_refuses_the_sandbox_is_told_before_anything_is_written(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROUTEWRIGHT_SANDBOX", raising=False)
    monkeypatch.setattr(Sandbox.__init__, "__defaults__", (None, False))
    check_walls.cache_clear()
    assert call(monkeypatch, *STEP, "--environment", "shell") == 2
    error = capsys.readouterr().err
    assert "ROUTEWRIGHT_SANDBOX=open" in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    check_walls.cache_clear()


def test_a_query_log_and_the_families_of_a_profile_are_read_before_anything_is_written(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"query": "a"}\n{"query": 1}\n')
    (tmp_path / "empty").mkdir()
    for log, sentence in (("log.jsonl", "log.jsonl, line 2: query: "), ("empty", "--query-log empty: no such file")):
        assert call(monkeypatch, *RUN, "--pool", "aws-docs", "--query-log", log) == 2
        assert sentence in capsys.readouterr().err
    smoke = (ROOT / "configs" / "ensemble-router" / "smoke.yaml").read_text()
    (tmp_path / "own.yaml").write_text(re.sub(r"family: \w+", "family: sums", smoke, count=1))
    assert call(monkeypatch, "run", "ensemble-router", "--profile", "own.yaml", "--out", "out") == 2
    said = "own.yaml: field tasks.families.0.family: reasoning-gym has no family 'sums', expected one of ab, acre, "
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_step_run_shows_its_rows_and_where_its_router_is(tmp_path, monkeypatch, capsys) -> None:
    ran = {}

    def run_local(pipeline, name, arguments, out, console):
        ran.update(name=name, arguments=arguments)
        return {}

    estimate = {"mean": 0.875, "low": 0.5, "high": 1.0, "n": 8}
    rows = [{"name": name, "metrics": {"success": estimate, "escalation": estimate}} for name in ("slm", "risk")]
    summary = {"pipeline": "step-router", "profile": "smoke", "seed": 3, "wall_s": 1.0, "rows": rows}
    monkeypatch.setattr("pipelines.run_local.run_local", run_local)
    monkeypatch.setattr("pipelines.run_local.publish_results", lambda folders, out: summary)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    monkeypatch.setenv("ROUTEWRIGHT_SANDBOX", "open")  # nothing is run
    monkeypatch.setattr(sys, "argv", ["routewright", *STEP, "--environment", "shell", "--seed", "3"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    assert ran == {"name": "step-router", "arguments": {"environment": "shell", "profile": "smoke", "seed": 3}}
    shown = capsys.readouterr().out
    for part in ("environment shell", "0.875", "risk", "out/report.html", "StepRouter.load('out/model')"):
        assert part in shown


def test_the_lines_for_an_agent_work(tmp_path) -> None:
    from routewright.step_router.features import Candidate
    from routewright.step_router.risk import RiskModel, RiskSettings, save_risk

    model = RiskModel()
    model.evidence.fill_(1.0)
    facts = {"thresholds": {"bayes": None}, "operating": "bayes", "c_slm": 1.0, "c_llm": 50.0, "max_steps": 10}
    save_risk(model, tmp_path / "model", RiskSettings(), facts)
    candidates = [Candidate("open door", verifier_score=0.5)]
    names = {"objective": "leave", "observation": "a door", "candidates": candidates, "llm": lambda shown: "go " + shown}
    exec(textwrap.dedent(cli.agent_loop(tmp_path / "model")), names)
    assert names["action"] == "go a door", "without a threshold every step goes to the LLM"


def test_an_unknown_pipeline_or_option_is_a_usage_error(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "run", "walk-the-dog", "--pool", "aws-docs", "--out", "out") == 2
    assert call(monkeypatch, "run", "search-router", "--pool", "aws-docs", "--out", "out", "--seed", "-1") == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BadInput("pool.yaml, line 3:\n  expected a name"), 2, "error: pool.yaml, line 3: expected a name"),
        (StageFailed("stage sft failed: no space left"), 1, "error: stage sft failed: no space left"),
        (ZeroDivisionError("by zero"), 1, "error: unexpected ZeroDivisionError: by zero; traceback in"),
    ],
)
def test_every_failure_is_one_sentence(error, code, said, monkeypatch, capsys) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    assert call(monkeypatch) == code
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert len(shown.splitlines()) == 1
    if isinstance(error, ZeroDivisionError):
        log = Path(shown.strip().rsplit(" ", 1)[1])
        assert "ZeroDivisionError" in log.read_text()
        log.unlink()


def test_an_unreachable_tracking_server_ends_a_run_with_exit_code_2(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    arguments = ("run", "search-router", "--pool", "aws-docs", "--profile", "smoke", "--out", str(tmp_path / "out"))
    assert call(monkeypatch, *arguments) == 2
    assert "no tracking server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_route_shows_decision_and_results(tmp_path, monkeypatch, capsys) -> None:
    asked = {}

    class FakeRouter:
        names = ("storage", "compute")

        def decide(self, query: str, reference_date: date) -> Decision:
            asked["decide"] = (query, reference_date)
            scores = {"storage": 0.93, "compute": 0.12}
            return Decision(["storage"], "10", ["backup"], date(2024, 5, 1), None, scores)

    class FakeSearch:
        failures: dict[str, list[str]] = {}  # noqa: RUF012

        def __init__(self, pool: object) -> None:
            pass

        def search_many(self, requests: list, k: int) -> list[list[Hit]]:
            asked["search"] = requests
            found = Hit("doc-1", 2.0, "c", "How to restore", "2024-06-01")
            return [[found, Hit("doc-2", 1.0, "c", "[bold]Odd[/]", None)]]

    monkeypatch.setattr("routewright.search_router.router.load_router", lambda _: FakeRouter())
    monkeypatch.setattr("routewright.pools.search.PoolSearch", FakeSearch)
    opened = SimpleNamespace(fallback="compute", names=["compute", "storage"])
    monkeypatch.setattr(cli, "open_pool", lambda pool, folder: opened)
    monkeypatch.setattr(sys, "argv", ["routewright", "route", "restore since May", "--pool", "p", "--model", "m",
                                      "--reference-date", "2024-06-30"])  # fmt: skip
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    shown = capsys.readouterr().out
    assert asked["decide"] == ("restore since May", date(2024, 6, 30))
    ((agent, text, interval),) = asked["search"]
    assert (agent, text) == ("storage", "restore since May backup")
    assert (interval.start, interval.end) == (date(2024, 5, 1), None)
    for part in ("0.93", "0.12", "backup", "2024-05-01 to …", "How to restore", "[bold]Odd[/]", "2024-06-01"):
        assert part in shown


def test_route_says_that_the_model_is_another_pool_s(monkeypatch, capsys) -> None:
    router = SimpleNamespace(names=["storage", "general"], description={"pool": "shop"})
    monkeypatch.setattr("routewright.search_router.router.load_router", lambda _: router)
    monkeypatch.setattr(cli, "open_pool", lambda pool, folder: SimpleNamespace(names=["storage", "compute"]))
    assert call(monkeypatch, "route", "restore", "--pool", "ok.yaml", "--model", "m") == 2
    said = "--pool ok.yaml: it has no agent 'general', expected the pool 'shop' that the model m was trained on"
    assert said in capsys.readouterr().err
