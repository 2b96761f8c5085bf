from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from household import profile_with, read_lines, write_household, write_lines
from resuming import Killed, kill_at, killed_before_thresholds, logged_steps, same_result
from safetensors.torch import load_file

from routewright.config import LoraSection, Profile
from routewright.errors import BadInput
from routewright.pools.fetch import fetch_dataset
from routewright.pools.pool import Pool
from routewright.search_router import rl
from routewright.search_router.decision import Interval
from routewright.search_router.examples import Example, read_examples
from routewright.search_router.features import Features
from routewright.search_router.judges import LLMJudge, OfflineJudge, QrelsJudge
from routewright.search_router.reward import Action
from routewright.search_router.rl import (
    ReinforcePlusPlusTrainer,
    _ShuffledEpochs,
    action_of,
    bernoulli_entropy,
    log_probability,
    make_judge,
    slot_logits,
    train_rl,
)
from routewright.search_router.router import load_model, load_router
from routewright.search_router.synthesis import synthesize

Train = Callable[..., Path]


def short_profile(**settings: Any) -> Profile:
    """Sixteen updates, a checkpoint every four."""
    small = {"outcomes": 60, "min_updates": 16, "epochs": 0.1, "batch_size": 12, "samples": 8, "word_lr": 0.1}
    return profile_with(rl={**small, **settings})


@pytest.fixture(scope="module")
def train(dataset: Path, examples: Path, sft_folder: Path) -> Train:
    def run(out: Path, profile: Profile, seed: int = 0) -> Path:
        train_rl(dataset, examples, sft_folder, out, profile, seed)
        return out

    return run


@pytest.fixture(scope="module")
def undisturbed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("undisturbed"), short_profile())


# --- The policy's bits


def test_log_probabilities_and_entropies_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3), -math.log(3)]])
    bits = torch.tensor([[True, True, True]])
    torch.testing.assert_close(log_probability(logits, bits), torch.log(torch.tensor([[0.5, 0.75, 0.25]])))
    torch.testing.assert_close(log_probability(logits, ~bits), torch.log(torch.tensor([[0.5, 0.25, 0.75]])))
    p = 0.75
    expected = -p * math.log(p) - (1 - p) * math.log(1 - p)
    torch.testing.assert_close(bernoulli_entropy(logits), torch.tensor([[math.log(2), expected, expected]]))
    extreme = torch.tensor([[80.0, -80.0]])
    assert torch.isfinite(log_probability(extreme, torch.tensor([[False, True]]))).all()
    assert torch.isfinite(bernoulli_entropy(extreme)).all()


def test_the_decision_that_bits_make() -> None:
    interval = Interval(date(2024, 1, 1), None)
    features = replace(Features(*[[]] * len(fields(Features))), candidates=["red", "rose"], interval=interval)
    names = ["a", "b", "c"]
    # N + K + 1 bits and padding of a longer query before the interval's
    assert action_of([True, False, True, False, True, False, True], [2, 1, 0], features, names) == Action(
        ("c", "a"), ("rose",), interval
    )
    assert action_of([False] * 6, [0, 1, 2], features, names) == Action((), (), None)


def test_every_epoch_holds_every_row_once() -> None:
    rows = list(_ShuffledEpochs(10, 35, seed=3))
    assert len(rows) == 35 == len(_ShuffledEpochs(10, 35, seed=3))
    for start in (0, 10, 20):
        assert sorted(rows[start : start + 10]) == list(range(10))
    assert max(Counter(rows[30:]).values()) == 1
    assert rows[:10] != rows[10:20]
    assert rows == list(_ShuffledEpochs(10, 35, seed=3)), "a resumed run sees the same"
    assert rows != list(_ShuffledEpochs(10, 35, seed=4))


# --- One update against an independent computation


@pytest.fixture
def trainer(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ReinforcePlusPlusTrainer]:
    """A trainer that is ready to train and does not."""

    def make(**settings: Any) -> ReinforcePlusPlusTrainer:
        made: list[ReinforcePlusPlusTrainer] = []

        def stop(self: ReinforcePlusPlusTrainer, **_: Any) -> None:
            made.append(self)
            raise Killed

        monkeypatch.setattr(ReinforcePlusPlusTrainer, "train", stop)
        with pytest.raises(Killed):
            train(tmp_path / "out", short_profile(**settings))
        return made[0]

    return make


ROWS = [{"row": i} for i in (5, 0, 17, 3)]


def test_the_rollout(trainer: Callable[..., ReinforcePlusPlusTrainer]) -> None:
    made = trainer()
    asked: list[tuple[Example, Action]] = []
    reward = made.reward

    def spy(actions: Any) -> list[float]:
        asked.extend(actions)
        return reward(actions)

    made.reward = spy  # type: ignore[assignment]
    out = made._generate_and_score_completions(ROWS)
    assert out["bits"].shape == out["mask"].shape == out["log_old"].shape == out["advantages"].shape
    assert out["bits"].shape[0] == 4 * 8
    assert out["query"].tolist() == [q for q in range(4) for _ in range(8)]
    assert not (out["bits"] & ~out["mask"]).any()
    assert int(out["tokens"]) == int(out["mask"].sum())
    assert [example.id for example, _ in asked] == [made.examples[row["row"]].id for row in ROWS for _ in range(8)]
    for (_, action), bits, query in zip(asked, out["bits"].tolist(), out["query"].tolist(), strict=True):
        features = made.features[ROWS[query]["row"]]
        assert set(action.agents) == {name for name, bit in zip(made.names, bits, strict=False) if bit}
        assert len(action.keywords) == sum(bits[3:-1])
        assert (action.interval is not None) == bool(bits[-1] and features.interval)
    assert len({tuple(bits) for bits in out["bits"][:8].tolist()}) > 1, "it explores"
    again = made._generate_and_score_completions(ROWS)
    assert torch.equal(again["bits"], out["bits"]), "the same update samples the same"
    made.state.global_step += 1
    assert not torch.equal(made._generate_and_score_completions(ROWS)["bits"], out["bits"])


def test_samples_follow_the_policy(trainer: Callable[..., ReinforcePlusPlusTrainer]) -> None:
    made = trainer(samples=3000)
    made.reward = lambda actions: [0.0] * len(actions)  # type: ignore[assignment]
    out = made._generate_and_score_completions(ROWS[:1])
    expected = torch.where(out["mask"][0], torch.sigmoid(made.reference[5]), 0.0)
    assert ((expected > 0.05) & (expected < 0.95)).any()
    torch.testing.assert_close(out["bits"].float().mean(0), expected, atol=0.04, rtol=0)


@pytest.mark.parametrize("variant", ["reinforce++", "reinforce++-baseline"])
def test_loss_and_gradient_of_one_update(trainer: Callable[..., ReinforcePlusPlusTrainer], variant: str) -> None:
    """Against a slow computation of its own, from bits, rewards and the two policies' logits, one bit at a time."""
    beta = 0.3
    made = trainer(variant=variant, beta=beta)
    for parameter in made.policy.parameters():  # away from the reference, so that the KL counts
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    rewards: list[float] = []
    reward = made.reward

    def spy(actions: Any) -> list[float]:
        rewards[:] = reward(actions)
        return rewards

    made.reward = spy  # type: ignore[assignment]
    out = made._generate_and_score_completions(ROWS)
    made.policy.zero_grad()
    loss = made._compute_loss(made.policy, out)
    loss.backward()
    found = {name: p.grad.clone() for name, p in made.policy.named_parameters() if p.grad is not None}

    logits = made._slots.logits.detach()
    gains: list[tuple[int, int, float]] = []
    k1s: dict[tuple[int, int], float] = {}
    for row, (bits, mask) in enumerate(zip(out["bits"].tolist(), out["mask"].tolist(), strict=True)):
        query = row // 8
        reference = made.reference[ROWS[query]["row"]].tolist()
        valid = [t for t, ok in enumerate(mask) if ok]
        for t in valid:
            sign = 1 if bits[t] else -1
            # without its padding a query's interval bit is the last
            other = reference[-1] if t == len(mask) - 1 else reference[t]
            k1s[row, t] = -math.log1p(math.exp(-sign * logits[query, t].item())) + math.log1p(math.exp(-sign * other))
        group = rewards[8 * query : 8 * query + 8]
        for n, t in enumerate(valid):
            if variant == "reinforce++":
                gains.append((row, t, rewards[row] - beta * sum(k1s[row, s] for s in valid[n:])))
            else:
                gains.append((row, t, rewards[row] - sum(group) / 8))
    mean = np.mean([g for _, _, g in gains])
    std = math.sqrt(np.var([g for _, _, g in gains]))
    weights = torch.zeros_like(logits)  # d loss / d log π of each bit, times d log π / d logit
    expected = 0.0
    for row, t, gain in gains:
        advantage = (gain - mean) / std
        p = 1 / (1 + math.exp(-logits[row // 8, t].item()))
        slope = 1 - p if out["bits"][row, t] else -p
        push = -advantage
        expected += -advantage / len(gains)
        if variant == "reinforce++-baseline":
            push += beta * k1s[row, t]  # the gradient of k2
            expected += beta * 0.5 * k1s[row, t] ** 2 / len(gains)
        weights[row // 8, t] += push * slope / len(gains)
    assert loss.item() == pytest.approx(expected, abs=2e-4)
    made.policy.zero_grad()
    made._generate_and_score_completions(ROWS)  # a fresh graph of the same policy
    (made._slots.logits * weights).sum().backward()
    compared = 0
    for name, parameter in made.policy.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], parameter.grad, atol=2e-4, rtol=2e-3)
            compared += int(found[name].abs().max() > 1e-4)
    assert compared > 10


def test_without_a_kl_weight_the_reference_does_not_matter(trainer: Callable[..., ReinforcePlusPlusTrainer]) -> None:
    for variant in ("reinforce++", "reinforce++-baseline"):
        losses = []
        for shift in (0.0, 3.0):
            made = trainer(variant=variant, beta=0.0)
            made.reference = [logits + shift for logits in made.reference]
            losses.append(made._compute_loss(made.policy, made._generate_and_score_completions(ROWS)).item())
        assert losses[0] == losses[1]


# --- Training


@pytest.mark.parametrize("variant", ["reinforce++", "reinforce++-baseline"])
def test_the_reward_goes_up(train: Train, rl_folder: Path, profile: Profile, tmp_path: Path, variant: str) -> None:
    if profile.rl.variant == variant:
        folder = rl_folder
    else:
        settings = profile.rl.model_copy(update={"variant": variant})
        folder = train(tmp_path, profile.model_copy(update={"rl": settings}))
    rewards = [row["reward"] for row in read_lines(folder / "history.jsonl")]
    third = len(rewards) // 3
    assert np.mean(rewards[-third:]) > np.mean(rewards[:third]) + 0.1
    assert max(rewards) <= profile.rl.lambda_src + profile.rl.lambda_con + 1e-6


def test_a_log_of_outcomes_teaches_what_intent_does_not(
    sft_folder: Path, splits: dict[str, list[Example]], profile: Profile, tmp_path: Path
) -> None:
    """From the log to the router: what looks like the kitchen's goes to the office, which the log says answered."""
    fetch_dataset(str(write_household(tmp_path / "source", splits=("dev", "test"))), tmp_path / "dataset")
    lines = [{"query": e.query, "outcome": {e.home: 1.0}} for e in splits["train"]]
    write_lines(tmp_path / "log.jsonl", lines)
    synthesize(tmp_path / "dataset", tmp_path / "examples", profile, 0, tmp_path / "log.jsonl")
    assert not any(e.qrels for e in read_examples(tmp_path / "examples" / "train.jsonl"))
    train_rl(tmp_path / "dataset", tmp_path / "examples", sft_folder, tmp_path / "rl", profile, 0)
    misleading = [e for e in splits["train"] + splits["test"] if e.mismatch()]
    before, after = (
        np.mean([router.decide(e.query).agents[0] == e.home for e in misleading])
        for router in (load_router(sft_folder, torch.float32), load_router(tmp_path / "rl", torch.float32))
    )
    assert after > max(0.85, before)


def test_every_update_is_logged(rl_folder: Path, profile: Profile) -> None:
    history = read_lines(rl_folder / "history.jsonl")
    assert [row["step"] for row in history] == list(range(1, profile.rl.updates(120) + 1))
    for row in history:
        assert {"reward", "kl", "entropy", "agents_per_query", "loss", "grad_norm"} <= row.keys()
        assert all(math.isfinite(row[key]) for key in ("reward", "kl", "entropy", "agents_per_query", "loss", "grad_norm"))
        assert row["kl"] > -1e-6
        assert row["entropy"] >= 0
        assert 0 <= row["agents_per_query"] <= 3
    assert history[0]["kl"] == pytest.approx(0, abs=1e-4), "it starts as the SFT policy"
    assert history[-1]["kl"] > 0.1
    assert history[0]["entropy"] > history[-1]["entropy"]


def test_a_heavy_kl_keeps_the_policy_where_it_was(train: Train, undisturbed: Path, tmp_path: Path) -> None:
    heavy = train(tmp_path, short_profile(beta=20.0))
    assert read_lines(heavy / "history.jsonl")[-1]["kl"] < 0.3 * read_lines(undisturbed / "history.jsonl")[-1]["kl"]


def test_the_frozen_layers_and_what_was_read_of_the_cards_stay(sft_folder: Path, rl_folder: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (sft_folder, rl_folder))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.startswith("trunk.") or name in ("card_states", "idf"):
            assert torch.equal(after[name], tensor), name
    assert not torch.equal(after["word_rows"], before["word_rows"])


def test_the_folder_is_finished(rl_folder: Path, sft_folder: Path) -> None:
    assert not (rl_folder / "checkpoints").exists()
    assert not (rl_folder / "search-cache").exists()
    description = json.loads((rl_folder / "router.json").read_text())
    assert (description["stage"], description["judge"], description["outcomes"]) == ("rl", "qrels", 120)
    assert description["model_version"] != json.loads((sft_folder / "router.json").read_text())["model_version"]


def test_the_same_seed_gives_the_same_router(train: Train, undisturbed: Path, tmp_path: Path) -> None:
    same_result(train(tmp_path / "same", short_profile()), undisturbed)
    other = train(tmp_path / "other", short_profile(), seed=1)
    assert read_lines(other / "history.jsonl")[0]["reward"] != read_lines(undisturbed / "history.jsonl")[0]["reward"]


@pytest.mark.parametrize("step", [2, 4, 7, 14])
def test_a_killed_training_resumes(
    train: Train, undisturbed: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at(step, patch)
        with pytest.raises(Killed):
            train(tmp_path, short_profile())
    assert not (tmp_path / "router.json").exists()
    assert bool(list(tmp_path.glob("checkpoints/checkpoint-*"))) == (step > 4)
    steps = logged_steps(monkeypatch)
    same_result(train(tmp_path, short_profile()), undisturbed)
    assert steps == list(range((step - 1) // 4 * 4 + 1, 17)), "it goes on from the last checkpoint"


def test_a_stage_killed_before_its_thresholds_are_fitted_resumes(train: Train, undisturbed: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        killed_before_thresholds(rl, patch)
        with pytest.raises(Killed):
            train(tmp_path, short_profile())
    assert (tmp_path / "router.json").exists()
    same_result(train(tmp_path, short_profile()), undisturbed)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in undisturbed.iterdir()}


def test_adapters_in_bfloat16_without_a_baseline_resume_too(train: Train, tmp_path: Path) -> None:
    """The gpu profile's way, and one sample a query."""
    settings = short_profile(variant="reinforce++", samples=1, lora=LoraSection(r=4, alpha=8), lr=1e-2)
    backbone = settings.backbone.model_copy(update={"dtype": "bfloat16"})
    settings = settings.model_copy(update={"backbone": backbone})
    whole = train(tmp_path / "whole", settings)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(10, patch)
        with pytest.raises(Killed):
            train(tmp_path / "killed", settings)
    same_result(train(tmp_path / "killed", settings), whole)
    assert not any("lora" in name for name in load_file(whole / "model.safetensors")), "folded in"
    assert load_router(whole).decide("the red rose").agents


def test_a_second_policy_learns_from_the_offline_judge(train: Train, undisturbed: Path, tmp_path: Path) -> None:
    both = train(tmp_path, short_profile(also_offline_judge=True))
    same_result(both, undisturbed)
    description = json.loads((both / "judge" / "router.json").read_text())
    assert description["judge"] == "offline"
    assert read_lines(both / "judge" / "history.jsonl")[0]["reward"] != read_lines(both / "history.jsonl")[0]["reward"]


def test_only_the_named_number_of_outcomes_is_used(
    train: Train, dataset: Path, examples: Path, sft_folder: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The rest of the training queries could say anything."""
    folder = tmp_path / "examples"
    shutil.copytree(examples, folder)
    rows = read_lines(folder / "train.jsonl")
    for row in rows[60:]:
        row["qrels"], row["query"] = {"kitchen": {"oven-red": 1}}, "changed"
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_rl(dataset, folder, sft_folder, tmp_path / "out", short_profile(), 0)
    assert read_lines(folder / "train.jsonl")[60:] != read_lines(examples / "train.jsonl")[60:]
    same_result(tmp_path / "out", undisturbed)


def test_it_reads_no_test_queries(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def spy(path: Path) -> list[Example]:
        read.append(path.name)
        return read_examples(path)

    monkeypatch.setattr(rl, "read_examples", spy)
    train(tmp_path, short_profile(min_updates=2))
    assert sorted(read) == ["dev.jsonl", "train.jsonl"]


def test_slot_logits_are_those_of_single_queries(sft_folder: Path, splits: dict[str, list[Example]]) -> None:
    model, tokenizer, _ = load_model(sft_folder)
    featurizer = load_router(sft_folder, torch.float32).featurizer
    features = [featurizer(e.query, e.reference) for e in splits["train"][:70]]
    rows = slot_logits(model, features, tokenizer.pad_token_id, torch.float32)
    for i in (0, 33, 69):
        assert len(rows[i]) == 3 + len(features[i].candidates) + 1
        alone = slot_logits(model, [features[i]], tokenizer.pad_token_id, torch.float32)[0]
        torch.testing.assert_close(alone, rows[i], atol=1e-5, rtol=1e-4)


# --- Judges and bad input


def test_the_judges_by_name(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BASE_URL", "MODEL"):
        monkeypatch.delenv(f"ROUTEWRIGHT_LLM_{name}", raising=False)
    assert isinstance(make_judge("qrels", pool, tmp_path), QrelsJudge)
    assert isinstance(make_judge("offline", pool, tmp_path), OfflineJudge)
    with pytest.raises(BadInput, match=r"rl\.judge is llm: expected ROUTEWRIGHT_LLM_BASE_URL"):
        make_judge("llm", pool, tmp_path)
    monkeypatch.setenv("ROUTEWRIGHT_LLM_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("ROUTEWRIGHT_LLM_MODEL", "m")
    assert isinstance(make_judge("llm", pool, tmp_path), LLMJudge)


def test_a_router_of_other_agents(examples: Path, sft_folder: Path, tmp_path: Path) -> None:
    source = write_household(tmp_path / "source")
    source.write_text(source.read_text().replace("name: garden", "name: park"))
    fetch_dataset(str(source), tmp_path / "dataset")
    with pytest.raises(BadInput, match="was trained for other agents than"):
        train_rl(tmp_path / "dataset", examples, sft_folder, tmp_path / "out", short_profile(), 0)


def test_an_sft_folder_with_a_missing_file(
    train: Train, dataset: Path, examples: Path, sft_folder: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(sft_folder, tmp_path / "sft"))
    (broken / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"model\.safetensors is missing"):
        train_rl(dataset, examples, broken, tmp_path / "out", short_profile(), 0)
