"""Conversion against plain indexing, for layouts at random."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_daemon.convert import convert
from handoff.layout import AXES, BlockLayout, Digit, KindLayout, KVLayout
from tests.kit.handoff import paged


@st.composite
def orders(draw: st.DrawFn) -> tuple[tuple[tuple[int, ...], ...], KindLayout]:
    """One kind's sizes split into digits, packed in a random order."""
    sizes = {name: draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2)) for name in AXES}
    order = draw(st.permutations([(name, index) for name in AXES for index in range(len(sizes[name]))]))
    strides, stride = {}, 1
    for name, index in order:
        strides[name, index] = stride
        stride *= sizes[name][index]
    digits = {name: tuple(Digit(size, strides[name, i]) for i, size in enumerate(sizes[name])) for name in AXES}
    return tuple(tuple(sizes[name]) for name in AXES), KindLayout(offset=0, **digits)


def apart(kind: KindLayout, *, by: int, offset: int) -> KindLayout:
    """The same order with every stride `by` times as wide."""
    digits = {name: tuple(Digit(digit.size, by * digit.stride) for digit in kind.axis(name)) for name in AXES}
    return KindLayout(offset=offset, **digits)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    sizes, kind = draw(orders())
    heads, tokens, dims = (math.prod(part) for part in sizes)
    side_by_side = draw(st.booleans())  # a value next to each key, or all values behind all keys
    keys = apart(kind, by=2 if side_by_side else 1, offset=0)
    values = apart(kind, by=2 if side_by_side else 1, offset=1 if side_by_side else heads * tokens * dims)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    block = BlockLayout(kv_heads=heads, head_dim=dims, block_tokens=tokens, dtype=dtype, keys=keys, values=values)
    block.validate()
    return KVLayout(tuple(f"layer {index}" for index in range(draw(st.integers(1, 3)))), block)


@settings(deadline=None, max_examples=60)
@given(layouts(), st.integers(1, 20), st.integers(0, 3))
def test_every_element_of_every_token_comes_back(layout: KVLayout, tokens: int, room: int) -> None:
    block = layout.block
    dtype: torch.dtype = getattr(torch, block.dtype)
    shape = (len(layout.layers), block.kv_heads, tokens, block.head_dim)
    keys, values = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    landed = torch.cat([paged(block, key, value).flatten() for key, value in zip(keys, values, strict=True)])
    slot = torch.cat(
        [landed.view(torch.uint8), torch.full((1000,), 255, dtype=torch.uint8)]
    )  # a slot is larger than its prompt
    # The engine's cache: K and V in one tensor, with positions behind the prompt that must stay as they are.
    cache = torch.full((shape[0], 2, block.kv_heads, tokens + room, block.head_dim), 9.0, dtype=dtype)
    convert(slot, layout, cache[:, 0, :, :tokens], cache[:, 1, :, :tokens])
    assert torch.equal(cache[:, 0, :, :tokens], keys)
    assert torch.equal(cache[:, 1, :, :tokens], values)
    assert bool((cache[:, :, :, tokens:] == 9).all())
