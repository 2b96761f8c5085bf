"""A trained router as a KServe model: V1, V2 and gRPC in front, one thread that decides behind, the log in between.

A router is one more small file such as `search_router.py`: what it reads of an instance, how it decides a batch, what it
logs. This module gives it queue, deadline, request ids, metrics, feedback and the protocols.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

import kserve
import numpy as np
import orjson
from kserve.errors import InvalidInput
from kserve.protocol.infer_type import InferInput, InferOutput, InferRequest, InferResponse
from pydantic import BaseModel, ConfigDict, Field

from routewright.errors import BadInput
from serving import metrics
from serving.batching import Batcher
from serving.decision_log import DecisionLog, is_own_request_id, new_request_id, signing_key
from serving.instances import instance_list, parse_json, parse_model
from serving.refusal import Refused, not_ready

INPUT, OUTPUT = "instance", "decision"
MAX_BATCH = 16
MAX_WAITING = 256
MAX_DIMENSIONS = 8  # of a tensor
_WARM_UPS = 5


@dataclass
class Timing:
    """Seconds that a batch's features and its forward pass took."""

    features: float = 0.0
    forward: float = 0.0


@dataclass
class Answer:
    """One decision: what is sent (``decision``, without its request id), and what metrics and log know of it."""

    decision: dict[str, Any]
    agents: Sequence[str]
    propensity: float
    epsilon: float
    explored: bool
    context: Any
    """The router's own, for its `logged`."""
    abstained: bool = False
    escalated: bool = False
    drift: float | None = None
    largest: int | None = None
    """Up to this many agents, exploration could have asked any set; None where it could not."""


class ServedRouter(Protocol):
    """What a router brings along."""

    @property
    def name(self) -> str: ...

    @property
    def instance(self) -> type[BaseModel]: ...

    @property
    def decision(self) -> type[Any]:
        """The dataclass that a decision is sent as."""

    @property
    def examples(self) -> Sequence[dict[str, Any]]:
        """Instances to warm up with, the first for people to try."""

    @property
    def model_version(self) -> str: ...

    @property
    def agents(self) -> Sequence[str]:
        """Who may be named in an outcome."""

    @property
    def in_loop(self) -> bool:
        """Whether a decision is so short that the event loop makes it itself, see `serving.batching`."""

    def check(self, instance: Any) -> None:
        """What its model cannot tell of an instance, before it waits for its turn; BadInput names the field."""

    def decide(self, instances: Sequence[Any], timing: Timing) -> list[Answer]:
        """Decide a batch, always in the same worker; BadInput where an instance is faulty after all."""

    def logged(self, answer: Answer, key: bytes) -> dict[str, Any]:
        """The router's part of a log line."""


class Feedback(BaseModel):
    """What came of a decision."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_id: Annotated[str, Field(min_length=1, max_length=128, description="The decision's.")]
    outcome: Annotated[
        dict[str, Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]],
        Field(min_length=1, max_length=64, description="How well each agent answered, 0..1."),
    ]


class Predictor(kserve.Model):
    """A router as KServe knows models. `load` warms it up; `predict` takes V1 bodies and V2 requests.

    Without a log, feedback is refused. Faults are `InvalidInput` naming the field, refusals `Refused`.
    """

    def __init__(
        self,
        router: ServedRouter,
        log: DecisionLog | None = None,
        deadline_s: float = 2.0,
        max_batch: int = MAX_BATCH,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        super().__init__(router.name)
        self.router, self._log = router, log
        self._key = signing_key(None) if log is None else log.key
        self.batcher: Batcher[Any, dict[str, Any]] = Batcher(
            self._decide, max_batch, max_waiting, deadline_s, router.in_loop
        )
        self.ready = self.draining = False

    def load(self) -> bool:
        """Make some decisions, so that the first request finds everything in place; then the model is ready."""
        examples = [parse_model(self.router.instance, example) for example in self.router.examples]
        for _ in range(_WARM_UPS):
            for example in examples:
                self.router.decide([example], Timing())
        self.router.decide((examples * self.batcher.max_batch)[: self.batcher.max_batch], Timing())
        self.ready = True
        return True

    def drain(self) -> None:
        """Not ready any more, for those who ask before they send; who sends all the same is answered."""
        self.ready, self.draining = False, True

    def stop(self) -> None:
        """Not ready any more; decide what waits, then close the log. Once is enough."""
        self.ready = False
        self.batcher.stop()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    # --- Deciding, in the worker's thread

    def _decide(self, instances: Sequence[Any], waited: Sequence[float]) -> list[dict[str, Any] | Exception]:
        timing = Timing()
        answers: list[Answer | Exception] = []
        try:
            answers.extend(self.router.decide(instances, timing))
        except Exception as error:
            if len(instances) == 1:
                return [error]
            # one at a time, so that a faulty instance is an error to its own request alone
            return [answer for one, wait in zip(instances, waited, strict=True) for answer in self._decide([one], [wait])]
        sent, lines = [], []
        now = datetime.now(UTC).isoformat()
        for answer in answers:
            assert isinstance(answer, Answer)
            answer.decision["request_id"] = new_request_id(self._key)
            sent.append(answer.decision)
            if self._log is not None:
                lines.append(self._line(answer, now))
            self._count(answer)
        if self._log is not None:
            self._log.write(lines)
        metrics.BATCH.labels(self.name).observe(len(instances))
        for phase, seconds in (("features", timing.features), ("forward", timing.forward)):
            metrics.LATENCY.labels(self.name, phase).observe(seconds)
        for seconds in waited:
            metrics.LATENCY.labels(self.name, "queue").observe(seconds)
        return [*sent]

    def _line(self, answer: Answer, now: str) -> dict[str, Any]:
        support = {} if answer.largest is None else {"largest": answer.largest}
        return {
            **self.router.logged(answer, self._key),
            "request_id": answer.decision["request_id"],
            "router": self.name,
            "model_version": self.router.model_version,
            "explored": answer.explored,
            "propensity": answer.propensity,
            "epsilon": answer.epsilon,
            **support,
            "timestamp": now,
        }

    def _count(self, answer: Answer) -> None:
        for agent in answer.agents:
            metrics.DECISIONS.labels(self.name, agent).inc()
        metrics.ABSTENTIONS.labels(self.name).inc(answer.abstained)
        metrics.ESCALATIONS.labels(self.name).inc(answer.escalated)
        metrics.EXPLORED.labels(self.name).inc(answer.explored)
        if answer.drift is not None:
            metrics.DRIFT.labels(self.name).set(answer.drift)

    # --- The protocols, in the event loop

    def check_open(self, on_the_way: int = 0) -> None:
        """Raise `Refused` where nothing can be decided now, see `Batcher.check_room`; to be asked before parsing."""
        if not (self.ready or self.draining):
            raise not_ready()
        self.batcher.check_room(1, on_the_way)

    async def decide(self, instances: Sequence[Any], where: str) -> list[dict[str, Any]]:
        """The decisions of raw instances, all or none; BadInput names the field, `Refused` says why nothing is decided."""
        parsed = [parse_model(self.router.instance, value, f"{where}[{i}]") for i, value in enumerate(instances)]
        for i, instance in enumerate(parsed):
            try:
                self.router.check(instance)
            except BadInput as error:
                raise BadInput(f"{where}[{i}].{error}") from None
        try:
            return await self.batcher.submit(parsed)
        except BadInput as error:
            raise BadInput(f"{where}{'[0]' if len(parsed) == 1 else ''}: {error}") from None

    async def predict(
        self,
        payload: dict[str, Any] | InferRequest,
        headers: Mapping[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> dict[str, Any] | InferResponse:
        """KServe's handler: {"instances": [...]} to {"predictions": [...]}, a V2 request to a V2 response."""
        try:
            if isinstance(payload, InferRequest):
                return await self._infer(payload)
            if not isinstance(payload, dict):
                raise BadInput('body: expected an object such as {"instances": [...]}')
            if "instances" not in payload:
                raise BadInput("instances: missing, expected a list of instances")
            return {"predictions": await self.decide(instance_list(payload["instances"]), "instances")}
        except BadInput as error:
            raise InvalidInput(str(error)) from None

    async def _infer(self, request: InferRequest) -> InferResponse:
        texts = tensor_elements(request)
        values = [parse_json(text, f"{INPUT}[{i}]") for i, text in enumerate(instance_list(texts, INPUT))]
        decisions = await self.decide(values, INPUT)
        output = InferOutput(OUTPUT, [len(decisions)], "BYTES", [orjson.dumps(decision).decode() for decision in decisions])
        return InferResponse(
            # no id would be an error: the answer's fields are all mandatory
            response_id=request.id or uuid.uuid4().hex,
            model_name=self.name,
            model_version=self.router.model_version,
            infer_outputs=[output],
            use_binary_outputs=request.use_binary_outputs and not request.from_grpc,
            requested_outputs=request.request_outputs,
        )

    def get_input_types(self) -> list[dict[str, Any]]:
        """One tensor of JSON texts."""
        return [{"name": INPUT, "datatype": "BYTES", "shape": [-1]}]

    def get_output_types(self) -> list[dict[str, Any]]:
        """One tensor of JSON texts."""
        return [{"name": OUTPUT, "datatype": "BYTES", "shape": [-1]}]

    async def feedback(self, body: Any) -> None:
        """Log an outcome. BadInput: a faulty field; `Refused` 404: an id that no decision of this log carries."""
        given = parse_model(Feedback, body)
        for agent in given.outcome:
            if agent not in self.router.agents:
                raise BadInput(f"outcome.{agent[:40]}: unknown agent, expected one of {', '.join(self.router.agents)}")
        if self._log is None:
            raise Refused(404, "request_id: no decision log is kept, start the server with --log", "not_found")
        if not is_own_request_id(given.request_id, self._key):
            raise Refused(404, "request_id: no decision has this id", "not_found")
        line = {
            "request_id": given.request_id,
            "router": self.name,
            "outcome": given.outcome,
            "timestamp": datetime.now(UTC).isoformat(),
        }
        await asyncio.to_thread(self._log.write, [line])


def tensor_elements(request: InferRequest) -> list[bytes]:
    """The elements of a request's only tensor; BadInput where it is not one BYTES tensor `instance`."""
    if len(request.inputs) != 1 or request.inputs[0].name != INPUT:
        raise BadInput(f"inputs: expected one tensor, named {INPUT}")
    tensor = request.inputs[0]
    if tensor.datatype != "BYTES":
        raise BadInput("inputs[0].datatype: expected BYTES")
    for output in request.request_outputs or ():
        if output.name != OUTPUT:
            raise BadInput(f"outputs: expected only {OUTPUT}")
    elements = split_bytes(tensor._raw_data) if tensor._raw_data is not None else _listed(tensor)
    # a product of very many sizes would take minutes
    if len(tensor.shape) > MAX_DIMENSIONS or any(s < 0 for s in tensor.shape) or math.prod(tensor.shape) != len(elements):
        raise BadInput(f"inputs[0].shape: expected the shape of {len(elements)} elements")
    return elements


def _listed(tensor: InferInput) -> list[bytes]:
    data = tensor.data
    if isinstance(data, np.ndarray):
        data = data.ravel().tolist()
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise BadInput("inputs[0].data: expected a list of JSON texts")
    elements = []
    for i, element in enumerate(data):
        if isinstance(element, str):
            element = element.encode("utf-8", "surrogatepass")
        if not isinstance(element, bytes):
            raise BadInput(f"inputs[0].data[{i}]: expected a JSON text")
        elements.append(element)
    return elements


def split_bytes(raw: bytes) -> list[bytes]:
    """The elements of a BYTES tensor in binary form: each a little-endian 4-byte length and as many bytes."""
    elements, at = [], 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        element = raw[at + 4 : at + 4 + length]
        if at + 4 > len(raw) or len(element) != length:
            raise BadInput("inputs[0]: expected each element's length in 4 bytes, then its bytes")
        elements.append(element)
        at += 4 + length
    return elements


class Stopwatch:
    """Counts a request and its whole time, whatever becomes of it."""

    def __init__(self, router: str, protocol: str) -> None:
        self._router, self._protocol, self.outcome = router, protocol, "error"

    def __enter__(self) -> Stopwatch:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        metrics.REQUESTS.labels(self._router, self._protocol, self.outcome).inc()
        if self._protocol != "feedback":
            metrics.LATENCY.labels(self._router, "total").observe(time.perf_counter() - self._started)
