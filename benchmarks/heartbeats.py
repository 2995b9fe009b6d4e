"""The heartbeats of a whole fleet out of one process: recorded from a real client, and sent again at a steady pace.

An idle daemon says the same bytes at every beat. Sent as they were recorded they cost the server what a fleet's heartbeats
cost it, and the machine of the benchmark next to nothing beside that.
"""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any
from urllib.parse import quote

from benchmarks.loads import scripts_run
from leases import LeaseTable, Node, NodeStatus, SlotView
from leases.url import RedisUrl, parse
from process.errors import ProcessError

_CHUNK = 1 << 16
_BATCH_S = 0.001
_MOST_LATE_S = 0.02
_END_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 10.0
_BEATS_TO_HEAR = 5  # more than the opening of a connection


@dataclass(frozen=True, slots=True)
class Recording:
    """What a client of the lease table sent."""

    opening: bytes  # greeting, password and the loading of the script: what a connection begins with
    beats: tuple[bytes, ...]  # one heartbeat of each node


def idle(node: Node) -> tuple[NodeStatus, list[SlotView]]:
    """Return what a daemon says that has nothing to do."""
    return NodeStatus(), [SlotView(slot, 0, None) for slot in range(node.slots)]


async def record(url: str, nodes: Sequence[Node], ttl_ms: int) -> Recording:
    """Publish every node once, through a relay that takes down what is sent.

    Raises:
        ValueError: the URL is not one of a single server without TLS, so that nothing can listen in between.
    """
    target = parse(url)
    if not can_record(target):
        raise ValueError(f"heartbeats to {target.where} cannot be recorded: it takes a redis:// or unix:// URL")
    sent = bytearray()
    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        relays.add(task)
        from_server, to_server = await _open(target)
        answers = asyncio.create_task(_pass_on(from_server, writer))
        try:
            while data := await reader.read(_CHUNK):
                sent.extend(data)
                to_server.write(data)
                await to_server.drain()
        finally:
            answers.cancel()
            writer.close()
            to_server.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with LeaseTable(_relay_url(target, port), ttl_ms=ttl_ms) as table:
            await table.register(nodes[0], *idle(nodes[0]))
            opening = bytes(sent)
            beats = []
            for node in nodes:
                sent.clear()
                await table.register(node, *idle(node))
                beats.append(bytes(sent))
        await asyncio.wait(relays, timeout=_END_TIMEOUT_S)
    return Recording(opening, tuple(beats))


def can_record(target: RedisUrl) -> bool:
    """Whether a relay can stand before it."""
    return target.kind in ("server", "socket") and not target.options.get("ssl")


@asynccontextmanager
async def fleet(redis: Any, url: str, recording: Recording, per_second: float) -> AsyncIterator[None]:
    """Keep the nodes beating in a process of its own; begins when the server has heard some of them.

    Raises:
        ProcessError: it has not within 10 s.
    """
    _, before = await scripts_run(redis)
    # Not forked: an event loop runs here.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_send_for_ever, args=(url, recording, per_second, os.getpid()), daemon=True)
    process.start()
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while (await scripts_run(redis))[1] < before + _BEATS_TO_HEAR:
            if not process.is_alive() or time.monotonic() > deadline:
                raise ProcessError(f"the daemons' heartbeats did not reach the server within {_START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.02)
        yield
    finally:
        process.kill()
        process.join()


def _send_for_ever(url: str, recording: Recording, per_second: float, parent: int) -> None:
    """Send the beats round and round while the parent process lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    asyncio.run(_send(parse(url), recording, per_second, parent))


async def _send(target: RedisUrl, recording: Recording, per_second: float, parent: int) -> None:
    reader, writer = await _open(target)
    answers = asyncio.create_task(_discard(reader))
    try:
        writer.write(recording.opening)
        beats = cycle(recording.beats)
        due, last = 0.0, time.monotonic()
        while not answers.done() and os.getppid() == parent:
            now = time.monotonic()
            # A daemon beats again only when it was answered: what a busy server did not take is not made up for.
            due = min(due + (now - last) * per_second, max(1, _MOST_LATE_S * per_second))
            last = now
            writer.write(b"".join(islice(beats, int(due))))
            due -= int(due)
            await writer.drain()
            await asyncio.sleep(_BATCH_S)
    finally:
        answers.cancel()
        writer.close()


async def _open(target: RedisUrl) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if target.kind == "socket":
        return await asyncio.open_unix_connection(target.name)
    [(host, port)] = target.hosts
    return await asyncio.open_connection(host, port)


def _relay_url(target: RedisUrl, port: int) -> str:
    name, password = (quote(target.options.get(option, ""), safe="") for option in ("username", "password"))
    return f"redis://{name}:{password}@127.0.0.1:{port}/{target.options.get('db', 0)}"


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(_CHUNK):
        pass
