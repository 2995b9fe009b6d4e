"""KV of all ranks' heads: from rank 0, where it lands, to the ranks that attend to it, and back what they wrote.

Layer after layer, through buffers of bounded size: what lies apart in a cache travels as one piece.
"""

from collections.abc import Iterator

import torch

from decode_daemon.engine.cuda.group import Group
from decode_daemon.engine.cuda.shards import Shard

_PIECE_BYTES = 64 << 20  # of one rank's part under way at once


def give(group: Group, shards: list[Shard], cache: torch.Tensor, positions: range) -> None:
    """Queue, on rank 0: each of `shards`, those of ranks 1 and on, its heads' KV at `positions` of the whole `cache`."""
    for piece in _pieces(cache, shards[0], positions):
        group.scatter([piece[:, :, shard.kv_heads].contiguous() for shard in shards])


def take(group: Group, shards: list[Shard], cache: torch.Tensor, positions: range) -> None:
    """Queue, on rank 0: the KV that the ranks of `shards` have at `positions`, into the whole `cache`."""
    for piece in _pieces(cache, shards[0], positions):
        parts = [torch.empty_like(piece[:, :, shard.kv_heads], memory_format=torch.contiguous_format) for shard in shards]
        group.collect(parts)
        for shard, part in zip(shards, parts, strict=True):
            piece[:, :, shard.kv_heads] = part


def taken(group: Group, shard: Shard, cache: torch.Tensor, positions: range) -> None:
    """Queue, on another rank: what rank 0 gives, into this rank's own `cache`."""
    for piece in _pieces(cache, shard, positions):
        part = torch.empty_like(piece, memory_format=torch.contiguous_format)
        group.receive(part)
        piece.copy_(part)


def given(group: Group, shard: Shard, cache: torch.Tensor, positions: range) -> None:
    """Queue, on another rank: what rank 0 takes."""
    for piece in _pieces(cache, shard, positions):
        group.send(piece.contiguous())


def _pieces(cache: torch.Tensor, shard: Shard, positions: range) -> Iterator[torch.Tensor]:
    """Yield views of `positions` of some layers each; the same layers for the whole cache as for a rank's own."""
    config = shard.config
    layer_bytes = 2 * config.kv_heads * len(positions) * config.head_dim * cache.element_size()
    count = max(1, _PIECE_BYTES // max(1, layer_bytes))
    for first in range(0, config.layers if len(positions) else 0, count):
        yield cache[first : first + count, :, :, positions.start : positions.stop]
