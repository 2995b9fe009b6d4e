"""Shards of one KV cache in one slot: where each lies, what makes them a whole, and what ends the wait for all of them."""

import asyncio
from typing import Any

import pytest

from decode_daemon.slots import HandoffFailed, LandingSlot, SlotRefused, SlotState, Writer
from handoff.layout import KVLayout
from tests.kit.handoff import LAYOUT, changed
from tests.kit.network import unused_memory

TOKENS = 10
GRACE = 5.0


def shard(index: int, *, shards: int = 2, tokens: int = TOKENS, layout: KVLayout = LAYOUT, engine: str = "e") -> Writer:
    return Writer(b"writer %d" % index, index, shards, layout, tokens, engine)


async def test_shards_lie_one_after_the_other() -> None:
    slot = LandingSlot(0, unused_memory(), lambda *_: None)
    slot.reserve("h", 1)
    length = LAYOUT.bytes_for(TOKENS)
    granted = [slot.begin(shard(index, shards=3), "h", 1, 0.0) for index in (2, 0, 1)]
    assert granted == [(slot.memory.address + index * length, length) for index in (2, 0, 1)]


async def test_shards_that_are_too_long_together_are_refused() -> None:
    slot = LandingSlot(0, unused_memory(), lambda *_: None)
    held = slot.reserve("h", 1)
    tokens = 40  # of 64 that one shard may have
    with pytest.raises(SlotRefused, match=f"40 tokens need {2 * LAYOUT.bytes_for(tokens)} bytes"):
        slot.begin(shard(0, tokens=tokens), "h", 1, 0.0)
    with pytest.raises(HandoffFailed, match="40 tokens need"):
        await held.landed


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"tokens": 11}, "tokens differs: shard 1 has 11, shard 0 has 10"),
        ({"shards": 3}, "shards differs: shard 1 has 3, shard 0 has 2"),
        ({"layout": changed(LAYOUT, dtype="float16")}, "layout differs: shard 1 has .*, shard 0 has "),
    ],
)
async def test_shards_that_are_not_of_one_cache_fail_the_handoff_by_name(other: dict[str, Any], reason: str) -> None:
    slot = LandingSlot(0, unused_memory(), lambda *_: None)
    held = slot.reserve("h", 1)
    slot.begin(shard(0), "h", 1, 0.0)
    with pytest.raises(SlotRefused, match=reason):
        slot.begin(shard(1, **other), "h", 1, 0.0)
    with pytest.raises(HandoffFailed, match=reason):
        await held.landed


async def test_another_engines_shard_is_refused_and_the_handoff_goes_on() -> None:
    slot = LandingSlot(0, unused_memory(), lambda *_: None)
    held = slot.reserve("h", 1)
    slot.begin(shard(0, engine="one"), "h", 1, 0.0)
    for index in (0, 1):
        with pytest.raises(SlotRefused, match=r"another vLLM \(one\) has already begun"):
            slot.begin(shard(index, engine="other"), "h", 1, 0.0)
    slot.begin(shard(1, engine="one"), "h", 1, 0.0)
    assert not held.landed.done()


async def test_a_writer_that_is_lost_is_not_waited_for_and_its_memory_is_not_used_again() -> None:
    slot = LandingSlot(0, unused_memory(), lambda *_: None)
    held = slot.reserve("h", 1)
    slot.begin(shard(0), "h", 1, 0.0)
    slot.begin(shard(1), "h", 1, 0.0)
    slot.lost(b"writer 1")
    with pytest.raises(HandoffFailed, match="the connection to the vLLM rank that writes shard 1 is gone"):
        await held.landed
    releasing = asyncio.create_task(slot.release(held, "handoff_failed", GRACE))
    await asyncio.sleep(0)
    assert slot.state is SlotState.DRAINING  # shard 0's writer is there and has not stopped yet
    slot.stopped(b"writer 0", "h", 1)
    await asyncio.wait_for(releasing, 1)
    assert (slot.state, slot.memory.generation) == (SlotState.FREE, 1)
