"""The life of a pool at whatever a URL leads to, and users with the rights that the documentation asks for."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from leases import Advertiser, Grant, LeaseTable, NodeStatus, NoSlot, SlotState, SlotView
from tests.kit.servers import Server, programs
from tests.kit.valkey import acquire, grant, node, queued, refusal, register, release

PROGRAMS = programs()
EACH_PROGRAM = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys(), scope="module")
PASSWORD = "p@ss:w/o?r#d %41é"
RULE = re.compile(
    r"^ACL SETUSER anchorleg reset on >PASSWORD (?P<all>.+)\nACL SETUSER anchorleg (?P<cluster>.+)$", re.MULTILINE
)

Flush = Callable[[], Awaitable[object]]


def lease_table(url: str, *, timeout_s: float = 5) -> LeaseTable:
    """A table whose waiters look for themselves only every 12 s, so that a slot found before was told of."""
    return LeaseTable(url, ttl_ms=60_000, landing_ms=60_000, waiter_ttl_ms=60_000, timeout_s=timeout_s)


class Daemon:
    """What the heartbeat asks a daemon."""

    def __init__(self, model: str) -> None:
        self.node = node("daemon-1", model=model)
        self.status = NodeStatus()
        self.heard: asyncio.Queue[tuple[SlotState, ...]] = asyncio.Queue()

    def look(self) -> tuple[NodeStatus, Sequence[SlotView]]:
        return self.status, [SlotView(slot=0, floor=0, in_use=None)]

    async def beat(self, advertiser: Advertiser) -> tuple[SlotState, ...]:
        """A heartbeat that looks after now."""
        advertiser.kick()
        return await asyncio.wait_for(self.heard.get(), 5)


async def live(url: str, forget_scripts: Flush, *, model: str = "smollm2") -> None:
    """Everything that daemons, gateways and people do with a pool, once."""
    daemon = Daemon(model)
    async with lease_table(url) as daemons, lease_table(url) as gateway:
        await daemons.ping()
        await register(daemons, daemon.node)
        async with Advertiser(daemons, daemon.node, daemon.look, daemon.heard.put_nowait) as advertiser:
            await asyncio.wait_for(daemon.heard.get(), 5)
            first = await grant(gateway, model=model)
            async with asyncio.TaskGroup() as both:
                waiting = both.create_task(acquire(gateway, model=model, wait_ms=60_000))
                await queued(gateway, 1, model=model)
                await forget_scripts()
                assert await release(daemons, first)
                await asyncio.wait_for(waiting, 5)
            second = waiting.result()
            assert isinstance(second, Grant)
            assert second.epoch > first.epoch
            report = (await gateway.inspect())[model]
            assert [slot.epoch for held in report.nodes for slot in held.slots] == [second.epoch]
            assert await gateway.give_back(second)
            assert not await gateway.give_back(second)
            daemon.status = NodeStatus(draining=True)
            await daemon.beat(advertiser)
            assert await refusal(gateway, model=model) is NoSlot.UNKNOWN_POOL
        assert model not in await gateway.pools()


def forget_scripts_of(*servers: Server) -> Flush:
    async def forget() -> None:
        for server in servers:
            await server.tell("SCRIPT", "FLUSH")

    return forget


def documented_rights(*, cluster: bool = False) -> list[str]:
    """What operators are told to allow; a cluster needs some more."""
    told = RULE.search(Path("docs/configuration.md").read_text())
    assert told is not None
    return told["all"].split() + (told["cluster"].split() if cluster else [])


@asynccontextmanager
async def user(rights: Sequence[str], *servers: Server) -> AsyncIterator[str]:
    """User and password, as they stand in a URL, of somebody who has these rights; every refusal is logged anew."""
    for server in servers:
        await server.tell("ACL", "LOG", "RESET")
        await server.tell("ACL", "SETUSER", "lane", "reset", "on", f">{PASSWORD}", *rights)
    try:
        yield f"lane:{quoted(PASSWORD)}"
    finally:
        for server in servers:
            await server.tell("ACL", "DELUSER", "lane")


def quoted(text: str) -> str:
    """A user or a password as it stands in a URL."""
    return quote(text, safe="")
