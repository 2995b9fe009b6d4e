"""A rank that is lost or hangs, at its start, while it computes and while nobody asks: it is named, and everything ends."""

import asyncio
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from decode_daemon.engine.cuda.others import Others
from decode_daemon.engine.loop import LlamaEngine
from decode_daemon.engine.protocol import EngineError, EngineLostError
from decode_daemon.runner import EngineRunner, Timings
from tests.kit.ranks import INTERPRETED, children, interpreting, two_ranks
from tests.unit.engine.test_engine_cuda_step import CONTEXT, PLAIN, random_weights

pytest.importorskip("triton")

_BOUND_S = 60.0
_NOTICED_S = 3.0
SMALL = replace(PLAIN, layers=1, heads=2, kv_heads=2)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    with interpreting() as process:
        yield process


def test_a_rank_that_dies_is_named_and_everything_ends(interpreter: Executor) -> None:
    interpreter.submit(check_death).result(_BOUND_S)


@pytest.mark.parametrize("steps", [0, 2], ids=["unused", "with KV that it wrote"])
def test_a_rank_that_dies_while_the_daemon_is_idle_is_noticed_within_seconds(interpreter: Executor, steps: int) -> None:
    interpreter.submit(check_idle, steps).result(_BOUND_S)


def test_what_goes_wrong_on_another_rank_is_told(interpreter: Executor) -> None:
    interpreter.submit(check_words).result(_BOUND_S)


def test_a_rank_that_hangs_at_its_start_is_named_with_the_way_out(interpreter: Executor) -> None:
    interpreter.submit(check_hung_start).result(_BOUND_S)


def test_what_a_process_does_not_read_is_told_it_for_so_long_only() -> None:
    before, others = children(), Others()
    others.start(1, sleep)
    try:
        with pytest.raises(TimeoutError, match="has not read what it was told for 0 s"):
            tell_without_end(others)
    finally:
        others.end(b"farewell", 0.0)  # for which there is no room
    assert children() == before


def test_other_ranks_end_with_the_first() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in INTERPRETED.items():
            patch.setenv(name, value)
        first = context.Process(target=hold_until_killed, args=(theirs,))
        first.start()
    try:
        assert ours.poll(_BOUND_S)
        (other,) = ours.recv()
    finally:
        first.kill()
        first.join()
    until_gone([other])


def check_death() -> None:
    with two_ranks(SMALL, random_weights(SMALL), CONTEXT) as model:
        greedy(model, 1)
        (other,) = children()
        os.kill(other, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineLostError, match=re.escape(killed(other) + ". Restart the daemon")) as raised:
            greedy(model, CONTEXT)
        assert time.monotonic() - began < 10
        assert children() == []
        with pytest.raises(EngineError) as again:
            _ = model.cache
        assert again.value is raised.value


def check_idle(steps: int) -> None:
    with two_ranks(SMALL, random_weights(SMALL), CONTEXT) as model:
        greedy(model, steps)
        (other,) = children()
        error = asyncio.run(noticed(LlamaEngine(model), lambda: os.kill(other, signal.SIGKILL)))
        assert killed(other) in str(error)
        assert children() == []


async def noticed(engine: LlamaEngine, lose: Callable[[], None]) -> EngineLostError:
    """Return what an idle runner says of an engine that is lost; it has looked at the engine before, and found it there."""
    runner = EngineRunner(engine, Timings(lambda _: None, lambda *_: None))
    waiting = asyncio.create_task(runner.lost())
    try:
        await runner._look()
        assert not waiting.done()
        lose()
        return await asyncio.wait_for(waiting, _NOTICED_S)
    finally:
        runner.close()


def check_words() -> None:
    with two_ranks(SMALL, random_weights(SMALL), CONTEXT) as model:
        model._leader._others.tell(1, b"no message", 1.0)
        with pytest.raises(EngineLostError, match=r"rank 1: error: unpack requires a buffer of 88 bytes"):
            greedy(model, CONTEXT)
        assert children() == []
    with two_ranks(SMALL, random_weights(SMALL), CONTEXT) as model:  # another one can take its place
        assert greedy(model, 1) is not None


class HungFromTheStart(Others):
    def start(self, rank: int, live: Callable[..., None], *wanted: Any) -> None:
        super().start(rank, live, *wanted)
        (child,) = children()
        os.kill(child, signal.SIGSTOP)


def check_hung_start() -> None:
    from decode_daemon.engine.cuda import leader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "START_S", 1.0)
        patch.setattr(leader, "Others", HungFromTheStart)
        with pytest.raises(EngineError, match=r"of rank 1 the process has not begun within 1 s\. .* start again") as raised:
            two_ranks(SMALL, random_weights(SMALL), CONTEXT).__enter__()
    assert not isinstance(raised.value, EngineLostError)
    assert children() == []


def killed(pid: int) -> str:
    return f"rank 1: its process (pid {pid}) ended with exit code -9"


def greedy(model: Any, steps: int) -> int | None:
    """Return the token after so many steps from the first position on."""
    token: int | None = 1
    for position in range(steps):
        token = model.greedy(token, position)
    return token


def tell_without_end(others: Others) -> None:
    while True:
        others.tell(1, bytes(200), 0.2)


def sleep(rank: int, pipe: Connection) -> None:
    signal.pause()


def hold_until_killed(pipe: Connection) -> None:
    with two_ranks(SMALL, random_weights(SMALL), CONTEXT):
        pipe.send(children())
        signal.pause()


def until_gone(pids: list[int]) -> None:
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(there, timeout=10)
    assert alive == []
