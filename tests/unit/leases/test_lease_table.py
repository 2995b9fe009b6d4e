"""What a grant is, which slot it takes, and what ends it."""

import asyncio
import secrets
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from leases import Grant, LeaseTable, NoSlot, SlotState, SlotView
from tests.kit.valkey import ValkeyProcess, acquire, grant, node, release, views

ODD_NAMES = ("org/model:7b", "{org}/model", "}{", "a b", "a%20b", "modèle 模型", "x" * 300)


async def test_a_grant_tells_how_to_reach_the_daemon(table: LeaseTable) -> None:
    daemon = node("daemon-1", capacity=512)
    (state,) = await table.register(daemon, views())

    held = await grant(table)

    assert held == Grant(
        pool="smollm2",
        node_id="daemon-1",
        slot=0,
        epoch=state.epoch + 1,
        card=daemon.card,
        decode_endpoint=daemon.decode_endpoint,
        control_host=daemon.control_host,
        control_port=daemon.control_port,
        capacity_tokens=512,
    )


async def test_a_refusal_tells_unknown_busy_and_too_large_apart(table: LeaseTable) -> None:
    assert await acquire(table) is NoSlot.UNKNOWN_POOL
    await table.register(node(capacity=100), views())
    assert await acquire(table, tokens=101) is NoSlot.TOO_LARGE
    await grant(table, tokens=100)
    assert await acquire(table, tokens=100) is NoSlot.BUSY
    assert await acquire(table, tokens=101) is NoSlot.TOO_LARGE


async def test_a_prompt_for_the_large_node_waits_for_it_instead_of_being_too_large(table: LeaseTable) -> None:
    await table.register(node("small", capacity=100), views())
    await table.register(node("large", capacity=200), views())
    assert (await grant(table, tokens=150)).node_id == "large"
    assert await acquire(table, tokens=150) is NoSlot.BUSY


async def test_an_idle_node_goes_before_a_decoding_one(table: LeaseTable) -> None:
    await table.register(node("a-decoding", slots=2), views(slots=2, idle=False))
    await table.register(node("b-idle"), views())
    assert [(await grant(table)).node_id for _ in range(3)] == ["b-idle", "a-decoding", "a-decoding"]


async def test_two_requests_go_to_two_idle_nodes_before_any_heartbeat(table: LeaseTable) -> None:
    for name in ("a", "b"):
        await table.register(node(name, slots=2), views(slots=2))
    assert {(await grant(table)).node_id for _ in range(2)} == {"a", "b"}


async def test_a_node_is_idle_again_when_its_last_lease_is_released(table: LeaseTable) -> None:
    for name in ("a", "b"):
        await table.register(node(name, slots=2), views(slots=2))
    first = await grant(table)
    assert await release(table, first)
    again = await grant(table)
    assert again.node_id == first.node_id == "a"


async def test_the_smallest_slot_that_fits_is_granted(table: LeaseTable) -> None:
    for name, capacity in (("a", 4_000), ("b", 1_000), ("c", 2_000)):
        await table.register(node(name, capacity=capacity), views())
    assert (await grant(table, tokens=1_000)).node_id == "b"
    assert (await grant(table, tokens=1_001)).node_id == "c"
    assert (await grant(table, tokens=1)).node_id == "a"


async def test_the_largest_capacity_there_is_can_be_asked_for(table: LeaseTable) -> None:
    await table.register(node("largest", capacity=2**32 - 1, slots=2), views(slots=2))
    await grant(table, tokens=2**32 - 1)
    assert (await grant(table, tokens=2**32 - 1)).capacity_tokens == 2**32 - 1


async def test_a_node_to_avoid_is_not_granted(table: LeaseTable) -> None:
    await table.register(node("a", slots=2), views(slots=2))
    await table.register(node("b", slots=1), views(idle=False))
    granted = await table.acquire("smollm2", 1, "n1", lease_ms=60_000, avoid={"a"})
    assert isinstance(granted, Grant)
    assert granted.node_id == "b"
    assert await table.acquire("smollm2", 1, "n2", lease_ms=60_000, avoid={"a", "b"}) is NoSlot.BUSY


async def test_a_repeated_nonce_returns_the_same_grant(table: LeaseTable) -> None:
    await table.register(node(slots=3), views(slots=3))
    first, second = [await table.acquire("smollm2", 10, "wish", lease_ms=60_000) for _ in range(2)]
    assert first == second
    assert (await table.pools())["smollm2"].free_slots == 2


async def test_a_nonce_whose_lease_is_over_gets_a_new_one(table: LeaseTable) -> None:
    await table.register(node(), views())
    first = await table.acquire("smollm2", 10, "wish", lease_ms=60_000)
    assert isinstance(first, Grant)
    await release(table, first)
    second = await table.acquire("smollm2", 10, "wish", lease_ms=60_000)
    assert isinstance(second, Grant)
    assert second.epoch > first.epoch


async def test_a_nonce_does_not_return_the_lease_of_the_slots_next_holder(table: LeaseTable) -> None:
    await table.register(node(), views())
    first = await table.acquire("smollm2", 10, "wish", lease_ms=60_000)
    assert isinstance(first, Grant)
    await release(table, first)
    await grant(table)
    assert await table.acquire("smollm2", 10, "wish", lease_ms=60_000) is NoSlot.BUSY


async def test_a_nonce_is_kept_no_longer_than_its_lease(table: LeaseTable, redis: Redis) -> None:
    await table.register(node(), views())
    await table.acquire("smollm2", 10, "wish", lease_ms=2_000)
    (kept,) = await redis.keys("*grant:wish")
    assert 0 < await redis.pttl(kept) <= 2_000


async def test_every_grant_has_a_higher_epoch_than_all_before(table: LeaseTable) -> None:
    await table.register(node(), views())
    epochs = []
    for _ in range(20):
        held = await grant(table)
        epochs.append(held.epoch)
        assert await release(table, held)
    assert epochs == sorted(set(epochs))


async def test_a_lease_is_released_once(table: LeaseTable) -> None:
    await table.register(node(), views())
    held = await grant(table)
    assert await release(table, held)
    assert not await release(table, held)
    assert (await table.pools())["smollm2"].free_slots == 1


async def test_fifty_at_once_get_the_three_slots_there_are(table: LeaseTable) -> None:
    await table.register(node("a", slots=2), views(slots=2))
    await table.register(node("b"), views())
    answers = await asyncio.gather(*(acquire(table) for _ in range(50)))
    granted = {(answer.node_id, answer.slot) for answer in answers if isinstance(answer, Grant)}
    assert granted == {("a", 0), ("a", 1), ("b", 0)}
    assert answers.count(NoSlot.BUSY) == 47


async def test_a_heartbeat_repeated_changes_nothing(table: LeaseTable) -> None:
    first = await table.register(node(slots=2), views(slots=2))
    held = await grant(table)
    for _ in range(3):
        assert await table.register(node(slots=2), views(slots=2)) == (
            SlotState(slot=0, epoch=held.epoch, leased=True),
            SlotState(slot=1, epoch=first[1].epoch + 1, leased=False),
        )
    assert (await table.pools())["smollm2"].free_slots == 1


async def test_a_daemons_floor_lifts_the_table_over_it(table: LeaseTable) -> None:
    (before,) = await table.register(node(), views())
    floor = before.epoch + 7
    (after,) = await table.register(node(), views(floor=floor))
    assert after.epoch >= floor
    assert (await grant(table)).epoch > floor


async def test_a_slot_that_its_daemon_has_in_use_is_not_granted(table: LeaseTable) -> None:
    await table.register(node(), views(floor=5, in_use=5, idle=False))
    assert await acquire(table) is NoSlot.BUSY
    assert await table.release("smollm2", "n1", 0, 5)
    await grant(table)


async def test_a_slot_freed_too_early_is_withdrawn_while_its_daemon_still_serves(table: LeaseTable) -> None:
    await table.register(node(), views())
    held = await grant(table)
    await release(table, held)
    (state,) = await table.register(node(), views(floor=held.epoch, in_use=held.epoch, idle=False))
    assert state == SlotState(slot=0, epoch=held.epoch, leased=True)
    assert await acquire(table) is NoSlot.BUSY


async def test_a_release_that_got_lost_is_made_good_by_the_next_heartbeat(table: LeaseTable) -> None:
    await table.register(node(), views())
    held = await grant(table)
    await table.register(node(), views(floor=held.epoch, in_use=held.epoch, idle=False))
    (state,) = await table.register(node(), views(floor=held.epoch))
    assert not state.leased
    assert state.epoch > held.epoch
    assert not await release(table, held)


async def test_unregister_takes_the_node_out_and_fences_its_leases(table: LeaseTable) -> None:
    await table.register(node(slots=2), views(slots=2))
    held = await grant(table)

    await table.unregister(node(slots=2))

    assert await acquire(table) is NoSlot.UNKNOWN_POOL
    assert await table.pools() == {}
    assert not await release(table, held)
    await table.register(node(slots=2), views(slots=2))
    assert [(await grant(table)).epoch > held.epoch for _ in range(2)] == [True, True]


async def test_unregister_leaves_the_other_nodes(table: LeaseTable) -> None:
    for name in ("a", "a:0", "a.b", "ab", "b"):
        await table.register(node(name), views())
    await table.unregister(node("a"))
    assert {(await grant(table)).node_id for _ in range(4)} == {"a:0", "a.b", "ab", "b"}


async def test_pools_shows_live_nodes_cards_and_slots(table: LeaseTable) -> None:
    one = node("a", capacity=100, slots=2)
    two = replace(node("b", capacity=300), card="card-2")
    await table.register(two, views())
    await table.register(one, views(slots=2))
    await table.register(node("c", model="other"), views())
    await grant(table, tokens=200)

    pools = await table.pools()

    assert set(pools) == {"smollm2", "other"}
    pool = pools["smollm2"]
    assert pool.nodes == (one, two)
    assert (pool.free_slots, pool.total_slots, pool.largest_capacity) == (2, 3, 300)
    assert pool.cards == {"card-1", "card-2"}


async def test_models_of_any_name_have_pools_of_their_own(table: LeaseTable) -> None:
    for name in ODD_NAMES:
        await table.register(node(f"node of {name}", model=name), views())
    assert set(await table.pools()) == set(ODD_NAMES)
    for name in ODD_NAMES:
        held = await grant(table, model=name)
        assert (held.pool, held.node_id) == (name, f"node of {name}")
        assert await acquire(table, model=name) is NoSlot.BUSY
        assert await release(table, held)


@pytest.mark.parametrize("model", ODD_NAMES)
async def test_all_keys_of_a_pool_share_a_hash_slot(table: LeaseTable, redis: Redis, model: str) -> None:
    await table.register(node(model=model, slots=2), views(slots=2))
    await table.acquire(model, 1, "nonce with {braces}", lease_ms=60_000)
    keys = [key for key in map(str, await redis.keys("*")) if not key.endswith(":pools")]
    assert len(keys) == 8  # the seven of the pool and one kept grant
    assert len({key_slot(key.encode()) for key in keys}) == 1


async def test_a_pool_that_nobody_renews_leaves_nothing_behind(table: LeaseTable, redis: Redis) -> None:
    await table.register(node(slots=2), views(slots=2))
    await grant(table)
    await table.register(node(slots=2), views(slots=2))
    for key in await redis.keys("*smollm2*"):
        assert await redis.pttl(key) > 0, key


async def test_views_that_do_not_match_the_slots_are_refused(table: LeaseTable) -> None:
    stray = SlotView(slot=5, floor=0, in_use=None, idle=True)
    for wrong in ([], views(slots=1), [*views(slots=2), stray], [*views(slots=1), *views(slots=1)]):
        with pytest.raises(ValueError, match=r"one for each of 0\.\.1"):
            await table.register(node(slots=2), wrong)


async def test_arguments_out_of_range_are_refused(table: LeaseTable, server: ValkeyProcess) -> None:
    with pytest.raises(ValueError, match="tokens"):
        await table.acquire("m", -1, "n", lease_ms=1)
    with pytest.raises(ValueError, match="lease_ms"):
        await table.acquire("m", 1, "n", lease_ms=0)
    with pytest.raises(ValueError, match="nonce"):
        await table.acquire("m", 1, "", lease_ms=1)
    with pytest.raises(ValueError, match="model name"):
        await table.acquire("", 1, secrets.token_hex(4), lease_ms=1)
    with pytest.raises(ValueError, match="ttl_ms"):
        LeaseTable(server.url, ttl_ms=0)
    with pytest.raises(ValueError, match="capacity_tokens"):
        node(capacity=2**32)
    with pytest.raises(ValueError, match="slots"):
        node(slots=0)
    with pytest.raises(ValueError, match="name"):
        node(model="")
