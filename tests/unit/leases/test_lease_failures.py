"""Known ways in which lease tables fail (crashes, restarts, stale holders, clocks), and that this one does not."""

import asyncio
import random
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from leases import Grant, LeasesUnavailable, LeaseTable, NodeStatus, NoSlot, SlotView, Tenant
from tests.kit.valkey import (
    ValkeyProcess,
    Wire,
    acquire,
    eventually,
    grant,
    key_names,
    node,
    refusal,
    register,
    release,
    wish,
)
from tests.kit.waiting import passed


async def taken_back(daemon: LeaseTable, floor: int = 0) -> bool:
    """One heartbeat of a daemon that has nothing in use; True when its slot is free after it."""
    (state,) = await register(daemon, node(), floor=floor)
    return not state.leased


async def test_a_stale_holder_cannot_free_the_slot_of_the_next(table: LeaseTable, hasty: LeaseTable) -> None:
    await register(hasty, node())
    first = await grant(table)
    await eventually(lambda: taken_back(hasty))
    second = await grant(table)

    assert not await release(table, first)

    assert await refusal(table) is NoSlot.BUSY
    assert second.epoch > first.epoch
    assert await release(table, second)


async def test_the_slot_of_a_crashed_gateway_is_free_after_the_landing_time(table: LeaseTable, hasty: LeaseTable) -> None:
    await register(hasty, node())
    held = await grant(table)
    (state,) = await register(table, node())
    assert state.leased, "the landing time is not over for a patient daemon"

    await eventually(lambda: taken_back(hasty))

    (state,) = await register(table, node())
    assert state.epoch > held.epoch
    assert (await table.pools())["smollm2"].free_slots == 1


async def test_a_lease_ends_at_its_own_time_where_that_is_shorter(table: LeaseTable) -> None:
    await register(table, node())
    await grant(table, lease_ms=30)
    await eventually(lambda: taken_back(table))


async def test_a_lease_in_use_outlives_every_time_limit(table: LeaseTable, hasty: LeaseTable) -> None:
    await register(hasty, node())
    held = await grant(table)
    started = time.monotonic()

    async def still_leased_later() -> bool:
        (state,) = await register(hasty, node(), floor=held.epoch, in_use=held.epoch)
        assert (state.epoch, state.leased) == (held.epoch, True)
        return time.monotonic() - started > 0.2

    await eventually(still_leased_later)
    assert await refusal(table) is NoSlot.BUSY


async def test_a_newer_lease_that_meets_a_slot_in_use_ends_and_the_slot_stays_with_its_user(
    table: LeaseTable, hasty: LeaseTable
) -> None:
    await register(hasty, node())
    serving = await grant(table)
    await release(table, serving)
    newer = await grant(table)

    async def user_is_back() -> bool:
        (state,) = await register(hasty, node(), floor=serving.epoch, in_use=serving.epoch)
        assert state.leased
        return state.epoch == serving.epoch

    await eventually(user_is_back)
    assert not await release(table, newer)
    assert await release(table, serving)


async def test_a_caller_that_lost_the_reply_asks_again_and_keeps_its_grant(
    server: ValkeyProcess, table: LeaseTable, tmp_path: Path
) -> None:
    await register(table, node())
    request = wish()
    async with Wire(server, tmp_path / "wire.sock") as wire, LeaseTable(wire.url, timeout_s=0.2) as gateway:
        await gateway.ping()
        wire.keep_answers()
        with pytest.raises(LeasesUnavailable):
            await gateway.acquire(request)
        wire.mend()
        held = await gateway.acquire(request)
        # Closing waited for whatever the failed call had left to do.
    assert isinstance(held, Grant)
    assert await refusal(table) is NoSlot.BUSY
    assert await release(table, held)


async def test_a_dead_node_is_never_granted(table: LeaseTable, mortal: LeaseTable) -> None:
    await register(mortal, node("a-dead", slots=2))
    await register(table, node("b-alive"), idle=False)

    async def only_one_lives() -> bool:
        return (await table.pools())["smollm2"].nodes == 1

    await eventually(only_one_lives)
    assert (await grant(table)).node_id == "b-alive"
    assert await refusal(table) is NoSlot.BUSY


async def test_acquire_itself_finds_a_node_dead(table: LeaseTable, mortal: LeaseTable, redis: Redis) -> None:
    await register(mortal, node())
    await passed(redis, mortal.ttl_ms, look=redis.ping)
    assert await refusal(table) is NoSlot.UNKNOWN_POOL
    assert await key_names(redis) == {"pool"}


async def test_behind_a_crowd_that_died_together_the_living_node_is_found(
    server: ValkeyProcess, table: LeaseTable, redis: Redis
) -> None:
    async with LeaseTable(server.url, ttl_ms=2_000, timeout_s=5) as crowd:
        await asyncio.gather(*(register(crowd, node(f"dead-{number}", capacity=100)) for number in range(350)))
        await register(table, node("living", capacity=1_000))
        held = await grant(table, tokens=1_000)
        nodes = (await table.pools())["smollm2"].nodes
        assert nodes == 351
        await passed(redis, crowd.ttl_ms, look=redis.ping)
        await table.give_back(held)
        # None of 350 dead ones that stand before it is granted, and no call clears them all.
        found = await asyncio.wait_for(grant(table, wait_ms=60_000), 10)
        assert found.node_id == "living"


async def test_a_node_that_was_frozen_comes_back_with_fresh_epochs(table: LeaseTable, mortal: LeaseTable) -> None:
    await register(table, node())
    held = await grant(table)
    await register(mortal, node())

    async def gone() -> bool:
        return not await table.pools()

    await eventually(gone)
    await register(table, node())
    assert not await release(table, held)
    assert (await grant(table)).epoch > held.epoch


async def test_an_emptied_redis_is_restored_by_one_heartbeat(table: LeaseTable, redis: Redis) -> None:
    await register(table, node(slots=2))
    served = await grant(table)
    unseen = await grant(table)
    await redis.flushall()
    assert await refusal(table) is NoSlot.UNKNOWN_POOL

    said = [
        SlotView(slot=served.slot, floor=served.epoch, in_use=served.epoch),
        SlotView(slot=unseen.slot, floor=0, in_use=None),
    ]
    await table.register(node(slots=2), NodeStatus(idle=False), said)

    assert (await table.pools())["smollm2"].free_slots == 1
    again = await grant(table)
    assert again.slot == unseen.slot
    assert again.epoch > unseen.epoch, "a grant that the daemon never saw must not be repeated"
    assert not await release(table, unseen)
    assert await release(table, served)


async def test_a_pool_that_ran_out_leaves_nothing_that_troubles_its_successor(
    table: LeaseTable, mortal: LeaseTable, redis: Redis
) -> None:
    await register(mortal, node("a-old"))
    await release(table, await grant(table))
    for key in map(str, await redis.keys("*smollm2*")):
        if await redis.pttl(key) > 0:  # the retention is over, and nobody has called since
            await redis.delete(key)

    await register(table, node("b-new"))

    assert (await grant(table)).node_id == "b-new"
    assert await refusal(table) is NoSlot.BUSY


async def test_a_redis_that_restarts_empty_is_restored(own_server: ValkeyProcess) -> None:
    own_server.start()
    async with LeaseTable(own_server.url, timeout_s=5) as table:
        await register(table, node())
        before = await grant(table)
        own_server.stop()
        own_server.start()
        (state,) = await register(table, node(), floor=before.epoch)
        assert not state.leased
        assert (await grant(table)).epoch > before.epoch


async def test_a_table_restored_from_an_old_snapshot_does_not_repeat_epochs(table: LeaseTable, redis: Redis) -> None:
    await register(table, node())
    (key,) = await redis.keys("*:pool")
    snapshot = await redis.hget(key, "epoch")
    assert snapshot is not None
    seen = await grant(table)
    await release(table, seen)
    unseen = await grant(table)
    await redis.hset(key, "epoch", snapshot)
    await register(table, node(), floor=seen.epoch)
    await release(table, unseen)
    assert (await grant(table)).epoch > unseen.epoch


async def test_without_its_epoch_counter_a_pool_grants_nothing_until_the_next_heartbeat(
    table: LeaseTable, redis: Redis
) -> None:
    await register(table, node())
    held = await grant(table)
    await release(table, held)
    await redis.delete(*await redis.keys("*:pool"))
    assert await refusal(table) is NoSlot.UNKNOWN_POOL
    await register(table, node(), floor=held.epoch)
    assert (await grant(table)).epoch > held.epoch


async def test_every_script_survives_script_flush(table: LeaseTable, redis: Redis) -> None:
    await register(table, node())
    await redis.script_flush()
    await register(table, node())
    await redis.script_flush()
    held = await grant(table)
    await redis.script_flush()
    assert await release(table, held)
    await redis.script_flush()
    assert await table.give_back(await grant(table))
    await redis.script_flush()
    assert set(await table.pools()) == {"smollm2"}
    await redis.script_flush()
    assert set(await table.inspect()) == {"smollm2"}
    await redis.script_flush()
    await table.unregister(node())
    assert await table.pools() == {}


@pytest.mark.parametrize("skew_s", [-3_600, 3_600])
async def test_a_callers_clock_decides_nothing(
    table: LeaseTable, hasty: LeaseTable, monkeypatch: pytest.MonkeyPatch, skew_s: int
) -> None:
    true_time = time.time
    await register(table, node())
    held = await grant(table)

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: true_time() + skew_s)
        assert not await taken_back(table)
        assert await refusal(table) is NoSlot.BUSY
        await eventually(lambda: taken_back(hasty, floor=held.epoch))
        assert (await grant(table)).epoch > held.epoch


@pytest.mark.parametrize("wait_ms", [0, 60_000])
async def test_callers_cancelled_at_any_time_leave_nothing(server: ValkeyProcess, redis: Redis, wait_ms: int) -> None:
    async with LeaseTable(server.url, ttl_ms=60_000, landing_ms=60_000, waiter_ttl_ms=60_000, timeout_s=5) as table:
        await register(table, node(slots=3))

        async def use_a_slot() -> None:
            granted = await acquire(table, wait_ms=wait_ms, tenant=Tenant("acme", max_leases=3))
            if isinstance(granted, Grant):
                await asyncio.shield(asyncio.create_task(table.give_back(granted)))

        chance = random.Random(1)
        for _ in range(250):
            tasks = [asyncio.create_task(use_a_slot()) for _ in range(4)]
            await asyncio.wait(tasks, timeout=chance.uniform(0, 0.003))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    # Closing the table waited for what was cancelled. No time of it is over, so nothing was taken back either.
    async with LeaseTable(server.url, timeout_s=5) as table:
        pool = (await table.pools())["smollm2"]
        assert (pool.free_slots, pool.leased_slots, pool.waiting) == (3, 0, 0)
    assert await key_names(redis) == {"nodes", "traits", "deadlines", "sizes", "ready", "free", "pool"}
    assert len(await redis.client_list()) <= 40
