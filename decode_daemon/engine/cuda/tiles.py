"""The part of a matrix that one program of `product` takes: measured on an H200, see benchmarks/gpu/NOTES.md."""

from dataclasses import dataclass

from decode_daemon.engine.cuda.buckets import power_of_two

_LANES = 32  # threads of a warp
_LOAD_BYTES = 16  # that a thread loads at once
_UNDER_WAY = 8 << 20  # bytes, of a matrix whose programs all run at once: 60 KB a multiprocessor
_DEPTH = 2
_PREPARED_VECTOR = 8  # bfloat16 of one load
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


@dataclass(frozen=True, slots=True)
class PreparedTile:
    """One program's part of a matrix in `prepared_product` or `tensor_product`, for every width the same."""

    rows: int  # outputs of one group of warps, or in `tensor_product` the program's rows of the matrix
    groups: int
    columns: int  # inputs of one pass
    depth: int  # passes under way
    warps: int


def prepared_tile_for(inputs: int, outputs: int, *, gated: bool) -> PreparedTile:
    """Return the tile for a matrix of `inputs` columns that gives `outputs`; `gated`: it has twice as many rows.

    As few warps share a row as keep enough of the matrix on its way: each adds to what a sum costs in the end.
    """
    rows = 2 * outputs if gated else outputs
    warps = min(4, power_of_two(-(-_UNDER_WAY // (rows * _LANES * _LOAD_BYTES * _DEPTH))))
    line = _LANES * _PREPARED_VECTOR
    # Where passes fill the matrix exactly, no load needs to ask if it is inside.
    exact = [
        (fewer, depth)
        for fewer in (warps, warps // 2, 1)
        for depth in (_DEPTH, 1)
        if fewer and inputs % (fewer * line * depth) == 0
    ]
    warps, depth = exact[0] if exact else (warps, _DEPTH)
    columns = min(line * warps, max(_PREPARED_VECTOR, power_of_two(inputs)))
    return PreparedTile(2 if gated else 4, 1, columns, depth, max(1, columns // line))


def tensor_tile_for(inputs: int, outputs: int, *, gated: bool) -> PreparedTile:
    """Return the tile of `tensor_product` for such a matrix; its `rows` are the matrix's, `columns` a warp's."""
    rows = 2 * outputs if gated else outputs
    columns = max(16, min(128, power_of_two(inputs)))  # tensor cores take 16 at once
    groups = min(4, power_of_two(-(-_UNDER_WAY // (rows * columns * 2 * _DEPTH))), max(1, power_of_two(inputs) // columns))
    return PreparedTile(16, groups, columns, _DEPTH, groups)


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
