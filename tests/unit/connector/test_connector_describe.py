"""Each kind of KV cache that vLLM registers is described as its backend writes it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector.describe import describe
from decode_daemon.convert import convert
from decode_daemon.convert_latent import convert_latent
from handoff.layout import GqaBlock, IndexBlock, KVLayout, LatentBlock, Layer, contiguous_block
from tests.kit.vllm_caches import (
    ATTENTION,
    DIM,
    HEADS,
    INDEXER,
    attention,
    index_layers,
    latent_layers,
    registered,
    vllm_config,
    with_fp8_caches,
    write_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture
def config(model_dir: Path) -> Any:
    return vllm_config(model_dir)


def written(config: Any, layers: list[Any], caches: dict[str, torch.Tensor], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of [layers, heads, tokens, dim] that lie, by vLLM's own cache update, in the first blocks of the caches."""
    keys, values = torch.randn(2, len(layers), HEADS, tokens, DIM, generator=torch.Generator().manual_seed(5)).bfloat16()
    for layer, cache, key, value in zip(layers, caches.values(), keys, values, strict=True):
        bound = layer.kv_cache if layer.kv_cache.numel() else cache
        layer.impl.do_kv_cache_update(
            layer, key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous(), bound, torch.arange(tokens)
        )
    return keys, values


def read(layout: KVLayout, caches: dict[str, torch.Tensor], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a daemon makes of the caches' first blocks."""
    first = [caches[layer.name].flatten().view(torch.uint8)[:size] for layer, size in sizes(layout, tokens)]
    keys, values = torch.empty(2, len(layout.layers), HEADS, tokens, DIM, dtype=torch.bfloat16)
    convert(torch.cat(first), layout, keys, values)
    return keys, values


def sizes(layout: KVLayout, tokens: int) -> list[tuple[Layer, int]]:
    return [(layer, layout.blocks_for(tokens) * layout.block_bytes(index)) for index, layer in enumerate(layout.layers)]


def test_vllms_cpu_cache_is_described_in_the_order_in_which_layers_run(config: Any) -> None:
    layers = attention(config)
    caches = registered(config)
    keys, values = written(config, layers, caches, 70)
    layout = describe(config, dict(reversed(caches.items())))
    assert layout.layers == (Layer(ATTENTION[0], 0), Layer(ATTENTION[1], 0))
    (block,) = layout.blocks
    assert isinstance(block, GqaBlock)
    assert (block.kv_heads, block.head_dim, block.block_tokens, block.dtype) == (HEADS, DIM, 32, "bfloat16")
    found_keys, found_values = read(layout, caches, 70)
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_values, values)


def test_a_block_that_kernels_see_as_several_is_described_whole(model_dir: Path) -> None:
    config = vllm_config(model_dir, block_size=128)
    layers = attention(config)
    caches = registered(config)
    for layer, cache in zip(layers, caches.values(), strict=True):
        layer.kv_cache = cache.view(8, HEADS, 64, 2 * DIM)
    keys, values = written(config, layers, caches, 300)
    layout = describe(config, caches)
    assert layout.block_tokens == 128
    found_keys, found_values = read(layout, caches, 300)
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_values, values)


@with_fp8_caches
@pytest.mark.parametrize(("cache_dtype", "stored"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_an_fp8_cache_is_described_with_its_layers_scales(model_dir: Path, cache_dtype: str, stored: str) -> None:
    config = vllm_config(model_dir, cache_dtype=cache_dtype)
    for layer, scale in zip(attention(config), (0.5, 0.3), strict=True):  # as a checkpoint gives them
        layer._k_scale_float, layer._v_scale_float = scale, 2 * scale
    layout = describe(config, registered(config, dtype=torch.uint8))
    assert layout.layers == (Layer(ATTENTION[0], 0, 0.5, 1.0), Layer(ATTENTION[1], 0, 0.3, 0.6))
    (block,) = layout.blocks
    assert isinstance(block, GqaBlock)
    assert block.dtype == stored


class TokenMajor:
    """Writes as vLLM's reshape_and_cache_flash does, whatever the memory behind the two views is."""

    def __init__(self, views: Any) -> None:
        self.views = views

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for view, source in zip(self.views(cache), (key, value), strict=True):
            tokens = view.shape[1]
            view[slots // tokens, slots % tokens] = source


def side_by_side(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return cache.transpose(1, 2).chunk(2, dim=-1)


def first_kind(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return cache.unbind(1)


FLASH = {
    # [blocks, kind, tokens, heads, dim] of vLLM 0.24; its HND has the same axes on other memory.
    "NHD": (first_kind, torch.zeros(4, 2, 16, HEADS, DIM), ("kind", "token", "head", "dim")),
    "HND": (first_kind, torch.zeros(4, 2, HEADS, 16, DIM).transpose(2, 3), ("kind", "head", "token", "dim")),
    # [blocks, heads, tokens, kind and dim] of vLLM 0.32.
    "LBHNC": (side_by_side, torch.zeros(4, HEADS, 16, 2 * DIM), ("head", "token", "kind", "dim")),
    "LBNHC": (side_by_side, torch.zeros(4, 16, HEADS, 2 * DIM).transpose(1, 2), ("token", "head", "kind", "dim")),
}


@pytest.mark.parametrize("name", FLASH)
def test_flash_attentions_orders_are_those_that_it_has_on_gpus(model_dir: Path, name: str) -> None:
    views, cache, order = FLASH[name]
    config = vllm_config(model_dir, block_size=16)
    for layer in attention(config):
        layer.impl = TokenMajor(views)
    layout = describe(config, {name: cache.bfloat16() for name in ATTENTION})
    expected = contiguous_block(kv_heads=HEADS, head_dim=DIM, block_tokens=16, dtype="bfloat16", order=order)  # type: ignore[arg-type]
    (block,) = layout.blocks
    assert isinstance(block, GqaBlock)
    assert (block.keys.places(), block.values.places()) == (expected.keys.places(), expected.values.places())


@pytest.mark.parametrize("heads", [(), (1,)], ids=["3 axes", "4 axes"])
def test_latent_rows_of_bfloat16_are_described_and_read_back(model_dir: Path, heads: tuple[int, ...]) -> None:
    config = vllm_config(model_dir, block_size=64)
    latent_layers(config)
    caches = {name: torch.zeros(3, *heads, 64, 576, dtype=torch.bfloat16) for name in ATTENTION}
    latents, ropes = torch.randn(2, 100, 512).bfloat16(), torch.randn(2, 100, 64).bfloat16()
    for index, (name, cache) in enumerate(caches.items()):
        layer = config.compilation_config.static_forward_context[name]
        rows = latents[index], ropes[index].unsqueeze(1)
        layer.impl.do_kv_cache_update(*rows, cache.view(3, 64, 576), torch.arange(100), "auto", layer._k_scale)
    layout = describe(config, caches)
    assert layout == KVLayout(tuple(Layer(name, 0) for name in ATTENTION), (LatentBlock(64),))
    found, turned = torch.empty_like(latents), torch.empty_like(ropes)
    landed = torch.cat([cache.flatten().view(torch.uint8)[: 2 * 64 * 1152] for cache in caches.values()])
    convert_latent(landed, layout, found, turned)
    assert torch.equal(found, latents)
    assert torch.equal(turned, ropes)


class PackedRows:
    """Writes rows of 656 bytes: the values, the scales of 128 each, the rope part."""

    def do_kv_cache_update(
        self, latents: torch.Tensor, ropes: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, dtype: str, scale: Any
    ) -> None:
        assert dtype == "fp8_ds_mla"
        groups = latents.float().view(-1, 4, 128)
        scales = groups.abs().amax(2, keepdim=True) / 448
        values = (groups / scales).to(torch.float8_e4m3fn).flatten(1)
        parts = (values, scales.flatten(1), ropes.squeeze(1))
        cache.view(-1, 656)[slots] = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


@pytest.mark.parametrize("impl", [PackedRows(), SimpleNamespace()], ids=["probed", "by its shape"])
def test_a_sparse_models_two_caches_are_described_each_by_its_block(model_dir: Path, impl: Any) -> None:
    config = vllm_config(model_dir, block_size=64)
    latent_layers(config, impl, "fp8_ds_mla")
    index_layers(config)
    caches = {name: torch.zeros(3, 64, 656, dtype=torch.uint8) for name in ATTENTION}
    caches |= {name: torch.zeros(3, 64, 132, dtype=torch.uint8) for name in INDEXER}
    layout = describe(config, caches)
    assert layout.blocks == (LatentBlock(64, form="fp8_ds_mla"), IndexBlock(64))
    assert [(layer.name, layer.block) for layer in layout.layers] == [
        *((name, 0) for name in ATTENTION),
        *((name, 1) for name in INDEXER),
    ]
    assert layout.replicated
