"""A model's tensors under their Hugging Face names: which there must be, and which of them a step multiplies with as one."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from decode_daemon.engine.config import LlamaConfig, read_json
from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.tensorfile import DTYPES, TensorForm

_INDEX = "model.safetensors.index.json"  # says which tensor is in which file

# What each tensor of a step's layer is made of: the rows of these, in this order.
_LAYER: dict[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "post_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor of the fused form: the rows of the checkpoint's tensors `parts`, one below the other."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]


class Checkpoint(Protocol):
    """The tensors of one model; what they are is known before any of them is read."""

    @property
    def place(self) -> Path:
        """The folder or file, for messages."""
        ...

    @property
    def forms(self) -> Mapping[str, TensorForm]:
        """Every tensor that is there, by its Hugging Face name."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that `forms` names; not to be written to."""
        ...


def layer_name(index: int, field: str) -> str:
    """Return what `recipes` calls a layer's tensor; `field` is one of `LayerWeights`."""
    return f"layers.{index}.{field}"


def recipes(config: LlamaConfig) -> dict[str, Recipe]:
    """Return every tensor of the fused form, by its name: `embedding`, `final_norm`, `head` unless tied, and the layers'."""
    shapes = expected_shapes(config)
    named: dict[str, tuple[str, ...]] = {
        "embedding": ("model.embed_tokens.weight",),
        "final_norm": ("model.norm.weight",),
    }
    if not config.tied:
        named["head"] = ("lm_head.weight",)
    for index in range(config.layers):
        for field, parts in _LAYER.items():
            full = tuple(f"model.layers.{index}.{part}" for part in parts)
            if full[0] in shapes:  # not every architecture has biases or norms of queries and keys
                named[layer_name(index, field)] = full
    return {
        name: Recipe(parts, (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])) for name, parts in named.items()
    }


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


def check(checkpoint: Checkpoint, config: LlamaConfig) -> None:
    """Raise EngineError unless `checkpoint` holds just the tensors of `config`, in dtypes the engine reads.

    The message names the tensor. What some exporters write although the config already says it is let pass.
    """
    shapes, forms, place = expected_shapes(config), checkpoint.forms, checkpoint.place
    if missing := sorted(shapes.keys() - forms.keys()):
        raise EngineError(f"{place} lacks tensor {_some(missing)}: download the model again")
    if unexpected := sorted(forms.keys() - shapes.keys() - _needless(config)):
        raise EngineError(f"{place} holds tensor {_some(unexpected)}, which its config.json has no place for")
    for name, shape in shapes.items():
        check_form(place, name, forms[name], shape)


def check_form(place: Path, name: str, form: TensorForm, shape: tuple[int, ...]) -> None:
    """Raise EngineError naming tensor `name` in `place` unless it has `shape` and a dtype the engine reads."""
    if form.shape != shape:
        raise EngineError(f"{place}: tensor {name} is {list(form.shape)}, config.json asks for {list(shape)}")
    if form.dtype not in DTYPES:
        raise EngineError(f"{place}: tensor {name} is {form.dtype}, this engine reads {', '.join(DTYPES)}")


def stacked(checkpoint: Checkpoint, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    """Return what `recipe` describes, each part cast to `dtype`, in memory of its own."""
    return torch.cat([checkpoint.tensor(name).to(dtype) for name in recipe.parts]).contiguous()


class SafetensorsFiles:
    """A `Checkpoint` of open safetensors files. Tensors are mapped: they cost memory when they are read."""

    def __init__(self, place: Path, paths: Iterable[Path], files: ExitStack) -> None:
        """Open `paths`, until `files` is closed.

        Raises EngineError naming the file that cannot be opened, or the tensor that is in two of them or not where the
        index in `place` says.
        """
        self.place = place
        self.forms: dict[str, TensorForm] = {}
        self._owner: dict[str, Any] = {}  # safetensors types its open files only in part
        found: dict[str, Path] = {}
        for path in paths:
            try:
                opened = files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{path} cannot be opened as safetensors: {error}") from error
            for name in opened.keys():  # noqa: SIM118 (an open file is no mapping)
                if name in found:
                    raise EngineError(f"tensor {name} is in {found[name]} and in {path}: download the model again")
                found[name] = path
                part = opened.get_slice(name)
                self.forms[name] = TensorForm(part.get_dtype(), tuple(part.get_shape()))
                self._owner[name] = opened
        for name, file in _weight_map(place).items():
            if name in found and found[name] != place / file:
                raise EngineError(f"tensor {name} is in {found[name]}, {place / _INDEX} says {file}: download the model again")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that `forms` names, mapped; not to be written to."""
        tensor: torch.Tensor = self._owner[name].get_tensor(name)
        return tensor


def safetensors_paths(model_dir: Path) -> list[Path]:
    """Return the checkpoint's files: those that the index names where there is one, else model.safetensors.

    Raises EngineError when there is neither.
    """
    if weight_map := _weight_map(model_dir):
        return [model_dir / name for name in sorted(set(weight_map.values()))]
    single = model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    raise EngineError(f"{model_dir} has neither model.safetensors nor {_INDEX}: save the model as safetensors")


def _weight_map(model_dir: Path) -> dict[str, str]:
    """Return the file of each tensor that the index names, nothing where there is no index."""
    index = model_dir / _INDEX
    if not index.is_file():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise EngineError(f"{index}: weight_map is {weight_map!r}, not an object of tensor and file names")
    return {name: str(file) for name, file in weight_map.items()}


def _needless(config: LlamaConfig) -> frozenset[str]:
    names = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.layers)}
    return frozenset(names | {"lm_head.weight"} if config.tied else names)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
