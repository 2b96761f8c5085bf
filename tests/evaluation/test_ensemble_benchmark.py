"""The benchmark's tables over seeds: the target, pooled differences, domains and the curve, from made-up evaluations."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from simulated_ensemble import simulate, small

pytest.importorskip("peft", reason="peft is in the train extra")

from routewright.ensemble_router.pooled import Records
from routewright.ensemble_router.profile import EnsembleProfile, load_ensemble_profile

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "ensemble_router.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ensemble_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def lines(text: str, title: str) -> list[list[str]]:
    """Cells of the table under a title, its head left out."""
    table = text.split(f"**{title}")[1].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_tables_over_two_seeds(benchmark: ModuleType) -> None:
    """`all` is the better vote and asks three agents for familiarity's one: two thirds of the tokens are saved."""
    results, _ = small()
    records = [
        {row: Records(o.reward, o.tokens) for row, o in simulate(n, seed).items()}
        for n, seed in ((300, 0), (60, 1), (300, 2))
    ]
    found = [benchmark.Found(0, results, records[0], records[1]), benchmark.Found(7, results, records[2], {})]
    text = benchmark.tables(found)
    target = lines(text, "Target")
    assert [line[0] for line in target] == ["0", "7", "pooled"]
    assert all(line[1] == "all" and line[3].startswith("6") for line in target)
    means = [(r["familiarity"].reward - r["all"].reward).mean() for r in (records[0], records[2])]
    assert [float(line[2].split()[0]) for line in target] == pytest.approx([*means, np.mean(means)], abs=6e-4)
    assert [line[4] for line in target] == ["yes" if mean >= -0.01 else "no" for mean in (*means, np.mean(means))]
    pooled = {line[0]: line[1:] for line in lines(text, "familiarity minus another row, accuracy, mean over seeds")}
    gain = np.mean([(r["familiarity"].reward - r["warm"].reward).mean() for r in (records[0], records[2])])
    assert float(pooled["warm"][0].split()[0]) == pytest.approx(gain, abs=6e-4)
    low, high = (float(end) for end in pooled["warm"][1].strip("[]").split(", "))
    one, two = ((r["familiarity"].reward - r["warm"].reward).mean() for r in (records[0], records[2]))
    half = 12.706 * abs(one - two) / 2  # t(1) · s / √2, which is half the distance
    assert (low, high) == pytest.approx((gain - half, gain + half), abs=6e-4)
    assert pooled["warm"][2:] == ["", ""]  # one seed has no records out of distribution
    domains = lines(text, "Accuracy by domain")
    assert [line[0] for line in domains] == ["gcd", "spell_backward", "gcd-large"]
    served = next(row for row in results.rows if row.name == "familiarity").metrics["accuracy/gcd"].mean
    assert domains[0][-1].startswith(f"{served:.3f} (")
    assert [line[:2] for line in lines(text, "The co-evolved pair over τ")] == [[s, t] for s in "07" for t in ("0.1", "1")]


def test_an_evaluation_of_other_rules_is_made_anew_from_the_kept_answers(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_ensemble_profile("smoke")
    out, evaluated = tmp_path / "evaluation", []
    (out / "answers").mkdir(parents=True)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "dataset.json").write_text('{"tasks_sha256": "0"}', encoding="utf-8")
    (out / "answers" / "warm-test.jsonl").write_text("", encoding="utf-8")
    results, _ = small()

    def evaluate(dataset: Path, trained: Path, folder: Path, profile: EnsembleProfile, seed: int) -> None:
        evaluated.append((folder / "summary.json").is_file())
        wanted = benchmark.evaluation_identity(dataset, trained, profile, seed)
        (folder / "coevolution.json").write_text(json.dumps(wanted), encoding="utf-8")
        (folder / "results.json").write_text(results.model_dump_json(), encoding="utf-8")
        for name in ("summary.json", benchmark.OOD_RECORDS):
            (folder / name).write_text("", encoding="utf-8")

    monkeypatch.setattr(benchmark, "coevolve_rules", lambda *_: None)
    monkeypatch.setattr(benchmark, "evaluate_ensemble", evaluate)
    content = profile.model_dump()
    content["coevolve"]["rules"] = ["familiarity", "last-layer"]
    more = EnsembleProfile.model_validate(content)
    for one in (profile, profile, more):
        assert benchmark.run_seed(tmp_path, one, 0).results == results
    (out / benchmark.OOD_RECORDS).unlink()  # one that was made before there were these
    benchmark.run_seed(tmp_path, more, 0)
    assert evaluated == [False, True, False, False]
    assert (out / "answers" / "warm-test.jsonl").is_file()
