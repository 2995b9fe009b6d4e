"""The part of a matrix that one program of Triton's `product` takes: measured on an H200, see benchmarks/gpu/NOTES.md."""

from dataclasses import dataclass

from decode_daemon.engine.cuda.buckets import power_of_two

_LANES = 32  # threads of a warp
_LOAD_BYTES = 16  # that a thread loads at once
_UNDER_WAY = 8 << 20  # bytes, of a matrix whose programs all run at once: 60 KB a multiprocessor
_UNDER_WAY_FP8 = 6 << 20  # of a matrix in fp8, with passes that are all counted
_VECTOR = 8  # inputs that a thread takes at once: 16 bytes of bfloat16
_MOST_WARPS = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's part of a matrix, for every width the same: it decides the order in which a sum's terms are added."""

    rows: int  # outputs
    columns: int  # inputs of one pass
    depth: int  # passes under way
    warps: int


def tile_for(inputs: int, outputs: int, *, gated: bool, element_bytes: int = 2) -> Tile:
    """Return the tile for a matrix of `inputs` columns that gives `outputs`; `gated`: it has twice as many rows.


    As few warps share a row as keep enough of the matrix on its way: each adds to what a sum costs in the end.
    """
    if element_bytes == 1:
        return _of_bytes(inputs, outputs, gated)
    long = inputs > 2 * outputs  # few programs with many passes each
    warps = min(_MOST_WARPS, power_of_two(-(-_UNDER_WAY // ((2 * outputs if gated else outputs) * _LANES * _LOAD_BYTES))))
    line = _LANES * _VECTOR
    depth = 2 if long or inputs <= 2 * warps * line else 1
    # Where passes fill the matrix exactly, no load needs to ask if it is inside.
    exact = [
        (fewer, passes)
        for fewer in (warps, warps // 2, 1)
        for passes in (depth, 1)
        if fewer and inputs % (fewer * line * passes) == 0
    ]
    warps, depth = exact[0] if exact else (warps, depth)
    columns = min(line * warps, max(_VECTOR, power_of_two(inputs)))
    rows = 2 if gated else 8 if long else 4
    return Tile(rows, columns, depth, max(1, columns // line))


def _of_bytes(inputs: int, outputs: int, gated: bool) -> Tile:
    """Return the tile for fp8, of which a thread takes 16 at once.

    From the instructions of the compiled code, not from measured times. Converting is cheapest in a loop of two rounds or more:
    in code without one the compiler takes words apart byte by byte.
    """
    matrix_rows, line = 2 * outputs if gated else outputs, _LANES * _LOAD_BYTES
    depth = 1 if matrix_rows * line >= _UNDER_WAY_FP8 else 2
    warps = min(_MOST_WARPS, power_of_two(-(-_UNDER_WAY_FP8 // (matrix_rows * line * depth))))
    rounds = ((warps, depth), (warps, 1), (warps // 2, 2), (warps // 2, 1), (1, 1))
    exact = [
        (fewer, passes)
        for fewer, passes in rounds
        if fewer and inputs % (fewer * line * passes) == 0 and inputs > fewer * line * passes
    ]
    warps, depth = exact[0] if exact else (warps, depth)
    columns = min(line * warps, max(_LOAD_BYTES, power_of_two(inputs)))
    rows = 2 if gated else 8 if inputs > 2 * outputs else 4
    return Tile(rows, columns, depth, max(1, columns // line))
