"""What the gateway knows of the pools between requests: which models have daemons, and their cards, fetched ahead."""

import asyncio
import math
import time
from collections.abc import Iterable

import structlog

from gateway.cards import Cards
from gateway.decode_client import DecodeClient, DecodeFailed
from gateway.metrics import GatewayMetrics
from leases import LeasesUnavailable, LeaseTable, Node, PoolView

log = structlog.get_logger(__name__)

_PERIOD_S = 1.0
_RESTLESS_PERIOD_S = 0.2
_RESTLESS_S = 3.0
_FIRST_CARDS_S = 10.0


class Pools:
    """A view of the lease table, at most a second or so old. Grants are never decided here."""

    def __init__(self, table: LeaseTable, cards: Cards, client: DecodeClient, metrics: GatewayMetrics) -> None:
        self._table = table
        self._cards = cards
        self._client = client
        self._metrics = metrics
        self._views: dict[str, PoolView] = {}
        self._restless_until = 0.0  # time.monotonic(); until then the table is looked at more often
        self._task: asyncio.Task[None] | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}  # by the card's fingerprint

    def get(self, model: str) -> PoolView | None:
        """Return the pool of a model, if it had daemons when the table was last read."""
        return self._views.get(model)

    async def start(self) -> None:
        """Read the table and its daemons' cards once, within some seconds, then keep reading."""
        await self._read()
        self._task = asyncio.create_task(self._run(), name="pools")
        if self._fetching:
            await asyncio.wait(list(self._fetching.values()), timeout=_FIRST_CARDS_S)

    async def aclose(self) -> None:
        """Stop reading."""
        tasks = [*([] if self._task is None else [self._task]), *self._fetching.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S if time.monotonic() >= self._restless_until else _RESTLESS_PERIOD_S)
            await self._read()

    async def _read(self) -> None:
        try:
            await self._client.close_idle()
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
            self._restless_until = math.inf
            return
        if self._restless_until == math.inf or self._views.keys() - views.keys():
            # Redis came back empty, say: the daemons fill it again one by one.
            self._restless_until = time.monotonic() + _RESTLESS_S
        self._metrics.leases_up.set(1)
        self._show(views)
        self._views = views
        for view in views.values():
            for card, nodes in view.cards.items():
                self._want(card, nodes)

    def _show(self, views: dict[str, PoolView]) -> None:
        metrics = self._metrics
        for model in self._views.keys() - views.keys():
            for state in ("free", "leased"):
                metrics.pool_slots.remove(model, state)
            metrics.pool_waiting.remove(model)
            metrics.pool_nodes.remove(model)
        for model, view in views.items():
            metrics.pool_slots.labels(model, "free").set(view.free_slots)
            metrics.pool_slots.labels(model, "leased").set(view.leased_slots)
            metrics.pool_waiting.labels(model).set(view.waiting)
            metrics.pool_nodes.labels(model).set(view.nodes)

    def _want(self, card: str, nodes: Iterable[Node]) -> None:
        """Fetch a card that is not here. Beside the reading: a daemon that hangs keeps neither news nor other cards away."""
        if card in self._fetching or self._cards.get(card) is not None:
            return
        task = asyncio.create_task(self._fetch(card, tuple(nodes)), name=f"card-{card}")
        self._fetching[card] = task
        task.add_done_callback(lambda _: self._fetching.pop(card, None))

    async def _fetch(self, card: str, nodes: tuple[Node, ...]) -> None:
        for node in nodes:
            try:
                await self._cards.fetch(card, node.decode_endpoint)
            except DecodeFailed as error:
                log.warning("card unavailable", card=card, node=node.node_id, error=str(error))
            else:
                return
