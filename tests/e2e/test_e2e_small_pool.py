"""A vLLM whose KV cache holds two long prompts and no more: blocks are taken from prefills that are being handed over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio

from handoff.claim import CLAIM_KEY, to_params
from tests.kit.apart import Apart, apart
from tests.kit.doors import PATIENCE_S, Door, ended, gone, handed_over, left
from tests.kit.engine_core import standing_still, taken, takes
from tests.kit.lane import until
from tests.kit.narrow import SECRET, Narrow
from tests.kit.notices import Notices
from tests.kit.prefills import CONTEXT, Prefills, VllmProcess, prompt
from tests.kit.valkey import ValkeyProcess

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

LONG = CONTEXT // 2 - 3  # two of them fill the cache
PROMPTS = 4
ROUNDS = 6
FENCED = "did not end in time"  # what the connector logs when blocks are taken from under a write


@dataclass
class Place:
    """Both legs. What the connector and the daemon say to each other goes through `notices`."""

    process: VllmProcess
    vllm: Prefills
    daemon: Apart
    notices: Notices
    door: Door

    async def quiet(self) -> None:
        """Returns when nothing is held anywhere."""

        async def holds_nothing() -> bool:
            return await self.vllm.holds_nothing() and await self.daemon.free()

        await until(holds_nothing, "every slot is free and vLLM holds no block", PATIENCE_S)

    async def fresh(self, ids: list[int]) -> list[int]:
        """What vLLM alone answers, computed anew."""
        return await self.vllm.plain(ids, cache_salt="of plain requests")

    async def accepted(self, *, frozen: bool) -> None:
        """The connector gets the daemon's leave to write, which is being kept; `frozen`: of a daemon that stands still now."""
        async with asyncio.timeout(PATIENCE_S):
            await self.notices.kept.wait()
        if frozen:
            self.daemon.freeze()
        self.notices.pass_on()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(narrow: Narrow, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("small")
    async with AsyncExitStack() as stack:
        valkey = stack.enter_context(ValkeyProcess(folder))
        log = folder / "decode.log"
        daemon = await stack.enter_async_context(apart(narrow.model_dir, valkey, SECRET, log, slots=PROMPTS))
        notices = await stack.enter_async_context(Notices(daemon.control_port))
        door = replace(daemon.door, control_port=notices.port)
        place = Place(narrow.process, narrow.vllm, daemon, notices, door)
        assert await handed_over(place.vllm, door, prompt(40)) == await place.fresh(prompt(40))
        yield place


@pytest_asyncio.fixture(loop_scope="session")
async def place(shared: Place) -> AsyncIterator[Place]:
    """After each test no slot and no block may be held."""
    yield shared
    await shared.quiet()


@dataclass
class Handoffs:
    """Concurrent claimed prefills: what vLLM told of each, and how its stream ended."""

    prompts: list[list[int]]
    told: list[dict[str, Any]]
    endings: list[list[int] | str]


async def at_once(place: Place, seed: int, *, frozen: bool) -> Handoffs:
    """Hand over as many long prompts as there are slots; `frozen`: their daemon stands still until vLLM has answered all."""
    prompts = [prompt(LONG + number, seed) for number in range(PROMPTS)]
    claims = [await place.door.claim() for _ in prompts]
    calls = [await place.door.reserved(claim) for claim in claims]
    place.notices.keep("Accepted", messages=PROMPTS)
    with standing_still(place.process.pid):  # all of them begin with the same step
        after = taken(place.process.log) + PROMPTS
        asked = [
            asyncio.create_task(place.vllm.complete(ids, params=to_params(claim), max_tokens=1))
            for ids, claim in zip(prompts, claims, strict=True)
        ]
        await takes(place.process.log, after)
    try:
        await place.accepted(frozen=frozen)
        told = await asyncio.gather(*asked)
    finally:
        place.daemon.thaw()
    endings = await asyncio.gather(*(ended(call, ids) for call, ids in zip(calls, prompts, strict=True)))
    return Handoffs(prompts, told, endings)


async def check(place: Place, handoffs: Handoffs) -> None:
    """Each answer is vLLM's own, or its handoff has failed and said so."""
    for ids, told, ending in zip(handoffs.prompts, handoffs.told, handoffs.endings, strict=True):
        expected = await place.fresh(ids)
        assert told["choices"][0]["token_ids"] == expected[:1]
        if isinstance(ending, list):
            assert ending == expected
            assert told["kv_transfer_params"][CLAIM_KEY]["first_token"] == expected[0]
        else:
            assert ending == "handoff_failed"


async def test_of_prefills_that_take_each_others_blocks_each_is_handed_over_whole_or_not_at_all(place: Place) -> None:
    before = await place.vllm.metric("num_preemptions_total")
    handoffs = await at_once(place, seed=1, frozen=False)
    assert {type(ending) for ending in handoffs.endings} == {list, str}  # some were whole, the others had to give way
    assert await place.vllm.metric("num_preemptions_total") > before
    await check(place, handoffs)


async def test_blocks_that_are_taken_from_under_a_write_are_no_ones_answer(place: Place) -> None:
    def fenced() -> int:
        return place.vllm.log.read_text().count(FENCED)

    before = fenced()
    for seed in range(2, 2 + ROUNDS):
        await check(place, await at_once(place, seed, frozen=True))
        await place.quiet()
        if fenced() > before:
            break
    assert fenced() > before


@pytest.mark.parametrize("frozen", [False, True], ids=["daemon takes part", "daemon stands still"])
async def test_what_follows_a_prefill_that_its_client_left_with_kv_in_flight_is_exact(place: Place, frozen: bool) -> None:
    for seed in range(20, 23):
        aborted, next_one = prompt(LONG, seed), prompt(LONG, -seed)
        expected = await place.fresh(next_one)
        first, second = await place.door.claim(), await place.door.claim()
        call, following = await place.door.reserved(first), await place.door.reserved(second)
        place.notices.keep("Accepted")
        asking = asyncio.create_task(place.vllm.complete(aborted, params=to_params(first), max_tokens=1))
        try:
            await place.accepted(frozen=frozen)
            await gone(asking)
            told = await place.vllm.complete(next_one, params=to_params(second), max_tokens=1)
        finally:
            place.daemon.thaw()
        await left(call)
        assert told["choices"][0]["token_ids"] == expected[:1]
        assert await ended(following, next_one) == expected
        others = [prompt(30 + slot, seed) for slot in range(PROMPTS)]  # in every slot, the one that was left included
        answers = await asyncio.gather(*(handed_over(place.vllm, place.door, ids) for ids in others))
        assert answers == [await place.fresh(ids) for ids in others]
