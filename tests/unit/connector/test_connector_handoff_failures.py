"""Handoffs that go wrong: cancelled, stuck, broken, withdrawn. The next one must find everything as it was."""

import asyncio
import time
from collections.abc import Callable

import pytest
import torch

from decode_daemon.slots import HandoffFailed, SlotRefused, SlotState
from handoff.claim import SignedClaim
from handoff.transport import Peer, Progress
from tests.kit.handoff import BLOCKS, LANDING_BYTES, TOKENS, Landing, comes_true, hand_over, landing, prefill, until, whole
from tests.kit.network import HeldTransport


async def test_a_cancelled_writer_says_when_it_has_stopped_and_the_memory_waits_for_that(daemon: Landing) -> None:
    slot, transport = daemon.slots[0], HeldTransport()
    with prefill(network=transport) as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.write(request, BLOCKS, last=False)
        await comes_true(lambda: bool(transport.late))
        address = slot.memory.address
        releasing = asyncio.create_task(slot.release(held, "the client left", 5.0))
        await comes_true(lambda: slot.state is SlotState.DRAINING)
        await comes_true(lambda: worker.sender._outgoing[request].cancelled)  # the daemon's word has arrived
        worker.write(request, [1], first=6)  # too late: nothing more is posted
        done, _ = await asyncio.wait([releasing], timeout=0.2)
        assert not done
        assert not worker.sender.settled({request})
        with pytest.raises(SlotRefused, match="writers of epoch"):
            daemon.claim()
        transport.gate.set()
        await asyncio.wait_for(releasing, 1.0)
        await worker.settled(request)
        assert (slot.memory.address, slot.memory.generation, len(transport.late)) == (address, 0, 1)
        assert worker.failed == ["cancelled"]
        await hand_over(worker, daemon)


async def test_a_handoff_that_is_cancelled_before_anything_is_written_stops_at_once(daemon: Landing) -> None:
    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        await comes_true(lambda: held.started is not None)
        await asyncio.wait_for(daemon.slots[0].release(held, "the client left", 5.0), 1.0)
        await worker.settled(request)
        assert daemon.slots[0].memory.generation == 0


async def test_a_writer_that_never_says_stopped_loses_the_memory_and_its_late_writes_harm_nobody(daemon: Landing) -> None:
    slot, transport = daemon.slots[0], HeldTransport()
    with prefill(network=transport) as stuck, prefill() as healthy:
        claim, held = daemon.claim()
        request = stuck.open(claim, TOKENS)
        stuck.write(request, BLOCKS, last=False)
        await comes_true(lambda: bool(transport.late))
        before = slot.memory.address
        await asyncio.wait_for(slot.release(held, "the client left", 0.1), 1.0)
        assert (slot.memory.generation, slot.state) == (1, SlotState.FREE)
        assert slot.memory.address != before
        next_blocks = [20, 21, 22, 23, 24, 25]
        claim, held = daemon.claim()
        second = healthy.open(claim, TOKENS)
        healthy.write(second, next_blocks)
        daemon.end_prefill(claim)
        await whole(held)
        for _ in range(3):  # the network comes back, and the old write arrives
            transfer = transport.late[0]()
            until(lambda transfer=transfer: transfer.poll() is Progress.DONE)  # type: ignore[misc]
            transfer.close()
        assert torch.equal(daemon.memory(0, TOKENS), healthy.content(next_blocks))


async def test_handoffs_to_the_other_slot_survive_a_renewal(daemon: Landing) -> None:
    with prefill() as worker:
        claim, held = daemon.claim(slot=1)
        request = worker.open(claim, TOKENS)
        worker.write(request, BLOCKS[:3], last=False)
        await comes_true(lambda: held.started is not None)
        daemon.slots[0].memory.renew()
        await hand_over(worker, daemon, slot=0)  # which asks for another Hello
        worker.write(request, BLOCKS[3:], first=3)
        daemon.end_prefill(claim)
        await whole(held)
        assert torch.equal(daemon.memory(1, TOKENS), worker.content(BLOCKS))
        assert worker.failed == []


async def test_a_write_that_takes_too_long_fails_at_both_ends(daemon: Landing) -> None:
    transport = HeldTransport()
    with prefill(network=transport, write=0.2) as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.write(request, BLOCKS)
        with pytest.raises(HandoffFailed, match="a write took too long"):
            await whole(held, within_s=4.0)
        await worker.settled(request, within_s=3.0)
        # What is still on its way must not be taken for gone.
        await daemon.slots[0].release(held, "handoff_failed", 0.1)
        assert daemon.slots[0].memory.generation == 1


@pytest.mark.parametrize("works", [0, 2])
async def test_a_write_that_cannot_be_posted_fails_at_both_ends_at_once(daemon: Landing, works: int) -> None:
    transport = HeldTransport(break_after=works)
    transport.gate.set()
    with prefill(network=transport) as worker, prefill() as healthy:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        for at, block in enumerate(BLOCKS):
            worker.write(request, [block], first=at, last=at == 5)
        daemon.end_prefill(claim)
        with pytest.raises(HandoffFailed, match=r"the network to .* is broken"):
            await whole(held, within_s=4.0)
        await worker.settled(request, within_s=3.0)
        assert worker.failed == ["failed"]
        await daemon.slots[0].release(held, "handoff_failed", 0.1)
        await hand_over(healthy, daemon)
        transport._works = None
        await hand_over(worker, daemon)


async def test_a_write_that_fails_on_its_way_fails_at_both_ends_at_once(daemon: Landing) -> None:
    transport = HeldTransport()
    with prefill(network=transport) as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.write(request, BLOCKS)
        await comes_true(lambda: bool(transport.late))
        peer = transport.late[0].args[0]  # type: ignore[attr-defined]
        transport.disconnect(peer)
        transport.gate.set()
        with pytest.raises(HandoffFailed, match="NIXL cannot write"):
            await whole(held, within_s=4.0)
        await worker.settled(request, within_s=3.0)
        await daemon.slots[0].release(held, "handoff_failed", 0.1)
        await hand_over(worker, daemon)


async def test_one_handoff_that_fails_takes_no_other_to_the_same_daemon_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, ended = HeldTransport(), []
    end = transport.disconnect

    def disconnect(peer: Peer) -> None:
        ended.append(peer)
        end(peer)

    monkeypatch.setattr(transport, "disconnect", disconnect)
    async with landing(slots=3) as daemon:
        with prefill(network=transport) as worker:
            (first, lost), (second, good), (third, late) = (daemon.claim(slot) for slot in range(3))
            failing, writing = worker.open(first, TOKENS), worker.open(second, TOKENS)
            worker.write(writing, BLOCKS)
            await comes_true(lambda: bool(transport.late))
            await comes_true(lambda: worker.sender._outgoing[failing].address is not None)
            asking = worker.open(third, TOKENS)
            worker.write(failing, [64])  # outside the cache
            until(lambda: worker.sender.settled({failing}) == {failing})  # before the loop lets the daemon answer the third
            worker.write(asking, BLOCKS[::-1])
            await comes_true(lambda: len(transport.late) == 2)
            assert ended == []
            transport.gate.set()
            for claim, held in ((second, good), (third, late)):
                daemon.end_prefill(claim)
                await whole(held)
            assert torch.equal(daemon.memory(1, TOKENS), worker.content(BLOCKS))
            assert torch.equal(daemon.memory(2, TOKENS), worker.content(BLOCKS[::-1]))
            await worker.settled(writing, asking)
            assert worker.failed == ["failed"]
            await daemon.slots[0].release(lost, "handoff_failed", 1.0)
            await hand_over(worker, daemon)
            await hand_over(worker, daemon)
            assert len(ended) == 1  # now that nobody wrote through it


async def test_blocks_outside_the_cache_are_never_read(daemon: Landing) -> None:
    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.write(request, [1, 2, 64, 3, 4, 5])
        with pytest.raises(HandoffFailed, match="block 64 lies outside the KV cache"):
            await whole(held)
        await worker.settled(request)


async def test_more_blocks_than_were_asked_for_are_never_written(daemon: Landing) -> None:
    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.write(request, [*BLOCKS, 1])
        with pytest.raises(HandoffFailed, match="do not fit"):
            await whole(held)
        assert not daemon.slots[0].memory.view(LANDING_BYTES).any()
        await worker.settled(request)


async def test_fewer_blocks_than_the_prompt_has_fail_the_handoff(daemon: Landing) -> None:
    with prefill() as worker:
        claim, held = daemon.claim()
        worker.write(worker.open(claim, TOKENS), BLOCKS[:5])
        daemon.end_prefill(claim)
        with pytest.raises(HandoffFailed, match=r"22 tokens in 5 blocks .* arrived as shard 0, 22 tokens in 6 blocks .* due"):
            await whole(held)


@pytest.mark.parametrize("when", ["before it is accepted", "after"])
async def test_a_withdrawn_handoff_settles_at_once_and_the_daemon_hears_of_it(daemon: Landing, when: str) -> None:
    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        if when == "after":
            worker.write(request, BLOCKS[:2], last=False)
            await comes_true(lambda: held.started is not None)
        worker.sender.withdraw(request)
        worker.write(request, BLOCKS)
        await worker.settled(request, within_s=4.0)
        if when == "after":
            with pytest.raises(HandoffFailed, match="withdrawn by vLLM"):
                await whole(held)
        await asyncio.wait_for(daemon.slots[0].release(held, "handoff_failed", 5.0), 1.0)
        assert daemon.slots[0].memory.generation == 0
        await hand_over(worker, daemon)


@pytest.mark.parametrize(
    "claim_of",
    [
        lambda daemon: daemon.claim(epoch=1)[0] and daemon.unreserved(epoch=0),
        lambda daemon: daemon.unreserved(),
        lambda daemon: daemon.unreserved(slot=7),
        lambda daemon: daemon.unreserved(life_s=-1),
    ],
    ids=["stale epoch", "nobody waits", "no such slot", "expired"],
)
async def test_a_claim_that_permits_nothing_writes_nothing(daemon: Landing, claim_of: Callable[[Landing], SignedClaim]) -> None:
    with prefill() as worker:
        request = worker.open(claim_of(daemon), TOKENS)
        worker.write(request, BLOCKS)
        await worker.settled(request)
        assert worker.failed == ["failed"]
        assert not daemon.memory(0, TOKENS).any()


async def test_a_closed_sender_holds_nothing_back(daemon: Landing) -> None:
    with prefill() as worker:
        claim, _ = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.sender.close()
        worker.sender.close()
        assert worker.sender.settled({request}) == {request}
        began = time.monotonic()
        assert worker.sender.wait_settled({request}, 5.0)
        assert time.monotonic() - began < 1.0
        worker.write(request, BLOCKS)
        worker.sender.withdraw(request)


async def test_an_error_of_one_handoff_leaves_the_others_and_the_thread_alone(daemon: Landing) -> None:
    def surprise() -> bool:
        raise RuntimeError("the device has fallen off the bus")

    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.sender.write(request, 0, tuple(BLOCKS), last=True, ready=surprise)
        with pytest.raises(HandoffFailed, match="fallen off the bus"):
            await whole(held)
        await worker.settled(request)
        await daemon.slots[0].release(held, "handoff_failed", 1.0)
        await hand_over(worker, daemon)
