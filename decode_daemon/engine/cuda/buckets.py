"""How a sequence's positions are divided: into buckets that share a graph, and each bucket into splits of equal size.

Two rules make a row's result independent of the step it is computed in. A row belongs to the bucket of its own position, so a
step that would cross a bucket's end is cut there. And a split is a fixed range of positions, whatever the width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

MAX_WIDTH = 8  # rows of a step

_FIRST = 1024  # tokens of the smallest bucket; each next one is twice as large
TILE_ELEMENTS = 8192  # of K, and of V, that attention takes at once: two tiles of both fit 48 KB of shared memory
PROGRAMS = 1024  # of attention, that a full bucket is divided among; just filled it is half as many, four on each of 132 SMs
MOST_SPLITS = 128  # what one program of `combine` holds in registers


@dataclass(frozen=True, slots=True)
class Bucket:
    """The positions below `tokens` that are not in a smaller bucket, and how attention over them is split."""

    tokens: int
    splits: int  # a power of two
    tile: int  # positions that attention takes at once

    @property
    def chunk(self) -> int:
        """Positions of one split, a multiple of `tile`."""
        return self.tokens // self.splits


def buckets(
    context_tokens: int,
    kv_heads: int,
    head_dim: int,
    *,
    tile_elements: int = TILE_ELEMENTS,
    programs: int = PROGRAMS,
    most_splits: int = MOST_SPLITS,
) -> tuple[Bucket, ...]:
    """Return the buckets that together hold `context_tokens` positions, smallest first."""
    tile = max(32, min(128, tile_elements // head_dim))
    most = min(most_splits, power_of_two(-(-programs // kv_heads)))
    sizes = [_FIRST]
    while sizes[-1] < context_tokens:
        sizes.append(2 * sizes[-1])
    return tuple(Bucket(tokens, min(most, tokens // tile), tile) for tokens in sizes)


def parts(position: int, width: int, found: tuple[Bucket, ...]) -> Iterator[tuple[int, int, Bucket]]:
    """Cut `width` rows from `position` on into steps: (position, width up to MAX_WIDTH, bucket), none across two buckets."""
    end = position + width
    while position < end:
        bucket = bucket_of(position, found)
        rows = min(end, bucket.tokens, position + MAX_WIDTH) - position
        yield position, rows, bucket
        position += rows


def bucket_of(position: int, found: tuple[Bucket, ...]) -> Bucket:
    """Return the smallest bucket that holds `position`."""
    return next(bucket for bucket in found if position < bucket.tokens)


def padded(width: int) -> int:
    """Return the number of rows that kernels compute for a step of `width`: 1, 2, 4 or 8."""
    return power_of_two(width)


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is not below `least`, which is at least 1."""
    return 1 << (least - 1).bit_length()
