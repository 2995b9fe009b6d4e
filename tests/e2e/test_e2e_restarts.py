"""Either leg stands still, dies or begins anew, between two requests or within one: what follows is exact, or fails cleanly."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from handoff.claim import to_params
from tests.kit.apart import Apart, apart
from tests.kit.daemon import answer, read
from tests.kit.doors import PATIENCE_S, Door, ended, gone, handed_over
from tests.kit.lane import until
from tests.kit.narrow import SECRET, Narrow
from tests.kit.notices import Notices
from tests.kit.prefills import CONTEXT, Prefills, VllmProcess, prompt
from tests.kit.valkey import ValkeyProcess

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SLOTS = 6
LANDING_S = 5.0  # from reserving a slot to the whole KV cache
LIFE_S = 2  # of claims, where it matters
UNUSED_LEASE_S = 1.0
LONG = CONTEXT - 30
CLEAN = {"handoff_failed", "timeout"}  # failures on which a gateway goes on elsewhere


@dataclass
class Legs:
    """Both legs, and what it takes to start them again."""

    process: VllmProcess
    daemon: Apart
    vllm: Prefills

    async def exact(self, seed: int, door: Door | None = None) -> None:
        """The next request of the lane is answered as by vLLM alone."""
        ids = prompt(100, seed)
        assert await handed_over(self.vllm, door or self.daemon.door, ids) == await self.vllm.plain(ids, cache_salt="plain")

    async def quiet(self) -> None:
        async def holds_nothing() -> bool:
            return await self.vllm.holds_nothing() and await self.daemon.free()

        await until(holds_nothing, "every slot is free and vLLM holds no block", PATIENCE_S)

    @asynccontextmanager
    async def begun(self, ids: list[int]) -> AsyncIterator["Handoff"]:
        """A handoff that the daemon has accepted, of which the connector does not know yet: nothing has been written."""
        async with Notices(self.daemon.control_port) as notices:
            door = replace(self.daemon.door, control_port=notices.port)
            await self.exact(len(ids), door)  # the connector's first words, which may take their time
            claim = await door.claim()
            call = await door.reserved(claim)
            notices.keep("Accepted")
            asking = asyncio.create_task(self.vllm.complete(ids, params=to_params(claim), max_tokens=1))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await notices.kept.wait()
                yield Handoff(door, call, asking, notices)
            finally:
                await gone(asking)

    @asynccontextmanager
    async def frozen_under_a_write(self, ids: list[int]) -> AsyncIterator["Handoff"]:
        """A handoff whose daemon has let the connector write, and then stands still: what is written goes to nobody."""
        async with self.begun(ids) as handoff:
            self.daemon.freeze()
            handoff.notices.pass_on()
            try:
                yield handoff
            finally:
                self.daemon.thaw()


@dataclass
class Handoff:
    """One that is under way: by which door, its token stream, and vLLM's answer to come."""

    door: Door
    call: Any
    asking: "asyncio.Task[dict[str, Any]]"
    notices: Notices


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(narrow: Narrow, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Legs]:
    folder = tmp_path_factory.mktemp("restarts")
    # Without drafts an answer of a thousand tokens takes a second and more.
    lives = {"slots": SLOTS, "landing_timeout_s": LANDING_S, "unused_lease_s": UNUSED_LEASE_S, "speculation": "off"}
    async with AsyncExitStack() as stack:
        valkey = stack.enter_context(ValkeyProcess(folder))
        daemon = await stack.enter_async_context(apart(narrow.model_dir, valkey, SECRET, folder / "decode.log", **lives))
        yield Legs(narrow.process, daemon, narrow.vllm)


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
        while time.monotonic() < began + LANDING_S + 1:
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
    ids = prompt(LONG, 3)
    async with legs.frozen_under_a_write(ids) as handoff:
        async with standing_still(legs):
            told = await handoff.asking
        assert await ended(handoff.call, ids) in CLEAN
        assert told["choices"][0]["token_ids"] == await legs.vllm.plain(ids, max_tokens=1, cache_salt="plain")
        await legs.quiet()
        await legs.exact(4, handoff.door)


async def test_kv_that_waits_for_the_engine_beyond_its_lease_and_its_claim_is_still_its_own(legs: Legs) -> None:
    """And so is that of a request which waits as long for a slot."""
    door = legs.daemon.door
    prompts = [prompt(20, 100 + number) for number in range(SLOTS + 1)]
    expected = [await legs.vllm.plain(ids, cache_salt="plain") for ids in prompts]
    calls = []
    for number, ids in enumerate(prompts[:-1]):
        claim = await door.claim(life_s=LIFE_S)
        longest = CONTEXT - 24 if number < SLOTS - 1 else 12
        calls.append(await door.reserved(claim, max_tokens=longest))
        await legs.vllm.complete(ids, params=to_params(claim), max_tokens=1)

    async def queued() -> list[int]:
        return await handed_over(legs.vllm, door, prompts[-1], await door.claim(life_s=LIFE_S, wait_ms=60_000))

    waits = asyncio.create_task(queued())
    *before, last = calls
    landed = await read(last, "landed")
    endings = await asyncio.gather(*(ended(call, ids) for call, ids in zip(before, prompts, strict=False)))
    assert time.time() > claim.claim.expires
    assert [landed.first_token, *await answer(last)] == expected[-2]
    for ending, beginning in zip(endings, expected, strict=False):
        assert ending[: len(beginning)] == beginning
    assert await waits == expected[-1]


async def test_a_claim_that_expires_before_its_prefill_is_no_claim(legs: Legs) -> None:
    ids = prompt(50, 10)
    claim = await legs.daemon.door.claim(life_s=LIFE_S)
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
    async with legs.frozen_under_a_write(ids) as handoff:  # nothing is closed, and nothing answers any more
        answered = await handoff.asking
        assert answered["choices"][0]["token_ids"] == await legs.vllm.plain(ids, max_tokens=1, cache_salt="plain")
        await until(legs.vllm.holds_nothing, "vLLM holds no block for the host that is gone", PATIENCE_S)
        await legs.daemon.kill()
        await legs.daemon.start()
        await legs.exact(15)
        handoff.call.cancel()


async def test_a_prefill_that_dies_in_mid_handoff_is_told_of_and_either_leg_may_begin_anew_after_the_other(legs: Legs) -> None:
    ids = prompt(LONG, 17)
    async with legs.begun(ids) as handoff:
        legs.process.kill()
        assert await ended(handoff.call, ids) in CLEAN
    legs.process.start()
    await legs.vllm.ready()
    await legs.exact(18)
    await legs.daemon.kill()
    await legs.daemon.start()
    await legs.exact(19)
