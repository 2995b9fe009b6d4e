# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""The first and the last kernel of a step: ids to rows, and maxima to the ids that come next."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_daemon.engine.cuda.products import counted


@triton.jit
def embed(
    x,
    scaled,  # [8, hidden]: x * gain
    squares,  # int64 [norms, 8]: the first norm's sums of squares are written, the others' become zero
    ids,
    embedding,
    gain,  # of the first norm
    norms: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,  # hidden and norms fit it, a power of two
    overlap: tl.constexpr,
    lines: tl.constexpr = 0,  # of the packed matrix that the embedding is (see `ring.pack`); 0: it is not packed
    columns: tl.constexpr = 0,
):
    """Copy the embedding of each of `ids` to `x`, and prepare the first norm as `product` does its next one; grid (width,)."""
    if overlap:
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, block)
    token = tl.load(ids + row)
    if lines == 0:
        place = token * hidden + at
    else:
        groups = tl.minimum(hidden - at // columns * columns, columns) // 32  # of a line, in this pass
        place = token // lines * (lines * hidden) + at // columns * (lines * columns)
        place += ((token % lines // 8 * groups + at % columns // 32) * 8 + token % 8) * 32 + at % 32
    values = tl.load(embedding + place, mask=at < hidden, other=0.0)
    tl.store(x + row * hidden + at, values, mask=at < hidden)
    values = values.to(tl.float32)
    gains = tl.load(gain + at, mask=at < hidden, other=0.0).to(tl.float32)
    tl.store(scaled + row * hidden + at, (values * gains).to(scaled.dtype.element_ty), mask=at < hidden)
    square = tl.sum(counted(values), axis=0)
    tl.store(squares + at * 8 + row, tl.where(at == 0, square, 0), mask=at < norms)


@triton.jit
def advance(best, ids, state, peaks, width: tl.constexpr, slots: tl.constexpr, overlap: tl.constexpr):
    """Read each row's best id from `peaks` and clear them; make the last row's the first of a step that follows.

    `best` (int64 [8]) is -1 where a logit was not finite; the next step then starts from id 0, and nobody wants its result.
    """
    if overlap:
        gdc_wait()
    r = tl.arange(0, width)
    place = peaks + r[:, None] * slots + tl.arange(0, slots)[None, :]
    top = tl.max(tl.load(place), axis=1)
    tl.store(place, tl.full((width, slots), -(2**63), tl.int64))
    chosen = tl.where((top >> 32) == 0x7FFFFFFF, -1, 0x7FFFFFFF - (top & 0xFFFFFFFF))
    tl.store(best + r, chosen)
    rows = tl.load(state + 1)
    tl.store(ids + tl.zeros((width,), tl.int32), tl.maximum(chosen, 0), mask=r == rows - 1)
    tl.store(state, tl.load(state) + rows)
