"""A decode service over real gRPC with an engine that does what the test says, and KV that lands without a network."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import torch

from decode_daemon.engine.protocol import (
    DecodeParams,
    EngineDescription,
    FinishReason,
    Step,
)
from decode_daemon.memory import LandingMemory
from decode_daemon.metrics import DaemonMetrics
from decode_daemon.runner import EngineRunner, Timings
from decode_daemon.server import DecodeService
from decode_daemon.slots import LandingSlot, SlotState, Writer
from handoff import decode_pb2 as pb
from handoff.claim import to_bytes
from handoff.decode_pb2_grpc import DecoderStub, add_DecoderServicer_to_server
from handoff.messages import Sent
from tests.kit.handoff import (
    BLOCK,
    FIRST_TOKEN,
    KEYS,
    LANDING_BYTES,
    LAYERS,
    LAYOUT,
    MODEL,
    claim_for,
    claim_of,
    comes_true,
    final_of,
)

TOKENS = 10
CARD = pb.ModelCard(model="tiny", context_tokens=MODEL.context_tokens, fingerprint="f")


class Memory:
    """The part of a transport that landing memory needs."""

    def register(self, regions: Sequence[Any]) -> None: ...

    def unregister(self, regions: Sequence[Any]) -> None: ...


@dataclass
class ScriptedEngine:
    """Decodes what `script` says; a step may be an error, or wait for something."""

    script: Callable[[Callable[[], bool]], Iterator[Step]]
    ready: Callable[[], None] = lambda: None  # called before conversion
    asked: list[DecodeParams] = field(default_factory=list)
    seen: list[torch.Tensor] = field(default_factory=list)  # keys of layer 0, as converted

    def describe(self) -> EngineDescription:
        raise AssertionError("nobody asks while serving")

    def kv_target(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.ready()
        shape = (LAYERS, BLOCK.kv_heads, tokens, BLOCK.head_dim)
        self.cache = (torch.zeros(shape), torch.zeros(shape))
        return self.cache

    def decode(
        self, prompt_ids: Sequence[int], first_token: int, params: DecodeParams, cancelled: Callable[[], bool]
    ) -> Iterator[Step]:
        assert (list(prompt_ids), first_token) == (list(range(len(prompt_ids))), FIRST_TOKEN)
        self.asked.append(params)
        self.seen.append(self.cache[0][0].clone())
        yield from self.script(cancelled)


def counting(*sizes: int) -> Callable[[Callable[[], bool]], Iterator[Step]]:
    """Steps of these sizes with ids 0, 1, 2, ..."""

    def script(cancelled: Callable[[], bool]) -> Iterator[Step]:
        at = 0
        for index, size in enumerate(sizes):
            finish = FinishReason.LENGTH if index == len(sizes) - 1 else None
            yield Step(tuple(range(at, at + size)), finish)
            at += size

    return script


class Endless:
    """Steps of one token until it is cancelled, each released by the test or at once."""

    def __init__(self, *, paced: bool = False) -> None:
        self.pace = threading.Semaphore(0)
        self.paced = paced
        self.steps = 0
        self.stopped = threading.Event()

    def __call__(self, cancelled: Callable[[], bool]) -> Iterator[Step]:
        try:
            while not cancelled():
                if self.paced and not self.pace.acquire(timeout=0.01):
                    continue
                self.steps += 1
                yield Step((self.steps,))
                if not self.paced:
                    time.sleep(0.001)
        finally:
            self.stopped.set()


@dataclass
class Server:
    service: DecodeService
    slots: list[LandingSlot]
    metrics: DaemonMetrics
    stub: Any
    server: grpc.aio.Server
    freed: list[tuple[int, int]]
    epochs: int = 0

    def decode(self, slot: int = 0, *, epoch: int | None = None, **fields: Any) -> Any:
        self.epochs = self.epochs + 1 if epoch is None else epoch
        return self.stub.Decode(
            pb.DecodeRequest(
                handoff_id=f"h{self.epochs}",
                slot=slot,
                epoch=self.epochs,
                claim=to_bytes(claim_for(f"h{self.epochs}", slot, self.epochs)),
                **{"max_tokens": 50} | fields,
            )
        )

    def land(self, slot: int = 0, *, finished: bool = False, tokens: int = TOKENS) -> torch.Tensor:
        """Land a prompt for the newest request; returns what lies in the slot."""
        here, name = self.slots[slot], f"h{self.epochs}"
        length = LAYOUT.bytes_for(tokens)
        memory = here.memory.view(length).view(torch.float32)
        memory.copy_(torch.randn(memory.shape, generator=torch.Generator().manual_seed(self.epochs)))
        here.begin(Writer(b"w", 0, 1, LAYOUT, tokens, engine="engine"), name, self.epochs, 1.0)
        here.sent(b"w", Sent(name, self.epochs, tokens, LAYOUT.blocks_for(tokens), length), 1.5)
        here.final(final_of(claim_of(name, self.epochs), tokens, finished=finished), 1.5)
        return memory

    async def landed(self, slot: int = 0, **fields: Any) -> Any:
        """A call whose KV has landed and whose first two events have been read."""
        call = self.decode(slot, **fields)
        assert (await event(call)).HasField("reserved")
        self.land(slot)
        assert (await event(call)).HasField("landed")
        return call

    def ended(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("anchorleg_decode_requests_total", {"outcome": outcome}) or 0.0

    async def all_free(self, within_s: float = 1.0) -> None:
        await comes_true(lambda: all(slot.state is SlotState.FREE for slot in self.slots), within_s=within_s)


async def event(call: Any) -> pb.DecodeEvent:
    async with asyncio.timeout(5):
        answer = await call.read()
    assert isinstance(answer, pb.DecodeEvent), "the stream ended"
    return answer


async def rest(call: Any) -> list[pb.DecodeEvent]:
    events: list[pb.DecodeEvent] = []
    async with asyncio.timeout(5):
        while (one := await call.read()) is not grpc.aio.EOF:
            events.append(one)
    return events


Serve = Callable[..., Any]


@asynccontextmanager
async def serving() -> AsyncIterator[Serve]:
    """Start a server for an engine's script; stopped at the end of the test."""
    running: list[tuple[Server, EngineRunner, Any]] = []

    async def start(engine: ScriptedEngine, **limits: Any) -> Server:
        metrics = DaemonMetrics()
        memory: Any = Memory()
        slots = [LandingSlot(index, LandingMemory(memory, LANDING_BYTES), lambda *_: None) for index in (0, 1)]
        metrics.watch(slots)
        runner = EngineRunner(engine, Timings(metrics.convert_seconds.observe, lambda s, _: metrics.step_seconds.observe(s)))
        freed: list[tuple[int, int]] = []

        async def free(slot: LandingSlot, epoch: int) -> None:
            freed.append((slot.index, epoch))

        service = DecodeService(
            card=CARD,
            keys=KEYS,
            slots=slots,
            runner=runner,
            metrics=metrics,
            freed=free,
            changed=lambda: None,
            **{"landing_timeout": 5.0, "writer_grace": 0.1, "reader_grace": 5.0} | limits,
        )
        server = grpc.aio.server()
        add_DecoderServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        here = Server(service, slots, metrics, DecoderStub(channel), server, freed)
        running.append((here, runner, channel))
        return here

    yield start
    for here, runner, channel in running:
        await channel.close()
        await here.server.stop(None)
        await asyncio.wait_for(here.service.settle(), 5)
        runner.close()
