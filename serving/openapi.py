"""The OpenAPI document of a server, from the models that its requests are checked with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

from routewright import __version__
from serving.instances import MAX_INSTANCES

if TYPE_CHECKING:
    from serving.predictor import Predictor

REFERENCE = "#/components/schemas/{model}"


def document(predictor: Predictor) -> dict[str, Any]:
    """OpenAPI 3.1 of the routes of `rest.application`."""
    from serving.predictor import INPUT, OUTPUT, Feedback

    router, schemas = predictor.router, dict[str, Any]()

    def named(model: Any) -> dict[str, str]:
        is_model = isinstance(model, type) and issubclass(model, BaseModel)
        mode: Any = "validation" if is_model else "serialization"
        schema = TypeAdapter(model).json_schema(ref_template=REFERENCE, mode=mode)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
        return {"$ref": REFERENCE.format(model=model.__name__)}

    def object_of(required: list[str], **properties: Any) -> dict[str, Any]:
        return {"type": "object", "properties": properties, "required": required}

    def content(schema: dict[str, Any], kind: str = "application/json") -> dict[str, Any]:
        return {kind: {"schema": schema}}

    error = content(object_of(["error"], error={"type": "string"}))
    retry = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}

    def answers(said: str, schema: dict[str, Any], *refusals: int, kind: str = "application/json") -> dict[str, Any]:
        meaning = {
            400: "A field is faulty; the sentence names it.",
            404: "No decision has this id.",
            405: "Another method.",
            408: "The body did not come in time.",
            413: "The body is too large.",
            415: "The body is not application/json.",
            429: "The queue is full.",
            503: "Not ready, or no decision within the deadline.",
        }
        found: dict[str, Any] = {"200": {"description": said, "content": content(schema, kind)}}
        for status in refusals:
            found[str(status)] = {"description": meaning[status], "content": error}
            if status in (429, 503):
                found[str(status)]["headers"] = retry
        return found

    def get(summary: str, schema: dict[str, Any], *refusals: int, kind: str = "application/json") -> dict[str, Any]:
        return {"get": {"summary": summary, "responses": answers("As asked.", schema, *refusals, kind=kind)}}

    def post(summary: str, body: dict[str, Any], responses: dict[str, Any]) -> dict[str, Any]:
        return {"post": {"summary": summary, "requestBody": {"required": True, "content": content(body)},
                         "responses": responses}}  # fmt: skip

    texts = {"type": "string"}
    deciding = (400, 408, 413, 415, 429, 503)
    tensor = object_of(
        ["name", "shape", "datatype", "data"],
        name={"const": INPUT},
        shape={"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 8},
        datatype={"const": "BYTES"},
        data={"type": "array", "items": texts, "minItems": 1, "maxItems": MAX_INSTANCES,
              "description": "Each the JSON text of an instance."},
    )  # fmt: skip
    output = object_of(
        ["name", "shape", "datatype", "data"],
        name={"const": OUTPUT},
        shape={"type": "array", "items": {"type": "integer"}},
        datatype={"const": "BYTES"},
        data={"type": "array", "items": texts, "description": "Each the JSON text of a decision."},
    )
    feedback = named(Feedback)
    schemas[Feedback.__name__]["properties"]["outcome"]["propertyNames"] = {"enum": list(router.agents)}
    name = router.name
    decided = object_of(["predictions"], predictions={"type": "array", "items": named(router.decision)})
    inferred = object_of(
        ["id", "model_name", "outputs"], id=texts, model_name=texts, model_version=texts,
        outputs={"type": "array", "items": output},
    )  # fmt: skip
    instances = object_of(
        ["instances"],
        instances={"type": "array", "items": named(router.instance), "minItems": 1, "maxItems": MAX_INSTANCES},
    )
    is_ready = object_of(["ready"], ready={"const": True})
    model_ready = object_of(["name", "ready"], name={"const": name}, ready={"const": True})
    listed = object_of(["models"], models={"type": "array", "items": texts})
    paths = {
        f"/v1/models/{name}:predict": post("Decide, KServe V1", instances, answers("The decisions.", decided, *deciding)),
        f"/v2/models/{name}/infer": post(
            "Decide, KServe V2",
            object_of(
                ["inputs"],
                id={"type": "string", "maxLength": 128},
                inputs={"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
            ),
            answers("The decisions.", inferred, *deciding),
        ),
        "/v1/feedback": post(
            "Say what came of a decision",
            feedback,
            answers("Logged.", object_of(["accepted"], accepted={"const": True}), 400, 404, 408, 413, 415),
        ),
        "/": get("Is the server alive?", object_of(["status"], status={"const": "alive"})),
        "/metrics": get("Numbers for Prometheus", texts, kind="text/plain"),
        "/v1/models": get("The models", listed),
        f"/v1/models/{name}": get("Is the model ready?", model_ready, 503),
        "/v2": get("The server", object_of(["name", "version"], name=texts, version=texts)),
        "/v2/health/live": get("Is the server alive?", object_of(["live"], live={"const": True})),
        "/v2/health/ready": get("Is the model warm?", is_ready, 503),
        "/v2/models": get("The models", listed),
        f"/v2/models/{name}": get("The model's tensors", object_of(["name", "inputs", "outputs"], name={"const": name})),
        f"/v2/models/{name}/ready": get("Is the model ready?", model_ready, 503),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"routewright {name}", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
