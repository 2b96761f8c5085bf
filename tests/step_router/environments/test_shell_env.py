"""Own tasks are solvable, really checked and different by seed; foreign folders are read or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from routewright.errors import BadInput
from routewright.sandbox import NoWalls
from routewright.step_router.environments import shell_env
from routewright.step_router.environments.protocol import Outcome
from routewright.step_router.environments.shell_env import SUBMIT, ShellEnvironment, load_task, load_tasks

# What a hasty agent would hand in: done, but not as told.
WRONG = {
    "configs-from-backup": "mkdir conf; tar -xzf backup.tar.gz -C conf",
    "errors-by-service": "cat logs/*.log | grep -o 'ERROR [a-z]*' | sort | uniq -c | sort -rn > errors.txt",
    "git-conflict": "cd repo; git merge -q -X theirs --no-edit feature",
    "git-revert": "cd repo; git reset -q --hard $(git log --format=%H --grep='^Tune' -n 1)~1",
    "order-totals": "awk -F, 'NR > 1 {s[$2] += $3} END {for (n in s) print n\",\"s[n]}' orders.csv > totals.csv",
    "release-archive": "tar -czf release.tar.gz project",
    "rotate-logs": "mkdir archive; gzip logs/*.log; mv logs/*.gz archive; true",
    "site-permissions": "chmod -R 755 site",
    "stop-the-worker": "python3 worker.py & sleep 0.5; kill -9 $!; echo 0 > status.txt; echo x > report.txt",
    "word-counts": "tr ' ' '\\n' < text.txt | sort | uniq -c | sort -rn | head -n 5 | awk '{print $2 \"\\t\" $1}' > top.tsv",
}
TASKS = load_tasks()


def solve(environment: ShellEnvironment) -> Outcome:
    while True:
        outcome = environment.step(environment.teacher())
        if outcome.done:
            return outcome


@pytest.fixture
def shell() -> Iterator[ShellEnvironment]:
    environment = ShellEnvironment(TASKS)
    yield environment
    environment.close()


def make(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


DEEP = 'import os\nfor _ in range(2100):\n    os.mkdir("d")\n    os.chdir("d")\n'
CHECK = "from pathlib import Path\n\n\ndef test_answer():\n    assert Path('/app/answer.txt').read_text() == '42\\n'\n"
YAML = "instruction: |-\n  Write 42 to answer.txt\ndifficulty: easy\n"


def test_ten_tasks_each_with_a_wrong_answer() -> None:
    assert sorted(WRONG) == [task.name for task in TASKS]


@pytest.mark.parametrize("task", sorted(WRONG))
def test_the_reference_is_accepted_and_less_is_not(shell: ShellEnvironment, task: str) -> None:
    shell.reset(task, 1)
    assert solve(shell).success
    shell.reset(task, 1)
    assert not shell.step(SUBMIT).success
    shell.reset(task, 1)
    assert not shell.step(WRONG[task]).done
    outcome = shell.step(SUBMIT)
    assert (outcome.success, outcome.done) == (False, True)


def test_the_seed_makes_the_files(shell: ShellEnvironment) -> None:
    told = []
    for seed in (1, 1, 2):
        fresh = ShellEnvironment(TASKS)
        fresh.reset("order-totals", seed)
        told.append(fresh.step("md5sum orders.csv").observation.text)
        fresh.close()
    assert told[0] == told[1] != told[2]


def test_commands_show_output_and_exit_code(shell: ShellEnvironment) -> None:
    start = shell.reset("word-counts", 0)
    assert start.admissible is None
    assert "five most frequent words" in start.objective
    assert shell.step("echo hello; ls missing").observation.text.endswith("[exit code 2]")
    assert shell.step("seq 5000").observation.text.count("\n[...]\n") == 1
    assert shell.step(None).observation.text == "Nothing ran."
    assert "stopped at the output limit" in shell.step("cat /dev/zero").observation.text


def test_last_step_is_checked_too() -> None:
    environment = ShellEnvironment(TASKS, max_steps=2)
    environment.reset("order-totals", 0)
    commands = environment._tasks["order-totals"].solution
    environment.step("true")
    outcome = environment.step(" && ".join(f"({command})" for command in commands))
    environment.close()
    assert (outcome.success, outcome.done) == (True, True)
    with pytest.raises(ValueError, match="over"):
        environment.step("ls")


def test_known_histories_do_not_run_again(shell: ShellEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.reset("word-counts", 0)
    outcomes = [shell.step("echo a > one"), shell.step("ls"), shell.step(SUBMIT)]
    monkeypatch.setattr(shell, "_live", lambda: pytest.fail("ran again"))
    shell.reset("word-counts", 0)
    assert [shell.step("echo a > one"), shell.step("ls"), shell.step(SUBMIT)] == outcomes


def test_other_histories_start_from_a_clean_folder(shell: ShellEnvironment) -> None:
    shell.reset("word-counts", 0)
    shell.step("echo a > one")
    shell.reset("word-counts", 0)
    assert shell.step("ls").observation.text == "text.txt\n[exit code 0]"
    shell.reset("word-counts", 0)
    shell.step("echo a > one")
    assert shell.step("ls; cat one").observation.text == "one\ntext.txt\na\n[exit code 0]"


def test_without_walls_nothing_begins(refused: None) -> None:
    with pytest.raises(NoWalls, match="ROUTEWRIGHT_SANDBOX=open"):
        ShellEnvironment(TASKS)
    ShellEnvironment([replace(TASKS[0], image="debian")])  # runs in a container


def test_a_folder_too_deep_to_list_ends_the_command_and_not_the_run(shell: ShellEnvironment) -> None:
    shell.reset("word-counts", 0)
    command = f"python3 -c '{DEEP}'"
    assert "stopped at the disk limit" in shell.step(command).observation.text
    assert not shell.step(SUBMIT).success
    shell.reset("word-counts", 1)
    assert shell.step("ls").observation.text == "text.txt\n[exit code 0]"


def test_checker_cannot_be_fooled_by_a_file_named_like_a_module(shell: ShellEnvironment) -> None:
    shell.reset("word-counts", 0)
    shell.step("for name in pathlib re json collections; do echo 'import os; os._exit(0)' > $name.py; done")
    assert not shell.step(SUBMIT).success


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_env, "engine_answers", lambda: False)


@pytest.mark.usefixtures("no_engine")
def test_terminal_bench_folders(tmp_path: Path) -> None:
    dockerfile = "FROM debian\n# files\nWORKDIR /app\nCOPY data.txt ./\nCOPY src /app/lib/\n"
    make(
        tmp_path / "first", task_dot_yaml=YAML, tests__test_outputs_dot_py=CHECK, solution_dot_sh="echo 42 > answer.txt\n",
        Dockerfile=dockerfile, data_dot_txt="d\n", src__a_dot_txt="a\n",
    )  # fmt: skip
    make(
        tmp_path / "second", task_dot_toml='version = "1.0"\n', instruction_dot_md="Write 42 to answer.txt\n",
        tests__test_dot_sh="grep -qx 42 answer.txt\n", solution__solve_dot_sh="echo 42 > answer.txt\n",
    )  # fmt: skip
    environment = ShellEnvironment(load_tasks(tmp_path))
    environment.reset("first", 0)
    assert environment.step("cat data.txt lib/a.txt").observation.text == "d\na\n[exit code 0]"
    for task in ("first", "second"):
        environment.reset(task, 0)
        environment.step("echo 41 > answer.txt")
        assert not environment.step(SUBMIT).success
        environment.reset(task, 0)
        assert solve(environment).success
    environment.close()


@pytest.mark.usefixtures("no_engine")
def test_bad_folders(tmp_path: Path) -> None:
    good = {"task_dot_toml": 'version = "1.0"\n', "instruction_dot_md": "Do.\n", "tests__test_dot_sh": "true\n"}
    for name, changes, told in (
        ("no-task", {"task_dot_toml": None}, "expected a task folder with task.toml or task.yaml"),
        ("no-instruction", {"instruction_dot_md": None}, r"instruction.md: no such file or empty"),
        ("blank", {"instruction_dot_md": " \n"}, r"instruction.md: .*expected what the agent is to do"),
        ("no-tests", {"tests__test_dot_sh": None}, r"tests: expected test_outputs.py or test.sh"),
        ("half", {"task_dot_toml": "version = "}, r"task.toml: not readable as TOML"),
        ("image", {"Dockerfile": "FROM x\nRUN apt-get install y\n"}, r"Dockerfile: 'RUN .* needs Docker"),
        ("outside", {"Dockerfile": "FROM x\nCOPY a ../etc/\n"}, "copies outside /app"),
        ("gone", {"Dockerfile": "FROM x\nCOPY a .\n"}, "a is not there to copy"),
    ):
        files = {key: text for key, text in {**good, **changes}.items() if text is not None}
        with pytest.raises(BadInput, match=told):
            load_task(make(tmp_path / name, **files))
    with pytest.raises(BadInput, match=r"task.yaml: field instruction is missing"):
        load_task(make(tmp_path / "yaml", task_dot_yaml="difficulty: easy\n", tests__test_dot_sh="true\n"))
    with pytest.raises(BadInput, match="expected fields and values, got list"):
        load_task(make(tmp_path / "list", task_dot_yaml="- a\n", tests__test_dot_sh="true\n"))
    with pytest.raises(BadInput, match="no such folder"):
        load_tasks(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="found none"):
        load_tasks(tmp_path / "empty")


def test_broken_setup_and_missing_solution(tmp_path: Path) -> None:
    folder = make(
        tmp_path / "task",
        task_dot_toml="",
        instruction_dot_md="Do.\n",
        tests__test_outputs_dot_py=CHECK,
        setup_dot_py="1 / 0\n",
    )
    environment = ShellEnvironment([load_task(folder)])
    environment.reset("task", 0)
    with pytest.raises(BadInput, match=r"setup.py: failed in the sandbox: .*ZeroDivisionError"):
        environment.step("ls")
    with pytest.raises(BadInput, match=r"no solution.sh"):
        environment.teacher()
    with pytest.raises(BadInput, match="no such task"):
        environment.reset("other", 0)
