"""The handoff against the transport's raw write: the same bytes in the same pieces, in turns, from one process to another.

The prefill side is here: caches of SmolLM2's shape, the connector's own sender, and a second end of the transport that does
nothing but write. A handoff is timed from the write command to the daemon's word that all of it has landed.
"""

import asyncio
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import Random

import torch

from benchmarks.handoff_landing import Landing, Plan, landing
from benchmarks.report import Measure
from decode_daemon.receiver import Expectation
from handoff.claim import SignedClaim
from handoff.layout import KVLayout, contiguous_block, uniform
from handoff.messages import PROTOCOL_VERSION, Final, Hello, ModelIdentity
from handoff.transport import Peer, Piece, Progress, Region, Transport
from handoff.transports import TransportName, open_transport
from process.errors import ProcessError

PROMPTS = (128, 1024, 4096)
"""Prompt tokens."""

LAYERS = 30  # SmolLM2-135M: with bfloat16, 98,304 bytes a block and layer
_BLOCK = contiguous_block(kv_heads=3, head_dim=64, block_tokens=128, dtype="bfloat16", order=("head", "kind", "token", "dim"))
LAYOUT: KVLayout = uniform([f"layer.{index}" for index in range(LAYERS)], _BLOCK)
_CACHE_BLOCKS = 48  # of vLLM's cache, a prompt's blocks scattered among them
_SECRET = b"a secret of the benchmark's own"
_FORWARD_S = 0.01  # stands for the forward between a request's opening and its first blocks
_LIMIT_S = 10.0
_POLL_S = 5e-5  # between two looks at a raw write: without a pause they take a core from the transport's own threads
_WARM_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """One round at one size, in seconds."""

    handoff: float
    raw: float


async def measure(
    transports: Sequence[TransportName], *, rounds: int, prompts: Sequence[int] = PROMPTS, seed: int = 1
) -> list[Measure]:
    """Take the measures of each transport; raises ProcessError or TransportError when one does not work here."""
    pairs: dict[TransportName, dict[int, list[Pair]]] = {}
    for transport in transports:
        async with wire(transport, max(prompts)) as ends:
            blocks = {tokens: _scattered(tokens, Random(seed)) for tokens in prompts}
            for _ in range(_WARM_ROUNDS):
                for tokens in prompts:
                    await ends.pair(tokens, blocks[tokens])
            pairs[transport] = {tokens: [] for tokens in prompts}
            for _ in range(rounds):
                for tokens in prompts:
                    pairs[transport][tokens].append(await ends.pair(tokens, blocks[tokens]))
    return told(pairs)


def told(pairs: Mapping[TransportName, Mapping[int, Sequence[Pair]]]) -> list[Measure]:
    """Return what the rounds say, and for the longest prompt the share of the slowest transport."""
    measures = []
    shares: dict[TransportName, float] = {}
    for transport, sizes in pairs.items():
        for tokens, rounds in sizes.items():
            size = LAYOUT.bytes_for(tokens)
            handoff, raw = (statistics.median(times) for times in ([p.handoff for p in rounds], [p.raw for p in rounds]))
            share = statistics.median(100 * pair.raw / pair.handoff for pair in rounds)
            how = (
                f"{size / 1e6:.1f} MB in {handoff * 1e3:.2f} ms; the raw write {size / raw / 1e9:.2f} GB/s, {raw * 1e3:.2f} ms"
            )
            measures.append(Measure(f"{transport}_{tokens}_gb_per_second", size / handoff / 1e9, "GB/s", how))
            measures.append(Measure(f"{transport}_{tokens}_of_raw", share, "%", "of the raw write in the same round"))
            shares[transport] = share  # the longest prompt comes last
    slowest = min(shares, key=lambda transport: shares[transport])
    how = f"{slowest}, at {max(max(sizes) for sizes in pairs.values())} tokens"
    measures.append(Measure("bytes_of_raw", shares[slowest], "%", how))
    return measures


class Wire:
    """Both ends. Made by `wire`."""

    def __init__(self, far: Landing, raw: "RawWriter", lane: "Lane") -> None:
        self._far = far
        self._raw = raw
        self._lane = lane

    async def pair(self, tokens: int, blocks: Sequence[int]) -> Pair:
        """Time a raw write of a prompt's blocks, then their handoff."""
        return Pair(raw=self.raw(blocks), handoff=await self.handoff(tokens, blocks))

    def raw(self, blocks: Sequence[int]) -> float:
        """Time a raw write: nothing else is done until its bytes are there."""
        with self._far.attended():
            return self._raw.write(blocks)

    async def handoff(self, tokens: int, blocks: Sequence[int]) -> float:
        """Time one handoff."""
        claim = await self._far.reserve(0)
        request = self._lane.open(claim, tokens)
        await asyncio.sleep(_FORWARD_S)
        began = time.monotonic_ns()
        self._lane.write(request, claim, tokens, blocks)
        landed = await self._far.landed(0)
        await asyncio.to_thread(self._lane.settle, request)
        return (landed - began) / 1e9


def expectation(context: int, model: ModelIdentity | None = None) -> Expectation:
    """Return what a daemon of SmolLM2's shape takes; without a model, one of the benchmark's own."""
    model = model or ModelIdentity("bench", "0" * 16, context)
    return Expectation(model, LAYERS, _BLOCK.kv_heads, _BLOCK.head_dim, _BLOCK.dtype, _BLOCK.block_tokens)


@asynccontextmanager
async def wire(transport: TransportName, longest: int) -> AsyncIterator[Wire]:
    """Start both ends for prompts of up to `longest` tokens."""
    expected = expectation(longest)
    plan = Plan(transport, _SECRET, expected, slots=1, slot_bytes=LAYOUT.bytes_for(longest))
    caches = _caches()
    async with landing(plan) as far:
        with raw_writer(far, caches) as raw, _lane(transport, expected.model, caches) as lane:
            yield Wire(far, raw, lane)


class RawWriter:
    """A second end of the transport, which writes a prompt's blocks and waits for them. Made by `raw_writer`."""

    def __init__(self, transport: Transport, peer: Peer, remote: int, regions: Sequence[Region]) -> None:
        self._transport = transport
        self._peer = peer
        self._remote = remote
        self._regions = regions

    def write(self, blocks: Sequence[int]) -> float:
        """Return the seconds until these blocks of every layer are there; raises TransportError or ProcessError."""
        pieces = [
            Piece(region.address + block * _BLOCK.block_bytes, self._remote + place * _BLOCK.block_bytes, _BLOCK.block_bytes)
            for place, (region, block) in enumerate((region, block) for region in self._regions for block in blocks)
        ]
        began = time.monotonic_ns()
        transfer = self._transport.write(self._peer, pieces, self._regions[0])
        try:
            while transfer.poll() is not Progress.DONE:
                time.sleep(_POLL_S)
                if time.monotonic_ns() - began > _LIMIT_S * 1e9:
                    raise ProcessError(
                        f"a raw write of {len(pieces)} pieces took over {_LIMIT_S:g} s: is the machine swapping?"
                    )
            return (time.monotonic_ns() - began) / 1e9
        finally:
            transfer.close()


@contextmanager
def raw_writer(far: Landing, caches: Sequence[torch.Tensor] | None = None) -> Iterator[RawWriter]:
    """Connect a writer of blocks of SmolLM2's shape to the memory that a landing process has for that."""
    caches = _caches() if caches is None else caches
    regions = _regions(caches)
    transport = open_transport(far.plan.transport, "bench-raw")
    with ExitStack() as stack:
        stack.callback(transport.close)
        transport.register(regions)
        yield RawWriter(transport, transport.connect(far.listening.agent), far.listening.raw_address, regions)


class Lane:
    """The connector's two voices: the worker side's sender and the scheduler side's announcer. Made by `_lane`."""

    def __init__(self, transport: TransportName, identity: ModelIdentity, caches: Sequence[torch.Tensor]) -> None:
        from connector.announcer import Announcer  # vLLM comes with it, which takes ten seconds
        from connector.sender import CacheMemory, Counters, Sender, SenderLimits

        engine = uuid.uuid4().hex
        self._failures: list[str] = []
        self._announcer = Announcer()
        self._sender = Sender(
            transport=open_transport(transport, "bench-prefill"),
            memory=CacheMemory(tuple(_regions(caches)), (_BLOCK.block_bytes,) * LAYERS),
            hello=Hello(PROTOCOL_VERSION, engine, 0, 1, identity, LAYOUT, transport),
            identity=engine.encode(),
            limits=SenderLimits(_LIMIT_S, _LIMIT_S),
            counters=Counters(lambda size, seconds: None, self._failures.append),
        )

    def open(self, claim: SignedClaim, tokens: int) -> str:
        """What both sides do when vLLM first schedules a request; returns its id."""
        request = f"bench-{claim.claim.handoff_id}"
        self._announcer.connect(claim.claim)
        self._sender.open(request, claim, tokens)
        return request

    def write(self, request: str, claim: SignedClaim, tokens: int, blocks: Sequence[int]) -> None:
        """What both sides do when the prompt's forward has run."""
        self._sender.write(request, 0, tuple(blocks), last=True, ready=lambda: True)
        self._announcer.send(claim.claim, Final(claim, bytes(4 * tokens), first_token=1, finished=False))

    def settle(self, request: str) -> None:
        """Wait until the sender is done with a request; raises ProcessError when it failed."""
        if not self._sender.wait_settled({request}, _LIMIT_S) or self._failures:
            raise ProcessError(
                f"the sender did not finish a handoff ({', '.join(self._failures) or 'in time'}): see its warnings"
            )
        self._sender.forget({request})

    def close(self) -> None:
        """Stop both."""
        self._sender.close()
        self._announcer.close()


@contextmanager
def _lane(transport: TransportName, identity: ModelIdentity, caches: Sequence[torch.Tensor]) -> Iterator[Lane]:
    lane = Lane(transport, identity, caches)
    try:
        yield lane
    finally:
        lane.close()


def _caches() -> list[torch.Tensor]:
    # Written to, since pages that nobody wrote are one page of zeros, which reads faster than a cache does.
    return [torch.full((_CACHE_BLOCKS, _BLOCK.block_bytes), index, dtype=torch.uint8) for index in range(LAYERS)]


def _regions(caches: Sequence[torch.Tensor]) -> list[Region]:
    return [Region(cache.data_ptr(), cache.numel()) for cache in caches]


def _scattered(tokens: int, random: Random) -> list[int]:
    """Return the block table of a prompt in a cache that has been in use: in no order."""
    return random.sample(range(_CACHE_BLOCKS), LAYOUT.blocks_for(tokens))
