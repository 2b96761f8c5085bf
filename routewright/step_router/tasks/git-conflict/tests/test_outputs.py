import subprocess


def _git(folder, *arguments):
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _settings(folder, at):
    return dict(line.split("=") for line in _git(folder, "show", f"{at}:settings.txt").splitlines())


def test_settings():
    main, feature = _settings(ORIGINAL / "repo", "main"), _settings(ORIGINAL / "repo", "feature")
    assert _settings("repo", "main") == {**main, "color": feature["color"]}


def test_merge_commit():
    parents = _git("repo", "rev-list", "--parents", "-n", "1", "main").split()[1:]
    original = ORIGINAL / "repo"
    assert parents == [_git(original, "rev-parse", "main"), _git(original, "rev-parse", "feature")]
    assert _git("repo", "rev-parse", "feature") == _git(original, "rev-parse", "feature")


def test_everything_else():
    files = _git("repo", "ls-tree", "-r", "--name-only", "main").split()
    assert files == ["feature.txt", "main.txt", "settings.txt"]
    for name in ("feature", "main"):
        assert _git("repo", "show", f"main:{name}.txt") == _git(ORIGINAL / "repo", "show", f"{name}:{name}.txt")
    assert _git("repo", "status", "--porcelain") == ""
