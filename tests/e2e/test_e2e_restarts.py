"""Either leg stands still, dies or begins anew, between two requests or within one: what follows is exact, or fails cleanly.

The real vLLM's KV cache is as small as it may be, so that blocks which were given up hold another prompt at once.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from handoff.claim import to_params
from tests.kit.apart import Apart, apart
from tests.kit.daemon import answer, read
from tests.kit.doors import ended, gone, handed_over
from tests.kit.lane import until
from tests.kit.prefills import (
    BLOCK,
    CONTEXT,
    SLOW_WIRE,
    Prefills,
    VllmProcess,
    make_model,
    prefills,
    producer,
    prompt,
    vllm_server,
)
from tests.kit.valkey import ValkeyProcess

pytestmark = [pytest.mark.endurance, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SECRET = "the key of the restarts"
SLOTS = 4
TTL_S = 2  # of claims, and from reserving a slot to the whole KV cache
UNUSED_LEASE_S = 1.0
CONNECTOR = {"accept_timeout_s": 1.0, "write_timeout_s": 1.0}
LONG = CONTEXT - 30
CLEAN = {"handoff_failed", "timeout"}  # failures on which a gateway goes on elsewhere


@dataclass
class Legs:
    """Both legs, and what it takes to start them again."""

    process: VllmProcess
    daemon: Apart
    stack: AsyncExitStack
    vllm: Prefills

    async def prefill_again(self) -> None:
        """Talk to the vLLM that has been started last."""
        self.vllm = await self.stack.enter_async_context(prefills(self.process))

    async def exact(self, seed: int) -> None:
        """The next request of the lane is answered as by vLLM alone."""
        ids = prompt(100, seed)
        assert await handed_over(self.vllm, self.daemon.door, ids) == await self.vllm.plain(ids, cache_salt="plain")

    async def quiet(self) -> None:
        async def holds_nothing() -> bool:
            return await self.vllm.holds_nothing() and await self.daemon.free()

        await until(holds_nothing, "every slot is free and vLLM holds no block", 15)

    async def under_way(self) -> None:
        """Returns when vLLM computes a prompt."""

        async def running() -> bool:
            return await self.vllm.metric("num_requests_running") > 0

        await until(running, "vLLM computes the prompt")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Legs]:
    folder = tmp_path_factory.mktemp("restarts")
    tiny = folder / "model"
    make_model(tiny, model_dir)
    transfer = producer(folder / "connector.toml", SECRET, **CONNECTOR)
    blocks = ["--num-gpu-blocks-override", CONTEXT // BLOCK + 1]
    lives = {"slots": SLOTS, "landing_timeout_s": TTL_S, "unused_lease_s": UNUSED_LEASE_S}
    async with AsyncExitStack() as stack:
        process = stack.enter_context(vllm_server(tiny, transfer, folder / "vllm.log", *blocks, environment=SLOW_WIRE))
        valkey = stack.enter_context(ValkeyProcess(folder))
        daemon = await stack.enter_async_context(apart(tiny, valkey, SECRET, folder / "decode.log", **lives))
        yield Legs(process, daemon, stack, await stack.enter_async_context(prefills(process)))


@pytest_asyncio.fixture(loop_scope="session")
async def legs(shared: Legs) -> AsyncIterator[Legs]:
    """After each test no slot and no block may be held."""
    yield shared
    await shared.quiet()


@asynccontextmanager
async def standing_still(legs: Legs) -> AsyncIterator[None]:
    """The daemon is stopped in the block, which lasts longer than whatever it may hold, and vLLM fills its blocks anew."""
    legs.daemon.freeze()
    began = time.monotonic()
    try:
        yield
        seed = 0
        while time.monotonic() < began + TTL_S + 1:
            await legs.vllm.plain(prompt(LONG, seed := seed - 1), max_tokens=1)
    finally:
        legs.daemon.thaw()


async def test_a_daemon_that_stands_still_before_a_handoff_begins_takes_nothing_of_it_later(legs: Legs) -> None:
    ids = prompt(LONG, 1)
    claim = await legs.daemon.door.claim()
    call = await legs.daemon.door.reserved(claim)
    async with standing_still(legs):
        told = await legs.vllm.complete(ids, params=to_params(claim), max_tokens=1)
    assert await ended(call, ids) in CLEAN
    assert told["choices"][0]["token_ids"] == await legs.vllm.plain(ids, max_tokens=1, cache_salt="plain")
    await legs.exact(2)


async def test_a_daemon_that_stands_still_while_it_is_written_to_takes_no_other_prompts_kv(legs: Legs) -> None:
    for seed in range(3, 9):
        ids = prompt(LONG, seed)
        claim = await legs.daemon.door.claim()
        call = await legs.daemon.door.reserved(claim)
        asking = asyncio.create_task(legs.vllm.complete(ids, params=to_params(claim), max_tokens=1))
        await legs.under_way()
        async with standing_still(legs):
            told = await asking
        ending, expected = await ended(call, ids), await legs.vllm.plain(ids, cache_salt="plain")
        assert told["choices"][0]["token_ids"] == expected[:1]
        assert ending == expected or ending in CLEAN
        await legs.quiet()
        if ending != expected:
            break
    else:
        raise AssertionError("no write was ever under way when the daemon stopped")
    await legs.exact(9)


async def test_kv_that_waits_for_the_engine_beyond_its_lease_and_its_claim_is_still_its_own(legs: Legs) -> None:
    """And so is that of a request which waits as long for a slot."""
    door = legs.daemon.door
    prompts = [prompt(20, 100 + number) for number in range(SLOTS + 1)]
    expected = [await legs.vllm.plain(ids, cache_salt="plain") for ids in prompts]
    calls = []
    for number, ids in enumerate(prompts[:-1]):
        claim = await door.claim(life_s=TTL_S)
        longest = CONTEXT - 24 if number < SLOTS - 1 else 12
        calls.append(await door.reserved(claim, max_tokens=longest))
        await legs.vllm.complete(ids, params=to_params(claim), max_tokens=1)

    async def queued() -> list[int]:
        return await handed_over(legs.vllm, door, prompts[-1], await door.claim(life_s=TTL_S, wait_ms=20_000))

    waits = asyncio.create_task(queued())
    *before, last = calls
    landed = await read(last, "landed")
    began = time.monotonic()
    endings = await asyncio.gather(*(ended(call, ids) for call, ids in zip(before, prompts, strict=False)))
    assert [landed.first_token, *await answer(last)] == expected[-2]
    assert time.monotonic() - began > TTL_S
    for ending, beginning in zip(endings, expected, strict=False):
        assert ending[: len(beginning)] == beginning
    assert await waits == expected[-1]


async def test_a_claim_that_expires_before_its_prefill_is_no_claim(legs: Legs) -> None:
    ids = prompt(50, 10)
    claim = await legs.daemon.door.claim(life_s=TTL_S)
    call = await legs.daemon.door.reserved(claim)
    await until(lambda: time.time() > claim.claim.expires, "the claim has expired")
    answered = await legs.vllm.complete(ids, params=to_params(claim))
    assert not answered.get("kv_transfer_params")
    assert await ended(call, ids) == "timeout"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on the same ports", "on other ports"])
async def test_the_first_request_after_a_daemon_began_anew_is_exact(legs: Legs, elsewhere: bool) -> None:
    await legs.exact(11)
    await legs.daemon.kill()
    await legs.daemon.start(elsewhere=elsewhere)
    await legs.exact(12 + elsewhere)


async def test_a_host_that_is_gone_in_mid_handoff_costs_vllm_nothing(legs: Legs) -> None:
    ids = prompt(LONG, 14)
    claim = await legs.daemon.door.claim()
    call = await legs.daemon.door.reserved(claim)
    asking = asyncio.create_task(legs.vllm.complete(ids, params=to_params(claim), max_tokens=1))
    await legs.under_way()
    legs.daemon.freeze()  # nothing is closed, and nothing answers any more
    assert (await asking)["choices"][0]["token_ids"] == await legs.vllm.plain(ids, max_tokens=1, cache_salt="plain")
    await until(legs.vllm.holds_nothing, "vLLM holds no block for the host that is gone")
    await legs.daemon.kill()
    await legs.daemon.start()
    await legs.exact(15)
    call.cancel()


async def test_a_prefill_that_dies_in_mid_handoff_is_told_of_and_either_leg_may_begin_anew_after_the_other(legs: Legs) -> None:
    await legs.exact(16)
    ids = prompt(LONG, 17)
    claim = await legs.daemon.door.claim()
    call = await legs.daemon.door.reserved(claim)
    asking = asyncio.create_task(legs.vllm.complete(ids, params=to_params(claim), max_tokens=400))
    await legs.under_way()
    legs.process.kill()
    assert await asyncio.wait_for(ended(call, ids), TTL_S + 3) in CLEAN
    await gone(asking)
    legs.process.start(elsewhere=True)
    await legs.prefill_again()
    await legs.exact(18)
    await legs.daemon.kill()
    await legs.daemon.start()
    await legs.exact(19)
