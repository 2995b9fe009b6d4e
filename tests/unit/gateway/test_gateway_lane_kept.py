"""Nothing that a request acquired is kept: daemons that do not reserve, a table that is away, clients that leave."""

import asyncio
import random
import time
from typing import Any

import pytest

from gateway.lane import Plain, Prefill, Refusal
from leases import Grant, LeaseTable, NodeStatus, SlotView
from tests.kit.deciding import DENY, WILLING, all_free, decide
from tests.kit.gateway import MODEL, card_message
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, Step, failed, landed
from tests.kit.rig import Rig, rig
from tests.kit.valkey import ValkeyProcess, eventually

UNWILLING: dict[str, tuple[Step, ...]] = {
    "refuses": (failed("slot_busy"),),
    "dies": ("die",),
    "says_something_else": (landed(1), "hang"),
    "ends": (),
    "never_answers": ("hang",),
}


@pytest.mark.parametrize("script", UNWILLING.values(), ids=UNWILLING.keys())
async def test_a_daemon_that_does_not_reserve_costs_no_slot_and_plain_vllm_serves(
    redis_url: str, vllm: ScriptedVllm, script: Any
) -> None:
    async with ScriptedDaemon(script).registered(redis_url), rig(redis_url, vllm, reserve_timeout_s=0.2) as made:
        assert await decide(made) == Plain("daemon_unavailable")
        await all_free(made)
        refused = await decide(made, DENY)
        assert isinstance(refused, Refusal)
        assert refused.error.status == 503
        await all_free(made)


@pytest.mark.parametrize("script", UNWILLING.values(), ids=UNWILLING.keys())
async def test_another_daemon_takes_the_request_that_one_did_not(redis_url: str, vllm: ScriptedVllm, script: Any) -> None:
    # The smaller slot that fits is granted first.
    bad, good = ScriptedDaemon(script, capacity=2048), ScriptedDaemon(WILLING)
    async with bad.registered(redis_url), good.registered(redis_url), rig(redis_url, vllm, reserve_timeout_s=0.2) as made:
        decision = await decide(made)
        assert isinstance(decision, Prefill)
        assert len(bad.requests) == 1
        assert decision.stream.endpoint == good.endpoint
        decision.stream.cancel()
        await all_free(made, slots=2)


async def test_a_dead_daemon_that_is_still_listed_is_found_before_any_prefill(redis_url: str, vllm: ScriptedVllm) -> None:
    daemon = ScriptedDaemon(WILLING)
    async with daemon.registered(redis_url), rig(redis_url, vllm) as made:
        assert daemon.node is not None
        dead = type(daemon.node)("dead", MODEL, "card-1", "127.0.0.1:1", "127.0.0.1", 1, 4096, 1)
        async with LeaseTable(redis_url, timeout_s=5) as table:
            await table.register(dead, NodeStatus(), [SlotView(0, 0, None)])
        await daemon_alone_serves(made, daemon)


async def daemon_alone_serves(made: Rig, daemon: ScriptedDaemon) -> None:
    for _ in range(3):
        decision = await decide(made)
        assert isinstance(decision, Prefill)
        assert decision.stream.endpoint == daemon.endpoint
        decision.stream.cancel()
        await all_free(made, slots=2)


async def test_a_slot_of_another_card_is_given_back(redis_url: str, vllm: ScriptedVllm) -> None:
    async with ScriptedDaemon(WILLING).registered(redis_url) as old, rig(redis_url, vllm) as made:
        new = ScriptedDaemon(WILLING, card=card_message(fingerprint="card-2", context_tokens=1024))
        async with new.registered(redis_url):
            decision = await decide(made)  # 1024 is the smaller fit, and is tried first
            assert isinstance(decision, Prefill)
            assert decision.stream.endpoint == old.endpoint
            assert new.requests == []
            decision.stream.cancel()
            await all_free(made, slots=2)


async def test_without_redis_plain_vllm_serves_within_the_tables_time(own_valkey: ValkeyProcess, vllm: ScriptedVllm) -> None:
    async with ScriptedDaemon(WILLING).registered(own_valkey.url), rig(own_valkey.url, vllm, leases_timeout_s=0.3) as made:
        own_valkey.freeze()
        try:
            began = time.monotonic()
            assert await decide(made) == Plain("leases_unavailable")
            assert time.monotonic() - began < 2
            refused = await decide(made, DENY)
        finally:
            own_valkey.thaw()
        assert isinstance(refused, Refusal)
        assert refused.error.status == 503
    own_valkey.stop()


async def test_a_request_cancelled_anywhere_leaves_no_slot_behind(redis_url: str, vllm: ScriptedVllm) -> None:
    chance = random.Random(1)
    async with ScriptedDaemon(WILLING, slots=3).registered(redis_url), rig(redis_url, vllm) as made:
        took = []
        for _ in range(5):
            began = time.perf_counter()
            await served_and_left(made)
            took.append(time.perf_counter() - began)
            await all_free(made, slots=3)
        for _ in range(60):
            tasks = [asyncio.create_task(served_and_left(made)) for _ in range(3)]
            await asyncio.wait(tasks, timeout=chance.uniform(0, 1.5 * max(took)))
            for task in tasks:
                task.cancel()
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await made.lane.settle()
        await all_free(made, slots=3, within_s=2)


async def served_and_left(made: Rig) -> None:
    decision = await decide(made)
    if isinstance(decision, Prefill):
        decision.stream.cancel()


async def test_a_request_cancelled_again_while_it_gives_back_does_give_back(redis_url: str, vllm: ScriptedVllm) -> None:
    daemon = ScriptedDaemon(("hang",))
    async with daemon.registered(redis_url), rig(redis_url, vllm, reserve_timeout_s=30) as made:
        give_back, giving_back, go_on = made.parts.table.give_back, asyncio.Event(), asyncio.Event()

        async def slow(grant: Grant) -> bool:
            giving_back.set()
            await go_on.wait()
            return await give_back(grant)

        made.parts.table.give_back = slow  # type: ignore[method-assign]
        deciding = asyncio.create_task(decide(made))

        async def asked() -> bool:
            return bool(daemon.requests)

        await eventually(asked)
        deciding.cancel()
        await giving_back.wait()
        deciding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deciding
        go_on.set()
        await made.lane.settle()
        await all_free(made)


async def test_a_lease_that_cannot_be_given_back_is_no_error(redis_url: str, vllm: ScriptedVllm) -> None:
    async with (
        ScriptedDaemon(UNWILLING["refuses"]).registered(redis_url),
        rig(redis_url, vllm) as made,
        LeaseTable("unix:///nowhere.sock", timeout_s=0.2) as away,
    ):
        made.parts.table.give_back = away.give_back  # type: ignore[method-assign]
        assert await decide(made) == Plain("daemon_unavailable")
