# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, assignment"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""Matrix times eight rows on tensor cores, in small programs of short code: what a step costs hardly depends on its width.

Between kernels it is as `prepared_product`; only the sums are made otherwise. Tensor cores take eight rows of `x` whatever the
width, those beyond it are zero, and one row's sums do not depend on another's: a row's result is the same at every width.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_daemon.engine.cuda.prepared import finish

ROWS = 16  # of the matrix, the fewest a tensor core takes; when gated half of them gates and half ups
_LINES = tl.constexpr(8)  # rows of x


@triton.jit
def tensor_product(
    out,  # these as in `prepared_product`, but for `x`, always of the weights' dtype, and for `scaled`, which is the next's x
    x,
    weight,
    addend,
    squares,
    gain,
    scaled,
    next_squares,
    peaks,
    eps,
    inputs: tl.constexpr,
    outputs: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,  # of the matrix in one program, 16
    groups: tl.constexpr,  # of warps that take turns at the columns
    columns: tl.constexpr,  # inputs of one group's turn
    depth: tl.constexpr,  # passes under way
    normed: tl.constexpr,
    gated: tl.constexpr,
    biased: tl.constexpr,
    residual: tl.constexpr,
    peaked: tl.constexpr,
    slots: tl.constexpr,
    overlap: tl.constexpr,
):
    """Compute out[r] = epilogue(weight @ x[r]) for `width` rows; sums in float32."""
    if overlap:
        gdc_launch_dependents()
    own: tl.constexpr = rows // 2 if gated else rows  # outputs of one program
    span: tl.constexpr = groups * columns
    first = tl.program_id(0) * own
    m = tl.arange(0, rows)
    n = first + m % own
    known = (n < outputs)[None, :, None]
    line = (n + m // own * outputs)[None, :, None]
    at = tl.arange(0, groups)[:, None, None] * columns + tl.arange(0, columns)[None, None, :]
    place = weight + line.to(tl.int64) * inputs + at
    r = tl.arange(0, _LINES)[None, :, None]
    source = x + r * inputs + at
    # Weights never change, so the first of them may be on their way before the kernel that makes `x` has ended.
    ahead = ()
    for nth in tl.static_range(depth):
        ahead += (_tile(place, at, known, nth * span, inputs, outputs, own, span, depth),)
    if overlap:
        gdc_wait()
    sums = tl.zeros((groups, rows, _LINES), tl.float32)
    for start in tl.range(0, inputs, span * depth):
        later = ()
        for nth in tl.static_range(depth):
            now = start + nth * span
            lines = tl.load(source + now, mask=(r < width) & (now + at < inputs), other=0.0)
            sums = tl.dot(ahead[nth], tl.permute(lines, (0, 2, 1)), sums, input_precision="ieee")
            later += (_tile(place, at, known, now + depth * span, inputs, outputs, own, span, depth),)
        ahead = later
    y = tl.sum(sums, axis=0)
    if gated:
        y, up = tl.split(tl.permute(tl.reshape(y, (2, own, _LINES)), (1, 2, 0)))
    else:
        up = y
    n = first + tl.arange(0, own)[None, :, None]
    finish(
        y[None, :, :], up[None, :, :], n, out, addend, squares, gain, scaled, next_squares, peaks, eps, inputs, outputs,
        width, _LINES, normed, gated, biased, residual, peaked, slots,
    )  # fmt: skip


@triton.jit
def _tile(
    place, at, known, start, inputs: tl.constexpr, outputs: tl.constexpr, own: tl.constexpr, span: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """Load the weights of a pass that begins at column `start`; beyond the last it repeats the last, or is zero."""
    if inputs % (span * depth) == 0 and outputs % own == 0:
        tile = tl.load(place + tl.minimum(start, inputs - span), eviction_policy="evict_first")
    else:
        tile = tl.load(place + start, mask=known & (start + at < inputs), other=0.0, eviction_policy="evict_first")
    return tile
