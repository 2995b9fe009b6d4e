"""The models that are measured: shapes of published ones, random weights made on the device, and the bytes of a step."""

from dataclasses import replace
from typing import Any

import torch

from decode_daemon.engine.config import Llama3Scaling, LlamaConfig
from decode_daemon.engine.weights import LayerWeights, Weights

_LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)

LLAMA_8B = LlamaConfig(
    architecture="LlamaForCausalLM",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_positions=131072,
    rms_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=_LLAMA3,
    tied=False,
    qkv_bias=False,
    qk_norm=False,
)
LLAMA_1B = replace(LLAMA_8B, layers=16, hidden=2048, intermediate=8192, head_dim=64, tied=True)
SHAPES = {"8B": LLAMA_8B, "1B": LLAMA_1B}


def random_weights(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, scale: float = 0.02
) -> Weights:
    """Return normally distributed weights of deviation `scale`; norms' are around one."""
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(mean, scale, generator=generator)

    query_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=tensor(config.hidden, mean=1.0),
            qkv=tensor(query_rows + 2 * kv_rows, config.hidden),
            qkv_bias=tensor(query_rows + 2 * kv_rows) if config.qkv_bias else None,
            q_norm=tensor(config.head_dim, mean=1.0) if config.qk_norm else None,
            k_norm=tensor(config.head_dim, mean=1.0) if config.qk_norm else None,
            output=tensor(config.hidden, query_rows),
            post_norm=tensor(config.hidden, mean=1.0),
            gate_up=tensor(2 * config.intermediate, config.hidden),
            down=tensor(config.hidden, config.intermediate),
        )
        for _ in range(config.layers)
    )
    embedding = tensor(config.vocab_size, config.hidden)
    head = embedding if config.tied else tensor(config.vocab_size, config.hidden)
    return Weights(embedding=embedding, layers=layers, final_norm=tensor(config.hidden, mean=1.0), head=head)


def step_bytes(config: LlamaConfig, context: int, element_bytes: int = 2, layer_bytes: int | None = None) -> int:
    """Return what a step must read: every matrix once, and K and V of `context` positions. The embedding is a few rows.

    A weight of the layers has `layer_bytes`, the head's and the cache's elements `element_bytes`, which is the default of both.
    """
    dim = config.head_dim
    attention = config.hidden * (2 * config.heads + 2 * config.kv_heads) * dim
    matrices = config.layers * (attention + 3 * config.hidden * config.intermediate)
    rest = config.vocab_size * config.hidden + context * config.layers * 2 * config.kv_heads * dim
    return (layer_bytes or element_bytes) * matrices + element_bytes * rest


def hugging_face(config: LlamaConfig) -> dict[str, Any]:
    """Return config.json of a shape, for vLLM with dummy weights."""
    assert isinstance(config.rope_scaling, Llama3Scaling)
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_position_embeddings,
        },
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
