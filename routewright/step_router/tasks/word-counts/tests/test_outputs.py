import re
from collections import Counter
from pathlib import Path


def test_top_words():
    words = re.findall(r"[a-z]+", (ORIGINAL / "text.txt").read_text().lower())
    ranked = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))[:5]
    assert Path("top.tsv").read_text() == "".join(f"{word}\t{count}\n" for word, count in ranked)


def test_text_is_unchanged():
    assert Path("text.txt").read_bytes() == (ORIGINAL / "text.txt").read_bytes()
