import hashlib
import re
from pathlib import Path


def test_report():
    source = (ORIGINAL / "worker.py").read_bytes()
    word = re.search(rb'b"([a-j]{12})"', source).group(1)
    assert Path("report.txt").read_text() == hashlib.sha256(source + word).hexdigest() + "\n"


def test_status():
    status = re.search(r"sys.exit\((\d+)\)", (ORIGINAL / "worker.py").read_text()).group(1)
    assert Path("status.txt").read_text().strip() == status


def test_worker_is_unchanged():
    assert Path("worker.py").read_bytes() == (ORIGINAL / "worker.py").read_bytes()
