"""Redis away, frozen, locked or refusing: one error, in time, that says what to do and keeps the password."""

import asyncio
import gc
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from leases import Grant, LeasesUnavailable, LeaseTable, NoSlot
from tests.kit.valkey import ValkeyProcess, Wire, acquire, eventually, grant, node, queued, register


async def test_every_call_says_so_when_redis_is_away(own_server: ValkeyProcess) -> None:
    async with LeaseTable(own_server.url) as table:
        for call in (
            table.ping(),
            register(table, node()),
            acquire(table),
            table.release("smollm2", "n1", 0, 1),
            table.unregister(node()),
            acquire(table, wait_ms=60_000),
            table.pools(),
            table.inspect(),
        ):
            with pytest.raises(LeasesUnavailable, match=str(own_server.socket)):
                await call


async def test_the_error_names_operation_address_and_way_out() -> None:
    async with LeaseTable("redis://user:geheim@127.0.0.1:1/0") as table:
        with pytest.raises(LeasesUnavailable) as caught:
            await table.ping()
    message = str(caught.value)
    assert "ping at 127.0.0.1:1 failed" in message
    assert "check that Redis runs there" in message
    assert "geheim" not in message


async def test_a_frozen_redis_costs_no_more_than_the_timeout(own_server: ValkeyProcess) -> None:
    own_server.start()
    async with LeaseTable(own_server.url, timeout_s=0.3) as table:
        await table.ping()
        own_server.freeze()
        started = time.monotonic()
        with pytest.raises(LeasesUnavailable):
            await acquire(table)
        assert time.monotonic() - started < 1
        own_server.thaw()
        await table.ping()


async def test_a_redis_that_is_killed_under_load_is_unavailable_and_nothing_worse(own_server: ValkeyProcess) -> None:
    own_server.start()
    complaints: list[str] = []

    def complain(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A stream of asyncio's that broke while it was written to leaves one of these behind; the line's own are RedisErrors.
        if not isinstance(context.get("exception"), ConnectionError):
            complaints.append(str(context))

    asyncio.get_running_loop().set_exception_handler(complain)
    async with LeaseTable(own_server.url, ttl_ms=60_000, timeout_s=2) as table:
        calls = 0

        async def use_slots(until: asyncio.Event) -> None:
            nonlocal calls
            while not until.is_set():
                with suppress(LeasesUnavailable):
                    granted = await acquire(table)
                    calls += 1
                    if isinstance(granted, Grant):
                        await table.give_back(granted)

        stopped = asyncio.Event()
        users = [asyncio.create_task(use_slots(stopped)) for _ in range(16)]
        for _ in range(10):
            await register(table, node(slots=8))
            before = calls

            async def in_use(before: int = before) -> bool:
                return calls > before + 50

            await eventually(in_use)
            own_server.stop()
            own_server.start()
        stopped.set()
        await asyncio.gather(*users)
        gc.collect()
    assert not complaints


async def test_a_caller_cancelled_while_redis_takes_nothing_harms_no_other(
    server: ValkeyProcess, table: LeaseTable, tmp_path: Path
) -> None:
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(str(context)))
    await register(table, node(slots=41))
    long_wish = tuple(f"node-{number}" for number in range(8_000))  # 40 of them are more than the buffers on the way hold
    async with Wire(server, tmp_path / "wire.sock") as wire, LeaseTable(wire.url, timeout_s=5) as gateway:
        await gateway.ping()
        wire.hush()
        calls = [asyncio.create_task(acquire(gateway, avoid=long_wish)) for _ in range(40)]
        await table.ping()  # by now they have been written as far as they could be
        calls[-1].cancel()
        last = asyncio.create_task(acquire(gateway))
        await table.ping()
        wire.mend()
        slots = {(await call).slot for call in [*calls[:-1], last]}  # type: ignore[union-attr]
        with pytest.raises(asyncio.CancelledError):
            await calls[-1]
    assert len(slots) == 40
    gc.collect()
    assert not complaints


async def test_a_waiter_learns_that_redis_went_away(own_server: ValkeyProcess) -> None:
    own_server.start()
    async with LeaseTable(own_server.url, timeout_s=0.3) as table:
        await register(table, node())
        await grant(table)
        waiters = [asyncio.create_task(acquire(table, wait_ms=60_000)) for _ in range(3)]
        await queued(table, 3)
        own_server.stop()
        started = time.monotonic()
        for waiter in waiters:
            with pytest.raises(LeasesUnavailable, match="acquire"):
                await waiter
        assert time.monotonic() - started < 1
        started = time.monotonic()
    assert time.monotonic() - started < 1, "closing waits for what the waiters left behind, and no longer"


async def test_a_waiter_does_not_outwait_a_restart(own_server: ValkeyProcess) -> None:
    own_server.start()
    async with LeaseTable(own_server.url, timeout_s=2) as table:
        await register(table, node())
        await grant(table)
        waiter = asyncio.create_task(acquire(table, wait_ms=60_000))
        await queued(table, 1)
        own_server.stop()
        own_server.start()
        await register(table, node())
        answer = await asyncio.wait_for(waiter, 2)
        # It asked before the daemon was back, or after, when the slot was free: nobody had used it.
        assert isinstance(answer, Grant) or answer.reason is NoSlot.UNKNOWN_POOL


async def test_a_wait_through_a_silent_network_ends_and_its_place_goes_to_the_next(
    server: ValkeyProcess, table: LeaseTable, tmp_path: Path
) -> None:
    await register(table, node())
    held = await grant(table)
    async with Wire(server, tmp_path / "wire.sock") as wire, LeaseTable(wire.url, timeout_s=0.2) as cut_off:
        first = asyncio.create_task(acquire(cut_off, wait_ms=60_000))
        await queued(table, 1)
        second = asyncio.create_task(acquire(table, wait_ms=60_000))
        await queued(table, 2)
        wire.hush()
        await table.give_back(held)
        assert isinstance(await asyncio.wait_for(second, 3), Grant)
        with pytest.raises(LeasesUnavailable):
            await asyncio.wait_for(first, 1)


async def test_a_redis_that_lets_no_one_write_is_unavailable(table: LeaseTable, redis: Redis) -> None:
    await redis.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(LeasesUnavailable, match="NOREPLICAS"):
            await register(table, node())
    finally:
        await redis.config_set("min-replicas-to-write", 0)


async def test_a_restart_between_two_calls_is_not_noticed(own_server: ValkeyProcess) -> None:
    own_server.start()
    async with LeaseTable(own_server.url, timeout_s=5) as table:
        await table.ping()
        own_server.stop()
        own_server.start()
        await table.ping()


async def test_user_and_password_come_from_the_url(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = ValkeyProcess(
        tmp_path, "--port", str(port), "--user", "default", "off", "--user", "lane", "on", ">s3cret", "~*", "+@all"
    )
    try:
        server.start()
        async with LeaseTable(f"redis://lane:s3cret@127.0.0.1:{port}/0", timeout_s=5) as table:
            await register(table, node())
            await grant(table)
        async with LeaseTable(f"unix://lane:s3cret@{server.socket}", timeout_s=5) as table:
            assert set(await table.pools()) == {"smollm2"}
        async with LeaseTable(f"redis://lane:wrong@127.0.0.1:{port}/0", timeout_s=5) as table:
            with pytest.raises(LeasesUnavailable, match="password"):
                await table.ping()
    finally:
        server.stop()


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        LeaseTable("http://127.0.0.1:6379")


async def test_closing_lets_calls_end_and_leaves_no_connection(server: ValkeyProcess, redis: Redis, tmp_path: Path) -> None:
    before = len(await redis.client_list())
    async with Wire(server, tmp_path / "wire.sock") as wire:
        table = LeaseTable(wire.url, timeout_s=5)
        await table.ping()
        wire.keep_answers()
        call = asyncio.create_task(table.ping())
        await redis.ping()  # by now the call waits for its answer
        closing = asyncio.create_task(table.aclose())
        await redis.ping()
        assert not closing.done()
        with pytest.raises(LeasesUnavailable, match="after aclose"):
            await table.ping()
        wire.mend()
        await call
        await closing

        async def as_before() -> bool:
            return len(await redis.client_list()) == before

        await eventually(as_before)


async def test_who_waits_for_a_slot_of_a_table_that_closes_is_told_at_once(table: LeaseTable, server: ValkeyProcess) -> None:
    await register(table, node())
    await grant(table)
    gateway = LeaseTable(server.url, waiter_ttl_ms=60_000, timeout_s=5)
    waiter = asyncio.create_task(acquire(gateway, wait_ms=60_000))
    await queued(table, 1)
    await gateway.aclose()
    with pytest.raises(LeasesUnavailable, match="after aclose"):
        await asyncio.wait_for(waiter, 1)
