"""A waiter is told of its slot at once and alone, and finds it all the same when what it was told got lost."""

import asyncio
import time

from redis.asyncio import Redis

from leases import Denied, LeaseTable, NoSlot
from tests.kit.valkey import (
    ValkeyProcess,
    grant,
    node,
    queued,
    refusal,
    register,
    release,
)
from tests.kit.waiting import granted, join


async def test_a_lost_wake_up_costs_a_look_and_no_more(table: LeaseTable, redis: Redis) -> None:
    await register(table, node())
    held = await grant(table)
    for _ in range(5):
        waiter = await join(table, 1)
        await redis.client_kill_filter(_type="pubsub")
        started = time.monotonic()
        await release(table, held)
        held = await granted(waiter)
        assert time.monotonic() - started < 1


async def test_what_was_said_while_the_subscription_was_broken_is_looked_up_when_it_is_back(
    patient: LeaseTable, redis: Redis
) -> None:
    await register(patient, node())
    held = await grant(patient)
    for _ in range(3):
        waiter = await join(patient, 1)
        await redis.client_kill_filter(_type="pubsub")
        await release(patient, held)
        held = await granted(waiter)


async def test_a_user_who_may_not_subscribe_is_served_all_the_same(
    server: ValkeyProcess, table: LeaseTable, redis: Redis
) -> None:
    await redis.acl_setuser(
        "mute", enabled=True, passwords=["+pw"], categories=["+@all"], keys=["*"], channels=[], reset_channels=True
    )
    try:
        async with LeaseTable(server.url.replace("unix://", "unix://mute:pw@"), timeout_s=5) as mute:
            await register(mute, node())
            held = await grant(mute)
            waiter = await join(mute, 1)
            assert await release(mute, held)
            await granted(waiter)
    finally:
        await redis.acl_deluser("mute")


async def test_a_hundred_waiters_cost_one_call_for_each_slot_that_becomes_free(patient: LeaseTable, redis: Redis) -> None:
    await register(patient, node())
    held = await grant(patient)
    first = await join(patient, 1)
    await release(patient, held)
    held = await granted(first)  # so the subscription stands

    async def use_it() -> None:
        await patient.give_back(await grant(patient, wait_ms=60_000))

    waiters = [asyncio.create_task(use_it()) for _ in range(100)]
    await queued(patient, 100)
    await redis.config_resetstat()
    await release(patient, held)
    await asyncio.gather(*waiters)
    calls = (await redis.info("commandstats"))["cmdstat_evalsha"]
    # One release, and of each waiter one call that fetches the slot and one that gives it back. A script that the server had
    # not met is a failed call.
    assert calls["calls"] - calls["failed_calls"] == 201


async def test_hurry_makes_waiters_go_without_and_later_wishes_not_wait(patient: LeaseTable) -> None:
    await register(patient, node())
    held = await grant(patient)
    waiters = [await join(patient, place) for place in (1, 2, 3)]
    patient.hurry()
    for waiter in waiters:
        answer = await asyncio.wait_for(waiter, 5)
        assert isinstance(answer, Denied)
        assert answer.reason is NoSlot.BUSY
    assert await refusal(patient, wait_ms=60_000) is NoSlot.BUSY
    await release(patient, held)
    await grant(patient, wait_ms=60_000)
