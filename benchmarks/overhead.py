"""What the gateway costs: real Envoy, ext_proc and valkey between a scripted vLLM and a scripted daemon.

Every process is one of its own, as in production, and the machine's clock is the same for all of them: vLLM's answers, the
daemon's messages and plain chunks carry the time at which they were sent.
"""

import asyncio
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fake_daemon import DaemonScript, serve_daemon
from benchmarks.fake_vllm import VllmScript, serve_vllm
from benchmarks.fakes import END, MODEL, STAMP_TICK_NS, STAMP_TICKS, card_name
from benchmarks.report import Measure
from benchmarks.wire import LATENCY, Received, ask, chat, request_bytes
from cli.envoy import EnvoyConfig, render
from cli.ports import free_ports
from cli.programs import find_program
from gateway.decode_client import DecodeClient
from handoff import decode_pb2 as pb
from leases import Grant, LeasesUnavailable, LeaseTable, SlotRequest

_SECRET = "a secret of the benchmark's own"
_SLOTS = 64
_CONTEXT = 4 << 20  # a 1 MB prompt fits by its bytes: nothing is asked of vLLM's tokenizer
_STAMP = re.compile(rb'"content":"@([0-9a-f]{4})"')
_ANSWERED = re.compile(rb"chatcmpl-(\d{6,})")
_START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Bench:
    """A running lane."""

    public: int
    internal: int
    redis_url: str
    extproc: psutil.Process


async def measure(*, requests: int = 200, seconds: float = 5.0) -> list[Measure]:
    """Take every measure; `requests` for each median, `seconds` for the rate."""
    paced = DaemonScript(tokens=[0] * 51, interval_s=0.005, stamp=True)
    flood = DaemonScript(tokens=[ord("x")] * 4000)
    vllm = VllmScript(plain_stamps=50, plain_interval_s=0.005)
    async with lane(paced, vllm) as bench:
        measures = [
            *await _first_token_and_tokens(bench, requests // 5),
            await _no_header(bench, requests * 5),
            await _passed_chunks(bench, requests // 5),
            await _long_prompt(bench, requests // 5),
        ]
    async with lane(flood, vllm) as bench:
        measures += await _rate(bench, seconds)
    return measures


async def _first_token_and_tokens(bench: Bench, count: int) -> list[Measure]:
    request = request_bytes(chat(stream=True, max_tokens=2000), LATENCY)
    plain_request = request_bytes(chat(stream=True), {})
    first: list[float] = []
    tokens: list[float] = []
    plain: list[float] = []
    direct: list[float] = []
    for _ in range(count):
        received = await ask(bench.public, request)
        arrived, piece = next((at, piece) for at, piece in received.pieces if b'"content":"H"' in piece)
        answered = _ANSWERED.search(piece)
        assert answered is not None, received.body[:500]
        first.append((arrived - int(answered.group(1))) / 1e6)
        tokens += _latencies(received)
        plain += _latencies(await ask(bench.internal, plain_request))
        direct += await _read_daemon(bench)
    lane_ms, plain_ms, direct_ms = (statistics.median(values) for values in (tokens, plain, direct))
    how = f"{lane_ms:.2f} ms from daemon to client, less {direct_ms:.2f} for one who reads the daemon's stream himself and "
    how += f"{plain_ms:.2f} for a chunk from plain vLLM through Envoy; {len(tokens)} tokens 5 ms apart"
    return [
        Measure("answer_to_first_token_ms", statistics.median(first), "ms", f"{count} requests, p99 {_p99(first):.2f} ms"),
        Measure("token_ms", lane_ms - plain_ms - direct_ms, "ms", how),
        Measure("token_p99_ms", _p99(tokens), "ms", f"from daemon to client; {_p99(plain):.2f} ms from plain vLLM"),
    ]


async def _read_daemon(bench: Bench) -> list[float]:
    """Lease a slot and read the daemon's stream without gateway and Envoy."""
    async with LeaseTable(bench.redis_url) as table, DecodeClient() as client:
        grant = await table.acquire(SlotRequest(pool=MODEL, card=card_name(_CONTEXT), tokens=1, lease_ms=10_000))
        assert isinstance(grant, Grant), grant
        request = pb.DecodeRequest(handoff_id="direct", slot=grant.slot, epoch=grant.epoch, max_tokens=2000)
        stream = await client.reserve(grant.decode_endpoint, request, 5.0)
        await stream.read(5.0)  # landed
        latencies: list[float] = []
        while (event := await stream.read(5.0)).tokens.finish == pb.Tokens.NONE:
            latencies.append(_elapsed_ms(event.tokens.ids[0] - END - 1, time.monotonic_ns()))
        return latencies


async def _no_header(bench: Bench, count: int) -> Measure:
    """Compare the route without the header with a listener that has no ext_proc at all, turn by turn."""
    request = request_bytes(chat(), {})
    ours, plain = await _turn_by_turn(
        count, lambda: _duration(bench.public, request), lambda: _duration(bench.internal, request)
    )
    return _difference("no_header_ms", ours, plain, "plain Envoy")


async def _passed_chunks(bench: Bench, count: int) -> Measure:
    """Compare chunks of answers that the gateway left to plain vLLM with chunks it never heard of."""
    passed, plain = request_bytes(chat(stream=True, n=1, tools=[{}]), LATENCY), request_bytes(chat(stream=True), {})
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(count):
        ours += _latencies(await ask(bench.public, passed))
        theirs += _latencies(await ask(bench.internal, plain))
    return _difference("passed_chunk_ms", ours, theirs, "plain Envoy")


async def _long_prompt(bench: Bench, count: int) -> Measure:
    content = "lorem ipsum " * (1_000_000 // 12)
    lane_request = request_bytes(chat(content, max_tokens=1), LATENCY)
    plain_request = request_bytes(chat(content, max_tokens=1), {})
    ours, plain = await _turn_by_turn(
        count, lambda: _duration(bench.public, lane_request), lambda: _duration(bench.internal, plain_request)
    )
    return _difference("long_prompt_ms", ours, plain, "plain vLLM")


async def _rate(bench: Bench, seconds: float) -> list[Measure]:
    """Keep several streams running whose daemon sends as fast as it can, one token a message."""
    request = request_bytes(chat(stream=True), LATENCY)
    until = time.monotonic() + seconds
    counted = 0

    async def keep() -> None:
        nonlocal counted
        while time.monotonic() < until:
            received = await ask(bench.public, request)
            counted += received.body.count(b"x")

    began, cpu_before = time.monotonic(), _cpu_seconds(bench.extproc)
    await asyncio.gather(*(keep() for _ in range(8)))
    elapsed = time.monotonic() - began
    cpu = _cpu_seconds(bench.extproc) - cpu_before
    return [
        Measure(
            "tokens_per_second", counted / elapsed, "/s", f"8 streams, {elapsed:.1f} s, {os.cpu_count()} cores shared by all"
        ),
        Measure("tokens_per_cpu_second", counted / cpu, "/s", "tokens per second of ext_proc's processor time"),
    ]


@asynccontextmanager
async def lane(daemon: DaemonScript, vllm: VllmScript) -> AsyncIterator[Bench]:
    """Start everything, each part a process of its own."""
    public, internal, admin, extproc_port, vllm_port = islice(free_ports(), 5)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anchorleg-bench-")))
        socket = folder / "valkey.sock"
        redis_url = f"unix://{socket}"
        _start(stack, [*find_program("valkey-server"), "--port", "0", "--unixsocket", str(socket), "--save", ""])
        await _until(lambda: _answers(redis_url), "valkey")
        _fork(stack, serve_vllm(vllm_port, vllm))
        _fork(stack, serve_daemon(redis_url, daemon, slots=_SLOTS, context_tokens=_CONTEXT))
        flags = ["--listen-port", str(extproc_port), "--metrics-port", "0", "--redis-url", redis_url]
        flags += ["--upstream-url", f"http://127.0.0.1:{internal}", "--log-level", "error"]
        extproc = _start(stack, [sys.executable, "-m", "cli.main", "extproc", *flags])
        config = folder / "envoy.yaml"
        config.write_text(
            render(
                EnvoyConfig(
                    public_host="127.0.0.1",
                    public_port=public,
                    internal_host="127.0.0.1",
                    internal_port=internal,
                    admin_host="127.0.0.1",
                    admin_port=admin,
                    vllm=[f"127.0.0.1:{vllm_port}"],
                    extproc=f"127.0.0.1:{extproc_port}",
                )
            )
        )
        envoy = [
            *find_program("envoy"),
            "-c",
            str(config),
            "--disable-hot-restart",
            "--log-level",
            "error",
            "--concurrency",
            "1",
        ]
        _start(stack, envoy)
        await _until(lambda: _serves(public), "the lane")
        yield Bench(public, internal, redis_url, psutil.Process(extproc.pid))


def _start(stack: AsyncExitStack, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "ANCHORLEG_SECRET": _SECRET}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    return process


def _fork(stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    process = multiprocessing.get_context("fork").Process(target=_run, args=(work,), daemon=True)
    process.start()
    work.close()
    stack.callback(process.join, 10)
    stack.callback(process.kill)


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def _until(condition: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not start within {_START_TIMEOUT_S:g} s")
        await asyncio.sleep(0.05)


async def _answers(redis_url: str) -> bool:
    async with LeaseTable(redis_url) as table:
        try:
            await table.ping()
        except LeasesUnavailable:
            return False
        return True


async def _serves(port: int) -> bool:
    try:
        received = await ask(port, request_bytes(chat(max_tokens=1), LATENCY), 5.0)
    except (OSError, TimeoutError):
        return False
    return b"x-slo-lane: latency" in received.body and MODEL.encode() in received.body


async def _duration(port: int, request: bytes) -> float:
    received = await ask(port, request)
    return (received.pieces[-1][0] - received.asked_ns) / 1e6


async def _turn_by_turn(
    count: int, ours: Callable[[], Coroutine[Any, Any, float]], theirs: Callable[[], Coroutine[Any, Any, float]]
) -> tuple[list[float], list[float]]:
    pairs = [(await ours(), await theirs()) for _ in range(count)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _latencies(received: Received) -> list[float]:
    """Return, for each stamped text, the milliseconds from its sending to its arrival."""
    return [_elapsed_ms(int(text, 16), at) for at, piece in received.pieces for text in _STAMP.findall(piece)]


def _elapsed_ms(ticks: int, arrived_ns: int) -> float:
    return (arrived_ns // STAMP_TICK_NS - ticks) % STAMP_TICKS * STAMP_TICK_NS / 1e6


def _difference(name: str, ours: list[float], theirs: list[float], whom: str) -> Measure:
    a, b = statistics.median(ours), statistics.median(theirs)
    return Measure(name, a - b, "ms", f"{a:.3f} ms against {b:.3f} ms of {whom}, {len(ours)} each")


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
