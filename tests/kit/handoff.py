"""Both ends of a handoff in one process: small layouts, claims, a paged cache, a sender, and slots that receive."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import torch

from decode_daemon.memory import LandingMemory
from decode_daemon.receiver import Expectation, Receiver
from decode_daemon.slots import Landed, LandingSlot, Occupancy
from handoff.claim import Claim, ClaimKeys, SignedClaim, new_handoff_id
from handoff.layout import AXES, GqaBlock, KindLayout, KVLayout, contiguous_block, uniform
from handoff.messages import (
    PROTOCOL_VERSION,
    Final,
    Hello,
    ModelIdentity,
)
from handoff.transport import Piece, Progress, Region, Transport
from handoff.transports import TransportName, open_transport

if TYPE_CHECKING:
    from connector.sender import Sender

KEYS = ClaimKeys([b"the key that tests share"])
MODEL = ModelIdentity("tiny", "0123456789abcdef", 64)
LAYERS = 3
BLOCK_TOKENS = 4
BLOCK = contiguous_block(
    kv_heads=2, head_dim=8, block_tokens=BLOCK_TOKENS, dtype="float32", order=("kind", "token", "head", "dim")
)
LAYOUT = uniform([f"layer.{index}" for index in range(LAYERS)], BLOCK)
EXPECTATION = Expectation(MODEL, LAYERS, BLOCK.kv_heads, BLOCK.head_dim, BLOCK.dtype, block_tokens=256)
LANDING_BYTES = LAYOUT.bytes_for(MODEL.context_tokens)
FIRST_TOKEN = 77
BLOCKS = [9, 10, 11, 4, 30, 2]  # of the paged cache; the first three are one run
TOKENS = 22  # five blocks and a half

_epochs = count(1)
_requests = count(1)


def signed(
    *, host: str = "127.0.0.1", port: int = 1, slot: int = 0, epoch: int | None = None, life_s: int = 60, keys: ClaimKeys = KEYS
) -> SignedClaim:
    """A claim with a new handoff id and, unless given, a new epoch."""
    number = next(_epochs) if epoch is None else epoch
    return keys.sign(Claim(new_handoff_id(), host, port, slot, number, int(time.time()) + life_s))


def claim_for(handoff_id: str, slot: int, epoch: int) -> SignedClaim:
    """A claim for any slot."""
    return KEYS.sign(Claim(handoff_id, "127.0.0.1", 1, slot, epoch, int(time.time()) + 60))


def claim_of(handoff_id: str, epoch: int) -> SignedClaim:
    """A claim on slot 0 for this handoff."""
    return KEYS.sign(Claim(handoff_id, "127.0.0.1", 1, 0, epoch, int(time.time()) + 60))


def final_of(claim: SignedClaim, tokens: int, *, first_token: int = FIRST_TOKEN, finished: bool = False) -> Final:
    """What the scheduler side says of a prompt of ids 0, 1, 2, ..."""
    prompt = b"".join(token.to_bytes(4, "little") for token in range(tokens))
    return Final(claim, prompt, first_token, finished)


def until(look: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Return once `look` is true; fails when it is not in time."""
    deadline = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.001)


async def comes_true(look: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """As `until`, on the event loop."""
    async with asyncio.timeout(within_s):
        while not look():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.001)


def region(buffer: torch.Tensor) -> Region:
    return Region(buffer.data_ptr(), buffer.numel() * buffer.element_size())


def piece(source: torch.Tensor, target: int, *, offset: int = 0, length: int | None = None) -> Piece:
    """From `offset` bytes into `source` to the address `target`."""
    return Piece(source.data_ptr() + offset, target, source.numel() if length is None else length)


def written(transport: Transport, peer: object, pieces: list[Piece], source: torch.Tensor) -> None:
    """Write, and wait until it is done; raises what the transport raises."""
    transfer = transport.write(peer, pieces, region(source))  # type: ignore[arg-type]
    try:
        until(lambda: transfer.poll() is Progress.DONE)
    finally:
        transfer.close()


def place(kind: KindLayout, head: int, token: int, dim: int) -> int:
    """Where one element lies in its block, by the definition of digits and in no other way."""
    at = kind.offset
    for name, value in zip(AXES, (head, token, dim), strict=True):
        for digit in reversed(kind.axis(name)):
            value, rest = divmod(value, digit.size)
            at += rest * digit.stride
    return at


def paged(block: GqaBlock, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[blocks, elements] as a backend with this layout would hold K and V of [heads, tokens, dim]; the rest is noise."""
    heads, tokens, dims = keys.shape
    blocks = -(-tokens // block.block_tokens)
    generator = torch.Generator().manual_seed(tokens)
    cache = torch.randn((blocks, block.elements), generator=generator).to(keys.dtype)
    for kind, source in ((block.keys, keys), (block.values, values)):
        for head in range(heads):
            for token in range(tokens):
                row, inside = divmod(token, block.block_tokens)
                for dim in range(dims):
                    cache[row, place(kind, head, inside, dim)] = source[head, token, dim]
    return cache


@dataclass
class Prefill:
    """One vLLM worker: a paged cache with random content, and the real sender."""

    sender: "Sender"
    caches: list[torch.Tensor]  # one a layer: [blocks, bytes of a block]
    sent: list[int]
    failed: list[str]

    def content(self, block_ids: list[int]) -> torch.Tensor:
        """What a landing region shall hold for these blocks."""
        return torch.cat([cache[block_ids].flatten() for cache in self.caches])

    def open(self, claim: SignedClaim, tokens: int) -> str:
        """Tell the sender of a new request; returns its id."""
        request_id = f"request-{next(_requests)}"
        self.sender.open(request_id, claim, tokens)
        return request_id

    def write(self, request_id: str, blocks: list[int], *, first: int = 0, last: bool = True) -> None:
        self.sender.write(request_id, first, tuple(blocks), last=last, ready=lambda: True)

    async def settled(self, *request_ids: str, within_s: float = 5.0) -> None:
        """Returns when nothing of these requests is or will be in flight."""
        ids = set(request_ids)
        await comes_true(lambda: self.sender.settled(ids) == ids, within_s=within_s)


def hello(**fields: object) -> Hello:
    """The introduction of a worker that fits the daemon, but for the given fields."""
    fitting = {
        "engine_id": "engine",
        "protocol": PROTOCOL_VERSION,
        "shard": 0,
        "shards": 1,
        "model": MODEL,
        "layout": LAYOUT,
        "transport": "nixl",
    }
    return Hello(**fitting | fields)  # type: ignore[arg-type]


@contextmanager
def prefill(
    *,
    accept: float = 3.0,
    write: float = 3.0,
    layout: KVLayout = LAYOUT,
    network: Transport | None = None,
    caches: list[torch.Tensor] | None = None,
    **fields: object,
) -> Iterator[Prefill]:
    """A worker whose Hello has the given fields instead of those the daemon expects."""
    from connector.sender import CacheMemory, Counters, Sender, SenderLimits  # vLLM comes with it: ten seconds

    generator = torch.Generator().manual_seed(3)
    if caches is None:
        caches = [
            torch.randint(0, 256, (64, layout.block_bytes(index)), dtype=torch.uint8, generator=generator)
            for index in range(len(layout.layers))
        ]
    sent: list[int] = []
    failed: list[str] = []
    sender = Sender(
        transport=network or open_transport("nixl", "prefill"),
        memory=CacheMemory(tuple(region(cache) for cache in caches), tuple(map(layout.block_bytes, range(len(layout.layers))))),
        hello=hello(**{"layout": layout} | fields),
        identity=uuid.uuid4().hex.encode(),
        limits=SenderLimits(accept, write),
        counters=Counters(lambda size, _: sent.append(size), failed.append),
    )
    try:
        yield Prefill(sender, caches, sent, failed)
    finally:
        sender.close()


@dataclass
class Landing:
    """One daemon without an engine: slots, memory, control socket, transport."""

    slots: list[LandingSlot]
    receiver: Receiver
    transport: Transport
    occupancies: list[Occupancy] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.receiver.port

    def claim(self, slot: int = 0, **options: object) -> tuple[SignedClaim, Occupancy]:
        """A claim for a slot that has been reserved for it."""
        claim = self.unreserved(slot, **options)
        held = self.slots[slot].reserve(claim.claim.handoff_id, claim.claim.epoch)
        self.occupancies.append(held)
        return claim, held

    def unreserved(self, slot: int = 0, **options: object) -> SignedClaim:
        """A claim for which no gateway has turned up."""
        return signed(port=self.port, slot=slot, **options)  # type: ignore[arg-type]

    def end_prefill(self, claim: SignedClaim, tokens: int = TOKENS) -> None:
        """The scheduler side's word, without its way over the socket."""
        self.slots[claim.claim.slot].final(final_of(claim, tokens), time.monotonic())

    def memory(self, slot: int, tokens: int) -> torch.Tensor:
        return self.slots[slot].memory.view(LAYOUT.bytes_for(tokens))


@asynccontextmanager
async def landing(
    *,
    slots: int = 2,
    port: int = 0,
    expectation: Expectation = EXPECTATION,
    keys: ClaimKeys = KEYS,
    network: TransportName = "nixl",
) -> AsyncIterator[Landing]:
    transport = open_transport(network, "landing")
    receiver = Receiver(
        daemon_id="daemon", host="127.0.0.1", port=port, keys=keys, expectation=expectation, transport=transport
    )
    try:
        own = [LandingSlot(index, LandingMemory(transport, LANDING_BYTES), receiver.send) for index in range(slots)]
        receiver.start(own)
        here = Landing(own, receiver, transport)
        yield here
        for held in here.occupancies:
            if held.landed.done() and not held.landed.cancelled():
                held.landed.exception()  # seen by the test, or of no interest to it
    finally:
        await receiver.aclose()
        transport.close()


def changed(layout: KVLayout, **fields: object) -> KVLayout:
    """The layout with other values in its first block."""
    first, *others = layout.blocks
    return KVLayout(layout.layers, (msgspec.structs.replace(first, **fields), *others))


async def whole(held: Occupancy, within_s: float = 5.0) -> Landed:
    """What has landed, once it is whole; raises HandoffFailed."""
    return await asyncio.wait_for(asyncio.shield(held.landed), within_s)


async def hand_over(worker: Prefill, daemon: Landing, blocks: list[int] = BLOCKS, slot: int = 0) -> None:
    """One whole handoff: everything lands byte for byte, and the slot is free again."""
    tokens = len(blocks) * BLOCK.block_tokens - 1
    claim, held = daemon.claim(slot)
    request = worker.open(claim, tokens)
    worker.write(request, blocks)
    daemon.end_prefill(claim, tokens)
    await whole(held)
    assert torch.equal(daemon.memory(slot, tokens), worker.content(blocks))
    await worker.settled(request)
    await daemon.slots[slot].release(held, "done", 1.0)
