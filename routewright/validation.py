"""What pydantic found wrong in a file that a person wrote, in this project's words."""

from __future__ import annotations

import json
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

Location = tuple[str | int, ...]
_MAPPINGS = ("model_type", "model_attributes_type", "dict_type")


def first_fault(error: ValidationError) -> Any:
    """What to tell of the faults: an unknown key before the key that is missing for it, else the first one."""
    return min(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")


def fault(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of what was read into ``model``, as "field: what was expected"."""
    first = first_fault(error)
    return f"{'.'.join(map(str, first['loc'])) or 'content'}: {reason(first, model)}"


def reason(fault: Any, model: type[BaseModel]) -> str:
    """What was expected, and what was found, where one of pydantic's faults lies in ``model``."""
    kind, found = fault["type"], shown(fault["input"])
    if kind == "missing":
        return "missing key"
    if kind == "extra_forbidden":
        return f"unknown key, expected one of {', '.join(known_keys(model, fault['loc']))}"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind in _MAPPINGS:
        return f"expected a mapping, found {found}"
    if kind == "path_type":
        return f"expected a path, found {found}"
    if kind == "string_pattern_mismatch":
        return f"expected a text that matches {fault['ctx']['pattern']}, found {found}"
    expected = fault["msg"].replace("Input should be", "expected").replace("a valid string", "a text")
    return f"{expected.replace('a valid list', 'a list')}, found {found}" if expected.startswith("expected") else expected


def shown(value: Any) -> str:
    """A plain value as `quoted`; of a mapping or a list only that it is one."""
    if isinstance(value, str | int | float | bool | None):
        return quoted(value)
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list | tuple) else "a date"


def quoted(value: Any) -> str:
    """A value as JSON, at most 60 characters of it."""
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def known_keys(model: type[BaseModel], location: Location) -> list[str]:
    """The keys that are allowed where an unknown one stands; of a union those of the member that pydantic chose."""
    models = [model]
    for part in location[:-1]:
        if entered := [one.model_fields[str(part)].annotation for one in models if part in one.model_fields]:
            models = [inner for annotation in entered for inner in _models(annotation)]
        else:  # a place in a list, a key of a mapping, or a member of a union by name or tag
            models = [one for one in models if part == one.__name__ or part in _tags(one)] or models
    return list(dict.fromkeys(name for one in models for name in one.model_fields))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [one for argument in get_args(annotation) for one in _models(argument)]


def _tags(model: type[BaseModel]) -> list[Any]:
    return [value for field in model.model_fields.values() for value in get_args(field.annotation)]
