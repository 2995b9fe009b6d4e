"""Landing slots: who may write into one, and when its memory may be used again.

One asyncio task at a time touches a slot (the daemon's loop), so nothing here locks. The epoch is the fencing token: a lease's
writers and its decode stream name it, and anything but the epoch held now is refused.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

import structlog

from decode_daemon.memory import LandingMemory
from decode_daemon.occupancy import HandoffFailed, Landed, Occupancy, SlotRefused, Writer
from handoff.messages import Cancel, Final, Sent, ToConnector
from leases.records import MAX_EPOCH

__all__ = ["HandoffFailed", "Landed", "LandingSlot", "Occupancy", "Send", "SlotRefused", "SlotState", "Writer"]

log = structlog.get_logger(__name__)

_RENEW_AGAIN_S = 5.0  # after memory could not be replaced: rare enough for the log, soon enough for the slot


class SlotState(StrEnum):
    """A slot's life, as shown in metrics."""

    FREE = "free"
    LANDING = "landing"
    LANDED = "landed"
    DECODING = "decoding"
    DRAINING = "draining"


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
        self._renewal: asyncio.Task[None] | None = None
        self._retired = asyncio.Event()

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
    def awaited(self) -> Occupancy | None:
        """The handoff that writers have begun and that is neither whole nor failed."""
        held = self._held
        return held if held is not None and held.writers and not held.landed.done() else None

    @property
    def watched(self) -> Occupancy | None:
        """The handoff some of whose writers have yet to say something: that all is written, or that they have stopped."""
        return self._draining or self.awaited

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

    def region_of(self, writer: Writer, handoff_id: str, epoch: int) -> tuple[int, int] | None:
        """Return what `begin` has returned to this rank, None where it has not begun by this link; raises SlotRefused."""
        known = self._expect(handoff_id, epoch).repeated(writer)
        return None if known is None else (self.memory.address + known.shard * known.length, known.length)

    def expects(self, writer: Writer, handoff_id: str, epoch: int) -> None:
        """Raise SlotRefused unless this rank's shard is one that the handoff still waits for."""
        self._expect(handoff_id, epoch).expects(writer)

    def begin(self, writer: Writer, handoff_id: str, epoch: int, now: float) -> tuple[int, int]:
        """Let a rank write; returns (address, length) of its shard's part of the memory. Raises SlotRefused."""
        offset = self._expect(handoff_id, epoch).admit(writer, self.memory.length, now)
        return self.memory.address + offset, writer.length

    def sent(self, identity: bytes, message: Sent, now: float) -> None:
        """One shard's writes are done; raises SlotRefused for what no accepted writer of this epoch can say."""
        self.stopped(identity, message.handoff_id, message.epoch)  # it may have crossed a Cancel
        self._expect(message.handoff_id, message.epoch).arrived(identity, message, now)

    def final(self, message: Final, now: float) -> None:
        """Prefill is over; raises SlotRefused for another handoff's."""
        self._expect(message.claim.claim.handoff_id, message.claim.claim.epoch).ended(message, now)

    def abort(self, identity: bytes, handoff_id: str, epoch: int, reason: str, *, writing: bool) -> None:
        """A sender gives up; unless it is `writing`, none of its writes is in flight."""
        if not writing:
            self.stopped(identity, handoff_id, epoch)
        self.fail(handoff_id, epoch, f"the connector gave up: {reason}")

    def fail(self, handoff_id: str, epoch: int, reason: str) -> None:
        """The handoff, if it is the one that holds the slot, will not arrive."""
        held = self._held
        if held is not None and (held.handoff_id, held.epoch) == (handoff_id, epoch):
            held.fail(reason)

    def stopped(self, identity: bytes, handoff_id: str, epoch: int) -> None:
        """A writer's answer to Cancel."""
        holder = self._held or self._draining
        if holder is not None and (holder.handoff_id, holder.epoch) == (handoff_id, epoch):
            holder.stopped(identity)
            self._check_drained()

    def lost(self, identity: bytes) -> None:
        """The connection to a connector is gone."""
        holder = self._held or self._draining
        if holder is not None:
            holder.lose(identity)
            self._check_drained()

    async def release(self, occupancy: Occupancy, reason: str, grace: float) -> None:
        """End a lease's use: tell its writers, wait until they are gone, make the memory safe. Idempotent.

        Cancelled, it no longer waits for the writers; what then has to be done to the memory is done all the same.
        """
        if self._held is not occupancy:
            return
        self._held, self._draining = None, occupancy
        occupancy.cancelled = reason
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
            if any(writer.active for writer in occupancy.writers.values()):
                # Nobody says whether bytes are still on their way: they shall find no memory that is in use.
                self._renewal = asyncio.create_task(self._renew())
                await asyncio.shield(self._renewal)
            else:
                self._free()

    def retire(self) -> None:
        """No lease comes any more: memory that cannot be replaced is not waited for."""
        self._retired.set()

    async def _renew(self) -> None:
        """Replace the memory, in a thread: zeroing and registering gigabytes takes seconds. Until then the slot is draining."""
        while True:
            try:
                await asyncio.to_thread(self.memory.renew)
            except Exception:
                log.exception("no new landing memory: the slot is of no use until there is", slot=self.index)
            else:
                self._free()
                return
            try:
                async with asyncio.timeout(_RENEW_AGAIN_S):
                    await self._retired.wait()
                return
            except TimeoutError:
                pass

    def _free(self) -> None:
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

    def _check_drained(self) -> None:
        """A writer that is lost will never say that it stopped: nobody waits for that."""
        if self._draining is not None and not any(w.active and not w.lost for w in self._draining.writers.values()):
            self._drained.set()
