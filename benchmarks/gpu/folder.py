"""A Hugging Face folder of random weights, so that vLLM and the engine load the same model."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, hugging_face, random_weights
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.weights import Weights

# "8B-4": four of its layers, whose heads and dims are the whole model's. "tiny": for a CPU.
MODELS = {
    "1B": LLAMA_1B,
    "8B": LLAMA_8B,
    "8B-4": replace(LLAMA_8B, layers=4),
    "tiny": replace(
        LLAMA_8B, layers=3, hidden=256, intermediate=512, heads=8, kv_heads=2, head_dim=64, vocab_size=4096, tied=True
    ),
}
_GAIN = 1.4  # of a product: enough that attention has favourites, too little for rounding to grow from layer to layer


def write_folder(folder: Path, config: LlamaConfig, device: torch.device) -> None:
    """Write config.json and model.safetensors of `config` in bfloat16, the weights made on `device`."""
    weights = random_weights(config, torch.bfloat16, device, seed=5, scale=_GAIN / math.sqrt(config.hidden))
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in _named(config, weights)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hugging_face(config)))


def _named(config: LlamaConfig, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor under its name in a Llama checkpoint."""
    yield "model.embed_tokens.weight", weights.embedding
    for index, layer in enumerate(weights.layers):
        rows = [count * config.head_dim for count in (config.heads, config.kv_heads, config.kv_heads)]
        parts = dict(zip(("q", "k", "v"), torch.split(layer.qkv, rows), strict=True))
        gate, up = layer.gate_up.chunk(2)
        named = {f"self_attn.{name}_proj": part for name, part in parts.items()} | {
            "self_attn.o_proj": layer.output,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.post_norm,
        }
        yield from ((f"model.layers.{index}.{name}.weight", tensor) for name, tensor in named.items())
    yield "model.norm.weight", weights.final_norm
    if not config.tied:
        yield "lm_head.weight", weights.head
