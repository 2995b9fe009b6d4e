"""`anchorleg bench leases`, on small tables: that it measures what it says, and leaves nothing behind."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.heartbeats import idle, record
from benchmarks.leases import measure
from benchmarks.pace import pacing
from benchmarks.report import goals
from leases import LeaseTable, Node
from process.errors import ProcessError
from tests.kit.valkey import ValkeyProcess

SIZES = (4, 60)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyProcess]:
    with ValkeyProcess(tmp_path) as process:
        yield process


def nodes(count: int) -> list[Node]:
    return [Node(f"n{number}", "m", "card-1", f"n{number}:1", f"n{number}", 2, 1_000, 2) for number in range(count)]


async def test_all_goals_are_measured_on_a_server_of_its_own() -> None:
    measures = {measure.name: measure for measure in await measure(rounds=1, seconds=0.1, sizes=SIZES)}
    assert goals("leases").keys() <= measures.keys()
    assert all(measure.value > 0 for measure in measures.values())
    assert "46 clients stand in the queue" in measures["pairs_50_at_4_per_second"].detail
    # One a second of each of the 30 daemons, more or less in so short a turn.
    assert 10 <= measures["heartbeats_per_second"].value <= 90


async def test_a_server_that_was_lent_is_empty_afterwards(server: ValkeyProcess) -> None:
    await measure(redis_url=server.url, rounds=1, seconds=0.05, sizes=SIZES)
    async with Redis.from_url(server.url) as redis:
        assert await redis.keys() == []


async def test_a_server_with_leases_is_refused_and_left_alone(server: ValkeyProcess) -> None:
    async with LeaseTable(server.url, ttl_ms=60_000) as table:
        (node,) = nodes(1)
        await table.register(node, *idle(node))
        before = await table.inspect()
        done = await asyncio.to_thread(bench_leases, "--redis-url", server.url)
        assert done.returncode == 2
        assert done.stderr.startswith(f"anchorleg: the server at {server.socket} holds anchorleg:leases:")
        assert await table.inspect() == before


def test_a_server_that_does_not_answer_is_told_in_one_line() -> None:
    done = bench_leases("--redis-url", "unix:///nowhere/valkey.sock")
    assert done.returncode == 2
    assert done.stderr.startswith("anchorleg: lease table: ping at /nowhere/valkey.sock failed")
    assert "Traceback" not in done.stderr


async def test_recorded_heartbeats_are_the_nodes_own(server: ValkeyProcess) -> None:
    fleet = nodes(3)
    recording = await record(server.url, fleet, ttl_ms=60_000)
    async with Redis.from_url(server.url) as redis, LeaseTable(server.url) as table:
        await redis.flushall()
        reader, writer = await asyncio.open_unix_connection(str(server.socket))
        writer.write(recording.opening + b"".join(recording.beats[1:]) + b"*2\r\n$4\r\nECHO\r\n$3\r\nend\r\n")
        async with asyncio.timeout(5):
            await reader.readuntil(b"$3\r\nend\r\n")
        writer.close()
        await writer.wait_closed()
        pool = (await table.inspect())["m"]
        assert [report.node for report in pool.nodes] == fleet


async def test_a_call_is_timed_from_when_it_was_due() -> None:
    late_ms: list[float] = []

    async def work(due: int) -> None:
        late_ms.append((time.monotonic_ns() - due) / 1e6)
        if len(late_ms) == 1:
            time.sleep(0.1)  # noqa: ASYNC251 - the loop itself is what is held up

    with pacing() as pace:
        await pace.run(work, workers=2, per_second=100, count=4)
    assert late_ms[1] >= 80, "due 10 ms after the first, and started when that was over"


async def test_without_its_timekeeper_a_loop_ends_at_once() -> None:
    async def work(due: int) -> None:
        (keeper,) = multiprocessing.active_children()
        keeper.kill()
        keeper.join()

    with pacing() as pace, pytest.raises(ProcessError, match="keeps the pace is gone"):
        async with asyncio.timeout(10):
            await pace.run(work, workers=2, per_second=10, count=100)


def bench_leases(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cli.main", "bench", "leases", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
