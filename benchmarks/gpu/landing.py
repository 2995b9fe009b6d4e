"""The decode leg's end of a handoff, without gateway and leases: one slot on the engine's device, its socket and transport."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

from decode_daemon.expectation import Expectation
from decode_daemon.memory import LandingMemory, landing_place
from decode_daemon.receiver import Receiver
from decode_daemon.slots import Landed, LandingSlot, Occupancy
from handoff.claim import Claim, ClaimKeys, SignedClaim, new_handoff_id
from handoff.transports import open_transport

SECRET = "a secret of the proof's own"
LARGEST_BLOCK = 256  # tokens
_CLAIM_LIFE_S = 600
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A KV cache that is there, and since when: `at_ns` of time.monotonic_ns, which all processes of a machine share."""

    landed: Landed
    memory: torch.Tensor  # uint8, where it landed
    at_ns: int


class Landing:
    """Made by `landing`."""

    def __init__(self, slot: LandingSlot, receiver: Receiver, raw: LandingMemory, agent: bytes) -> None:
        self.raw = raw  # for bare writes, as much as the slot has
        self.agent = agent  # what a transport needs to connect
        self.attend = False  # to bare writes, of which no slot knows
        self.slot = slot
        self._port = receiver.port
        self._keys = ClaimKeys([SECRET.encode()])
        self._epochs = itertools.count(1)

    def reserve(self) -> tuple[Occupancy, SignedClaim]:
        """Hold the slot as a gateway's stream does; return the claim on it too, signed as a gateway signs."""
        epoch, expires = next(self._epochs), int(time.time()) + _CLAIM_LIFE_S
        claim = Claim(new_handoff_id(), "127.0.0.1", self._port, 0, epoch, expires)
        return self.slot.reserve(claim.handoff_id, epoch), self._keys.sign(claim)

    async def arrived(self, held: Occupancy, within_s: float) -> Arrival:
        """Wait until it is whole; raises HandoffFailed, or TimeoutError."""
        at_ns: list[int] = []
        held.landed.add_done_callback(lambda _: at_ns.append(time.monotonic_ns()))
        async with asyncio.timeout(within_s):
            landed = await asyncio.shield(held.landed)
        return Arrival(landed, self.slot.memory.view(landed.bytes), at_ns[0])

    async def release(self, held: Occupancy) -> None:
        """Make the slot free for the next."""
        await self.slot.release(held, "done", _GRACE_S)


@asynccontextmanager
async def landing(expectation: Expectation, slot_bytes: int, engine: torch.device) -> AsyncIterator[Landing]:
    """Listen, with a slot of `slot_bytes` for an engine on the device `engine`."""
    ends: list[Landing] = []
    place = landing_place(engine, "nixl")
    async with AsyncExitStack() as stack:
        transport = open_transport("nixl", "decode", attend=lambda: any(end.attend or end.slot.written_to for end in ends))
        stack.callback(transport.close)
        receiver = Receiver(
            daemon_id="proof",
            host="127.0.0.1",
            port=0,
            keys=ClaimKeys([SECRET.encode()]),
            expectation=expectation,
            transport=transport,
        )
        stack.push_async_callback(receiver.aclose)
        memory, raw = (LandingMemory(transport, slot_bytes, place) for _ in range(2))
        slot = LandingSlot(0, memory, receiver.send)
        receiver.start([slot])
        ends.append(Landing(slot, receiver, raw, transport.metadata()))
        yield ends[0]
