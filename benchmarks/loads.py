"""Calls made in turns, as fast as they are answered or at a steady rate, and how long they took.

A closed loop calls again as soon as it is answered: its rate says what is carried, and with many clients its latency is their
own queue. An open loop, at a rate that is carried easily, says how long one call takes.
"""

import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from benchmarks.pace import Pace, together

Call = Callable[[], Awaitable[tuple[int, ...]]]
"""Does one thing; returns when it began and when each step of it ended, by time.monotonic_ns."""

_WARM_UP = 1 / 10  # of a turn, for connections to be made and scripts to be loaded
_FEWEST = 2  # calls that have percentiles


@dataclass(frozen=True, slots=True)
class Load:
    """So many clients that call as fast as they are answered, or `per_second` times all together."""

    clients: int
    per_second: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn. Latencies are p50 and p99 in ms."""

    per_second: float
    whole: tuple[float, float]  # from the beginning, in an open loop from when it was due, to the end of the last step
    steps: tuple[tuple[float, float], ...]  # of each step by itself
    script_us: float  # of the server's own time for one script; 0: none ran
    scripts_per_second: float


async def take_turns(
    redis: Any, pace: Pace, calls: Mapping[str, Call], loads: Sequence[Load], *, rounds: int, seconds: float
) -> dict[tuple[Load, str], list[Sample]]:
    """Take a sample of every call under every load in each round, one after the other.

    Args:
        redis: redis-py's client of the server, to ask how long scripts took.
        pace: keeps the time of open loops.
        calls: by name.
        loads: under which each call is made.
        rounds: samples of each.
        seconds: of a turn; one of an open loop takes twice as long.
    """
    samples: dict[tuple[Load, str], list[Sample]] = {(load, name): [] for load in loads for name in calls}
    for load in loads:
        for call in calls.values():
            await _take(redis, pace, call, load, seconds * _WARM_UP)
    names = deque(calls)
    for _ in range(rounds):
        for load, name in product(loads, names):
            samples[load, name].append(await _take(redis, pace, calls[name], load, seconds))
        names.rotate()  # nobody always follows the same one
    return samples


async def _take(redis: Any, pace: Pace, call: Call, load: Load, seconds: float) -> Sample:
    spent_before, ran_before = await scripts_run(redis)
    began = time.monotonic()
    if load.per_second is None:
        calls = await _closed_loop(call, load.clients, seconds)
    else:
        count = max(_FEWEST, round(2 * seconds * load.per_second))
        calls = await _open_loop(pace, call, load.clients, load.per_second, count)
    elapsed = time.monotonic() - began
    spent, ran = await scripts_run(redis)
    steps = zip(*([end - start for start, end in pairwise(stamps[1:])] for stamps in calls), strict=True)
    return Sample(
        per_second=len(calls) / elapsed,
        whole=_percentiles([stamps[-1] - stamps[0] for stamps in calls]),
        steps=tuple(map(_percentiles, steps)),
        script_us=(spent - spent_before) / (ran - ran_before) if ran > ran_before else 0,
        scripts_per_second=(ran - ran_before) / elapsed,
    )


async def _closed_loop(call: Call, clients: int, seconds: float) -> list[tuple[int, ...]]:
    until = time.monotonic_ns() + round(seconds * 1e9)
    calls: list[tuple[int, ...]] = []  # in both loops: when it was due, then what the call returned

    async def client() -> None:
        while time.monotonic_ns() < until or len(calls) < _FEWEST:
            stamps = await call()
            calls.append((stamps[0], *stamps))

    await together(client() for _ in range(clients))
    return calls


async def _open_loop(pace: Pace, call: Call, clients: int, per_second: int, count: int) -> list[tuple[int, ...]]:
    calls: list[tuple[int, ...]] = []

    async def work(due: int) -> None:
        calls.append((due, *await call()))

    await pace.run(work, workers=clients, per_second=per_second, count=count)
    return calls


def _percentiles(spans_ns: Sequence[int]) -> tuple[float, float]:
    cuts = statistics.quantiles(spans_ns, n=100, method="inclusive")
    return cuts[49] / 1e6, cuts[98] / 1e6


async def scripts_run(redis: Any) -> tuple[int, int]:
    """Return the microseconds that the server has spent in scripts, and how many it has run."""
    stats = await redis.info("commandstats")
    scripts = stats.get("cmdstat_evalsha", {"usec": 0, "calls": 0})
    return scripts["usec"], scripts["calls"]
