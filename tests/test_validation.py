"""What a person is told of a faulty file: the field, what was expected there and what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from routewright.validation import fault


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Amount(_Strict):
    request: str | None = Field(default=None, pattern=r"^[0-9]+$")
    limit: int = Field(default=1, ge=1)


class ByFile(_Strict):
    kind: Literal["file"]
    path: Path


class ByUrl(_Strict):
    kind: Literal["http"]
    url: str

    @field_validator("url")
    @classmethod
    def _usable(cls, url: str) -> str:
        raise ValueError("expected a URL without password")


class Place(_Strict):
    name: str
    stages: dict[str, Amount] = {}
    spare: tuple[Amount, ...] = ()
    source: Annotated[ByFile | ByUrl, Field(discriminator="kind")] | None = None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "name: missing key"),
        ({"nmae": "a"}, "nmae: unknown key, expected one of name, stages, spare, source"),
        ({"name": "a", "stages": {"rl": {"cpu": 1}}}, "stages.rl.cpu: unknown key, expected one of request, limit"),
        ({"name": "a", "spare": [{}, {"cpu": 1}]}, "spare.1.cpu: unknown key, expected one of request, limit"),
        ({"name": "a", "source": {"kind": "file", "url": ""}}, "source.file.url: unknown key, expected one of kind, path"),
        ({"name": "a", "source": {"kind": "file", "path": 5}}, "source.file.path: expected a path, found 5"),
        ({"name": "a", "source": {"kind": "http", "url": "secret"}}, "source.http.url: expected a URL without password"),
        ({"name": "a", "stages": {"rl": 3}}, "stages.rl: expected a mapping, found 3"),
        ({"name": "a", "stages": [1]}, "stages: expected a mapping, found a list"),
        ({"name": {}}, "name: expected a text, found a mapping"),
        ({"name": "a", "spare": None}, "spare: expected a valid tuple, found nothing"),
        ({"name": "a", "spare": [{"limit": 0}]}, "spare.0.limit: expected greater than or equal to 1, found 0"),
        ({"name": "a", "spare": [{"request": "1x"}]}, 'spare.0.request: expected a text that matches ^[0-9]+$, found "1x"'),
        ("just text", 'content: expected a mapping, found "just text"'),
    ],
)
def test_the_first_fault_in_words(given: Any, told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Place.model_validate(given)
    assert fault(caught.value, Place) == told
