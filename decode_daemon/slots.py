"""Landing slots: who may write into one, when what landed is whole, and when its memory may be used again.

One asyncio task at a time touches a slot (the daemon's loop), so nothing here locks. The epoch is the fencing token: a lease's
writers and its decode stream name it, and anything but the epoch held now is refused.
"""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from decode_daemon.memory import LandingMemory
from handoff.layout import KVLayout
from handoff.messages import Cancel, Final, Sent, ToConnector
from leases.records import MAX_EPOCH


class SlotRefused(Exception):  # noqa: N818 - a refusal, not a fault
    """This slot is not for this caller: `code` is stable, the message says which epoch is held."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class HandoffFailed(Exception):  # noqa: N818 - as above
    """The KV cache will not arrive."""


class SlotState(StrEnum):
    """A slot's life, as shown in metrics."""

    FREE = "free"
    LANDING = "landing"
    LANDED = "landed"
    DECODING = "decoding"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Landed:
    """A whole KV cache in a slot's memory."""

    layout: KVLayout
    prompt: tuple[int, ...]
    first_token: int
    finished: bool  # the first token ends the answer
    bytes: int
    seconds: float  # from the first accepted writer to the last rank's Sent


@dataclass(slots=True)
class Writer:
    """One connector rank that may write."""

    identity: bytes
    rank: int
    ranks: int
    layout: KVLayout
    tokens: int
    sent: Sent | None = None
    active: bool = True  # writes may be in flight


@dataclass(slots=True)
class Occupancy:
    """One lease's use of a slot."""

    handoff_id: str
    epoch: int
    landed: "asyncio.Future[Landed]"
    writers: dict[int, Writer] = field(default_factory=dict)  # by rank
    final: Final | None = None
    started: float | None = None
    decoding: bool = False
    owed: int = 0  # output tokens that the engine may still have to make for it


Send = Callable[[bytes, ToConnector], None]
"""Send a control message to a connector, by its identity."""


class LandingSlot:
    """One landing buffer and the lease that holds it."""

    def __init__(self, index: int, memory: LandingMemory, send: Send) -> None:
        self.index = index
        self.memory = memory
        self._send = send
        self._held: Occupancy | None = None
        self._floor = 0
        self._draining: Occupancy | None = None
        self._drained = asyncio.Event()
        self._drained.set()

    @property
    def floor(self) -> int:
        """Highest epoch seen or retired: no lower or equal one is ever accepted again."""
        return self._floor

    @property
    def epoch_in_use(self) -> int | None:
        """The epoch that holds the slot, or whose writers are not gone yet."""
        holder = self._held or self._draining
        return holder.epoch if holder else None

    @property
    def owed(self) -> int:
        """Output tokens, at the most, that the engine still has to make for the lease that holds the slot."""
        return self._held.owed if self._held else 0

    @property
    def written_to(self) -> bool:
        """Whether some writer's bytes may be on their way. Read from another thread too: a stale answer does no harm."""
        holder = self._held or self._draining
        return holder is not None and any(writer.active for writer in list(holder.writers.values()))

    @property
    def state(self) -> SlotState:
        """Where the slot stands."""
        if self._held is None:
            return SlotState.FREE if self._draining is None else SlotState.DRAINING
        if self._held.decoding:
            return SlotState.DECODING
        return SlotState.LANDED if self._held.landed.done() else SlotState.LANDING

    def holds(self, handoff_id: str) -> bool:
        """Whether the slot is held for, or still drained of, this handoff."""
        holder = self._held or self._draining
        return holder is not None and holder.handoff_id == handoff_id

    def raise_floor(self, epoch: int) -> None:
        """The lease table has given out or taken back epochs up to this one."""
        held = self.epoch_in_use
        if held is None or epoch < held:
            self._floor = max(self._floor, epoch)

    def reserve(self, handoff_id: str, epoch: int) -> Occupancy:
        """Hold the slot for a lease; raises SlotRefused."""
        if self._held is not None:
            raise SlotRefused("slot_busy", f"slot {self.index} is held by epoch {self._held.epoch}")
        if self._draining is not None:
            raise SlotRefused("slot_busy", f"writers of epoch {self._draining.epoch} still hold slot {self.index}")
        if epoch > MAX_EPOCH:
            raise SlotRefused("bad_claim", f"epoch {epoch} is above {MAX_EPOCH}")
        if epoch <= self._floor:
            raise SlotRefused("stale_epoch", f"epoch {epoch} of slot {self.index} is over: {self._floor} has been seen")
        self._floor = epoch  # while in use, `epoch_in_use` says so; afterwards the lease is over for good
        self._held = Occupancy(handoff_id, epoch, asyncio.get_running_loop().create_future())
        return self._held

    def begin(self, writer: Writer, handoff_id: str, epoch: int, now: float) -> tuple[int, int]:
        """Let a rank write; returns (address, length) of its landing region. Raises SlotRefused."""
        held = self._expect(handoff_id, epoch)
        if writer.rank in held.writers:
            raise SlotRefused("replayed", f"rank {writer.rank} has already begun handoff {handoff_id}")
        if writer.tokens < 1:
            raise SlotRefused("no_tokens", f"handoff {handoff_id} is of {writer.tokens} tokens")
        length = writer.layout.bytes_for(writer.tokens)
        if length > self.memory.length:
            raise SlotRefused(
                "too_long", f"{writer.tokens} tokens need {length} bytes; slot {self.index} has {self.memory.length}"
            )
        held.writers[writer.rank] = writer
        held.started = held.started or now
        return self.memory.address, length

    def sent(self, identity: bytes, message: Sent, now: float) -> None:
        """One rank's writes are done; raises SlotRefused for what no accepted writer of this epoch can say."""
        self.stopped(identity, message.handoff_id, message.epoch)  # it may have crossed a Cancel
        held = self._expect(message.handoff_id, message.epoch)
        writer = _writer(held, identity)
        due = Sent(
            message.handoff_id,
            message.epoch,
            writer.tokens,
            writer.layout.blocks_for(writer.tokens),
            writer.layout.bytes_for(writer.tokens),
        )
        if message != due:
            self._fail(held, f"{_amount(message)} arrived, {_amount(due)} were due")
            return
        writer.sent = message
        self._complete(held, now)

    def final(self, message: Final, now: float) -> None:
        """Prefill is over; raises SlotRefused for another handoff's."""
        held = self._expect(message.claim.claim.handoff_id, message.claim.claim.epoch)
        if held.final is None:
            held.final = message
            self._complete(held, now)

    def abort(self, identity: bytes, handoff_id: str, epoch: int, reason: str, *, writing: bool) -> None:
        """A sender gives up; unless it is `writing`, none of its writes is in flight."""
        holder = self._held or self._draining
        if holder is None or (holder.handoff_id, holder.epoch) != (handoff_id, epoch):
            return
        if not writing:
            self._mark_stopped(holder, identity)
        if holder is self._held:
            self._fail(holder, f"the connector gave up: {reason}")

    def stopped(self, identity: bytes, handoff_id: str, epoch: int) -> None:
        """A writer's answer to Cancel."""
        holder = self._held or self._draining
        if holder is not None and (holder.handoff_id, holder.epoch) == (handoff_id, epoch):
            self._mark_stopped(holder, identity)

    async def release(self, occupancy: Occupancy, reason: str, grace: float) -> None:
        """End a lease's use: tell its writers, wait until they are gone, make the memory safe. Idempotent."""
        if self._held is not occupancy:
            return
        self._held, self._draining = None, occupancy
        self._drained.clear()
        if not occupancy.landed.done():
            occupancy.landed.cancel()
        elif not occupancy.landed.cancelled():
            occupancy.landed.exception()  # retrieved, so that a failure nobody waited for is no warning
        for writer in occupancy.writers.values():
            if writer.active:
                self._send(writer.identity, Cancel(occupancy.handoff_id, occupancy.epoch, reason))
        self._check_drained()
        try:
            await asyncio.wait_for(self._drained.wait(), grace)
        except TimeoutError:
            pass
        finally:
            if not self._drained.is_set():
                # Nobody says whether bytes are still on their way: they shall find no memory that is in use.
                self.memory.renew()
            self._draining = None
            self._drained.set()

    def _expect(self, handoff_id: str, epoch: int) -> Occupancy:
        held = self._held
        if held is None or held.epoch != epoch:
            holder = f"held by epoch {held.epoch}" if held else "free"
            raise SlotRefused("stale_epoch", f"epoch {epoch} is not the one of slot {self.index}, which is {holder}")
        if held.handoff_id != handoff_id:
            raise SlotRefused("other_handoff", f"slot {self.index} waits for handoff {held.handoff_id}")
        return held

    def _complete(self, held: Occupancy, now: float) -> None:
        if held.final is None or held.landed.done() or not held.writers:
            return
        ranks = next(iter(held.writers.values())).ranks
        sent = [writer.sent for writer in held.writers.values() if writer.sent is not None]
        if len(sent) < ranks:
            return
        if len(held.final.prompt) != 4 * sent[0].tokens:
            self._fail(held, f"KV of {sent[0].tokens} tokens arrived for a prompt of {len(held.final.prompt) / 4:g}")
            return
        if not 0 <= held.final.first_token < 1 << 32:
            self._fail(held, f"the first token is {held.final.first_token}")
            return
        prompt = struct.unpack(f"<{sent[0].tokens}I", held.final.prompt)
        held.landed.set_result(
            Landed(
                layout=held.writers[0].layout,
                prompt=prompt,
                first_token=held.final.first_token,
                finished=held.final.finished,
                bytes=sum(message.bytes for message in sent),
                seconds=now - (held.started or now),
            )
        )

    def _fail(self, held: Occupancy, reason: str) -> None:
        if not held.landed.done():
            held.landed.set_exception(HandoffFailed(reason))

    def _mark_stopped(self, holder: Occupancy, identity: bytes) -> None:
        for writer in holder.writers.values():
            if writer.identity == identity:
                writer.active = False
        self._check_drained()

    def _check_drained(self) -> None:
        if self._draining is not None and not any(writer.active for writer in self._draining.writers.values()):
            self._drained.set()


def _amount(sent: Sent) -> str:
    return f"{sent.tokens} tokens in {sent.blocks} blocks of {sent.bytes} bytes in all"


def _writer(held: Occupancy, identity: bytes) -> Writer:
    for writer in held.writers.values():
        if writer.identity == identity:
            return writer
    raise SlotRefused("unknown_writer", f"no accepted writer of handoff {held.handoff_id} says this")
