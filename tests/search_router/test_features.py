from __future__ import annotations

from datetime import date

import numpy as np
import pytest
import torch
from household import CARDS, featurizer_of

from routewright.language_models.backbone import train_tokenizer
from routewright.search_router.decision import Interval
from routewright.search_router.features import (
    MAX_QUERY_CHARACTERS,
    MAX_QUERY_TOKENS,
    PROMPT_HEAD,
    PROMPT_TAIL,
    Featurizer,
    collate,
)
from routewright.search_router.intent import card_phrases
from routewright.search_router.words import BUCKETS, bucket, tfidf

TODAY = date(2025, 6, 15)


@pytest.fixture(scope="module")
def featurizer() -> Featurizer:
    texts = [*CARDS.values(), "how do I repair the small kettle since 2021"]
    return featurizer_of(train_tokenizer(texts), texts, CARDS)


def test_the_prompt_frames_the_query(featurizer: Featurizer) -> None:
    found = featurizer("repair the kettle", TODAY)
    text = featurizer.tokenizer.decode(found.tokens)
    assert text.split() == f"{PROMPT_HEAD}repair the kettle{PROMPT_TAIL}".split()


def test_a_keyword_stands_where_its_last_token_is(featurizer: Featurizer) -> None:
    found = featurizer("Repair the antique Grater, 🚣 kettle? Grater", TODAY)
    assert found.candidates == ["repair", "antique", "grater", "kettle"]
    for word, position in zip(found.candidates, found.positions, strict=True):
        upto = featurizer.tokenizer.decode(found.tokens[: position + 1])
        assert upto.strip().lower().rstrip(",?").endswith(word), upto


def test_intervals_are_resolved_against_the_reference_date(featurizer: Featurizer) -> None:
    assert featurizer("kettles since 2021", TODAY).interval == Interval(date(2021, 1, 1), None)
    assert featurizer("kettles", TODAY).interval is None
    assert featurizer("kettles since 2021", None).interval is None


def test_the_match_is_the_best_cosine_with_a_phrase(featurizer: Featurizer) -> None:
    """Against dense vectors."""

    def dense(text: str) -> np.ndarray:
        out = np.zeros(BUCKETS)
        index, weights = tfidf(text, featurizer.idf)
        out[index] = weights
        return out

    for query in ("heavy oven", "garden hose and a teapot", "office machines", "xyzzy", ""):
        found = featurizer(query, TODAY).match
        expected = [
            max(dense(query) @ dense(phrase) for phrase in [name, *card_phrases(card)[:-1]]) for name, card in CARDS.items()
        ]
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert featurizer("a heavy oven", TODAY).match.argmax() == 0
    assert featurizer("xyzzy", TODAY).match.tolist() == [0, 0, 0]


@pytest.mark.parametrize("query", ["word " * 20_000, "x" * 100_000, "🚣" * 50_000, "שלום " * 20_000, " " * 100_000, ""])
def test_any_query_is_short_for_the_model(featurizer: Featurizer, query: str) -> None:
    found = featurizer(query, TODAY)
    tail = len(featurizer.tokenizer(PROMPT_TAIL, add_special_tokens=False)["input_ids"])
    assert len(found.tokens) <= MAX_QUERY_TOKENS + tail
    assert all(position < len(found.tokens) - tail for position in found.positions)
    same = featurizer(query[:MAX_QUERY_CHARACTERS], TODAY)
    assert (same.tokens, same.candidates) == (found.tokens, found.candidates)


def test_a_long_query_keeps_the_prompts_tail_and_loses_late_candidates(featurizer: Featurizer) -> None:
    found = featurizer("🚣" * 300 + " kettle", TODAY)
    assert found.candidates == []
    assert featurizer.tokenizer.decode(found.tokens).endswith(PROMPT_TAIL)


def test_cards_as_tokens(featurizer: Featurizer) -> None:
    rows = featurizer.card_tokens()
    assert [featurizer.tokenizer.decode(row).strip() for row in rows] == [f"{n}: {c}" for n, c in CARDS.items()]
    long = featurizer_of(featurizer.tokenizer, [], {"a": "word " * 9000, "b": "short"})
    assert len(long.card_tokens()[0]) == MAX_QUERY_TOKENS


def test_a_batch_holds_each_query_and_padding(featurizer: Featurizer) -> None:
    rows = [featurizer(query, TODAY) for query in ("kettle", "repair the small kettle since 2021", "?")]
    batch = collate(rows, pad_token=7)
    for i, row in enumerate(rows):
        count = len(row.tokens)
        assert batch.input_ids[i, :count].tolist() == row.tokens
        assert (batch.input_ids[i, count:] == 7).all()
        assert batch.attention_mask[i].sum() == count
        assert batch.attention_mask[i, :count].all(), "padding is on the right"
        assert batch.words[i, : len(row.words)].tolist() == row.words
        assert batch.weights[i, len(row.weights) :].abs().sum() == 0
        assert batch.keyword_mask[i].sum() == len(row.candidates)
        assert batch.positions[i, : len(row.positions)].tolist() == row.positions
        words = [bucket(word) for word in row.candidates]
        assert batch.keyword_words[i, : len(words)].tolist() == words
        assert bool(batch.interval_mask[i]) == (row.interval is not None)
        np.testing.assert_array_equal(batch.match[i].numpy(), row.match)
        np.testing.assert_array_equal(batch.collection[i].numpy(), row.collection)
    assert batch.keyword_mask.dtype == batch.interval_mask.dtype == torch.bool
    assert batch.to("cpu").input_ids.equal(batch.input_ids)


def test_what_the_words_say_about_the_collections(featurizer: Featurizer) -> None:
    """The mean belief of the query's terms, without what all agents share."""
    beliefs = np.zeros((BUCKETS, 3), dtype=np.float32)
    beliefs[bucket("rose")] = [0.0, 3.0, 0.0]
    beliefs[bucket("red")] = [1.0, 1.0, 1.0]
    believing = Featurizer(featurizer.tokenizer, featurizer.idf, beliefs, CARDS)
    # three terms: red, rose, red rose
    np.testing.assert_allclose(believing("red rose", TODAY).collection, [-1 / 3, 2 / 3, -1 / 3], atol=1e-6)
    assert believing("xyzzy", TODAY).collection.tolist() == [0, 0, 0]
    assert believing("", TODAY).collection.tolist() == [0, 0, 0]
