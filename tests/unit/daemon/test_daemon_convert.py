"""Conversion against plain indexing, for layouts at random."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_daemon.convert import convert
from handoff.layout import FP8_BYTES, KVLayout, LatentBlock, LayoutError, uniform
from tests.kit.layouts import fp8_value, gqa, heads_of, landing, layouts


@settings(deadline=None, max_examples=80)
@given(layouts(), st.integers(1, 3), st.integers(1, 20), st.integers(0, 3))
def test_every_element_of_every_token_comes_back(layout: KVLayout, shards: int, tokens: int, room: int) -> None:
    heads, dims = heads_of(layout)
    dtype: torch.dtype = getattr(torch, gqa(layout, 0).dtype)
    shape = (len(layout.layers), shards * heads, tokens, dims)
    keys, values = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    # The engine's cache: K and V in one tensor, with positions behind the prompt that must stay as they are.
    cache = torch.full((shape[0], 2, shape[1], tokens + room, dims), 9.0, dtype=dtype)
    landed = landing(layout, keys, values, shards)
    convert(landed, layout, cache[:, 0, :, :tokens], cache[:, 1, :, :tokens], shards=shards)
    assert torch.equal(cache[:, 0, :, :tokens], keys)
    assert torch.equal(cache[:, 1, :, :tokens], values)
    assert bool((cache[:, :, :, tokens:] == 9).all())


@settings(deadline=None, max_examples=40)
@given(
    layouts(("float8_e4m3fn", "float8_e5m2")), st.integers(1, 2), st.integers(1, 12), st.sampled_from(["float32", "bfloat16"])
)
def test_fp8_becomes_the_engines_dtype_times_its_layers_scale(layout: KVLayout, shards: int, tokens: int, target: str) -> None:
    heads, dims = heads_of(layout)
    name = gqa(layout, 0).dtype
    dtype: torch.dtype = getattr(torch, name)
    shape = (len(layout.layers), shards * heads, tokens, dims)
    generator = torch.Generator().manual_seed(tokens)
    stored = torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=generator)
    found = torch.empty((2, *shape), dtype=getattr(torch, target))
    landed = landing(layout, stored[0].view(dtype), stored[1].view(dtype), shards)
    convert(landed, layout, found[0], found[1], shards=shards)
    worth = torch.tensor([fp8_value(byte, name) for byte in range(256)], dtype=torch.float32)
    for kind, field in enumerate(("key_scale", "value_scale")):
        for index, layer in enumerate(layout.layers):
            expected = worth[stored[kind, index].long()] * getattr(layer, field)
            torch.testing.assert_close(found[kind, index], expected.to(found.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FP8_BYTES)
def test_pytorch_reads_each_fp8_byte_as_it_is_defined(dtype: str) -> None:
    read = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float32)
    torch.testing.assert_close(
        read, torch.tensor([fp8_value(byte, dtype) for byte in range(256)]), rtol=0, atol=0, equal_nan=True
    )


def test_a_layer_without_heads_is_refused_by_name() -> None:
    layout = uniform(["model.layers.0.self_attn.attn"], LatentBlock(64))
    landed = torch.zeros(layout.bytes_for(3), dtype=torch.uint8)
    with pytest.raises(LayoutError, match=r"layer 'model\.layers\.0\.self_attn\.attn' is no grouped-query attention"):
        convert(landed, layout, torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8))
