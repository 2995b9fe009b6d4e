"""A slot whose memory has to be replaced: nobody is held up by it, and nobody is given the old one, come what may."""

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from decode_daemon import slots
from decode_daemon.memory import LandingMemory
from decode_daemon.slots import LandingSlot, Occupancy, SlotRefused, SlotState, Writer
from handoff.transport import Region, TransportError
from tests.kit.handoff import LANDING_BYTES, LAYOUT, comes_true
from tests.kit.network import Registry


class Moody(Registry):
    """Does `before` whenever memory is to be registered."""

    before: Callable[[], object] = staticmethod(lambda: None)
    asked = 0

    def register(self, regions: Sequence[Region]) -> None:
        self.asked += 1
        self.before()
        super().register(regions)


def abandoned() -> tuple[Moody, LandingSlot, Occupancy]:
    """A slot in use, whose writer is lost in the middle of its writes."""
    registry = Moody()
    slot = LandingSlot(0, LandingMemory(registry, LANDING_BYTES), lambda *_: None)  # type: ignore[arg-type]
    held = slot.reserve("h", 1)
    slot.begin(Writer(b"w", 0, 1, LAYOUT, 10, "engine"), "h", 1, 0.0)
    slot.lost(b"w")
    held.landed.exception()
    return registry, slot, held


def refuse() -> None:
    raise TransportError("no memory can be pinned")


async def test_a_slot_without_new_memory_drains_until_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_RENEW_AGAIN_S", 0.01)
    registry, slot, held = abandoned()
    address, registry.before = slot.memory.address, refuse
    releasing = asyncio.create_task(slot.release(held, "done", 5))
    await comes_true(lambda: registry.asked > 3)
    assert slot.state is SlotState.DRAINING
    with pytest.raises(SlotRefused, match="still hold slot 0"):
        slot.reserve("i", 2)
    registry.before = lambda: None
    await asyncio.wait_for(releasing, 2)
    assert (slot.state, slot.memory.generation) == (SlotState.FREE, 1)
    assert slot.memory.address != address
    slot.reserve("i", 2)


async def test_a_daemon_that_stops_does_not_wait_for_new_memory() -> None:
    registry, slot, held = abandoned()
    registry.before = refuse
    releasing = asyncio.create_task(slot.release(held, "done", 5))
    await comes_true(lambda: registry.asked == 2)
    slot.retire()
    await asyncio.wait_for(releasing, 1)
    assert slot.state is SlotState.DRAINING


async def test_memory_is_renewed_beside_the_event_loop_and_also_when_the_release_is_cancelled() -> None:
    registry, slot, held = abandoned()
    may_go = threading.Event()
    registry.before = lambda: may_go.wait(5)
    releasing = asyncio.create_task(slot.release(held, "done", 5))
    await comes_true(lambda: registry.asked == 2)  # and the loop goes on
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert (slot.state, slot.memory.generation) == (SlotState.DRAINING, 0)
    may_go.set()
    await comes_true(lambda: slot.state is SlotState.FREE)
    assert slot.memory.generation == 1
    assert registry.regions == [Region(slot.memory.address, LANDING_BYTES)]
