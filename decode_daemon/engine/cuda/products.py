# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, assignment"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""Matrix times a few rows, in one kernel: what comes before the product and what comes after it are part of it.

A program owns some rows of the matrix over its whole width, so there is one order of summation for each output, whatever
the number of rows of `x`: nothing is split over K and nothing is added atomically. Every row of `x` has sums of its own,
built by the same instructions; that makes a row's result independent of the rows beside it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SLOTS = 64  # words over which the programs of the head spread their maxima


@triton.jit
def product(
    out,  # [8, outputs]
    x,  # [8, inputs]
    weight,  # [outputs, inputs], or [2 * outputs, inputs] when `gated`: all gates, then all ups
    gain,  # [inputs], read when `normed`
    addend,  # bias [outputs] or residual [8, outputs]
    peaks,  # int64 [8, slots], see `_peak_of`
    eps,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    width: tl.constexpr,  # rows of x computed: 1, 2, 4 or 8
    rows: tl.constexpr,  # outputs of one program
    columns: tl.constexpr,  # inputs of one pass
    vector: tl.constexpr,  # inputs that one thread loads at once
    normed: tl.constexpr,  # x is first divided by its root mean square and multiplied by `gain`
    gated: tl.constexpr,  # out = silu(gate) * up
    biased: tl.constexpr,
    residual: tl.constexpr,
    peaked: tl.constexpr,  # the largest output of each row is kept in `peaks`
    slots: tl.constexpr,
    overlap: tl.constexpr,
):
    """Compute out[r] = epilogue(weight @ prologue(x[r])) for `width` rows; sums in float32."""
    if overlap:
        gdc_launch_dependents()
    first = tl.program_id(0) * rows
    weight += first.to(tl.int64) * inputs
    # Weights never change, so the first of them may be on their way before the kernel that makes `x` has ended.
    ahead = _weights(weight, 0, first, inputs, outputs, rows, columns)
    if gated:
        ahead_up = _weights(weight + outputs * inputs, 0, first, inputs, outputs, rows, columns)
    if overlap:
        gdc_wait()
    n = first + tl.arange(0, rows)[:, None]
    r = tl.arange(0, width)[None, :]
    inside = (n < outputs) & (r >= 0)
    added = _added(addend, n, r, inside, outputs, biased, residual)
    sums = tl.zeros((rows, columns // vector, width), tl.float32)
    sums_up = sums
    squares = tl.zeros((columns // vector, width), tl.float32)
    for start in tl.static_range(0, inputs, columns):
        w = ahead.to(tl.float32)
        w_up = ahead_up.to(tl.float32) if gated else w
        if start + columns < inputs:
            ahead = _weights(weight, start + columns, first, inputs, outputs, rows, columns)
            if gated:
                ahead_up = _weights(weight + outputs * inputs, start + columns, first, inputs, outputs, rows, columns)
        part, part_up, part_squares = _pass(w, w_up, x, gain, start, inputs, width, rows, columns, vector, normed, gated)
        sums += part
        if gated:
            sums_up += part_up
        if normed:
            squares += part_squares
    if gated:
        y, up = tl.split(tl.sum(tl.join(sums, sums_up), axis=1))  # one exchange between warps for both
    else:
        y = tl.sum(sums, axis=1)
    if normed:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / inputs + eps)[None, :]
        y *= scale
        if gated:
            up *= scale
    if gated:
        y = y / (1.0 + tl.exp(-y)) * up
    if biased or residual:
        y += added
    y = y.to(out.dtype.element_ty)
    tl.store(out + r * outputs + n, y, mask=inside)
    if peaked:
        best = tl.max(tl.where(inside, _peak_of(y.to(tl.float32), n), -(2**63)), axis=0)
        tl.atomic_max(peaks + tl.arange(0, width) * slots + tl.program_id(0) % slots, best, sem="relaxed")


@triton.jit
def _added(addend, n, r, inside, outputs: tl.constexpr, biased: tl.constexpr, residual: tl.constexpr):
    """Load what is added to outputs `n` of rows `r`: the bias, the residual, or nothing (then 0)."""
    added = 0.0
    if biased:
        added = tl.load(addend + n, mask=n < outputs, other=0.0).to(tl.float32)
    if residual:
        added = tl.load(addend + r * outputs + n, mask=inside, other=0.0).to(tl.float32)
    return added


@triton.jit
def _pass(
    w, w_up, x, gain, start: tl.constexpr, inputs: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
    columns: tl.constexpr, vector: tl.constexpr, normed: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Return what the columns from `start` on add to the sums and squares: [rows, columns / vector, width] twice, and one less.

    What is not computed is one of the others.
    """
    at = start + tl.arange(0, columns)
    if normed:
        g = _inputs(gain, at, start, inputs, columns)
    parts = ()
    parts_up = ()
    parts_squares = ()
    for r in tl.static_range(width):
        row = _inputs(x + r * inputs, at, start, inputs, columns)
        if normed:
            parts_squares += (_folded(row * row, columns, vector),)
            row = row * g
        parts += (_folded_rows(w * row[None, :], rows, columns, vector),)
        if gated:
            parts_up += (_folded_rows(w_up * row[None, :], rows, columns, vector),)
    sums = _side_by_side(parts, width)
    sums_up = _side_by_side(parts_up, width) if gated else sums
    squares = _side_by_side(parts_squares, width) if normed else sums
    return sums, sums_up, squares


@triton.jit
def _weights(weight, start, first, inputs: tl.constexpr, outputs: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr):
    """Load a [rows, columns] tile whose first output is `first` of all and row 0 of `weight`; each is read once."""
    n = tl.arange(0, rows)[:, None]
    k = start + tl.arange(0, columns)[None, :]
    if inputs % columns == 0 and outputs % rows == 0:
        tile = tl.load(weight + n * inputs + k, eviction_policy="evict_first")
    else:
        inside = (k < inputs) & (first + n < outputs)
        tile = tl.load(weight + n * inputs + k, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _inputs(x, at, start: tl.constexpr, inputs: tl.constexpr, columns: tl.constexpr):
    part = tl.load(x + at) if start + columns <= inputs else tl.load(x + at, mask=at < inputs, other=0.0)
    return part.to(tl.float32)


@triton.jit
def _folded(values, columns: tl.constexpr, vector: tl.constexpr):
    """Add what one thread holds: [columns] to [columns / vector]."""
    return tl.sum(tl.reshape(values, (columns // vector, vector)), axis=1)


@triton.jit
def _folded_rows(values, rows: tl.constexpr, columns: tl.constexpr, vector: tl.constexpr):
    """Add what one thread holds: [rows, columns] to [rows, columns / vector]."""
    return tl.sum(tl.reshape(values, (rows, columns // vector, vector)), axis=2)


@triton.jit
def _side_by_side(parts, width: tl.constexpr):
    """Stack `width` tensors along a new last dimension, in order; in registers."""
    if width == 1:
        stacked = tl.expand_dims(parts[0], -1)
    elif width == 2:
        stacked = tl.join(parts[0], parts[1])
    elif width == 4:
        pairs = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        stacked = tl.reshape(pairs, parts[0].shape + (4,))  # noqa: RUF005 - Triton has no starred tuples
    else:
        evens = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odds = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        stacked = tl.reshape(tl.join(evens, odds), parts[0].shape + (8,))  # noqa: RUF005
    return stacked


@triton.jit
def _peak_of(values, ids):
    """Order (value, id) as int64: larger values first, of equal ones the lower id; a value that is not finite tops all.

    The high word is the value's bits, mapped so that integers compare as the floats do; the low word counts ids downwards.
    """
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # 0 and -0 are equal
    high = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    finite = tl.abs(values) < float("inf")
    return (tl.where(finite, high, 0x7FFFFFFF).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
