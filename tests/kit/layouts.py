"""KV layouts at random, what would land of them, and what an fp8 byte is worth."""

import math

import torch
from hypothesis import strategies as st

from handoff.layout import AXES, FP8_BYTES, Digit, GqaBlock, KindLayout, KVLayout, Layer
from tests.kit.handoff import paged

Sizes = dict[str, list[int]]


@st.composite
def kinds(draw: st.DrawFn, sizes: Sizes) -> KindLayout:
    """One kind's digits, packed in a random order."""
    order = draw(st.permutations([(name, index) for name in AXES for index in range(len(sizes[name]))]))
    strides, stride = {}, 1
    for name, index in order:
        strides[name, index] = stride
        stride *= sizes[name][index]
    digits = {name: tuple(Digit(size, strides[name, i]) for i, size in enumerate(sizes[name])) for name in AXES}
    return KindLayout(offset=0, **digits)


def apart(kind: KindLayout, *, by: int, offset: int) -> KindLayout:
    """The same order with every stride `by` times as wide."""
    digits = {name: tuple(Digit(digit.size, by * digit.stride) for digit in kind.axis(name)) for name in AXES}
    return KindLayout(offset=offset, **digits)


@st.composite
def splits(draw: st.DrawFn, size: int) -> list[int]:
    """Digits that make `size` values."""
    first = draw(st.sampled_from([part for part in range(1, size + 1) if size % part == 0]))
    return [first, size // first]


@st.composite
def blocks(draw: st.DrawFn, heads: int, tokens: int, dims: int, dtype: str) -> GqaBlock:
    sizes = {"head": draw(splits(heads)), "token": draw(splits(tokens)), "dim": draw(splits(dims))}
    side_by_side = draw(st.booleans())  # a value next to each key, in the same order; or all values behind all keys
    keys = draw(kinds(sizes))
    values = keys if side_by_side else draw(kinds(sizes))
    return GqaBlock(
        kv_heads=heads,
        head_dim=dims,
        block_tokens=tokens,
        dtype=dtype,
        keys=apart(keys, by=2 if side_by_side else 1, offset=0),
        values=apart(values, by=2 if side_by_side else 1, offset=1 if side_by_side else heads * tokens * dims),
    )


@st.composite
def layouts(draw: st.DrawFn, dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")) -> KVLayout:
    """Up to four layers with up to two different blocks of the same sizes."""
    heads, tokens, dims = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.sampled_from([4, 6, 8]))
    dtype = draw(st.sampled_from(dtypes))
    pool = draw(st.lists(blocks(heads, tokens, dims, dtype), min_size=1, max_size=2, unique=True))
    chosen = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4))
    used = list(dict.fromkeys(chosen))
    scales: st.SearchStrategy[float | None] = st.none()
    if dtype in FP8_BYTES:
        scales = st.floats(1 / 64, 64, width=32)
    layers = (Layer(str(index), used.index(block), draw(scales), draw(scales)) for index, block in enumerate(chosen))
    layout = KVLayout(tuple(layers), tuple(used))
    layout.validate()
    return layout


def gqa(layout: KVLayout, layer: int) -> GqaBlock:
    block = layout.block(layer)
    assert isinstance(block, GqaBlock)
    return block


def heads_of(layout: KVLayout) -> tuple[int, int]:
    return gqa(layout, 0).kv_heads, gqa(layout, 0).head_dim


def landing(layout: KVLayout, keys: torch.Tensor, values: torch.Tensor, shards: int) -> torch.Tensor:
    """What lands of K and V of [layers, heads of all shards, tokens, dim], and what a larger slot holds behind it."""
    heads, _ = heads_of(layout)
    parts = []
    for shard in range(shards):
        own = slice(shard * heads, (shard + 1) * heads)
        for index in range(len(layout.layers)):
            blocks = paged(gqa(layout, index), keys[index, own], values[index, own])
            parts.append(blocks.flatten().view(torch.uint8))
    return torch.cat([*parts, torch.full((1000,), 255, dtype=torch.uint8)])


def fp8_value(byte: int, dtype: str) -> float:
    """What a byte is worth, by the definition of the two formats (Micikevicius et al., FP8 Formats for Deep Learning, 2022)."""
    fraction_bits, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = (byte & 0x7F) >> fraction_bits, byte & ((1 << fraction_bits) - 1)
    if dtype == "float8_e4m3fn" and (byte & 0x7F) == 0x7F:
        return math.nan
    if dtype == "float8_e5m2" and exponent == 31:
        return sign * math.inf if fraction == 0 else math.nan
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias - fraction_bits)
    return sign * math.ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits)
