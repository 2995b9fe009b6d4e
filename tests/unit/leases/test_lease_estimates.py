"""What the table counts of a pool, and when it says that a slot will be free."""

import asyncio

import pytest
from redis.asyncio import Redis

from leases import Denied, LeaseTable, NoSlot, PoolReport
from tests.kit.valkey import acquire, eventually, grant, node, queued, register, release


async def report(table: LeaseTable) -> PoolReport:
    return (await table.inspect())["smollm2"]


async def server_ms(redis: Redis) -> int:
    seconds, micros = await redis.time()
    return int(seconds) * 1_000 + int(micros) // 1_000


async def use_for(table: LeaseTable, redis: Redis, least_ms: int) -> tuple[int, int]:
    """One request that takes so long; returns bounds of how long its slot was held by the server's clock, in ms."""
    before = await server_ms(redis)
    held = await grant(table)
    after = await server_ms(redis)

    async def time_is_over() -> bool:
        return await server_ms(redis) - after >= least_ms

    await eventually(time_is_over)
    ending = await server_ms(redis)
    assert await release(table, held)
    return ending - after, await server_ms(redis) - before


async def test_nothing_is_known_before_the_first_request_ends(table: LeaseTable) -> None:
    await register(table, node())
    await grant(table)
    shown = await report(table)
    assert (shown.mean_ms, shown.served) == (None, 0)
    assert await acquire(table) == Denied(NoSlot.BUSY, None)


async def test_the_first_request_is_the_mean_and_later_ones_move_it_by_an_eighth(table: LeaseTable, redis: Redis) -> None:
    await register(table, node())
    least, most = await use_for(table, redis, 80)
    first = (await report(table)).mean_ms
    assert first is not None
    assert least <= first <= most
    least, most = await use_for(table, redis, 0)
    second = (await report(table)).mean_ms
    assert second is not None
    assert round(first + (least - first) / 8) - 1 <= second <= round(first + (most - first) / 8) + 1


@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (2, 0), (1, 2), (3, 1)])
async def test_the_estimate_is_the_mean_for_each_one_ahead_over_the_slots(
    table: LeaseTable, redis: Redis, slots: int, ahead: int
) -> None:
    await register(table, node(slots=slots))
    await use_for(table, redis, 50)
    for _ in range(slots):
        await grant(table)
    waiters = [asyncio.create_task(acquire(table, wait_ms=60_000)) for _ in range(ahead)]
    await queued(table, ahead)
    mean_ms = (await report(table)).mean_ms
    assert mean_ms is not None

    denied = await acquire(table)

    assert denied == Denied(NoSlot.BUSY, -(-mean_ms * (ahead + 1) // slots))
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)


async def test_a_full_queue_has_an_estimate_too(table: LeaseTable, redis: Redis) -> None:
    await register(table, node())
    await use_for(table, redis, 50)
    await grant(table)
    mean_ms = (await report(table)).mean_ms
    assert await acquire(table, wait_ms=60_000, max_waiting=0) == Denied(NoSlot.QUEUE_FULL, mean_ms)


async def test_what_no_waiting_helps_has_no_estimate(table: LeaseTable, redis: Redis) -> None:
    await register(table, node(capacity=100))
    await use_for(table, redis, 10)
    assert await acquire(table, tokens=101) == Denied(NoSlot.TOO_LARGE, None)
    assert await acquire(table, card="card-9") == Denied(NoSlot.UNKNOWN_POOL, None)


async def test_served_counts_what_was_used_and_not_what_was_given_back(table: LeaseTable) -> None:
    await register(table, node())
    for _ in range(3):
        await release(table, await grant(table))
    held = await grant(table)
    await table.give_back(held)
    await release(table, held)
    shown = await report(table)
    assert shown.served == 3


async def test_a_lease_that_was_given_back_does_not_move_the_mean(table: LeaseTable, redis: Redis) -> None:
    await register(table, node())
    await use_for(table, redis, 50)
    before = (await report(table)).mean_ms
    for _ in range(5):
        await table.give_back(await grant(table))
    assert (await report(table)).mean_ms == before


async def test_a_slot_that_the_table_had_forgotten_counts_as_served_and_not_in_the_mean(table: LeaseTable) -> None:
    await register(table, node(), floor=5, in_use=5)
    assert await table.release("smollm2", "n1", 0, 5)
    shown = await report(table)
    assert (shown.served, shown.mean_ms) == (1, None)


async def test_each_daemon_says_how_many_it_served(table: LeaseTable) -> None:
    await register(table, node("a"), served=7)
    await register(table, node("b"))
    assert [shown.status.served for shown in (await report(table)).nodes] == [7, 0]
