"""The ext_proc process: gRPC server, the lane's parts, metrics, and a graceful stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.stream import ExtProcStream, ProtocolError
from gateway.cards import Cards
from gateway.decode_client import DecodeClient
from gateway.lane import LatencyLane, make_parts
from gateway.metrics import GatewayMetrics
from gateway.pools import Pools
from gateway.settings import GatewaySettings
from gateway.upstream import Upstream
from leases import LeaseTable
from process.errors import PortBusyError
from process.metrics import serve_metrics
from process.signals import StopSignal

log = structlog.get_logger(__name__)

_CARD_TIMEOUT_S = 10.0
_LAST_CALLS_S = 1.0  # for those that came while the others ended: they take milliseconds
_RELEASE_S = 5.0  # for calls that were cut to let go of what they hold: some calls of the lease table, each bounded
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Envoy pings every 10 s, or as often as its configuration says, also while an answer that does not stream grows in silence.
    # gRPC's default takes that for abuse and ends the connection, with every answer on it.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
]


async def serve(settings: GatewaySettings) -> None:
    """Run the gateway until SIGTERM or SIGINT, then let running streams finish."""
    async with StopSignal() as stop, running(settings) as gateway:
        log.info("ext_proc ready", port=gateway.port, metrics_port=gateway.metrics_port)
        await stop.wait()
        log.info("draining", seconds=settings.drain_timeout_s)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway's parts."""

    port: int
    metrics_port: int
    lane: LatencyLane
    metrics: GatewayMetrics


class _GrpcWire:
    """A call's two directions. gRPC takes a stream's messages of a unary handler as bytes."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> Any:
        return await self._context.read()

    async def write(self, message: pb.ProcessingResponse) -> None:
        await self._context.write(message.SerializeToString())


class ExtProcService:
    """Envoy's ExternalProcessor service."""

    def __init__(self, lane: LatencyLane) -> None:
        self._lane = lane
        self._calls: set[asyncio.Task[Any]] = set()

    async def drain(self, seconds: float) -> bool:
        """Take no more requests into the lane, and wait until the calls of now have ended; returns whether they have in time.

        Later ones are still answered, at once: Envoy would otherwise pass them to vLLM without a reason, even those whose
        client forbids it.
        """
        self._lane.drain()
        if not self._calls:
            return True
        _, running = await asyncio.wait(set(self._calls), timeout=seconds)
        return not running

    async def settle(self) -> None:
        """Wait until calls that the server's stop has cut are through, 5 s at most; gRPC itself does not wait for them."""
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=_RELEASE_S)
        await self._lane.settle()

    async def process(self, request_iterator: Any, context: Any) -> pb.ProcessingResponse:
        """Serve one call. A client that leaves cancels it, and everything it holds is released on the way out."""
        self._lane.parts.metrics.calls.inc()
        call = asyncio.current_task()
        assert call is not None, "gRPC serves each call in a task"
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await ExtProcStream(self._lane, _GrpcWire(context)).run()
        except ProtocolError as error:
            log.error("ext_proc protocol", error=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            # Ending the call with an error lets Envoy fail open, or reset a stream that has begun: never a clean end.
            log.exception("ext_proc call failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the ext_proc log")
        raise AssertionError("abort returns never")

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler of Process.

        On the wire a bidirectional stream. Here the last message is the handler's return value, because gRPC sends that one
        and the call's end together. Sent apart, vLLM's answer can reach Envoy between the two; Envoy then hands its body to a
        call that is over, and the client gets an empty one.
        """
        process = grpc.stream_unary_rpc_method_handler(
            self.process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        service = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
        return grpc.method_handlers_generic_handler(service, {"Process": process})


@asynccontextmanager
async def running(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """Start a gateway; on leaving, drain and stop it. Raises ConfigError or PortBusyError."""
    metrics = GatewayMetrics()
    async with AsyncExitStack() as stack:
        metrics_port = stack.enter_context(serve_metrics(settings.metrics_host, settings.metrics_port, metrics.registry))
        table = await stack.enter_async_context(LeaseTable(settings.redis_url, timeout_s=settings.leases_timeout_s))
        client = await stack.enter_async_context(DecodeClient())
        upstream = await stack.enter_async_context(
            Upstream(
                settings.upstream_url,
                token_timeout_s=settings.resume_timeout_s,
                tokenize_timeout_s=settings.tokenize_timeout_s,
                generation_timeout_s=settings.generation_timeout_s,
            )
        )
        cards = Cards(client, _CARD_TIMEOUT_S)
        pools = Pools(table, cards, client, metrics)
        stack.push_async_callback(pools.aclose)
        await pools.start()
        parts = make_parts(settings, table=table, pools=pools, cards=cards, client=client, upstream=upstream, metrics=metrics)
        lane = LatencyLane(parts)
        # No bound on messages here: Envoy's buffer limit is the bound on bodies, and answers 413.
        server = grpc.aio.server(options=_OPTIONS)
        service = ExtProcService(lane)
        server.add_generic_rpc_handlers((service.handler(),))
        try:
            port = server.add_insecure_port(f"{settings.listen_host}:{settings.listen_port}")
        except RuntimeError as error:
            raise PortBusyError(
                f"cannot listen on {settings.listen_host}:{settings.listen_port}: choose another port with --listen-port"
            ) from error
        await server.start()
        try:
            yield Gateway(port, metrics_port, lane, metrics)
        finally:
            ended = await service.drain(settings.drain_timeout_s)
            await server.stop(_LAST_CALLS_S if ended else None)
            await service.settle()
