"""Who waits gets the next slot in the order of arrival, for a bounded time, in a queue of bounded length."""

import asyncio
import time

import pytest
from redis.asyncio import Redis

from leases import Denied, LeaseTable, NoSlot
from tests.kit.valkey import (
    ValkeyProcess,
    Wire,
    acquire,
    grant,
    key_names,
    node,
    queued,
    refusal,
    register,
    release,
)
from tests.kit.waiting import granted, join, left


async def test_waiters_are_served_in_the_order_of_arrival(patient: LeaseTable) -> None:
    await register(patient, node())
    held = await grant(patient)
    waiters = [await join(patient, place) for place in range(1, 6)]
    for served, waiter in enumerate(waiters):
        assert await release(patient, held)
        held = await granted(waiter)
        assert not any(later.done() for later in waiters[served + 1 :])


async def test_gateways_share_one_queue(server: ValkeyProcess, patient: LeaseTable) -> None:
    await register(patient, node())
    held = await grant(patient)
    async with (
        LeaseTable(server.url, waiter_ttl_ms=60_000, timeout_s=5) as one,
        LeaseTable(server.url, waiter_ttl_ms=60_000, timeout_s=5) as two,
    ):
        waiters = [await join(gateway, place) for place, gateway in enumerate((one, two, one, two), start=1)]
        for waiter in waiters:
            await release(patient, held)
            held = await granted(waiter)


@pytest.mark.parametrize("by", ["release", "give_back", "heartbeat", "new_node"])
async def test_a_freed_slot_is_the_heads_before_the_call_returns(patient: LeaseTable, redis: Redis, by: str) -> None:
    await register(patient, node())
    held = await grant(patient)
    if by == "heartbeat":
        await register(patient, node(), floor=held.epoch, in_use=held.epoch)
    waiter = await join(patient, 1)
    (queue,) = await redis.keys("*:queue")

    if by == "release":
        await release(patient, held)
    elif by == "give_back":
        await patient.give_back(held)
    elif by == "heartbeat":
        (state,) = await register(patient, node(), floor=held.epoch)
        assert (state.leased, state.epoch > held.epoch) == (True, True)
    else:
        await register(patient, node("n2"))

    assert await redis.zcard(queue) == 0
    assert (await granted(waiter)).node_id == ("n2" if by == "new_node" else "n1")


async def test_a_newcomer_does_not_get_the_slot_of_a_waiter_that_is_slow_to_fetch_it(
    server: ValkeyProcess, patient: LeaseTable, wire: Wire
) -> None:
    await register(patient, node())
    held = await grant(patient)
    async with LeaseTable(wire.url, waiter_ttl_ms=60_000, timeout_s=5) as slow:
        waiter = await join(slow, 1)
        wire.keep_answers()
        await release(patient, held)
        assert await refusal(patient) is NoSlot.BUSY
        (shown,) = (await patient.inspect())["smollm2"].nodes
        assert shown.slots[0].state == "offered"
        wire.mend()
        await granted(waiter)
        assert await refusal(patient) is NoSlot.BUSY


async def test_a_newcomer_that_would_wait_stands_behind_those_who_wait(patient: LeaseTable) -> None:
    await register(patient, node())
    held = await grant(patient)
    first = await join(patient, 1)
    second = await join(patient, 2)
    await release(patient, held)
    held = await granted(first)
    third = await join(patient, 2)
    await release(patient, held)
    held = await granted(second)
    await release(patient, held)
    await granted(third)


async def test_who_is_too_large_for_what_is_free_lets_the_next_pass_and_keeps_its_place(patient: LeaseTable) -> None:
    for name, capacity in (("small", 100), ("large", 1_000)):
        await register(patient, node(name, capacity=capacity))
    small, large = await grant(patient, tokens=50), await grant(patient, tokens=500)
    needs_large = await join(patient, 1, tokens=500)
    small_enough = await join(patient, 2, tokens=50)
    behind = await join(patient, 3, tokens=50)

    await release(patient, small)
    assert (await granted(small_enough)).node_id == "small"
    assert await refusal(patient, tokens=50) is NoSlot.BUSY, "there is nothing free for a newcomer"
    await release(patient, large)
    assert (await granted(needs_large)).node_id == "large"
    assert not behind.done()
    await left(behind)


async def test_two_slots_freed_at_once_serve_two_waiters(patient: LeaseTable) -> None:
    await register(patient, node(slots=2))
    held = [await grant(patient) for _ in range(2)]
    waiters = [await join(patient, place) for place in (1, 2)]
    await asyncio.gather(*(release(patient, one) for one in held))
    slots = {(await granted(waiter)).slot for waiter in waiters}
    assert slots == {0, 1}


async def test_the_queue_is_only_so_long(table: LeaseTable) -> None:
    await register(table, node())
    held = await grant(table)
    waiters = [await join(table, place, max_waiting=2) for place in (1, 2)]
    assert await refusal(table, wait_ms=60_000, max_waiting=2) is NoSlot.QUEUE_FULL
    assert await refusal(table, wait_ms=60_000, max_waiting=0) is NoSlot.QUEUE_FULL
    await release(table, held)
    await granted(waiters[0])
    await left(waiters[1])


async def test_a_wait_ends_at_its_time_with_an_estimate(table: LeaseTable) -> None:
    await register(table, node())
    await release(table, await grant(table))
    await grant(table)
    started = time.monotonic()
    answer = await acquire(table, wait_ms=300)
    took_s = time.monotonic() - started
    assert isinstance(answer, Denied)
    assert answer.reason is NoSlot.BUSY
    assert answer.retry_after_ms is not None
    assert 0.3 <= took_s < 0.8
    await queued(table, 0)


async def test_a_wish_that_does_not_wait_leaves_no_trace(table: LeaseTable, redis: Redis) -> None:
    await register(table, node())
    await grant(table)
    before = await key_names(redis)
    assert await refusal(table) is NoSlot.BUSY
    assert await key_names(redis) == before
    assert (await table.pools())["smollm2"].waiting == 0


async def test_the_report_shows_the_queue_in_order(server: ValkeyProcess, table: LeaseTable) -> None:
    await register(table, node())
    await grant(table)
    async with (
        LeaseTable(server.url, holder="gateway 1", timeout_s=5) as one,
        LeaseTable(server.url, holder="gateway 2", timeout_s=5) as two,
    ):
        waiters = [await join(one, 1, tokens=11), await join(two, 2, tokens=12, wait_ms=30_000)]
        first, second = (await table.inspect())["smollm2"].queue
        assert (first.holder, first.tokens, second.holder, second.tokens) == ("gateway 1", 11, "gateway 2", 12)
        assert 30_000 < first.left_ms <= 60_000
        assert 20_000 < second.left_ms <= 30_000
        for waiter in waiters:
            await left(waiter)
