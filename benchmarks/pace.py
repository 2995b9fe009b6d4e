"""A steady pace for open loops: a process of its own says when each call is due.

The timers of an event loop are a millisecond coarse, which is as long as what is timed here.
"""

import asyncio
import multiprocessing
import signal
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from process.errors import ProcessError

_DUE = struct.Struct("q")
_LEAD_NS = 10_000_000
_SPARE_S = 30.0


class Pace:
    """Made by `pacing`."""

    def __init__(self, ticks: Connection) -> None:
        self._ticks = ticks

    async def run(self, work: Callable[[int], Awaitable[None]], *, workers: int, per_second: float, count: int) -> None:
        """Call `work` with the time at which it was due (time.monotonic_ns), `count` times at a steady rate.

        The workers take turns. One that is late delays none of the others, and its own next call is as late as it
        makes it: whoever times from when a call was due sees the whole wait.

        Raises:
            TimeoutError: the calls take far longer than the rate allows.
            ProcessError: the process that keeps the time has ended.
        """
        loop = asyncio.get_running_loop()
        queues: list[asyncio.Queue[int | None]] = [asyncio.Queue() for _ in range(workers)]
        received = 0

        def receive() -> None:
            nonlocal received
            try:
                (due,) = _DUE.unpack(self._ticks.recv_bytes())
            except (EOFError, OSError):
                loop.remove_reader(self._ticks.fileno())
                for queue in queues:
                    queue.put_nowait(None)
                return
            queues[received % workers].put_nowait(due)
            received += 1

        async def worker(number: int) -> None:
            for _ in range(number, count, workers):
                due = await queues[number].get()
                if due is None:
                    raise ProcessError("the process that keeps the pace is gone: measure again")
                await work(due)

        loop.add_reader(self._ticks.fileno(), receive)
        try:
            self._ticks.send((count, round(1e9 / per_second)))
            async with asyncio.timeout(count / per_second + _SPARE_S):
                await together(worker(number) for number in range(workers))
        finally:
            loop.remove_reader(self._ticks.fileno())


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once. The first that fails ends the others, and its error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


@contextmanager
def pacing() -> Iterator[Pace]:
    """Start the process that keeps the time."""
    # Not forked: an event loop runs here.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_tick, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Pace(ours)
    finally:
        process.kill()
        process.join()
        ours.close()


def _tick(out: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    while True:
        try:
            count, interval_ns = out.recv()
        except EOFError:
            return
        first = time.monotonic_ns() + _LEAD_NS
        for due in range(first, first + count * interval_ns, interval_ns):
            time.sleep(max(0, due - time.monotonic_ns()) / 1e9)
            out.send_bytes(_DUE.pack(due))
