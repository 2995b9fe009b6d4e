"""Redis away, frozen, locked or refusing: one error, in time, that says what to do and keeps the password."""

import socket
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from leases import LeasesUnavailable, LeaseTable
from tests.kit.valkey import ValkeyProcess, acquire, grant, node, views


async def test_every_call_says_so_when_redis_is_away(own_server: ValkeyProcess) -> None:
    async with LeaseTable(own_server.url) as table:
        for call in (
            table.ping(),
            table.register(node(), views()),
            acquire(table),
            table.release("smollm2", "n1", 0, 1),
            table.unregister(node()),
            table.pools(),
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


async def test_a_redis_that_lets_no_one_write_is_unavailable(table: LeaseTable, redis: Redis) -> None:
    await redis.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(LeasesUnavailable, match="NOREPLICAS"):
            await table.register(node(), views())
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
            await table.register(node(), views())
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
