"""Which of several ways a step is computed; all give the same tokens but for rounding, and only one is the default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from decode_daemon.engine.cuda.buckets import MOST_SPLITS, PROGRAMS, TILE_ELEMENTS, Bucket, buckets
from decode_daemon.engine.cuda.tiles import PreparedTile

# The norm before a product in the product itself (`product`), or prepared by the kernel before (`prepared_product`), or that on
# tensor cores (`tensor_product`).
Products = Literal["fused", "prepared", "tensor"]


@dataclass(frozen=True, slots=True)
class Attention:
    """How attention is divided among programs and threads."""

    warps: int = 8
    # With three, a program needs over 48 KB of shared memory; it then waits until its multiprocessor is empty, 0.25 ms a step.
    stages: int = 2
    tile_elements: int = TILE_ELEMENTS  # these three: see `buckets`
    programs: int = PROGRAMS
    most_splits: int = MOST_SPLITS

    def buckets(self, context_tokens: int, kv_heads: int, head_dim: int) -> tuple[Bucket, ...]:
        """Return `buckets` of these sizes."""
        return buckets(
            context_tokens,
            kv_heads,
            head_dim,
            tile_elements=self.tile_elements,
            programs=self.programs,
            most_splits=self.most_splits,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step's kernels are."""

    products: Products = "fused"
    tiles: Mapping[tuple[int, int], PreparedTile] = field(default_factory=dict)  # by (inputs, matrix rows), not the usual ones
    attention: Attention = Attention()
