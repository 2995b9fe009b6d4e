"""The client of the lease table: each method is one Lua script, run in one round trip on Redis' own clock.

The scripts decide; this file only encodes their arguments, bounds the waiting and names the errors.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict
from importlib.resources import files
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError

from leases.errors import LeasesUnavailable
from leases.records import MAX_CAPACITY_TOKENS, Grant, Node, NoSlot, PoolView, SlotState, SlotView

_T = TypeVar("_T")

# The number is the version of the key layout: clients of different layouts must not share keys.
_PREFIX = "anchorleg:leases:1:"
_POOL_INDEX = _PREFIX + "pools"
_POOL_KEYS = ("nodes", "alive", "sizes", "ready", "free", "leases", "epoch")
# A pool that nobody renews any more disappears. Far longer than any claim lives, because the epoch counter
# goes with it.
_RETENTION_MS = 3_600_000
# More would only queue inside Redis, which runs one script at a time.
_MAX_CONNECTIONS = 32
_RETRIES = 1


class LeaseTable:
    """The lease table of all pools, at one Redis URL.

    Use it as `async with LeaseTable(url) as table`, or call `aclose`. It connects on first use. Every method
    raises `LeasesUnavailable` within `timeout_s` when Redis is away.

    Cancelling a method abandons its reply; the script may have run. A cancelled `acquire` thus leaves at most
    a lease that the daemon's next heartbeat takes back once `lease_ms` or `landing_ms` is over, whichever is
    shorter. A cancelled `release` may have done nothing: a caller that is being cancelled runs it as a task
    of its own and lets that finish (`asyncio.shield`), and if it is lost all the same the lease runs out as
    above.

    Args:
        url: redis://, rediss:// or unix://, with user and password where needed.
        ttl_ms: how long a node stays in the table after a heartbeat.
        landing_ms: how long a lease may go unused by its daemon before a heartbeat takes it back.
        timeout_s: bound of one call, connecting and one retry included.

    Raises:
        ValueError: the URL has another scheme, or a time is not positive.
    """

    def __init__(self, url: str, *, ttl_ms: int = 3_000, landing_ms: int = 10_000, timeout_s: float = 1.0) -> None:
        for name, value in (("ttl_ms", ttl_ms), ("landing_ms", landing_ms), ("timeout_s", timeout_s)):
            if value <= 0:
                raise ValueError(f"{name} is {value}, it must be above 0")
        self.ttl_ms = ttl_ms
        self.landing_ms = landing_ms
        self.timeout_s = timeout_s
        self._redis: Redis = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s / 2,
            socket_connect_timeout=timeout_s / 2,
            retry=Retry(ExponentialWithJitterBackoff(cap=timeout_s / 10, base=timeout_s / 100), _RETRIES),
        )
        self._turns = asyncio.Semaphore(_MAX_CONNECTIONS)
        address = self._redis.connection_pool.connection_kwargs
        self._where = address.get("path") or f"{address.get('host', 'localhost')}:{address.get('port', 6379)}"
        self._register = self._script("register")
        self._acquire = self._script("acquire")
        self._release = self._script("release")
        self._unregister = self._script("unregister")
        self._inspect = self._script("inspect")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections. What is leased or published stays so until its time is over."""
        await self._redis.aclose()

    async def ping(self) -> None:
        """Returns when Redis has answered."""
        await self._call("ping", self._redis.ping)

    async def register(self, node: Node, views: Sequence[SlotView]) -> tuple[SlotState, ...]:
        """Publishes the node and its slots, or renews them: this is also the heartbeat.

        Everything that the table should know is in the call, so that a Redis which came back empty is
        restored by it.

        Args:
            node: the daemon.
            views: one for each slot, in any order.

        Returns:
            The table's state of each slot, by number.

        Raises:
            ValueError: `views` are not those of slots 0 to `node.slots` - 1.
        """
        ordered = sorted(views, key=lambda view: view.slot)
        if [view.slot for view in ordered] != list(range(node.slots)):
            raise ValueError(
                f"node {node.node_id!r}: views name slots {[view.slot for view in ordered]}, "
                f"give exactly one for each of 0..{node.slots - 1}"
            )
        record = json.dumps(asdict(node) | {"idle": all(view.idle for view in ordered)})
        arguments: list[str | int] = [_encode(node.node_id), record, node.capacity_tokens]
        arguments += [self.ttl_ms, self.landing_ms, _RETENTION_MS]
        for view in ordered:
            arguments += [view.floor, "" if view.in_use is None else view.in_use]

        async def publish() -> list[int]:
            reply: list[int] = await self._register(keys=_pool_keys(node.model), args=arguments)
            # Another hash slot, so not part of the script; repeated each time, as an emptied Redis has lost
            # it too.
            await self._redis.sadd(_POOL_INDEX, node.model)
            return reply

        reply = await self._call("register", publish)
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return tuple(SlotState(slot, epoch, leased == 1) for slot, (epoch, leased) in enumerate(pairs))

    async def acquire(
        self, model: str, tokens: int, nonce: str, lease_ms: int, *, avoid: Collection[str] = ()
    ) -> Grant | NoSlot:
        """Leases the best free slot: of an idle node if there is one, and the smallest that fits.

        Args:
            model: the pool.
            tokens: how many the slot must hold, prompt and answer.
            nonce: unique for each wish. Repeated within `lease_ms`, it returns the same grant for as long as
                that is still the slot's lease, so a caller that lost the reply does not lose the slot.
            lease_ms: how long the grant may go unused by the daemon; the daemon's `landing_ms` bounds it as
                well.
            avoid: ids of nodes not to be given, such as one that has just refused.

        Raises:
            ValueError: an argument is out of range.
        """
        if not nonce:
            raise ValueError("nonce is empty; give each acquire a random one")
        if not 0 <= tokens <= MAX_CAPACITY_TOKENS:
            raise ValueError(f"tokens is {tokens}, it must lie in 0..{MAX_CAPACITY_TOKENS}")
        if lease_ms < 1:
            raise ValueError(f"lease_ms is {lease_ms}, it must be at least 1")
        keys = [*_pool_keys(model), _pool_key(model, "grant:" + nonce)]
        arguments = [tokens, lease_ms, *map(_encode, avoid)]
        status, *granted = await self._call("acquire", lambda: self._acquire(keys=keys, args=arguments))
        if status != "granted":
            return NoSlot(status)
        record, slot, epoch = granted
        node = _node(record)
        return Grant(
            pool=model,
            node_id=node.node_id,
            slot=slot,
            epoch=epoch,
            card=node.card,
            decode_endpoint=node.decode_endpoint,
            control_host=node.control_host,
            control_port=node.control_port,
            capacity_tokens=node.capacity_tokens,
        )

    async def release(self, pool: str, node_id: str, slot: int, epoch: int) -> bool:
        """Frees the slot if `epoch` is its lease.

        Returns:
            False when it is not: released before, taken back, or the node has left. Nothing was changed then.
            After a lost reply the repetition finds its own work done and returns False too.
        """
        arguments = [_encode(node_id), slot, epoch]
        freed = await self._call("release", lambda: self._release(keys=_pool_keys(pool), args=arguments))
        return bool(freed)

    async def unregister(self, node: Node) -> None:
        """Takes the node and its slots out of the pool. Its leases end, no epoch is ever repeated."""
        arguments = [_encode(node.node_id)]
        await self._call("unregister", lambda: self._unregister(keys=_pool_keys(node.model), args=arguments))

    async def pools(self) -> dict[str, PoolView]:
        """All models that have a live node. Its cost grows with the nodes: not for each request."""
        return await self._call("pools", self._read_pools)

    async def _read_pools(self) -> dict[str, PoolView]:
        views: dict[str, PoolView] = {}
        for model in sorted(map(str, await self._redis.smembers(_POOL_INDEX))):
            free_slots, *records = await self._inspect(keys=_pool_keys(model))
            if records:
                nodes = sorted(map(_node, records), key=lambda node: node.node_id)
                views[model] = PoolView(model=model, nodes=tuple(nodes), free_slots=free_slots)
            else:
                # A node that registers just now names its pool again at its next heartbeat.
                await self._redis.srem(_POOL_INDEX, model)
        return views

    def _script(self, name: str) -> Callable[..., Awaitable[Any]]:
        room = files("leases")
        text = room.joinpath("common.lua").read_text() + room.joinpath(f"{name}.lua").read_text()
        # Runs by digest, and loads the script again where the server has lost it.
        return self._redis.register_script(text)

    async def _call(self, operation: str, command: Callable[[], Awaitable[_T]]) -> _T:
        try:
            async with asyncio.timeout(self.timeout_s), self._turns:
                return await command()
        except (RedisError, OSError) as error:  # OSError covers TimeoutError
            reason = str(error) or type(error).__name__
            raise LeasesUnavailable(
                f"lease table: {operation} at {self._where} failed ({reason}; limit {self.timeout_s} s); "
                "check that Redis runs there, accepts writes and this user, and that the URL is right"
            ) from error


def _encode(name: str) -> str:
    """Any text as letters, digits, `_.-~` and `%`: distinct names stay distinct, without brace or colon."""
    return quote(name, safe="")


def _pool_key(model: str, name: str) -> str:
    # The braces put all keys of a pool into one hash slot of a Redis cluster.
    return f"{_PREFIX}{{{_encode(model)}}}:{name}"


def _pool_keys(model: str) -> list[str]:
    if not model:
        raise ValueError("the model name is empty; give the served model name")
    return [_pool_key(model, name) for name in _POOL_KEYS]


def _node(record: str) -> Node:
    fields = json.loads(record)
    del fields["idle"]
    return Node(**fields)
