"""Mooncake's engines: loaded, started, and ended without its pauses."""

import importlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from handoff.transport import Region, TransportError

_DEBIAN_PACKAGES = "libibverbs1 libnuma1 libcurl4"
_LISTENS = "0A"  # a state in /proc/net/tcp


def load_engines() -> Any:
    """Return the module; raises TransportError, which names what to install."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise TransportError("Mooncake is not installed: pip install 'anchorleg[mooncake]'") from error
    except ImportError as error:
        raise TransportError(f"Mooncake cannot be loaded ({error}): apt install {_DEBIAN_PACKAGES}") from error


def start_engine(api: Any, host: str) -> Any:
    """Return an engine that listens and tells those who write here to send to `host`; raises TransportError."""
    if ":" in host and "MC_USE_IPV6" not in os.environ:
        raise TransportError(f"Mooncake cannot start at {host}: set MC_USE_IPV6=1, for the daemons and for vLLM")
    engine = api.TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "no RDMA device") != 0:
        raise TransportError(
            f"Mooncake cannot start at {host}: no two ports are free in MC_MIN_RPC_PORT (15000) to MC_MAX_RPC_PORT (17000)"
        )
    return engine


def register_region(engine: Any, region: Region) -> None:
    """Let peers write to a region; raises TransportError."""
    if engine.register_memory(region.address, region.length) != 0:
        raise TransportError(f"Mooncake cannot register {region}: it may overlap with another region")


def wake_engine(engine: Any) -> None:
    """Make the end of an engine take milliseconds; call it right before the last reference goes.

    The destructor holds the GIL and joins a thread that sleeps in accept, and that sees that it is to stop after a second
    without a connection, or after one that ends at once: here is one, and a shorter second for the time after it.
    """
    port = engine.get_rpc_port()
    for listener in _sockets(lambda row: row[3] == _LISTENS and row[1].endswith(f":{port:04X}")):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=0.1).close()


def numeric(address: str) -> str:
    """Return host:port with the host's first address in its place; raises TransportError."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4]
    except (OSError, ValueError) as error:
        raise TransportError(f"{address} cannot be found: {error}") from error
    return f"[{found[0]}]:{port}" if ":" in str(found[0]) else f"{found[0]}:{port}"


def cut_connections(address: str) -> None:
    """End this process's connections to a numeric address: whoever waits for an answer on one gets none, at once."""
    host, _, port = address.rpartition(":")
    names = (host.strip("[]"), f"::ffff:{host}")
    for connection in _sockets(lambda row: row[2].endswith(f":{int(port):04X}")):
        with suppress(OSError):  # it is not connected yet, or no longer
            if connection.getpeername()[0] in names:
                connection.shutdown(socket.SHUT_RDWR)


def _sockets(wanted: Callable[[list[str]], bool]) -> Iterator[socket.socket]:
    """Yield this process's TCP sockets whose row in /proc/net/tcp is wanted: local end, remote end and state are 1 to 3."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError), open(f"/proc/self/net/{table}") as lines:
            inodes |= {f"socket:[{row[9]}]" for row in map(str.split, lines) if wanted(row)}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since
            if os.readlink(f"/proc/self/fd/{name}") in inodes:
                found = socket.socket(fileno=int(name))
                try:
                    yield found
                finally:
                    found.detach()  # it is Mooncake's
