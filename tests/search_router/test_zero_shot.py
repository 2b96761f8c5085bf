from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from household import profile_with

from routewright.pools.pool import Pool
from routewright.search_router import zero_shot
from routewright.search_router.zero_shot import LABELS, zero_shot_route

BACKBONE = profile_with().backbone


def test_a_letter_for_each_of_sixty_four_agents() -> None:
    assert len(LABELS) == len(set(LABELS)) == 64


def test_one_answer_a_query(pool: Pool) -> None:
    queries = ["repair the oven", "x" * 100_000, "שלום 🚣", "repair the oven"]
    found = zero_shot_route(pool, queries, BACKBONE, seed=0)
    assert len(found) == 4
    for answer in found:
        assert answer.probabilities.shape == (3,)
        assert answer.probabilities.sum() == pytest.approx(1.0)
        assert answer.latency_ms > 0
    np.testing.assert_allclose(found[0].probabilities, found[3].probabilities, atol=1e-6)


def test_the_cards_are_read_once_and_change_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept keys and values give what one pass over the whole prompt gives."""
    kept: dict[str, Any] = {}
    passes: list[list[int]] = []
    load = zero_shot.load_backbone

    def spy(*arguments: Any) -> tuple[Any, Any]:
        model, kept["tokenizer"] = load(*arguments)
        kept["hook"] = model.register_forward_pre_hook(
            lambda _, positional, named: passes.append(named["input_ids"][0].tolist()), with_kwargs=True
        )
        kept["model"] = model
        return model, kept["tokenizer"]

    monkeypatch.setattr(zero_shot, "load_backbone", spy)
    queries = ["repair the oven", "sell the rose"]
    found = zero_shot_route(pool, queries, BACKBONE, seed=0)
    kept["hook"].remove()
    model, tokenizer = kept["model"], kept["tokenizer"]
    head, *rest = passes
    assert len(rest) == 2, "one short pass a query"
    prompt = tokenizer.decode(head)
    assert all(agent.card[:40] in prompt for agent in pool.agents)
    letters = [tokenizer(f" {letter}")["input_ids"][-1] for letter in "ABC"]
    for query, ids, answer in zip(queries, rest, found, strict=True):
        assert query in tokenizer.decode(ids)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([head + ids])).logits[0, -1]
        np.testing.assert_allclose(answer.probabilities, torch.softmax(logits[letters], 0).numpy(), atol=1e-5)
        assert answer.valid == (int(logits.argmax()) in letters)


def test_the_whole_model_answers_not_the_one_with_fewer_layers(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    load = zero_shot.load_backbone

    def spy(config: Any, *more: Any) -> Any:
        asked.append(config)
        return load(config, *more)

    monkeypatch.setattr(zero_shot, "load_backbone", spy)
    zero_shot_route(pool, ["x"], BACKBONE.model_copy(update={"layers": (1, 1)}), seed=0)
    assert asked[0].layers is None
