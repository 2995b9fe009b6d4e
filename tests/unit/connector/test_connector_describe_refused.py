"""A KV cache that cannot be handed over ends vLLM's start, with the layer's name, the cache's shape, and why."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

from connector.describe import describe
from handoff.layout import LayoutError
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


def refused(config: Any, caches: dict[str, Any], message: str, shape: str | None = None) -> None:
    """Refused by `message`, with the last layer's name and its cache's shape before it."""
    name, cache = list(caches.items())[-1]
    shown = shape or f"shape {tuple(cache.shape)}, dtype {str(cache.dtype).removeprefix('torch.')}"
    with pytest.raises(LayoutError) as caught:
        describe(config, caches)
    assert str(caught.value).startswith(f"layer '{name}' with a KV cache of {shown} cannot be handed over: ")
    assert message in str(caught.value)


def test_no_cache_at_all_is_refused(config: Any) -> None:
    with pytest.raises(LayoutError, match="vLLM registered no KV cache"):
        describe(config, {})


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(2, 4, 32, HEADS, DIM), "all keys lie before all values"),
        (torch.zeros(4, HEADS, 32, DIM), "no permutation of a block's elements"),
        (torch.zeros(4, HEADS, 32, 2 * DIM + 1), "does not hold (2, 2, 32, 32)"),
        (torch.zeros(4, HEADS, 32, 2 * DIM, dtype=torch.float64), "KV cache dtype float64 is not handed over"),
        (torch.zeros(4, 2, HEADS, 32, 2 * DIM)[:, 0], "VLLM_KV_CACHE_LAYOUT=HND"),
    ],
    ids=["K and V apart", "keys only", "padded rows", "dtype", "layers interleaved"],
)
def test_an_unknown_shape_is_refused_with_its_layer(config: Any, cache: torch.Tensor, message: str) -> None:
    attention(config)
    refused(config, {ATTENTION[0]: cache}, message)


def test_a_cache_that_is_no_tensor_is_refused_with_its_layer(config: Any) -> None:
    attention(config)
    refused(config, {ATTENTION[0]: [torch.zeros(3)]}, "no single tensor", "type list")


def test_a_layer_of_an_unknown_kind_is_refused_by_its_class(config: Any) -> None:
    class StateSpace: ...

    config.compilation_config.static_forward_context[ATTENTION[0]] = StateSpace()
    refused(config, {ATTENTION[0]: torch.zeros(4, 100)}, "StateSpace is no layer whose KV cache is known")


def test_a_quantized_cache_of_another_format_is_refused_by_its_name(config: Any) -> None:
    for layer in attention(config):
        layer.kv_cache_dtype = "nvfp4"
    refused(config, {ATTENTION[0]: torch.zeros(4, HEADS, 32, 2 * DIM, dtype=torch.uint8)}, "KV cache dtype 'nvfp4'")


def test_scales_of_single_heads_are_refused(model_dir: Path) -> None:
    config = vllm_config(model_dir, cache_dtype="fp8")
    attention(config)[0]._k_scale = torch.ones(HEADS)
    refused(config, {ATTENTION[0]: registered(config, dtype=torch.uint8)[ATTENTION[0]]}, "its heads have scales of their own")


def test_scales_that_are_not_known_yet_are_refused(model_dir: Path) -> None:
    config = vllm_config(model_dir, cache_dtype="fp8")
    attention(config)
    config.cache_config.calculate_kv_scales = True  # a setting of earlier versions
    refused(config, {ATTENTION[0]: registered(config, dtype=torch.uint8)[ATTENTION[0]]}, "without --calculate-kv-scales")


def test_keys_and_values_of_two_dtypes_are_refused_by_two_layers_names(config: Any) -> None:
    attention(config)
    caches = registered(config)
    caches[ATTENTION[1]] = caches[ATTENTION[1]].float()
    message = rf"KV dtype differs between layers: bfloat16 \('{ATTENTION[0]}' and on\), float32 \('{ATTENTION[1]}' and on\)"
    with pytest.raises(LayoutError, match=message):
        describe(config, caches)


@pytest.mark.parametrize(
    ("shape", "dtype", "name", "message"),
    [
        ((3, 32, 576), torch.float16, "auto", "latent KV of dtype 'auto' is not handed over"),
        ((3, 32, 576), torch.uint8, "fp8", "latent KV of dtype 'fp8' is not handed over"),
        ((3, 32, 584), torch.uint8, "fp8_ds_mla", "its rows have 584 bytes, not 656"),
        ((3, 24, 576), torch.bfloat16, "auto", "it is no contiguous [blocks, 32 tokens, row]"),
        ((3, 2, 32, 576), torch.bfloat16, "auto", "it is no contiguous [blocks, 32 tokens, row]"),
    ],
)
def test_other_latent_caches_are_refused(
    config: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str, message: str
) -> None:
    latent_layers(config, dtype=name)
    refused(config, {ATTENTION[0]: torch.zeros(shape, dtype=dtype)}, message)


def test_latent_rows_are_refused_where_the_backend_writes_others(config: Any) -> None:
    latent_layers(config, latent=448, rope=128)
    other = config.compilation_config.static_forward_context[ATTENTION[0]]
    other.impl = SimpleNamespace(do_kv_cache_update=lambda latents, ropes, cache, *_: cache.fill_(1))
    refused(config, {ATTENTION[0]: torch.zeros(3, 32, 576, dtype=torch.bfloat16)}, "writes other rows than those of")


def test_index_pages_smaller_than_a_block_are_refused_with_the_size_to_choose(model_dir: Path) -> None:
    config = vllm_config(model_dir, block_size=128)
    index_layers(config)
    layer = config.compilation_config.static_forward_context[INDEXER[0]]
    cache = torch.zeros(3, 128, 132, dtype=torch.uint8)
    layer.kv_cache = cache.view(6, 64, 132)
    refused(config, {INDEXER[0]: cache}, "--block-size 64")


def test_shuffled_index_keys_are_refused(config: Any) -> None:
    class Shuffled(DeepseekV32IndexerCache):  # type: ignore[misc]
        uses_shuffled_layout = True

    with set_current_vllm_config(config):
        Shuffled(132, torch.uint8, INDEXER[0], config.cache_config)
    refused(config, {INDEXER[0]: torch.zeros(3, 32, 132, dtype=torch.uint8)}, "its index keys are shuffled")


@pytest.mark.parametrize(("ranks", "allowed"), [(1, True), (2, False)])
def test_heads_and_latent_rows_in_one_cache_are_refused_on_several_ranks(config: Any, ranks: int, allowed: bool) -> None:
    attention(config)
    index_layers(config)
    config.parallel_config.world_size = ranks
    caches = registered(config) | {name: torch.zeros(3, 32, 132, dtype=torch.uint8) for name in INDEXER}
    if allowed:
        assert not describe(config, caches).replicated
        return
    with pytest.raises(LayoutError, match="of 2 ranks, each has its own heads and a copy of the latent cache"):
        describe(config, caches)
