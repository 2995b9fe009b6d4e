"""A real vLLM of two tensor-parallel ranks, with a chained connector for each of two pools and one of vLLM's own.

Pool "chunks" sends chunk by chunk and has two keys, as while they are being changed; pool "pipelined" sends its last chunk
layer by layer.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from handoff import decode_pb2 as pb
from handoff.claim import CLAIM_KEY, ClaimKeys, SignedClaim, to_params
from tests.kit.daemon import read
from tests.kit.handoff import comes_true
from tests.kit.pools import BLOCK, CHUNK, PIPELINED, Front, two_pools

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

NEW, OLD = "the new key of the first pool", "the old key of the first pool"
SECRETS = {"chunks": f"{NEW},{OLD}", PIPELINED: "the key of the second pool"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = tmp_path_factory.mktemp("ranks")
    storage = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "storage")},
    }
    async with two_pools(folder, model_dir, SECRETS, storage) as front:
        yield front


@pytest_asyncio.fixture(loop_scope="session")
async def front(shared: Front) -> AsyncIterator[Front]:
    """After each test no slot and no block may be held."""
    yield shared
    await shared.quiet()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(f"{tokens} {seed}").choices(range(100, 40_000), k=tokens)


@pytest.mark.parametrize("pool", SECRETS)
@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK + 2, 3 * CHUNK - 5])
async def test_prompts_of_all_lengths_are_answered_as_by_vllm_alone(front: Front, pool: str, tokens: int) -> None:
    ids = prompt(tokens, seed=len(pool))
    computed = await front.handed_over(pool, ids)
    again = await front.handed_over(pool, ids)  # of which vLLM has every full block
    assert computed == again == await front.plain(ids)


@pytest.mark.parametrize("pool", SECRETS)
async def test_a_prefix_that_vllm_has_is_handed_over_with_the_rest(front: Front, pool: str) -> None:
    begun = prompt(CHUNK + BLOCK + 7, seed=1)
    await front.plain(begun)
    longer = begun + prompt(CHUNK, seed=len(pool))
    assert await front.handed_over(pool, longer) == await front.plain(longer)


async def test_both_pools_are_served_at_once(front: Front) -> None:
    asked = [(pool, prompt(150, seed=10 * slot + len(pool))) for pool in SECRETS for slot in (0, 1)]
    answers = await asyncio.gather(*(front.handed_over(pool, ids) for pool, ids in asked))
    for (_, ids), found in zip(asked, answers, strict=True):
        assert found == await front.plain(ids)


@pytest.mark.parametrize("key", [NEW, OLD])
async def test_while_a_key_is_being_changed_both_are_good(front: Front, key: str) -> None:
    ids, pool = prompt(40, seed=len(key) + ord(key[4])), front.pools["chunks"]
    other = front.pools[PIPELINED].content()
    assert await front.handed_over("chunks", ids, await pool.claim(ClaimKeys([key.encode()]))) == await front.plain(ids)
    assert front.pools[PIPELINED].content() == other


def unclaimed(good: SignedClaim, keys: ClaimKeys) -> dict[str, Any]:
    """kv_transfer_params that permit nothing, and are like a good claim otherwise."""
    expired = msgspec.structs.replace(good.claim, expires=int(time.time()) - 5)
    altered = msgspec.structs.replace(good, claim=msgspec.structs.replace(good.claim, slot=1 - good.claim.slot))
    return {
        "none": None,
        "of another connector": {"remote_engine_id": "x", "remote_block_ids": [1]},
        "malformed": {CLAIM_KEY: {"claim": "all of them"}},
        "forged": to_params(ClaimKeys([b"a key of somebody else"]).sign(good.claim)),
        "expired": to_params(keys.sign(expired)),
        "altered": to_params(altered),
    }


@pytest.mark.parametrize("pool", SECRETS)
async def test_requests_that_may_not_be_handed_over_are_ordinary_ones_and_no_byte_leaves(front: Front, pool: str) -> None:
    ids = prompt(100, seed=3)
    expected = (await front.complete(ids))["choices"]
    claims = {name: await one.claim() for name, one in front.pools.items()}
    calls = [await front.pools[name].reserved(claim) for name, claim in claims.items()]  # both daemons wait
    before = {name: one.content() for name, one in front.pools.items()}
    for name, params in unclaimed(claims[pool], front.pools[pool].keys).items():
        answer = await front.complete(ids, params=params)
        assert answer["choices"] == expected, name
        assert not answer.get("kv_transfer_params"), name
    assert {name: one.content() for name, one in front.pools.items()} == before
    assert not any(front.pools[name].awaits(claim) for name, claim in claims.items())
    for call in calls:
        call.cancel()


async def test_a_pool_takes_nothing_that_another_pools_key_has_signed(front: Front) -> None:
    ids = prompt(100, seed=5)
    expected = (await front.complete(ids))["choices"]
    claim = await front.pools["chunks"].claim()
    call = await front.pools["chunks"].reserved(claim)
    before = {name: one.content() for name, one in front.pools.items()}
    answer = await front.complete(ids, params=to_params(front.pools[PIPELINED].keys.sign(claim.claim)))
    assert answer["choices"] == expected
    assert {name: one.content() for name, one in front.pools.items()} == before
    assert await front.plain(ids) == expected[0]["token_ids"]
    call.cancel()


async def test_a_claim_is_good_for_one_request(front: Front) -> None:
    ids, pool = prompt(70, seed=4), front.pools["chunks"]
    claim = await pool.claim()
    call = await pool.reserved(claim)
    told = await front.complete(ids, params=to_params(claim), max_tokens=1)
    again = await front.complete(ids, params=to_params(claim), max_tokens=1)
    assert CLAIM_KEY in told["kv_transfer_params"]
    assert not again.get("kv_transfer_params")
    assert list((await read(call, "landed")).prompt_token_ids) == ids
    call.cancel()


@pytest.mark.parametrize("pool", SECRETS)
async def test_a_first_token_that_ends_the_answer_leaves_nothing_to_decode(front: Front, pool: str) -> None:
    ids = prompt(50, seed=6)
    first = (await front.plain(ids, max_tokens=1))[0]
    claim = await front.pools[pool].claim()
    call = await front.pools[pool].reserved(claim)
    await front.complete(ids, params=to_params(claim), max_tokens=1, stop_token_ids=[first])
    assert (await read(call, "landed")).first_token == first
    step = await read(call, "tokens")
    assert (list(step.ids), step.finish) == ([], pb.Tokens.STOP)


@pytest.mark.parametrize("pool", SECRETS)
async def test_a_client_that_leaves_the_prefill_ends_the_handoff_at_once(front: Front, pool: str) -> None:
    claim = await front.pools[pool].claim()
    call = await front.pools[pool].reserved(claim)
    # A prompt of its own for each pool: vLLM's example of a storage connector has kept the first chunk of one that was cut,
    # takes it for the whole when it is asked again, and ends vLLM.
    ids = prompt(900, seed=20 + len(pool))
    asking = asyncio.create_task(front.complete(ids, params=to_params(claim), max_tokens=400))
    await comes_true(lambda: front.pools[pool].awaits(claim))
    asking.cancel()
    failed = await read(call, "failed")
    assert failed.code == "handoff_failed"


@pytest.mark.parametrize("pool", SECRETS)
async def test_a_client_that_leaves_the_decode_ends_the_handoff_and_vllm_serves_on(front: Front, pool: str) -> None:
    ids = prompt(900, seed=40 + len(pool))
    claim = await front.pools[pool].claim()
    call = await front.pools[pool].reserved(claim)
    asking = asyncio.create_task(front.complete(ids, params=to_params(claim), max_tokens=1))
    await comes_true(lambda: front.pools[pool].awaits(claim))
    call.cancel()
    assert (await asking)["choices"][0]["token_ids"] == await front.plain(ids, max_tokens=1)
