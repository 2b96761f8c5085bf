from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_pool import BIRDS, BOATS

from routewright.errors import BadInput
from routewright.pools.fetch import EMBEDDED, fetch_dataset
from routewright.pools.pool import check_pool, load_pool
from routewright.pools.search import PoolSearch

WritePool = Callable[[Any], Path]


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "dataset.json").read_text())


def test_a_pool_becomes_a_folder_of_its_own(
    write_pool: WritePool, pool_content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    source, out = write_pool(pool_content), tmp_path_factory.mktemp("elsewhere") / "dataset"
    expected = load_pool(source)
    queries, qrels = expected.queries("birds"), expected.qrels("birds", "dev")
    found = PoolSearch(expected).search("birds", "bird that swims")
    fetch_dataset(str(source), out)
    shutil.rmtree(source.parent / "birds")  # the copy does not need what it was copied from
    (source.parent / "boats.jsonl").unlink()
    source.unlink()
    out = out.rename(out.with_name("moved"))
    pool = load_pool(out / "pool.yaml")
    check_pool(pool)
    assert (pool.name, pool.fallback, pool.names) == ("tiny", "boats", ["birds", "boats"])
    assert [agent.card for agent in pool.agents] == ["Birds, dated.", "Boats."]
    assert pool.documents("birds") == BIRDS
    assert pool.documents("boats") == BOATS
    assert pool.queries("birds") == queries
    assert pool.qrels("birds", "dev") == qrels
    assert [h.doc_id for h in PoolSearch(pool).search("birds", "bird that swims")] == [h.doc_id for h in found]
    for agent in pool.agents:
        assert agent.search.corpus.is_relative_to(out)


def test_the_manifest_names_every_file_with_its_md5(
    write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path
) -> None:
    source = write_pool(pool_content)
    fetch_dataset(str(source), tmp_path / "out")
    content = manifest(tmp_path / "out")
    files = {p.relative_to(tmp_path / "out").as_posix(): p for p in (tmp_path / "out").rglob("*") if p.is_file()}
    del files["dataset.json"]
    assert content["files"] == {name: hashlib.md5(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert content["pool"] == "tiny"
    assert content["source"] == str(source)
    assert content["pool_digest"] == load_pool(tmp_path / "out" / "pool.yaml").digest
    fetch_dataset(str(source), tmp_path / "again")
    assert manifest(tmp_path / "again") == content
    pool_content["agents"][0]["card"] = "Birds, all of them."
    fetch_dataset(str(write_pool(pool_content)), tmp_path / "changed")
    assert manifest(tmp_path / "changed")["md5"] != content["md5"]


def test_files_that_agents_share_stay_shared(write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path) -> None:
    """Their documents are duplicates by (corpus, id) only while both agents name one file."""
    river = {"kind": "bm25", "corpus": "boats.jsonl", "include": {"kind": "river"}}
    pool_content["agents"].append({"name": "rivers", "card": "Boats on rivers.", "search": river})
    fetch_dataset(str(write_pool(pool_content)), tmp_path / "out")
    pool = load_pool(tmp_path / "out" / "pool.yaml")
    assert pool.corpus_name("rivers") == pool.corpus_name("boats")
    assert [document["_id"] for document in pool.documents("rivers")] == ["1", "3"]


def test_an_http_agent_is_kept_as_it_is(write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path) -> None:
    search = {"kind": "http", "url": "http://127.0.0.1:9/search", "timeout_s": 0.5}
    pool_content["agents"].append({"name": "remote", "card": "Far away.", "search": search})
    fetch_dataset(str(write_pool(pool_content)), tmp_path / "out")
    copied = load_pool(tmp_path / "out" / "pool.yaml").agent("remote").search
    assert (copied.url, copied.timeout_s) == ("http://127.0.0.1:9/search", 0.5)


def test_a_finished_folder_is_left_as_it_is_and_a_half_one_is_finished(
    write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path
) -> None:
    source, out = write_pool(pool_content), tmp_path / "out"
    fetch_dataset(str(source), out)
    content = manifest(out)
    (out / "pool.yaml").write_text("mine")
    fetch_dataset(str(source), out)
    assert (out / "pool.yaml").read_text() == "mine"
    (out / "dataset.json").unlink()  # as after a kill: the manifest is written last
    fetch_dataset(str(source), out)
    assert manifest(out) == content
    assert load_pool(out / "pool.yaml").names == ["birds", "boats"]


@pytest.mark.parametrize("pool", ["aws-dox", "", "/nowhere/pool.yaml"])
def test_a_pool_that_is_none(pool: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"pool '{pool}': expected '{EMBEDDED}' or the path of a pool file"):
        fetch_dataset(pool, tmp_path / "out")


def test_a_faulty_pool_is_not_fetched(write_pool: WritePool, pool_content: dict[str, Any], tmp_path: Path) -> None:
    pool_content["agents"][1]["cards"] = pool_content["agents"][1].pop("card")
    with pytest.raises(BadInput, match=r"pool\.yaml, line \d+: agents\[1\]\.cards: unknown key"):
        fetch_dataset(str(write_pool(pool_content)), tmp_path / "out")
    assert not (tmp_path / "out" / "dataset.json").exists()
