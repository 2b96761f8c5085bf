from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routewright.search_router.words import (
    BUCKETS,
    MAX_WORDS,
    bucket,
    buckets,
    collection_beliefs,
    document_frequencies,
    tfidf,
    words,
)


def test_words_are_lower_case_stems_of_letters_and_digits() -> None:
    assert words("How do I Move_a DB-password 2x?") == ["how", "do", "move", "db", "password", "2x"]
    assert words("Kettles repaired, repairing a KETTLE") == ["kettl", "repair", "repair", "kettl"]
    assert words("שלום 🚣 b") == ["שלום"]
    assert words("") == []


def test_a_long_text_costs_no_more() -> None:
    assert len(words("word " * 50_000)) == MAX_WORDS
    assert words("x" * 100_000) == words("x" * 100_001)


def test_buckets_hold_words_and_pairs() -> None:
    found = buckets("red rose red rose")
    names = ("red", "rose", "red rose", "rose red")
    assert [found[zlib.crc32(name.encode()) % BUCKETS] for name in names] == [2, 2, 2, 1]
    assert sum(found.values()) == 7


def test_idf_by_hand() -> None:
    idf = document_frequencies(["red rose", "red spade", "red red"])
    assert idf.shape == (BUCKETS,)
    assert idf[bucket("red")] == pytest.approx(math.log(4 / 4) + 1)
    assert idf[bucket("rose")] == pytest.approx(math.log(4 / 2) + 1)
    assert idf[bucket("never")] == pytest.approx(math.log(4 / 1) + 1)


def test_tfidf_by_hand() -> None:
    idf = np.ones(BUCKETS, dtype=np.float32)
    idf[bucket("rose")] = 3.0
    found = dict(zip(*tfidf("rose rose", idf), strict=True))
    one, pair = (1 + math.log(2)) * 3, 1.0
    length = math.sqrt(one**2 + pair**2)
    assert found == pytest.approx({bucket("rose"): one / length, bucket("rose rose"): pair / length})
    assert tfidf("?", idf) == ([], [])


@given(st.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_text_has_length_one_or_no_words(text: str) -> None:
    found, weights = tfidf(text, np.full(BUCKETS, 2.0, dtype=np.float32))
    assert all(0 <= index < BUCKETS for index in found)
    assert len(set(found)) == len(found)
    assert math.hypot(*weights) == pytest.approx(1.0 if words(text) else 0.0)


def test_collection_beliefs_by_hand() -> None:
    """Two agents of 4 and 2 terms (words and pairs), 3 on average: T = df / (df + 100 + 100 cw / 3)."""
    found = collection_beliefs([["red rose", "rose"], ["red", "red"]])
    assert found.shape == (BUCKETS, 2)
    first, second = 100 + 100 * 4 / 3, 100 + 100 * 2 / 3
    alone, shared = (math.log(2.5 / holders) / math.log(3) for holders in (1, 2))
    assert found[bucket("rose")] == pytest.approx([alone * 2 / (2 + first), 0.0])
    assert found[bucket("red rose")] == pytest.approx([alone * 1 / (1 + first), 0.0])
    assert found[bucket("red")] == pytest.approx([shared * 1 / (1 + first), shared * 2 / (2 + second)])
    assert found[bucket("never")].tolist() == [0, 0]


def test_an_agent_without_documents_has_no_belief() -> None:
    found = collection_beliefs([["red rose"], []])
    assert np.isfinite(found).all()
    assert (found[:, 1] == 0).all()
    assert found[bucket("rose"), 0] > 0
