"""The gRPC side of KServe's V2 protocol for one router, with the limits and refusals of the HTTP side."""

from __future__ import annotations

import logging
from typing import Any

import grpc
from grpc_interceptor import AsyncExceptionToStatusInterceptor
from grpc_interceptor.exceptions import GrpcException, InvalidArgument, NotFound, Unimplemented
from kserve.errors import InvalidInput
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc import grpc_predict_v2_pb2 as messages
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.infer_type import InferRequest

from routewright.errors import BadInput
from serving.instances import MAX_BODY_BYTES
from serving.predictor import Predictor, Stopwatch
from serving.refusal import Refused

_log = logging.getLogger(__name__)
_STATUS = {429: grpc.StatusCode.RESOURCE_EXHAUSTED, 503: grpc.StatusCode.UNAVAILABLE}


class RouterServicer(InferenceServicer):
    """KServe's servicer for one model, which nobody can unload, and whose faults have a status of their own."""

    def __init__(self, predictor: Predictor, dataplane: DataPlane) -> None:
        super().__init__(dataplane, None)
        self._predictor = predictor

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return messages.ServerReadyResponse(ready=self._predictor.ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        self._check_name(request.name)
        return messages.ModelReadyResponse(ready=self._predictor.ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        self._check_name(request.name)
        return await super().ModelMetadata(request, context)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        raise Unimplemented("one server serves one model")

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        raise Unimplemented("one server serves one model")

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        with Stopwatch(self._predictor.name, "grpc") as watch:
            try:
                self._check_name(request.model_name)
                self._predictor.check_open()
                self.validate_grpc_request(request)
                result, _ = await self._predictor(decoded(request), headers={})
                response = result.to_grpc()
                watch.outcome = "ok"
                return response
            except Refused as refused:
                watch.outcome = refused.outcome
                code = _STATUS.get(refused.status, grpc.StatusCode.UNKNOWN)
                raise GrpcException(status_code=code, details=refused.sentence) from None
            except (BadInput, InvalidInput) as error:
                watch.outcome = "bad_input"
                raise InvalidArgument(str(error)) from None
            except GrpcException:
                watch.outcome = "not_found"
                raise
            except Exception as error:
                _log.error("a request failed: %s", type(error).__name__, exc_info=error)
                raise GrpcException(status_code=grpc.StatusCode.INTERNAL, details="internal error") from None

    def _check_name(self, name: str) -> None:
        if name != self._predictor.name:
            raise NotFound(f"model_name: expected {self._predictor.name}")


def decoded(request: Any) -> InferRequest:
    """KServe's view of a message; BadInput where it has none, as for a tensor of an unknown type."""
    try:
        return InferRequest.from_grpc(request)
    except (InvalidInput, ValueError, TypeError, KeyError, IndexError):
        raise BadInput("inputs: expected tensors that the V2 protocol knows") from None


def grpc_server(predictor: Predictor, dataplane: DataPlane) -> grpc.aio.Server:
    """A server without a port yet."""
    server = grpc.aio.server(
        interceptors=(AsyncExceptionToStatusInterceptor(),),
        options=[
            ("grpc.max_receive_message_length", MAX_BODY_BYTES),
            ("grpc.so_reuseport", 0),  # else two servers would share a port without a word
        ],
    )
    add_GRPCInferenceServiceServicer_to_server(RouterServicer(predictor, dataplane), server)
    return server
