"""The worker side as vLLM drives it: caches registered, steps begun and ended, blocks reported free exactly once."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connector.metadata import Chunk, HandoffMetadata
from connector.worker import WorkerSide
from decode_daemon.slots import HandoffFailed
from handoff.layout import LayoutError
from process.errors import PortBusyError
from tests.kit.handoff import LAYOUT, Landing, comes_true
from tests.kit.network import HeldTransport
from tests.kit.worker import BLOCKS, TOKENS, also, caches, config, reports, settings, step


@pytest.fixture
def own_caches() -> dict[str, torch.Tensor]:
    return caches()


@pytest.fixture
def worker(own_caches: dict[str, torch.Tensor]) -> Iterator[WorkerSide]:
    side = WorkerSide(config(), settings())
    side.register(own_caches)
    yield side
    side.close()
    side.close()


async def test_a_prompt_goes_from_vllms_caches_into_the_slot_and_is_reported_once(
    daemon: Landing, worker: WorkerSide, own_caches: dict[str, torch.Tensor]
) -> None:
    claim, held = daemon.claim()
    chunk = [Chunk("r", 0, BLOCKS, last=True)]
    early = step(worker, opened={"r": claim}, chunks=chunk)
    assert not early
    daemon.end_prefill(claim, TOKENS)
    await asyncio.wait_for(asyncio.shield(held.landed), 5)
    expected = torch.cat([cache[list(BLOCKS)].flatten() for cache in own_caches.values()])
    assert torch.equal(daemon.memory(0, TOKENS).view(torch.float32), expected)
    assert held.landed.result().layout == LAYOUT
    assert not step(worker)  # vLLM has not finished the request yet
    assert await reports(worker, {"r", "never-claimed"}, of={"r"}) == ["r"]


async def test_every_way_to_end_reports_each_request_exactly_once(daemon: Landing, worker: WorkerSide) -> None:
    good, _ = daemon.claim(slot=0)
    aborted, _ = daemon.claim(slot=1)
    refused = daemon.unreserved()
    opened = {"good": good, "aborted": aborted, "refused": refused, "preempted": daemon.unreserved(slot=1)}
    step(worker, opened=opened, chunks=[Chunk("good", 0, BLOCKS, last=True), Chunk("aborted", 0, BLOCKS[:1], last=False)])
    step(worker, preempted=["preempted", "unknown"])
    step(worker, withdrawn=["aborted", "unknown"])
    ended = set(opened)
    assert sorted(await reports(worker, ended)) == sorted(ended)


async def test_two_hundred_requests_that_end_at_once_are_reported_once_each(daemon: Landing, worker: WorkerSide) -> None:
    names = [f"r{index}" for index in range(200)]
    seen: list[str] = []
    for name in names:
        seen += step(worker, opened={name: daemon.unreserved()}, chunks=[Chunk(name, 0, BLOCKS, last=True)])
        seen += step(worker, withdrawn=[name], finished={name})
    await comes_true(lambda: len(also(seen, step(worker))) >= len(names))
    assert sorted(seen) == sorted(names)


async def test_a_preempted_requests_blocks_are_not_overwritten_while_they_are_read(daemon: Landing, worker: WorkerSide) -> None:
    claim, held = daemon.claim()
    step(worker, opened={"r": claim}, chunks=[Chunk("r", 0, BLOCKS[:2], last=False)])
    step(worker, preempted=["r"])
    sender = worker._sender
    assert sender is not None
    assert sender.settled({"r"}) == {"r"}  # as soon as the fence is through
    with pytest.raises(HandoffFailed, match="withdrawn by vLLM"):
        await asyncio.wait_for(asyncio.shield(held.landed), 5)
    assert await reports(worker, {"r"}) == ["r"]


async def test_writes_that_do_not_end_hold_a_preemption_up_for_half_a_second_and_nobody_uses_what_they_bring(
    daemon: Landing, own_caches: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = HeldTransport()
    monkeypatch.setattr("connector.worker.open_transport", lambda *_: network)
    worker = WorkerSide(config(), settings())
    worker.register(own_caches)
    try:
        claim, held = daemon.claim()
        step(worker, opened={"r": claim}, chunks=[Chunk("r", 0, BLOCKS[:2], last=False)])
        await comes_true(lambda: bool(network.late))
        began = time.monotonic()
        step(worker, preempted=["r"])
        assert 0.5 <= time.monotonic() - began < 2.0
        assert "writes of ['r'] did not end in time" in caplog.text
        assert step(worker, finished={"r"}) == set()
        daemon.end_prefill(claim, TOKENS)
        releasing = asyncio.create_task(daemon.slots[0].release(held, "preempted", 5.0))
        done, _ = await asyncio.wait([releasing], timeout=0.1)
        assert not done  # its memory is the write's until that has ended
        network.gate.set()
        await asyncio.wait_for(releasing, 2)
        assert await reports(worker, set(), of={"r"}) == ["r"]
    finally:
        network.gate.set()
        worker.close()


def test_a_step_without_claimed_requests_costs_nothing_even_before_registration() -> None:
    side = WorkerSide(config(), settings())
    metadata = HandoffMetadata()
    side.fence(metadata)
    side.end_step(metadata)
    assert side.take_finished({"r"}) == set()
    side.close()


def test_no_cache_is_no_layout() -> None:
    with pytest.raises(LayoutError, match="no KV cache"):
        WorkerSide(config(), settings()).register({})


@pytest.mark.parametrize(
    ("parallel", "changes", "option"),
    [
        ({"pipeline_parallel_size": 2}, {}, "--pipeline-parallel-size"),
        ({"decode_context_parallel_size": 2}, {}, "--decode-context-parallel-size"),
        ({"use_ubatching": True}, {"pipeline_layers": True}, "--enable-dbo"),
    ],
)
def test_what_cannot_be_handed_over_ends_vllms_start_by_its_option(
    parallel: dict[str, Any], changes: dict[str, Any], option: str
) -> None:
    with pytest.raises(LayoutError, match=option):
        WorkerSide(config(parallel=parallel), settings(**changes)).register(caches())


def test_a_model_without_a_local_folder_needs_its_identity_by_name() -> None:
    with pytest.raises(FileNotFoundError, match=r"/nowhere/config\.json"):
        WorkerSide(config(), settings(model_identity=None)).register(caches())


def test_the_model_folder_gives_the_identity(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    side = WorkerSide(config(model=tmp_path, served_model_name="one"), settings(model_identity=None))
    side.register(caches())
    side.close()


def test_the_metrics_endpoint_ends_with_the_worker_and_a_busy_port_is_named() -> None:
    import socket

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        side = WorkerSide(config(), settings(metrics_port=port))
        with pytest.raises(PortBusyError, match=str(port)):
            side.register(caches())
        side.close()
    side = WorkerSide(config(), settings(metrics_port=port))
    side.register(caches())
    side.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
