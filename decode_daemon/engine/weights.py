"""The matrices that a step multiplies with, from a Hugging Face folder or from the fused form of one.

Names, shapes and dtypes of the whole checkpoint are checked from the files' headers before the first byte of data is read.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from decode_daemon.engine.checkpoint import SafetensorsFiles, check, layer_name, recipes, safetensors_paths, stacked
from decode_daemon.engine.config import LlamaConfig
from decode_daemon.engine.fused import is_fused, open_fused


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; matrices are [outputs, inputs], rows in the order their names say."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    output: torch.Tensor  # [hidden, heads * head_dim]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model; `head` is `embedding` itself when the two are tied."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]


def load_weights(model_dir: Path, config: LlamaConfig, dtype: torch.dtype) -> Weights:
    """Read the checkpoint in `model_dir` (one safetensors file, a sharded index, or the fused form), cast to `dtype`.

    Tensors of the fused form that are `dtype` already are mapped from its files: nothing is copied, and processes share them.
    Nothing may write to them. Both forms of one model give the same bits.

    Raises EngineError naming the tensor that is missing, unexpected, of another shape or of a dtype that is not a plain
    float, or the file that cannot be read.
    """
    with ExitStack() as files:
        if is_fused(model_dir):
            fused = open_fused(model_dir, config, dtype, files)
            return _assembled(config, lambda name: fused.tensor(name).to(dtype))
        checkpoint = SafetensorsFiles(model_dir, safetensors_paths(model_dir), files)
        check(checkpoint, config)
        made = recipes(config)
        return _assembled(config, lambda name: stacked(checkpoint, made[name], dtype))


def _assembled(config: LlamaConfig, tensor: Callable[[str], torch.Tensor]) -> Weights:
    """Return the model made of what `tensor` gives for the names of `recipes`."""
    names = recipes(config).keys()

    def layer(index: int) -> LayerWeights:
        full = {field: layer_name(index, field) for field in LayerWeights.__dataclass_fields__}
        return LayerWeights(**{field: tensor(name) if name in names else None for field, name in full.items()})  # type: ignore[arg-type]

    embedding = tensor("embedding")
    return Weights(
        embedding=embedding,
        layers=tuple(map(layer, range(config.layers))),
        final_norm=tensor("final_norm"),
        head=embedding if config.tied else tensor("head"),
    )
