"""One decode daemon: engine, landing slots, control socket, token stream and heartbeat, started and stopped in order."""

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import grpc.aio
import structlog
import torch

from decode_daemon.card import model_card
from decode_daemon.engine.generation import GenerationDefaults
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import DecodeParams, Engine, EngineDescription, EngineError, SamplingParams
from decode_daemon.grammar import Grammars
from decode_daemon.memory import LandingMemory, landing_place
from decode_daemon.metrics import DaemonMetrics
from decode_daemon.pace import Pace
from decode_daemon.presence import Presence
from decode_daemon.receiver import Expectation, Receiver
from decode_daemon.runner import EngineRunner, Timings
from decode_daemon.server import DecodeService
from decode_daemon.settings import DaemonSettings
from decode_daemon.slots import LandingSlot
from handoff.claim import ClaimKeys
from handoff.decode_pb2_grpc import add_DecoderServicer_to_server
from handoff.identity import model_digest
from handoff.messages import ModelIdentity
from handoff.transport import TransportError
from handoff.transports import open_transport
from leases import Advertiser, LeasesUnavailable, LeaseTable, Node
from process.errors import ConfigError, LostError, PortBusyError
from process.metrics import serve_metrics
from process.signals import StopSignal

log = structlog.get_logger(__name__)

_PAD_TOKENS = 256  # the largest block size in use: a landing region holds whole blocks
_WARM_UP_TOKENS = 8
# How long a drain waits for the holder of a lease that was granted before it began. A gateway reserves right after its grant,
# and one that was handed a slot while it waited fetches that within a second (`LeaseTable`).
_LATECOMERS_S = 2.0
_FAREWELL_S = 1.0  # for the last message of a stream that is cut
_LOST_END_S = 30  # for an orderly end without an engine, of which some seconds are enough

_SERVER_OPTIONS = [
    ("grpc.max_send_message_length", -1),  # a tokenizer.json can be tens of megabytes
    # Biases of 2^19 token ids (request.py) take less. The default is 4 MiB, and what is larger is refused without a reason.
    ("grpc.max_receive_message_length", 16 << 20),
    # With it, a second daemon on a port would silently share the first one's connections.
    ("grpc.so_reuseport", 0),
    # Gateways ping every 10 s, also while a prefill keeps a stream silent; gRPC's default takes that for abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


async def serve(settings: DaemonSettings) -> None:
    """Run a daemon until SIGTERM or SIGINT, then let running requests finish."""
    async with StopSignal() as stop, _told(running(settings)) as daemon:
        log.info("daemon ready", node=daemon.node.node_id, decode=daemon.node.decode_endpoint, slots=daemon.node.slots)
        try:
            await stopped(stop, daemon.runner)
        except LostError as error:
            log.error("engine lost", error=str(error))
            daemon.service.cut()  # gateways go on elsewhere at once: nothing that lands here would be decoded
            # From the kernel, which ends the process whatever it is in: its memory on a GPU that hangs may never be freed.
            signal.alarm(_LOST_END_S)
            raise
        log.info("draining", seconds=settings.drain_timeout_s)


async def stopped(stop: StopSignal, runner: EngineRunner) -> None:
    """Wait for a stop signal; raises LostError when the engine is lost before: its slots must not be given out any more."""
    ways = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(runner.lost())
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
    if not stop.received:
        raise LostError(str(ways[1].result()))


@asynccontextmanager
async def _told(daemon: AbstractAsyncContextManager["Daemon"]) -> AsyncIterator["Daemon"]:
    """What the user can mend is told without a traceback."""
    async with AsyncExitStack() as stack:
        try:
            started = await stack.enter_async_context(daemon)
        except (EngineError, TransportError, FileNotFoundError) as error:
            raise ConfigError(str(error)) from error
        yield started


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon's parts."""

    node: Node
    slots: list[LandingSlot]
    service: DecodeService
    runner: EngineRunner
    presence: Presence
    grammars: Grammars
    metrics: DaemonMetrics
    metrics_port: int


@asynccontextmanager
async def running(settings: DaemonSettings) -> AsyncIterator[Daemon]:
    """Start a daemon; on leaving, drain and stop it.

    The drain: the table gives out none of the slots any more, while heartbeats go on and keep the leases that run. What is
    running or landing finishes, `drain_timeout_s` at the most; what is left then is cut with an error. The node leaves the
    table last.

    Raises ConfigError, EngineError, FileNotFoundError, TransportError or PortBusyError, each naming what and the way out.
    """
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    pace = Pace()
    digest = None
    with suppress(OSError, ValueError):  # the engine, which reads the same, says better what is wrong
        digest = model_digest(settings.model_dir)
    engine = await asyncio.to_thread(_load, settings, pace)
    if model_digest(settings.model_dir) != digest:
        raise ConfigError(f"the model folder {settings.model_dir} changed while it was read: start again")
    shape = engine.describe()
    generation = GenerationDefaults.read(settings.model_dir)
    identity = ModelIdentity(settings.served_model_name, digest, settings.context_tokens)
    card = model_card(
        model=settings.served_model_name,
        identity=identity.weights,
        context_tokens=settings.context_tokens,
        vocab_size=shape.vocab_size,
        model_dir=settings.model_dir,
        generation=generation,
    )
    metrics = DaemonMetrics()
    async with AsyncExitStack() as stack:
        metrics_port = stack.enter_context(serve_metrics(settings.metrics_host, settings.metrics_port, metrics.registry))
        slots: list[LandingSlot] = []
        place = landing_place(engine.kv_target(1)[0].device, settings.transport)
        transport = open_transport(
            settings.transport,
            "daemon",
            attend=lambda: any(slot.written_to for slot in slots),
            host=settings.advertise_host or settings.host,
        )
        stack.callback(transport.close)
        daemon_id = uuid.uuid4().hex
        receiver = Receiver(
            daemon_id=daemon_id,
            host=settings.host,
            port=settings.control_port,
            keys=ClaimKeys(settings.signing_keys),
            expectation=_expectation(identity, shape, accept_fp8=settings.accept_fp8_kv),
            transport=transport,
        )
        stack.push_async_callback(receiver.aclose)
        length = _landing_bytes(shape, settings.context_tokens)
        slots += [LandingSlot(i, LandingMemory(transport, length, place), receiver.send) for i in range(settings.slots)]
        receiver.start(slots)
        metrics.watch(slots)

        def step(seconds: float, tokens: int) -> None:
            metrics.step_seconds.observe(seconds)
            pace.observe(seconds, tokens)

        runner = EngineRunner(engine, Timings(metrics.convert_seconds.observe, step))
        stack.callback(runner.close)
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        decode_port = _bind(server, settings.host, settings.decode_port)
        advertised = settings.advertise_host or settings.host
        node = Node(
            node_id=daemon_id,
            model=settings.served_model_name,
            card=card.fingerprint,
            decode_endpoint=f"{advertised}:{decode_port}",
            control_host=advertised,
            control_port=receiver.port,
            capacity_tokens=settings.context_tokens,
            slots=settings.slots,
        )
        landing_ms = round(settings.unused_lease_s * 1000)
        table = await stack.enter_async_context(LeaseTable(settings.redis_url, landing_ms=landing_ms))
        beats = await stack.enter_async_context(LeaseTable(settings.redis_url, landing_ms=landing_ms))

        async def free(slot: LandingSlot, epoch: int) -> None:
            # The heartbeat that follows says the same; this only says it a round trip earlier.
            with suppress(LeasesUnavailable):
                await table.release(node.model, node.node_id, slot.index, epoch)

        grammars = Grammars(
            settings.model_dir,
            shape.vocab_size,
            cache_bytes=settings.grammar_cache_mb << 20,
            wait_s=settings.grammar_wait_s,
            compiled=metrics.grammar_seconds.observe,
        )
        service = DecodeService(
            card=card,
            keys=ClaimKeys(settings.signing_keys),
            slots=slots,
            runner=runner,
            metrics=metrics,
            freed=free,
            changed=lambda: advertiser.kick(),
            landing_timeout=settings.landing_timeout_s,
            writer_grace=settings.writer_grace_s,
            reader_grace=settings.reader_grace_s,
            grammars=grammars,
        )
        add_DecoderServicer_to_server(service, server)
        presence = Presence(slots, runner, pace, service)
        metrics.report(presence.status)
        advertiser = Advertiser(beats, node, presence.look, presence.hear)
        await server.start()
        grammars.start()  # reads the tokenizer for seconds: meanwhile everything else is served
        await stack.enter_async_context(advertiser)
        stack.push_async_callback(service.settle)
        stack.push_async_callback(server.stop, _FAREWELL_S)
        stack.push_async_callback(_drain, service, presence, advertiser, settings.drain_timeout_s)
        yield Daemon(node, slots, service, runner, presence, grammars, metrics, metrics_port)


async def _drain(service: DecodeService, presence: Presence, advertiser: Advertiser, seconds: float) -> None:
    """Let what has a lease finish, `seconds` at the most, and take nothing after that."""
    service.draining = True
    advertiser.kick()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                with suppress(TimeoutError):  # Redis is away, or that gateway is gone
                    async with asyncio.timeout(_LATECOMERS_S):
                        await presence.alone.wait()
                await service.settle()
    finally:
        service.cut()


def _load(settings: DaemonSettings, pace: Pace) -> Engine:
    engine = LlamaEngine.load(
        settings.model_dir,
        dtype=getattr(torch, settings.dtype),
        context_tokens=settings.context_tokens,
        threads=settings.threads,
        step=settings.step,
        pin=settings.pin_threads,
        cache_dir=settings.cache_dir,
        speculation=settings.speculation,
        draft_head=settings.draft_head,
        tensor_parallel=settings.tensor_parallel,
        weights_as=settings.weights,
    )
    # The first steps pay for allocations and thread pools: not the first user.
    # Without drafts, whose share no warm-up foretells: the pace begins with what a token takes at the most.
    warm_up = DecodeParams(SamplingParams(temperature=0.0), _WARM_UP_TOKENS, frozenset(), speculate=False)
    began = time.perf_counter()
    for step in engine.decode([0], 0, warm_up, lambda: False):
        now = time.perf_counter()
        pace.observe(now - began, len(step.ids))
        began = now
    return engine


def _expectation(identity: ModelIdentity, shape: EngineDescription, *, accept_fp8: bool) -> Expectation:
    return Expectation(
        model=identity,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=str(shape.dtype).removeprefix("torch."),
        block_tokens=_PAD_TOKENS,
        accept_fp8=accept_fp8,
    )


def _landing_bytes(shape: EngineDescription, tokens: int) -> int:
    """Bytes for keys and values of `tokens` positions in whole blocks, all layers."""
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    return per_token * (tokens + _PAD_TOKENS)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise PortBusyError(f"cannot listen on {host}:{port}: choose another port with --decode-port") from error
