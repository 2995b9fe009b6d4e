# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, assignment"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""Matrix times a few rows, in few instructions a weight, so that more rows cost little: the kernel before prepares the norm.

As in `products`, a program owns some rows of the matrix over its whole width, and every row of `x` has sums of its own, built
by the same instructions in the same order whatever the number of rows. Three things make it cheaper:

- `x` comes with its norm's gain multiplied in, in float32; what is left of the norm is to divide by the root mean square at the
  end. The kernel that made `x` has added up its squares as integers (see `SQUARE`), whose sum has no order.
- Two bfloat16 are one 32-bit word, and become two float32 by a shift and a mask.
- Few threads share a row, so each has many weights for the sums that it must hand over at the end. The loop over the inputs
  stays a loop: `depth` passes are under way, each in registers of its own, for a copy would wait for its load.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_daemon.engine.cuda.products import _peak_of, _side_by_side

# One, as squares are added up in integers: a row's sum may reach 2**39, and each square is exact to 2**-24.
SQUARE = tl.constexpr(2.0**24)

_VECTOR = tl.constexpr(8)  # inputs that a thread takes at once: 16 bytes of bfloat16
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepared_product(
    out,  # [8, outputs]
    x,  # [8, inputs], float32 with the norm's gain when `normed`, else as the weights
    weight,  # [outputs, inputs], or [2 * outputs, inputs] when `gated`: all gates, then all ups
    addend,  # bias [outputs] or residual [8, outputs]
    squares,  # int64 [8]: sums of squares of what `x` was before its gain, read when `normed`
    gain,  # [outputs], of the norm that follows a residual
    scaled,  # float32 [8, outputs]: out * gain
    next_squares,  # int64 [8]: gets the sums of squares of `out`
    peaks,  # int64 [8, slots], see `_peak_of`
    eps,
    inputs: tl.constexpr,  # an even number
    outputs: tl.constexpr,
    width: tl.constexpr,  # rows of x computed: 1, 2, 4 or 8
    rows: tl.constexpr,  # outputs of one group of warps
    groups: tl.constexpr,  # of warps in one program
    columns: tl.constexpr,  # inputs of one pass
    depth: tl.constexpr,  # passes under way
    normed: tl.constexpr,
    gated: tl.constexpr,  # out = silu(gate) * up
    biased: tl.constexpr,
    residual: tl.constexpr,  # also prepare the next norm: `scaled` and `next_squares`
    peaked: tl.constexpr,  # the largest output of each row is kept in `peaks`
    slots: tl.constexpr,
    overlap: tl.constexpr,
):
    """Compute out[r] = epilogue(weight @ x[r]) for `width` rows; sums in float32."""
    if overlap:
        gdc_launch_dependents()
    first = tl.program_id(0) * (rows * groups)
    left = outputs - first
    weight += first.to(tl.int64) * inputs
    ups = weight + outputs * inputs
    # Weights never change, so the first of them may be on their way before the kernel that makes `x` has ended.
    ahead = ()
    ahead_up = ()
    for nth in tl.static_range(depth):
        ahead += (_weights(weight, nth * columns, left, inputs, outputs, rows, groups, columns, depth),)
        if gated:
            ahead_up += (_weights(ups, nth * columns, left, inputs, outputs, rows, groups, columns, depth),)
    if overlap:
        gdc_wait()
    zero = tl.zeros((columns // _VECTOR, groups, rows), tl.float32)
    sums = (zero,) * width
    sums_up = (zero,) * (width if gated else 1)
    for start in tl.range(0, inputs, columns * depth):
        later = ()
        later_up = ()
        for nth in tl.static_range(depth):
            at = start + nth * columns
            next_at = at + depth * columns
            w = _floats(ahead[nth])
            later += (_weights(weight, next_at, left, inputs, outputs, rows, groups, columns, depth),)
            if gated:
                w_up = _floats(ahead_up[nth])
                later_up += (_weights(ups, next_at, left, inputs, outputs, rows, groups, columns, depth),)
            added = ()
            added_up = ()
            for r in tl.static_range(width):
                row = _row(x + r * inputs, at, inputs, groups, columns, depth)
                added += (_plus(sums[r], w, row),)
                if gated:
                    added_up += (_plus(sums_up[r], w_up, row),)
            sums = added
            if gated:
                sums_up = added_up
        ahead = later
        if gated:
            ahead_up = later_up
    n = first + tl.arange(0, groups)[:, None, None] * rows + tl.arange(0, rows)[None, :, None]
    if gated:
        y, up = tl.split(tl.sum(tl.join(_side_by_side(sums, width), _side_by_side(sums_up, width)), axis=0))
    else:
        y = tl.sum(_side_by_side(sums, width), axis=0)
        up = y
    finish(
        y, up, n, out, addend, squares, gain, scaled, next_squares, peaks, eps, inputs, outputs, width, width,
        normed, gated, biased, residual, peaked, slots,
    )  # fmt: skip


@triton.jit
def finish(
    y, up, n, out, addend, squares, gain, scaled, next_squares, peaks, eps, inputs: tl.constexpr, outputs: tl.constexpr,
    width: tl.constexpr, lines: tl.constexpr, normed: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr,
    residual: tl.constexpr, peaked: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    """Do what comes after the sums `y` (and `up`, when `gated`) of outputs `n`, [a, b, lines], of whose lines `width` count."""
    r = tl.arange(0, lines)[None, None, :]
    inside = (n < outputs) & (r < width)
    if normed:
        scale = tl.rsqrt(tl.load(squares + r).to(tl.float32) / (SQUARE * inputs) + eps)
        y *= scale
        up *= scale
    if gated:
        root = tl.rsqrt(1.0 + tl.exp2(y * -_LOG2E))  # its square is the sigmoid of y, in half a division's instructions
        y = y * root * root * up
    if biased:
        y += tl.load(addend + n, mask=n < outputs, other=0.0).to(tl.float32)
    if residual:
        y += tl.load(addend + r * outputs + n, mask=inside, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + r * outputs + n, y, mask=inside)
    y = y.to(tl.float32)
    if residual:
        gains = tl.load(gain + n, mask=n < outputs, other=0.0).to(tl.float32)
        tl.store(scaled + r * outputs + n, (y * gains).to(scaled.dtype.element_ty), mask=inside)
        square = tl.sum(tl.sum(tl.where(inside, counted(y), 0), axis=0), axis=0)
        line = tl.arange(0, lines)
        tl.atomic_add(next_squares + line, square, mask=line < width, sem="relaxed")
    if peaked:
        best = tl.max(tl.max(tl.where(inside, _peak_of(y, n), -(2**63)), axis=0), axis=0)
        line = tl.arange(0, lines)
        tl.atomic_max(peaks + line * slots + tl.program_id(0) % slots, best, mask=line < width, sem="relaxed")


@triton.jit
def counted(values):
    """Return the squares of float32 `values` as integers, see `SQUARE`; a value counts as at most 2**18: none overflows."""
    bounded = tl.minimum(tl.abs(values), 2.0**18)
    return (bounded * bounded * SQUARE).to(tl.int64)


@triton.jit
def _plus(total, w, row):
    """Add the products of eight weights and eight inputs, one after the other."""
    for nth in tl.static_range(_VECTOR):
        total += w[nth] * row[nth]
    return total


@triton.jit
def _weights(
    weight, start, left, inputs: tl.constexpr, outputs: tl.constexpr, rows: tl.constexpr, groups: tl.constexpr,
    columns: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Load a tile from column `start` on, [columns / 8, groups, rows, 8]; bfloat16 as pairs, half as many. Each is read once.

    Beyond the last column it repeats the last tile, whose lines are near, or is zero; `left` rows are the matrix's.
    """
    pair: tl.constexpr = _pair(weight.dtype.element_ty)
    n = tl.arange(0, groups)[None, :, None, None] * rows + tl.arange(0, rows)[None, None, :, None]
    k = tl.arange(0, columns // _VECTOR)[:, None, None, None] * (_VECTOR // pair)
    k += tl.arange(0, _VECTOR // pair)[None, None, None, :]
    if inputs % (columns * depth) == 0 and outputs % (rows * groups) == 0:
        place = _words(weight + tl.minimum(start, inputs - columns)) + n * (inputs // pair) + k
        tile = tl.load(place, eviction_policy="evict_first")
    else:
        place = _words(weight + start) + n * (inputs // pair) + k
        tile = tl.load(place, mask=(start + k * pair < inputs) & (n < left), other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _row(x, start, inputs: tl.constexpr, groups: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr):
    """Load inputs from `start` on, as eight of [columns / 8, groups, 1] in float32: where the threads have their weights."""
    pair: tl.constexpr = _pair(x.dtype.element_ty)
    # A thread loads 16 bytes at once, here too: otherwise its inputs would not be those of its weights.
    k = tl.arange(0, columns // _VECTOR)[:, None, None, None] * (_VECTOR // pair) + tl.arange(0, 4)[None, None, None, :]
    k += tl.arange(0, groups)[None, :, None, None] * 0
    place = _words(x + start) + k
    whole: tl.constexpr = inputs % (columns * depth) == 0
    low = tl.load(place) if whole else tl.load(place, mask=start + k * pair < inputs, other=0)
    if pair == 2:
        row = _floats(low)
    elif whole:
        row = _four(low) + _four(tl.load(place + 4))
    else:
        row = _four(low) + _four(tl.load(place + 4, mask=start + 4 + k < inputs, other=0))
    return row


@triton.constexpr_function
def _pair(element):
    """Return how many elements make a 32-bit word."""
    return 2 if element.primitive_bitwidth == 16 else 1


@triton.jit
def _words(pointer):
    """Point at pairs of bfloat16, or at float32 as they are."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.int32))
    return pointer


@triton.jit
def _floats(tile):
    """Return the eight floats of a tile's last dimension: four pairs of bfloat16, or eight float32."""
    if tile.dtype == tl.int32:
        a, c, e, g = _four((tile << 16).to(tl.float32, bitcast=True))
        b, d, f, h = _four((tile & -65536).to(tl.float32, bitcast=True))
    else:
        even, odd = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], tile.shape[2], 4, 2)))
        a, c, e, g = _four(even)
        b, d, f, h = _four(odd)
    return a, b, c, d, e, f, g, h


@triton.jit
def _four(tile):
    """Return the four parts of a tile whose last dimension is four."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], tile.shape[2], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d
