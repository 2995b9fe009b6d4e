# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""Attention of up to eight new rows over a static cache, its positions split among programs, and the sum of the splits.

The new rows' keys and values come straight from the QKV product: the program whose positions they fall on rotates them and
writes them to the cache, then reads them there like all others. Which positions a split holds and the tile are the same for
every width, and a position that a row may not see adds exact zeros; so a row's result does not depend on the width.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def attend(
    partial,  # float32 [8, heads, splits, dim]: softmax-weighted values of one split, not yet divided
    peaks,  # float32 [8, heads, splits]: the split's largest score, in powers of two
    masses,  # float32 [8, heads, splits]: the split's sum of weights
    qkv,  # [8, (heads + 2 * kv_heads) * dim]
    cache,  # one layer: [2, kept, context, dim], of whose heads the first `kv_heads` count
    cos,  # [context, dim / 2]
    sin,
    q_gain,  # [dim], read when `normed`
    k_gain,
    state,  # int32 [2]: position of the first row, number of rows
    scale,  # of scores, times log2(e)
    eps,
    context,
    splits,
    chunk,  # positions of a split, a multiple of `tile`
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,  # query heads, of one row and of the next ones, that a program takes
    tile: tl.constexpr,
    stages: tl.constexpr,  # tiles under way at once
    normed: tl.constexpr,
    overlap: tl.constexpr,
    kept: tl.constexpr = None,  # heads in the cache; None: `kv_heads`
):
    """Attend with some query heads of one KV head to one split of the positions.

    Grid: (splits, kv_heads, blocks of `rows` that together hold the 8 * heads / kv_heads query heads of eight rows).
    """
    if overlap:
        gdc_launch_dependents()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    # The step before this one wrote these two and the cache before `start`: both may be read before the wait.
    start = tl.load(state)
    width = tl.load(state + 1)
    end = start + width
    first = split * chunk
    last = tl.minimum(first + chunk, end)
    group: tl.constexpr = heads // kv_heads
    line: tl.constexpr = (heads + 2 * kv_heads) * dim
    m = tl.program_id(2) * rows
    if first >= end or m >= width * group:
        return
    m += tl.arange(0, rows)
    row = m // group
    head = kv_head * group + m % group
    known = row < width
    c, s = _angles(cos, sin, start + row, known, dim)
    keys = cache + kv_head * context * dim
    values = keys + (kv_heads if kept is None else kept) * context * dim
    if overlap:
        _prefetch(keys, first, start, dim, tile)
        _prefetch(values, first, start, dim, tile)
        gdc_wait()
    q1, q2 = _turned(qkv + row * line + head * dim, c, s, known, q_gain, eps, dim, normed)
    if last > start:
        _keep(keys, values, qkv, first, last, start, heads + kv_head, cos, sin, k_gain, eps, line, kv_heads, dim, normed)
    peak = tl.full((rows,), float("-inf"), tl.float32)
    mass = tl.zeros((rows,), tl.float32)
    total = tl.zeros((rows, dim), tl.float32)
    # Tiles of old positions, then the one or two that the new rows' positions fall on.
    old = tl.minimum(first + tl.maximum(start - first, 0) // tile * tile, last)
    for at in tl.range(first, old, tile, num_stages=stages):
        k1, k2, v = _cached(keys, values, at, at, dim, tile, True)
        peak, mass, total = _seen(peak, mass, total, q1, q2, k1, k2, v, at, start + row, scale, tile)
    tl.debug_barrier()  # between the new rows' stores and their loads
    for at in tl.range(old, last, tile, num_stages=1):
        k1, k2, v = _cached(keys, values, at, last, dim, tile, False)
        peak, mass, total = _seen(peak, mass, total, q1, q2, k1, k2, v, at, start + row, scale, tile)
    place = (row * heads + head) * splits + split
    tl.store(peaks + place, peak, mask=known)
    tl.store(masses + place, mass, mask=known)
    tl.store(partial + place[:, None] * dim + tl.arange(0, dim)[None, :], total, mask=known[:, None])


@triton.jit
def combine(
    out,  # [8, heads * dim]
    partial,  # see `attend`
    peaks,
    masses,
    state,
    chunk,
    heads: tl.constexpr,
    dim: tl.constexpr,
    splits: tl.constexpr,
    overlap: tl.constexpr,
):
    """Join the splits of one head of one row; grid (heads, width)."""
    if overlap:
        gdc_launch_dependents()
    width = tl.load(state + 1)
    if tl.program_id(1) >= width:
        return
    if overlap:
        gdc_wait()
    place = (tl.program_id(1) * heads + tl.program_id(0)) * splits
    s = tl.arange(0, splits)
    d = tl.arange(0, dim)
    used = s * chunk < tl.load(state) + width
    peak = tl.load(peaks + place + s, mask=used, other=float("-inf"))
    mass = tl.load(masses + place + s, mask=used, other=0.0)
    part = tl.load(partial + (place + s)[:, None] * dim + d[None, :], mask=used[:, None], other=0.0)
    weight = tl.exp2(peak - tl.max(peak, axis=0))
    total = tl.sum(part * weight[:, None], axis=0) / tl.sum(mass * weight, axis=0)
    tl.store(out + (tl.program_id(1) * heads + tl.program_id(0)) * dim + d, total.to(out.dtype.element_ty))


@triton.jit
def _cached(keys, values, at, end, dim: tl.constexpr, tile: tl.constexpr, whole: tl.constexpr):
    """Load a tile of the cache from position `at` on: both halves of K, and V; zeros from `end` on unless it is `whole`."""
    position = at + tl.arange(0, tile)[:, None]
    low = position * dim + tl.arange(0, dim // 2)[None, :]
    d = position * dim + tl.arange(0, dim)[None, :]
    if whole:
        k1 = tl.load(keys + low)
        k2 = tl.load(keys + low + dim // 2)
        v = tl.load(values + d)
    else:
        k1 = tl.load(keys + low, mask=position < end, other=0.0)
        k2 = tl.load(keys + low + dim // 2, mask=position < end, other=0.0)
        v = tl.load(values + d, mask=position < end, other=0.0)
    return k1, k2, v


@triton.jit
def _prefetch(rows, at, end, dim: tl.constexpr, tile: tl.constexpr):
    """Ask for a tile's lines of 64 elements in the L2 cache; those from position `end` on are not asked for."""
    position = at + tl.arange(0, tile)[:, None]
    line = rows + tl.minimum(position, tl.maximum(end - 1, 0)) * dim + tl.arange(0, dim // 64)[None, :] * 64
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _seen(peak, mass, total, q1, q2, k1, k2, v, at, seen, scale, tile: tl.constexpr):
    """Add a tile that begins at position `at` to the running softmax of rows that see positions up to `seen`."""
    scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scale
    position = at + tl.arange(0, tile)
    scores = tl.where(position[None, :] <= seen[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that sees nothing here yet
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(peak - base)
    mass = mass * fade + tl.sum(weights, axis=1)
    total = tl.dot(weights.to(v.dtype), v, total * fade[:, None], input_precision="ieee")
    return new_peak, mass, total


@triton.jit
def _keep(
    keys, values, qkv, first, last, start, head, cos, sin, gain, eps,
    line: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, normed: tl.constexpr,
):  # fmt: skip
    """Write the new rows' keys, rotated, and values to the cache, where their positions lie between `first` and `last`.

    `head` is the key's place among the heads of a row's line. Programs that share a split write the same.
    """
    row = tl.arange(0, 8)
    position = start + row
    mine = (position >= first) & (position < last)
    source = qkv + row * line + head * dim
    c, s = _angles(cos, sin, position, mine, dim)
    k1, k2 = _turned(source, c, s, mine, gain, eps, dim, normed)
    d = tl.arange(0, dim)[None, :]
    v = tl.load(source[:, None] + kv_heads * dim + d, mask=mine[:, None], other=0.0)
    low = position[:, None] * dim + tl.arange(0, dim // 2)[None, :]
    tl.store(keys + low, k1, mask=mine[:, None])
    tl.store(keys + low + dim // 2, k2, mask=mine[:, None])
    tl.store(values + position[:, None] * dim + d, v, mask=mine[:, None])


@triton.jit
def _angles(cos, sin, position, known, dim: tl.constexpr):
    """Load cosines and sines of positions, [n, dim / 2] each."""
    at = position[:, None] * (dim // 2) + tl.arange(0, dim // 2)[None, :]
    return tl.load(cos + at, mask=known[:, None], other=0.0), tl.load(sin + at, mask=known[:, None], other=0.0)


@triton.jit
def _turned(source, c, s, known, gain, eps, dim: tl.constexpr, normed: tl.constexpr):
    """Load heads, normalise them when `normed`, rotate them; return both halves, [n, dim / 2], in the cache's dtype."""
    half: tl.constexpr = dim // 2
    d = tl.arange(0, half)[None, :]
    x1 = tl.load(source[:, None] + d, mask=known[:, None], other=0.0)
    x2 = tl.load(source[:, None] + half + d, mask=known[:, None], other=0.0)
    dtype: tl.constexpr = x1.dtype
    x1, x2, c, s = x1.to(tl.float32), x2.to(tl.float32), c.to(tl.float32), s.to(tl.float32)
    if normed:
        scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / dim + eps)[:, None]
        x1 = x1 * scale * tl.load(gain + d).to(tl.float32)
        x2 = x2 * scale * tl.load(gain + half + d).to(tl.float32)
    return (x1 * c - x2 * s).to(dtype), (x2 * c + x1 * s).to(dtype)
