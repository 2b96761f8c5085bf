import tarfile
from pathlib import Path


def _files(folder):
    return {str(path.relative_to(folder.parent)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_release():
    before = _files(ORIGINAL / "project")
    expected = {
        name: data for name, data in before.items() if not name.endswith(".log") and "build" not in name.split("/")[:-1]
    }
    assert len(expected) < len(before)
    with tarfile.open("release.tar.gz", "r:gz") as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
        assert not [member.name for member in archive if "build" in member.name.split("/")]
    assert found == expected


def test_project_is_unchanged():
    assert _files(Path("project").absolute()) == _files(ORIGINAL / "project")
