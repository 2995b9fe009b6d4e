"""Reads a Hugging Face folder's safetensors into the fused matrices that a step multiplies with.

Names, shapes and dtypes of the whole checkpoint are checked from the files' headers before the first byte of data is read.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from decode_daemon.engine.config import LlamaConfig, read_json
from decode_daemon.engine.protocol import EngineError

_READABLE_DTYPES = ("BF16", "F16", "F32")


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
    """Read the checkpoint in `model_dir` (one safetensors file or a sharded index), cast to `dtype`.

    Raises EngineError naming the tensor that is missing, unexpected, of another shape or of a dtype that is not a plain
    float, or the file that cannot be read.
    """
    with ExitStack() as files:
        checkpoint = _Checkpoint(model_dir, files, dtype)
        checkpoint.check(expected_shapes(config), _ignorable(config))
        embedding = checkpoint.fused("model.embed_tokens.weight")
        return Weights(
            embedding=embedding,
            layers=tuple(_layer(checkpoint, config, index) for index in range(config.layers)),
            final_norm=checkpoint.fused("model.norm.weight"),
            head=embedding if config.tied else checkpoint.fused("lm_head.weight"),
        )


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor the checkpoint must hold, by its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden)
    for index in range(config.layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def _layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    query_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (config.hidden,),
        "self_attn.q_proj.weight": (query_rows, config.hidden),
        "self_attn.k_proj.weight": (kv_rows, config.hidden),
        "self_attn.v_proj.weight": (kv_rows, config.hidden),
        "self_attn.o_proj.weight": (config.hidden, query_rows),
        "post_attention_layernorm.weight": (config.hidden,),
        "mlp.gate_proj.weight": (config.intermediate, config.hidden),
        "mlp.up_proj.weight": (config.intermediate, config.hidden),
        "mlp.down_proj.weight": (config.hidden, config.intermediate),
    }
    if config.qkv_bias:
        shapes["self_attn.q_proj.bias"] = (query_rows,)
        shapes["self_attn.k_proj.bias"] = shapes["self_attn.v_proj.bias"] = (kv_rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _ignorable(config: LlamaConfig) -> frozenset[str]:
    """Return tensors that some exporters write although the config already says what they hold."""
    names = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.layers)}
    return frozenset(names | {"lm_head.weight"} if config.tied else names)


def _layer(checkpoint: "_Checkpoint", config: LlamaConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."

    def tensor(*names: str) -> torch.Tensor:
        return checkpoint.fused(*(prefix + name for name in names))

    def projections(kind: str) -> torch.Tensor:
        return tensor(*(f"self_attn.{part}_proj.{kind}" for part in "qkv"))

    return LayerWeights(
        input_norm=tensor("input_layernorm.weight"),
        qkv=projections("weight"),
        qkv_bias=projections("bias") if config.qkv_bias else None,
        q_norm=tensor("self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=tensor("self_attn.k_norm.weight") if config.qk_norm else None,
        output=tensor("self_attn.o_proj.weight"),
        post_norm=tensor("post_attention_layernorm.weight"),
        gate_up=tensor("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=tensor("mlp.down_proj.weight"),
    )


class _Checkpoint:
    """The open files of one checkpoint, and which of them holds each tensor."""

    def __init__(self, model_dir: Path, files: ExitStack, dtype: torch.dtype) -> None:
        self._dir = model_dir
        self._dtype = dtype
        self._owner: dict[str, Any] = {}  # safetensors types its open files only in part
        for path in _safetensors_files(model_dir):
            try:
                opened = files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{path} cannot be opened as safetensors: {error}") from error
            self._owner |= dict.fromkeys(opened.keys(), opened)

    def check(self, shapes: dict[str, tuple[int, ...]], ignorable: frozenset[str]) -> None:
        """Raise EngineError unless the files hold `shapes`, and nothing else but `ignorable`."""
        if missing := sorted(shapes.keys() - self._owner.keys()):
            raise EngineError(f"{self._dir} lacks tensor {_some(missing)}: download the model again")
        if unexpected := sorted(self._owner.keys() - shapes.keys() - ignorable):
            raise EngineError(f"{self._dir} holds tensor {_some(unexpected)}, which its config.json has no place for")
        for name, shape in shapes.items():
            part = self._owner[name].get_slice(name)
            if tuple(part.get_shape()) != shape:
                found = list(part.get_shape())
                raise EngineError(f"{self._dir}: tensor {name} is {found}, config.json asks for {list(shape)}")
            if part.get_dtype() not in _READABLE_DTYPES:
                readable = ", ".join(_READABLE_DTYPES)
                raise EngineError(f"{self._dir}: tensor {name} is {part.get_dtype()}, this engine reads {readable}")

    def fused(self, *names: str) -> torch.Tensor:
        """Return the named tensors stacked along their first dimension, in memory of their own."""
        parts: Iterator[torch.Tensor] = (self._owner[name].get_tensor(name).to(self._dtype) for name in names)
        return torch.cat(tuple(parts)).contiguous()


def _safetensors_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise EngineError(f"{index}: weight_map is {weight_map!r}, not an object of tensor and file names")
        return [model_dir / name for name in sorted(set(map(str, weight_map.values())))]
    single = model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    raise EngineError(f"{model_dir} has neither model.safetensors nor {index.name}: save the model as safetensors")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
