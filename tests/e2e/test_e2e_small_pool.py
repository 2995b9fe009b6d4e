"""A real vLLM whose KV cache holds two long prompts and no more: blocks are taken from prefills that are being handed over.

Its chunks are small, so that several prefills are under way at once and blocks are taken while earlier ones are being written.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from handoff.claim import CLAIM_KEY, to_params
from tests.kit.apart import Apart, apart
from tests.kit.doors import ended, gone, handed_over, left
from tests.kit.lane import until
from tests.kit.prefills import (
    BLOCK,
    CONTEXT,
    SLOW_WIRE,
    Prefills,
    make_model,
    prefills,
    producer,
    prompt,
    vllm_server,
)
from tests.kit.valkey import ValkeyProcess

pytestmark = [pytest.mark.endurance, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SECRET = "the key of the small pool"
BLOCKS = CONTEXT // BLOCK  # of the whole cache: the fewest that vLLM starts with
LONG = CONTEXT // 2 - 3  # two of them fill it
PROMPTS = 4
STEP = 64  # tokens of one prompt in one step
WRITE_S = 2.0
ROUNDS = 6
FENCED = "did not end in time"  # what the connector logs when blocks are taken from under a write


@dataclass
class Place:
    vllm: Prefills
    daemon: Apart

    async def quiet(self) -> None:
        """Returns when nothing is held anywhere."""

        async def holds_nothing() -> bool:
            return await self.vllm.holds_nothing() and await self.daemon.free()

        await until(holds_nothing, "every slot is free and vLLM holds no block", 15)

    async def fresh(self, ids: list[int]) -> list[int]:
        """What vLLM alone answers, computed anew."""
        return await self.vllm.plain(ids, cache_salt="of plain requests")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("small")
    tiny = folder / "model"
    make_model(tiny, model_dir)
    transfer = producer(folder / "connector.toml", SECRET, write_timeout_s=WRITE_S)
    # One block more, which vLLM never gives out.
    options = ["--num-gpu-blocks-override", BLOCKS + 1, "--long-prefill-token-threshold", STEP]
    async with AsyncExitStack() as stack:
        process = stack.enter_context(vllm_server(tiny, transfer, folder / "vllm.log", *options, environment=SLOW_WIRE))
        valkey = stack.enter_context(ValkeyProcess(folder))
        daemon = await stack.enter_async_context(apart(tiny, valkey, SECRET, folder / "decode.log", slots=PROMPTS))
        vllm = await stack.enter_async_context(prefills(process))
        place = Place(vllm, daemon)
        assert await handed_over(vllm, daemon.door, prompt(40)) == await place.fresh(prompt(40))
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
    claims = [await place.daemon.door.claim() for _ in prompts]
    calls = [await place.daemon.door.reserved(claim) for claim in claims]
    asked = [
        asyncio.create_task(place.vllm.complete(ids, params=to_params(claim), max_tokens=1))
        for ids, claim in zip(prompts, claims, strict=True)
    ]
    try:
        if frozen:
            await under_way(place, asked)
            place.daemon.freeze()
        told = await asyncio.gather(*asked)
    finally:
        place.daemon.thaw()
    endings = await asyncio.gather(*(ended(call, ids) for call, ids in zip(calls, prompts, strict=True)))
    return Handoffs(prompts, told, endings)


async def under_way(place: Place, asked: list["asyncio.Task[dict[str, Any]]"]) -> None:
    """Returns when vLLM computes some of these requests, or has answered one."""

    async def running() -> bool:
        return any(one.done() for one in asked) or await place.vllm.metric("num_requests_running") > 0

    await until(running, "vLLM computes")


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
    before = await place.vllm.metric("num_preemptions_total")
    for seed in range(2, 2 + ROUNDS):
        handoffs = await at_once(place, seed, frozen=True)
        await check(place, handoffs)
        await place.quiet()
        if FENCED in place.vllm.log.read_text():
            break
    assert FENCED in place.vllm.log.read_text()
    assert await place.vllm.metric("num_preemptions_total") > before


@pytest.mark.parametrize("frozen", [False, True], ids=["daemon takes part", "daemon stands still"])
async def test_what_follows_a_prefill_that_its_client_left_with_kv_in_flight_is_exact(place: Place, frozen: bool) -> None:
    for seed in range(20, 23):
        aborted, next_one = prompt(LONG, seed), prompt(LONG, -seed)
        expected = await place.fresh(next_one)
        first, second = await place.daemon.door.claim(), await place.daemon.door.claim()
        call, following = await place.daemon.door.reserved(first), await place.daemon.door.reserved(second)
        asking = asyncio.create_task(place.vllm.complete(aborted, params=to_params(first), max_tokens=1))
        try:
            await under_way(place, [asking])
            if frozen:
                place.daemon.freeze()
            await gone(asking)
            told = await place.vllm.complete(next_one, params=to_params(second), max_tokens=1)
        finally:
            place.daemon.thaw()
        await left(call)
        assert told["choices"][0]["token_ids"] == expected[:1]
        assert await ended(following, next_one) == expected
        others = [prompt(30 + slot, seed) for slot in range(PROMPTS)]  # in every slot, the one that was left included
        answers = await asyncio.gather(*(handed_over(place.vllm, place.daemon.door, ids) for ids in others))
        assert answers == [await place.fresh(ids) for ids in others]
