"""What a lease costs: pairs of acquire and give_back, beside a bare INCR on the same server in the same run.

One server holds a pool of each size. All that is compared takes turns of a second, so that a busy machine slows all of it,
and each figure is the median of the rounds.
"""

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from benchmarks.heartbeats import can_record, fleet, idle, record
from benchmarks.loads import Call, Load, Sample, take_turns
from benchmarks.pace import pacing
from benchmarks.report import Measure
from cli.programs import find_program
from leases import Grant, LeasesUnavailable, LeaseTable, Node, SlotRequest
from leases.connect import connect
from leases.line import Line
from leases.scripts import OneServer
from leases.url import RedisUrl, parse
from process.errors import ProcessError

SIZES = (10, 1_000, 10_000)
_CLIENTS = 50
_PAIRS_PER_SECOND = 200  # of the open loop: a tenth or less of what the table carries on two cores
_ONE, _MANY, _PACED = _LOADS = (Load(1), Load(_CLIENTS), Load(_CLIENTS, _PAIRS_PER_SECOND))
_CLIENT_NAMES = {_ONE: "1", _MANY: str(_CLIENTS)}
_SLOTS_PER_NODE = 2
_CARD = "0f" * 16
_COUNTER = "anchorleg:bench:counter"
_TTL_MS = 3_600_000  # of the nodes: longer than any run, so that quiet rounds need no heartbeats
_BEATS_PER_SECOND = 1  # of each daemon: a third of the usual TTL of 3 s
_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 10.0
_FILL_AT_ONCE = 64

Samples = Mapping[tuple[Load, str], Sequence[Sample]]


async def measure(
    *, redis_url: str | None = None, rounds: int = 5, seconds: float = 1.0, sizes: Sequence[int] = SIZES
) -> list[Measure]:
    """Take every measure, on a server of its own or on the one at `redis_url`.

    Args:
        redis_url: a server that holds no lease table; what is written there is removed in the end. Through TLS or found by
            Sentinel, the measures beside a fleet's heartbeats are left out.
        rounds: of which each figure is the median.
        seconds: of a turn.
        sizes: slots of each pool, ascending.

    Raises:
        ProcessError: the server holds a lease table or is a cluster, or the URL is none of a server.
        LeasesUnavailable: no server answers there.
    """
    largest = sizes[-1]
    async with AsyncExitStack() as stack:
        url = redis_url or stack.enter_context(_private_server())
        target = _one_server(url)
        pace = stack.enter_context(pacing())
        redis, calls = await stack.enter_async_context(_filled_table(url, sizes))
        measures = _quiet(await take_turns(redis, pace, calls, _LOADS, rounds=rounds, seconds=seconds), sizes)
        if can_record(target):
            nodes = _nodes(largest)
            recording = await record(url, nodes, _TTL_MS)
            await stack.enter_async_context(fleet(redis, url, recording, len(nodes) * _BEATS_PER_SECOND))
            calls = {name: calls[name] for name in ("incr", str(largest))}
            measures += _beating(await take_turns(redis, pace, calls, _LOADS, rounds=rounds, seconds=seconds), largest)
    return measures


# --- What the samples say ---


def _quiet(samples: Samples, sizes: Sequence[int]) -> list[Measure]:
    largest = str(sizes[-1])
    measures = []
    for load, clients in _CLIENT_NAMES.items():
        measures.append(_rate(f"incr_{clients}_per_second", samples[load, "incr"], "by redis-py"))
        measures.append(
            _rate(f"line_incr_{clients}_per_second", samples[load, "line"], "on the table's own kind of connection")
        )
        for size in sizes:
            taken = samples[load, str(size)]
            queue = f"; {load.clients - size} clients stand in the queue" if size < load.clients else ""
            measures.append(_rate(f"pairs_{clients}_at_{size}_per_second", taken, _steps(taken) + queue))
        measures.append(_share(f"pairs_{clients}_of_incr", samples, load, largest, "incr"))
        measures.append(_share(f"pairs_{clients}_of_line_incr", samples, load, largest, "line"))
    others = [f"{_latency(samples[_PACED, str(size)])} at {size} slots" for size in sizes[:-1]]
    measures.append(_p99("pair_1_p99_ms", samples, _ONE, largest))
    measures.append(_p99("paced_p99_ms", samples, _PACED, largest, *others))
    spent = {size: _median(samples[_ONE, str(size)], lambda sample: sample.script_us) for size in sizes}
    for size, script_us in spent.items():
        how = f"of the server's time for a script; two are a pair, so it carries {5e5 / script_us:,.0f} pairs/s"
        measures.append(Measure(f"server_at_{size}_us", script_us, "µs", how))
    growth = spent[sizes[-1]] / spent[sizes[0]]
    measures.append(Measure("server_growth", growth, "x", f"the server's time for a script at {largest} slots over {sizes[0]}"))
    return measures


def _beating(samples: Samples, size: int) -> list[Measure]:
    daemons = size // _SLOTS_PER_NODE
    # While INCR is measured nothing else runs scripts.
    beats = _median(samples[_PACED, "incr"], lambda sample: sample.scripts_per_second)
    spent_us = _median(samples[_PACED, "incr"], lambda sample: sample.script_us)
    how = f"of {daemons} daemons, beside all that follows; {spent_us:.0f} µs of the server's time each"
    measures = [Measure("heartbeats_per_second", beats, "/s", how)]
    for load, clients in _CLIENT_NAMES.items():
        taken = samples[load, str(size)]
        measures.append(_rate(f"beating_pairs_{clients}_per_second", taken, f"{_steps(taken)}; {_incr(samples, load)}"))
    measures.append(_p99("beating_pair_1_p99_ms", samples, _ONE, str(size)))
    measures.append(_p99("beating_paced_p99_ms", samples, _PACED, str(size)))
    return measures


def _rate(name: str, samples: Sequence[Sample], how: str) -> Measure:
    return Measure(name, _median(samples, lambda sample: sample.per_second), "/s", f"{_latency(samples)}; {how}")


def _share(name: str, samples: Samples, load: Load, pairs: str, incr: str) -> Measure:
    both = zip(samples[load, pairs], samples[load, incr], strict=True)
    value = statistics.median(100 * ours.per_second / theirs.per_second for ours, theirs in both)
    return Measure(name, value, "%", f"pairs at {pairs} slots against INCRs of the same round")


def _p99(name: str, samples: Samples, load: Load, pairs: str, *more: str) -> Measure:
    taken = samples[load, pairs]
    how = "closed loop"
    if load.per_second:
        how = f"{load.per_second} pairs/s, since each was due"
    clients = f"{load.clients} client{'s' if load.clients > 1 else ''}"
    detail = [f"{clients}, {how}", f"p50 {_median(taken, _p50_ms):.2f} ms", _steps(taken), _incr(samples, load), *more]
    return Measure(name, _median(taken, _p99_ms), "ms", "; ".join(detail))


def _latency(samples: Sequence[Sample]) -> str:
    return f"p50 {_median(samples, _p50_ms):.2f} p99 {_median(samples, _p99_ms):.2f} ms"


def _steps(samples: Sequence[Sample]) -> str:
    def step(number: int) -> str:
        p50 = _median(samples, lambda sample: sample.steps[number][0])
        p99 = _median(samples, lambda sample: sample.steps[number][1])
        return f"{p50:.2f} / {p99:.2f}"

    return f"acquire {step(0)}, give_back {step(1)}"


def _incr(samples: Samples, load: Load) -> str:
    return f"INCR {_latency(samples[load, 'incr'])}"


def _p50_ms(sample: Sample) -> float:
    return sample.whole[0]


def _p99_ms(sample: Sample) -> float:
    return sample.whole[1]


def _median(samples: Sequence[Sample], figure: Callable[[Sample], float]) -> float:
    return statistics.median(map(figure, samples))


# --- The table ---


def _one_server(url: str) -> RedisUrl:
    try:
        target = parse(url)
    except ValueError as error:
        raise ProcessError(str(error)) from None
    if target.kind == "cluster":
        raise ProcessError("INCR and leases are compared on one server, not in a cluster: name one of redis:// or rediss://")
    return target


@asynccontextmanager
async def _filled_table(url: str, sizes: Sequence[int]) -> AsyncIterator[tuple[Any, dict[str, Call]]]:
    """Yield redis-py's client, and what is to be compared by name: `incr`, `line`, and a pair at each size."""
    connected = connect(url, _TIMEOUT_S)
    redis = connected.client
    line = OneServer(Line(redis.connection_pool))
    table = LeaseTable(url, ttl_ms=_TTL_MS, timeout_s=_TIMEOUT_S)
    try:
        await table.ping()
        async for key in redis.scan_iter(match="anchorleg:*", count=1_000):
            raise ProcessError(f"the server at {connected.where} holds {key}: name an empty one, or another of its databases")
        try:
            for size in sizes:
                await _fill(table, _nodes(size))
            calls: dict[str, Call] = {
                "incr": partial(_timed, partial(redis.incr, _COUNTER)),
                "line": partial(_timed, partial(_line_incr, line)),
            }
            yield redis, calls | {str(size): partial(_pair, table, _wish(size)) for size in sizes}
        finally:
            with suppress(LeasesUnavailable, RedisConnectionError, OSError):  # of a server that went away, as was told
                await _remove(redis, table, sizes)
    finally:
        await table.aclose()
        await line.aclose()
        await connected.aclose()


async def _line_incr(line: OneServer) -> None:
    await line.command(asyncio.get_running_loop().time() + _TIMEOUT_S, "INCR", _COUNTER)


async def _timed(command: Callable[[], Awaitable[Any]]) -> tuple[int, ...]:
    began = time.monotonic_ns()
    await command()
    return began, time.monotonic_ns()


async def _pair(table: LeaseTable, wish: Callable[[], SlotRequest]) -> tuple[int, ...]:
    began = time.monotonic_ns()
    grant = await table.acquire(wish())
    acquired = time.monotonic_ns()
    assert isinstance(grant, Grant), f"a pool in which nothing else goes on answered {grant}"
    assert await table.give_back(grant), f"{grant} was lost while it was held"
    return began, acquired, time.monotonic_ns()


def _wish(size: int) -> Callable[[], SlotRequest]:
    # Where there are fewer slots than clients, the others stand in the queue.
    wait_ms = round(_TIMEOUT_S * 1000) if size < _CLIENTS else 0
    return partial(SlotRequest, pool=_pool(size), card=_CARD, tokens=1_000, lease_ms=10_000, wait_ms=wait_ms)


def _pool(size: int) -> str:
    return f"bench-{size}"


def _nodes(size: int) -> list[Node]:
    return [
        Node(
            node_id=f"decode-{number:05}.example:{number:032x}",
            model=_pool(size),
            card=_CARD,
            decode_endpoint=f"decode-{number:05}.example:9400",
            control_host=f"decode-{number:05}.example",
            control_port=9401,
            capacity_tokens=32_768,
            slots=_SLOTS_PER_NODE,
        )
        for number in range(size // _SLOTS_PER_NODE)
    ]


async def _fill(table: LeaseTable, nodes: Sequence[Node]) -> None:
    for first in range(0, len(nodes), _FILL_AT_ONCE):
        await asyncio.gather(*(table.register(node, *idle(node)) for node in nodes[first : first + _FILL_AT_ONCE]))


async def _remove(redis: Any, table: LeaseTable, sizes: Sequence[int]) -> None:
    await redis.unlink(_COUNTER)
    for size in sizes:
        keys = [key async for key in redis.scan_iter(match=f"anchorleg:*{{{_pool(size)}}}*", count=1_000)]
        if keys:
            await redis.unlink(*keys)
    await table.pools()  # forgets those that are empty


# --- The server ---


@contextmanager
def _private_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="anchorleg-bench-") as folder:
        socket = Path(folder) / "valkey.sock"
        command = [*find_program("valkey-server"), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ProcessError(f"{command[0]} did not start within {_START_TIMEOUT_S:g} s; run it by hand to see why")
                time.sleep(0.01)
            yield f"unix://{socket}"
        finally:
            process.kill()
            process.wait()
