"""The control socket: whom it answers, what it refuses by name, and that nobody's nonsense disturbs anybody else."""

import asyncio
from typing import Any

import msgspec
import pytest

from decode_daemon.slots import HandoffFailed, SlotState
from handoff.claim import ClaimKeys, new_handoff_id
from handoff.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Begin,
    Cancel,
    Final,
    Rejected,
    Stopped,
    ToDaemon,
    Welcome,
)
from tests.kit.control import TOKENS, Voice, begun, sent
from tests.kit.handoff import (
    FIRST_TOKEN,
    KEYS,
    LAYOUT,
    MODEL,
    Landing,
    comes_true,
    final_of,
    whole,
)


async def test_a_welcome_carries_what_the_transport_needs(daemon: Landing) -> None:
    async with Voice(daemon.port) as voice:
        welcome = await voice.hello()
    assert welcome == Welcome(PROTOCOL_VERSION, "daemon", daemon.transport.metadata())


@pytest.mark.parametrize("late", [False, True])
async def test_the_scheduler_sides_word_may_come_before_the_last_bytes_or_after_them(
    daemon: Landing, worker: Voice, late: bool
) -> None:
    claim, held = await begun(daemon, worker)
    async with Voice(daemon.port) as scheduler:
        first, second = (worker, scheduler) if late else (scheduler, worker)
        words: dict[Voice, ToDaemon] = {scheduler: final_of(claim, TOKENS), worker: sent(claim)}
        await first.say(words[first])
        await first.hushed()
        assert not held.landed.done()
        await second.say(words[second])
        landed = await whole(held)
    assert (landed.prompt, landed.first_token, landed.finished) == (tuple(range(TOKENS)), FIRST_TOKEN, False)
    assert daemon.slots[0].state is SlotState.LANDED


async def test_a_worker_that_is_not_known_is_asked_to_introduce_itself(daemon: Landing) -> None:
    claim, _ = daemon.claim()
    async with Voice(daemon.port) as voice:
        answer = await voice.ask(Begin(claim, TOKENS))
        assert answer == Rejected(claim.claim.handoff_id, "introduce yourself first", hello=True)
        assert isinstance(await voice.hello(), Welcome)
        assert isinstance(await voice.ask(Begin(claim, TOKENS)), Accepted)


async def test_a_worker_that_knows_only_old_memory_is_asked_to_introduce_itself_again(daemon: Landing, worker: Voice) -> None:
    daemon.slots[1].memory.renew()
    claim, _ = daemon.claim(slot=0)
    answer = await worker.ask(Begin(claim, TOKENS))
    assert isinstance(answer, Rejected)
    assert answer.hello
    assert isinstance(await worker.hello(), Welcome)
    assert isinstance(await worker.ask(Begin(claim, TOKENS)), Accepted)


async def test_a_shard_is_begun_by_one_link_and_a_begin_that_is_said_again_has_the_same_answer(
    daemon: Landing, worker: Voice
) -> None:
    claim, held = await begun(daemon, worker)
    address = daemon.slots[0].memory.address
    assert await worker.ask(Begin(claim, TOKENS)) == Accepted(claim.claim.handoff_id, address, LAYOUT.bytes_for(TOKENS))
    begun_already = Rejected(claim.claim.handoff_id, f"shard 0 has already begun handoff {claim.claim.handoff_id}")
    assert await worker.ask(Begin(claim, TOKENS + 1)) == begun_already
    async with Voice(daemon.port) as another:
        await another.hello()
        assert await another.ask(Begin(claim, TOKENS)) == begun_already
    await worker.say(sent(claim))
    assert await worker.ask(Begin(claim, TOKENS)) == begun_already
    await worker.say(final_of(claim, TOKENS))
    await whole(held)


async def test_a_claim_that_has_been_used_opens_nothing_a_second_time(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    await worker.say(sent(claim), final_of(claim, TOKENS))
    await whole(held)
    await daemon.slots[0].release(held, "done", 1)
    answer = await worker.ask(Begin(claim, TOKENS))
    assert isinstance(answer, Rejected)
    assert "which is free" in answer.reason
    await begun(daemon, worker)  # the next lease is not disturbed by an old claim
    assert "is held by epoch" in (await worker.ask(Begin(claim, TOKENS))).reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epoch": 1}, "epoch 1 is not the one of slot 0"),
        ({"slot": 1}, "slot 1, which is free"),
        ({"slot": 2}, "slot 2 is not one of 2"),
        ({"handoff_id": new_handoff_id()}, "slot 0 waits for handoff"),
        ({"version": 2}, "claim version 2"),
    ],
)
async def test_a_writer_with_another_claim_is_refused_by_name(
    daemon: Landing, worker: Voice, change: dict[str, Any], reason: str
) -> None:
    claim, _ = daemon.claim(epoch=10_000)
    other = KEYS.sign(msgspec.structs.replace(claim.claim, **change))
    answer = await worker.ask(Begin(other, TOKENS))
    assert isinstance(answer, Rejected)
    assert reason in answer.reason
    assert not answer.hello
    assert isinstance(await worker.ask(Begin(claim, TOKENS)), Accepted)


async def test_a_claim_that_has_expired_is_refused_and_ends_its_handoff(daemon: Landing, worker: Voice) -> None:
    claim, held = daemon.claim(epoch=10_000)
    expired = KEYS.sign(msgspec.structs.replace(claim.claim, expires=1))
    for of, reason in ((expired, "the claim has expired"), (claim, "has failed already")):
        answer = await worker.ask(Begin(of, TOKENS))
        assert isinstance(answer, Rejected)
        assert reason in answer.reason
    with pytest.raises(HandoffFailed, match="expired"):
        await held.landed


async def test_a_forged_claim_is_refused(daemon: Landing, worker: Voice) -> None:
    claim, _ = daemon.claim()
    forged = ClaimKeys([b"another key"]).sign(claim.claim)
    answer = await worker.ask(Begin(forged, TOKENS))
    assert isinstance(answer, Rejected)
    assert "signature" in answer.reason


@pytest.mark.parametrize("tokens", [0, -1, -(2**40), MODEL.context_tokens + 1, 2**40])
async def test_a_prompt_of_an_impossible_length_is_refused(daemon: Landing, worker: Voice, tokens: int) -> None:
    claim, _ = daemon.claim()
    answer = await worker.ask(Begin(claim, tokens))
    assert isinstance(answer, Rejected)
    assert f"{tokens} tokens" in answer.reason


@pytest.mark.parametrize(
    "change",
    [{"tokens": 9}, {"blocks": 2}, {"blocks": 4}, {"bytes": 0}, {"bytes": 1}, {"bytes": 2**60}, {"bytes": -1}],
)
async def test_other_counts_than_were_due_fail_the_handoff(daemon: Landing, worker: Voice, change: dict[str, int]) -> None:
    claim, held = await begun(daemon, worker)
    await worker.say(final_of(claim, TOKENS), sent(claim, **change))
    with pytest.raises(HandoffFailed, match=r"arrived as shard 0, 10 tokens in 3 blocks of 4608 bytes in all were due"):
        await whole(held)


@pytest.mark.parametrize(
    ("prompt", "first_token", "reason"),
    [
        (b"\0\0\0\0" * 9, 1, "KV of 10 tokens arrived for a prompt of 9"),
        (b"\0\0\0\0" * 11, 1, "for a prompt of 11"),
        (b"\0\0\0\0" * 9 + b"\0", 1, "for a prompt of 9.25"),
        (b"", 1, "for a prompt of 0"),
        (b"\0\0\0\0" * 10, -1, "the first token is -1"),
        (b"\0\0\0\0" * 10, 2**32, "the first token is 4294967296"),
    ],
)
async def test_a_final_that_does_not_fit_the_kv_fails_the_handoff(
    daemon: Landing, worker: Voice, prompt: bytes, first_token: int, reason: str
) -> None:
    claim, held = await begun(daemon, worker)
    await worker.say(sent(claim), Final(claim, prompt, first_token, finished=False))
    with pytest.raises(HandoffFailed, match=reason):
        await whole(held)


async def test_only_the_first_word_of_the_scheduler_side_counts(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    await worker.say(final_of(claim, TOKENS), final_of(claim, TOKENS, first_token=1), sent(claim), sent(claim))
    assert (await whole(held)).first_token == FIRST_TOKEN
    await worker.say(sent(claim, blocks=1), Abort(claim, "too late"))
    await worker.hushed()
    assert (await whole(held)).first_token == FIRST_TOKEN


async def test_an_abort_fails_the_handoff_at_once_whoever_of_the_senders_says_it(daemon: Landing, worker: Voice) -> None:
    for by_worker in (True, False):
        claim, held = await begun(daemon, worker)
        async with Voice(daemon.port) as scheduler:
            await (worker if by_worker else scheduler).say(Abort(claim, "vLLM aborted the request"))
            with pytest.raises(HandoffFailed, match="vLLM aborted the request"):
                await whole(held)
        releasing = asyncio.create_task(daemon.slots[0].release(held, "handoff_failed", 5))
        if not by_worker:  # the worker may still be writing: it is asked
            assert await worker.hear() == Cancel(claim.claim.handoff_id, claim.claim.epoch, "handoff_failed")
            await worker.say(Stopped(claim.claim.handoff_id, claim.claim.epoch))
        await asyncio.wait_for(releasing, 1)
    assert daemon.slots[0].memory.generation == 0


async def test_a_worker_that_may_still_be_writing_is_not_taken_for_gone(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    await worker.say(Abort(claim, "the write failed", writing=True))
    with pytest.raises(HandoffFailed, match="the write failed"):
        await whole(held)
    await daemon.slots[0].release(held, "handoff_failed", 0.05)
    assert daemon.slots[0].memory.generation == 1


async def test_the_last_bytes_may_cross_a_cancel(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    releasing = asyncio.create_task(daemon.slots[0].release(held, "the client left", 5))
    assert isinstance(await worker.hear(), Cancel)
    await worker.say(sent(claim))  # said before the Cancel came, and the last thing this worker says
    await asyncio.wait_for(releasing, 1)
    assert (daemon.slots[0].memory.generation, daemon.slots[0].state) == (0, SlotState.FREE)


@pytest.mark.parametrize("change", [{"epoch": 1}, {"handoff_id": "0" * 32}])
async def test_a_stopped_or_sent_of_another_handoff_is_not_believed(
    daemon: Landing, worker: Voice, change: dict[str, Any]
) -> None:
    claim, held = await begun(daemon, worker)
    other = msgspec.structs.replace(claim.claim, **change)
    await worker.say(sent(claim, **change), Stopped(other.handoff_id, other.epoch), Abort(KEYS.sign(other), "not mine"))
    await worker.hushed()
    assert held.writers[0].active
    assert not held.landed.done()


async def test_nobody_but_the_writer_can_say_that_its_writes_have_ended(daemon: Landing, worker: Voice) -> None:
    claim, held = await begun(daemon, worker)
    async with Voice(daemon.port) as stranger:
        await stranger.hello()
        await stranger.say(sent(claim), Stopped(claim.claim.handoff_id, claim.claim.epoch))
        await stranger.hushed()
    assert held.writers[0].active
    assert not held.landed.done()


async def test_handoffs_that_are_given_up_leave_every_slot_free(daemon: Landing, worker: Voice) -> None:
    for index in range(50):
        slot = daemon.slots[index % 2]
        claim, held = await begun(daemon, worker, slot.index)
        releasing = asyncio.create_task(slot.release(held, "the client left", 5))
        assert isinstance(await worker.hear(), Cancel)
        await worker.say(Stopped(claim.claim.handoff_id, claim.claim.epoch))
        await asyncio.wait_for(releasing, 1)
    await comes_true(lambda: all(slot.state is SlotState.FREE for slot in daemon.slots))
    assert [slot.memory.generation for slot in daemon.slots] == [0, 0]
