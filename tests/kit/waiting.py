"""Wishes that stand in a pool's queue, as tasks of a test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from leases import Denied, Grant, LeaseTable
from tests.kit.valkey import acquire, eventually, queued

Waiting = asyncio.Task[Grant | Denied]


async def join(table: LeaseTable, place: int, *, wait_ms: int = 60_000, **options: Any) -> Waiting:
    """A wish that stands in the queue as number `place`, counted from 1."""
    task = asyncio.create_task(acquire(table, wait_ms=wait_ms, **options))
    await queued(table, place)
    return task


async def granted(task: Waiting, *, within_s: float = 5) -> Grant:
    answer = await asyncio.wait_for(task, within_s)
    assert isinstance(answer, Grant), answer
    return answer


async def passed(redis: Redis, ms: int, *, look: Callable[[], Awaitable[object]]) -> None:
    """Returns when so much time has passed on the server, where `look` was called again and again."""

    async def clock() -> int:
        seconds, micros = await redis.time()
        return int(seconds) * 1_000 + int(micros) // 1_000

    begun = await clock()

    async def over() -> bool:
        await look()
        return await clock() - begun > ms

    await eventually(over)


async def left(task: Waiting) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
