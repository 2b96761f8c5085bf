"""The HTTP side: KServe's V1 and V2 routes for one router, feedback, health, metrics, and an OpenAPI document of them.

An application of its own rather than KServe's: its routes would also unload a model for anybody who asks, answer
500 and close the connection on a faulty body, and know no limit of a body's size.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI
from kserve.errors import InvalidInput
from kserve.protocol.infer_type import InferInput, InferRequest, RequestedOutput
from prometheus_client import REGISTRY, exposition
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from routewright.errors import BadInput
from serving.instances import MAX_BODY_BYTES, parse_json, parse_model
from serving.openapi import document
from serving.predictor import MAX_DIMENSIONS, Predictor, Stopwatch
from serving.refusal import Refused, not_ready

BODY_TIMEOUT_S = 10.0
BINARY_HEADER = "inference-header-content-length"
_log = logging.getLogger(__name__)


class InferTensor(BaseModel):
    """An input tensor of a V2 request."""

    model_config = ConfigDict(strict=True)

    name: str
    shape: list[int] = Field(max_length=MAX_DIMENSIONS)
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferOutputName(BaseModel):
    """An output tensor that a V2 request asks for."""

    model_config = ConfigDict(strict=True)

    name: str
    parameters: dict[str, Any] | None = None


class InferBody(BaseModel):
    """The JSON of a V2 request."""

    model_config = ConfigDict(strict=True)

    id: str | None = Field(default=None, max_length=128)
    parameters: dict[str, Any] | None = None
    inputs: list[InferTensor]
    outputs: list[InferOutputName] | None = None


def as_json(status: int, content: Any, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def refusal(refused: Refused) -> Response:
    """A refusal as a response."""
    headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
    if refused.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return as_json(refused.status, {"error": refused.sentence}, headers)


async def read_body(request: Request, json_only: bool = True) -> bytes:
    """The body; `Refused` where it is too large (413), of another type or compressed (415) or too slow in coming (408)."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and (json_only or kind != "application/octet-stream"):
        raise Refused(415, "Content-Type: expected application/json", "bad_input")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refused(415, "Content-Encoding: expected a body that is not compressed", "bad_input")
    too_large = Refused(413, f"body: expected at most {MAX_BODY_BYTES} bytes", "too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise Refused(408, f"body: expected within {BODY_TIMEOUT_S:g} seconds", "bad_input") from None
    return b"".join(chunks)


def infer_request(body: bytes, json_length: str | None, model: str) -> InferRequest:
    """A V2 request of a body in JSON, or in JSON and, after ``json_length`` bytes, binary tensors; BadInput if faulty."""
    end = len(body)
    if json_length is not None:
        if not (json_length.isascii() and json_length.isdigit() and len(json_length) < 10 and int(json_length) <= end):
            raise BadInput(f"{BINARY_HEADER}: expected the number of bytes of the JSON at the body's start")
        end = int(json_length)
    parsed = parse_model(InferBody, parse_json(body[:end]))
    inputs, at = [], end
    for i, tensor in enumerate(parsed.inputs):
        made = InferInput(tensor.name, tensor.shape, tensor.datatype, tensor.data, tensor.parameters)
        size = (tensor.parameters or {}).get("binary_data_size")
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(body) - at:
                raise BadInput(f"inputs[{i}].parameters.binary_data_size: expected the bytes that follow the JSON")
            made._raw_data = body[at : at + size]
            at += size
        elif tensor.data is None:
            raise BadInput(f"inputs[{i}].data: missing")
        inputs.append(made)
    if at != len(body):
        raise BadInput(f"body: {len(body) - at} bytes belong to no tensor")
    outputs = [RequestedOutput(output.name, output.parameters) for output in parsed.outputs or ()]
    return InferRequest(model, inputs, request_id=parsed.id, parameters=parsed.parameters, request_outputs=outputs or None)


def application(predictor: Predictor) -> FastAPI:
    """The routes of one router. Others (a front for another protocol) can be added to the application it returns."""
    app = FastAPI(title=f"routewright {predictor.name}", docs_url=None, redoc_url=None)
    app.openapi = lambda: document(predictor)  # type: ignore[method-assign]
    name = predictor.name

    def answering(protocol: str, handle: Callable[[Request], Awaitable[Response]]) -> Any:
        async def endpoint(request: Request) -> Response:
            with Stopwatch(name, protocol) as watch:
                try:
                    response = await handle(request)
                    watch.outcome = "ok"
                    return response
                except Refused as refused:
                    watch.outcome = refused.outcome
                    return refusal(refused)
                except (BadInput, InvalidInput) as error:
                    watch.outcome = "bad_input"
                    return as_json(400, {"error": str(error)})
                except ClientDisconnect:
                    watch.outcome = "bad_input"
                    return as_json(400, {"error": "body: the connection was closed before its end"})
                except Exception as error:
                    _log.error("a request failed: %s", type(error).__name__, exc_info=error)
                    return as_json(500, {"error": "internal error"})

        return endpoint

    async def predict(request: Request) -> Response:
        predictor.check_open()
        payload = parse_json(await read_body(request))
        result, _ = await predictor(payload, headers={})
        return as_json(200, result)

    async def infer(request: Request) -> Response:
        predictor.check_open()
        json_length = request.headers.get(BINARY_HEADER)
        body = await read_body(request, json_only=json_length is None)
        result, _ = await predictor(infer_request(body, json_length, name), headers={})
        content, json_size = result.to_rest()
        if json_size is None:
            return as_json(200, content)
        return Response(content, 200, {BINARY_HEADER: str(json_size)}, "application/octet-stream")

    async def feedback(request: Request) -> Response:
        await predictor.feedback(parse_json(await read_body(request)))
        return as_json(200, {"accepted": True})

    async def live(request: Request) -> Response:
        return as_json(200, {"live": True})

    async def alive(request: Request) -> Response:
        return as_json(200, {"status": "alive"})

    async def ready(request: Request) -> Response:
        return as_json(200, {"ready": True}) if predictor.ready else refusal(not_ready())

    async def model_ready(request: Request) -> Response:
        return as_json(200, {"name": name, "ready": True}) if predictor.ready else refusal(not_ready())

    async def models(request: Request) -> Response:
        return as_json(200, {"models": [name]})

    async def server(request: Request) -> Response:
        return as_json(200, {"name": "routewright", "version": predictor.router.model_version, "extensions": []})

    async def metadata(request: Request) -> Response:
        return as_json(200, {
            "name": name, "versions": [predictor.router.model_version], "platform": "routewright",
            "inputs": predictor.get_input_types(), "outputs": predictor.get_output_types(),
        })  # fmt: skip

    async def metrics(request: Request) -> Response:
        encoder, content_type = exposition.choose_encoder(request.headers.get("accept", ""))
        return Response(encoder(REGISTRY), headers={"Content-Type": content_type})

    # routes are tried in this order
    app.add_route(f"/v1/models/{name}:predict", answering("v1", predict), ["POST"])
    app.add_route(f"/v2/models/{name}/infer", answering("v2", infer), ["POST"])
    app.add_route("/v1/feedback", answering("feedback", feedback), ["POST"])
    for path, handler in {
        "/": alive,
        "/metrics": metrics,
        "/v1/models": models,
        f"/v1/models/{name}": model_ready,
        "/v2": server,
        "/v2/health/live": live,
        "/v2/health/ready": ready,
        "/v2/models": models,
        f"/v2/models/{name}": metadata,
        f"/v2/models/{name}/ready": model_ready,
    }.items():
        app.add_route(path, handler, ["GET"])

    async def no_such_thing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {404: "path: there is nothing here", 405: "method: not allowed here"}
        headers = dict(error.headers or {})
        return as_json(error.status_code, {"error": said.get(error.status_code, "the request is refused")}, headers)

    app.add_exception_handler(HTTPException, no_such_thing)
    return app
