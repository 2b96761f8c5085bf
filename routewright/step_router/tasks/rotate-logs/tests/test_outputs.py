import gzip
from pathlib import Path


def test_rotation():
    rotated = set()
    for before in (ORIGINAL / "logs").rglob("*"):
        now = Path("logs") / before.relative_to(ORIGINAL / "logs")
        if before.is_dir():
            assert now.is_dir()
            continue
        data = before.read_bytes()
        assert now.stat().st_mode == before.stat().st_mode, now
        if before.parent.name == "logs" and before.suffix == ".log" and len(data) > 1000:
            rotated.add(f"{before.name}.gz")
            assert now.read_bytes() == b""
            assert gzip.decompress(Path("archive", f"{before.name}.gz").read_bytes()) == data
        else:
            assert now.read_bytes() == data, now
    assert {path.name for path in Path("archive").iterdir()} == rotated


def _names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_nothing_new_in_logs():
    assert _names(Path("logs")) == _names(ORIGINAL / "logs")
