# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, assignment"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""`Tiled`'s kernel: matrix times a few rows, with few instructions a weight; what comes before and after it is part of it.

A program owns some rows of the matrix over its whole width, so there is one order of summation for each output, whatever the
number of rows of `x`: nothing is split over K and nothing is added atomically but integers. Every row of `x` has sums of its
own, built by the same instructions; that makes a row's result independent of the rows beside it. Three things make it cheap:

- `x` comes with its norm's gain multiplied in, in float32; what is left of the norm is to divide by the root mean square at the
  end. The kernel that made `x` has added up its squares as integers (see `SQUARE`), whose sum has no order.
- Two bfloat16 are one 32-bit word, and become two float32 by a shift and a mask. Of e4m3 (float8_e4m3fn) weights two become two
  float16 in one instruction; they lie in memory so that neighbours among the threads need neighbours of `x`, see `Quantized`.
- Few threads share a row, so each has many weights for the sums that it must hand over at the end. The loop over the inputs
  stays a loop: `depth` passes are under way, each in registers of its own, for a copy would wait for its load.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_daemon.engine.cuda.vectors import floats_of, load_row, load_weights, vector_of

SLOTS = 64  # words over which the programs of the head spread their maxima

# One, as squares are added up in integers: a row's sum may reach 2**39, and each square is exact to 2**-24.
SQUARE = tl.constexpr(2.0**24)

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(
    out,  # [8, outputs]
    x,  # [8, inputs], float32 with the norm's gain when `normed`, else as the weights
    weight,  # [outputs, inputs], or [2 * outputs, inputs] when `gated`: all gates, then all ups; e4m3 in `Quantized`'s order
    addend,  # bias [outputs] or residual [8, outputs]
    squares,  # int64 [8]: sums of squares of what `x` was before its gain, read when `normed`
    gain,  # [outputs], of the norm that follows a residual
    scaled,  # float32 [8, outputs]: out * gain
    next_squares,  # int64 [8]: gets the sums of squares of `out`
    peaks,  # int64 [8, slots], see `_peak_of`
    eps,
    inputs: tl.constexpr,  # an even number, with e4m3 a multiple of 16
    outputs: tl.constexpr,
    width: tl.constexpr,  # rows of x computed: 1, 2, 4 or 8
    rows: tl.constexpr,  # outputs of one program
    columns: tl.constexpr,  # inputs of one pass
    depth: tl.constexpr,  # passes under way
    normed: tl.constexpr,
    gated: tl.constexpr,  # out = silu(gate) * up
    biased: tl.constexpr,
    residual: tl.constexpr,  # also prepare the next norm: `scaled` and `next_squares`
    peaked: tl.constexpr,  # the largest output of each row is kept in `peaks`
    slots: tl.constexpr,
    overlap: tl.constexpr,
    factors=None,  # float32, one for each row of `weight`, which it multiplies; None: all are 1
):
    """Compute out[r] = epilogue(weight @ x[r]) for `width` rows; sums in float32."""
    if overlap:
        gdc_launch_dependents()
    first = tl.program_id(0) * rows
    left = outputs - first
    weight += first.to(tl.int64) * inputs
    ups = weight + outputs * inputs
    # Weights never change, so the first of them may be on their way before the kernel that makes `x` has ended.
    ahead = ()
    ahead_up = ()
    for nth in tl.static_range(depth):
        ahead += (load_weights(weight, nth * columns, left, inputs, outputs, rows, columns, depth),)
        if gated:
            ahead_up += (load_weights(ups, nth * columns, left, inputs, outputs, rows, columns, depth),)
    if overlap:
        gdc_wait()
    vector: tl.constexpr = vector_of(weight.dtype.element_ty)
    parts: tl.constexpr = 4 if vector == 16 else 1
    zero = tl.zeros((rows, columns // vector), tl.float32)
    sums = (zero,) * width
    sums_up = (zero,) * (width if gated else 1)
    for start in tl.range(0, inputs, columns * depth):
        later = ()
        later_up = ()
        for nth in tl.static_range(depth):
            at = start + nth * columns
            next_at = at + depth * columns
            if parts == 1:  # before the next load, so that this can take its registers: a copy would wait for the load
                w = floats_of(ahead[nth], 0)
                if gated:
                    w_up = floats_of(ahead_up[nth], 0)
            later += (load_weights(weight, next_at, left, inputs, outputs, rows, columns, depth),)
            if gated:
                later_up += (load_weights(ups, next_at, left, inputs, outputs, rows, columns, depth),)
            for part in tl.static_range(parts):
                if parts > 1:
                    w = floats_of(ahead[nth], part)
                    if gated:
                        w_up = floats_of(ahead_up[nth], part)
                further = ()
                further_up = ()
                for line in tl.static_range(width):
                    row = load_row(x + line * inputs, at, part, inputs, columns, depth, vector)
                    further += (_plus(sums[line], w, row, vector // parts),)
                    if gated:
                        further_up += (_plus(sums_up[line], w_up, row, vector // parts),)
                sums = further
                if gated:
                    sums_up = further_up
        ahead = later
        if gated:
            ahead_up = later_up
    lines: tl.constexpr = max(width, 2)
    n = first + tl.arange(0, rows)[:, None]
    r = tl.arange(0, lines)[None, :]
    inside = (n < outputs) & (r < width)
    scale, added, gains = _ends(
        n, r, inside, addend, squares, gain, eps, inputs, outputs, normed, biased, residual
    )  # fmt: skip
    if factors is not None:
        factor = tl.load(factors + n, mask=n < outputs, other=0.0)
        if gated:
            factor_up = tl.load(factors + outputs + n, mask=n < outputs, other=0.0)
    # The layout that a last dimension of one gets adds in another order than that of two and more: a single row counts twice.
    if width == 1:
        sums += sums
        sums_up += sums_up
    if gated:
        y, up = tl.split(tl.sum(tl.join(_side_by_side(sums, lines), _side_by_side(sums_up, lines)), axis=1))
        if factors is not None:
            y *= factor
            up *= factor_up
        up *= scale
        y *= scale
        root = tl.rsqrt(1.0 + tl.exp2(y * -_LOG2E))  # its square is the sigmoid of y, in half a division's instructions
        y = y * root * root * up
    else:
        y = tl.sum(_side_by_side(sums, lines), axis=1)
        if factors is not None:
            y *= factor
        if normed:
            y *= scale
    if biased or residual:
        y += added
    y = y.to(out.dtype.element_ty)
    tl.store(out + r * outputs + n, y, mask=inside)
    y = y.to(tl.float32)
    k = tl.arange(0, lines)
    if residual:
        tl.store(scaled + r * outputs + n, (y * gains).to(scaled.dtype.element_ty), mask=inside)
        square = tl.sum(tl.where(inside, counted(y), 0), axis=0)
        tl.atomic_add(next_squares + k, square, mask=k < width, sem="relaxed")
    if peaked:
        best = tl.max(tl.where(inside, _peak_of(y, n), -(2**63)), axis=0)
        tl.atomic_max(peaks + k * slots + tl.program_id(0) % slots, best, mask=k < width, sem="relaxed")


@triton.jit
def _ends(
    n, r, inside, addend, squares, gain, eps, inputs: tl.constexpr, outputs: tl.constexpr, normed: tl.constexpr,
    biased: tl.constexpr, residual: tl.constexpr,
):  # fmt: skip
    """Load what the sums of outputs `n` and rows `r` are multiplied by, what is added to them, and the next norm's gain."""
    scale = 1.0
    added = 0.0
    gains = 0.0
    if normed:
        scale = tl.rsqrt(tl.load(squares + r).to(tl.float32) / (SQUARE * inputs) + eps)
    if biased:
        added = tl.load(addend + n, mask=n < outputs, other=0.0).to(tl.float32)
    if residual:
        added = tl.load(addend + r * outputs + n, mask=inside, other=0.0).to(tl.float32)
        gains = tl.load(gain + n, mask=n < outputs, other=0.0).to(tl.float32)
    return scale, added, gains


@triton.jit
def counted(values):
    """Return the squares of float32 `values` as integers, see `SQUARE`; a value counts as at most 2**18: none overflows."""
    bounded = tl.minimum(tl.abs(values), 2.0**18)
    return (bounded * bounded * SQUARE).to(tl.int64)


@triton.jit
def _plus(total, w, row, count: tl.constexpr):
    """Add the products of `count` weights and as many inputs, one after the other."""
    for nth in tl.static_range(count):
        total += w[nth] * row[nth]
    return total


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
