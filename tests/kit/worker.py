"""vLLM as far as the connector's worker side sees it: caches, configuration, and steps in its order."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import SecretStr

from handoff.claim import SignedClaim
from tests.kit.handoff import BLOCK, LAYOUT, MODEL, comes_true

if TYPE_CHECKING:
    from connector.metadata import Chunk
    from connector.settings import ConnectorSettings
    from connector.worker import WorkerSide

BLOCKS = (6, 7, 2)
TOKENS = 11
NAMES = [layer.name for layer in LAYOUT.layers]


class Backend:
    """Token-major, keys before values, as FlashAttention has it."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for kind, source in enumerate((key, value)):
            cache[slots // BLOCK.block_tokens, kind, slots % BLOCK.block_tokens] = source


def caches(kv_heads: int = BLOCK.kv_heads, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (16, 2, BLOCK.block_tokens, kv_heads, BLOCK.head_dim)
    return {name: torch.randn(shape, generator=generator) for name in NAMES}


def config(*, rank: int = 0, ranks: int = 1, kv_heads: int = BLOCK.kv_heads, parallel: Any = None, **changes: Any) -> Any:
    """What the worker side reads of vLLM's configuration; `kv_heads` of all ranks together."""
    model = {
        "get_num_kv_heads": lambda _: max(1, kv_heads // ranks),
        "get_total_num_kv_heads": lambda: kv_heads,
        "get_head_size": lambda: BLOCK.head_dim,
        "served_model_name": [MODEL.name, "alias"],
        "model": "/nowhere",
        "max_model_len": MODEL.context_tokens,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{"rank": rank, "tensor_parallel_size": ranks, "world_size": ranks, "data_parallel_size": 1} | (parallel or {})
        ),
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
        model_config=SimpleNamespace(**model | changes),
        cache_config=SimpleNamespace(block_size=BLOCK.block_tokens),
        compilation_config=SimpleNamespace(static_forward_context={name: SimpleNamespace(impl=Backend()) for name in NAMES}),
    )


def settings(**changes: Any) -> "ConnectorSettings":
    from connector.settings import ConnectorSettings  # vLLM comes with it

    given: dict[str, Any] = {
        "secret": SecretStr("a secret of the tests"),
        "model_identity": MODEL.weights,
        "accept_timeout_s": 3.0,
    }
    return ConnectorSettings(**given | changes)


def step(
    worker: "WorkerSide",
    *,
    opened: dict[str, SignedClaim] | None = None,
    chunks: "list[Chunk] | None" = None,
    withdrawn: list[str] | None = None,
    preempted: list[str] | None = None,
    finished: set[str] | None = None,
) -> set[str]:
    """One engine step in vLLM's order; returns the requests whose blocks may be freed."""
    from connector.metadata import HandoffMetadata, Opening

    openings = [Opening(name, claim, TOKENS) for name, claim in (opened or {}).items()]
    metadata = HandoffMetadata(openings, chunks or [], withdrawn or [], preempted or [])
    worker.fence(metadata)
    worker.begin_step(metadata)
    worker.end_step(metadata)
    return worker.take_finished(finished or set())


async def reports(worker: "WorkerSide", finished: set[str], *, of: set[str] | None = None) -> list[str]:
    """Step until these requests are reported, and some steps more; returns every report in order."""
    seen = sorted(step(worker, finished=finished))
    await comes_true(lambda: set(also(seen, step(worker))) >= (of or finished))
    for _ in range(5):
        also(seen, step(worker))
    return seen


def also(seen: list[str], reported: set[str]) -> list[str]:
    seen += sorted(reported)
    return seen
