"""Known ways in which lease tables fail (crashes, restarts, stale holders, clocks), and that this one does not."""

import asyncio
import random
import secrets
import time

import pytest
from redis.asyncio import Redis

from leases import Grant, LeaseTable, NoSlot, SlotView
from tests.kit.valkey import ValkeyProcess, acquire, eventually, grant, node, release, views


async def taken_back(daemon: LeaseTable, floor: int = 0) -> bool:
    """One heartbeat of a daemon that has nothing in use; True when its slot is free after it."""
    (state,) = await daemon.register(node(), views(floor=floor))
    return not state.leased


async def test_a_stale_holder_cannot_free_the_slot_of_the_next(table: LeaseTable, hasty: LeaseTable) -> None:
    await hasty.register(node(), views())
    first = await grant(table)
    await eventually(lambda: taken_back(hasty))
    second = await grant(table)

    assert not await release(table, first)

    assert await acquire(table) is NoSlot.BUSY
    assert second.epoch > first.epoch
    assert await release(table, second)


async def test_the_slot_of_a_crashed_gateway_is_free_after_the_landing_time(table: LeaseTable, hasty: LeaseTable) -> None:
    await hasty.register(node(), views())
    held = await grant(table)
    (state,) = await table.register(node(), views())
    assert state.leased, "the landing time is not over for a patient daemon"

    await eventually(lambda: taken_back(hasty))

    (state,) = await table.register(node(), views())
    assert state.epoch > held.epoch
    assert (await table.pools())["smollm2"].free_slots == 1


async def test_a_lease_ends_at_its_own_time_where_that_is_shorter(table: LeaseTable) -> None:
    await table.register(node(), views())
    assert isinstance(await table.acquire("smollm2", 1, "wish", lease_ms=30), Grant)
    await eventually(lambda: taken_back(table))


async def test_a_lease_in_use_outlives_every_time_limit(table: LeaseTable, hasty: LeaseTable) -> None:
    await hasty.register(node(), views())
    held = await grant(table)
    started = time.monotonic()

    async def still_leased_later() -> bool:
        (state,) = await hasty.register(node(), views(floor=held.epoch, in_use=held.epoch, idle=False))
        assert (state.epoch, state.leased) == (held.epoch, True)
        return time.monotonic() - started > 0.2

    await eventually(still_leased_later)
    assert await acquire(table) is NoSlot.BUSY


async def test_a_newer_lease_that_meets_a_slot_in_use_ends_and_the_slot_stays_with_its_user(
    table: LeaseTable, hasty: LeaseTable
) -> None:
    await hasty.register(node(), views())
    serving = await grant(table)
    await release(table, serving)
    newer = await grant(table)

    async def user_is_back() -> bool:
        (state,) = await hasty.register(node(), views(floor=serving.epoch, in_use=serving.epoch, idle=False))
        assert state.leased
        return state.epoch == serving.epoch

    await eventually(user_is_back)
    assert not await release(table, newer)
    assert await release(table, serving)


async def test_a_dead_node_is_never_granted(table: LeaseTable, mortal: LeaseTable) -> None:
    await mortal.register(node("a-dead", slots=2), views(slots=2))
    await table.register(node("b-alive"), views(idle=False))

    async def only_one_lives() -> bool:
        return len((await table.pools())["smollm2"].nodes) == 1

    await eventually(only_one_lives)
    assert (await grant(table)).node_id == "b-alive"
    assert await acquire(table) is NoSlot.BUSY


async def test_acquire_itself_finds_a_node_dead(table: LeaseTable, mortal: LeaseTable, redis: Redis) -> None:
    await mortal.register(node(), views())
    seconds, micros = await redis.time()
    overdue = seconds * 1_000 + micros // 1_000 + 50

    async def time_is_over() -> bool:
        seconds, micros = await redis.time()
        return seconds * 1_000 + micros // 1_000 > overdue

    await eventually(time_is_over)
    assert await acquire(table) is NoSlot.UNKNOWN_POOL
    assert await redis.keys("*smollm2*") == await redis.keys("*:epoch")


async def test_a_node_that_was_frozen_comes_back_with_fresh_epochs(table: LeaseTable, mortal: LeaseTable) -> None:
    await table.register(node(), views())
    held = await grant(table)
    await mortal.register(node(), views())

    async def gone() -> bool:
        return not await table.pools()

    await eventually(gone)
    await table.register(node(), views())
    assert not await release(table, held)
    assert (await grant(table)).epoch > held.epoch


async def test_an_emptied_redis_is_restored_by_one_heartbeat(table: LeaseTable, redis: Redis) -> None:
    await table.register(node(slots=2), views(slots=2))
    served = await grant(table)
    unseen = await grant(table)
    await redis.flushall()
    assert await acquire(table) is NoSlot.UNKNOWN_POOL

    said = [
        SlotView(slot=served.slot, floor=served.epoch, in_use=served.epoch, idle=False),
        SlotView(slot=unseen.slot, floor=0, in_use=None, idle=False),
    ]
    await table.register(node(slots=2), said)

    assert (await table.pools())["smollm2"].free_slots == 1
    again = await grant(table)
    assert again.slot == unseen.slot
    assert again.epoch > unseen.epoch, "a grant that the daemon never saw must not be repeated"
    assert not await release(table, unseen)
    assert await release(table, served)


async def test_a_redis_that_restarts_empty_is_restored(own_server: ValkeyProcess) -> None:
    own_server.start()
    async with LeaseTable(own_server.url, timeout_s=5) as table:
        await table.register(node(), views())
        before = await grant(table)
        own_server.stop()
        own_server.start()
        (state,) = await table.register(node(), views(floor=before.epoch))
        assert not state.leased
        assert (await grant(table)).epoch > before.epoch


async def test_a_table_restored_from_an_old_snapshot_does_not_repeat_epochs(table: LeaseTable, redis: Redis) -> None:
    await table.register(node(), views())
    (key,) = await redis.keys("*:epoch")
    snapshot = await redis.get(key)
    assert snapshot is not None
    seen = await grant(table)
    await release(table, seen)
    unseen = await grant(table)
    await redis.set(key, snapshot)
    await table.register(node(), views(floor=seen.epoch))
    await release(table, unseen)
    assert (await grant(table)).epoch > unseen.epoch


async def test_without_its_epoch_counter_a_pool_grants_nothing_until_the_next_heartbeat(
    table: LeaseTable, redis: Redis
) -> None:
    await table.register(node(), views())
    held = await grant(table)
    await release(table, held)
    await redis.delete(*await redis.keys("*:epoch"))
    assert await acquire(table) is NoSlot.UNKNOWN_POOL
    await table.register(node(), views(floor=held.epoch))
    assert (await grant(table)).epoch > held.epoch


async def test_every_script_survives_script_flush(table: LeaseTable, redis: Redis) -> None:
    await table.register(node(), views())
    await redis.script_flush()
    await table.register(node(), views())
    await redis.script_flush()
    held = await grant(table)
    await redis.script_flush()
    assert await release(table, held)
    await redis.script_flush()
    assert set(await table.pools()) == {"smollm2"}
    await redis.script_flush()
    await table.unregister(node())
    assert await table.pools() == {}


@pytest.mark.parametrize("skew_s", [-3_600, 3_600])
async def test_a_callers_clock_decides_nothing(
    table: LeaseTable, hasty: LeaseTable, monkeypatch: pytest.MonkeyPatch, skew_s: int
) -> None:
    true_time = time.time
    await table.register(node(), views())
    held = await grant(table)

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: true_time() + skew_s)
        assert not await taken_back(table)
        assert await acquire(table) is NoSlot.BUSY
        await eventually(lambda: taken_back(hasty, floor=held.epoch))
        assert (await grant(table)).epoch > held.epoch


async def test_cancelled_callers_leave_neither_leases_nor_connections(
    table: LeaseTable, hasty: LeaseTable, redis: Redis
) -> None:
    daemon = node(slots=3)
    await table.register(daemon, views(slots=3))

    async def use_a_slot() -> None:
        granted = await table.acquire("smollm2", 1, secrets.token_hex(8), lease_ms=50)
        if isinstance(granted, Grant):
            await release(table, granted)

    chance = random.Random(1)
    for _ in range(300):
        tasks = [asyncio.create_task(use_a_slot()) for _ in range(3)]
        await asyncio.wait(tasks, timeout=chance.uniform(0, 0.002))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def all_free() -> bool:
        states = await table.register(daemon, views(slots=3))
        return not any(state.leased for state in states)

    await eventually(all_free)
    held = await asyncio.gather(*(grant(table) for _ in range(3)))
    assert await asyncio.gather(*(release(table, one) for one in held)) == [True] * 3
    assert len(await redis.client_list()) <= 40
