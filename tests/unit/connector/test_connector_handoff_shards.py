"""Several ranks fill one slot, each its own shard, over real sockets and real NIXL."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from decode_daemon.convert import convert
from decode_daemon.slots import HandoffFailed, SlotState
from handoff.claim import SignedClaim, to_bytes
from handoff.layout import IndexBlock, KVLayout, LatentBlock, Layer
from handoff.messages import Hello
from tests.kit.handoff import (
    BLOCK,
    BLOCKS,
    EXPECTATION,
    LAYERS,
    LAYOUT,
    TOKENS,
    Landing,
    Prefill,
    comes_true,
    hand_over,
    landing,
    paged,
    prefill,
    whole,
)

SHARDS = 2
LENGTH = LAYOUT.bytes_for(TOKENS)


@pytest.fixture
async def pair() -> AsyncIterator[Landing]:
    """A daemon whose engine has the heads of two shards."""
    async with landing(expectation=replace(EXPECTATION, kv_heads=SHARDS * BLOCK.kv_heads)) as here:
        yield here


@pytest.fixture
def ranks() -> Iterator[list[Prefill]]:
    with prefill(shard=0, shards=SHARDS) as one, prefill(shard=1, shards=SHARDS, caches=noise(1)) as other:
        yield [one, other]


def noise(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (64, BLOCK.block_bytes), dtype=torch.uint8, generator=generator) for _ in range(LAYERS)]


async def test_two_ranks_fill_one_slot_and_it_is_whole_only_with_both(pair: Landing, ranks: list[Prefill]) -> None:
    claim, held = pair.claim()
    requests = [rank.open(claim, TOKENS) for rank in ranks]
    pair.end_prefill(claim)
    ranks[1].write(requests[1], BLOCKS)
    await ranks[1].settled(requests[1])
    ranks[0].write(requests[0], BLOCKS[:4], last=False)
    await comes_true(lambda: 0 in held.writers)
    assert not held.landed.done()
    ranks[0].write(requests[0], BLOCKS[4:], first=4)
    landed = await whole(held)
    await ranks[0].settled(requests[0])
    assert (landed.layout, landed.shards, landed.bytes) == (LAYOUT, SHARDS, SHARDS * LENGTH)
    memory = pair.slots[0].memory.view(landed.bytes)
    for index, rank in enumerate(ranks):
        assert torch.equal(memory[index * LENGTH : (index + 1) * LENGTH], rank.content(BLOCKS))
        assert rank.sent == [LENGTH]


async def test_the_heads_of_all_ranks_come_in_their_order(pair: Landing) -> None:
    shape = (LAYERS, SHARDS * BLOCK.kv_heads, TOKENS, BLOCK.head_dim)
    keys, values = torch.randn((2, *shape), generator=torch.Generator().manual_seed(2))
    per_rank = []
    for index in range(SHARDS):
        heads = slice(index * BLOCK.kv_heads, (index + 1) * BLOCK.kv_heads)
        caches = [torch.zeros(32, BLOCK.elements) for _ in range(LAYERS)]
        for cache, key, value in zip(caches, keys, values, strict=True):
            cache[BLOCKS] = paged(BLOCK, key[heads], value[heads])
        per_rank.append([cache.view(torch.uint8) for cache in caches])
    with prefill(shard=0, shards=2, caches=per_rank[0]) as one, prefill(shard=1, shards=2, caches=per_rank[1]) as other:
        claim, held = pair.claim()
        for rank in (other, one):
            rank.write(rank.open(claim, TOKENS), BLOCKS)
        pair.end_prefill(claim)
        landed = await whole(held)
    found = torch.empty(2, *shape)
    convert(pair.slots[0].memory.view(landed.bytes), landed.layout, found[0], found[1], shards=landed.shards)
    assert torch.equal(found, torch.stack((keys, values)))


@pytest.mark.parametrize("late", [0, 1])
async def test_ranks_that_tell_of_different_prompts_fail_the_handoff(pair: Landing, ranks: list[Prefill], late: int) -> None:
    claim, held = pair.claim()
    first = ranks[1 - late].open(claim, TOKENS)
    await comes_true(lambda: held.started is not None)
    second = ranks[late].open(claim, TOKENS - 1)
    with pytest.raises(HandoffFailed, match=f"tokens differs: shard {late} has 21, shard {1 - late} has 22"):
        await whole(held)
    await pair.slots[0].release(held, "handoff_failed", 2.0)
    await ranks[0].settled(first if late else second)
    await ranks[1].settled(second if late else first)
    assert (pair.slots[0].state, pair.slots[0].memory.generation) == (SlotState.FREE, 0)


async def test_a_daemon_for_one_rank_refuses_two_and_names_the_heads(daemon: Landing, ranks: list[Prefill]) -> None:
    claim, held = daemon.claim()
    for rank in ranks:
        await rank.settled(rank.open(claim, TOKENS))
    with pytest.raises(HandoffFailed, match=r"KV heads differs: the connector has 4 .*, the daemon has 2"):
        await whole(held)


async def test_a_claim_that_another_vllm_replays_neither_mixes_nor_ends_the_handoff(
    pair: Landing, ranks: list[Prefill]
) -> None:
    claim, held = pair.claim()
    first = ranks[0].open(claim, TOKENS)
    await comes_true(lambda: held.started is not None)
    with prefill(shard=0, shards=2, engine_id="another") as zero, prefill(shard=1, shards=2, engine_id="another") as one:
        for rank in (zero, one):
            request = rank.open(claim, TOKENS)
            rank.write(request, BLOCKS[::-1])
            await rank.settled(request)
            assert (rank.sent, rank.failed) == ([], ["failed"])
    ranks[0].write(first, BLOCKS)
    ranks[1].write(ranks[1].open(claim, TOKENS), BLOCKS)
    pair.end_prefill(claim)
    await whole(held)
    assert torch.equal(pair.memory(0, TOKENS), ranks[0].content(BLOCKS))


@dataclass
class Rank:
    """Rank 1, in a process of its own."""

    process: "subprocess.Popen[str]"

    def says(self, word: str) -> None:
        """Returns when it has said so; NIXL's own lines come before."""
        assert self.process.stdout is not None
        assert any(line.strip() == word for line in self.process.stdout), "the rank has ended"


RANK = """
import sys, types
package = types.ModuleType("connector")
package.__path__ = ["connector"]
sys.modules["connector"] = package  # its modules, without vLLM
from handoff.claim import from_bytes
from tests.kit.handoff import BLOCKS, TOKENS, prefill
with prefill(shard=1, shards=2) as rank:
    request = rank.open(from_bytes(bytes.fromhex(sys.argv[1])), TOKENS)
    rank.write(request, BLOCKS[:2], last=False)
    print("begun", flush=True)
    sys.stdin.readline()
    rank.write(request, BLOCKS[2:], first=2)
    print("written", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def rank_one(claim: SignedClaim) -> Iterator[Rank]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", RANK, to_bytes(claim).hex()],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Rank(process)
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.parametrize(("end", "within_s"), [(signal.SIGKILL, 6), (signal.SIGSTOP, 15)], ids=["killed", "silent"])
async def test_a_rank_that_dies_fails_the_handoff_within_seconds_and_harms_neither_slot_nor_the_other_rank(
    pair: Landing, ranks: list[Prefill], end: signal.Signals, within_s: float
) -> None:
    claim, held = pair.claim()
    request = ranks[0].open(claim, TOKENS)
    ranks[0].write(request, BLOCKS)
    pair.end_prefill(claim)
    with rank_one(claim) as dying:
        await asyncio.to_thread(dying.says, "begun")
        await comes_true(lambda: len(held.writers) == SHARDS)
        dying.process.send_signal(end)
        with pytest.raises(HandoffFailed, match="the connection to the vLLM rank that writes shard 1 is gone"):
            await whole(held, within_s)
    await asyncio.wait_for(pair.slots[0].release(held, "handoff_failed", 30.0), 2.0)  # nobody waits for the dead
    await ranks[0].settled(request)
    assert (pair.slots[0].state, pair.slots[0].memory.generation) == (SlotState.FREE, 1)

    claim, held = pair.claim()
    for rank in ranks:
        rank.write(rank.open(claim, TOKENS), BLOCKS)
    pair.end_prefill(claim)
    await whole(held)
    assert torch.equal(pair.memory(0, TOKENS), ranks[0].content(BLOCKS))


async def test_ranks_in_two_processes_make_one_cache(pair: Landing, ranks: list[Prefill]) -> None:
    claim, held = pair.claim()
    with rank_one(claim) as other:
        ranks[0].write(ranks[0].open(claim, TOKENS), BLOCKS)
        pair.end_prefill(claim)
        await asyncio.to_thread(other.says, "begun")
        assert other.process.stdin is not None
        other.process.stdin.write("go on\n")
        other.process.stdin.flush()
        await whole(held)
        second = pair.slots[0].memory.view(SHARDS * LENGTH)[LENGTH:]
        assert torch.equal(second, ranks[0].content(BLOCKS))  # rank 1's cache is made from the same numbers


class Anything(type(EXPECTATION)):  # type: ignore[misc]
    """An engine of any kind of attention."""

    def mismatch(self, hello: Hello, transport: str) -> None:
        return None


async def test_layers_of_different_block_sizes_land_one_after_the_other() -> None:
    blocks = (LatentBlock(4, form="fp8_ds_mla"), IndexBlock(4))
    layers = [Layer(f"{index}.{kind}", block) for index in range(2) for block, kind in enumerate(("attn", "indexer.k_cache"))]
    layout = KVLayout(tuple(layers), blocks)
    anything = Anything(**{name: getattr(EXPECTATION, name) for name in EXPECTATION.__dataclass_fields__})
    async with landing(expectation=anything) as daemon:
        with prefill(layout=layout) as rank:
            claim, held = daemon.claim()
            request = rank.open(claim, 10)
            rank.write(request, [9, 10], last=False)
            rank.write(request, [3], first=2)
            daemon.end_prefill(claim, 10)
            landed = await whole(held)
            assert [layout.block_bytes(index) for index in range(4)] == [4 * 656, 4 * 132] * 2
            assert landed.bytes == layout.bytes_for(10) == 2 * 3 * 4 * (656 + 132)
            assert torch.equal(daemon.slots[0].memory.view(landed.bytes), rank.content([9, 10, 3]))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
async def test_layers_may_be_sent_one_by_one(daemon: Landing, order: list[int]) -> None:
    with prefill() as rank:
        claim, held = daemon.claim()
        request = rank.open(claim, TOKENS)
        rank.write(request, BLOCKS[:3], last=False)
        for layer in order:
            rank.sender.write(request, 3, tuple(BLOCKS[3:]), last=False, ready=lambda: True, layers=range(layer, layer + 1))
        daemon.end_prefill(claim)
        landed_bytes = daemon.memory(0, TOKENS)
        await comes_true(lambda: torch.equal(landed_bytes, rank.content(BLOCKS)))
        assert not rank.sender.settled({request})
        assert not held.landed.done()
        rank.sender.write(request, 3, tuple(BLOCKS[3:]), last=True, ready=lambda: True, layers=range(0))
        landed = await whole(held)
        assert landed.bytes == LAYOUT.bytes_for(TOKENS)
        await rank.settled(request)
        await daemon.slots[0].release(held, "done", 1.0)
        await hand_over(rank, daemon)


async def test_a_layer_that_was_forgotten_fails_the_handoff(daemon: Landing) -> None:
    with prefill() as rank:
        claim, held = daemon.claim()
        request = rank.open(claim, TOKENS)
        for layers in (range(1), range(2, 3)):
            rank.sender.write(request, 0, tuple(BLOCKS), last=layers.start == 2, ready=lambda: True, layers=layers)
        daemon.end_prefill(claim)
        with pytest.raises(HandoffFailed, match=r"in 6 blocks of 6144 bytes in all arrived as shard 0, .* 9216 bytes"):
            await whole(held)
