"""One ext_proc call: the request phase, then, for a rewritten request, the answer phase."""

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc import messages
from gateway.endpoints import Endpoint
from gateway.errors import GatewayError, UpstreamFailed
from gateway.lane import LatencyLane, Plain, Prefill, Refusal
from gateway.relay import Relay
from gateway.slo import Lane, Wish, read_wish
from gateway.upstream import credentials_in


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


_LONGEST_PREFILL_ANSWER = 16 << 20  # one token; vLLM may be asked to put a long prompt's text beside it
_NOTHING = pb.ProcessingResponse()
"""The return value of a call that Envoy has ended already: nobody reads it."""


@dataclass(slots=True)
class _Served:
    """How a request was served, as far as is known: the labels it is counted under once its call ends."""

    lane: str = "none"
    outcome: str = "cancelled"
    reason: str = "undecided"


class ExtProcStream:
    """Runs one call to its end. A call that ends after the request phase leaves Envoy to pass vLLM's answer by itself.

    Methods that end the call return its last message instead of writing it: see ExtProcService.handler.
    """

    def __init__(self, lane: LatencyLane, wire: Wire) -> None:
        self._lane = lane
        self._wire = wire
        self._served = _Served()

    async def run(self) -> pb.ProcessingResponse:
        """Serve the call; returns its last message. Raises ProtocolError."""
        first = await self._wire.read()
        if first is grpc.aio.EOF:
            return _NOTHING
        head = _content(first, "request_headers")
        headers = messages.read_headers(head.headers)
        wish = read_wish(headers, self._lane.parts.settings.tenant_header)
        try:
            return await self._serve(wish, headers, has_body=not head.end_of_stream)
        except Exception:
            self._served.outcome = "failed"
            raise
        finally:
            self._lane.count(wish, self._served.lane, self._served.outcome, self._served.reason)

    async def _serve(self, wish: Wish, headers: Mapping[str, str], *, has_body: bool) -> pb.ProcessingResponse:
        early = self._lane.early(wish, headers.get(":method", ""), headers.get(":path", ""), has_body=has_body)
        if not isinstance(early, Endpoint):
            return self._settle(early, messages.go_on(_metadata(Lane.THROUGHPUT, early.reason)))
        await self._wire.write(messages.need_body())
        body = await self._wire.read()
        if body is grpc.aio.EOF:
            return _NOTHING
        if body.WhichOneof("request") == "response_headers":
            # Envoy answered by itself instead of sending the body (it was too long): its answer passes.
            self._served = _Served(outcome="refused", reason="too_large")
            return await self._pass(body.response_headers, rewritten=False)
        content = _content(body, "request_body").body
        decision = await self._lane.decide(wish, early, content, credentials_in(headers), self._ask_for_time)
        if isinstance(decision, Prefill):
            return await self._relay(decision)
        return self._settle(decision, messages.body_untouched(_metadata(Lane.THROUGHPUT, decision.reason)))

    async def _ask_for_time(self, seconds: int) -> None:
        """Tell Envoy how long this decision may take: after its own limit it would send the request on without one."""
        await self._wire.write(messages.more_time(seconds))

    def _settle(self, decision: Plain | Refusal, untouched: pb.ProcessingResponse) -> pb.ProcessingResponse:
        if isinstance(decision, Refusal):
            self._served = _Served(outcome="refused", reason=decision.reason)
            return messages.immediate(decision.error, {"reason": decision.reason})
        self._served = _Served(Lane.THROUGHPUT, "passed", decision.reason)
        return untouched

    async def _relay(self, prefill: Prefill) -> pb.ProcessingResponse:
        self._served = _Served(Lane.LATENCY, reason="ok")
        async with aclosing(Relay(self._lane.parts, prefill)) as relay:
            try:
                metadata = {**_metadata(Lane.LATENCY, "ok"), "rewritten": True}
                await self._wire.write(messages.body_replaced(prefill.body, metadata))
                message = await self._wire.read()
                if message is grpc.aio.EOF:
                    return _NOTHING
                head = _content(message, "response_headers")
                if relay.accepts(messages.read_headers(head.headers).get(":status", "")):
                    return await self._answer(relay, prefill, ended=head.end_of_stream)
                return await self._pass(head, rewritten=True)
            finally:
                for stage, seconds in prefill.stages.seconds.items():
                    self._lane.parts.metrics.stage_seconds.labels(stage).observe(seconds)
                self._served.outcome = relay.outcome

    async def _answer(self, relay: Relay, prefill: Prefill, *, ended: bool) -> pb.ProcessingResponse:
        if not prefill.plan.form.stream:
            # The status is sent when the whole answer is known, so that a failure until then has a status of its own.
            await self._wire.write(messages.more_time(self._lane.parts.settings.generation_timeout_s))
        if ended:
            # An answer without a body is one that no body can be given to any more.
            relay.outcome = "failed"
            return messages.immediate(
                UpstreamFailed("vLLM's answer has no body", code="bad_prefill_answer"), {"lane": "latency"}
            )
        collected = await self._collect()
        if collected is None:
            return _NOTHING
        body, end = collected
        try:
            answer = await relay.answer(body)
        except GatewayError as error:
            await self._wire.write(messages.response_headers({"content-type": "application/json"}, error.status))
            await self._wire.write(messages.body_chunk(error.body(), last=False))
            return end
        async with aclosing(answer.chunks) as chunks:
            await self._wire.write(messages.response_headers(answer.headers, answer.status))
            async for chunk in chunks:
                await self._wire.write(messages.body_chunk(chunk, last=False))
        return end

    async def _pass(self, head: pb.HttpHeaders, *, rewritten: bool) -> pb.ProcessingResponse:
        """Pass an answer through as it is."""
        if head.end_of_stream:
            return messages.headers_passed(rewritten=rewritten)
        await self._wire.write(messages.headers_passed(rewritten=rewritten))
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

    async def _collect(self) -> tuple[bytes, pb.ProcessingResponse] | None:
        """Return the whole response body and the message that must end its answer; None when Envoy ended the call instead."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._wire.read()
            if message is grpc.aio.EOF:
                return None
            if message.WhichOneof("request") == "response_trailers":
                return b"".join(parts), messages.trailers_passed()
            body = _content(message, "response_body")
            size += len(body.body)
            if size > _LONGEST_PREFILL_ANSWER:
                raise ProtocolError(f"vLLM's answer to the prefill leg is longer than {_LONGEST_PREFILL_ANSWER} bytes")
            parts.append(body.body)
            if body.end_of_stream:
                return b"".join(parts), messages.body_chunk(b"", last=True)


def _content(message: Any, kind: str) -> Any:
    if message.WhichOneof("request") != kind:
        raise ProtocolError(f"{message.WhichOneof('request')} where {kind} was due")
    return getattr(message, kind)


def _metadata(lane: Lane, reason: str) -> Mapping[str, str | bool]:
    return {"lane": str(lane), "reason": reason}
