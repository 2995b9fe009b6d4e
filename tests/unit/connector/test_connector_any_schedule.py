"""However vLLM schedules a prompt, what lands and is converted is the KV that transformers computes for it.

The scheduler side, the senders, the daemon's slots and the conversion are real; what vLLM does in between is played: before a
step, blocks hold noise, and after it the keys and values of the positions that it computed.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.announcer import Announcer
from connector.metadata import HandoffMetadata
from connector.scheduler import SchedulerSide
from decode_daemon.convert import convert
from handoff.claim import to_params
from handoff.layout import Digit, GqaBlock, KindLayout, uniform
from tests.kit.handoff import EXPECTATION, KEYS, MODEL, Landing, Prefill, landing, paged, prefill, whole
from tests.kit.scheduling import FIRST, Cached, New, Output, Request

LAYERS, HEADS, DIM = 3, 2, 8
LONGEST = 40
CACHE_BLOCKS = 48


@cache
def computed() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a prompt of ids 0, 1, 2, ..., each [layers, heads, positions, dim]."""
    shape = {"vocab_size": LONGEST, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIM}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).eval()
    with torch.inference_mode():
        layers = model(torch.arange(LONGEST)[None], use_cache=True).past_key_values.layers
    return torch.stack([layer.keys[0] for layer in layers]), torch.stack([layer.values[0] for layer in layers])


def block_of(tokens: int, heads: int) -> GqaBlock:
    """As vLLM's CPU backend has it: heads outermost, keys transposed."""
    half = tokens * DIM
    head = (Digit(heads, 2 * half),)
    keys = KindLayout(0, head=head, token=(Digit(tokens, 1),), dim=(Digit(DIM, tokens),))
    values = KindLayout(half, head=head, token=(Digit(tokens, DIM),), dim=(Digit(DIM, 1),))
    return GqaBlock(heads, DIM, tokens, "float32", keys, values)


@cache
def in_blocks(block: GqaBlock, shard: int, end: int) -> list[torch.Tensor]:
    """One rank's blocks of the first `end` positions, one tensor a layer: [blocks, bytes]; noise after the last position."""
    keys, values = computed()
    heads = slice(shard * block.kv_heads, (shard + 1) * block.kv_heads)
    return [
        paged(block, key[heads, :end], value[heads, :end]).view(torch.uint8) for key, value in zip(keys, values, strict=True)
    ]


@dataclass
class Plant:
    """One vLLM and one daemon: ranks with their caches, and a scheduler side."""

    runner: asyncio.Runner
    daemon: Landing
    ranks: list[Prefill]
    side: SchedulerSide
    block: GqaBlock  # of one rank

    def compute(self, ids: list[int], begin: int, end: int) -> None:
        """What a step leaves in the blocks of a prompt: positions up to `begin` stay, those up to `end` come."""
        first, last = begin // self.block.block_tokens, -(-end // self.block.block_tokens)
        for shard, rank in enumerate(self.ranks):
            for pages, filled in zip(rank.caches, in_blocks(self.block, shard, end), strict=True):
                pages[ids[first:last]] = filled[first:last]

    def forget(self) -> None:
        for rank in self.ranks:
            for pages in rank.caches:
                pages.random_(0, 256)

    def send(self, step: HandoffMetadata) -> None:
        for rank in self.ranks:
            for opening in step.openings:
                rank.sender.open(opening.request_id, opening.claim, opening.prompt_tokens)
            for chunk in step.chunks:
                rank.sender.write(chunk.request_id, chunk.first_block, chunk.block_ids, last=chunk.last, ready=lambda: True)


@contextmanager
def plant(block_tokens: int, shards: int) -> Iterator[Plant]:
    block = block_of(block_tokens, HEADS // shards)
    layout = uniform([f"layer.{index}" for index in range(LAYERS)], block)
    expectation = replace(EXPECTATION, kv_heads=HEADS, head_dim=DIM)
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        here = landing(expectation=expectation)
        daemon = runner.run(here.__aenter__())
        stack.callback(lambda: runner.run(here.__aexit__(None, None, None)))
        ranks = [
            stack.enter_context(
                prefill(
                    accept=60,  # the daemon's loop stands still while a schedule is drawn
                    write=60,
                    layout=layout,
                    shard=shard,
                    shards=shards,
                    caches=[torch.zeros(CACHE_BLOCKS, block.block_bytes, dtype=torch.uint8) for _ in range(LAYERS)],
                )
            )
            for shard in range(shards)
        ]
        announcer = Announcer()
        stack.callback(announcer.close)
        yield Plant(runner, daemon, ranks, SchedulerSide(KEYS, block_tokens, announcer), block)


def scheduled(data: st.DataObject, tokens: int, block_tokens: int) -> list[tuple[int, int]]:
    """(computed before, computed after) of each step; the first may begin after a cached prefix."""
    at = data.draw(st.integers(0, (tokens - 1) // block_tokens), "cached blocks") * block_tokens
    steps = []
    while at < tokens:
        size = data.draw(st.integers(1, tokens - at), "chunk")
        steps.append((at, at + size))
        at += size
    return steps


async def hand_over(plant: Plant, data: st.DataObject, tokens: int, name: str) -> None:
    block_tokens = plant.block.block_tokens
    needed = -(-tokens // block_tokens)
    ids = data.draw(st.permutations(range(CACHE_BLOCKS)), "blocks")[:needed]
    steps = scheduled(data, tokens, block_tokens)
    claim, held = plant.daemon.claim()
    request = Request(name, list(range(tokens)), to_params(claim))
    plant.side.consider(request)
    plant.forget()
    plant.compute(ids, 0, steps[0][0])
    given = 0
    for index, (begin, end) in enumerate(steps):
        more = ids[given : -(-end // block_tokens)]
        given += len(more)
        output = Output(num_scheduled_tokens={name: end - begin})
        if index == 0:
            output.scheduled_new_reqs.append(New(name, (list(more),), begin))
        else:
            output.scheduled_cached_reqs = Cached([name], set(), [(list(more),) if more else None], [begin])
        metadata = plant.side.build(output)
        plant.compute(ids, begin, end)
        plant.send(metadata)
    request.output_token_ids = [FIRST]
    assert plant.side.finished(request)[0]
    landed = await whole(held, within_s=60)
    await asyncio.gather(*(rank.settled(name) for rank in plant.ranks))
    assert (landed.prompt, landed.first_token, landed.shards) == (tuple(range(tokens)), FIRST, len(plant.ranks))
    found = torch.empty(2, LAYERS, HEADS, tokens, DIM)
    convert(plant.daemon.slots[0].memory.view(landed.bytes), landed.layout, found[0], found[1], shards=landed.shards)
    for given_kv, expected in zip(found, computed(), strict=True):
        assert torch.equal(given_kv, expected[:, :, :tokens])


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("block_tokens", [1, 4, 7, 16])
def test_what_is_decoded_is_what_transformers_computes(block_tokens: int, shards: int) -> None:
    assert MODEL.context_tokens >= LONGEST
    with plant(block_tokens, shards) as here:

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.data(), st.integers(1, LONGEST))
        def any_schedule(data: st.DataObject, tokens: int) -> None:
            name = f"r{len(here.daemon.occupancies)}"
            try:
                here.runner.run(hand_over(here, data, tokens, name))
            finally:
                here.runner.run(here.daemon.slots[0].release(here.daemon.occupancies[-1], "over", 5.0))

        any_schedule()
