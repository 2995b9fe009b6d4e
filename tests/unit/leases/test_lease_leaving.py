"""Nobody waits behind one that is gone, and what was kept for it goes to the next; a waiter whose pool is gone learns it."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from leases import Denied, Grant, LeaseTable, NoSlot
from tests.kit.valkey import (
    ValkeyProcess,
    Wire,
    acquire,
    eventually,
    grant,
    node,
    queued,
    register,
    release,
)
from tests.kit.waiting import Waiting, granted, join, left, passed


@asynccontextmanager
async def behind_one_that_is_cut_off(quick: LeaseTable, wire: Wire) -> AsyncIterator[tuple[Grant, Waiting]]:
    """The one slot's grant, and the second of two waiters, the first of which the table does not hear from any more."""
    await register(quick, node())
    held = await grant(quick)
    async with LeaseTable(wire.url, waiter_ttl_ms=200, timeout_s=0.1) as lost:
        first = await join(lost, 1)
        second = await join(quick, 2)
        wire.cut()
        yield held, second
        await asyncio.wait([first])
        assert first.exception() is not None


async def test_a_waiter_that_stopped_asking_is_skipped(quick: LeaseTable, wire: Wire) -> None:
    async with behind_one_that_is_cut_off(quick, wire) as (held, second):
        await queued(quick, 1)
        await release(quick, held)
        await granted(second)


async def test_waiters_that_keep_asking_keep_their_places(quick: LeaseTable, redis: Redis) -> None:
    await register(quick, node())
    held = await grant(quick)
    waiters = [await join(quick, place) for place in range(1, 7)]
    await passed(redis, 3 * quick.waiter_ttl_ms, look=quick.pools)
    for waiter in waiters:
        await release(quick, held)
        held = await granted(waiter)


async def test_a_slot_that_was_waited_for_is_kept_as_long_as_any_other(quick: LeaseTable, redis: Redis) -> None:
    await register(quick, node())
    held = await grant(quick)
    waiter = await join(quick, 1)
    await release(quick, held)
    held = await granted(waiter)
    await passed(redis, 2 * quick.waiter_ttl_ms, look=lambda: register(quick, node()))
    assert await release(quick, held)


async def test_a_slot_that_its_waiter_does_not_fetch_goes_to_the_next(quick: LeaseTable, wire: Wire) -> None:
    async with behind_one_that_is_cut_off(quick, wire) as (held, second):
        await release(quick, held)
        assert (await granted(second)).epoch == held.epoch + 2, "the first waiter was to have it"


async def test_a_waiting_gateway_that_is_killed_does_not_stop_those_behind_it(server: ValkeyProcess, quick: LeaseTable) -> None:
    await register(quick, node())
    held = await grant(quick)
    code = (
        "import asyncio, sys; from leases import *\n"
        "wish = SlotRequest(pool='smollm2', card='card-1', tokens=10, lease_ms=60_000, wait_ms=60_000)\n"
        "asyncio.run(LeaseTable(sys.argv[1], waiter_ttl_ms=200).acquire(wish))"
    )
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", code, server.url)
    try:

        async def first_in_line() -> bool:
            return (await quick.pools())["smollm2"].waiting == 1

        await eventually(first_in_line, within_s=20)
        second, third = await join(quick, 2), await join(quick, 3)
    finally:
        gateway.send_signal(signal.SIGKILL)
        await gateway.wait()
    await release(quick, held)
    await release(quick, await granted(second))
    await granted(third)


async def test_a_waiter_that_asks_again_keeps_its_place(
    server: ValkeyProcess, patient: LeaseTable, quick: LeaseTable, redis: Redis
) -> None:
    await register(patient, node())
    held = await grant(patient)
    first = await join(patient, 1, nonce="first")
    second = await join(patient, 2)
    await redis.config_resetstat()
    again = asyncio.create_task(acquire(quick, wait_ms=60_000, nonce="first"))

    async def asked() -> bool:
        return "cmdstat_evalsha" in await redis.info("commandstats")

    await eventually(asked)
    await release(patient, held)
    held = await granted(again)
    assert held == await granted(first)
    await release(patient, held)
    await granted(second)


async def test_a_cancelled_waiter_leaves_at_once(patient: LeaseTable) -> None:
    await register(patient, node())
    held = await grant(patient)
    first, second = await join(patient, 1), await join(patient, 2)
    await left(first)
    await queued(patient, 1)
    await release(patient, held)
    await granted(second)


async def test_a_slot_that_was_just_offered_to_a_cancelled_waiter_goes_to_the_next(patient: LeaseTable, wire: Wire) -> None:
    await register(patient, node())
    held = await grant(patient)
    async with LeaseTable(wire.url, waiter_ttl_ms=60_000, timeout_s=5) as gateway:
        first = await join(gateway, 1)
        second = await join(patient, 2)
        wire.keep_answers()  # the wake-up among them
        await release(patient, held)
        await left(first)
        assert (await granted(second)).epoch == held.epoch + 2, "the first waiter was to have it"
        wire.mend()
    await queued(patient, 0)


async def test_a_slot_that_was_just_fetched_by_a_cancelled_waiter_goes_to_the_next(patient: LeaseTable, wire: Wire) -> None:
    await register(patient, node())
    held = await grant(patient)
    async with LeaseTable(wire.url, waiter_ttl_ms=400, timeout_s=5, holder="slow") as gateway:  # looks for itself
        first = await join(gateway, 1)
        second = await join(patient, 2)
        wire.keep_answers()
        await release(patient, held)

        async def fetched() -> bool:
            (shown,) = (await patient.inspect())["smollm2"].nodes
            return (shown.slots[0].state, shown.slots[0].holder) == ("leased", "slow")

        await eventually(fetched)
        await left(first)
        wire.mend()
        assert (await granted(second)).epoch == held.epoch + 2, "the first waiter had it"


async def test_a_caller_cancelled_while_its_grant_is_on_the_way_frees_the_slot(patient: LeaseTable, wire: Wire) -> None:
    await register(patient, node())
    async with LeaseTable(wire.url, waiter_ttl_ms=60_000, timeout_s=5) as gateway:
        await gateway.ping()
        wire.keep_answers()
        caller = asyncio.create_task(acquire(gateway))

        async def leased() -> bool:
            return (await patient.pools())["smollm2"].leased_slots == 1

        await eventually(leased)
        await left(caller)
        wire.mend()
    pool = (await patient.pools())["smollm2"]
    assert (pool.leased_slots, pool.free_slots) == (0, 1)


async def test_a_waiter_learns_that_its_pool_is_gone(table: LeaseTable) -> None:
    await register(table, node())
    await grant(table)
    waiter = await join(table, 1)
    await table.unregister(node())
    started = time.monotonic()
    answer = await asyncio.wait_for(waiter, 5)
    assert isinstance(answer, Denied)
    assert answer.reason is NoSlot.UNKNOWN_POOL
    assert time.monotonic() - started < 1


async def test_a_waiter_learns_that_its_pool_drains(table: LeaseTable) -> None:
    await register(table, node())
    held = await grant(table)
    waiter = await join(table, 1)
    await register(table, node(), floor=held.epoch, in_use=held.epoch, draining=True)
    answer = await asyncio.wait_for(waiter, 5)
    assert isinstance(answer, Denied)
    assert answer.reason is NoSlot.UNKNOWN_POOL


async def test_a_waiter_learns_that_the_only_node_large_enough_is_gone(table: LeaseTable) -> None:
    await register(table, node("small", capacity=100))
    await register(table, node("large", capacity=1_000))
    await grant(table, tokens=500)
    waiter = await join(table, 1, tokens=500)
    await table.unregister(node("large", capacity=1_000))
    answer = await asyncio.wait_for(waiter, 5)
    assert isinstance(answer, Denied)
    assert answer.reason is NoSlot.TOO_LARGE
