"""The table's Lua scripts, and the two ways to run them: on one server, and in a cluster."""

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Protocol
from urllib.parse import quote

from redis.asyncio import RedisCluster
from redis.exceptions import NoScriptError

from leases.line import Line

NAMES = ("acquire", "give_up", "inspect", "overview", "register", "release", "unregister")

# The number is the version of the key layout: clients of different layouts must not share keys.
PREFIX = "anchorleg:leases:2:"
_POOL_KEYS = ("nodes", "traits", "deadlines", "sizes", "ready", "free", "leases", "wishes", "queue", "tenants", "pool")


def _read(name: str) -> tuple[bytes, bytes]:
    room = files("leases")
    text = (room.joinpath("common.lua").read_text() + room.joinpath(f"{name}.lua").read_text()).encode()
    return text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()  # what EVALSHA goes by


_SCRIPTS = {name: _read(name) for name in NAMES}

Argument = str | int


class Server(Protocol):
    """Where scripts and commands run.

    Each call ends at its deadline, by the event loop's clock, with a TimeoutError; it may raise other OSErrors and RedisErrors.
    """

    async def script(self, deadline: float, name: str, model: str, arguments: Sequence[Argument]) -> Any:
        """Run a script on the keys of a pool, and load it first where the server does not know it."""
        ...

    async def command(self, deadline: float, *words: str) -> Any:
        """Run one command."""
        ...

    async def aclose(self) -> None:
        """Close what it holds."""
        ...


class OneServer:
    """All on one line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def script(self, deadline: float, name: str, model: str, arguments: Sequence[Argument]) -> Any:
        """See Server."""
        head, words = _script_head(name, model)
        packed = b"*%d\r\n%b%b" % (words + len(arguments), head, _pack(arguments))
        try:
            return await self._line.call(packed, deadline)
        except NoScriptError:
            # Written together, so that nobody makes the server forget it in between.
            loading = self.command(deadline, "SCRIPT", "LOAD", _SCRIPTS[name][0].decode())
            _, reply = await asyncio.gather(loading, self._line.call(packed, deadline))
            return reply

    async def command(self, deadline: float, *words: str) -> Any:
        """See Server."""
        return await self._line.call(b"*%d\r\n%b" % (len(words), _pack(words)), deadline)

    async def aclose(self) -> None:
        """See Server."""
        await self._line.aclose()


class Cluster:
    """On the node that has the pool's keys; redis-py finds it and follows it."""

    def __init__(self, client: RedisCluster) -> None:
        self._client: Any = client

    async def script(self, deadline: float, name: str, model: str, arguments: Sequence[Argument]) -> Any:
        """See Server."""
        text, digest = _SCRIPTS[name]
        keys = pool_keys(model)
        async with asyncio.timeout_at(deadline):
            try:
                return await self._client.evalsha(digest.decode(), len(keys), *keys, *arguments)
            except NoScriptError:
                # Runs it as well as loading it, and there where it is needed.
                return await self._client.eval(text.decode(), len(keys), *keys, *arguments)

    async def command(self, deadline: float, *words: str) -> Any:
        """See Server."""
        async with asyncio.timeout_at(deadline):
            return await self._client.execute_command(*words)

    async def aclose(self) -> None:
        """Nothing: whoever made the client closes it."""


def encode(name: str) -> str:
    """Any text as letters, digits, `_.-~` and `%`: distinct names stay distinct, and no separator of the scripts is in them."""
    return quote(name, safe="")


@lru_cache(1024)
def pool_keys(model: str) -> tuple[str, ...]:
    """Return the keys of a model's pool. Raises ValueError for an empty name."""
    if not model:
        raise ValueError("the model name is empty; give the served model name")
    # The braces put all keys of a pool into one hash slot of a Redis cluster.
    return tuple(f"{PREFIX}{{{encode(model)}}}:{name}" for name in _POOL_KEYS)


@lru_cache(4096)
def _script_head(name: str, model: str) -> tuple[bytes, int]:
    """EVALSHA up to the arguments, packed once: it is most of a call's bytes."""
    keys = pool_keys(model)
    words: tuple[Argument, ...] = ("EVALSHA", _SCRIPTS[name][1].decode(), len(keys), *keys)
    return _pack(words), len(words)


def _pack(words: Sequence[Argument]) -> bytes:
    """Bulk strings of Redis' protocol (https://redis.io/docs/latest/develop/reference/protocol-spec/)."""
    packed = []
    for word in words:
        text = str(word).encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(packed)
