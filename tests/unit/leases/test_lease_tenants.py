"""One tenant takes no more of a pool than it may, no ending of a lease or a wait changes that, and others do not notice."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from leases import Denied, Grant, LeaseTable, NoSlot, Tenant
from tests.kit.valkey import (
    acquire,
    eventually,
    grant,
    key_names,
    node,
    queued,
    refusal,
    register,
    release,
)

ACME = Tenant("acme", max_leases=2, max_waiting=2)
DAEMON = node(slots=4)


async def test_a_tenant_gets_as_many_slots_as_it_may(table: LeaseTable) -> None:
    await register(table, DAEMON)
    for _ in range(2):
        await grant(table, tenant=ACME)
    assert await refusal(table, tenant=ACME) is NoSlot.TENANT_LIMIT
    await grant(table, tenant=Tenant("other", max_leases=2))
    await grant(table)


async def test_a_tenant_may_wait_with_as_many_wishes_as_it_may(table: LeaseTable) -> None:
    await register(table, node())
    await grant(table)
    waiters = []
    for place in (1, 2):
        waiters.append(asyncio.create_task(acquire(table, tenant=ACME, wait_ms=60_000)))
        await queued(table, place)
    assert await refusal(table, tenant=ACME, wait_ms=60_000) is NoSlot.TENANT_LIMIT
    waiters.append(asyncio.create_task(acquire(table, tenant=Tenant("other", max_waiting=1), wait_ms=60_000)))
    await queued(table, 3)
    await _cancelled(waiters)


async def test_no_limit_is_no_limit(table: LeaseTable) -> None:
    await register(table, DAEMON)
    for _ in range(4):
        await grant(table, tenant=Tenant("acme"))
    assert await refusal(table, tenant=Tenant("acme")) is NoSlot.BUSY


async def test_tenants_of_similar_names_are_counted_apart(table: LeaseTable) -> None:
    names = ("a", "a/l", "a/", "a:", "a0", "A", "a b", "ä")
    await register(table, node(slots=len(names)))
    for name in names:
        await grant(table, tenant=Tenant(name, max_leases=1))
    for name in names:
        assert await refusal(table, tenant=Tenant(name, max_leases=1)) is NoSlot.TENANT_LIMIT


async def test_a_tenant_at_its_limit_waits_for_a_slot_of_its_own_and_blocks_nobody(table: LeaseTable) -> None:
    await register(table, node(slots=3))
    own = [await grant(table, tenant=ACME) for _ in range(2)]
    other = await grant(table)
    at_its_limit = asyncio.create_task(acquire(table, tenant=ACME, wait_ms=60_000))
    await queued(table, 1)
    behind = asyncio.create_task(acquire(table, wait_ms=60_000))
    await queued(table, 2)

    await release(table, other)
    assert isinstance(await asyncio.wait_for(behind, 5), Grant)
    await release(table, own[0])
    served = await asyncio.wait_for(at_its_limit, 5)
    assert isinstance(served, Grant)
    assert served.slot == own[0].slot


async def test_a_tenant_at_its_limit_waits_even_while_slots_are_free(table: LeaseTable) -> None:
    await register(table, DAEMON)
    own = [await grant(table, tenant=ACME) for _ in range(2)]
    waiter = asyncio.create_task(acquire(table, tenant=ACME, wait_ms=60_000))
    await queued(table, 1)
    await grant(table)
    assert not waiter.done()
    await table.give_back(own[1])
    assert isinstance(await asyncio.wait_for(waiter, 5), Grant)


async def test_a_wait_at_the_limit_ends_at_its_time(table: LeaseTable) -> None:
    await register(table, DAEMON)
    for _ in range(2):
        await grant(table, tenant=ACME)
    assert await refusal(table, tenant=ACME, wait_ms=100) is NoSlot.TENANT_LIMIT
    await queued(table, 0)


async def test_the_estimate_at_the_limit_is_of_the_tenants_own_leases(table: LeaseTable) -> None:
    await register(table, DAEMON)
    await release(table, await grant(table))
    for _ in range(2):
        await grant(table, tenant=ACME)
    denied = await acquire(table, tenant=ACME)
    assert isinstance(denied, Denied)
    mean_ms = (await table.inspect())["smollm2"].mean_ms
    assert mean_ms is not None
    assert denied.retry_after_ms == -(-mean_ms // ACME.max_leases)


async def _released(table: LeaseTable, hasty: LeaseTable, held: list[Grant]) -> None:
    for one in held:
        assert await release(table, one)


async def _given_back(table: LeaseTable, hasty: LeaseTable, held: list[Grant]) -> None:
    for one in held:
        assert await table.give_back(one)


async def _taken_back(table: LeaseTable, hasty: LeaseTable, held: list[Grant]) -> None:
    async def all_free() -> bool:
        return not any(state.leased for state in await register(hasty, DAEMON))

    await eventually(all_free)


async def _node_restarted(table: LeaseTable, hasty: LeaseTable, held: list[Grant]) -> None:
    await table.unregister(DAEMON)
    await register(table, DAEMON)


async def _overruled(table: LeaseTable, hasty: LeaseTable, held: list[Grant]) -> None:
    """The daemon serves an epoch that the table does not know, on all its slots."""
    epoch = max(one.epoch for one in held) + 1
    await register(table, DAEMON, floor=epoch, in_use=epoch)
    await register(table, DAEMON, floor=epoch)


async def _used_and_release_lost(table: LeaseTable, hasty: LeaseTable, held: list[Grant]) -> None:
    for one in held:
        await register(table, DAEMON, floor=one.epoch, in_use=one.epoch)
    await register(table, DAEMON, floor=max(one.epoch for one in held))


@pytest.mark.parametrize("ended", [_released, _given_back, _taken_back, _node_restarted, _overruled, _used_and_release_lost])
async def test_however_its_leases_end_a_tenant_may_have_as_many_again(
    table: LeaseTable, hasty: LeaseTable, redis: Redis, ended: Callable[[LeaseTable, LeaseTable, list[Grant]], Awaitable[None]]
) -> None:
    await register(table, DAEMON)
    for _ in range(3):
        held = [await grant(table, tenant=ACME) for _ in range(2)]
        assert await refusal(table, tenant=ACME) is NoSlot.TENANT_LIMIT
        await ended(table, hasty, held)
        assert "tenants" not in await key_names(redis)


async def test_a_dead_daemons_leases_are_not_counted(table: LeaseTable, mortal: LeaseTable) -> None:
    await register(mortal, DAEMON)
    for _ in range(2):
        await grant(table, tenant=ACME)
    await register(table, node("alive"))

    async def served() -> bool:
        return isinstance(await acquire(table, tenant=ACME), Grant)

    await eventually(served)


async def test_however_its_waits_end_a_tenant_may_wait_as_often_again(table: LeaseTable, redis: Redis) -> None:
    await register(table, node())
    for _ in range(3):
        held = await grant(table)
        timed_out = [acquire(table, tenant=ACME, wait_ms=50) for _ in range(2)]
        assert [answer.reason for answer in await asyncio.gather(*timed_out) if isinstance(answer, Denied)] == [NoSlot.BUSY] * 2

        waiters = [asyncio.create_task(acquire(table, tenant=ACME, wait_ms=60_000)) for _ in range(2)]
        await queued(table, 2)
        await _cancelled(waiters)
        await queued(table, 0)

        served = asyncio.create_task(acquire(table, tenant=ACME, wait_ms=60_000))
        await queued(table, 1)
        await release(table, held)
        held_by_tenant = await asyncio.wait_for(served, 5)
        assert isinstance(held_by_tenant, Grant)
        await release(table, held_by_tenant)
        assert "tenants" not in await key_names(redis)


async def _cancelled(waiters: list[asyncio.Task[Grant | Denied]]) -> None:
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
