"""The schemas of custom resources in which fields they do not name are errors, as on a strict API server."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

CRDS = Path(__file__).parents[2] / "shared" / "crds"


def strict(schema: Any) -> Any:
    """A CRD's schema as JSON schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", bool(found.get("x-kubernetes-preserve-unknown-fields")))
    return found


def crd_validator(crd: str, version: str) -> jsonschema.Draft202012Validator:
    """The validator of a CRD such as "trainjobs.trainer.kubeflow.org"; skips the test where its schema is not there."""
    file = CRDS / f"{crd}.json.gz"
    if not file.is_file():
        pytest.skip(f"../shared/crds is not there: the schema of {crd} is needed")
    schema = strict(json.loads(gzip.decompress(file.read_bytes()))["versions"][version])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)
