"""The client of the lease table: each method is one Lua script, run in one round trip on Redis' own clock.

The scripts decide; this file only encodes their arguments, bounds the waiting and names the errors.
"""

import asyncio
import random
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from os import getpid
from types import TracebackType
from typing import Self, TypeVar

from redis.asyncio import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from leases.codec import acquire_arguments, read_outcome, read_report, read_states, read_view, register_arguments
from leases.connect import connect
from leases.errors import LeasesUnavailable
from leases.line import Line
from leases.records import Denied, Grant, Node, NodeStatus, NoSlot, PoolReport, PoolView, SlotRequest, SlotState, SlotView
from leases.scripts import PREFIX, Argument, Cluster, OneServer, Server, encode
from leases.wakeups import Wakeups

_T = TypeVar("_T")

_POOL_INDEX = PREFIX + "pools"
# A pool that nobody renews any more disappears. Far longer than any claim lives, because the epoch counter
# goes with it.
_RETENTION_MS = 3_600_000
# A waiter looks for itself this often, and counts as gone when it has not for `waiter_ttl_ms`.
_LOOKS_PER_TTL = 4
# Calls without an answer that are undone at a time. While Redis is away every call is one, and trying to undo them all would
# only be more load; what they may have been granted runs out by itself.
_MOST_UNSURE = 32
_NODES_PER_CARD = 3


class LeaseTable:
    """The lease table of all pools, at one Redis URL.

    Use it as `async with LeaseTable(url) as table`, or call `aclose`. It connects on first use. Every method
    raises `LeasesUnavailable` within `timeout_s` when Redis is away, `acquire` within that after its wait.

    Cancelling `acquire` gives back what it was or would have been granted, in the background; `aclose` waits
    for that. Cancelling another method abandons its reply; the script may have run. A cancelled `give_back` may
    have done nothing: a caller that is being cancelled runs it as a task of its own and lets that finish
    (`asyncio.shield`), and if it is lost all the same the lease runs out by itself: the daemon's next heartbeat
    takes it back once `lease_ms` or `landing_ms` is over, whichever is shorter.

    Args:
        url: see `leases.url`.
        ttl_ms: how long a node stays in the table after a heartbeat.
        landing_ms: how long a lease may go unused by its daemon before a heartbeat takes it back.
        waiter_ttl_ms: how long a waiter may be silent, and a slot that was handed to it unfetched. One value
            for all clients of a pool.
        timeout_s: bound of one call, connecting and one retry included.
        holder: who leases, for people who look at the table; host and process by default.

    Raises:
        ValueError: the URL is none that `leases.url` knows, or a time is not positive.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_ms: int = 3_000,
        landing_ms: int = 3_000,
        waiter_ttl_ms: int = 1_000,
        timeout_s: float = 1.0,
        holder: str = "",
    ) -> None:
        times = {"ttl_ms": ttl_ms, "landing_ms": landing_ms, "waiter_ttl_ms": waiter_ttl_ms, "timeout_s": timeout_s}
        for name, value in times.items():
            if value <= 0:
                raise ValueError(f"{name} is {value}, it must be above 0")
        self.ttl_ms = ttl_ms
        self.landing_ms = landing_ms
        self.waiter_ttl_ms = waiter_ttl_ms
        self.timeout_s = timeout_s
        self._holder = encode(holder or f"{socket.gethostname()}:{getpid()}")
        self._connected = connect(url, timeout_s)
        client = self._connected.client
        self._server: Server = Cluster(client) if isinstance(client, RedisCluster) else OneServer(Line(client.connection_pool))
        self._wakeups = Wakeups(client.pubsub, f"{PREFIX}wake:{uuid.uuid4().hex}")
        self._undoing: dict[str, asyncio.Task[None]] = {}  # by nonce
        self._hurried = False
        self._closing = False
        self._closed = False
        self._running = 0  # calls
        self._all_ended = asyncio.Event()  # once it is closed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections, once what cancelled calls left behind is undone and the others have ended.

        That takes three `timeout_s` at most. What is leased or published stays so until its time is over; who waits for a
        slot gets LeasesUnavailable.
        """
        self._closing = True
        try:
            while self._undoing:
                await asyncio.wait(self._undoing.values())
        finally:
            self._closed = True
            self._wakeups.wake_all()
            try:
                if self._running:  # else one that tries again would open a connection that nobody closes
                    await self._all_ended.wait()
                await self._wakeups.aclose()
                await self._server.aclose()
            finally:
                await self._connected.aclose()

    async def ping(self) -> None:
        """Returns when Redis has answered."""
        await self._call("ping", lambda deadline: self._server.command(deadline, "PING"))

    # --- What daemons do ---

    async def register(self, node: Node, status: NodeStatus, views: Sequence[SlotView]) -> tuple[SlotState, ...]:
        """Publishes the node and its slots, or renews them: this is also the heartbeat.

        Everything that the table should know is in the call, so that a Redis which came back empty is
        restored by it.

        Args:
            node: the daemon.
            status: of the whole daemon. While it drains, none of its slots is given out.
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
        times = self.ttl_ms, self.landing_ms, self.waiter_ttl_ms, _RETENTION_MS
        arguments = register_arguments(node, status, ordered, times)

        async def publish(deadline: float) -> list[int]:
            reply: list[int] = await self._server.script(deadline, "register", node.model, arguments)
            # Another hash slot, so not part of the script; repeated each time, as an emptied Redis has lost
            # it too.
            await self._server.command(deadline, "SADD", _POOL_INDEX, node.model)
            return reply

        return read_states(await self._call("register", publish))

    async def release(self, pool: str, node_id: str, slot: int, epoch: int) -> bool:
        """Frees a slot of the daemon's own after its use, if `epoch` is its lease; the next waiter gets it.

        Returns:
            False when it is not: released before, taken back, or the node has left. Nothing was changed then.
            After a lost reply the repetition finds its own work done and returns False too.
        """
        arguments: list[Argument] = [encode(node_id), slot, epoch, self.waiter_ttl_ms]
        freed = await self._call("release", lambda deadline: self._server.script(deadline, "release", pool, arguments))
        return bool(freed)

    async def unregister(self, node: Node) -> None:
        """Takes the node and its slots out of the pool. Its leases end, no epoch is ever repeated."""
        arguments: list[Argument] = [encode(node.node_id), self.waiter_ttl_ms]
        await self._call("unregister", lambda deadline: self._server.script(deadline, "unregister", node.model, arguments))

    # --- What gateways do ---

    async def acquire(self, request: SlotRequest) -> Grant | Denied:
        """Leases the best free slot, and waits for one in the pool's queue if the request says so.

        Best is a slot of an idle node, then one of the node that will be free soonest.
        """
        if (undoing := self._undoing.get(request.nonce)) is not None:
            await asyncio.wait([undoing])  # or it would undo this
        try:
            return await self._wait(request) if request.wait_ms and not self._hurried else await self._take(request)
        except (asyncio.CancelledError, LeasesUnavailable) as error:
            # The call may still be on its way, or have been granted a slot: what follows it undoes that.
            if isinstance(error, asyncio.CancelledError) or len(self._undoing) < _MOST_UNSURE:
                self._undo(request)
            raise

    async def _take(self, request: SlotRequest) -> Grant | Denied:
        return await self._ask(request, 0) or Denied(NoSlot.BUSY)  # nobody who has no time is told to wait

    async def _wait(self, request: SlotRequest) -> Grant | Denied:
        deadline = time.monotonic() + request.wait_ms / 1000
        look_s = self.waiter_ttl_ms / 1000 / _LOOKS_PER_TTL
        with self._wakeups.expected(request.nonce) as woken:
            while (left_s := deadline - time.monotonic()) > 0 and not self._hurried:
                woken.clear()
                outcome = await self._ask(request, max(1, round(left_s * 1000)))
                if outcome is not None:
                    return outcome
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(look_s * random.uniform(0.8, 1.0), left_s)):
                        await woken.wait()
        return await self._take(request)

    async def give_back(self, grant: Grant) -> bool:
        """Frees a slot that was not used, if it is still leased to this grant; the next waiter gets it.

        Returns:
            False when it is not: given back before, released by the daemon, or taken back.
        """
        return await self._end(grant.pool, grant.nonce)

    def hurry(self) -> None:
        """Makes every `acquire` take what is free now or go without: for a process that is about to stop."""
        self._hurried = True
        self._wakeups.wake_all()

    # --- What people and metrics see ---

    async def pools(self) -> dict[str, PoolView]:
        """All models that have a live node. Its cost does not grow with the nodes."""
        return await self._call("pools", self._read_pools)

    async def inspect(self) -> dict[str, PoolReport]:
        """Everything, for people to look at. Its cost grows with the nodes: not for each request."""
        return await self._call("inspect", self._read_reports)

    async def _read_pools(self, deadline: float) -> dict[str, PoolView]:
        views: dict[str, PoolView] = {}
        arguments = [self.waiter_ttl_ms, _NODES_PER_CARD, random.randrange(1 << 30)]
        for model in await self._models(deadline):
            view = read_view(model, await self._server.script(deadline, "overview", model, arguments))
            if view.nodes:
                views[model] = view
            else:
                # A node that registers just now names its pool again at its next heartbeat.
                await self._server.command(deadline, "SREM", _POOL_INDEX, model)
        return views

    async def _read_reports(self, deadline: float) -> dict[str, PoolReport]:
        reports = []
        for model in await self._models(deadline):
            reply = await self._server.script(deadline, "inspect", model, [self.waiter_ttl_ms])
            reports.append(read_report(model, reply))
        return {report.model: report for report in reports if report.nodes}

    async def _models(self, deadline: float) -> list[str]:
        return sorted(map(str, await self._server.command(deadline, "SMEMBERS", _POOL_INDEX)))

    # --- The calls ---

    async def _ask(self, request: SlotRequest, wait_ms: int) -> Grant | Denied | None:
        """Run the script once; None: the request waits."""
        arguments = acquire_arguments(request, wait_ms, self.waiter_ttl_ms, self._holder, self._wakeups.channel)
        reply = await self._call("acquire", lambda deadline: self._server.script(deadline, "acquire", request.pool, arguments))
        return read_outcome(request, reply)

    async def _end(self, pool: str, nonce: str) -> bool:
        arguments: list[Argument] = [nonce, self.waiter_ttl_ms]
        ended = await self._call("give_up", lambda deadline: self._server.script(deadline, "give_up", pool, arguments))
        return bool(ended)

    def _undo(self, request: SlotRequest) -> None:
        nonce = request.nonce
        self._undoing[nonce] = asyncio.create_task(self._abandon(request))
        self._undoing[nonce].add_done_callback(lambda _: self._undoing.pop(nonce, None))

    async def _abandon(self, request: SlotRequest) -> None:
        """Undo a request for as long as there may be something to undo: a server that was stopped may still run it."""
        deadline = time.monotonic() + request.lease_ms / 1000
        pause_s = self.timeout_s / 10
        while time.monotonic() < deadline:
            with suppress(LeasesUnavailable):
                await self._end(request.pool, request.nonce)
                return
            if self._closing:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self.timeout_s)

    async def _call(self, operation: str, command: Callable[[float], Awaitable[_T]]) -> _T:
        """Run a command that keeps to a deadline, by the event loop's clock."""
        self._must_be_open(operation)
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        self._running += 1
        try:
            try:
                return await command(deadline)
            except (RedisConnectionError, ConnectionError):
                # The server was restarted, or another call's failure took the connection with it. Every script may be run
                # twice.
                self._must_be_open(operation)
                await asyncio.sleep(self.timeout_s * random.uniform(0.01, 0.05))
                return await command(deadline)
        except (RedisError, OSError) as error:  # OSError covers TimeoutError
            reason = str(error) or type(error).__name__
            raise LeasesUnavailable(
                f"lease table: {operation} at {self._connected.where} failed ({reason}; limit {self.timeout_s} s); "
                "check that Redis runs there, accepts writes and this user, and that the URL is right"
            ) from error
        finally:
            self._running -= 1
            if self._closed and not self._running:
                self._all_ended.set()

    def _must_be_open(self, operation: str) -> None:
        if self._closed:
            raise LeasesUnavailable(f"lease table: {operation} after aclose; make a new LeaseTable")
