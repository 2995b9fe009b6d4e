from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from leases import LeaseTable
from tests.kit.valkey import ValkeyProcess, Wire


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    """Shared by all tests that do not stop it."""
    with ValkeyProcess(tmp_path_factory.mktemp("valkey")) as process:
        yield process


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ValkeyProcess]:
    """Not started yet; for one test to start, stop and freeze."""
    process = ValkeyProcess(tmp_path)
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture
async def redis(server: ValkeyProcess) -> AsyncIterator[Redis]:
    """The shared server, emptied, without the table in between."""
    async with Redis.from_url(server.url, decode_responses=True) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def table(server: ValkeyProcess, redis: Redis) -> AsyncIterator[LeaseTable]:
    """A table with times that no test reaches by accident."""
    async with LeaseTable(server.url, ttl_ms=60_000, landing_ms=60_000, timeout_s=5) as client:
        yield client


@pytest.fixture
async def hasty(server: ValkeyProcess, redis: Redis) -> AsyncIterator[LeaseTable]:
    """The same table for a daemon that takes a lease back when it went unused for 50 ms."""
    async with LeaseTable(server.url, ttl_ms=60_000, landing_ms=50, timeout_s=5) as client:
        yield client


@pytest.fixture
async def mortal(server: ValkeyProcess, redis: Redis) -> AsyncIterator[LeaseTable]:
    """The same table for a daemon that counts as dead 50 ms after a heartbeat."""
    async with LeaseTable(server.url, ttl_ms=50, landing_ms=60_000, timeout_s=5) as client:
        yield client


@pytest.fixture
async def quick(server: ValkeyProcess, redis: Redis) -> AsyncIterator[LeaseTable]:
    """A table where a waiter that has been silent for 200 ms counts as gone."""
    async with LeaseTable(server.url, ttl_ms=60_000, landing_ms=60_000, waiter_ttl_ms=200, timeout_s=5) as client:
        yield client


@pytest.fixture
async def patient(server: ValkeyProcess, redis: Redis) -> AsyncIterator[LeaseTable]:
    """A table whose waiters look for themselves only every 12 s, so that a slot found before was told of."""
    async with LeaseTable(server.url, ttl_ms=60_000, landing_ms=60_000, waiter_ttl_ms=60_000, timeout_s=5) as client:
        yield client


@pytest.fixture
async def wire(server: ValkeyProcess, tmp_path: Path) -> AsyncIterator[Wire]:
    async with Wire(server, tmp_path / "wire.sock") as line:
        yield line
