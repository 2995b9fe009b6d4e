"""The worker side as vLLM drives it: caches registered, steps begun and ended, blocks reported free exactly once."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import SecretStr

from connector.metadata import Chunk, HandoffMetadata, Opening
from connector.settings import ConnectorSettings
from connector.worker import WorkerSide
from decode_daemon.slots import HandoffFailed
from handoff.claim import SignedClaim
from handoff.layout import LayoutError
from process.errors import PortBusyError
from tests.kit.handoff import BLOCK, LAYOUT, MODEL, Landing, comes_true

BLOCKS = (6, 7, 2)
TOKENS = 11


class Backend:
    """Token-major, keys before values, as FlashAttention has it."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for kind, source in enumerate((key, value)):
            cache[slots // BLOCK.block_tokens, kind, slots % BLOCK.block_tokens] = source


def caches() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (16, 2, BLOCK.block_tokens, BLOCK.kv_heads, BLOCK.head_dim)
    return {name: torch.randn(shape, generator=generator) for name in LAYOUT.layers}


def config(**changes: Any) -> Any:
    """What the worker side reads of vLLM's configuration."""
    model = {
        "get_num_kv_heads": lambda _: BLOCK.kv_heads,
        "get_head_size": lambda: BLOCK.head_dim,
        "served_model_name": [MODEL.name, "alias"],
        "model": "/nowhere",
        "max_model_len": MODEL.context_tokens,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, world_size=1),
        model_config=SimpleNamespace(**model | changes),
        cache_config=SimpleNamespace(block_size=BLOCK.block_tokens),
        compilation_config=SimpleNamespace(
            static_forward_context={name: SimpleNamespace(impl=Backend()) for name in LAYOUT.layers}
        ),
    )


def settings(**changes: Any) -> ConnectorSettings:
    given: dict[str, Any] = {
        "secret": SecretStr("a secret of the tests"),
        "model_identity": MODEL.weights,
        "accept_timeout_s": 3.0,
    }
    return ConnectorSettings(**given | changes)


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


def step(
    worker: WorkerSide,
    *,
    opened: dict[str, SignedClaim] | None = None,
    chunks: list[Chunk] | None = None,
    withdrawn: list[str] | None = None,
    preempted: list[str] | None = None,
    finished: set[str] | None = None,
) -> set[str]:
    """One engine step in vLLM's order; returns the requests whose blocks may be freed."""
    openings = [Opening(name, claim, TOKENS) for name, claim in (opened or {}).items()]
    metadata = HandoffMetadata(openings, chunks or [], withdrawn or [], preempted or [])
    worker.fence(metadata)
    worker.begin_step(metadata)
    worker.end_step(metadata)
    return worker.take_finished(finished or set())


async def reports(worker: WorkerSide, finished: set[str], *, of: set[str] | None = None) -> list[str]:
    """Step until these requests are reported, and some steps more; returns every report in order."""
    seen = sorted(step(worker, finished=finished))
    await comes_true(lambda: set(also(seen, step(worker))) >= (of or finished))
    for _ in range(5):
        also(seen, step(worker))
    return seen


def also(seen: list[str], reported: set[str]) -> list[str]:
    seen += sorted(reported)
    return seen


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


def test_a_step_without_claimed_requests_costs_nothing_even_before_registration() -> None:
    side = WorkerSide(config(), settings())
    metadata = HandoffMetadata()
    side.fence(metadata)
    side.end_step(metadata)
    assert side.take_finished({"r"}) == set()
    side.close()


def test_caches_in_different_orders_are_refused() -> None:
    class Other(Backend):
        def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, *where: torch.Tensor) -> None:
            super().do_kv_cache_update(layer, value, key, *where)

    mixed = config()
    mixed.compilation_config.static_forward_context[LAYOUT.layers[1]].impl = Other()
    with pytest.raises(LayoutError, match="2 different orders"):
        WorkerSide(mixed, settings()).register(caches())
    with pytest.raises(LayoutError, match="no KV cache"):
        WorkerSide(config(), settings()).register({})


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
