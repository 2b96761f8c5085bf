"""Snapshots on a real S3 server and what can go wrong there; sources; the md5 of folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from routewright.data_snapshot import datasets_of, snapshot
from routewright.data_versions import Location, Revision, dvc_md5, fetch_version, parse_source, pinned
from routewright.errors import BadInput, StageFailed
from routewright.pools.fetch import fetch_dataset as fetch_pool
from routewright.step_router.fetch import fetch_dataset as fetch_step
from routewright.step_router.profile import load_step_profile

sys.path += [str(Path(__file__).parent / "serving" / "promotion"), str(Path(__file__).parent / "search_router")]
from household import write_household
from real_servers import ACCESS, SECRET, s3_server

BUCKET, REMOTE = "datasets", "s3://datasets/dvc"
PATH = "datasets/dataset"


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_repo(folder: Path) -> Path:
    folder.mkdir()
    git(folder, "init", "--quiet")
    for key in ("user.name", "user.email"):
        git(folder, "config", key, "someone@example.org")
    (folder / "README").write_text("a project\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def state(repo: Path) -> tuple[str, ...]:
    """All that a failed snapshot must leave as it was."""
    return git(repo, "for-each-ref"), git(repo, "status", "--porcelain", "--ignored"), git(repo, "worktree", "list")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SeaweedFS with the bucket."""
    pytest.importorskip("dvc_s3", reason="dvc-s3 is not installed")
    import boto3

    with s3_server(tmp_path_factory.mktemp("weed")) as address:
        boto3.client(
            "s3", endpoint_url=address, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET, region_name="us-east-1"
        ).create_bucket(Bucket=BUCKET)
        yield address


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An empty bucket, its client, and the credentials in the environment alone."""
    import boto3

    for name, value in (
        ("AWS_ACCESS_KEY_ID", ACCESS), ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", endpoint), ("AWS_EC2_METADATA_DISABLED", "true"), ("AWS_MAX_ATTEMPTS", "1"),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")), ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
        ("NO_PROXY", "127.0.0.1,localhost"), ("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "dvc-config")),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    boto3.setup_default_session()
    client = boto3.client("s3")
    for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    return client


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    (folder / "files").mkdir(parents=True)
    (folder / "pool.yaml").write_text("name: tiny\n")
    (folder / "files" / "Ünicode, with spaces.jsonl").write_bytes(bytes(range(256)) * 40)
    (folder / "empty").write_text("")
    return folder


def revision(repo: Path, rev: str = "v1", path: str = PATH) -> Revision:
    return Revision(repo=str(repo), rev=rev, path=path)


def test_snapshot_push_and_fetch_by_revision_elsewhere(s3: Any, dataset: Path, tmp_path: Path) -> None:
    repo = make_repo(tmp_path / "repo")
    (repo / "half-done").write_text("not committed")
    before = git(repo, "rev-parse", "HEAD"), git(repo, "status", "--porcelain", "--ignored")
    made = snapshot(datasets_of(dataset), REMOTE, "v1", repo)
    assert made.fresh
    assert made.md5 == {PATH: dvc_md5(dataset)}
    assert (git(repo, "rev-parse", "HEAD"), git(repo, "status", "--porcelain", "--ignored")) == before
    assert git(repo, "rev-parse", "v1^{commit}") == made.commit
    assert git(repo, "rev-parse", "v1~1") == before[0], "the tag is HEAD's child"
    assert SECRET not in git(repo, "show", "v1")

    clone = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", str(repo), str(clone)], check=True)
    shutil.rmtree(repo)
    for source in (parse_source(f"{{repo: {clone}, rev: v1, path: {PATH}}}"), revision(clone, made.commit)):
        assert source is not None
        out = tmp_path / "out"
        facts = fetch_version(source, out)
        assert contents(out) == contents(dataset)
        assert facts == {"source": str(source), "dvc_revision": made.commit, "source_md5": made.md5[PATH]}
        assert pinned(source) == facts
        shutil.rmtree(out)
    assert fetch_version(revision(clone, path=f"{PATH}/pool.yaml"), tmp_path / "one")["source_md5"] == dvc_md5(
        dataset / "pool.yaml"
    )
    assert (tmp_path / "one" / "pool.yaml").read_text() == "name: tiny\n"
    assert not (clone / ".dvc").exists(), "fetching leaves the repository alone"


def test_a_repeated_snapshot_changes_nothing_and_other_data_needs_another_tag(
    s3: Any, dataset: Path, tmp_path: Path
) -> None:
    repo = make_repo(tmp_path / "repo")
    made = snapshot(datasets_of(dataset), REMOTE, "v1", repo)
    again = snapshot(datasets_of(dataset), REMOTE, "v1", repo)
    assert (again.commit, again.md5, again.fresh) == (made.commit, made.md5, False)
    with pytest.raises(BadInput, match="--tag v1: exists already with its data in another remote, expected that one or"):
        snapshot(datasets_of(dataset), "s3://datasets/second", "v1", repo)
    (dataset / "pool.yaml").write_text("name: other\n")
    with pytest.raises(BadInput, match="--tag v1: exists already and holds other data, expected a new name"):
        snapshot(datasets_of(dataset), REMOTE, "v1", repo)
    other = snapshot(datasets_of(dataset), "s3://datasets/second", "v2", repo)
    assert fetch_version(revision(repo, "v2"), tmp_path / "two")["source_md5"] == other.md5[PATH]
    assert fetch_version(revision(repo, "v1"), tmp_path / "one")["source_md5"] == made.md5[PATH]


def refused(monkeypatch: pytest.MonkeyPatch, fault: str) -> str:
    """Make the environment faulty; what the sentence says of it."""
    wrong = {
        "key": ({"AWS_ACCESS_KEY_ID": "nobody"}, "the credentials are wrong or do not allow it"),
        "secret": ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "the credentials are wrong or do not allow it"),
        "none": ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "found no credentials"),
        "endpoint": ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the object store does not answer"),
    }
    variables, sentence = wrong[fault]
    for name, value in variables.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    import boto3

    boto3.setup_default_session()  # this process has read what was right
    return sentence


@pytest.mark.parametrize("fault", ["key", "secret", "none", "endpoint"])
def test_wrong_credentials_are_one_sentence_and_lose_nothing(
    s3: Any, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    repo = make_repo(tmp_path / "repo")
    snapshot(datasets_of(dataset), REMOTE, "v1", repo)
    before, data = state(repo), contents(dataset)
    sentence = refused(monkeypatch, fault)
    kind = StageFailed if fault == "endpoint" else BadInput
    (dataset / "more").write_text("more")
    with pytest.raises(kind, match=sentence) as pushed:
        snapshot(datasets_of(dataset), REMOTE, "v2", repo)
    assert str(pushed.value).startswith(f"--remote {REMOTE}: ")
    with pytest.raises(kind, match=sentence) as fetched:
        fetch_version(revision(repo), tmp_path / "out")
    with pytest.raises(kind, match=sentence):
        fetch_version(Location(uri=REMOTE), tmp_path / "out")
    for error in (pushed, fetched):
        assert "\n" not in str(error.value)
        assert SECRET not in str(error.value)
    assert state(repo) == before
    assert contents(dataset) == {**data, "more": b"more"}
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.download").exists()


def test_a_read_only_bucket_is_told_and_no_tag_is_made(s3: Any, dataset: Path, tmp_path: Path) -> None:
    repo = make_repo(tmp_path / "repo")
    made = snapshot(datasets_of(dataset), REMOTE, "v1", repo)
    before = state(repo)
    (dataset / "more").write_text("more")
    what = {"Effect": "Deny", "Principal": "*", "Action": ["s3:PutObject"], "Resource": [f"arn:aws:s3:::{BUCKET}/*"]}
    s3.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": [what]}))
    try:
        with pytest.raises(BadInput) as caught:
            snapshot(datasets_of(dataset), REMOTE, "v2", repo)
        assert fetch_version(revision(repo), tmp_path / "out")["source_md5"] == made.md5[PATH], (
            "reading needs no more than that"
        )
    finally:
        s3.delete_bucket_policy(Bucket=BUCKET)
    refusal = f"--remote {REMOTE}: the object store refused: the credentials are wrong or do not allow it ("
    assert str(caught.value).startswith(refusal)
    assert state(repo) == before
    assert snapshot(datasets_of(dataset), REMOTE, "v2", repo).fresh, "repeated where it may write, it is done"


def test_what_the_repository_does_not_have(s3: Any, dataset: Path, tmp_path: Path) -> None:
    repo = make_repo(tmp_path / "repo")
    snapshot(datasets_of(dataset), REMOTE, "v1", repo)
    for source, sentence in (
        (revision(repo, "v9"), "the repository has no such revision"),
        (revision(repo, path="datasets/nothing"), "no such file or folder there"),
        (revision(tmp_path / "nowhere"), "the repository cannot be cloned"),
    ):
        with pytest.raises(BadInput, match=sentence) as caught:
            fetch_version(source, tmp_path / "out")
        assert str(caught.value).startswith(str(source))
        with pytest.raises(BadInput, match=sentence):
            pinned(source)
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match=r"NoSuchBucket|no such bucket|does not exist"):
        snapshot(datasets_of(dataset), "s3://no-such-bucket/dvc", "v2", repo)


@pytest.mark.parametrize("object_name", ["file", "listing"])
@pytest.mark.parametrize("fault", ["corrupted", "missing"])
def test_a_corrupted_or_missing_object_is_told(s3: Any, dataset: Path, tmp_path: Path, object_name: str, fault: str) -> None:
    repo = make_repo(tmp_path / "repo")
    snapshot(datasets_of(dataset), REMOTE, "v1", repo)
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET, Prefix="dvc/files")["Contents"]]
    key = next(k for k in keys if k.endswith(".dir") == (object_name == "listing") and not k.endswith("d8427e"))
    if fault == "missing":
        s3.delete_object(Bucket=BUCKET, Key=key)
    else:
        body = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        s3.put_object(Bucket=BUCKET, Key=key, Body=body.replace(body[20:22], b"\0\0") if object_name == "file" else b"[]")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    with pytest.raises(BadInput) as caught:
        fetch_version(revision(repo), out)
    print(caught.value)
    assert ("corrupted" if fault == "corrupted" else "missing") in str(caught.value)
    assert contents(out) == {"mine": b"mine"}


def test_a_uri_is_fetched_and_its_md5_checked(s3: Any, dataset: Path, tmp_path: Path) -> None:
    for name, content in contents(dataset).items():
        s3.put_object(Bucket=BUCKET, Key=f"plain/dataset/{name}", Body=content)
    s3.put_object(Bucket=BUCKET, Key="plain/dataset-two/other", Body=b"not in the folder")
    (tmp_path / "with space").mkdir()
    shutil.copytree(dataset, tmp_path / "with space" / "d")
    md5 = dvc_md5(dataset)
    for number, uri in enumerate(("s3://datasets/plain/dataset", (tmp_path / "with space" / "d").as_uri())):
        for told in ("", f"#md5={md5}"):
            source = parse_source(uri + told)
            assert source is not None
            out = tmp_path / f"out{number}{len(told)}"
            assert fetch_version(source, out) == {"source": uri, "source_md5": md5}
            assert contents(out) == contents(dataset)
        wrong = parse_source(f"{uri}#md5={'0' * 32}.dir")
        assert wrong is not None
        with pytest.raises(BadInput, match=rf"expected the md5 0+\.dir, found {md5}"):
            fetch_version(wrong, tmp_path / "wrong")
        with pytest.raises(BadInput, match="no such"):
            fetch_version(Location(uri=f"{uri}-gone"), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    one = Location(uri="s3://datasets/plain/dataset/pool.yaml", md5=dvc_md5(dataset / "pool.yaml"))
    fetch_version(one, tmp_path / "single")
    assert contents(tmp_path / "single") == {"pool.yaml": b"name: tiny\n"}


def test_a_uri_is_pinned_to_what_lies_there_now(s3: Any, dataset: Path, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="plain/a", Body=b"1")
    source = Location(uri="s3://datasets/plain")
    first = pinned(source)
    assert pinned(source) == first
    s3.put_object(Bucket=BUCKET, Key="plain/a", Body=b"2")
    assert pinned(source) != first
    local = Location(uri=dataset.as_uri())
    assert pinned(local) == {"source": dataset.as_uri(), "source_md5": dvc_md5(dataset)}


def test_a_run_gives_its_dataset_and_examples(tmp_path: Path) -> None:
    for stage in ("fetch-dataset-1", "synthesize-2", "rl-3"):
        (tmp_path / "stages" / stage).mkdir(parents=True)
    artifacts = {"fetch-dataset": "stages/fetch-dataset-1", "synthesize": "stages/synthesize-2", "rl": "stages/rl-3"}
    (tmp_path / "summary.json").write_text(json.dumps({"pipeline": "search-router", "artifacts": artifacts}))
    assert datasets_of(tmp_path) == {
        "datasets/search-router/dataset": tmp_path / "stages/fetch-dataset-1",
        "datasets/search-router/examples": tmp_path / "stages/synthesize-2",
    }
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(BadInput, match=r"summary\.json: expected what routewright run wrote"):
        datasets_of(tmp_path)
    (tmp_path / "none").mkdir()
    for place, sentence in ((tmp_path / "none", "the folder is empty"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(BadInput, match=sentence):
            datasets_of(place)


@pytest.mark.parametrize("text", ["aws-docs", "pool.yaml", "/data/pool.yaml", "textworld", ""])
def test_names_and_paths_are_no_versions(text: str) -> None:
    assert parse_source(text) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{repo: r, rev: v1}", "path: Field required, expected {repo: …, rev: …, path: …}"),
        ("{repo: r, rev: 1.0, path: p}", "rev: Input should be a valid string"),
        ("{repo: r, rev: v1, path: p, remote: x}", "remote: Extra inputs are not permitted"),
        ("{repo: r, rev: v1, path: ../p}", "path: expected a path inside the repository"),
        ("{repo: r, rev: v1, path: /p}", "path: expected a path inside the repository"),
        ("{repo: r, rev", "expected {repo: …, rev: …, path: …}"),
        ("{repo: 2026-13-45, rev: v1, path: p}", "expected {repo: …, rev: …, path: …}"),
        ("{repo: 'https://me:tok-en@host/r', rev: v1, path: p}", "repo: expected no user or password in the URL"),
        ("http://host/pool.yaml", "expected s3://bucket/path or file:///path"),
        ("s3://bucket", "expected s3://bucket/path or file:///path"),
        ("file://host/path", "expected s3://bucket/path or file:///path"),
        ("s3://bucket/path#md5=xyz", "expected #md5= and 32 hex digits"),
        ("s3://bucket/path#0123456789abcdef0123456789abcdef", "expected #md5= and 32 hex digits"),
    ],
)
def test_a_source_that_is_none(text: str, sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_source(text)
    assert sentence in str(caught.value)
    assert "tok-en" not in str(caught.value)


def test_faulty_repositories_and_tags(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = make_repo(tmp_path / "repo")
    datasets = datasets_of(dataset)
    (tmp_path / "plain").mkdir()
    for arguments, sentence in (
        ((datasets, REMOTE, "v1", tmp_path / "plain"), "expected a git repository"),
        ((datasets, REMOTE, "v1", tmp_path / "nowhere"), "expected a git repository"),
        ((datasets, REMOTE, "a..b", repo), "--tag a..b: expected a name that git takes for a tag"),
        ((datasets, "store", "v1", repo), "--remote store: expected a URL such as s3://bucket/path, or an absolute path"),
    ):
        with pytest.raises(BadInput, match=sentence):
            snapshot(*arguments)
    git(repo, "config", "--unset", "user.email")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    with pytest.raises(BadInput, match=r"git needs user\.email, expected `git config user\.email …`"):
        snapshot(datasets, REMOTE, "v1", repo)


def test_without_dvc_one_sentence_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['dvc'] = sys.modules['dvc_s3'] = None\n"
        "from routewright.data_versions import Revision, pinned\n"
        "try:\n    pinned(Revision(repo='r', rev='v', path='p'))\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    root = Path(__file__).parents[1]
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert shown.stdout.startswith("BadInput data versions: dvc_s3 is not installed, pip install 'routewright[data]'")


def artifact(path: Path) -> Any:
    return SimpleNamespace(path=str(path), metadata={})


def fetched_by_component(work: Path, **settings: str) -> tuple[Any, dict[str, str]]:
    """The dataset artifact of fetch-dataset as a pod runs it, and the tags of its MLflow run."""
    import mlflow

    from components.fetch_dataset.component import fetch_dataset

    dataset = artifact(work / "fetched")
    fetch_dataset.python_func(dataset=dataset, log=artifact(work / "log"), **settings)
    client = mlflow.MlflowClient(f"sqlite:///{work}/mlflow.db")
    experiment = client.get_experiment_by_name(settings.get("router", "search-router"))
    assert experiment is not None
    return dataset, client.search_runs([experiment.experiment_id])[0].data.tags


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "dvc-config"))
    for name in ("MLFLOW_RUN_ID", "ROUTEWRIGHT_PARENT_RUN", "ROUTEWRIGHT_EVENTS", "ROUTEWRIGHT_WORK", "ROUTEWRIGHT_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_run_s_pool_comes_back_by_revision_and_is_recorded(store: Path) -> None:
    pytest.importorskip("dvc_s3", reason="dvc-s3 is not installed")
    made = store / "made"
    fetch_pool(str(write_household(store / "pool")), made)
    before = json.loads((made / "dataset.json").read_text())
    repo = make_repo(store / "repo")
    snapped = snapshot({"datasets/pool": made}, str(store / "remote"), "v1", repo)
    source = f"{{repo: {repo}, rev: v1, path: datasets/pool}}"
    dataset, tags = fetched_by_component(store, pool=source)
    assert {name: dataset.metadata[name] for name in ("source", "dvc_revision", "source_md5", "md5")} == {
        "source": source, "dvc_revision": snapped.commit, "source_md5": snapped.md5["datasets/pool"], "md5": before["md5"],
    }  # fmt: skip
    assert dataset.metadata["files"] == before["files"]
    assert (tags["dvc_revision.dataset"], tags["md5.dataset"]) == (snapped.commit, before["md5"])
    found, expected = contents(Path(dataset.path)), contents(made)
    del found["dataset.json"], expected["dataset.json"]
    assert found == expected


def test_a_step_router_s_tasks_come_back_by_revision(store: Path) -> None:
    pytest.importorskip("dvc_s3", reason="dvc-s3 is not installed")
    profile, made = load_step_profile("smoke"), store / "made"
    fetch_step("shell", made, profile)
    repo = make_repo(store / "repo")
    snapped = snapshot({"datasets/tasks": made}, str(store / "remote"), "v1", repo)
    source = f"{{repo: {repo}, rev: v1, path: datasets/tasks}}"
    dataset, tags = fetched_by_component(store, router="step-router", environment=source, profile="smoke")
    assert dataset.metadata["dvc_revision"] == tags["dvc_revision.dataset"] == snapped.commit
    assert dataset.metadata["environment"] == "shell"
    found = contents(Path(dataset.path))
    del found["dataset.json"]
    assert found == contents(made)
    problems = store / "problems.jsonl"
    row = {
        "prompt": "def f():\n",
        "canonical_solution": "    pass\n",
        "test": "def check(f):\n    pass\n",
        "entry_point": "f",
    }
    rows = [{"task_id": f"t/{i}", **row} for i in range(9)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fetch_step(problems.as_uri(), store / "code", profile)
    assert json.loads((store / "code" / "dataset.json").read_text())["source_md5"] == dvc_md5(problems)
    assert json.loads((store / "code" / "tasks.json").read_text())["environment"] == "code"


def test_a_pool_s_version_must_be_whole_and_stay_in_its_folder(tmp_path: Path) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    fetch_pool(str(write_household(tmp_path / "pool")), made)
    corpus = next((made / "files").glob("*kitchen.jsonl"))
    whole = corpus.read_bytes()
    corpus.write_bytes(whole[:-5])
    with pytest.raises(BadInput, match=rf"files/{corpus.name}: corrupted or missing, expected the md5 [0-9a-f]+ of its"):
        fetch_pool(made.as_uri(), out)
    corpus.write_bytes(whole)
    outside = tmp_path / "outside.jsonl"
    outside.write_bytes(whole)
    (made / "dataset.json").unlink()
    pool = made / "pool.yaml"
    text = pool.read_text()
    pool.write_text(text.replace(f"files/{corpus.name}", str(outside)))
    with pytest.raises(BadInput, match=r"pool\.yaml: agent kitchen: outside\.jsonl: expected a file in the folder"):
        fetch_pool(made.as_uri(), out)
    pool.unlink()
    with pytest.raises(BadInput, match=r"expected a folder with pool\.yaml"):
        fetch_pool(made.as_uri(), out)
    assert contents(out) == {}
    pool.write_text(text)
    fetch_pool(made.as_uri(), out)
    assert json.loads((out / "dataset.json").read_text())["source"] == made.as_uri()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out-")] == []
