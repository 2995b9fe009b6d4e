"""A GGUF file read as the Hugging Face folder of the same model in bfloat16: its config.json and its tensors.

Everything about the model is read from the file's own metadata. What this module knows is how GGUF names and stores the
Llama family: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from decode_daemon.engine.protocol import EngineError
from decode_daemon.engine.tensorfile import Layout, TensorForm, raw
from handoff.identity import weights_digest
from process.errors import ProcessError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from numpy.typing import NDArray

WEIGHTS_FILE = "model.safetensors"

_ROPE_FACTORS = "rope_freqs.weight"
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Keys whose computation the engine does not have; 0 and absent mean the same.
_REFUSED = (
    *("attention.sliding_window", "expert_count", "rope.scale_linear", "rope.scaling.attn_factor"),
    *(f"rope.scaling.yarn_{name}" for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow", "log_multiplier")),
)


class ModelError(EngineError, ProcessError):
    """The model cannot be read or prepared: the engine's refusal, told as it stands to who runs the command."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    transformers: str  # the class's name
    paired: bool = False  # the two rows that rotary embedding turns together are neighbours
    biases: tuple[str, ...] = ()
    norms: bool = False  # of queries and keys


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", paired=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": _Architecture("Qwen3ForCausalLM", norms=True),
}


class GgufModel:
    """A `Checkpoint`: an open GGUF file, its tensors dequantised when they are asked for, and rounded to bfloat16."""

    def __init__(self, path: Path) -> None:
        """Open the file and read what it says about itself.

        Raises ModelError for a file that is damaged or a part of several, another architecture, a missing value, a tensor that
        the architecture does not have, or a quantisation that cannot be undone.
        """
        try:
            from gguf import GGUFReader
        except ImportError:
            raise ModelError(f"{path} is read with the package gguf, which is not installed: pip install gguf") from None
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelError(f"{path} cannot be read as GGUF ({error}): download it again") from error
        self.place = path
        self.config = llama_config(reader, str(path))
        self._architecture = str(_value(reader, "general.architecture", str(path)))
        self._stored = {
            tensor_name(tensor.name, self._architecture): tensor
            for tensor in reader.tensors
            if (tensor.name, self._architecture) != (_ROPE_FACTORS, "llama")  # those are in the config
        }
        self.forms = {
            name: TensorForm("BF16", tuple(int(size) for size in reversed(tensor.shape)))
            for name, tensor in sorted(self._stored.items())
        }
        self._try_each_quantisation()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that `forms` names, bfloat16, with the rows in transformers' order."""
        return self._rows(name, 0, self.forms[name].shape[0])

    @property
    def layout(self) -> Layout:
        """The safetensors file of this model, as safetensors itself would write it."""
        return Layout(self.forms, {"format": "pt"})

    @cached_property
    def identity(self) -> str:
        """`handoff.identity.model_digest` of the folder with this config.json and this safetensors file.

        Only the tensors that the digest samples are dequantised.
        """
        return weights_digest(self.config, [_Converted(self)])

    def bytes_of(self, name: str, begin: int, end: int) -> bytes:
        """Return a tensor's bytes from `begin` to `end`, as they lie in the safetensors file."""
        shape = self.forms[name].shape
        row = 2 * (shape[1] if len(shape) > 1 else 1)
        first, last = begin // row, -(-end // row)
        return bytes(raw(self._rows(name, first, last))[begin - first * row : end - first * row])

    def _rows(self, name: str, first: int, last: int) -> torch.Tensor:
        from gguf.quants import dequantize

        stored, heads = self._stored[name], self._heads(name)
        whole = heads is not None or stored.data.ndim == 1
        values = dequantize(stored.data if whole else stored.data[first:last], stored.tensor_type).astype(np.float32)
        if heads is not None:
            values = split_halves(values, heads)
        if whole:
            values = values[first:last]
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)

    def _heads(self, name: str) -> int | None:
        """Return how many heads the rows of `name` are reordered in, None when they are not."""
        if not _ARCHITECTURES[self._architecture].paired:
            return None
        counts = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
        return next((int(self.config[field]) for part, field in counts.items() if part in name), None)

    def _try_each_quantisation(self) -> None:
        from gguf.quants import dequantize

        kinds = {stored.tensor_type: stored for stored in self._stored.values()}
        for kind, stored in kinds.items():
            try:
                dequantize(stored.data[:1] if stored.data.ndim > 1 else stored.data, kind)
            except NotImplementedError:
                raise ModelError(
                    f"{self.place}: tensor {stored.name} is quantised as {kind.name}, which cannot be undone here: "
                    "take a file with another quantisation, or a newer gguf package"
                ) from None


def llama_config(reader: "GGUFReader", place: str = "the GGUF file") -> dict[str, Any]:
    """Return the `config.json` that says what the GGUF metadata say; `place` is the file for messages.

    Raises ModelError when the file holds another architecture, lacks a value, or has one that config.json cannot say.
    """
    if (parts := _value(reader, "split.count", place, 0)) > 1:
        raise ModelError(f"{place} is one of {parts} parts: join them first (llama-gguf-split --merge)")
    name = _value(reader, "general.architecture", place)
    if name not in _ARCHITECTURES:
        raise ModelError(f"{place} holds a {name} model, but only {', '.join(_ARCHITECTURES)} can be converted")
    for key in _REFUSED:
        if refused := _value(reader, f"{name}.{key}", place, 0):
            raise ModelError(f"{place}: {name}.{key} is {refused}, which this engine does not compute: take another model")
    heads, hidden = _value(reader, f"{name}.attention.head_count", place), _value(reader, f"{name}.embedding_length", place)
    config = {
        "architectures": [_ARCHITECTURES[name].transformers],
        "model_type": name,
        "dtype": "bfloat16",
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens", place)),
        "hidden_size": hidden,
        "intermediate_size": _value(reader, f"{name}.feed_forward_length", place),
        "num_hidden_layers": _value(reader, f"{name}.block_count", place),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(reader, f"{name}.attention.head_count_kv", place, heads),
        "head_dim": _head_dim(reader, name, place, hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": _value(reader, f"{name}.context_length", place),
        "rms_norm_eps": _shortest(_value(reader, f"{name}.attention.layer_norm_rms_epsilon", place)),
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
    }
    theta = _shortest(_value(reader, f"{name}.rope.freq_base", place, 10_000.0))
    config |= {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, **_rope(reader, name, place, config, theta)}}
    for field, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := _value(reader, f"tokenizer.ggml.{key}_token_id", place, -1)) >= 0:
            config[f"{field}_token_id"] = token
    return config


def tensor_name(gguf_name: str, architecture: str = "llama") -> str:
    """`blk.3.attn_q.weight` as transformers calls it: `model.layers.3.self_attn.q_proj.weight`.

    Raises ModelError when a model of `architecture`, as GGUF names it, has no such tensor.
    """
    known = _ARCHITECTURES[architecture]
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name):
        layer, part, kind = match.groups()
        names = _LAYER_TENSORS | _QK_NORMS if known.norms else _LAYER_TENSORS
        if part in names and (kind == "weight" or part in known.biases):
            return f"model.layers.{layer}.{names[part]}.{kind}"
    elif (stem := gguf_name.removesuffix(".weight")) in _TENSORS:
        return f"{_TENSORS[stem]}.weight"
    raise ModelError(f"a {architecture} model has no tensor {gguf_name}: this engine cannot compute what it is for")


def split_halves(rows: "NDArray[np.float32]", heads: int) -> "NDArray[np.float32]":
    """Rows of Q or K, `[heads * dim, hidden]`, from GGUF's order to that of transformers.

    Rotary embedding turns pairs of dimensions. GGUF keeps the two of a pair side by side in a llama model; transformers
    keeps all first ones in the lower half of a head and all second ones in the upper half.
    """
    paired = rows.reshape(heads, -1, 2, rows.shape[-1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


class _Converted:
    """The safetensors file that a GGUF model becomes, as `weights_digest` reads it."""

    name = WEIGHTS_FILE

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self._layout = model.layout
        self.size = self._layout.size

    def read(self, start: int, length: int) -> bytes:
        header = self._layout.header
        end = min(start + length, self.size)
        found = [header[start:end]]
        for name, (first, last) in self._layout.places.items():
            origin = len(header) + first
            begin, stop = max(start, origin), min(end, len(header) + last)
            if begin < stop:
                found.append(self._model.bytes_of(name, begin - origin, stop - origin))
        return b"".join(found)


def _value(reader: "GGUFReader", key: str, place: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise ModelError(f"{place} has no {key}: take a file that a current llama.cpp wrote")
    return default


def _head_dim(reader: "GGUFReader", name: str, place: str, usual: int) -> int:
    dim: int = _value(reader, f"{name}.attention.key_length", place, usual)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := _value(reader, f"{name}.{key}", place, dim)) != dim:
            raise ModelError(f"{place}: {name}.{key} is {found}; this engine needs the head's {dim} dimensions")
    return dim


def _rope(reader: "GGUFReader", name: str, place: str, config: dict[str, Any], theta: float) -> dict[str, Any]:
    """Return the rope_parameters beside the base. Llama 3's are not in the metadata: what they make is, as a tensor."""
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS and name == "llama":
            return _llama3(np.asarray(tensor.data, np.float64).reshape(-1), theta, config["head_dim"], place)
    kind = _value(reader, f"{name}.rope.scaling.type", place, "none")
    if kind == "none":
        return {"rope_type": "default"}
    rope = {"rope_type": kind, "factor": _shortest(_value(reader, f"{name}.rope.scaling.factor", place))}
    original = _value(reader, f"{name}.rope.scaling.original_context_length", place, 0)
    return rope | ({"original_max_position_embeddings": original} if original else {})


def _llama3(factors: "NDArray[np.float64]", theta: float, head_dim: int, place: str) -> dict[str, Any]:
    """Return the llama3 scaling that divides the frequencies by `factors`, `[head_dim / 2]`.

    Llama 3.1 to 3.3 differ in the factor alone, which is that of the lowest frequency; that it explains all others is checked.
    The formula is that of transformers' `llama3` rope type.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(factors[-1])
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    explained = 1 / ((1 - blend) / factor + blend)
    if factors.shape != explained.shape or not np.allclose(factors, explained, rtol=1e-4):
        raise ModelError(f"{place}: {_ROPE_FACTORS} is not the scaling of Llama 3.1 to 3.3: convert the Hugging Face folder")
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _shortest(value: float) -> float:
    """A float32 as the shortest decimal that means the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
