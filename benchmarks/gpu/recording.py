"""The connector with a witness: it does what the connector does, and keeps what a comparison needs of vLLM's own account."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from connector import AnchorlegConnector

if TYPE_CHECKING:
    from vllm.v1.request import Request

BLOCKS = "recorded_blocks"  # in the kv_transfer_params that come back: the block table as vLLM's scheduler has it

_caches: dict[str, torch.Tensor] = {}


class RecordingConnector(AnchorlegConnector):
    """Adds the block table to a claimed request's answer, and lets `KVReader` see the caches."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See AnchorlegConnector."""
        super().register_kv_caches(kv_caches)
        _caches.update(kv_caches)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See AnchorlegConnector."""
        return _with_blocks(super().request_finished(request, block_ids), block_ids)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See AnchorlegConnector."""
        return _with_blocks(super().request_finished_all_groups(request, block_ids), block_ids[0])


class KVReader:
    """vLLM's worker extension: what a block table's rows hold, read by the axes that vLLM gives its cache."""

    def anchorleg_save_kv(self, blocks: list[int], tokens: int, path: str) -> str:
        """Save K and V, [2, layers, heads, tokens, dim], to a file; return what the first layer's cache looks like."""
        names = sorted(_caches, key=_layer_index)
        layers = [_heads_first(_caches[name], blocks, tokens) for name in names]
        torch.save(torch.stack(layers, dim=1).cpu(), Path(path))
        first = _caches[names[0]]
        return f"{tuple(first.shape)} strides {first.stride()} {first.dtype} on {first.device}"


def _with_blocks(told: tuple[bool, dict[str, Any] | None], blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
    held, params = told
    return held, params if params is None else params | {BLOCKS: list(blocks)}


def _layer_index(name: str) -> int:
    found = re.search(r"\.layers\.(\d+)\.", name)
    assert found is not None, name
    return int(found[1])


def _heads_first(cache: torch.Tensor, blocks: list[int], tokens: int) -> torch.Tensor:
    """Return K and V of a block table, [2, heads, tokens, dim].

    FlashAttention's axes up to 0.25 are [blocks, K or V, token, head, dim], later [blocks, head, token, K beside V]. The CPU's
    [blocks, head, block, 2 x dim] is right in size alone: in float32 a head's keys lie transposed, [dim, token], before its
    values. (In bfloat16 the order depends on the CPU.)
    """
    rows = cache[torch.tensor(blocks, device=cache.device)]
    if cache.dim() == 5:
        keys, values = (kind.permute(2, 0, 1, 3) for kind in rows.unbind(1))
    elif cache.device.type == "cpu":
        count, heads, block, dim = rows.shape[0], rows.shape[1], rows.shape[2], rows.shape[3] // 2
        kinds = rows.reshape(count, heads, 2, -1)
        keys = kinds[:, :, 0].reshape(count, heads, dim, block).permute(1, 0, 3, 2)
        values = kinds[:, :, 1].reshape(count, heads, block, dim).permute(1, 0, 2, 3)
    else:
        keys, values = (kind.permute(1, 0, 2, 3) for kind in rows.chunk(2, dim=-1))
    return torch.stack([kind.flatten(1, 2)[:, :tokens] for kind in (keys, values)])
