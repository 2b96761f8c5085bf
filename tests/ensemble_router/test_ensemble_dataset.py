"""The questions of a run: splits apart, files beside families, the majority-answer baseline."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="reasoning-gym is in the ensemble extra")

from routewright.ensemble_router.dataset import OUT_OF_DISTRIBUTION, load_split, majority_answers, synthesize
from routewright.ensemble_router.fetch import fetch_tasks
from routewright.ensemble_router.profile import EnsembleProfile, load_ensemble_profile
from routewright.ensemble_router.tasks import Task
from routewright.errors import BadInput


def profile(**tasks: Any) -> EnsembleProfile:
    content = load_ensemble_profile("smoke").model_dump()
    content["tasks"].update({"train": 12, "dev": 2, "test": 4, **tasks})
    return EnsembleProfile.model_validate(content)


def test_splits_share_no_question_and_the_seed_decides_all(tmp_path: Path) -> None:
    out = ({"family": "count_bits", "parameters": {"max_n": 4095}},)
    first = synthesize(profile(out_of_distribution=out), tmp_path / "a", 1)
    second = synthesize(profile(out_of_distribution=out), tmp_path / "b", 1)
    assert first == second
    assert first["tasks_sha256"] != synthesize(profile(), tmp_path / "c", 2)["tasks_sha256"]
    prompts = [{task.prompt for task in load_split(tmp_path / "a", split)} for split in ("train", "dev", "test")]
    assert [len(one) for one in prompts] == [36, 6, 12]
    assert not prompts[0] & (prompts[1] | prompts[2])
    assert not prompts[1] & prompts[2]
    assert {task.domain for task in load_split(tmp_path / "a", OUT_OF_DISTRIBUTION)} == {"count_bits"}
    assert {task.check for task in load_split(tmp_path / "a", "test")} == {"exact"}
    with pytest.raises(BadInput, match="synthesize stage"):
        load_split(tmp_path / "c", OUT_OF_DISTRIBUTION)


def test_two_files_may_number_their_rows_alike_but_not_be_called_alike(tmp_path: Path) -> None:
    paths = []
    for name in ("sums", "more", "other/sums"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        rows = [{"question": f"{name} {n} plus 1?", "answer": f"#### {n + 1}", "id": str(n)} for n in range(200)]
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        paths.append({"path": path, "domain": name})
    synthesize(profile(families=(), files=paths[:2]), tmp_path / "out", 0)
    assert {task.id.split("/")[0] for task in load_split(tmp_path / "out", "train")} == {"sums", "more"}
    with pytest.raises(BadInput, match="two files of one name have a train question 'sums/"):
        synthesize(profile(families=(), files=paths[::2], train=200), tmp_path / "again", 0)


def test_files_are_split_by_prompt_and_a_file_without_a_split_is_told(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(200)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    told = synthesize(profile(families=(), files=({"path": path, "domain": "sums"},)), tmp_path / "out", 0)
    assert told["questions"] == {"train": {"sums": 12}, "dev": {"sums": 2}, "test": {"sums": 4}, OUT_OF_DISTRIBUTION: {}}
    path.write_text(json.dumps(rows[0]), encoding="utf-8")
    with pytest.raises(BadInput, match="expected at least one"):
        synthesize(profile(families=(), files=({"path": path},)), tmp_path / "few", 0)


MATH = {"problem": "Simplify.", "solution": r"So \boxed{\frac{1}{2}}."}
LANGUAGE = {"prompt": "Write.", "instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]}
SUM = {"question": "1 plus 1?", "answer": "#### 2"}


@pytest.mark.parametrize(
    ("row", "missing"), [(MATH, "math-verify"), (MATH, "reasoning-gym"), (LANGUAGE, "langdetect"), (SUM, None)]
)
def test_tasks_that_need_the_extra_are_not_fetched_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], missing: str | None
) -> None:
    def version(package: str) -> str:
        if package == missing or missing is None:
            raise PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr("routewright.ensemble_router.fetch.version", version)
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(SUM) + "\n" + json.dumps(row), encoding="utf-8")
    settled = profile(families=(), files=({"path": path},))
    if missing is None:
        assert fetch_tasks(tmp_path / "out", settled)["tasks"] == {str(path): 2}
        return
    with pytest.raises(BadInput, match=rf"^{missing} is not installed: expected `pip install 'routewright\[ensemble\]'`$"):
        fetch_tasks(tmp_path / "out", settled)


def test_the_majority_answer_comes_from_training() -> None:
    def task(name: str, answer: str) -> Task:
        return Task(id=name, prompt=name, answer=answer, domain="d", check="exact")

    train = [task("1", "a"), task("2", "b"), task("3", "b")]
    test = [task("4", "b"), task("5", "a"), task("6", "a"), task("7", "a")]
    assert majority_answers(train, test) == {"d": 0.25}
