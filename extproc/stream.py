"""One ext_proc call: the request phase, then, for a rewritten request, the answer phase."""

from collections.abc import Mapping
from typing import Any, Protocol

import grpc.aio
import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc import messages
from gateway.errors import GatewayError
from gateway.lane import LatencyLane, Plain, Prefill, Refusal
from gateway.relay import Relay
from gateway.slo import Lane, Wish, read_wish

log = structlog.get_logger(__name__)

_CREDENTIALS = ("authorization", "x-request-id")


class Wire(Protocol):
    """The two directions of a call: gRPC's servicer context has them."""

    async def read(self) -> Any:
        """Return the next message from Envoy, or grpc.aio.EOF."""
        ...

    async def write(self, message: pb.ProcessingResponse) -> None:
        """Send a message to Envoy."""
        ...


class ProtocolError(Exception):
    """Envoy sent what its configuration does not allow for: the call ends, and Envoy fails the request open or resets it."""


_NOTHING = pb.ProcessingResponse()
"""The return value of a call that Envoy has ended already: nobody reads it."""


class ExtProcStream:
    """Runs one call to its end. A call that ends after the request phase leaves Envoy to pass vLLM's answer by itself.

    Methods that end the call return its last message instead of writing it: see ExtProcService.handler.
    """

    def __init__(self, lane: LatencyLane, wire: Wire) -> None:
        self._lane = lane
        self._wire = wire

    async def run(self) -> pb.ProcessingResponse:
        """Serve the call; returns its last message."""
        first = await self._wire.read()
        if first is grpc.aio.EOF:
            return _NOTHING
        if first.WhichOneof("request") != "request_headers":
            raise ProtocolError(f"a call began with {first.WhichOneof('request')}")
        headers = messages.read_headers(first.request_headers.headers)
        wish = read_wish(headers)
        method, path = headers.get(":method", ""), headers.get(":path", "")
        early = self._lane.early(wish, method, path)
        if early is None and first.request_headers.end_of_stream:
            early = Plain("no_body")
        if early is not None:
            return self._settle(wish, early, messages.go_on(_metadata(Lane.THROUGHPUT, early.reason)))
        await self._wire.write(messages.need_body())
        body = await self._wire.read()
        if body is grpc.aio.EOF:
            return _NOTHING
        if body.WhichOneof("request") == "response_headers":
            # Envoy answered by itself instead of sending the body (it was too long): its answer passes.
            self._lane.count(wish, "none", "refused", "too_large")
            return await self._pass(body.response_headers)
        credentials = {name: headers[name] for name in _CREDENTIALS if name in headers}
        decision = await self._lane.decide(wish, _content(body, "request_body").body, credentials)
        if isinstance(decision, Prefill):
            return await self._relay(wish, decision)
        return self._settle(wish, decision, messages.body_untouched(_metadata(Lane.THROUGHPUT, decision.reason)))

    def _settle(self, wish: Wish, decision: Plain | Refusal, untouched: pb.ProcessingResponse) -> pb.ProcessingResponse:
        if isinstance(decision, Refusal):
            self._lane.count(wish, "none", "refused", decision.reason)
            return messages.immediate(decision.error, {"reason": decision.reason})
        self._lane.count(wish, Lane.THROUGHPUT, "passed", decision.reason)
        return untouched

    async def _relay(self, wish: Wish, prefill: Prefill) -> pb.ProcessingResponse:
        relay = Relay(self._lane.parts, prefill)
        try:
            metadata = {**_metadata(Lane.LATENCY, "ok"), "rewritten": True}
            await self._wire.write(messages.body_replaced(prefill.body, metadata))
            message = await self._wire.read()
            if message is grpc.aio.EOF:
                return _NOTHING
            head = _content(message, "response_headers")
            if messages.read_headers(head.headers).get(":status") == "200":
                return await self._answer(relay, prefill, ended=head.end_of_stream)
            relay.close()
            relay.outcome = "vllm_error"
            return await self._pass(head)
        finally:
            relay.close()
            for stage, seconds in prefill.stages.seconds.items():
                self._lane.parts.metrics.stage_seconds.labels(stage).observe(seconds)
            self._lane.count(wish, Lane.LATENCY, relay.outcome, "ok")

    async def _answer(self, relay: Relay, prefill: Prefill, *, ended: bool) -> pb.ProcessingResponse:
        if not prefill.plan.stream:
            # The status is sent when the whole answer is known, so that a failure until then has a status of its own.
            await self._wire.write(messages.more_time(self._lane.parts.settings.generation_timeout_s))
        body = b"" if ended else await self._collect()
        if body is None:
            return _NOTHING
        try:
            answer = await relay.answer(body)
        except GatewayError as error:
            await self._wire.write(messages.response_headers({"content-type": "application/json"}, error.status))
            return messages.body_chunk(error.body(), last=True)
        await self._wire.write(messages.response_headers(answer.headers, answer.status))
        async for chunk in answer.chunks:
            await self._wire.write(messages.body_chunk(chunk, last=False))
        return messages.body_chunk(b"", last=True)

    async def _pass(self, head: pb.HttpHeaders) -> pb.ProcessingResponse:
        """Pass an answer through as it is."""
        if head.end_of_stream:
            return messages.headers_passed()
        await self._wire.write(messages.headers_passed())
        while True:
            message = await self._wire.read()
            if message is grpc.aio.EOF:
                return _NOTHING
            if message.WhichOneof("request") == "response_trailers":
                return messages.trailers_passed()
            body = _content(message, "response_body")
            chunk = messages.body_chunk(body.body, last=body.end_of_stream)
            if body.end_of_stream:
                return chunk
            await self._wire.write(chunk)

    async def _collect(self) -> bytes | None:
        """Return the whole response body; None when Envoy ended the call instead."""
        parts: list[bytes] = []
        while True:
            message = await self._wire.read()
            if message is grpc.aio.EOF:
                return None
            if message.WhichOneof("request") == "response_trailers":
                return b"".join(parts)
            body = _content(message, "response_body")
            parts.append(body.body)
            if body.end_of_stream:
                return b"".join(parts)


def _content(message: Any, kind: str) -> Any:
    if message.WhichOneof("request") != kind:
        raise ProtocolError(f"{message.WhichOneof('request')} where {kind} was due")
    return getattr(message, kind)


def _metadata(lane: Lane, reason: str) -> Mapping[str, str | bool]:
    return {"lane": str(lane), "reason": reason}
