"""The heartbeat of one decode daemon: keeps its slots in the lease table for as long as it runs."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import structlog

from leases.errors import LeasesUnavailable
from leases.records import Node, NodeStatus, SlotState, SlotView
from leases.table import LeaseTable

# With the table's own timeout this keeps the daemon's return within a second of Redis' return.
_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 0.25

_log = structlog.get_logger(__name__)


class Advertiser:
    """Renews a node in the table every third of its TTL, with jitter, through any absence of Redis.

    Use it as `async with Advertiser(...)`, or call `start` and `aclose`. An absence is logged once when it
    begins and once when it ends. Give it a `LeaseTable` of its own: heartbeats then never wait behind other
    calls.

    Args:
        table: where to publish; its `ttl_ms` sets the pace.
        node: the daemon.
        look: called for each heartbeat, on the event loop; returns what is true of the daemon and of every
            slot now.
        on_reply: called with the table's answer, so that the daemon can raise its floors.
    """

    def __init__(
        self,
        table: LeaseTable,
        node: Node,
        look: Callable[[], tuple[NodeStatus, Sequence[SlotView]]],
        on_reply: Callable[[tuple[SlotState, ...]], None],
    ) -> None:
        self._table = table
        self._node = node
        self._look = look
        self._on_reply = on_reply
        self._kicked = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._away_since: float | None = None  # time.monotonic() of the first failed heartbeat of an outage

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def start(self) -> None:
        """Begins to publish; call once, on the event loop."""
        if self._task is not None or self._closing.is_set():
            raise RuntimeError(f"advertiser of node {self._node.node_id!r} was started before; make a new one")
        self._task = asyncio.create_task(self._run(), name=f"advertiser-{self._node.node_id}")
        self._task.add_done_callback(self._report_death)

    def kick(self) -> None:
        """Publishes now instead of at the next beat: for every change of a slot."""
        self._kicked.set()

    async def aclose(self) -> None:
        """Ends the heartbeat and takes the node out of the table; where Redis is away, the TTL does that.

        Takes at most two of the table's timeouts. Raises what `look` or `on_reply` raised, if that ended the
        heartbeat.
        """
        task, self._task = self._task, None
        self._closing.set()
        self._kicked.set()
        if task is None:
            return
        try:
            # Not cancelled: a heartbeat that is under way could reach Redis after the unregister and undo it.
            await task
        finally:
            try:
                await self._table.unregister(self._node)
            except LeasesUnavailable as error:
                _log.warning("unregister_failed", node=self._node.node_id, error=str(error))

    async def _run(self) -> None:
        beat_s = self._table.ttl_ms / 3_000
        backoff_s = _FIRST_BACKOFF_S
        while not self._closing.is_set():
            self._kicked.clear()
            if await self._publish():
                backoff_s = _FIRST_BACKOFF_S
                await _wait(self._kicked, beat_s * random.uniform(0.8, 1.0))
            else:
                # Kicks do not shorten this: the next attempt publishes the newest state anyway.
                await _wait(self._closing, backoff_s * random.uniform(0.8, 1.0))
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _publish(self) -> bool:
        try:
            states = await self._table.register(self._node, *self._look())
        except LeasesUnavailable as error:
            if self._away_since is None:
                self._away_since = time.monotonic()
                _log.warning("leases_unavailable", node=self._node.node_id, error=str(error))
            return False
        if self._away_since is not None:
            away_s = round(time.monotonic() - self._away_since, 3)
            self._away_since = None
            _log.info("leases_back", node=self._node.node_id, away_s=away_s)
        self._on_reply(states)
        return True

    def _report_death(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error(
                "advertiser_died",
                node=self._node.node_id,
                exc_info=task.exception(),
                consequence="this node leaves the table when its TTL is over; restart the daemon",
            )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
