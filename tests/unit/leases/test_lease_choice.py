"""Which slot a request gets: one that fits, of an idle daemon, else of the one that will be free soonest."""

import pytest

from leases import LeaseTable, NodeStatus, NoSlot, SlotView
from tests.kit.valkey import eventually, grant, node, refusal, register, release


async def names(table: LeaseTable, count: int, **options: object) -> list[str]:
    """The daemons of so many grants, one after the other."""
    return [(await grant(table, **options)).node_id for _ in range(count)]  # type: ignore[arg-type]


async def test_an_idle_node_goes_before_one_that_decodes(table: LeaseTable) -> None:
    await register(table, node("a-decoding", slots=2), idle=False)
    await register(table, node("b-idle"))
    assert await names(table, 3) == ["b-idle", "a-decoding", "a-decoding"]


async def test_then_comes_the_node_that_will_be_free_soonest(table: LeaseTable) -> None:
    for name, busy_ms in (("a", 9_000), ("b", 20), ("c", 3_000), ("d", 0)):
        await register(table, node(name), busy_ms=busy_ms)
    assert await names(table, 4) == ["d", "b", "c", "a"]


async def test_a_heartbeat_moves_a_node_to_its_new_place(table: LeaseTable) -> None:
    await register(table, node("a", slots=2), busy_ms=1_000)
    await register(table, node("b", slots=2), busy_ms=2_000)
    assert await names(table, 1) == ["a"]
    await register(table, node("b", slots=2), busy_ms=10)
    await register(table, node("a", slots=2), busy_ms=1_000)
    assert await names(table, 1) == ["b"]


async def test_a_node_that_was_given_a_request_is_not_idle_before_its_next_heartbeat(table: LeaseTable) -> None:
    for name in ("a", "b", "c"):
        await register(table, node(name, slots=2))
    assert sorted(await names(table, 3)) == ["a", "b", "c"]
    assert sorted(await names(table, 3)) == ["a", "b", "c"]


async def test_a_node_that_was_given_a_request_is_free_later_by_what_requests_usually_take(
    table: LeaseTable,
) -> None:
    await register(table, node("a", slots=2))
    held = await grant(table)

    async def took_long() -> bool:
        (shown,) = (await table.inspect())["smollm2"].nodes
        return (shown.slots[0].age_ms or 0) > 200

    await eventually(took_long)
    await release(table, held)
    await register(table, node("a", slots=2), busy_ms=1_000)
    await register(table, node("b", slots=2), busy_ms=1_100)
    assert await names(table, 4) == ["a", "b", "a", "b"]


async def test_a_node_is_idle_again_when_its_last_lease_ends(table: LeaseTable) -> None:
    for name in ("a", "b"):
        await register(table, node(name, slots=2))
    first = await grant(table)
    assert await release(table, first)
    assert (await grant(table)).node_id == first.node_id == "a"


async def test_an_idle_node_goes_before_one_that_fits_more_closely(table: LeaseTable) -> None:
    await register(table, node("close", capacity=100), busy_ms=1)
    await register(table, node("roomy", capacity=1_000))
    assert await names(table, 2, tokens=100) == ["roomy", "close"]


async def test_among_idle_nodes_the_smallest_that_fits_is_taken(table: LeaseTable) -> None:
    for name, capacity in (("a", 4_000), ("b", 1_000), ("c", 2_000)):
        await register(table, node(name, capacity=capacity))
    assert await names(table, 1, tokens=1_000) == ["b"]
    assert await names(table, 1, tokens=1_001) == ["c"]
    assert await names(table, 1, tokens=1) == ["a"]


async def test_among_busy_nodes_of_all_sizes_the_soonest_that_fits_is_taken(table: LeaseTable) -> None:
    for name, capacity, busy_ms in (("a", 100, 10), ("b", 1_000, 500), ("c", 2_000, 300), ("d", 4_000, 400)):
        await register(table, node(name, capacity=capacity), busy_ms=busy_ms)
    assert await names(table, 4, tokens=100) == ["a", "c", "d", "b"]


async def test_a_prompt_for_the_large_node_waits_for_it_instead_of_being_too_large(table: LeaseTable) -> None:
    await register(table, node("small", capacity=100))
    await register(table, node("large", capacity=200))
    assert await names(table, 1, tokens=150) == ["large"]
    assert await refusal(table, tokens=150) is NoSlot.BUSY


@pytest.mark.parametrize("capacity", [1, 2**32 - 1])
async def test_a_slot_takes_exactly_its_capacity(table: LeaseTable, capacity: int) -> None:
    await register(table, node(capacity=capacity))
    if capacity < 2**32 - 1:
        assert await refusal(table, tokens=capacity + 1) is NoSlot.TOO_LARGE
    assert (await grant(table, tokens=capacity)).capacity_tokens == capacity


async def test_only_nodes_of_the_card_that_was_planned_with_are_given(table: LeaseTable) -> None:
    await register(table, node("old", card="card"))
    await register(table, node("new", card="card-2", slots=2))
    assert await names(table, 2, card="card-2") == ["new", "new"]
    assert await refusal(table, card="card-2") is NoSlot.BUSY
    assert await refusal(table, card="card-3") is NoSlot.UNKNOWN_POOL
    assert await names(table, 1, card="card") == ["old"]


async def test_capacity_is_compared_within_the_card(table: LeaseTable) -> None:
    await register(table, node("small", capacity=100, card="card-1"))
    await register(table, node("large", capacity=9_000, card="card-2"))
    assert await refusal(table, tokens=101, card="card-1") is NoSlot.TOO_LARGE


async def test_a_node_that_changes_its_card_and_capacity_is_found_by_the_new_ones_only(table: LeaseTable) -> None:
    await register(table, node(card="card-1", capacity=1_000))
    await register(table, node(card="card-2", capacity=100))
    assert await refusal(table, card="card-1") is NoSlot.UNKNOWN_POOL
    assert await refusal(table, card="card-2", tokens=101) is NoSlot.TOO_LARGE
    assert await names(table, 1, card="card-2") == ["n1"]


async def test_a_node_to_avoid_is_not_given(table: LeaseTable) -> None:
    await register(table, node("a", slots=2))
    await register(table, node("b"), idle=False)
    assert await names(table, 1, avoid=("a",)) == ["b"]
    assert await refusal(table, avoid=("a", "b")) is NoSlot.BUSY
    assert await names(table, 1) == ["a"]


async def test_many_nodes_to_avoid_hide_none_of_the_others(table: LeaseTable) -> None:
    everyone = [f"n{number:02}" for number in range(12)]
    for number, name in enumerate(everyone):
        await register(table, node(name, capacity=1_000 + number % 3), busy_ms=number)
    for last in (0, 5, 11):
        assert await names(table, 1, avoid=tuple(name for name in everyone if name != everyone[last])) == [everyone[last]]


async def test_a_draining_node_is_given_to_nobody_and_keeps_what_it_has(table: LeaseTable) -> None:
    await register(table, node("a", slots=2))
    held = await grant(table)
    await register(table, node("b", capacity=100))
    using = SlotView(slot=held.slot, floor=held.epoch, in_use=held.epoch, state="decoding")
    unused = SlotView(slot=1 - held.slot, floor=0, in_use=None, state="draining")

    states = await table.register(node("a", slots=2), NodeStatus(idle=False, draining=True), [using, unused])

    assert [(state.leased, state.slot) for state in states] == [(True, held.slot), (False, 1 - held.slot)]
    assert await refusal(table, tokens=101) is NoSlot.TOO_LARGE
    assert await names(table, 1, tokens=100) == ["b"]
    assert await refusal(table, tokens=100) is NoSlot.BUSY
    assert await release(table, held)
    assert await refusal(table, tokens=100) is NoSlot.BUSY, "its slots stay closed"


async def test_a_pool_whose_nodes_all_drain_is_no_pool(table: LeaseTable) -> None:
    await register(table, node(), draining=True)
    assert await refusal(table) is NoSlot.UNKNOWN_POOL
    pool = (await table.pools())["smollm2"]
    assert (pool.nodes, pool.free_slots, dict(pool.cards)) == (1, 0, {})


async def test_a_node_that_no_longer_drains_is_given_again(table: LeaseTable) -> None:
    await register(table, node(), draining=True)
    await register(table, node())
    assert await names(table, 1) == ["n1"]
