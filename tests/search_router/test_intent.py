from __future__ import annotations

import numpy as np
import pytest
from household import CARDS

from routewright.search_router import intent
from routewright.search_router.intent import IntentLabeller, card_phrases, fit_labeller


@pytest.fixture(scope="module")
def labeller() -> IntentLabeller:
    return fit_labeller(CARDS)


def test_phrases_of_a_card() -> None:
    assert card_phrases("Queues, topics; e-mail (SES). X") == [
        "Queues", "topics", "e-mail", "SES", "Queues, topics; e-mail (SES). X",
    ]  # fmt: skip


def test_a_query_goes_where_the_cards_say(labeller: IntentLabeller) -> None:
    queries = ["clean the heavy oven", "small kettle", "water the roses", "a bucket", "printer jam"]
    probabilities = labeller.probabilities(queries)
    assert probabilities.shape == (5, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    first = [labels[0] for labels in labeller.label(probabilities)]
    assert first == ["kitchen", "kitchen", "garden", "garden", "office"]


def test_a_second_agent_is_intended_where_it_is_nearly_as_probable(labeller: IntentLabeller) -> None:
    rows = np.array([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.2, 0.3, 0.5], [0.35, 0.35, 0.3]])
    assert labeller.label(rows) == [
        ["kitchen"], ["kitchen", "garden"], ["garden", "kitchen"], ["office", "garden"], ["kitchen", "garden"],
    ]  # fmt: skip


def test_order_of_agents_and_company_of_queries_do_not_matter(labeller: IntentLabeller) -> None:
    queries = ["clean the oven", "antique hedge", "🚣 שלום", "copier paper"]
    found = labeller.probabilities(queries)
    turned = fit_labeller(dict(reversed(CARDS.items()))).probabilities(queries)
    np.testing.assert_allclose(turned[:, ::-1], found, atol=1e-5)
    np.testing.assert_allclose(labeller.probabilities(queries[1:2]), found[1:2], atol=1e-5)
    np.testing.assert_array_equal(fit_labeller(CARDS).probabilities(queries), found)


def test_only_queries_and_cards_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedder sees card phrases, names and queries, nothing else; there is no other input."""
    seen: list[str] = []

    def spy(texts: list[str]) -> np.ndarray:
        seen.extend(texts)
        return np.eye(1, 8).repeat(len(texts), 0).astype(np.float32)

    monkeypatch.setattr(intent, "embed", spy)
    fit_labeller({"a-b": "Red, blue.", "c": "Green."}).probabilities(["query"])
    assert seen == ["a b", "Red", "blue", "Red, blue.", "c", "Green", "Green.", "query"]


def test_queries_without_known_words(labeller: IntentLabeller) -> None:
    probabilities = labeller.probabilities(["", "🚣", "x" * 100_000])
    assert np.isfinite(probabilities).all()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
