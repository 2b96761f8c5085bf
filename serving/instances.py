"""What a request may say: JSON to checked instances, every fault a sentence that names the field and not what it held."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from routewright.errors import BadInput

MAX_BODY_BYTES = 2**20
MAX_INSTANCES = 32

M = TypeVar("M", bound=BaseModel)


def parse_json(body: bytes, where: str = "body") -> Any:
    """Strict JSON: UTF-8, no NaN or Infinity, at most 1,024 levels deep; BadInput otherwise."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"{where}: expected JSON, line {error.lineno}, column {error.colno} is none") from None


def parse_model(model: type[M], value: Any, where: str = "") -> M:
    """The value as a model; BadInput names the first faulty field, prefixed by `where`."""
    if not isinstance(value, dict):
        raise BadInput(f"{where or 'body'}: expected an object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BadInput(_fault(error, where)) from None


def _fault(error: ValidationError, where: str) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    field = where
    for part in fault["loc"]:
        # a key nobody knows is the caller's own text: enough of it to find it
        name = f"[{part}]" if isinstance(part, int) else f".{str(part)[:40]}"
        field += name
    field = field.removeprefix(".")
    if fault["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    if fault["type"] == "missing":
        return f"{field}: missing"
    reason = re.sub("^(Value error, )", "", fault["msg"])
    should = "^(?:Input|String|List|Dictionary) should (be|have) ?"
    reason = re.sub(should, lambda m: "expected " + ("to have " if m[1] == "have" else ""), reason)
    return f"{field}: {reason[:1].lower()}{reason[1:]}"


def instance_list(value: Any, where: str = "instances") -> Sequence[Any]:
    """A list of 1 to MAX_INSTANCES instances; BadInput otherwise."""
    if not isinstance(value, list):
        raise BadInput(f"{where}: expected a list of instances")
    if not 1 <= len(value) <= MAX_INSTANCES:
        raise BadInput(f"{where}: expected 1 to {MAX_INSTANCES} instances, found {len(value)}")
    return value
