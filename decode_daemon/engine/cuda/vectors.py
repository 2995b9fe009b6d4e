# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, assignment"
# Kernels are Triton's language, not Python's: their arguments are pointers and tensors that mypy has no types for.
"""How `product` loads weights and rows: 16 bytes a thread, and of both the same inputs, so that nothing is exchanged."""

import triton
import triton.language as tl


@triton.jit
def load_weights(
    weight, start, left, inputs: tl.constexpr, outputs: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """Load a tile from column `start` on, [rows, columns]; bfloat16 as pairs, half as many. Each is read once.

    Beyond the last column it repeats the last tile, whose lines are near, or is zero; `left` rows are the matrix's.
    """
    packed: tl.constexpr = _packed(weight.dtype.element_ty)
    n = tl.arange(0, rows)[:, None]
    k = tl.arange(0, columns // packed)[None, :]
    if inputs % (columns * depth) == 0 and outputs % rows == 0:
        place = _words(weight + tl.minimum(start, inputs - columns)) + n * (inputs // packed) + k
        tile = tl.load(place, eviction_policy="evict_first")
    else:
        place = _words(weight + start) + n * (inputs // packed) + k
        tile = tl.load(
            place, mask=(start // packed + k < inputs // packed) & (n < left), other=0, eviction_policy="evict_first"
        )
    # A thread's 16 bytes are one vector, or with float32 half of one.
    vector: tl.constexpr = vector_of(weight.dtype.element_ty)
    return tl.reshape(tile, (rows, columns // vector, vector // packed))


@triton.jit
def load_row(
    x, start, part: tl.constexpr, inputs: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, vector: tl.constexpr
):  # fmt: skip
    """Load the inputs of `floats_of`'s weights of a pass from `start` on, each [1, columns / vector] in float32."""
    packed: tl.constexpr = _packed(x.dtype.element_ty)
    whole: tl.constexpr = inputs % (columns * depth) == 0
    j = tl.arange(0, columns // vector)[:, None]
    if vector == 16:
        # Threads side by side have quads side by side, so that no two of them want the same bank of the cache.
        block: tl.constexpr = block_of(inputs)
        tl.static_assert(columns % block == 0)
        quads: tl.constexpr = block // 16
        k = (j // quads) * (block // packed) + (j % quads) * (4 // packed) + part * (block // 4 // packed)
        k += tl.arange(0, 4 // packed)[None, :]
        place = _words(x + start) + k
        quad = tl.load(place) if whole else tl.load(place, mask=start // packed + k < inputs // packed, other=0)
        row = _pairs(quad[None, :, :]) if packed == 2 else _four(quad[None, :, :])
    else:
        # A thread loads 16 bytes at once, here too: otherwise its inputs would not be those of its weights.
        k = j * (vector // packed) + tl.arange(0, 4)[None, :]
        place = _words(x + start) + k
        low = tl.load(place) if whole else tl.load(place, mask=start // packed + k < inputs // packed, other=0)
        low = low[None, :, :]
        if packed == 2:
            row = floats_of(low, 0)
        else:
            high = tl.load(place + 4) if whole else tl.load(place + 4, mask=start + 4 + k < inputs, other=0)
            row = _four(low) + _four(high[None, :, :])
    return row


@triton.constexpr_function
def _packed(element):
    """Return how many elements are loaded as one: two, unless they are float32."""
    return 1 if element.primitive_bitwidth == 32 else 2


@triton.constexpr_function
def vector_of(element):
    """Return the weights that a thread takes at once: 16 bytes of bfloat16 or of e4m3."""
    return 16 if element.primitive_bitwidth == 8 else 8


@triton.constexpr_function
def block_of(inputs):
    """Return the inputs among which `Quantized` orders e4m3 weights: a warp's load where that divides `inputs`."""
    return min(512, inputs & -inputs)


@triton.jit
def _words(pointer):
    """Point at pairs of bfloat16 or of e4m3, or at float32 as they are."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.int32))
    elif pointer.dtype.element_ty == tl.float8e4nv:
        pointer = pointer.to(tl.pointer_type(tl.int16))
    return pointer


@triton.jit
def floats_of(tile, part: tl.constexpr):
    """Return the floats of a tile's last dimension: of four pairs of bfloat16, of eight float32, or of quad `part` of e4m3."""
    if tile.dtype == tl.int16:
        even, odd = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], 4, 2)))
        floats = _two(_four(even)[part]) + _two(_four(odd)[part])
    elif tile.dtype == tl.int32:
        a, c, e, g = _four(_low(tile))
        b, d, f, h = _four(_high(tile))
        floats = (a, b, c, d, e, f, g, h)
    else:
        even, odd = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], 4, 2)))
        a, c, e, g = _four(even)
        b, d, f, h = _four(odd)
        floats = (a, b, c, d, e, f, g, h)
    return floats


@triton.jit
def _two(pairs):
    """Return the floats of pairs of e4m3; bytes side by side are converted by one instruction."""
    codes = tl.join(pairs.to(tl.uint8), (pairs >> 8).to(tl.uint8))
    return tl.split(codes.to(tl.float8e4nv, bitcast=True).to(tl.float32))


@triton.jit
def _low(words):
    """Return the first of each pair of bfloat16."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    """Return the second of each pair of bfloat16."""
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _pairs(tile):
    """Return the four floats of a tile whose last dimension is two pairs of bfloat16."""
    a, c = tl.split(_low(tile))
    b, d = tl.split(_high(tile))
    return a, b, c, d


@triton.jit
def _four(tile):
    """Return the four parts of a tile whose last dimension is four."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d
