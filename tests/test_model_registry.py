"""Registering and aliases on a real SQLite store; killed between any two steps, a second call finishes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routewright import model_registry as registry
from routewright import tracking
from routewright.errors import BadInput


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def client(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.delenv(tracking.PARENT, raising=False)
    return registry.registry_client()


def model_folder(path: Path, weights: str = "0") -> Path:
    path.mkdir(exist_ok=True)
    (path / "router.json").write_text("{}")
    (path / "model.safetensors").write_text(weights)
    (path / "history.jsonl").write_text("{}")
    return path


def versions(client: Any, name: str, count: int) -> list[str]:
    """A registered model with that many versions without files."""
    client.create_registered_model(name)
    return [str(client.create_model_version(name, "s3://bucket/model").version) for _ in range(count)]


def test_a_folder_is_registered_once_with_its_card(client, tmp_path) -> None:
    folder = model_folder(tmp_path / "model")

    def registered() -> registry.RegisteredVersion:
        tags = {"pipeline": "search-router"}
        return registry.register(client, "one", folder, tracking.log_search_model, "# Card\n", tags)

    with tracking.stage_run("promote", "key-1", {}):
        first = registered()
    assert (first.version, first.digest, first.aliases) == ("1", registry.folder_digest(folder), ())
    assert registered() == first, "no run is needed for what is registered"
    assert client.get_model_version("one", "1").description == "# Card\n"
    assert client.get_model_version("one", "1").tags["pipeline"] == "search-router"
    uri = registry.concrete_uri(client, "one", "1", {str(tmp_path): "models"})
    assert uri.startswith("pvc://models/")
    files = {file.name for file in (tmp_path / uri.removeprefix("pvc://models/")).iterdir()}
    assert files == {"router.json", "model.safetensors", "MODEL_CARD.md"}
    with pytest.raises(BadInput, match="which a cluster cannot read"):
        registry.concrete_uri(client, "one", "1")
    model_folder(folder, "1")
    with tracking.stage_run("promote", "key-2", {}):
        assert registered().version == "2"


def test_the_digest_follows_what_is_served(tmp_path) -> None:
    folder = model_folder(tmp_path / "model")
    first = registry.folder_digest(folder)
    (folder / "history.jsonl").write_text("longer")
    (folder / "MODEL_CARD.md").write_text("# Card")
    assert registry.folder_digest(folder) == first
    (folder / "router.json").write_text('{"second": 1}')
    assert registry.folder_digest(folder) != first


@pytest.mark.parametrize(("make", "message"), [(False, "no such folder"), (True, "no .safetensors file")])
def test_a_folder_that_is_no_model(tmp_path, make: bool, message: str) -> None:
    if make:
        (tmp_path / "model").mkdir()
    with pytest.raises(BadInput, match=message):
        registry.folder_digest(tmp_path / "model")


def test_registering_needs_a_run(client, tmp_path) -> None:
    with pytest.raises(RuntimeError, match="active run"):
        registry.register(client, "no-run", model_folder(tmp_path / "m"), tracking.log_search_model, "", {})


def test_champion_previous_and_back(client) -> None:
    one, two, three = versions(client, "aliased", 3)
    registry.set_challenger(client, "aliased", one)
    assert registry.aliases(client, "aliased") == {"challenger": one}
    for version, expected in (
        (one, {"champion": one}),
        (two, {"champion": two, "previous": one}),
        (three, {"champion": three, "previous": two}),
    ):
        registry.set_challenger(client, "aliased", version)
        for _ in range(2):
            registry.set_champion(client, "aliased", version)
            assert registry.aliases(client, "aliased") == expected
    for _ in range(2):
        assert registry.restore_previous(client, "aliased").version == two
        assert registry.aliases(client, "aliased") == {"champion": two}
    registry.set_champion(client, "aliased", three)
    assert registry.restore_previous(client, "aliased").version == two
    found = registry.version_at(client, "aliased", "champion")
    assert found == registry.RegisteredVersion("aliased", two, "", ("champion",))
    assert registry.version_at(client, "aliased", "challenger") is None


def test_another_versions_challenger_stays(client) -> None:
    one, two = versions(client, "challenged", 2)
    registry.set_challenger(client, "challenged", two)
    registry.set_champion(client, "challenged", one)
    registry.drop_challenger(client, "challenged", one)
    assert registry.aliases(client, "challenged") == {"champion": one, "challenger": two}


class Killed(Exception):
    pass


class KilledAfter:
    """A registry client that dies at the n-th write."""

    def __init__(self, client: Any, writes: int) -> None:
        self._client, self._left = client, writes

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not name.startswith(("set_", "delete_", "create_")):
            return method

        def write(*args: Any, **kwargs: Any) -> Any:
            if self._left == 0:
                raise Killed
            self._left -= 1
            return method(*args, **kwargs)

        return write


@pytest.mark.parametrize("writes", range(4))
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (lambda client, name, new: registry.set_champion(client, name, new), {"champion": "2", "previous": "1"}),
        (lambda client, name, new: registry.restore_previous(client, name), {"champion": "1"}),
    ],
    ids=["promote", "rollback"],
)
def test_a_killed_change_is_finished_by_the_next_call(
    client, writes: int, action: Callable[[Any, str, str], object], expected: dict[str, str], request
) -> None:
    name = f"killed-{request.node.callspec.id}"
    one, two = versions(client, name, 2)
    registry.set_champion(client, name, one)
    if "rollback" in name:
        registry.set_champion(client, name, two)
    else:
        registry.set_challenger(client, name, two)
    try:
        action(KilledAfter(client, writes), name, two)
    except Killed:
        assert "champion" in registry.aliases(client, name), "some version always serves"
    action(client, name, two)
    assert registry.aliases(client, name) == expected


def test_there_may_be_nothing_to_go_back_to(client) -> None:
    with pytest.raises(BadInput, match="model 'unheard-of': not registered"):
        registry.restore_previous(client, "unheard-of")
    (one,) = versions(client, "alone", 1)
    registry.set_champion(client, "alone", one)
    with pytest.raises(BadInput, match="no version has the alias previous"):
        registry.restore_previous(client, "alone")


def test_concrete_uris(client) -> None:
    client.create_registered_model("uris")
    s3 = client.create_model_version("uris", "s3://bucket/1/models/m-1/artifacts/")
    assert registry.concrete_uri(client, "uris", s3.version) == "s3://bucket/1/models/m-1/artifacts/data/uris"
    proxied = client.create_model_version("uris", "mlflow-artifacts:/1/models/m-1/artifacts")
    with pytest.raises(BadInput, match="no storage scheme mlflow-artifacts:; start the tracking server"):
        registry.concrete_uri(client, "uris", proxied.version)
