"""The engine's thread and the memory it reads."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decode_daemon.daemon import stopped
from decode_daemon.engine.protocol import (
    DecodeParams,
    EngineLostError,
    SamplingParams,
    Step,
)
from decode_daemon.memory import LandingMemory
from decode_daemon.runner import EngineRunner, Timings
from decode_daemon.slots import Landed, LandingSlot, Writer
from handoff.messages import Sent
from process.errors import LostError
from process.signals import StopSignal
from tests.kit.handoff import LANDING_BYTES, LAYOUT, claim_of, final_of
from tests.kit.streaming import TOKENS, Memory, ScriptedEngine, counting


async def landing() -> tuple[Landed, torch.Tensor]:
    """Return a prompt that has landed, and the memory it is in."""
    memory: Any = Memory()
    slot = LandingSlot(0, LandingMemory(memory, LANDING_BYTES), lambda *_: None)
    held = slot.reserve("h", 1)
    slot.begin(Writer(b"w", 0, 1, LAYOUT, TOKENS, engine="engine"), "h", 1, 0.0)
    slot.sent(b"w", Sent("h", 1, TOKENS, LAYOUT.blocks_for(TOKENS), LAYOUT.bytes_for(TOKENS)), 0.0)
    slot.final(final_of(claim_of("h", 1), TOKENS), 0.0)
    landed = await held.landed
    return landed, slot.memory.view(landed.bytes)


async def test_the_runner_waits_for_its_thread_however_often_it_is_cancelled() -> None:
    inside, may_go = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert may_go.wait(5)

    landed, memory = await landing()
    runner = EngineRunner(ScriptedEngine(counting(1), ready=wait), Timings(lambda _: None, lambda *_: None))

    async def read() -> list[Step]:
        params = DecodeParams(SamplingParams(0.0), 5, frozenset())
        return [step async for step in runner.run(landed, memory, params)]

    reading = asyncio.create_task(read())
    assert await asyncio.to_thread(inside.wait, 5)
    for _ in range(3):
        reading.cancel()
        done, _ = await asyncio.wait([reading], timeout=0.05)
        assert not done
    assert not runner.idle
    may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reading, 1)
    assert runner.idle
    runner.close()


async def test_a_daemon_ends_when_its_engine_can_do_nothing_any_more() -> None:
    def script(_: object) -> Iterator[Step]:
        yield Step((0,), None)
        raise EngineLostError("rank 1 is lost. Restart the daemon")

    landed, memory = await landing()
    runner = EngineRunner(ScriptedEngine(script), Timings(lambda _: None, lambda *_: None))
    async with StopSignal() as stop:
        ending = asyncio.create_task(stopped(stop, runner))
        steps = runner.run(landed, memory, DecodeParams(SamplingParams(0.0), 5, frozenset()))
        assert (await anext(steps)).ids == (0,)
        assert not ending.done()
        with pytest.raises(EngineLostError):
            await anext(steps)
        with pytest.raises(LostError, match="rank 1 is lost"):
            await asyncio.wait_for(ending, 1)
    runner.close()
