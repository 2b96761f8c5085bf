import os
import tarfile
from pathlib import Path


def test_configs():
    with tarfile.open(ORIGINAL / "backup.tar.gz") as archive:
        expected = {
            member.name.replace("/", "-"): archive.extractfile(member).read()
            for member in archive
            if member.name.endswith(".conf")
        }
    assert expected
    assert {name: Path("conf", name).read_bytes() for name in os.listdir("conf")} == expected


def test_nothing_else():
    assert sorted(os.listdir(".")) == ["backup.tar.gz", "conf"]
    assert Path("backup.tar.gz").read_bytes() == (ORIGINAL / "backup.tar.gz").read_bytes()
