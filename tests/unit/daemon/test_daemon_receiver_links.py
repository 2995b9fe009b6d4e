"""A link whose connection breaks and is made again: what was said over the old one is still its own word.

A daemon that reads nothing for a while, as when its machine gives it no time, finds the messages of both connections at once.
In these tests nothing of the daemon's runs until the test waits.
"""

import asyncio
from dataclasses import replace

import pytest

from decode_daemon import receiver
from decode_daemon.slots import HandoffFailed, SlotState
from handoff.messages import Accepted, Begin, Cancel, Rejected, Stopped, Waiting, encode
from tests.kit.control import TOKENS, Voice, begun, sent
from tests.kit.handoff import FIRST_TOKEN, LAYOUT, Landing, comes_true, hello, landing, whole


async def reachable(daemon: Landing, link: bytes, *, known: bool) -> None:
    """Returns once the daemon's socket knows of this link, or that it is no more."""
    async with asyncio.timeout(5):
        while await daemon.receiver._delivered(link, Waiting("", 0)) is not known:  # noqa: ASYNC110 - ZeroMQ does not tell
            await asyncio.sleep(0.01)


async def test_a_sent_of_a_connection_that_broke_makes_its_handoff_whole(daemon: Landing) -> None:
    async with Voice(daemon.port, b"w") as voice:
        await voice.hello()
        claim, held = await begun(daemon, voice)
        await voice.say(sent(claim))
    async with Voice(daemon.port, b"w", connected=True):
        daemon.end_prefill(claim, TOKENS)
        assert (await whole(held)).first_token == FIRST_TOKEN


async def test_a_begin_of_a_connection_that_broke_is_answered_over_the_next_one(daemon: Landing) -> None:
    claim, held = daemon.claim()
    async with Voice(daemon.port, b"w") as voice:
        await voice.hello()
        await voice.say(Begin(claim, TOKENS))
    async with Voice(daemon.port, b"w", connected=True) as voice:
        accepted = Accepted(claim.claim.handoff_id, daemon.slots[0].memory.address, LAYOUT.bytes_for(TOKENS))
        assert await voice.hear() == accepted
        await voice.say(sent(claim))
        daemon.end_prefill(claim, TOKENS)
        assert (await whole(held)).first_token == FIRST_TOKEN


async def test_a_stopped_of_a_connection_that_broke_gives_the_memory_back(daemon: Landing) -> None:
    async with Voice(daemon.port, b"w") as voice:
        await voice.hello()
        claim, held = await begun(daemon, voice)
        releasing = asyncio.create_task(daemon.slots[0].release(held, "the client left", 30))
        assert isinstance(await voice.hear(), Cancel)
        await voice.say(Stopped(claim.claim.handoff_id, claim.claim.epoch))
    async with Voice(daemon.port, b"w", connected=True):
        await asyncio.wait_for(releasing, 5)
    assert (daemon.slots[0].state, daemon.slots[0].memory.generation) == (SlotState.FREE, 0)


async def test_the_end_of_a_link_concerns_only_what_was_begun_over_it(daemon: Landing) -> None:
    async with Voice(daemon.port, b"w-0") as old:
        await old.hello()
        _, lost = await begun(daemon, old, slot=0)
    async with Voice(daemon.port, b"w-1", connected=True) as new:
        await new.hello()
        claim, held = await begun(daemon, new, slot=1)
        with pytest.raises(HandoffFailed, match="the connection to the vLLM rank that writes shard 0 is gone"):
            await whole(lost)
        assert not held.landed.done()
        await new.say(sent(claim))
        daemon.end_prefill(claim, TOKENS)
        assert (await whole(held)).first_token == FIRST_TOKEN


async def test_a_cancel_that_was_lost_with_a_connection_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_LOOK_S", 60)
    async with landing() as daemon:
        async with Voice(daemon.port, b"w") as voice:
            await voice.hello()
            claim, held = await begun(daemon, voice)
        await reachable(daemon, b"w", known=False)
        releasing = asyncio.create_task(daemon.slots[0].release(held, "the client left", 30))
        await comes_true(lambda: daemon.slots[0].state is SlotState.DRAINING and daemon.receiver._replies.empty())
        for _ in range(receiver._MISSED_LOOKS - 1):  # as long as a connector may take to connect again
            await daemon.receiver._look()
        async with Voice(daemon.port, b"w", connected=True) as voice:
            await reachable(daemon, b"w", known=True)
            await daemon.receiver._look()
            assert await voice.hear() == Cancel(claim.claim.handoff_id, claim.claim.epoch, "the client left")
            await voice.say(Stopped(claim.claim.handoff_id, claim.claim.epoch))
            await asyncio.wait_for(releasing, 5)
        assert (daemon.slots[0].state, daemon.slots[0].memory.generation) == (SlotState.FREE, 0)


@pytest.mark.parametrize("name", [b"other", b"n" * 256])
async def test_hello_introduces_its_own_link_only(daemon: Landing, name: bytes) -> None:
    async with Voice(daemon.port, b"w") as voice:
        await voice._socket.send_multipart([name, encode(hello())])
        await voice.hushed()
    assert name not in daemon.receiver._connectors


async def test_a_handoff_that_has_failed_takes_no_writer_any_more(daemon: Landing) -> None:
    claim, held = daemon.claim()
    held.fail("the other rank has given it up")
    async with Voice(daemon.port, b"w") as voice:
        await voice.hello()
        answer = await voice.ask(Begin(claim, TOKENS))
    assert isinstance(answer, Rejected)
    assert "has failed already" in answer.reason
    with pytest.raises(HandoffFailed):
        await held.landed
    assert not held.writers


async def test_a_begin_again_by_a_rank_that_has_become_another_is_a_replay(daemon: Landing) -> None:
    async with Voice(daemon.port, b"w") as voice:
        await voice.hello()
        claim, held = await begun(daemon, voice)
        known = held.writers[0]
        assert held.repeated(known) is known
        assert held.repeated(replace(known, shards=2)) is None
        assert held.repeated(replace(known, tokens=TOKENS + 1)) is None
        await voice.say(sent(claim))
        await comes_true(lambda: not known.active)
        assert held.repeated(known) is None
