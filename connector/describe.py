"""What vLLM's registered KV caches are, as the layout that a daemon reads them by.

Decided by what a cache is and by what its backend writes into one like it, never by vLLM's version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from connector.probe import Elements, backend_update, check_rows, probe_block
from handoff.blocks import QUANT_GROUP
from handoff.layout import Block, Digit, GqaBlock, IndexBlock, KindLayout, KVLayout, LatentBlock, Layer, LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_inc": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_INDEX_GROUP_BYTES = QUANT_GROUP + 4  # of 128 values and their scale


@dataclass(frozen=True, slots=True)
class _Found:
    block: Block
    key_scale: float | None = None
    value_scale: float | None = None


def describe(vllm_config: "VllmConfig", caches: Mapping[str, torch.Tensor]) -> KVLayout:
    """Return the layout of `caches`, whose order says nothing: that of vLLM's layers is the order in which they run.

    Raises LayoutError, naming the layer and its cache's shape, for a cache that cannot be handed over.
    """
    if not caches:
        raise LayoutError("vLLM registered no KV cache")
    layers = vllm_config.compilation_config.static_forward_context
    found: dict[str, _Found] = {}
    for name in sorted(caches, key=list(layers).index):
        cache = caches[name]
        try:
            found[name] = _of_layer(vllm_config, layers[name], cache)
        except LayoutError as error:
            raise LayoutError(f"layer {name!r} with a KV cache of {_shown(cache)} cannot be handed over: {error}") from error
    _require_one_dtype(found)
    different = list(dict.fromkeys(one.block for one in found.values()))
    layout = KVLayout(
        tuple(Layer(name, different.index(one.block), one.key_scale, one.value_scale) for name, one in found.items()),
        tuple(different),
    )
    layout.validate()
    ranks = vllm_config.parallel_config.world_size
    if ranks > 1 and not layout.replicated and not all(isinstance(block, GqaBlock) for block in different):
        raise LayoutError(f"of {ranks} ranks, each has its own heads and a copy of the latent cache: start vLLM with one rank")
    return layout


def _of_layer(config: "VllmConfig", layer: Any, cache: torch.Tensor) -> _Found:
    if not isinstance(cache, torch.Tensor):
        raise LayoutError("it is no single tensor of attention blocks")
    block_tokens = config.cache_config.block_size
    if hasattr(layer, "kv_lora_rank"):
        return _Found(_latent(layer, _kernel_view(layer, cache), block_tokens))
    if not hasattr(layer, "impl"):
        return _Found(_index(layer, _kernel_view(layer, cache), block_tokens))
    return _grouped_query(config, layer, _kernel_view(layer, cache), block_tokens)


def _kernel_view(layer: Any, cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as the layer's kernels see it: a block of vLLM's block table may be several of theirs."""
    bound = getattr(layer, "kv_cache", None)
    if isinstance(bound, torch.Tensor) and bound.data_ptr() == cache.data_ptr() and bound.numel() == cache.numel():
        return bound
    return cache


def _grouped_query(config: "VllmConfig", layer: Any, cache: torch.Tensor, block_tokens: int) -> _Found:
    model = config.model_config
    heads = getattr(layer, "num_kv_heads", None) or model.get_num_kv_heads(config.parallel_config)
    dim = getattr(layer, "head_size", None) or model.get_head_size()
    elements = _elements(config, layer, cache)
    kernel_tokens, rest = divmod(cache[0].numel(), 2 * heads * dim)
    if rest or kernel_tokens == 0 or block_tokens % kernel_tokens:
        kernel_tokens = block_tokens  # no whole part of a block: the probe says what is wrong with it
    update = backend_update(layer)
    block = probe_block(update, cache, kv_heads=heads, head_dim=dim, block_tokens=kernel_tokens, elements=elements)
    scales = (elements.key_scale, elements.value_scale) if elements.stored != elements.given else (None, None)
    return _Found(_repeated(block, block_tokens // kernel_tokens), *scales)


def _elements(config: "VllmConfig", layer: Any, cache: torch.Tensor) -> Elements:
    if cache.dtype not in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2):
        return Elements(cache.dtype, cache.dtype)
    name = layer.kv_cache_dtype
    if name not in _FP8:
        raise LayoutError(f"KV cache dtype {name!r} is not handed over (of the quantized ones {', '.join(_FP8)} are)")
    _require_plain_fp8()
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise LayoutError("its scales are calculated in the first step: start vLLM without --calculate-kv-scales")
    if layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1:
        raise LayoutError("its heads have scales of their own, of which a layer can have only one for keys, one for values")
    return Elements(_FP8[name], config.model_config.dtype, float(layer._k_scale_float), float(layer._v_scale_float))


def _repeated(block: GqaBlock, times: int) -> GqaBlock:
    """Describe `times` blocks that follow one another as one."""
    if times == 1:
        return block

    def longer(kind: KindLayout) -> KindLayout:
        return msgspec.structs.replace(kind, token=(Digit(times, block.elements), *kind.token))

    return msgspec.structs.replace(
        block, block_tokens=times * block.block_tokens, keys=longer(block.keys), values=longer(block.values)
    )


def _latent(layer: Any, cache: torch.Tensor, block_tokens: int) -> LatentBlock:
    if cache.dtype == torch.bfloat16:
        block = LatentBlock(block_tokens, layer.kv_lora_rank, layer.qk_rope_head_dim)
    elif cache.dtype == torch.uint8 and layer.kv_cache_dtype == "fp8_ds_mla":
        _require_plain_fp8()
        block = LatentBlock(block_tokens, layer.kv_lora_rank, layer.qk_rope_head_dim, "fp8_ds_mla")
    else:
        raise LayoutError(f"latent KV of dtype {layer.kv_cache_dtype!r} is not handed over: bfloat16 and fp8_ds_mla are")
    block.validate()
    rows = _rows(cache, block_tokens)
    if rows.shape[2] * rows.element_size() != block.row_bytes:
        raise LayoutError(f"its rows have {rows.shape[2] * rows.element_size()} bytes, not {block.row_bytes} as {block} has")
    check_rows(layer, rows, block)
    return block


def _index(layer: Any, cache: torch.Tensor, block_tokens: int) -> IndexBlock:
    width = getattr(layer, "head_dim", 0)
    if cache.dtype != torch.uint8 or cache.shape[-1] != width or width % _INDEX_GROUP_BYTES:
        raise LayoutError(f"{type(layer).__name__} is no layer whose KV cache is known")
    _require_plain_fp8()
    if getattr(layer, "uses_shuffled_layout", False):
        raise LayoutError("its index keys are shuffled")
    rows = _rows(cache, block_tokens)
    if rows.shape[1] != block_tokens:
        raise LayoutError(
            f"its pages of {rows.shape[1]} tokens are parts of blocks of {block_tokens}: start vLLM with "
            f"--block-size {rows.shape[1]}"
        )
    block = IndexBlock(block_tokens, width // _INDEX_GROUP_BYTES * QUANT_GROUP)
    block.validate()
    return block


def _rows(cache: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Return [blocks, tokens, row] of a cache with one row a token."""
    rows = cache.squeeze(1) if cache.dim() == 4 else cache  # with an axis of one head in vLLM's later versions
    if rows.dim() != 3 or not rows.is_contiguous() or block_tokens % rows.shape[1]:
        raise LayoutError(f"it is no contiguous [blocks, {block_tokens} tokens, row]")
    return rows


def _require_plain_fp8() -> None:
    if torch.version.hip is not None:
        raise LayoutError("AMD's fp8 caches have numbers and orders of their own: start vLLM with --kv-cache-dtype auto")


def _require_one_dtype(found: Mapping[str, _Found]) -> None:
    """An engine has one dtype for keys and values, and a daemon agrees to one: name two layers that differ."""
    first: dict[str, str] = {}
    for name, one in found.items():
        if isinstance(one.block, GqaBlock):
            first.setdefault(one.block.dtype, name)
    if len(first) > 1:
        shown = ", ".join(f"{dtype} ({name!r} and on)" for dtype, name in first.items())
        raise LayoutError(f"KV dtype differs between layers: {shown}; give them one with --kv-cache-dtype")


def _shown(cache: object) -> str:
    if isinstance(cache, torch.Tensor):
        return f"shape {tuple(cache.shape)}, dtype {str(cache.dtype).removeprefix('torch.')}"
    return f"type {type(cache).__name__}"
