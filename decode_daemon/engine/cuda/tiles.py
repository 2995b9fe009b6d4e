"""The part of a matrix that one program of `product` takes: measured on an H200, see benchmarks/gpu/NOTES.md."""

from dataclasses import dataclass

from decode_daemon.engine.cuda.buckets import power_of_two

_LANES = 32  # threads of a warp
_LOAD_BYTES = 16  # that a thread loads at once
_PROGRAMS = 1000  # a product should have, so that multiprocessors that are done early find more to do


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's outputs, the inputs of one pass over them, and who computes it.

    `columns`, `vector` and `warps` decide the order in which a sum's terms are added and so must not depend on the width of a
    step; `rows` may.
    """

    rows: int
    columns: int
    vector: int  # elements of one load
    warps: int


def tile_for(inputs: int, outputs: int, width: int, *, gated: bool, residual: bool, element_bytes: int = 2) -> Tile:
    """Return the tile for a matrix of `inputs` columns and a step of `width` (padded) rows; `gated`, `residual`: `product`."""
    vector = _LOAD_BYTES // element_bytes
    wide = residual or outputs > 8 * inputs or (gated and inputs > 2048)
    columns = max(vector, min(2048 if wide else 1024, power_of_two(inputs)))
    loads = 1 if residual or not wide else 2  # of a thread in a row and pass
    return Tile(_rows(inputs, outputs, width, gated, residual), columns, vector, max(1, columns // (_LANES * vector * loads)))


def _rows(inputs: int, outputs: int, width: int, gated: bool, residual: bool) -> int:
    if gated:
        return 8 if width == 1 and inputs <= 2048 else 2
    if residual or outputs > 8 * inputs:
        return 4
    return 8 if width > 1 else max(2, min(8, power_of_two(outputs // _PROGRAMS + 1) // 2))
