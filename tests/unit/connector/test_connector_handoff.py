"""vLLM's worker side and the daemon's slots together, over real sockets and real NIXL."""

import asyncio
import logging
import time
from dataclasses import replace

import pytest
import torch
import zmq

from decode_daemon.slots import HandoffFailed, SlotState
from handoff.layout import LatentBlock, contiguous_block, uniform
from handoff.messages import ModelIdentity
from tests.kit.handoff import (
    BLOCK,
    BLOCKS,
    EXPECTATION,
    FIRST_TOKEN,
    LAYOUT,
    MODEL,
    TOKENS,
    Landing,
    changed,
    comes_true,
    hand_over,
    landing,
    prefill,
    signed,
    whole,
)


async def test_a_prompt_in_one_chunk_lands_byte_for_byte(daemon: Landing) -> None:
    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.write(request, BLOCKS)
        daemon.end_prefill(claim)
        landed = await whole(held)
        assert (landed.layout, landed.prompt, landed.first_token) == (LAYOUT, tuple(range(TOKENS)), FIRST_TOKEN)
        assert landed.bytes == LAYOUT.bytes_for(TOKENS)
        assert landed.seconds > 0
        assert torch.equal(daemon.memory(0, TOKENS), worker.content(BLOCKS))
        await worker.settled(request)
        assert worker.sent == [landed.bytes]
        assert worker.failed == []


async def test_chunks_land_as_they_come_and_make_the_same_whole(daemon: Landing) -> None:
    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, TOKENS)
        worker.write(request, BLOCKS[:2], last=False)
        landed_bytes = daemon.memory(0, TOKENS)
        size = 2 * BLOCK.block_bytes
        await comes_true(lambda: torch.equal(landed_bytes[:size], worker.content(BLOCKS[:2])[:size]))
        assert not worker.sender.settled({request})
        worker.write(request, BLOCKS[2:3], first=2, last=False)
        worker.write(request, BLOCKS[3:], first=3)
        daemon.end_prefill(claim)
        await whole(held)
        assert torch.equal(landed_bytes, worker.content(BLOCKS))


async def test_blocks_wait_for_the_device(daemon: Landing) -> None:
    ready = False
    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, 4)
        worker.sender.write(request, 0, (9,), last=True, ready=lambda: ready)
        daemon.end_prefill(claim, 4)
        await comes_true(lambda: daemon.slots[0].state is SlotState.LANDING and held.started is not None)
        assert not daemon.memory(0, 4).any()
        ready = True
        await whole(held)
        assert torch.equal(daemon.memory(0, 4), worker.content([9]))


async def test_the_whole_of_a_slot_can_be_filled(daemon: Landing) -> None:
    with prefill() as worker:
        await hand_over(worker, daemon, list(range(MODEL.context_tokens // BLOCK.block_tokens)))


async def test_a_prompt_too_long_for_its_slot_is_rejected(daemon: Landing) -> None:
    with prefill() as worker:
        claim, held = daemon.claim()
        request = worker.open(claim, MODEL.context_tokens + 1)
        with pytest.raises(HandoffFailed, match=r"tokens need .* bytes; the slot has"):
            await whole(held)
        await worker.settled(request)
        assert worker.failed == ["failed"]


async def test_two_handoffs_at_once_fill_two_slots(daemon: Landing) -> None:
    with prefill() as one, prefill() as other:
        claims = [daemon.claim(slot) for slot in (0, 1)]
        requests = [worker.open(claim, TOKENS) for worker, (claim, _) in zip((one, other), claims, strict=True)]
        orders = [BLOCKS, BLOCKS[::-1]]
        for at in range(6):
            for worker, request, order in zip((one, other), requests, orders, strict=True):
                worker.write(request, [order[at]], first=at, last=at == 5)
        for (claim, held), slot in zip(claims, (0, 1), strict=True):
            daemon.end_prefill(claim)
            await whole(held)
            assert torch.equal(daemon.memory(slot, TOKENS), one.content(orders[slot]))


async def test_one_worker_serves_both_slots_of_a_daemon_at_once(daemon: Landing) -> None:
    with prefill() as worker:
        await asyncio.gather(*(hand_over(worker, daemon, order, slot) for slot, order in enumerate((BLOCKS, BLOCKS[::-1]))))


async def test_one_worker_serves_one_daemon_after_another_and_back(daemon: Landing) -> None:
    async with landing() as other:
        with prefill() as worker:
            for target in (daemon, other, daemon):
                await hand_over(worker, target)


async def test_links_to_daemons_that_were_not_used_for_long_go_and_those_with_a_handoff_stay(
    daemon: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connector.peers._MAX_LINKS", 2)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf, prefill(accept=30.0) as worker:
        port = deaf.bind_to_random_port("tcp://127.0.0.1")
        worker.open(signed(port=port), TOKENS)
        async with landing() as other:
            for target in (daemon, other, daemon, other):
                await hand_over(worker, target)
                assert list(worker.sender._peers._links) == [("127.0.0.1", port), ("127.0.0.1", target.port)]
        assert worker.failed == []


async def test_a_daemon_that_restarts_on_its_port_is_found_again() -> None:
    with prefill() as worker:
        async with landing() as before:
            port = before.port
            await hand_over(worker, before)
        async with landing(port=port) as after:
            await hand_over(worker, after)
            await hand_over(worker, after)
    assert worker.failed == []


async def test_a_vllm_that_restarts_hands_over_at_once(daemon: Landing) -> None:
    for _ in range(3):
        with prefill() as worker:
            await hand_over(worker, daemon)
            assert worker.failed == []


async def test_a_daemon_that_died_before_it_said_welcome_is_greeted_again() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        port = deaf.bind_to_random_port("tcp://127.0.0.1")
        with prefill(accept=1.5) as worker:
            lost = worker.open(signed(port=port), TOKENS)
            assert await asyncio.to_thread(deaf.poll, 3000)  # it has taken the Hello, and dies
            deaf.close(linger=0)
            await worker.settled(lost)
            async with landing(port=port) as after:
                await hand_over(worker, after)


async def test_a_daemon_that_never_answers_costs_its_own_handoff_its_deadline_and_nobody_else_anything(
    daemon: Landing,
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf, prefill(accept=1.0) as worker:
        claim = signed(port=deaf.bind_to_random_port("tcp://127.0.0.1"))
        began = time.monotonic()
        lost = worker.open(claim, TOKENS)
        worker.write(lost, BLOCKS)
        await hand_over(worker, daemon)
        assert time.monotonic() - began < 0.9
        assert not worker.sender.settled({lost})
        await worker.settled(lost, within_s=1.5)
        assert worker.failed == ["failed"]
        await comes_true(lambda: len(worker.sender._poller.sockets) == 2)  # its socket is no longer watched


@pytest.mark.parametrize("host", ["not a host", "no-such-host.invalid", "\ud800"])
async def test_a_daemon_that_cannot_be_addressed_costs_nobody_else_anything(daemon: Landing, host: str) -> None:
    with prefill(accept=0.5) as worker:
        lost = worker.open(signed(host=host), TOKENS)
        await hand_over(worker, daemon)
        await worker.settled(lost)


NAMES = [layer.name for layer in LAYOUT.layers]
MISMATCHES: dict[str, dict[str, object]] = {
    "protocol": {"protocol": 1},
    "transport": {"transport": "another"},
    "shard": {"shard": 1},
    "served model name": {"model": ModelIdentity("other", MODEL.weights, MODEL.context_tokens)},
    "model weights": {"model": ModelIdentity(MODEL.name, "f" * 16, MODEL.context_tokens)},
    "context tokens": {"model": ModelIdentity(MODEL.name, MODEL.weights, 128)},
    "layers": {"layout": uniform(["layer.0", "layer.1"], BLOCK)},
    "kind of attention": {"layout": uniform(NAMES, LatentBlock(4))},
    "KV heads": {"layout": changed(LAYOUT, kv_heads=4)},
    "head dim": {"layout": changed(LAYOUT, head_dim=16)},
    "KV dtype": {"layout": changed(LAYOUT, dtype="bfloat16")},
    "block size": {
        "layout": uniform(
            NAMES,
            contiguous_block(kv_heads=2, head_dim=8, block_tokens=512, dtype="float32", order=("kind", "token", "head", "dim")),
        )
    },
    "layout": {"layout": changed(LAYOUT, keys=BLOCK.values)},
}


@pytest.mark.parametrize("field", MISMATCHES)
async def test_a_worker_whose_kv_is_of_no_use_is_refused_by_name(
    daemon: Landing, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="connector")
    with prefill(**MISMATCHES[field], caches=[torch.zeros(1, 4096, dtype=torch.uint8)]) as worker:  # type: ignore[arg-type]
        claim, _ = daemon.claim()
        await worker.settled(worker.open(claim, TOKENS))
        assert worker.failed == ["failed"]
        assert any(f"{field} differs: the connector has" in record.message for record in caplog.records)


async def test_a_refused_worker_gets_another_chance_with_its_next_handoff() -> None:
    async with landing() as other:
        port = other.port
        with prefill(model=ModelIdentity("new", MODEL.weights, MODEL.context_tokens)) as worker:
            claim, _ = other.claim()
            await worker.settled(worker.open(claim, TOKENS))
            await other.receiver.aclose()
            expectation = replace(EXPECTATION, model=ModelIdentity("new", MODEL.weights, MODEL.context_tokens))
            async with landing(port=port, expectation=expectation) as after:
                await hand_over(worker, after)
