import gzip
from collections import Counter
from pathlib import Path


def _lines(path):
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()


def test_counts():
    rows = [line.split() for path in (ORIGINAL / "logs").iterdir() for line in _lines(path)]
    counts = Counter(row[3] for row in rows if row[2] == "ERROR")
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    assert Path("errors.txt").read_text() == "".join(f"{count} {name}\n" for name, count in ranked)


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_logs_are_unchanged():
    assert _files(Path("logs")) == _files(ORIGINAL / "logs")
