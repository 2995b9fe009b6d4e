"""vLLM's own configuration and layers, as small as they can be, and KV caches as it registers them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

HEADS, DIM = 2, 32
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * DIM,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
ATTENTION = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
INDEXER = ("model.layers.0.self_attn.indexer.k_cache", "model.layers.1.self_attn.indexer.k_cache")


# Orders that vLLM's kernels for x86 CPUs have here.
CPU_ISAS = ["vec", "vec16", *(["amx"] if torch.cpu._is_amx_tile_supported() else [])]

with_fp8_caches = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM has fp8 caches on CPUs with AVX-512 or AMX only",
)


def cpu_layer(isa: str, cache_dtype: str = "auto", key_scale: float = 1.0, value_scale: float = 1.0) -> Any:
    """As much of an attention layer as vLLM's own cache update for CPUs reads."""
    impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    impl.attn_type, impl.kv_cache_dtype = AttentionType.DECODER, cache_dtype
    return SimpleNamespace(impl=impl, isa=isa, _k_scale_float=key_scale, _v_scale_float=value_scale)


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(TINY))


def vllm_config(model_dir: Path, *, block_size: int = 32, cache_dtype: str = "auto") -> Any:
    model = ModelConfig(model=str(model_dir), skip_tokenizer_init=True, dtype="bfloat16")
    return VllmConfig(model_config=model, cache_config=CacheConfig(block_size=block_size, cache_dtype=cache_dtype))


def attention(config: Any, isa: str = "vec") -> list[Any]:
    """vLLM's own attention layers, made as its models make them."""
    with set_current_vllm_config(config):
        layers = [Attention(HEADS, DIM, 1.0, HEADS, cache_config=config.cache_config, prefix=name) for name in ATTENTION]
    for layer in layers:
        layer.isa = isa  # as the backend's metadata builder sets it
    return layers


def registered(config: Any, blocks: int = 4, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Caches as vLLM registers them on a CPU, filled with noise."""
    generator = torch.Generator().manual_seed(4)
    shape = (blocks, HEADS, config.cache_config.block_size, 2 * DIM)
    return {name: torch.randint(0, 9, shape, generator=generator).to(dtype) for name in ATTENTION}


def latent_layers(config: Any, impl: Any = None, dtype: str = "auto", latent: int = 512, rope: int = 64) -> None:
    """Layers with what describes vLLM's MLAAttention."""
    for name in ATTENTION:
        config.compilation_config.static_forward_context[name] = SimpleNamespace(
            impl=impl or CPUMLAImpl.__new__(CPUMLAImpl),
            kv_lora_rank=latent,
            qk_rope_head_dim=rope,
            kv_cache_dtype=dtype,
            _k_scale=torch.ones(()),
        )


def index_layers(config: Any, width: int = 132) -> None:
    with set_current_vllm_config(config):
        for name in INDEXER:
            DeepseekV32IndexerCache(width, torch.uint8, name, config.cache_config)
