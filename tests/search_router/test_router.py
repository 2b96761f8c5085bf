"""A trained router as a folder: what it decides, what it refuses, what it is made of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from routewright.errors import BadInput
from routewright.pools.pool import Pool
from routewright.pools.search import PoolSearch
from routewright.search_router.decision import Decision, Interval
from routewright.search_router.examples import Example
from routewright.search_router.router import (
    FILES,
    Router,
    as_interval,
    choose_agents,
    load_model,
    load_router,
    save_router,
    search_query,
    set_thresholds,
)

TODAY = date(2025, 6, 15)


@pytest.fixture(scope="module")
def router(rl_folder: Path) -> Router:
    return load_router(rl_folder, torch.float32)


@pytest.fixture
def copied(rl_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rl_folder, tmp_path / "model"))


# --- Choosing agents


@pytest.mark.parametrize(
    ("probabilities", "second", "abstain", "expected"),
    [
        ([0.2, 0.9, 0.5], 1.01, 0.0, ([1], False)),  # above 1: one agent only
        ([0.2, 0.9, 0.5], 0.5, 0.0, ([1, 2], False)),
        ([0.2, 0.9, 0.45], 0.5, 0.0, ([1, 2], False)),  # exactly the share
        ([0.2, 0.9, 0.44], 0.5, 0.0, ([1], False)),
        ([0.2, 0.9, 0.5], 0.1, 0.0, ([1, 2, 0], False)),  # most probable first
        ([0.4, 0.4, 0.4], 1.01, 0.0, ([0], False)),  # ties in pool order
        ([0.4, 0.4, 0.4], 1.0, 0.0, ([0, 1, 2], False)),
        ([0.2, 0.9, 0.5], 0.1, 0.95, ([2], True)),  # the fallback alone
        ([0.2, 0.9, 0.5], 0.1, 0.9, ([1, 2, 0], False)),  # at the threshold it does not abstain
        ([0.0, 0.0, 0.0], 1.01, 0.0, ([0], False)),
        ([0.0, 0.0, 0.0], 1.01, 1e-9, ([2], True)),
    ],
)
def test_choosing_agents(
    probabilities: list[float], second: float, abstain: float, expected: tuple[list[int], bool]
) -> None:
    assert choose_agents(np.array(probabilities), second, abstain, fallback=2) == expected


# --- Deciding


def test_a_decision_is_whole(router: Router, splits: dict[str, list[Example]]) -> None:
    for example in splits["test"]:
        decision = router.decide(example.query, example.reference)
        assert decision.agents
        assert len(set(decision.agents)) == len(decision.agents)
        assert list(decision.scores) == ["kitchen", "garden", "office"]
        assert all(0 <= p <= 1 for p in decision.scores.values())
        assert decision.bitmask == "".join("1" if name in decision.agents else "0" for name in decision.scores)
        ranked = [decision.scores[name] for name in decision.agents]
        assert ranked == sorted(ranked, reverse=True)
        assert ranked[0] == max(decision.scores.values())
        assert all(word in example.query.lower() for word in decision.keywords)
        assert decision.model_version == router.model_version
        assert json.loads(json.dumps(decision.to_json()))["agents"] == decision.agents


def test_it_decides_one_query_as_it_decides_many(router: Router, splits: dict[str, list[Example]]) -> None:
    features = [router.featurizer(example.query, example.reference) for example in splits["test"]]
    together, valid = router.answers(features, batch_size=7)
    assert valid.tolist() == router.answers(features)[1].tolist()
    for feature, row in zip(features, together, strict=True):
        assert len(row) == 3 + len(feature.candidates) + 1
        np.testing.assert_allclose(router.probabilities([feature])[0], row, atol=1e-5)


def test_outcomes_taught_what_intent_did_not_know(
    router: Router, sft_folder: Path, splits: dict[str, list[Example]]
) -> None:
    """Kettles are on the kitchen's card and among the office's pages; the others' queries are not lost for it."""

    def own(router: Router, examples: list[Example]) -> float:
        first = [router.decide(example.query, example.reference).agents[0] for example in examples]
        return float(np.mean([example.outcome[agent] for example, agent in zip(examples, first, strict=True)]))

    before = load_router(sft_folder, torch.float32)
    misleading = [example for example in splits["train"] if example.mismatch()]
    assert len(misleading) == 16
    assert own(router, misleading) > max(0.85, own(before, misleading))
    plain = [example for example in splits["test"] if not example.mismatch()]
    assert own(router, plain) > 0.9


def test_times_are_resolved_against_the_reference_date(router: Router) -> None:
    query = "how do I repair the red oven since last year"
    features = router.featurizer(query, TODAY)
    certain = np.concatenate([np.full(3 + len(features.candidates), 0.4), [0.9]])
    decision = router.decision(features, certain)
    assert (decision.start, decision.end) == (date(2024, 1, 1), None)
    assert as_interval(decision) == Interval(date(2024, 1, 1), None)
    assert decision.keywords == []
    unsure = np.concatenate([np.full(3 + len(features.candidates), 0.6), [0.4]])
    decision = router.decision(features, unsure)
    assert as_interval(decision) is None
    assert decision.keywords == features.candidates
    nothing = router.featurizer("how do I repair the red oven", TODAY)
    assert as_interval(router.decision(nothing, certain[: 3 + len(nothing.candidates) + 1])) is None, "nothing to say when"


def test_abstaining_asks_the_fallback(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    features = router.featurizer("the red rose", TODAY)
    monkeypatch.setitem(router.description, "abstain", 0.5)
    decision = router.decision(features, np.full(3 + len(features.candidates) + 1, 0.4))
    assert decision.agents == ["office"]
    assert decision.bitmask == "001"
    assert decision.abstained


# --- Bad input


@pytest.mark.parametrize("query", ["", " ", "\n\t\u2003"])
def test_an_empty_query(router: Router, query: str) -> None:
    with pytest.raises(BadInput, match="query: expected a text with at least one character that is not a blank"):
        router.decide(query, TODAY)


QUERIES = [
    "word " * 20_000, "x" * 100_000, "🚣" * 100_000, "since 2021 " * 10_000, "שלום מה שלומך " * 8_000, "?", "\x00", "🚣",
    "كيف أصلح الغلاية", "\u202e\u202bkettle\u202c", "e\u0301" * 1000, "<pad><eos>", "' OR 1=1; --", "{}[]\\\"", "\ud83d",
    "a\u2028b", "between May 2024 and March 2023", "from 2024-05-02 to 2024-05-01", "since 31 February 2024",
    "before year 0", "in 99999999999999999999 days", "last " * 3000,
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES, ids=[str(i) for i in range(len(QUERIES))])
def test_any_other_query_is_decided_and_searched(router: Router, pool: Pool, query: str) -> None:
    search = PoolSearch(pool)
    for reference in (TODAY, date.min, date.max, None):
        decision = router.decide(query, reference)
        assert set(decision.agents) <= set(pool.names)
        assert decision.agents
        interval = as_interval(decision)  # refuses one that ends before it starts
        requests = [(agent, search_query(query, decision.keywords), interval) for agent in decision.agents]
        assert len(search.search_many(requests)) == len(requests)
        assert search.failures == {}
        json.dumps(decision.to_json())


def test_only_the_beginning_of_a_long_query_counts(router: Router) -> None:
    query = "how do I repair the red oven " * 200
    assert router.decide(query + "rose " * 20_000, TODAY) == router.decide(query, TODAY)


def test_what_is_searched_is_the_query_then_the_keywords() -> None:
    assert search_query("repair the kettle", ["kettle", "lid"]) == "repair the kettle kettle lid"
    assert search_query("repair", []) == "repair"


# --- The folder


def test_the_folder_describes_itself(rl_folder: Path, pool: Pool) -> None:
    description = json.loads((rl_folder / "router.json").read_text())
    assert description["agents"] == pool.names == ["kitchen", "garden", "office"]
    assert description["fallback"] == "office"
    assert description["pool_digest"] == pool.digest
    assert description["stage"] == "rl"
    assert {file.name for file in rl_folder.iterdir()} >= set(FILES)
    assert list(load_model(rl_folder)[0].cards) == pool.names, "in pool order, which no alphabet knows"


def test_nothing_in_the_folder_is_a_pickle(sft_folder: Path, rl_folder: Path) -> None:
    for folder in (sft_folder, rl_folder):
        for file in folder.rglob("*"):
            if file.is_file():
                head = file.read_bytes()[:2]
                assert head != b"PK", file  # a zip: how torch pickles
                assert head[:1] != b"\x80", file  # a pickle's first opcode
                assert file.suffix not in (".bin", ".pt", ".pth", ".pkl", ".pickle"), file


def test_saved_and_loaded_it_decides_the_same(
    router: Router, rl_folder: Path, pool: Pool, splits: dict[str, list[Example]], tmp_path: Path
) -> None:
    model, tokenizer, description = load_model(rl_folder)
    save_router(model, tokenizer, tmp_path / "again", pool, {}, description["second"], description["abstain"])
    again = load_router(tmp_path / "again", torch.float32)

    def decisions(router: Router) -> list[Decision]:
        return [router.decide(example.query, example.reference) for example in splits["test"]]

    assert decisions(again) == decisions(router)
    assert again.model_version == router.model_version, "the version is that of the weights"


def test_the_saved_weights_are_the_models(rl_folder: Path, pool: Pool, tmp_path: Path) -> None:
    """A change of any tensor is in the folder, tied or not."""
    model, tokenizer, _ = load_model(rl_folder)
    before = json.loads((rl_folder / "router.json").read_text())["model_version"]
    for name, tensor in model.state_dict().items():
        if name != "top.embed_tokens.weight":
            tensor.add_(0.5)
    save_router(model, tokenizer, tmp_path / "changed", pool, {})
    changed, _, description = load_model(tmp_path / "changed")
    assert description["model_version"] != before
    for (name, expected), found in zip(model.state_dict().items(), changed.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(BadInput, match=rf"model folder {copied}: {name} is missing"):
        load_router(copied)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"model folder .*nowhere: no such folder"):
        load_router(tmp_path / "nowhere")


@pytest.mark.parametrize("where", [0.1, 0.5, 0.99])
def test_a_flipped_byte(copied: Path, where: float) -> None:
    content = bytearray((copied / "model.safetensors").read_bytes())
    content[int(where * len(content))] ^= 1
    (copied / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.safetensors does not match the digest in router\.json"):
        load_router(copied)


def _half(folder: Path) -> None:
    text = (folder / "router.json").read_text()
    (folder / "router.json").write_text(text[: len(text) // 2])


def _no_digest(folder: Path) -> None:
    description = json.loads((folder / "router.json").read_text())
    del description["weights_sha256"]
    (folder / "router.json").write_text(json.dumps(description))


def _list(folder: Path) -> None:
    (folder / "router.json").write_text("[]")


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _empty_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize("damage", [_half, _no_digest, _list, _broken_config, _empty_config, _broken_tokenizer])
def test_a_file_that_is_damaged(copied: Path, damage: Callable[[Path], None]) -> None:
    damage(copied)
    with pytest.raises(BadInput, match=rf"model folder {copied}"):
        load_router(copied)


def test_thresholds_are_written_without_touching_the_rest(copied: Path) -> None:
    before = json.loads((copied / "router.json").read_text())
    set_thresholds(copied, 0.7, 0.05)
    after = json.loads((copied / "router.json").read_text())
    assert (after.pop("second"), after.pop("abstain")) == (0.7, 0.05)
    assert after == {key: value for key, value in before.items() if key not in ("second", "abstain")}
    assert load_router(copied).description["second"] == 0.7
    assert not list(copied.glob("*.partial"))


def test_serving_a_router_needs_no_trainer() -> None:
    """Importing it loads none of the training libraries: a serving image does not have them."""
    code = (
        "import sys, routewright.search_router.router;"
        "print([name for name in ('trl', 'peft', 'datasets', 'kfp') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_lower_precision_decides_alike(rl_folder: Path, router: Router, splits: dict[str, list[Example]]) -> None:
    half: Any = load_router(rl_folder, torch.bfloat16)
    assert half.model.top.dtype == torch.bfloat16
    for example in splits["test"][:10]:
        a, b = (r.decide(example.query, example.reference).scores for r in (half, router))
        assert a == pytest.approx(b, abs=0.05)


@pytest.mark.parametrize(
    ("field", "value"), [("second", "x"), ("second", float("nan")), ("abstain", None), ("fallback", "nobody")]
)
def test_a_faulty_value_in_the_description_is_named(copied: Path, field: str, value: object) -> None:
    file = copied / "router.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(BadInput, match=rf"router\.json: {field}: expected"):
        load_router(copied)
