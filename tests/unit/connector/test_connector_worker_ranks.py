"""The worker sides of several ranks, and of one whose layers go out one by one."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector.metadata import Chunk, HandoffMetadata
from connector.worker import WorkerSide
from handoff.claim import SignedClaim
from tests.kit.handoff import BLOCK, EXPECTATION, LAYOUT, Landing, comes_true, landing
from tests.kit.network import HeldTransport
from tests.kit.worker import BLOCKS, TOKENS, caches, config, reports, settings, step

CHUNK = [Chunk("r", 0, BLOCKS, last=True)]


@contextmanager
def ranks(count: int, kv_heads: int) -> Iterator[list[tuple[WorkerSide, dict[str, torch.Tensor]]]]:
    """The worker sides of one vLLM, each with a cache of its own heads."""
    with ExitStack() as stack:
        made = []
        for rank in range(count):
            side = WorkerSide(config(rank=rank, ranks=count, kv_heads=kv_heads), settings())
            stack.callback(side.close)
            own = caches(max(1, kv_heads // count), seed=rank)
            side.register(own)
            made.append((side, own))
        yield made


def content(own: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([cache[list(BLOCKS)].flatten() for cache in own.values()])


async def test_two_ranks_hand_over_their_heads_and_both_report_each_request_once() -> None:
    total = 2 * BLOCK.kv_heads
    async with landing(expectation=replace(EXPECTATION, kv_heads=total)) as daemon:
        with ranks(2, kv_heads=total) as both:
            claim, held = daemon.claim()
            for side, _ in both:
                step(side, opened={"r": claim}, chunks=CHUNK)
            daemon.end_prefill(claim, TOKENS)
            landed = await asyncio.wait_for(asyncio.shield(held.landed), 5)
            memory = daemon.slots[0].memory.view(landed.bytes).view(torch.float32)
            assert torch.equal(memory, torch.cat([content(own) for _, own in both]))
            for side, _ in both:
                assert await reports(side, {"r", "never-claimed"}, of={"r"}) == ["r"]


async def test_of_ranks_with_the_same_head_one_writes_and_all_report_each_request_once() -> None:
    async with landing(expectation=replace(EXPECTATION, kv_heads=1)) as daemon:
        with ranks(2, kv_heads=1) as ((first, own), (second, other)):
            claim, held = daemon.claim()
            assert not step(second, opened={"r": claim, "preempted": claim}, chunks=CHUNK)
            assert not step(second, preempted=["preempted"], withdrawn=["unknown"])
            step(first, opened={"r": claim}, chunks=CHUNK)
            daemon.end_prefill(claim, TOKENS)
            landed = await asyncio.wait_for(asyncio.shield(held.landed), 5)
            assert (landed.shards, list(held.writers)) == (1, [0])
            assert torch.equal(daemon.slots[0].memory.view(landed.bytes).view(torch.float32), content(own))
            assert not torch.equal(content(own), content(other))
            assert await reports(first, {"r"}) == ["r"]
            assert step(second, finished={"r", "preempted", "never-claimed"}) == {"r", "preempted"}
            assert step(second, finished={"r"}) == set()


class Step:
    """One engine step of a worker that saves layer by layer."""

    def __init__(self, worker: WorkerSide, metadata: HandoffMetadata) -> None:
        self._worker = worker
        self._metadata = metadata
        worker.fence(metadata)
        worker.begin_step(metadata)

    def save(self, *layers: int) -> None:
        for layer in layers:
            self._worker.save_layer(self._metadata, LAYOUT.layers[layer].name)

    def end(self) -> None:
        self._worker.end_step(self._metadata)


@pytest.fixture
def pipelined() -> Iterator[tuple[WorkerSide, dict[str, torch.Tensor]]]:
    side, own = WorkerSide(config(), settings(pipeline_layers=True)), caches()
    side.register(own)
    yield side, own
    side.close()


def opening(claim: SignedClaim, chunks: list[Chunk]) -> HandoffMetadata:
    from connector.metadata import Opening

    return HandoffMetadata([Opening("r", claim, TOKENS)], chunks)


@pytest.mark.parametrize("saved", [(0,), (0, 1), (0, 1, 2), (0, 2), (2, 0, 0, 2)])
async def test_a_layer_is_on_its_way_while_the_next_is_computed(
    daemon: Landing, pipelined: tuple[WorkerSide, dict[str, torch.Tensor]], saved: tuple[int, ...]
) -> None:
    worker, own = pipelined
    claim, held = daemon.claim()
    forward = Step(worker, opening(claim, CHUNK))
    forward.save(*saved)
    worker.save_layer(opening(claim, CHUNK), "model.layers.0.mlp")  # none of ours
    memory = daemon.memory(0, TOKENS).view(torch.float32).view(len(own), -1)
    expected = content(own).view(len(own), -1)
    await comes_true(lambda: all(torch.equal(memory[layer], expected[layer]) for layer in saved))
    assert all(not memory[layer].any() for layer in range(len(own)) if layer not in saved)
    forward.end()
    daemon.end_prefill(claim, TOKENS)
    await asyncio.wait_for(asyncio.shield(held.landed), 5)
    assert torch.equal(memory, expected)
    assert await reports(worker, {"r"}) == ["r"]


async def test_chunks_before_the_last_go_out_whole_after_their_step(
    daemon: Landing, pipelined: tuple[WorkerSide, dict[str, torch.Tensor]]
) -> None:
    worker, own = pipelined
    claim, held = daemon.claim()
    first = Step(worker, opening(claim, [Chunk("r", 0, BLOCKS[:2], last=False)]))
    first.save(0, 1, 2)
    await comes_true(lambda: held.started is not None)
    assert not daemon.memory(0, TOKENS).any()
    first.end()
    second = Step(worker, HandoffMetadata([], [Chunk("r", 2, BLOCKS[2:], last=True)]))
    second.save(0, 1)
    second.end()
    daemon.end_prefill(claim, TOKENS)
    await asyncio.wait_for(asyncio.shield(held.landed), 5)
    assert torch.equal(daemon.memory(0, TOKENS).view(torch.float32), content(own))


async def test_without_the_setting_no_layer_goes_out_by_itself(daemon: Landing) -> None:
    side, own = WorkerSide(config(), settings()), caches()
    side.register(own)
    try:
        claim, held = daemon.claim()
        forward = Step(side, opening(claim, CHUNK))
        forward.save(0, 1, 2)
        await comes_true(lambda: held.started is not None)
        assert not daemon.memory(0, TOKENS).any()
        forward.end()
        daemon.end_prefill(claim, TOKENS)
        await asyncio.wait_for(asyncio.shield(held.landed), 5)
    finally:
        side.close()


@pytest.mark.parametrize("pipelined", [True, False])
def test_vllm_is_told_that_full_cuda_graphs_would_hide_the_layers(monkeypatch: pytest.MonkeyPatch, pipelined: bool) -> None:
    from connector import AnchorlegConnector

    given: dict[str, Any] = {"secret": "a secret of the tests", "pipeline_layers": pipelined}
    assert AnchorlegConnector.requires_piecewise_for_cudagraph(given) is pipelined


@contextmanager
def holding(claim: SignedClaim, monkeypatch: pytest.MonkeyPatch, **parallel: int) -> Iterator[tuple[WorkerSide, list[float]]]:
    """A worker side with a finished request whose blocks are being read, and the seconds that it asked to rest."""
    network, rests = HeldTransport(), []
    monkeypatch.setattr("connector.worker.open_transport", lambda *_: network)
    side = WorkerSide(config(parallel=parallel), settings())
    side.register(caches())
    try:
        assert not step(side, opened={"r": claim}, chunks=CHUNK, finished={"r"})
        sender = side._require_sender()
        wait = sender.wait_for_any

        def rest(request_ids: set[str], timeout: float) -> None:
            rests.append(timeout)
            wait(request_ids, timeout)

        monkeypatch.setattr(sender, "wait_for_any", rest)
        yield side, rests
    finally:
        network.gate.set()
        side.close()


async def test_steps_that_compute_nothing_leave_the_machine_to_the_sender_and_others_wait_for_nothing(
    daemon: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(daemon.claim()[0], monkeypatch) as (side, rests):
        for computes, so_far in ((True, 0), (False, 1), (True, 1), (False, 2)):
            side.begin_step(HandoffMetadata(computes=computes))
            assert not side.take_finished(set())
            assert len(rests) == so_far


async def test_the_longer_blocks_are_held_the_longer_empty_steps_rest_until_one_computes(
    daemon: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(daemon.claim()[0], monkeypatch) as (side, rests):
        for computes in (*[False] * 6, True, False):
            side.begin_step(HandoffMetadata(computes=computes))
            assert not side.take_finished(set())
    assert rests == [0.002, 0.004, 0.008, 0.016, 0.032, 0.032, 0.002]


async def test_an_engine_of_a_data_parallel_group_never_holds_the_others_up(
    daemon: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(daemon.claim()[0], monkeypatch, data_parallel_size=2) as (side, rests):
        side.begin_step(HandoffMetadata(computes=False))
        assert not side.take_finished(set())
        assert rests == []


async def test_in_the_order_of_vllms_second_model_runner_only_empty_steps_rest(
    daemon: Landing, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    from connector import AnchorlegConnector

    with holding(daemon.claim()[0], monkeypatch) as (side, rests):
        connector, runner = AnchorlegConnector.__new__(AnchorlegConnector), ActiveKVConnector.__new__(ActiveKVConnector)
        connector._worker, connector._connector_metadata = side, None
        runner.kv_connector, runner.vllm_config, runner._disabled = connector, VllmConfig(), False
        batch: Any = SimpleNamespace(idx_mapping=None, req_ids=[], num_tokens=1)
        for computes in (True, False):
            output: Any = SimpleNamespace(
                kv_connector_metadata=HandoffMetadata(computes=computes), has_sync_kv_loads=False, finished_req_ids=set()
            )
            if computes:
                runner.pre_forward(output, batch, {})
                runner.finish_forward()
                runner.post_forward(set())
                assert rests == []
            else:
                runner.no_forward(output)
                assert len(rests) == 1


def test_the_senders_threads_are_not_bound_to_the_cores_that_vllm_computes_on() -> None:
    cores = os.sched_getaffinity(0)
    pinned = {min(cores)}
    side = WorkerSide(config(), settings())
    os.sched_setaffinity(0, pinned)
    try:
        before = set(os.listdir("/proc/self/task"))
        side.register(caches())
        begun = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
        assert begun
        assert all(os.sched_getaffinity(task) == os.sched_getaffinity(os.getppid()) for task in begun)
        assert os.sched_getaffinity(0) == pinned
    finally:
        os.sched_setaffinity(0, cores)
        side.close()
