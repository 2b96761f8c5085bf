"""Commit a dataset to a DVC remote and tag it in git, without touching what is checked out.

All is done in a clone of the repository: data goes to the remote first, then the tag is brought into the repository, so
that no tag ever names data that is not there, and whatever fails before leaves the repository as it was.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from routewright.data_store import reaching, use_dvc
from routewright.data_versions import Revision, dvc_md5
from routewright.errors import BadInput

PLACE = "datasets"
RUN_STAGES = {"fetch-dataset": "dataset", "synthesize": "examples"}
"""The stages of a run whose folders are data, and what their artifacts are called."""


@dataclass(frozen=True)
class Snapshot:
    """A tag of the repository; ``md5`` {path in the repository: DVC's md5}, ``fresh`` False where it was there already."""

    tag: str
    commit: str
    md5: dict[str, str]
    fresh: bool

    def sources(self, repo: str) -> list[Revision]:
        """What a pipeline takes to read the datasets again."""
        return [Revision(repo=repo, rev=self.tag, path=path) for path in self.md5]


def datasets_of(place: Path) -> dict[str, Path]:
    """{path in the repository: folder} of a run's output folder, or of a dataset's own; BadInput where there is none."""
    if not place.is_dir():
        raise BadInput(f"{place}: no such folder, expected what routewright run wrote, or a dataset")
    summary = place / "summary.json"
    if not summary.is_file():
        if not any(file.is_file() for file in place.rglob("*")):
            raise BadInput(f"{place}: the folder is empty, expected what routewright run wrote, or a dataset")
        return {f"{PLACE}/{place.resolve().name}": place}
    try:
        content = json.loads(summary.read_text(encoding="utf-8"))
        pipeline, artifacts = str(content["pipeline"]), dict(content["artifacts"])
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{summary}: expected what routewright run wrote, with pipeline and artifacts") from None
    found = {
        f"{PLACE}/{pipeline}/{name}": place / str(artifacts[stage])
        for stage, name in RUN_STAGES.items()
        if stage in artifacts and (place / str(artifacts[stage])).is_dir()
    }
    if not found:
        raise BadInput(f"{summary}: artifacts: expected the folder of {' or '.join(RUN_STAGES)}, found neither")
    return found


def snapshot(datasets: Mapping[str, Path], remote: str, tag: str, repo: Path) -> Snapshot:
    """Push folders {path in the repository: folder} to the DVC remote (a URL) and tag a commit that names them.

    The commit is HEAD's child and on no branch; its own DVC configuration names the remote. A tag that holds the same
    data in the same remote already is left alone. BadInput where the repository, the tag, the remote or the credentials
    are wrong.
    """
    top = Path(_git(repo, "rev-parse", "--show-toplevel", wrong=f"--repo {repo}: expected a git repository"))
    _git(top, "check-ref-format", f"refs/tags/{tag}", wrong=f"--tag {tag}: expected a name that git takes for a tag")
    if "://" not in remote and not Path(remote).is_absolute():
        raise BadInput(f"--remote {remote}: expected a URL such as s3://bucket/path, or an absolute path")
    md5 = {path: dvc_md5(folder) for path, folder in datasets.items()}
    if _git(top, "tag", "--list", tag):
        tagged = _tagged(top, tag, list(md5))
        if {path: str(out["md5"]) for path, out in tagged.items()} != md5:
            raise BadInput(f"--tag {tag}: exists already and holds other data, expected a new name")
        if any(out.get("remote") != _remote_name(remote) for out in tagged.values()):
            raise BadInput(f"--tag {tag}: exists already with its data in another remote, expected that one or a new name")
        return Snapshot(tag, _git(top, "rev-list", "-n1", tag), md5, fresh=False)
    author = [part for key in ("user.name", "user.email") for part in ("-c", f"{key}={_author(top, key)}")]
    use_dvc()
    with tempfile.TemporaryDirectory() as temporary, reaching(f"--remote {remote}"):
        clone = Path(temporary) / "clone"
        _git(top, "clone", "--quiet", "--shared", str(top), str(clone))
        _add(clone, datasets, remote)
        if _read_md5(clone, list(md5)) != md5:
            raise BadInput(f"{', '.join(map(str, datasets.values()))}: changed while it was read, or holds links to folders")
        _push(clone, [f"{path}.dvc" for path in datasets], remote)
        _git(clone, "add", "--all")
        message = f"Data {tag}: " + ", ".join(f"{path} ({value})" for path, value in md5.items())
        _git(clone, *author, "-c", "commit.gpgSign=false", "commit", "--quiet", "--no-verify", "-m", message)
        _git(clone, *author, "-c", "tag.gpgSign=false", "tag", "--annotate", tag, "-m", message)
        _git(top, "fetch", "--quiet", "--no-tags", str(clone), f"refs/tags/{tag}:refs/tags/{tag}")
    return Snapshot(tag, _git(top, "rev-list", "-n1", tag), md5, fresh=True)


def _add(clone: Path, datasets: Mapping[str, Path], remote: str) -> None:
    """Put the folders under DVC in the clone, with the remote in its configuration."""
    from dvc.repo import Repo

    # DVC says on the console what to do next, which is done here already.
    with contextlib.redirect_stdout(io.StringIO()):
        if not (clone / ".dvc").is_dir():
            Repo.init(str(clone)).close()
        # A remote of its own: the repository's others, and what lies there, stay as they are.
        name = _remote_name(remote)
        with Repo(str(clone)) as opened, opened.config.edit("repo") as config:
            config.setdefault("remote", {})[name] = {"url": remote}
        for path, folder in datasets.items():
            shutil.rmtree(clone / path, ignore_errors=True)
            shutil.copytree(folder, clone / path)
        with Repo(str(clone)) as opened:
            opened.add([str(clone / path) for path in datasets])
    for path in datasets:
        file = clone / f"{path}.dvc"
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        content["outs"][0]["remote"] = name
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _remote_name(remote: str) -> str:
    """What DVC's configuration calls the remote of that URL."""
    from routewright.tracking import settings_hash

    return f"snapshots-{settings_hash({'url': remote})[:8]}"


def _push(clone: Path, targets: list[str], remote: str) -> None:
    """Upload what the remote lacks; the error of the first file that could not be uploaded is raised."""
    from dvc.exceptions import UploadError
    from dvc.repo import Repo

    with Repo(str(clone)) as opened, _logged_errors("dvc_data") as errors:
        try:
            opened.push(targets=[str(clone / target) for target in targets])
        except UploadError:
            # DVC counts the files that failed; why they did, it only logs.
            raise (errors[0] if errors else OSError("files could not be uploaded")) from None


@contextlib.contextmanager
def _logged_errors(name: str) -> Iterator[list[BaseException]]:
    """The exceptions that a library logs in the body, which are not printed."""
    found: list[BaseException] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                found.append(record.exc_info[1])

    logger, handler = logging.getLogger(name), Keep()
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _read_md5(clone: Path, paths: list[str]) -> dict[str, str]:
    contents = {path: yaml.safe_load((clone / f"{path}.dvc").read_text(encoding="utf-8")) for path in paths}
    return {path: str(content["outs"][0]["md5"]) for path, content in contents.items()}


def _tagged(top: Path, tag: str, paths: list[str]) -> dict[str, Any]:
    """{path: DVC's output, with md5 and remote} of those of the paths that a tag holds."""
    found = {}
    for path in paths:
        if _git(top, "ls-tree", tag, f"{path}.dvc"):
            found[path] = yaml.safe_load(_git(top, "show", f"{tag}:{path}.dvc"))["outs"][0]
    return found


def _author(top: Path, key: str) -> str:
    return _git(top, "config", key, wrong=f"--repo {top}: git needs {key}, expected `git config {key} …`")


def _git(folder: Path, *arguments: str, wrong: str = "") -> str:
    """What git prints; BadInput with ``wrong``, or with git's own words, where it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise BadInput("data versions: git is not installed") from None
    if done.returncode:
        raise BadInput(wrong or f"git {arguments[0]}: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout.strip()
