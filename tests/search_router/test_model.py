from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest
import torch
from household import CARDS, featurizer_of, profile_with

from routewright.config import LoraSection
from routewright.language_models.backbone import load_backbone
from routewright.search_router.features import Featurizer, collate
from routewright.search_router.model import SearchRouterModel, Slots, add_lora, merge_lora, new_model

TODAY = date(2025, 6, 15)
QUERIES = [
    "how do I repair the small kettle since 2021", "rose", "which printer, copier or stapler is heavy and antique?",
    "שלום 🚣", "the lawn " * 40,
]  # fmt: skip
BACKBONE = profile_with(backbone={"num_layers": 3}).backbone


def untrained(cards: dict[str, str] | None = None, frozen: int = 1) -> tuple[SearchRouterModel, Featurizer]:
    """A policy whose heads are random everywhere, so that no term is hidden by its zeros, and its featurizer."""
    cards = cards or CARDS
    backbone, tokenizer = load_backbone(BACKBONE, [*sorted(CARDS.values()), *QUERIES], seed=0)
    torch.manual_seed(0)
    model = new_model(backbone, frozen, cards)
    featurizer = featurizer_of(tokenizer, QUERIES, cards)
    model.read_cards(featurizer.card_tokens())
    return model.eval(), featurizer


def randomise(model: SearchRouterModel) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in (model.agent_rows, model.agent_bias, model.word_rows, model.keyword_rows):
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture(scope="module")
def policy() -> tuple[SearchRouterModel, Featurizer]:
    model, featurizer = untrained()
    randomise(model)
    return model, featurizer


@torch.inference_mode()
def slots(model: SearchRouterModel, featurizer: Featurizer, queries: Sequence[str], **more: Any) -> Slots:
    rows = [featurizer(query, TODAY) for query in queries]
    return model(collate(rows, featurizer.tokenizer.pad_token_id), **more)


@torch.inference_mode()
def agent_logits(model: SearchRouterModel, featurizer: Featurizer) -> torch.Tensor:
    found = slots(model, featurizer, QUERIES)
    return found.logits[:, : found.agents]


def test_a_slot_for_each_agent_candidate_and_interval(policy: tuple[SearchRouterModel, Featurizer]) -> None:
    model, featurizer = policy
    found = slots(model, featurizer, QUERIES, with_answer=True)
    widest = max(len(featurizer(query, TODAY).candidates) for query in QUERIES)
    assert found.agents == 3
    assert found.logits.shape == found.mask.shape == (5, 3 + widest + 1)
    assert found.logits.dtype == torch.float32
    assert torch.isfinite(found.logits).all()
    assert found.mask[:, :3].all()
    for row, query in zip(found.mask, QUERIES, strict=True):
        features = featurizer(query, TODAY)
        assert row[3:-1].sum() == len(features.candidates)
        assert bool(row[-1]) == (features.interval is not None)
    assert found.answer is not None
    assert found.answer.shape == (5, model.config.trunk["vocab_size"] + 3)
    assert slots(model, featurizer, QUERIES).answer is None


def test_logits_do_not_depend_on_padding_or_company(policy: tuple[SearchRouterModel, Featurizer]) -> None:
    model, featurizer = policy
    together = slots(model, featurizer, QUERIES, with_answer=True)
    turned = slots(model, featurizer, QUERIES[::-1], with_answer=True)
    for i, query in enumerate(QUERIES):
        alone = slots(model, featurizer, [query], with_answer=True)
        count = 3 + len(featurizer(query, TODAY).candidates)
        for batch, row in ((together, i), (turned, len(QUERIES) - 1 - i)):
            torch.testing.assert_close(batch.logits[row, :count], alone.logits[0, :count], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(batch.logits[row, -1], alone.logits[0, -1], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(batch.answer[row], alone.answer[0], atol=1e-4, rtol=1e-4)


def test_the_order_of_agents_does_not_matter_to_an_untrained_model() -> None:
    expected = agent_logits(*untrained())
    assert expected.std(dim=1).min() > 1e-3, "the cards make a difference"
    for order in (["office", "kitchen", "garden"], ["garden", "office", "kitchen"]):
        found = agent_logits(*untrained({name: CARDS[name] for name in order}))
        columns = [order.index(name) for name in CARDS]
        torch.testing.assert_close(found[:, columns], expected, atol=1e-5, rtol=1e-5)


def test_an_agent_that_joins_leaves_the_others_as_they_are(policy: tuple[SearchRouterModel, Featurizer]) -> None:
    small, featurizer = policy
    cards = {**CARDS, "garage": "Cars and tools: engine, tyre, wrench, brake."}
    big, wider = untrained(cards)
    new_row = big.card_states[3].clone()
    state = small.state_dict()
    for name, value in big.state_dict().items():
        if state[name].shape != value.shape:  # one more agent: its row of training is empty
            grown = torch.zeros_like(value)
            grown[tuple(slice(0, size) for size in state[name].shape)] = state[name]
            state[name] = grown
    state["card_states"][3] = new_row
    big.load_state_dict(state)
    before, after = slots(small, featurizer, QUERIES, with_answer=True), slots(big, wider, QUERIES, with_answer=True)
    # the width of a matrix product changes the order of its sums: equal to the last bits of a float
    torch.testing.assert_close(after.logits[:, :3], before.logits[:, :3], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(after.logits[:, 4:], before.logits[:, 3:], atol=0, rtol=0)
    torch.testing.assert_close(after.answer[:, :-1], before.answer, atol=1e-5, rtol=1e-6)
    joined = after.logits[:, 3]
    assert torch.isfinite(joined).all()
    assert joined.std() > 1e-4, "it depends on the query"
    ask = slots(big, wider, ["the wrench for a tyre", "the rose of the lawn"]).logits[:, 3]
    assert ask[0] > ask[1] + 1, "its card is read"


@pytest.mark.parametrize("count", [2, 64])
def test_pools_of_two_and_of_sixty_four(count: int) -> None:
    model, featurizer = untrained({f"agent{i}": f"What there is about thing{i}." for i in range(count)})
    assert agent_logits(model, featurizer).shape == (5, count)
    assert torch.isfinite(agent_logits(model, featurizer)).all()
    assert model.cards == featurizer.cards


def test_the_whole_decoder_is_in_the_policy() -> None:
    """The last token's state that the heads read is the backbone's own."""
    backbone, tokenizer = load_backbone(BACKBONE, QUERIES, seed=0)
    features = featurizer_of(tokenizer, QUERIES, CARDS)(QUERIES[0], TODAY)
    ids = torch.tensor([features.tokens])
    with torch.inference_mode():
        expected = backbone.eval().model(input_ids=ids, use_cache=False).last_hidden_state
        vocabulary = backbone(input_ids=ids).logits[0, -1]
    model = new_model(backbone, 2, CARDS).eval()
    with torch.inference_mode():
        states = model.trunk_states(ids, torch.ones_like(ids))
        found = model.top(inputs_embeds=states, use_cache=False).last_hidden_state
        answer = model(collate([features], tokenizer.pad_token_id), with_answer=True).answer
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(answer[0, : len(vocabulary)], vocabulary, atol=1e-4, rtol=1e-4)


def test_the_trunk_never_trains_and_everything_else_does() -> None:
    model, featurizer = untrained()
    randomise(model)
    batch = collate([featurizer(query, TODAY) for query in QUERIES], featurizer.tokenizer.pad_token_id)
    batch.collection = torch.randn(batch.collection.shape)
    found = model.train()(batch, with_answer=True)
    (found.logits[found.mask].sum() + found.answer.logsumexp(1).sum()).backward()
    for name, parameter in model.named_parameters():
        if name.startswith("trunk.") or name == "top.embed_tokens.weight":
            assert parameter.grad is None, name
            assert not parameter.requires_grad, name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


def test_remembered_states_are_those_of_the_trunk() -> None:
    model, featurizer = untrained()
    batch = collate([featurizer(query, TODAY) for query in QUERIES], featurizer.tokenizer.pad_token_id)
    mask = batch.attention_mask.bool()
    expected = model.trunk_states(batch.input_ids, batch.attention_mask)
    model.remember_trunk = True
    calls = []
    model.trunk.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        found = model.trunk_states(batch.input_ids, batch.attention_mask)
        torch.testing.assert_close(found[mask], expected[mask], atol=0.02, rtol=0.01)  # kept in bfloat16
    assert len(calls) == 1
    other = collate([featurizer(query, TODAY) for query in QUERIES[3:1:-1]], featurizer.tokenizer.pad_token_id)
    again = model.trunk_states(other.input_ids, other.attention_mask)
    assert len(calls) == 1, "known in any company"
    length = int(other.attention_mask[0].sum())
    torch.testing.assert_close(again[0, :length], found[3, :length], atol=0, rtol=0)


def test_adapters_start_as_nothing_train_alone_and_fold_in() -> None:
    model, featurizer = untrained()
    expected = slots(model, featurizer, QUERIES).logits
    names = set(dict(model.named_parameters()))
    add_lora(model, LoraSection(r=4, alpha=8))
    model.eval()
    torch.testing.assert_close(slots(model, featurizer, QUERIES).logits, expected)
    trained = {name for name, parameter in model.named_parameters() if name.startswith("top.") and parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    adapted = slots(model, featurizer, QUERIES).logits
    assert not torch.allclose(adapted, expected, atol=1e-3)
    merge_lora(model)
    assert set(dict(model.named_parameters())) == names, "nothing of PEFT is left"
    torch.testing.assert_close(slots(model, featurizer, QUERIES).logits, adapted, atol=1e-4, rtol=1e-4)
