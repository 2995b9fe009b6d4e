"""Whatever strided order a backend uses, the probe finds it and the daemon reads K and V back exactly."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypedDict

import pytest
import torch
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from connector.probe import CacheUpdate, backend_update, check_rows, probe_block
from decode_daemon.convert import convert
from handoff.layout import Digit, GqaBlock, KindLayout, LatentBlock, LayoutError, contiguous_block, uniform
from tests.kit.handoff import paged
from tests.kit.vllm_caches import CPU_ISAS, cpu_layer

HEADS, DIM, TOKENS = 2, 16, 8


class Shape(TypedDict):
    kv_heads: int
    head_dim: int
    block_tokens: int


SHAPE: Shape = {"kv_heads": HEADS, "head_dim": DIM, "block_tokens": TOKENS}
ELEMENTS = 2 * HEADS * DIM * TOKENS

TRANSPOSED_KEYS = GqaBlock(
    **SHAPE,
    dtype="float32",
    keys=KindLayout(0, head=(Digit(HEADS, 2 * DIM * TOKENS),), token=(Digit(TOKENS, 1),), dim=(Digit(DIM, TOKENS),)),
    values=KindLayout(DIM * TOKENS, head=(Digit(HEADS, 2 * DIM * TOKENS),), token=(Digit(TOKENS, DIM),), dim=(Digit(DIM, 1),)),
)
# Keys in tiles of four tokens, of which pairs of dims lie side by side; values in tiles of pairs of tokens.
TILES = GqaBlock(
    **SHAPE,
    dtype="float32",
    keys=KindLayout(0, head=(Digit(HEADS, 128),), token=(Digit(2, 64), Digit(4, 2)), dim=(Digit(8, 8), Digit(2, 1))),
    values=KindLayout(256, head=(Digit(HEADS, 128),), token=(Digit(4, 32), Digit(2, 1)), dim=(Digit(16, 2),)),
)
NHD = contiguous_block(**SHAPE, dtype="float32", order=("kind", "token", "head", "dim"))
HND = contiguous_block(**SHAPE, dtype="float32", order=("kind", "head", "token", "dim"))


def scatter(places: Callable[[], tuple[list[int], list[int]]]) -> CacheUpdate:
    """A backend that puts [head, token, dim] of keys and of values at these places of a block."""

    def update(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        rows = cache.flatten(1)
        for kind, where in zip((key, value), places(), strict=True):
            grid = torch.tensor(where).reshape(HEADS, TOKENS, DIM)
            for token, slot in enumerate(slots.tolist()):
                rows[slot // TOKENS, grid[:, slot % TOKENS]] = kind[token]

    return update


def strided(block: GqaBlock) -> CacheUpdate:
    return scatter(lambda: (block.keys.places(), block.values.places()))


def empty_cache(blocks: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros((blocks, 2, TOKENS, HEADS, DIM), dtype=dtype)


def same_places(one: GqaBlock, other: GqaBlock) -> bool:
    return one.keys.places() == other.keys.places() and one.values.places() == other.values.places()


def recovered(update: CacheUpdate, block: GqaBlock, cache: torch.Tensor, tokens: int) -> None:
    """Random K and V of two layers go through the backend and come back from the daemon's conversion, bit for bit."""
    layout = uniform(["one", "two"], block)
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, block.kv_heads, tokens, block.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(cache.dtype) for _ in range(2))
    blocks = layout.blocks_for(tokens)
    order = torch.randperm(cache.shape[0] - 1, generator=generator)[:blocks] + 1  # anywhere but in block 0
    slots = torch.tensor(
        [int(order[t // block.block_tokens]) * block.block_tokens + t % block.block_tokens for t in range(tokens)]
    )
    landed = []
    for key, value in zip(keys, values, strict=True):
        cache.zero_()
        update(key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous(), cache, slots)
        landed.append(cache[order].flatten())
    found_keys, found_values = (torch.full(shape, torch.nan, dtype=cache.dtype) for _ in range(2))
    convert(torch.cat(landed).view(torch.uint8), layout, found_keys, found_values)
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_values, values)


@pytest.mark.parametrize("block", [NHD, HND, TRANSPOSED_KEYS, TILES], ids=["NHD", "HND", "transposed keys", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_strided_order_is_found_exactly(block: GqaBlock, dtype: torch.dtype) -> None:
    cache = empty_cache(dtype=dtype)
    found = probe_block(strided(block), cache, **SHAPE)
    found.validate()
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert same_places(found, block)
    assert not cache.any()  # vLLM's own cache is not written to
    for tokens in (1, TOKENS - 1, TOKENS, TOKENS + 3, 2 * TOKENS):
        recovered(strided(block), found, empty_cache(4, dtype), tokens)


@pytest.mark.parametrize("block", [TRANSPOSED_KEYS, TILES])
def test_the_probe_agrees_with_a_cache_written_element_by_element(block: GqaBlock) -> None:
    keys, values = torch.randn(2, HEADS, 11, DIM).unbind(0)
    layout = uniform(["one"], probe_block(strided(block), empty_cache(), **SHAPE))
    found_keys, found_values = torch.empty(1, HEADS, 11, DIM), torch.empty(1, HEADS, 11, DIM)
    convert(paged(block, keys, values).flatten().view(torch.uint8), layout, found_keys, found_values)
    assert torch.equal(found_keys[0], keys)
    assert torch.equal(found_values[0], values)


def test_an_order_that_is_not_strided_is_refused() -> None:
    def swapped() -> tuple[list[int], list[int]]:
        keys = NHD.keys.places()
        keys[5], keys[6] = keys[6], keys[5]
        return keys, NHD.values.places()

    with pytest.raises(LayoutError, match="key order along"):
        probe_block(scatter(swapped), empty_cache(), **SHAPE)


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 3, 2, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 7, 6],
        [0, 1, 4, 5, 2, 3, 7, 6],  # its first of each pair are strided, and all pairs but one
    ],
)
def test_an_axis_in_no_regular_steps_is_refused(order: list[int]) -> None:
    def bent() -> tuple[list[int], list[int]]:
        grid = torch.tensor(NHD.values.places()).reshape(HEADS, TOKENS, DIM)
        return NHD.keys.places(), grid[:, order].flatten().tolist()

    with pytest.raises(LayoutError, match="value order along token is not a strided one"):
        probe_block(scatter(bent), empty_cache(), **SHAPE)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_an_update_that_scales_is_refused(factor: float) -> None:
    def update(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        strided(NHD)(key * factor, value * factor, cache, slots)

    with pytest.raises(LayoutError, match="no permutation"):
        probe_block(update, empty_cache(), **SHAPE)


def test_an_update_that_rounds_is_refused() -> None:
    def update(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        strided(NHD)(key.to(torch.float8_e4m3fn).to(key.dtype), value, cache, slots)

    with pytest.raises(LayoutError, match="no permutation"):
        probe_block(update, empty_cache(), **SHAPE)


def test_an_update_that_ignores_the_slots_is_refused() -> None:
    def update(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        strided(NHD)(key, value, cache, slots % TOKENS)

    with pytest.raises(LayoutError, match="no permutation"):
        probe_block(update, empty_cache(), **SHAPE)


def test_an_update_that_keeps_values_only_is_refused() -> None:
    def update(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        strided(NHD)(value, value, cache, slots)

    with pytest.raises(LayoutError, match="no permutation"):
        probe_block(update, empty_cache(), **SHAPE)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float64])
def test_a_cache_of_another_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(LayoutError, match=f"dtype {str(dtype).removeprefix('torch.')} is not handed over"):
        probe_block(strided(NHD), empty_cache(dtype=dtype), **SHAPE)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(3, 2, TOKENS, HEADS, DIM + 1),
        torch.zeros(3, HEADS, TOKENS, DIM),
    ],
    ids=["another size", "keys only"],
)
def test_a_block_of_another_size_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"a block of shape \(.*\) does not hold \(2, 2, 8, 16\)"):
        probe_block(strided(NHD), cache, **SHAPE)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, 3, TOKENS, HEADS, DIM).transpose(0, 1),
        torch.zeros(3, 2 * ELEMENTS)[:, :ELEMENTS],
        torch.zeros(3, 4, 2, TOKENS, HEADS, DIM)[:, 1],
    ],
    ids=["K and V apart", "padded", "other layers' blocks between"],
)
def test_blocks_that_do_not_lie_one_behind_the_other_are_refused(cache: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match=r"apart, with others between or inside them: VLLM_KV_CACHE_LAYOUT=HND"):
        probe_block(strided(NHD), cache, **SHAPE)


def test_keys_of_all_blocks_before_their_values_are_refused() -> None:
    with pytest.raises(LayoutError, match="all keys lie before all values"):
        probe_block(strided(NHD), torch.zeros(2, 3, TOKENS, HEADS, DIM), **SHAPE)


def test_a_backend_without_a_cache_update_is_refused_by_name() -> None:
    class Fused: ...

    with pytest.raises(LayoutError, match="Fused has no separate cache update"):
        backend_update(SimpleNamespace(impl=Fused()))


CPU_CASES = [("vec", torch.float32), *((isa, torch.bfloat16) for isa in CPU_ISAS)]


@pytest.mark.parametrize(("isa", "dtype"), CPU_CASES)
def test_vllms_own_cpu_cache_is_read_back_exactly(isa: str, dtype: torch.dtype) -> None:
    heads, dim, block_tokens = 3, 64, 32
    update = backend_update(cpu_layer(isa))
    cache = torch.zeros(6, heads, block_tokens, 2 * dim, dtype=dtype)
    block = probe_block(update, cache, kv_heads=heads, head_dim=dim, block_tokens=block_tokens)
    for tokens in (1, 31, 32, 33, 95, 128):
        recovered(update, block, cache, tokens)


def latent_layer(impl: Any) -> Any:
    return SimpleNamespace(impl=impl.__new__(impl), kv_cache_dtype="auto", _k_scale=torch.ones(()))


LATENT_IMPLS = [CPUMLAImpl, *([AMXMLAImpl] if torch.cpu._is_amx_tile_supported() else [])]


@pytest.mark.parametrize("impl", LATENT_IMPLS)
def test_vllms_own_latent_cache_has_the_rows_of_its_block(impl: Any) -> None:
    cache = torch.ones(3, 32, 576, dtype=torch.bfloat16)
    check_rows(latent_layer(impl), cache, LatentBlock(32))
    assert bool((cache == 1).all())  # vLLM's own cache is not written to


def test_a_backend_that_writes_other_latent_rows_is_refused_by_name() -> None:
    class RopeFirst(CPUMLAImpl):  # type: ignore[misc]
        def do_kv_cache_update(self, latents: Any, ropes: Any, *others: Any) -> None:
            super().do_kv_cache_update(ropes.squeeze(1), latents.unsqueeze(1), *others)

    with pytest.raises(LayoutError, match="RopeFirst writes other rows than those of LatentBlock"):
        check_rows(latent_layer(RopeFirst), torch.zeros(3, 32, 576, dtype=torch.bfloat16), LatentBlock(32))
