from pathlib import Path


def _mode(path):
    return path.stat().st_mode & 0o7777


def test_permissions():
    paths = [Path("site"), *Path("site").rglob("*")]
    assert len(paths) > 10
    for path in paths:
        private = "private" in path.parts
        if path.is_dir():
            expected = 0o700 if private else 0o755
        elif private:
            expected = 0o600
        else:
            expected = 0o755 if path.name.endswith(".sh") else 0o644
        assert _mode(path) == expected, path


def test_contents_are_unchanged():
    before = {path.relative_to(ORIGINAL): path.read_bytes() for path in ORIGINAL.rglob("*") if path.is_file()}
    after = {path: path.read_bytes() for path in Path("site").rglob("*") if path.is_file()}
    assert before == after
