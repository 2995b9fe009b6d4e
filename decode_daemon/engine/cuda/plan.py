"""Sizes of a step's kernels: other sizes give the same tokens but for rounding; the usual ones were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from decode_daemon.engine.cuda.buckets import MOST_SPLITS, PROGRAMS, TILE_ELEMENTS, Bucket, buckets
from decode_daemon.engine.cuda.tiles import Tile


@dataclass(frozen=True, slots=True)
class Attention:
    """How attention is divided among programs and threads."""

    warps: int = 4
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
    """What a step's kernels are given."""

    tiles: Mapping[tuple[int, int], Tile] = field(default_factory=dict)  # of `Tiled`, where not `tile_for`'s
    attention: Attention = Attention()
