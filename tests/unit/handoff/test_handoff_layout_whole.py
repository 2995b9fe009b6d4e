"""A whole cache: which layers have which blocks, where they land, and what makes its fingerprint another."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handoff.layout import (
    Axis,
    Block,
    GqaBlock,
    IndexBlock,
    KVLayout,
    LatentBlock,
    Layer,
    LayoutError,
    contiguous_block,
    uniform,
)
from tests.kit.handoff import BLOCK, LAYOUT, changed

TOKENS = 64
NHD: tuple[Axis | Literal["kind"], ...] = ("kind", "token", "head", "dim")
GQA = contiguous_block(kv_heads=1, head_dim=8, block_tokens=TOKENS, dtype="bfloat16", order=NHD)
FP8 = msgspec.structs.replace(GQA, dtype="float8_e4m3fn")
LATENT = LatentBlock(TOKENS, form="fp8_ds_mla")
INDEX = IndexBlock(TOKENS)
SPARSE = KVLayout(
    (Layer("0.attn", 0), Layer("0.index", 1), Layer("1.attn", 0), Layer("1.index", 1), Layer("mtp.attn", 0)), (LATENT, INDEX)
)
MIXED = KVLayout(
    (Layer("a", 0, 0.5, 2.0), Layer("b", 1), Layer("c", 2), Layer("d", 3), Layer("e", 0, 1.0, 1.0)),
    (FP8, LATENT, INDEX, LatentBlock(TOKENS, 256, 32)),
)


@pytest.mark.parametrize(
    ("block", "size"),
    [
        (LatentBlock(64), 64 * 1152),
        (LatentBlock(64, form="fp8_ds_mla"), 64 * 656),
        (IndexBlock(64), 8192 + 256),
        (GQA, 2 * 64 * 8 * 2),
        (FP8, 2 * 64 * 8),
    ],
)
def test_a_block_has_the_bytes_of_vllms(block: Block, size: int) -> None:
    block.validate()
    assert block.block_bytes == size


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2), (3000, 47)])
def test_layers_land_one_after_another_each_with_whole_blocks(tokens: int, blocks: int) -> None:
    assert SPARSE.blocks_for(tokens) == blocks
    latent, index = blocks * 64 * 656, blocks * 64 * 132
    starts = (0, latent, latent + index, 2 * latent + index, 2 * (latent + index))
    assert SPARSE.offsets(tokens) == starts
    assert SPARSE.bytes_for(tokens) == starts[-1] + latent
    assert [SPARSE.block_bytes(layer) for layer in (0, 1)] == [64 * 656, 64 * 132]


def test_a_cache_of_one_block_lands_in_equal_parts() -> None:
    assert LAYOUT.bytes_for(5) == 3 * 2 * BLOCK.block_bytes
    assert LAYOUT.offsets(5) == (0, 2 * BLOCK.block_bytes, 4 * BLOCK.block_bytes)


@pytest.mark.parametrize(
    ("layout", "replicated"), [(LAYOUT, False), (SPARSE, True), (MIXED, False), (uniform(["a"], INDEX), True)]
)
def test_only_latent_and_index_caches_are_the_same_on_every_rank(layout: KVLayout, replicated: bool) -> None:
    layout.validate()
    assert layout.replicated is replicated


@pytest.mark.parametrize("layout", [LAYOUT, SPARSE, MIXED])
def test_a_description_survives_the_wire(layout: KVLayout) -> None:
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout)
    assert back == layout
    assert back.fingerprint == layout.fingerprint


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (KVLayout((), (BLOCK,)), "layers is empty"),
        (KVLayout((Layer("a", 0),), ()), "blocks is empty"),
        (uniform([str(index) for index in range(4097)], BLOCK), "layers has more than 4096"),
        (KVLayout((Layer("a", 0),), (BLOCK,) * 65), "blocks has more than 64"),
        (uniform(["a", "b", "a"], BLOCK), "a name twice"),
        (KVLayout((Layer("a", 1),), (BLOCK,)), "layer 'a' has block 1 of 1"),
        (KVLayout((Layer("a", -1),), (BLOCK,)), "layer 'a' has block -1 of 1"),
        (KVLayout((Layer("a", 0),), (LATENT, INDEX)), "each used"),
        (KVLayout((Layer("a", 1), Layer("b", 0)), (LATENT, INDEX)), "in the order of the layers"),
        (KVLayout((Layer("a", 0), Layer("b", 1)), (LATENT, LATENT)), "a block twice"),
        (KVLayout((Layer("a", 0), Layer("b", 1)), (LATENT, IndexBlock(128))), "block_tokens differs between layers: 64, 128"),
        (uniform(["a"], FP8), "key_scale of layer 'a' is None"),
        (uniform(["a"], FP8, scale=0.0), "key_scale of layer 'a' is 0.0"),
        (KVLayout((Layer("a", 0, 1.0, float("nan")),), (FP8,)), "value_scale of layer 'a' is nan"),
        (KVLayout((Layer("a", 0, 1.0, float("inf")),), (FP8,)), "value_scale of layer 'a' is inf"),
        (uniform(["a"], GQA, scale=1.0), "key_scale of layer 'a' is 1.0, but its block is not scaled"),
        (uniform(["a"], LATENT, scale=1.0), "but its block is not scaled"),
        (uniform(["a"], LatentBlock(0)), "block_tokens 0"),
        (uniform(["a"], LatentBlock(64, 500, form="fp8_ds_mla")), "latent_dim 500 is no multiple of 128"),
        (uniform(["a"], LatentBlock(64, rope_dim=1 << 40)), "rope_dim 1099511627776"),
        (uniform(["a"], LatentBlock(64, rope_dim=33)), "rope_dim 33 is odd"),
        (uniform(["a"], IndexBlock(64, 64)), "dim 64 is no multiple of 128"),
        (uniform(["a"], IndexBlock(64, -128)), "dim -128"),
        (changed(LAYOUT, dtype="float8_e4m3"), "dtype 'float8_e4m3'"),
    ],
)
def test_a_cache_that_nobody_could_read_is_refused_by_its_field(layout: KVLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        layout.validate()


def test_a_crowd_of_large_blocks_is_refused_before_it_is_counted() -> None:
    large = [
        contiguous_block(
            kv_heads=heads, head_dim=128, block_tokens=1024, dtype="bfloat16", order=("kind", "token", "head", "dim")
        )
        for heads in range(1, 8)
    ]
    layout = KVLayout(tuple(Layer(str(index), index) for index in range(7)), tuple(large))
    with pytest.raises(LayoutError, match="4194304 elements together"):
        layout.validate()


def test_a_block_that_would_put_the_next_layer_between_words_is_refused() -> None:
    odd = contiguous_block(
        kv_heads=1, head_dim=1, block_tokens=1, dtype="float8_e4m3fn", order=("kind", "token", "head", "dim")
    )
    with pytest.raises(LayoutError, match="2 bytes is no multiple of 4"):
        uniform(["a"], odd, scale=1.0).validate()


def variants(value: Any) -> Iterator[Any]:
    """The value with one field changed, at any depth."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            for other in variants(getattr(value, name)):
                yield msgspec.structs.replace(value, **{name: other})
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            for other in variants(item):
                yield (*value[:index], other, *value[index + 1 :])
        yield value[:-1]
        yield (*value, value[0])
        if value[::-1] != value:
            yield value[::-1]
    elif value is None:
        yield 1.0
    elif isinstance(value, str):
        yield value + "x"
    else:
        yield value + 1


def test_any_one_field_changed_is_another_fingerprint() -> None:
    others = [*variants(MIXED), *variants(SPARSE)]
    prints = {layout.fingerprint for layout in (MIXED, SPARSE, *others)}
    assert len(prints) == len({msgspec.msgpack.encode(layout) for layout in (MIXED, SPARSE, *others)})
    assert {MIXED.fingerprint, SPARSE.fingerprint}.isdisjoint(layout.fingerprint for layout in others)


@given(st.lists(st.sampled_from([GQA, LATENT, INDEX]), min_size=1, max_size=8), st.integers(0, 400))
def test_offsets_are_the_sums_of_what_lies_before(kinds: list[Block], tokens: int) -> None:
    blocks = tuple(dict.fromkeys(kinds))
    layout = KVLayout(tuple(Layer(str(index), blocks.index(kind)) for index, kind in enumerate(kinds)), blocks)
    layout.validate()
    sizes = [layout.blocks_for(tokens) * kind.block_bytes for kind in kinds]
    assert layout.offsets(tokens) == tuple(sum(sizes[:index]) for index in range(len(kinds)))
    assert layout.bytes_for(tokens) == sum(sizes)
    assert all(start % 4 == 0 for start in layout.offsets(tokens))


def test_a_block_in_two_equal_descriptions_has_one_fingerprint() -> None:
    again = GqaBlock(**{name: getattr(GQA, name) for name in GQA.__struct_fields__})
    assert uniform(["a"], again).fingerprint == uniform(["a"], GQA).fingerprint
