"""What a grant is, what ends it, and what the table shows of it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from leases import Denied, Grant, LeaseTable, NodeStatus, NoSlot, SlotReport, SlotState, SlotView, Tenant
from tests.kit.valkey import ValkeyProcess, acquire, grant, node, refusal, register, release, views, wish

ODD_NAMES = ("org/model:7b", "{org}/model", "}{", "a b", "a%20b", "modèle 模型", "x" * 300)


async def test_a_grant_tells_how_to_reach_the_daemon(table: LeaseTable) -> None:
    daemon = node("daemon-1", capacity=512)
    (state,) = await register(table, daemon)
    request = wish()

    held = await table.acquire(request)

    assert held == Grant(
        pool="smollm2",
        node_id="daemon-1",
        slot=0,
        epoch=state.epoch + 1,
        nonce=request.nonce,
        card=daemon.card,
        decode_endpoint=daemon.decode_endpoint,
        control_host=daemon.control_host,
        control_port=daemon.control_port,
        capacity_tokens=512,
    )


async def test_a_refusal_tells_unknown_busy_and_too_large_apart(table: LeaseTable) -> None:
    assert await refusal(table) is NoSlot.UNKNOWN_POOL
    await register(table, node(capacity=100))
    assert await refusal(table, tokens=101) is NoSlot.TOO_LARGE
    await grant(table, tokens=100)
    assert await refusal(table, tokens=100) is NoSlot.BUSY
    assert await refusal(table, tokens=101) is NoSlot.TOO_LARGE


async def test_a_repeated_nonce_returns_the_same_grant(table: LeaseTable) -> None:
    await register(table, node(slots=3))
    request = wish()
    first, second = [await table.acquire(request) for _ in range(2)]
    assert first == second
    assert (await table.pools())["smollm2"].free_slots == 2


async def test_a_nonce_whose_lease_is_over_gets_a_new_one(table: LeaseTable) -> None:
    await register(table, node())
    first = await grant(table, nonce="wish")
    await release(table, first)
    assert (await grant(table, nonce="wish")).epoch > first.epoch


async def test_a_nonce_does_not_return_the_lease_of_the_slots_next_holder(table: LeaseTable) -> None:
    await register(table, node())
    first = await grant(table, nonce="wish")
    await release(table, first)
    await grant(table)
    assert await refusal(table, nonce="wish") is NoSlot.BUSY


async def test_every_grant_has_a_higher_epoch_than_all_before(table: LeaseTable) -> None:
    await register(table, node())
    epochs = []
    for _ in range(20):
        held = await grant(table)
        epochs.append(held.epoch)
        assert await release(table, held)
    assert epochs == sorted(set(epochs))


async def test_a_lease_is_released_once(table: LeaseTable) -> None:
    await register(table, node())
    held = await grant(table)
    assert await release(table, held)
    assert not await release(table, held)
    assert (await table.pools())["smollm2"].free_slots == 1


async def test_a_grant_is_given_back_once_and_by_its_own_wish_only(table: LeaseTable) -> None:
    await register(table, node())
    held = await grant(table)
    assert not await table.give_back(replace(held, nonce="another"))
    assert await table.give_back(held)
    assert not await table.give_back(held)
    await grant(table)
    assert not await table.give_back(held), "the slot is its next holder's"


async def test_fifty_at_once_get_the_three_slots_there_are(table: LeaseTable) -> None:
    await register(table, node("a", slots=2))
    await register(table, node("b"))
    answers = await asyncio.gather(*(acquire(table) for _ in range(50)))
    granted = {(answer.node_id, answer.slot) for answer in answers if isinstance(answer, Grant)}
    assert granted == {("a", 0), ("a", 1), ("b", 0)}
    assert [answer.reason for answer in answers if isinstance(answer, Denied)] == [NoSlot.BUSY] * 47


async def test_a_heartbeat_repeated_changes_nothing(table: LeaseTable) -> None:
    first = await register(table, node(slots=2))
    held = await grant(table)
    for _ in range(3):
        assert await register(table, node(slots=2)) == (
            SlotState(slot=0, epoch=held.epoch, leased=True),
            SlotState(slot=1, epoch=first[1].epoch + 1, leased=False),
        )
    assert (await table.pools())["smollm2"].free_slots == 1


async def test_a_daemons_floor_lifts_the_table_over_it(table: LeaseTable) -> None:
    (before,) = await register(table, node())
    floor = before.epoch + 7
    (after,) = await register(table, node(), floor=floor)
    assert after.epoch >= floor
    assert (await grant(table)).epoch > floor


async def test_a_slot_that_its_daemon_has_in_use_is_not_granted(table: LeaseTable) -> None:
    await register(table, node(), floor=5, in_use=5)
    assert await refusal(table) is NoSlot.BUSY
    assert await table.release("smollm2", "n1", 0, 5)
    await grant(table)


async def test_a_slot_freed_too_early_is_withdrawn_while_its_daemon_still_serves(table: LeaseTable) -> None:
    await register(table, node())
    held = await grant(table)
    await release(table, held)
    (state,) = await register(table, node(), floor=held.epoch, in_use=held.epoch)
    assert state == SlotState(slot=0, epoch=held.epoch, leased=True)
    assert await refusal(table) is NoSlot.BUSY


async def test_a_release_that_got_lost_is_made_good_by_the_next_heartbeat(table: LeaseTable) -> None:
    await register(table, node())
    held = await grant(table)
    await register(table, node(), floor=held.epoch, in_use=held.epoch)
    (state,) = await register(table, node(), floor=held.epoch)
    assert not state.leased
    assert state.epoch > held.epoch
    assert not await release(table, held)


async def test_unregister_takes_the_node_out_and_fences_its_leases(table: LeaseTable) -> None:
    await register(table, node(slots=2))
    held = await grant(table)

    await table.unregister(node(slots=2))

    assert await refusal(table) is NoSlot.UNKNOWN_POOL
    assert await table.pools() == {}
    assert not await release(table, held)
    assert not await table.give_back(held)
    await register(table, node(slots=2))
    assert [(await grant(table)).epoch > held.epoch for _ in range(2)] == [True, True]


async def test_unregister_leaves_the_other_nodes(table: LeaseTable) -> None:
    for name in ("a", "a:0", "a.b", "ab", "b"):
        await register(table, node(name))
    await table.unregister(node("a"))
    assert {(await grant(table)).node_id for _ in range(4)} == {"a:0", "a.b", "ab", "b"}


async def test_pools_shows_cards_slots_and_some_nodes_of_each_card(table: LeaseTable) -> None:
    ones = [node(f"a{number}", capacity=100, slots=2) for number in range(5)]
    two = node("b", card="card-2", capacity=300)
    for one in (*ones, two, node("c", model="other")):
        await register(table, one)
    await grant(table, tokens=50)

    pools = await table.pools()

    assert set(pools) == {"smollm2", "other"}
    pool = pools["smollm2"]
    assert (pool.nodes, pool.free_slots, pool.leased_slots, pool.waiting) == (6, 10, 1, 0)
    assert set(pool.cards) == {"card-1", "card-2"}
    assert pool.cards["card-2"] == (two,)
    assert pool.cards["card-1"]
    assert set(pool.cards["card-1"]) < set(ones)


async def test_inspect_shows_every_slot_with_its_holder_tenant_and_state(server: ValkeyProcess, table: LeaseTable) -> None:
    daemon = node("a", slots=3)
    free = [SlotView(slot=1, floor=0, in_use=None, state="free"), SlotView(slot=2, floor=0, in_use=None, state="free")]
    await table.register(daemon, NodeStatus(served=3), [SlotView(slot=0, floor=0, in_use=None), *free])
    async with LeaseTable(server.url, holder="gateway 7", timeout_s=5) as gateway:
        used = await grant(gateway, tenant=Tenant("acme/eu"))
        fresh = await grant(gateway)
    decoding = SlotView(slot=0, floor=used.epoch, in_use=used.epoch, state="decoding")
    await table.register(daemon, NodeStatus(idle=False, busy_ms=70, served=3), [decoding, *free])

    report = (await table.inspect())["smollm2"]

    (shown,) = report.nodes
    assert (shown.node, shown.status) == (daemon, NodeStatus(idle=False, busy_ms=70, served=3))
    in_use, leased, idle = shown.slots
    assert (in_use.state, in_use.epoch, in_use.holder, in_use.tenant) == ("decoding", used.epoch, "gateway 7", "acme/eu")
    assert (leased.state, leased.epoch, leased.holder, leased.tenant) == ("leased", fresh.epoch, "gateway 7", "")
    assert all(slot.age_ms is not None and 0 <= slot.age_ms < 60_000 for slot in (in_use, leased))
    assert idle == SlotReport(slot=2, state="free", epoch=None, holder="", tenant="", age_ms=None)
    assert (report.queue, report.served, report.mean_ms) == ((), 0, None)


async def test_models_of_any_name_have_pools_of_their_own(table: LeaseTable) -> None:
    for name in ODD_NAMES:
        await register(table, node(f"node of {name}", model=name, card=f"card of {name}"))
    assert set(await table.pools()) == set(await table.inspect()) == set(ODD_NAMES)
    for name in ODD_NAMES:
        held = await grant(table, model=name, card=f"card of {name}")
        assert (held.pool, held.node_id, held.card) == (name, f"node of {name}", f"card of {name}")
        assert await refusal(table, model=name, card=f"card of {name}") is NoSlot.BUSY
        assert await release(table, held)


@pytest.mark.parametrize("model", ODD_NAMES)
async def test_all_keys_of_a_pool_share_a_hash_slot(table: LeaseTable, redis: Redis, model: str) -> None:
    await register(table, node(model=model, slots=3))
    held = await grant(table, model=model, nonce="nonce with {braces}", tenant=Tenant("{tenant}"))
    await grant(table, model=model)
    await release(table, held)
    keys = [key for key in map(str, await redis.keys("*")) if not key.endswith(":pools")]
    assert keys
    assert all(key.startswith("anchorleg:leases:2:{") for key in keys)
    assert len({key_slot(key.encode()) for key in keys}) == 1


async def test_a_pool_that_nobody_renews_leaves_nothing_behind(table: LeaseTable, redis: Redis) -> None:
    await register(table, node(slots=2))
    await grant(table)
    await register(table, node(slots=2))
    for key in await redis.keys("*smollm2*"):
        assert await redis.pttl(key) > 0, key


async def test_requests_leave_nothing_behind(table: LeaseTable, redis: Redis) -> None:
    await register(table, node(slots=2))

    async def size() -> int:
        return sum([int(await redis.memory_usage(key) or 0) for key in await redis.keys("*smollm2*")])

    await release(table, await grant(table, tenant=Tenant("acme")))
    before = await size()
    for _ in range(50):
        await release(table, await grant(table, tenant=Tenant("acme")))
        await table.give_back(await grant(table, tenant=Tenant("acme")))
    assert await size() <= before + 64


async def test_views_that_do_not_match_the_slots_are_refused(table: LeaseTable) -> None:
    stray = SlotView(slot=5, floor=0, in_use=None)
    for wrong in ([], views(slots=1), [*views(slots=2), stray], [*views(slots=1), *views(slots=1)]):
        with pytest.raises(ValueError, match=r"one for each of 0\.\.1"):
            await table.register(node(slots=2), NodeStatus(), wrong)


async def test_arguments_out_of_range_are_refused(server: ValkeyProcess) -> None:
    wrong: dict[str, Any] = {"tokens": -1, "lease_ms": 0, "wait_ms": -1, "max_waiting": -1, "nonce": "", "card": "", "pool": ""}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            wish(**{name: value})
    with pytest.raises(ValueError, match="ttl_ms"):
        LeaseTable(server.url, ttl_ms=0)
    with pytest.raises(ValueError, match="capacity_tokens"):
        node(capacity=2**32)
    with pytest.raises(ValueError, match="slots"):
        node(slots=0)
    with pytest.raises(ValueError, match="name"):
        node(model="")
    with pytest.raises(ValueError, match="tenant"):
        Tenant("")
    with pytest.raises(ValueError, match="busy_ms"):
        NodeStatus(busy_ms=-1)
