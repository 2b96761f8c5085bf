import subprocess


def _git(folder, *arguments):
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_history_is_kept_and_one_commit_is_new():
    before = _git(ORIGINAL / "repo", "rev-list", "main").split()
    after = _git("repo", "rev-list", "main").split()
    assert after[1:] == before


def _tree(folder, at):
    names = _git(folder, "ls-tree", "-r", "--name-only", at).split()
    return {name: _git(folder, "show", f"{at}:{name}") for name in names}


def test_contents():
    original = ORIGINAL / "repo"
    bad = _git(original, "log", "--format=%H", "--grep=^Tune the limits$")
    expected = _tree(original, "main")
    del expected["width.txt"]
    expected["limits.txt"] = _git(original, "show", f"{bad}~1:limits.txt")
    assert _tree("repo", "main") == expected


def test_clean():
    assert _git("repo", "status", "--porcelain") == ""
    assert _git("repo", "branch", "--show-current") == "main"
