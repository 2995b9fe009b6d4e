"""What the gateway knows of the pools between requests: which models have daemons, and their cards, fetched ahead."""

import asyncio
import contextlib

import structlog

from gateway.cards import Cards
from gateway.decode_client import DecodeClient, DecodeFailed
from gateway.metrics import GatewayMetrics
from leases import LeasesUnavailable, LeaseTable, PoolView

log = structlog.get_logger(__name__)

_PERIOD_S = 1.0


class Pools:
    """A view of the lease table, at most a second or so old. Grants are never decided here."""

    def __init__(self, table: LeaseTable, cards: Cards, client: DecodeClient, metrics: GatewayMetrics) -> None:
        self._table = table
        self._cards = cards
        self._client = client
        self._metrics = metrics
        self._views: dict[str, PoolView] = {}
        self._task: asyncio.Task[None] | None = None

    def get(self, model: str) -> PoolView | None:
        """Return the pool of a model, if it had daemons when the table was last read."""
        return self._views.get(model)

    async def start(self) -> None:
        """Read the table once, then keep reading it."""
        await self._refresh()
        self._task = asyncio.create_task(self._run(), name="pools")

    async def aclose(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self._refresh()
            except Exception:
                # Such as a record written by a later version: the last view stands, and the next reading may do better.
                log.exception("pools not read")

    async def _refresh(self) -> None:
        try:
            views = await self._table.pools()
        except LeasesUnavailable:
            # The last view stands: cards and channels stay, and acquire has its own say on who may have a slot.
            self._metrics.leases_up.set(0)
            return
        self._metrics.leases_up.set(1)
        for model in self._views.keys() - views.keys():
            for state in ("free", "leased"):
                self._metrics.pool_slots.remove(model, state)
        self._views = views
        for model, view in views.items():
            self._metrics.pool_slots.labels(model, "free").set(view.free_slots)
            self._metrics.pool_slots.labels(model, "leased").set(view.total_slots - view.free_slots)
        nodes = [node for view in views.values() for node in view.nodes]
        self._client.forget_all_but({node.decode_endpoint for node in nodes})
        # Side by side: a daemon that hangs must not keep the others' cards away.
        endpoints = {node.card: node.decode_endpoint for node in nodes}
        await asyncio.gather(*(self._fetch(card, endpoint) for card, endpoint in endpoints.items()))

    async def _fetch(self, card: str, endpoint: str) -> None:
        try:
            await self._cards.fetch(card, endpoint)
        except DecodeFailed as error:
            log.warning("card unavailable", card=card, error=str(error))
