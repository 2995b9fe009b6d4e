"""A daemon's slots are in the table for as long as it runs, whatever happens to Redis."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from leases import Advertiser, Denied, Grant, LeaseTable, NodeStatus, NoSlot, SlotState, SlotView
from tests.kit.valkey import ValkeyProcess, Wire, acquire, eventually, grant, node, refusal, views


class Daemon:
    """The daemon's side: what it says, and what it was told."""

    def __init__(self) -> None:
        self.said = NodeStatus(), views()
        self.replies: list[tuple[SlotState, ...]] = []
        self.asked = 0

    def look(self) -> tuple[NodeStatus, list[SlotView]]:
        self.asked += 1
        return self.said

    def look_at_four(self) -> tuple[NodeStatus, list[SlotView]]:
        return NodeStatus(), views(slots=4)

    def on_reply(self, states: tuple[SlotState, ...]) -> None:
        self.replies.append(states)

    async def heard_more_than(self, count: int) -> bool:
        return len(self.replies) > count

    async def asked_more_than(self, count: int) -> bool:
        return self.asked > count


async def test_a_node_stays_in_the_table_past_several_ttls(server: ValkeyProcess, redis: Redis) -> None:
    daemon = Daemon()
    async with LeaseTable(server.url, ttl_ms=240, timeout_s=5) as table:
        started = time.monotonic()
        async with Advertiser(table, node(), daemon.look, daemon.on_reply):
            await eventually(lambda: daemon.heard_more_than(12))
            assert time.monotonic() - started > 3 * 0.24, "the beats are too fast to prove anything"
            assert set(await table.pools()) == {"smollm2"}


async def test_a_kick_publishes_at_once(table: LeaseTable) -> None:
    daemon = Daemon()
    async with Advertiser(table, node(), daemon.look, daemon.on_reply) as advertiser:
        await eventually(lambda: daemon.heard_more_than(0))
        daemon.said = NodeStatus(idle=False), views(floor=3, in_use=3)
        advertiser.kick()
        await eventually(lambda: daemon.heard_more_than(1))
        assert daemon.replies[1] == (SlotState(slot=0, epoch=3, leased=True),)
        assert (await table.pools())["smollm2"].free_slots == 0


async def test_each_reply_reaches_the_daemon(table: LeaseTable) -> None:
    daemon = Daemon()
    async with Advertiser(table, node(), daemon.look, daemon.on_reply) as advertiser:
        await eventually(lambda: daemon.heard_more_than(0))
        held = await grant(table)
        advertiser.kick()
        await eventually(lambda: daemon.heard_more_than(1))
    assert daemon.replies[-1] == (SlotState(slot=0, epoch=held.epoch, leased=True),)


async def test_closing_takes_the_node_out(table: LeaseTable) -> None:
    daemon = Daemon()
    advertiser = Advertiser(table, node(), daemon.look, daemon.on_reply)
    advertiser.start()
    await eventually(lambda: daemon.heard_more_than(0))
    await advertiser.aclose()
    assert await table.pools() == {}
    await advertiser.aclose()
    with pytest.raises(RuntimeError, match="make a new one"):
        advertiser.start()


async def test_an_outage_is_logged_once_and_over_within_a_second_of_redis_return(
    own_server: ValkeyProcess,
) -> None:
    daemon = Daemon()
    own_server.start()
    async with LeaseTable(own_server.url, ttl_ms=600) as table:
        with capture_logs() as logs:
            async with Advertiser(table, node(), daemon.look, daemon.on_reply):
                await eventually(lambda: daemon.heard_more_than(0))
                own_server.stop()
                asked = daemon.asked
                await eventually(lambda: daemon.asked_more_than(asked + 3))
                own_server.start()
                returned = time.monotonic()
                heard = len(daemon.replies)
                await eventually(lambda: daemon.heard_more_than(heard), within_s=1)
                assert time.monotonic() - returned < 1
                assert set(await table.pools()) == {"smollm2"}
        assert [entry["event"] for entry in logs] == ["leases_unavailable", "leases_back"]
        assert str(own_server.socket) in logs[0]["error"]


async def test_a_frozen_redis_is_an_outage_like_any_other(own_server: ValkeyProcess) -> None:
    daemon = Daemon()
    own_server.start()
    async with LeaseTable(own_server.url, ttl_ms=600, timeout_s=0.2) as table:
        with capture_logs() as logs:

            async def logged() -> bool:
                return bool(logs)

            async with Advertiser(table, node(), daemon.look, daemon.on_reply):
                await eventually(lambda: daemon.heard_more_than(0))
                own_server.freeze()
                await eventually(logged)
                own_server.thaw()
                heard = len(daemon.replies)
                await eventually(lambda: daemon.heard_more_than(heard), within_s=1)
        assert [entry["event"] for entry in logs] == ["leases_unavailable", "leases_back"]


async def test_closing_without_redis_ends_in_time_and_says_so(own_server: ValkeyProcess) -> None:
    daemon = Daemon()
    own_server.start()
    async with LeaseTable(own_server.url, timeout_s=0.3) as table:
        with capture_logs() as logs:
            async with Advertiser(table, node(), daemon.look, daemon.on_reply):
                await eventually(lambda: daemon.heard_more_than(0))
                own_server.stop()
                started = time.monotonic()
            assert time.monotonic() - started < 2
        assert [entry["event"] for entry in logs] == ["unregister_failed"]


async def test_a_daemon_that_cannot_say_its_state_is_heard_of(table: LeaseTable) -> None:
    def broken() -> tuple[NodeStatus, list[SlotView]]:
        raise KeyError("slot 7")

    died = asyncio.Event()
    with capture_logs() as logs:
        advertiser = Advertiser(table, node(), broken, lambda states: died.set())
        advertiser.start()

        async def logged() -> bool:
            return bool(logs)

        await eventually(logged)
        with pytest.raises(KeyError, match="slot 7"):
            await advertiser.aclose()
    assert logs[0]["event"] == "advertiser_died"
    assert not died.is_set()


@pytest.mark.parametrize("shared", [True, False])
async def test_heartbeats_keep_their_pace_while_others_hammer_the_table(
    server: ValkeyProcess, redis: Redis, shared: bool
) -> None:
    daemon = Daemon()
    outcomes: Counter[str] = Counter()
    async with LeaseTable(server.url, ttl_ms=600, timeout_s=5) as own, LeaseTable(server.url, timeout_s=5) as other:

        async def hammer() -> None:
            while len(daemon.replies) < 8:
                granted = await acquire(own if shared else other)
                outcomes[granted.reason if isinstance(granted, Denied) else "granted"] += 1
                if isinstance(granted, Grant):
                    await own.give_back(granted)

        async with Advertiser(own, node(slots=4), daemon.look_at_four, daemon.on_reply):
            await eventually(lambda: daemon.heard_more_than(0))
            await asyncio.gather(*(hammer() for _ in range(32)))
    assert sum(outcomes.values()) > 500
    assert set(outcomes) <= {"granted", NoSlot.BUSY}, "the node was never out of the table"


async def test_a_loop_that_is_blocked_for_half_a_ttl_loses_no_slot(
    server: ValkeyProcess, redis: Redis, table: LeaseTable
) -> None:
    daemon = Daemon()
    async with LeaseTable(server.url, ttl_ms=600, timeout_s=5) as own, Advertiser(own, node(), daemon.look, daemon.on_reply):
        for beat in range(5):
            await eventually(lambda beat=beat: daemon.heard_more_than(beat))  # type: ignore[misc]
            time.sleep(0.3)  # noqa: ASYNC251 - as a long computation would
            assert set(await table.pools()) == {"smollm2"}


async def test_a_silent_network_takes_the_node_out_and_its_return_brings_it_back(
    server: ValkeyProcess, table: LeaseTable, tmp_path: Path
) -> None:
    daemon = Daemon()
    async with Wire(server, tmp_path / "wire.sock") as wire, LeaseTable(wire.url, ttl_ms=300, timeout_s=0.2) as own:
        with capture_logs() as logs:
            async with Advertiser(own, node(), daemon.look, daemon.on_reply):
                await eventually(lambda: daemon.heard_more_than(0))
                wire.hush()

                async def gone() -> bool:
                    return not await table.pools()

                await eventually(gone, within_s=1)
                assert await refusal(table) is NoSlot.UNKNOWN_POOL
                wire.mend()
                heard = len(daemon.replies)
                await eventually(lambda: daemon.heard_more_than(heard), within_s=1)
                assert set(await table.pools()) == {"smollm2"}
    assert [entry["event"] for entry in logs] == ["leases_unavailable", "leases_back"]
