"""Requests that wait for a slot, on a real lease table: who is served next, who is turned away, and what ends a wait."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.endpoints import Endpoint
from gateway.errors import LaneUnavailable, NoSlotInTime
from gateway.lane import Plain, Prefill, Refusal
from gateway.slo import SloClass, Wish
from tests.kit.gateway import CREDENTIALS, MODEL
from tests.kit.legs import ScriptedDaemon, ScriptedVllm, Step, failed, reserved
from tests.kit.rig import Rig, rig
from tests.kit.valkey import ValkeyProcess, eventually

WILLING: tuple[Step, ...] = (reserved(), "hang")
LONG_MS = 60_000


def wish(wait_ms: int | None = None, *, fallback: bool = True, tenant: str | None = None) -> Wish:
    return Wish(SloClass.LATENCY, fallback=fallback, wait_ms=wait_ms, tenant=tenant)


@asynccontextmanager
async def one_slot(redis_url: str, vllm: ScriptedVllm, **settings: Any) -> AsyncIterator[Rig]:
    """A willing daemon of one slot, and a gateway that lets requests wait for a minute."""
    async with (
        ScriptedDaemon(WILLING).registered(redis_url),
        rig(redis_url, vllm, **{"max_wait_ms": LONG_MS} | settings) as made,
    ):
        yield made


async def served(made: Rig, asked: Wish | None = None) -> Prefill:
    decision = await made.decide(asked or wish())
    assert isinstance(decision, Prefill), decision
    return decision


async def queued(made: Rig, length: int) -> None:
    async def holds() -> bool:
        return await made.queue() == length

    await eventually(holds)


async def waiting(made: Rig, asked: Wish, place: int = 1) -> "asyncio.Task[Any]":
    """A request that stands in the queue, at this place."""
    deciding = asyncio.create_task(made.decide(asked))
    await queued(made, place)
    return deciding


async def ended(deciding: "asyncio.Task[Any]", within_s: float = 2) -> Any:
    return await asyncio.wait_for(deciding, within_s)


def waits(made: Rig, how: str) -> float:
    return made.value("anchorleg_slot_wait_seconds_count", ended=how)


async def test_a_request_that_waits_is_served_when_a_slot_is_free(redis_url: str, vllm: ScriptedVllm) -> None:
    async with one_slot(redis_url, vllm) as made:
        first = await served(made)
        second = await waiting(made, wish(LONG_MS))
        began = time.perf_counter()
        first.stream.cancel()
        decision = await ended(second)
        assert isinstance(decision, Prefill)
        assert decision.stages.seconds["slot"] > 0
        assert time.perf_counter() - began < 1
        assert (waits(made, "granted"), await made.queue()) == (1, 0)
        decision.stream.cancel()


async def test_requests_that_wait_are_served_in_the_order_they_came(redis_url: str, vllm: ScriptedVllm) -> None:
    async with one_slot(redis_url, vllm) as made:
        held = await served(made)
        line = [await waiting(made, wish(LONG_MS), place) for place in (1, 2, 3)]
        for place, request in enumerate(line):
            held.stream.cancel()
            held = await ended(request)
            assert isinstance(held, Prefill)
            assert not any(later.done() for later in line[place + 1 :])
        held.stream.cancel()


async def test_a_request_that_does_not_wait_passes_nobody_who_does(redis_url: str, vllm: ScriptedVllm) -> None:
    async with one_slot(redis_url, vllm) as made:
        held = await served(made)
        first = await waiting(made, wish(LONG_MS))
        held.stream.cancel()
        held = await ended(first)
        assert await made.decide(wish(0)) == Plain("no_free_slot")
        held.stream.cancel()


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        (10**9, {"max_wait_ms": 150}),
        (150, {}),
        (None, {"default_wait_ms": 150}),
    ],
    ids=["clamped", "asked", "default"],
)
async def test_a_wait_ends_in_time_with_plain_vllm(
    redis_url: str, vllm: ScriptedVllm, asked: int | None, settings: dict[str, int]
) -> None:
    async with one_slot(redis_url, vllm, **settings) as made:
        held = await served(made, wish(0))
        began = time.monotonic()
        assert await made.decide(wish(asked)) == Plain("no_free_slot")
        assert 0.14 < time.monotonic() - began < 1
        assert (waits(made, "timeout"), await made.queue()) == (1, 0)
        held.stream.cancel()


@pytest.mark.parametrize(("asked", "settings"), [(None, {}), (0, {"default_wait_ms": LONG_MS}), (LONG_MS, {"max_wait_ms": 0})])
async def test_a_request_that_may_not_wait_goes_on_at_once(
    redis_url: str, vllm: ScriptedVllm, asked: int | None, settings: dict[str, int]
) -> None:
    async with one_slot(redis_url, vllm, **settings) as made:
        held = await served(made, wish(0))
        assert await asyncio.wait_for(made.decide(wish(asked)), 1) == Plain("no_free_slot")
        assert waits(made, "timeout") == 0
        held.stream.cancel()


async def test_only_a_request_that_may_wait_is_announced_with_the_time_it_may_take(redis_url: str, vllm: ScriptedVllm) -> None:
    announced: list[int] = []

    async def note(seconds: int) -> None:
        announced.append(seconds)

    async with one_slot(redis_url, vllm, leases_timeout_s=0.5, reserve_timeout_s=1) as made:
        body = b'{"model":"%s","messages":[{"role":"user","content":"hello"}],"max_tokens":9}' % MODEL.encode()
        first = await made.lane.decide(wish(), Endpoint.CHAT, body, CREDENTIALS, note)
        assert isinstance(first, Prefill)
        assert await made.lane.decide(wish(0), Endpoint.CHAT, body, CREDENTIALS, note) == Plain("no_free_slot")
        assert announced == []
        assert await made.lane.decide(wish(20), Endpoint.CHAT, body, CREDENTIALS, note) == Plain("no_free_slot")
        assert announced == [6]
        assert await made.lane.decide(wish(20), Endpoint.CHAT, b"[]", CREDENTIALS, note) == Plain("invalid_json")
        assert announced == [6]
        first.stream.cancel()


async def test_a_full_queue_takes_nobody_more(redis_url: str, vllm: ScriptedVllm) -> None:
    async with one_slot(redis_url, vllm, max_waiting=1) as made:
        held = await served(made)
        first = await waiting(made, wish(LONG_MS))
        assert await made.decide(wish(LONG_MS)) == Plain("queue_full")
        refused = await made.decide(wish(LONG_MS, fallback=False))
        assert isinstance(refused, Refusal)
        assert isinstance(refused.error, NoSlotInTime)
        assert (refused.error.status, refused.error.code) == (429, "queue_full")
        assert waits(made, "denied") == 2
        held.stream.cancel()
        (await ended(first)).stream.cancel()


TENANTS = {"tenant_header": "x-tenant", "tenant_max_leases": 1, "tenant_max_waiting": 1}


async def test_a_tenant_with_all_its_slots_is_served_by_plain_vllm_and_another_is_not(
    redis_url: str, vllm: ScriptedVllm
) -> None:
    async with ScriptedDaemon(WILLING, slots=4).registered(redis_url), rig(redis_url, vllm, **TENANTS) as made:
        held = [await served(made, wish(tenant=name)) for name in ("a", "b", None)]
        for name in ("a", "b", None, ""):
            assert await made.decide(wish(tenant=name)) == Plain("tenant_limit")
        refused = await made.decide(wish(tenant="a", fallback=False))
        assert isinstance(refused, Refusal)
        assert isinstance(refused.error, NoSlotInTime)
        assert (refused.error.status, refused.error.code, refused.error.retry_after_s) == (429, "tenant_limit", 1)
        held[0].stream.cancel()

        async def served_again() -> bool:
            decision = await made.decide(wish(tenant="a"))
            if isinstance(decision, Prefill):
                held.append(decision)
            return isinstance(decision, Prefill)

        await eventually(served_again)
        for decision in held:
            decision.stream.cancel()


async def test_a_tenants_requests_wait_for_its_own_slots_and_no_more_of_them_than_may(
    redis_url: str, vllm: ScriptedVllm
) -> None:
    settings = TENANTS | {"max_wait_ms": LONG_MS}
    async with ScriptedDaemon(WILLING, slots=3).registered(redis_url), rig(redis_url, vllm, **settings) as made:
        held = await served(made, wish(tenant="a"))
        own = await waiting(made, wish(LONG_MS, tenant="a"))
        assert await made.decide(wish(LONG_MS, tenant="a")) == Plain("tenant_limit")
        other = await served(made, wish(LONG_MS, tenant="b"))
        held.stream.cancel()
        (await ended(own)).stream.cancel()
        other.stream.cancel()


@pytest.mark.parametrize(
    ("mean_ms", "retry_after_s"), [(None, 1), (0, 1), (1, 1), (1000, 1), (1001, 2), (29_500, 30), (10**7, 600)]
)
async def test_a_refusal_says_when_a_slot_is_likely_to_be_free(
    redis_url: str, vllm: ScriptedVllm, mean_ms: int | None, retry_after_s: int
) -> None:
    async with one_slot(redis_url, vllm) as made, Redis.from_url(redis_url) as redis:
        held = await served(made)
        if mean_ms is not None:
            (key,) = await redis.keys("*:pool")
            await redis.hset(key, "mean_ms", str(mean_ms))
        refused = await made.decide(wish(fallback=False))
        assert isinstance(refused, Refusal)
        assert (refused.error.status, refused.error.code) == (429, "no_free_slot")
        assert refused.error.retry_after_s == retry_after_s
        held.stream.cancel()


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue(redis_url: str, vllm: ScriptedVllm) -> None:
    async with one_slot(redis_url, vllm) as made:
        held = await served(made)
        first = await waiting(made, wish(LONG_MS), 1)
        second = await waiting(made, wish(LONG_MS), 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await queued(made, 1)
        assert waits(made, "left") == 1
        held.stream.cancel()
        (await ended(second)).stream.cancel()


async def test_clients_that_leave_at_any_time_leave_neither_slot_nor_place_behind(redis_url: str, vllm: ScriptedVllm) -> None:
    chance = random.Random(2)
    async with (
        ScriptedDaemon(WILLING, slots=2).registered(redis_url),
        rig(redis_url, vllm, max_wait_ms=LONG_MS) as made,
    ):

        async def served_and_left() -> None:
            decision = await made.decide(wish(LONG_MS))
            assert isinstance(decision, Prefill)
            decision.stream.cancel()

        for _ in range(40):
            clients = [asyncio.create_task(served_and_left()) for _ in range(6)]
            await asyncio.wait(clients, timeout=chance.uniform(0, 0.05))
            for client in clients:
                client.cancel()
            await asyncio.wait(clients)
            assert all(client.cancelled() or client.exception() is None for client in clients)
        await made.lane.settle()

        async def whole() -> bool:
            return (await made.free_slots(), await made.queue()) == (2, 0)

        await eventually(whole, within_s=2)


class TestDrain:
    async def test_those_who_wait_go_on_at_once_and_running_streams_go_on(self, redis_url: str, vllm: ScriptedVllm) -> None:
        async with one_slot(redis_url, vllm) as made:
            held = await served(made)
            allowed = await waiting(made, wish(LONG_MS), 1)
            denied = await waiting(made, wish(LONG_MS, fallback=False), 2)
            made.lane.drain()
            assert await ended(allowed, 1) == Plain("draining")
            refused = await ended(denied, 1)
            assert isinstance(refused, Refusal)
            assert isinstance(refused.error, LaneUnavailable)
            assert (await made.queue(), await made.free_slots()) == (0, 0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(held.stream.read(5))), 0.05)
            held.stream.cancel()

    async def test_no_slot_is_taken_by_a_request_that_was_here_already(self, redis_url: str, vllm: ScriptedVllm) -> None:
        async with one_slot(redis_url, vllm) as made:
            made.lane.drain()
            assert await made.decide(wish()) == await made.decide(wish(LONG_MS)) == Plain("draining")
            assert await made.free_slots() == 1


class TestDaemonThatRefuses:
    async def test_nobody_waits_for_the_only_daemon_once_it_has_refused(self, redis_url: str, vllm: ScriptedVllm) -> None:
        refusing = ScriptedDaemon([failed("slot_busy")])
        async with refusing.registered(redis_url), rig(redis_url, vllm, max_wait_ms=LONG_MS) as made:
            assert await asyncio.wait_for(made.decide(wish(LONG_MS)), 5) == Plain("daemon_unavailable")
            assert len(refusing.requests) == 1

    async def test_another_daemon_is_waited_for(self, redis_url: str, vllm: ScriptedVllm) -> None:
        async with one_slot(redis_url, vllm) as made:
            held = await served(made)
            async with ScriptedDaemon([failed("slot_busy")]).registered(redis_url) as refusing:

                async def both_known() -> bool:
                    view = made.parts.pools.get(MODEL)
                    return view is not None and view.nodes == 2

                await eventually(both_known)
                deciding = asyncio.create_task(made.decide(wish(LONG_MS)))
                await queued(made, 1)
                assert len(refusing.requests) == 1
                held.stream.cancel()
                (await ended(deciding)).stream.cancel()


async def test_a_wait_ends_when_the_last_daemon_leaves(redis_url: str, vllm: ScriptedVllm) -> None:
    async with AsyncExitStack() as gateway:
        async with ScriptedDaemon(WILLING).registered(redis_url):
            made = await gateway.enter_async_context(rig(redis_url, vllm, max_wait_ms=LONG_MS))
            await served(made)
            deciding = await waiting(made, wish(LONG_MS))
        assert await ended(deciding) == Plain("no_daemon")
        assert waits(made, "denied") == 1


async def test_a_wait_ends_when_the_table_is_lost(own_valkey: ValkeyProcess, vllm: ScriptedVllm) -> None:
    async with one_slot(own_valkey.url, vllm, leases_timeout_s=0.3) as made:
        held = await served(made)
        deciding = await waiting(made, wish(LONG_MS))
        own_valkey.stop()
        assert await ended(deciding) == Plain("leases_unavailable")
        assert waits(made, "denied") == 1
        held.stream.cancel()
