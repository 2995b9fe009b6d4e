"""A process of simulated decode daemons: real heartbeats and releases, and slots that keep the daemon's rules.

The rules are those of `decode_daemon.slots.LandingSlot`, written again in a few lines: that module brings torch, and fifty
daemons are to start in seconds.

One request is one line of JSON (node, slot, epoch, hold_s); the answer is `reserved` or the reason of the refusal, then `done`.
"""

import asyncio
import json
import random
import sys
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path

from leases import Advertiser, LeasesUnavailable, LeaseTable, Node, NodeStatus, SlotState, SlotView
from tests.soak.records import CAPACITIES, CARD, POOL, Journal, Setup


class Slot:
    """Held by one epoch at a time, and by none twice."""

    def __init__(self) -> None:
        self.floor = 0
        self.in_use: int | None = None

    def reserve(self, epoch: int) -> str:
        """Return why not; empty: it is held now."""
        if self.in_use is not None:
            return "slot_busy"
        if epoch <= self.floor:
            return "stale_epoch"
        self.floor = self.in_use = epoch
        return ""

    def raise_floor(self, epoch: int) -> None:
        if self.in_use is None or epoch < self.in_use:
            self.floor = max(self.floor, epoch)


class Daemon:
    """One node and its slots."""

    def __init__(self, node: Node, beats: LeaseTable, journal: Journal) -> None:
        self.node = node
        self.slots = [Slot() for _ in range(node.slots)]
        self.advertiser = Advertiser(beats, node, self._look, self._hear)
        journal.write("start", node=node.node_id, slots=node.slots)

    def _look(self) -> tuple[NodeStatus, list[SlotView]]:
        busy = sum(slot.in_use is not None for slot in self.slots)
        views = [
            SlotView(index, slot.floor, slot.in_use, "free" if slot.in_use is None else "decoding")
            for index, slot in enumerate(self.slots)
        ]
        return NodeStatus(idle=not busy, busy_ms=300 * busy), views

    def _hear(self, states: tuple[SlotState, ...]) -> None:
        for state in states:
            self.slots[state.slot].raise_floor(state.epoch - 1 if state.leased else state.epoch)


class Service:
    """What gateways talk to."""

    def __init__(self, daemons: list[Daemon], table: LeaseTable, journal: Journal) -> None:
        self._daemons = {daemon.node.node_id: daemon for daemon in daemons}
        self._table = table
        self._journal = journal

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            asked = json.loads(await reader.readline() or "{}")
            if asked:
                await self._serve(asked["node"], asked["slot"], asked["epoch"], asked["hold_s"], reader, writer)

    async def _serve(
        self, name: str, index: int, epoch: int, hold_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        daemon = self._daemons[name]
        slot = daemon.slots[index]
        facts = {"node": name, "slot": index, "epoch": epoch}
        if refusal := slot.reserve(epoch):
            self._journal.write("refuse", reason=refusal, floor=slot.floor, in_use=slot.in_use, **facts)
            writer.write(f"{refusal}\n".encode())
            await writer.drain()
            return
        self._journal.write("reserve", **facts)
        daemon.advertiser.kick()
        writer.write(b"reserved\n")
        outcome = "left"
        try:
            async with asyncio.timeout(hold_s):
                await reader.read()  # until the gateway has gone
        except TimeoutError:
            outcome = "done"
        finally:
            slot.in_use = None
            self._journal.write("finish", outcome=outcome, **facts)
            with suppress(LeasesUnavailable):
                await self._table.release(POOL, name, index, epoch)
            daemon.advertiser.kick()
        writer.write(b"done\n")
        await writer.drain()


async def run(setup: Setup) -> None:
    """Serve until killed."""
    folder, pick = Path(setup.folder), random.Random(setup.seed)
    endpoint = folder / f"{setup.name}.sock"
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(closing(Journal(folder, setup.name)))
        beats, table = [await stack.enter_async_context(setup.table()) for _ in range(2)]
        daemons = []
        for number in range(setup.count):
            name = f"{setup.name}-{number}"
            node = Node(name, POOL, CARD, str(endpoint), name, 1, pick.choice(CAPACITIES), pick.randint(1, 3))
            daemons.append(Daemon(node, beats, journal))
        server = await asyncio.start_unix_server(Service(daemons, table, journal).serve, endpoint)
        await stack.enter_async_context(server)
        for daemon in daemons:
            await stack.enter_async_context(daemon.advertiser)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(Setup.load(sys.argv[1])))
