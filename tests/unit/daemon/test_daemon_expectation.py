"""What a daemon takes of a connector's introduction: the same model, the same heads, a layout that can be read."""

from dataclasses import replace
from typing import Any

import pytest

from handoff.layout import IndexBlock, KVLayout, LatentBlock, Layer, contiguous_block, uniform
from handoff.messages import Refused
from tests.kit.handoff import BLOCK, EXPECTATION, LAYOUT, changed, hello

NAMES = [layer.name for layer in LAYOUT.layers]


def heads(count: int, tokens: int = 4) -> KVLayout:
    block = contiguous_block(
        kv_heads=count, head_dim=8, block_tokens=tokens, dtype="float32", order=("kind", "token", "head", "dim")
    )
    return uniform(NAMES, block)


@pytest.mark.parametrize(("shards", "per_shard"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_heads_count_over_all_shards(shards: int, per_shard: int) -> None:
    eight = replace(EXPECTATION, kv_heads=8)
    for shard in range(shards):
        fields: dict[str, Any] = {"shard": shard, "shards": shards}
        assert eight.mismatch(hello(layout=heads(per_shard), **fields), "nixl") is None
        refused = eight.mismatch(hello(layout=heads(per_shard + 1), **fields), "nixl")
        total = (per_shard + 1) * shards
        assert refused == Refused("KV heads", f"{total} ({per_shard + 1} in each of {shards} shards)", "8")


@pytest.mark.parametrize(("shard", "shards"), [(1, 1), (-1, 1), (0, 0), (2, 2), (0, -1)])
def test_a_shard_is_one_of_the_shards(shard: int, shards: int) -> None:
    refused = EXPECTATION.mismatch(hello(shard=shard, shards=shards), "nixl")
    assert refused is not None
    assert (refused.field, refused.theirs) == ("shard", f"{shard} of {shards}")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_taken_only_where_the_daemon_is_told_to(dtype: str) -> None:
    fp8 = KVLayout(tuple(Layer(name, 0, 0.5, 2.0) for name in NAMES), changed(LAYOUT, dtype=dtype).blocks)
    refused = EXPECTATION.mismatch(hello(layout=fp8), "nixl")
    assert refused == Refused("KV dtype", dtype, "float32 (the daemon's accept_fp8_kv would take it)")
    told = replace(EXPECTATION, accept_fp8=True)
    assert told.mismatch(hello(layout=fp8), "nixl") is None
    assert told.mismatch(hello(), "nixl") is None
    assert told.mismatch(hello(layout=changed(LAYOUT, dtype="float16")), "nixl") == Refused("KV dtype", "float16", "float32")


@pytest.mark.parametrize(("block", "kind"), [(LatentBlock(4), "latent"), (IndexBlock(4), "index")])
def test_an_engine_of_heads_takes_no_latent_or_index_cache_not_even_in_one_layer(
    block: LatentBlock | IndexBlock, kind: str
) -> None:
    for layout in (uniform(NAMES, block), KVLayout((*LAYOUT.layers[:2], Layer(NAMES[2], 1)), (BLOCK, block))):
        assert EXPECTATION.mismatch(hello(layout=layout), "nixl") == Refused("kind of attention", kind, "gqa")


def test_one_layer_that_differs_is_a_mismatch() -> None:
    layers = (*LAYOUT.layers[:2], Layer(NAMES[2], 1))
    other = changed(LAYOUT, head_dim=16).blocks[0]
    refused = EXPECTATION.mismatch(hello(layout=KVLayout(layers, (BLOCK, other))), "nixl")
    assert refused == Refused("head dim", "16", "8")


def test_a_draft_layer_beside_the_models_own_is_refused_with_both_numbers() -> None:
    drafted = uniform([*NAMES, "draft.layer.0"], BLOCK)
    assert EXPECTATION.mismatch(hello(layout=drafted), "nixl") == Refused("layers", "4", "3")


def test_a_layers_name_has_a_length_that_can_be_kept() -> None:
    longest = uniform([*NAMES[:2], "n" * 256], BLOCK)
    assert EXPECTATION.mismatch(hello(layout=longest), "nixl") is None
    refused = EXPECTATION.mismatch(hello(layout=uniform([*NAMES[:2], "n" * 257], BLOCK)), "nixl")
    assert refused == Refused("layout", "layers has a name of 257 characters, 256 at the most", "one that can be read")


def test_smaller_blocks_than_the_largest_in_use_are_taken() -> None:
    assert EXPECTATION.mismatch(hello(layout=heads(2, tokens=256)), "nixl") is None
    assert EXPECTATION.mismatch(hello(layout=heads(2, tokens=257)), "nixl") == Refused("block size", "257", "256 at the most")
