"""The engine's thread: one request at a time, its steps published to the event loop as they come.

Conversion and decoding run in one dedicated thread, so that the loop stays free for sockets; a cancelled request frees the
engine after the step it is in.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from decode_daemon.convert import convert
from decode_daemon.engine.protocol import DecodeParams, Engine, EngineLostError, Step
from decode_daemon.slots import Landed

_LOOK_S = 1.0  # between two looks at an idle engine, each of microseconds


@dataclass(frozen=True, slots=True)
class Timings:
    """Called from the engine's thread, in seconds."""

    converted: Callable[[float], None]
    step: Callable[[float, int], None]  # duration, tokens


class EngineRunner:
    """Owns the engine's thread and the queue of requests in front of it (first come, first served)."""

    def __init__(self, engine: Engine, timings: Timings) -> None:
        self._engine = engine
        self._timings = timings
        self._turn = asyncio.Lock()
        self._lost = asyncio.Event()
        self._why: EngineLostError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @property
    def idle(self) -> bool:
        """Whether a request would be decoded at once."""
        return not self._turn.locked()

    async def lost(self) -> EngineLostError:
        """Wait until the engine can do nothing any more, which one that is idle is asked for; return why."""
        while self._why is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._lost.wait()
            if self.idle and self._why is None:
                await self._look()
        return self._why

    async def run(self, landed: Landed, memory: torch.Tensor, params: DecodeParams) -> AsyncGenerator[Step, None]:
        """Convert, inject, decode: yields each step when it is known. Raises EngineError.

        Closing the iterator cancels the decode and waits for the step it is in.
        """
        await self._turn.acquire()
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[Step | None] = asyncio.Queue()
        cancelled = threading.Event()

        def publish(step: Step | None) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, step)

        job = loop.run_in_executor(self._thread, self._drive, landed, memory, params, cancelled, publish)
        # The turn ends with the engine's work, not with the reader's: a slow reader delays nobody.
        job.add_done_callback(self._end_turn)
        try:
            while (step := await steps.get()) is not None:
                yield step
            await asyncio.shield(job)
        finally:
            cancelled.set()
            await _ended(job)

    def close(self) -> None:
        """Wait for the thread to end."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _look(self) -> None:
        """Ask the engine for its cache, as each request does first: one that has lost a part of itself says so."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
        except EngineLostError as error:
            self._note(error)

    def _ask(self) -> None:
        with _told():
            self._engine.kv_target(1)

    def _end_turn(self, job: "asyncio.Future[None]") -> None:
        self._turn.release()
        error = None if job.cancelled() else job.exception()
        if isinstance(error, EngineLostError):
            self._note(error)

    def _note(self, error: EngineLostError) -> None:
        self._why = error
        self._lost.set()

    def _drive(
        self,
        landed: Landed,
        memory: torch.Tensor,
        params: DecodeParams,
        cancelled: threading.Event,
        publish: Callable[[Step | None], None],
    ) -> None:
        try:
            with _told():
                began = time.perf_counter()
                keys, values = self._engine.kv_target(len(landed.prompt))
                convert(memory, landed.layout, keys, values, shards=landed.shards)
                self._timings.converted(time.perf_counter() - began)
                began = time.perf_counter()
                for step in self._engine.decode(landed.prompt, landed.first_token, params, cancelled.is_set):
                    # Told before it is published: whoever has the last step may look at the metrics at once.
                    now = time.perf_counter()
                    self._timings.step(now - began, len(step.ids))
                    publish(step)
                    began = now
        finally:
            publish(None)


@contextmanager
def _told() -> Iterator[None]:
    """What a GPU that failed raises, as the error that it is."""
    try:
        yield
    except torch.AcceleratorError as error:
        # The process's context on that GPU answers every later call so.
        raise EngineLostError(f"the GPU failed: {error}. Restart the daemon") from error


async def _ended(job: "asyncio.Future[None]") -> None:
    """Wait for the thread, however often this is cancelled: it must be out of the landing memory before anybody reuses it."""
    interruption: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError as error:
            interruption = error
    if not job.cancelled():
        job.exception()  # raised where the steps are read; retrieved here for a reader that has left
    if interruption is not None:
        raise interruption
