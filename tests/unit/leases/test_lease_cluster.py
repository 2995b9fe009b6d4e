"""The lease table in a cluster: on every node, while slots move, and when nodes freeze, end or are replaced."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from leases import Denied, Grant, LeasesUnavailable, LeaseTable
from leases.scripts import PREFIX, pool_keys
from tests.kit.deployments import (
    EACH_PROGRAM,
    documented_rights,
    forget_scripts_of,
    lease_table,
    live,
    user,
)
from tests.kit.servers import HOST, Cluster, Server, free_port, moving
from tests.kit.tls import relay
from tests.kit.valkey import acquire, eventually, grant, node, queued, register, release

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def cluster(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(program, tmp_path_factory.mktemp("cluster"), replicas=1)
    try:
        asyncio.run(running.start())
        yield running
    finally:
        running.stop()


def hash_slot(model: str) -> int:
    return key_slot(pool_keys(model)[0].encode())


async def model_on(cluster: Cluster, owner: Server) -> str:
    """The name of a new model whose pool this node has."""
    while await cluster.owner(hash_slot(name := f"model-{next(NUMBERS)}")) is not owner:
        pass
    return name


@EACH_PROGRAM
async def test_pools_on_every_node_of_a_cluster(cluster: Cluster) -> None:
    for owner in cluster.nodes[:3]:
        await live(cluster.url, forget_scripts_of(*cluster.nodes), model=await model_on(cluster, owner))


@EACH_PROGRAM
async def test_a_cluster_needs_two_more_rights(cluster: Cluster) -> None:
    rights = documented_rights(cluster=True)
    forget_scripts = forget_scripts_of(*cluster.nodes)
    async with user(rights, *cluster.nodes) as who:
        await live(cluster.url.replace("//", f"//{who}@"), forget_scripts)
    for server in cluster.nodes:
        assert await server.tell("ACL", "LOG") == []
    for right in rights[len(documented_rights()) :]:
        await forget_scripts()
        fewer = [other for other in rights if other != right]
        async with user(fewer, *cluster.nodes) as who, lease_table(cluster.url.replace("//", f"//{who}@")) as table:
            with pytest.raises(LeasesUnavailable, match=rf"(?i)no permission.*{re.escape(right[1:])}"):
                await register(table, node())


@EACH_PROGRAM
async def test_a_pool_moves_to_another_node_and_keeps_its_leases(cluster: Cluster) -> None:
    giver, taker = cluster.nodes[1:3]
    model = await model_on(cluster, giver)
    async with lease_table(cluster.url) as daemons, lease_table(cluster.url) as gateway:
        await register(daemons, node(model=model))
        first = await grant(gateway, model=model)
        waiting = asyncio.create_task(acquire(gateway, model=model, wait_ms=60_000))
        await queued(gateway, 1, model=model)
        async with moving(hash_slot(model), giver, taker):
            pass
        try:
            assert await release(daemons, first)
            second = await asyncio.wait_for(waiting, 5)
            assert isinstance(second, Grant)
            assert second.epoch == first.epoch + 1
            await daemons.unregister(node(model=model))
        finally:
            async with moving(hash_slot(model), taker, giver):
                pass


@EACH_PROGRAM
async def test_waiters_are_woken_though_the_node_that_they_listened_at_is_gone(cluster: Cluster) -> None:
    async def listened_at() -> Server | None:
        for server in cluster.nodes:
            if server.running and await server.tell("PUBSUB", "CHANNELS", "*wake*"):
                return server
        return None

    async with lease_table(cluster.url) as daemons, lease_table(cluster.url) as gateway:
        waiting: dict[Server, tuple[Grant, asyncio.Task[Grant | Denied]]] = {}
        for owner in cluster.nodes[1:3]:
            model = await model_on(cluster, owner)
            await register(daemons, node(model=model))
            held = await grant(gateway, model=model)
            waiting[owner] = held, asyncio.create_task(acquire(gateway, model=model, wait_ms=60_000))
            await queued(gateway, 1, model=model)
        lost = await eventually(listened_at)
        assert lost is not None
        held, waiter = next(pair for owner, pair in waiting.items() if owner is not lost)
        lost.stop()
        try:
            await eventually(listened_at)
            assert await release(daemons, held)
            assert isinstance(await asyncio.wait_for(waiter, 5), Grant)
        finally:
            lost.start()
            for _, task in waiting.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting.values()), return_exceptions=True)
            await cluster.whole()


@EACH_PROGRAM
async def test_a_node_that_was_restarted_empty_has_its_pools_again_with_the_next_heartbeat(cluster: Cluster) -> None:
    owner = cluster.nodes[2]
    model = await model_on(cluster, owner)
    async with lease_table(cluster.url) as daemons, lease_table(cluster.url) as gateway:
        await register(daemons, node(model=model))
        before = await grant(gateway, model=model)
        owner.stop()
        for call in (register(daemons, node(model=model)), acquire(gateway, model=model)):
            with pytest.raises(LeasesUnavailable, match="cluster at"):
                await call
        owner.start()
        await cluster.whole()
        await register(daemons, node(model=model), floor=before.epoch)
        assert (await grant(gateway, model=model)).epoch > before.epoch


@EACH_PROGRAM
async def test_a_frozen_node_holds_no_other_nodes_pools_up(cluster: Cluster) -> None:
    async def come_and_ask() -> None:
        async with LeaseTable(cluster.url, timeout_s=2) as new:
            await grant(new, model=model)

    model = await model_on(cluster, cluster.nodes[2])
    async with lease_table(cluster.url) as known:
        await register(known, node(model=model, slots=12))
    for frozen in cluster.nodes[:2]:
        frozen.freeze()
        try:
            await asyncio.gather(*(come_and_ask() for _ in range(6)))  # each asks a node of its own choice first
        finally:
            frozen.thaw()


@EACH_PROGRAM
async def test_a_replica_takes_its_primarys_pools_over(cluster: Cluster) -> None:
    async def served() -> bool:
        with suppress(LeasesUnavailable):
            await register(daemons, node(model=model), floor=before.epoch)
            return True
        return False

    primary = await cluster.owner(0)
    model = await model_on(cluster, primary)
    async with lease_table(cluster.url, timeout_s=3) as daemons, lease_table(cluster.url, timeout_s=3) as gateway:
        await register(daemons, node(model=model))
        before = await grant(gateway, model=model)
        assert await release(daemons, before)
        primary.stop()
        try:
            await eventually(served, within_s=20)
            after = await grant(gateway, model=model)
            assert after.epoch > before.epoch
        finally:
            primary.start()
            await cluster.whole()


class Lone(Server):
    """A cluster of one node."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.bus = free_port()
        super().__init__(program, folder, "--cluster-enabled", "yes", "--cluster-port", str(self.bus))

    async def take_all(self) -> None:
        await self.tell("CLUSTER", "ADDSLOTSRANGE", 0, REDIS_CLUSTER_HASH_SLOTS - 1)
        await eventually(self.serves)

    async def serves(self) -> bool:
        return (await self.facts("CLUSTER", "INFO"))["cluster_state"] == "ok"


@EACH_PROGRAM
async def test_a_cluster_that_came_back_under_other_addresses_is_found_by_the_url(program: Path, tmp_path: Path) -> None:
    async def found() -> bool:
        with suppress(LeasesUnavailable):
            await register(table, node())
            return True
        return False

    homes = [Lone(program, tmp_path / name) for name in "ab"]
    home = homes[0]
    try:
        async with relay(lambda: home) as port, lease_table(f"redis+cluster://{HOST}:{port}") as table:
            for home in homes:
                home.start()
                await home.take_all()
                await eventually(found)
                await grant(table)
                home.stop()
    finally:
        for home in homes:
            home.stop()


@EACH_PROGRAM
async def test_what_moves_to_a_node_that_nobody_knew_is_unavailable_until_it_is_there(program: Path, tmp_path: Path) -> None:
    old, new = Lone(program, tmp_path / "old"), Lone(program, tmp_path / "new")
    try:
        old.start()
        await old.take_all()
        async with lease_table(f"redis+cluster://{HOST}:{old.port}") as table:
            await register(table, node())
            new.start()
            await old.tell("CLUSTER", "MEET", HOST, new.port, new.bus)

            async def met() -> bool:
                names = [await each.tell("CLUSTER", "MYID") for each in (old, new)]
                known = [str(await each.tell("CLUSTER", "NODES")) for each in (old, new)]
                return all(name in nodes for name in names for nodes in known)

            await eventually(met)
            await eventually(new.serves)
            async with moving(key_slot(f"{PREFIX}pools".encode()), old, new):
                with pytest.raises(LeasesUnavailable, match="on its way to a new node"):
                    await table.pools()
            assert set(await table.pools()) == {"smollm2"}
    finally:
        old.stop()
        new.stop()


async def test_a_cluster_that_is_away_is_unavailable_and_says_so() -> None:
    async with LeaseTable(f"redis+cluster://lane:geheim@{HOST}:1,{HOST}:2", timeout_s=1) as table:
        for call in (table.ping(), register(table, node()), acquire(table, wait_ms=100), table.pools()):
            with pytest.raises(LeasesUnavailable, match=f"at cluster at {HOST}:1, {HOST}:2 failed.*reachable") as caught:
                await call
            assert "geheim" not in str(caught.value)


@EACH_PROGRAM
async def test_a_lone_server_is_no_cluster(program: Path, tmp_path: Path) -> None:
    lone = Server(program, tmp_path)
    try:
        lone.start()
        async with lease_table(f"redis+cluster://{HOST}:{lone.port}") as table:
            with pytest.raises(LeasesUnavailable, match=r"[Cc]luster (mode|support)"):
                await table.ping()
    finally:
        lone.stop()
