"""Handoffs whose claims run out or whose writers go away: what still counts, and how soon the daemon knows."""

import asyncio

import msgspec
import pytest

from decode_daemon import receiver
from decode_daemon.slots import HandoffFailed, SlotState
from handoff.claim import ClaimKeys
from handoff.messages import Abort, Accepted, Begin, Rejected, Stopped, Waiting, Welcome
from tests.kit.control import TOKENS, Voice, begun, sent
from tests.kit.handoff import FIRST_TOKEN, KEYS, Landing, comes_true, final_of, landing, whole


async def gone(daemon: Landing, identity: bytes) -> None:
    """Returns once the daemon's socket knows that this connection is no more."""
    async with asyncio.timeout(5):
        while await daemon.receiver._delivered(identity, Waiting("", 0)):  # noqa: ASYNC110 - ZeroMQ does not tell
            await asyncio.sleep(0.01)


async def test_a_claim_that_expired_before_it_was_used_fails_its_handoff_at_once(daemon: Landing, worker: Voice) -> None:
    claim, held = daemon.claim(life_s=-1)
    answer = await worker.ask(Begin(claim, TOKENS))
    assert answer == Rejected(claim.claim.handoff_id, "the claim has expired")
    with pytest.raises(HandoffFailed, match="the claim has expired"):
        await whole(held)


async def test_a_replay_of_what_has_expired_ends_no_handoff_that_began_in_time(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    late = KEYS.sign(msgspec.structs.replace(claim.claim, expires=1))
    assert isinstance(await worker.ask(Begin(late, TOKENS)), Accepted)  # as if it had been said again
    async with Voice(daemon.port) as other:
        await other.hello(engine_id="another")
        assert "another vLLM" in (await other.ask(Begin(late, TOKENS))).reason  # type: ignore[union-attr]
    await worker.say(sent(claim), final_of(late, TOKENS))
    assert (await whole(held)).first_token == FIRST_TOKEN


async def test_a_handoff_that_began_in_time_may_end_after_its_claim_has_expired(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    late = KEYS.sign(msgspec.structs.replace(claim.claim, expires=1))
    await worker.say(sent(claim), final_of(late, TOKENS))
    assert (await whole(held)).first_token == FIRST_TOKEN
    await daemon.slots[0].release(held, "done", 1)
    claim, held = await begun(daemon, worker)
    await worker.say(Abort(KEYS.sign(msgspec.structs.replace(claim.claim, expires=1)), "preempted"))
    with pytest.raises(HandoffFailed, match="preempted"):
        await whole(held)


async def test_a_forged_final_or_abort_is_not_believed(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    forged = ClaimKeys([b"another key"]).sign(claim.claim)
    await worker.say(final_of(forged, TOKENS, first_token=1), Abort(forged, "not ours"), sent(claim), final_of(claim, TOKENS))
    assert (await whole(held)).first_token == FIRST_TOKEN


async def test_the_writers_of_a_handoff_that_is_not_whole_are_looked_after(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    waiting = Waiting(claim.claim.handoff_id, claim.claim.epoch)
    assert [await worker.hear_any() for _ in range(2)] == [waiting, waiting]
    assert not held.landed.done()
    await worker.say(sent(claim), final_of(claim, TOKENS))
    await whole(held)


async def test_a_writer_whose_connection_is_gone_fails_its_handoff_within_seconds(daemon: Landing) -> None:
    async with Voice(daemon.port) as voice:
        await voice.hello()
        await begun(daemon, voice)
    (held,) = daemon.occupancies
    with pytest.raises(HandoffFailed, match="the connection to the vLLM rank that writes shard 0 is gone"):
        await whole(held, within_s=6)
    await asyncio.wait_for(daemon.slots[0].release(held, "handoff_failed", 30), 1)
    assert (daemon.slots[0].state, daemon.slots[0].memory.generation) == (SlotState.FREE, 1)


async def test_a_writer_that_has_said_sent_may_go(daemon: Landing) -> None:
    async with Voice(daemon.port, b"w") as voice:
        await voice.hello()
        claim, held = await begun(daemon, voice)
        await voice.say(sent(claim))
        await voice.hushed()
    await gone(daemon, b"w")
    for _ in range(receiver._MISSED_LOOKS):
        await daemon.receiver._look()
    daemon.slots[0].lost(b"w")
    daemon.end_prefill(claim, TOKENS)
    assert (await whole(held)).first_token == FIRST_TOKEN


async def test_a_writer_that_a_cancel_missed_may_come_back_before_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_LOOK_S", 60)
    async with landing() as daemon:
        async with Voice(daemon.port, b"w") as voice:
            await voice.hello()
            claim, held = await begun(daemon, voice)
        await gone(daemon, b"w")
        releasing = asyncio.create_task(daemon.slots[0].release(held, "the client left", 30))
        await comes_true(lambda: daemon.slots[0].state is SlotState.DRAINING and daemon.receiver._replies.empty())
        async with Voice(daemon.port, b"w") as voice:
            await voice.say(Stopped(claim.claim.handoff_id, claim.claim.epoch))
            await asyncio.wait_for(releasing, 5)
        assert (daemon.slots[0].state, daemon.slots[0].memory.generation) == (SlotState.FREE, 0)


async def test_an_error_nobody_thought_of_ends_neither_the_answers_nor_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "_LOOK_S", 0.01)
    async with landing() as daemon, Voice(daemon.port, b"w") as voice:
        daemon.receiver.send(b"w", object())  # type: ignore[arg-type]
        real, looks = daemon.receiver._look, []

        async def look() -> None:
            looks.append(1)
            await real()
            raise RuntimeError("nobody thought of this")

        monkeypatch.setattr(daemon.receiver, "_look", look)
        assert isinstance(await voice.hello(), Welcome)
        await comes_true(lambda: len(looks) > 2)


async def test_nobody_waits_for_a_cancelled_writer_whose_connection_is_gone(daemon: Landing) -> None:
    async with Voice(daemon.port) as voice:
        await voice.hello()
        claim, held = await begun(daemon, voice)
    async with Voice(daemon.port) as other:
        await other.say(Abort(claim, "gone"))
        with pytest.raises(HandoffFailed, match="gone"):
            await whole(held)
    await asyncio.wait_for(daemon.slots[0].release(held, "handoff_failed", 30), 6)
    assert daemon.slots[0].memory.generation == 1


async def test_a_connector_that_reads_nothing_delays_nobody(daemon: Landing, worker: Voice) -> None:
    async with Voice(daemon.port) as deaf:
        await deaf.hello()
        for _ in range(3_000):  # answers of them all would not fit into what the sockets hold
            await deaf.say(Begin(daemon.unreserved(slot=1), TOKENS))
        claim, held = await begun(daemon, worker)
        await worker.say(sent(claim), final_of(claim, TOKENS))
        await whole(held)
