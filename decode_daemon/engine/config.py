"""Reads a Hugging Face folder's config.json into the few numbers a Llama-family step needs.

It knows four architectures. A setting that would change the computation and that the step does not have is refused by
name here, before any weight is read.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_daemon.engine.protocol import EngineError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch the low RoPE frequencies; the names are config.json's."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All RoPE frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """How YaRN stretches the low RoPE frequencies; the names are config.json's."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float  # pairs that turn more often within the original context keep their frequency
    beta_slow: float  # of those that turn less often it is divided by the factor
    attention_factor: float
    truncate: bool  # the band between them begins and ends at whole pairs


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama-family decoder. Sizes are counts of elements, heads or positions."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool  # the head is the embedding table
    qkv_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head before RoPE

    @classmethod
    def read(cls, model_dir: Path) -> "LlamaConfig":
        """Read `model_dir`/config.json, in transformers 5's form or the older one.

        Raises EngineError naming the field when it is missing, malformed, or asks for what this engine does not compute.
        """
        return parse_config(read_json(model_dir / "config.json"), str(model_dir / "config.json"))


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What an architecture's code fixes that its config.json does not say."""

    qkv_bias: bool = False
    qk_norm: bool = False
    kv_heads_optional: bool = False  # absent, every head has its own; elsewhere transformers' default is one model's number
    head_dim: int | None = None  # when config.json names none; None: hidden / heads


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(kv_heads_optional=True),
    "MistralForCausalLM": _Architecture(),
    "Qwen2ForCausalLM": _Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": _Architecture(qk_norm=True, head_dim=128),
}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raises EngineError naming the file when there is none to read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read ({error}): point the engine at a Hugging Face model folder") from error
    if not isinstance(value, dict):
        raise EngineError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def parse_config(raw: Mapping[str, Any], source: str = "config.json") -> LlamaConfig:
    """Return the LlamaConfig that `raw` describes; `source` is the file's name for error messages.

    Defaults are those of transformers' configuration classes. Raises EngineError as LlamaConfig.read does.
    """
    fields = _Fields(raw, source)
    architecture = _architecture_name(fields)
    known = _ARCHITECTURES[architecture]
    _refuse_what_is_not_computed(fields, architecture)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads if known.kv_heads_optional else None)
    head_dim = fields.count("head_dim", known.head_dim or hidden // heads)
    if heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if head_dim % 2:
        raise fields.refusal("head_dim", "an even number, RoPE turns pairs")
    theta, scaling = _rope(fields)
    return LlamaConfig(
        architecture=architecture,
        layers=fields.count("num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.count("vocab_size"),
        max_positions=_positions(fields.count("max_position_embeddings"), scaling),
        rms_eps=fields.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=fields.flag("tie_word_embeddings"),
        qkv_bias=known.qkv_bias,
        qk_norm=known.qk_norm,
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to one JSON object; every refusal names `prefix` + field, its value and the file."""

    raw: Mapping[str, Any]
    source: str
    prefix: str = ""

    def refusal(self, field: str, wanted: str) -> EngineError:
        value = self.raw.get(field, "missing")
        return EngineError(f"{self.source}: {self.prefix}{field} is {value!r}; this engine needs {wanted}")

    def given(self, field: str) -> Any:
        """Return the field, None when it is absent or null: config.json uses both for "the default"."""
        return self.raw.get(field)

    def count(self, field: str, default: int | None = None) -> int:
        value = self.given(field)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(field, "a whole number of at least 1")
        return value

    def positive(self, field: str, default: float | None = None) -> float:
        value = self.given(field)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refusal(field, "a number above 0")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.given(field)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(field, "true or false")
        return default if value is None else value

    def section(self, field: str) -> "_Fields | None":
        value = self.given(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refusal(field, "an object")
        return _Fields(value, self.source, f"{self.prefix}{field}.")


def _architecture_name(fields: _Fields) -> str:
    names = fields.given("architectures")
    known = ", ".join(_ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise fields.refusal("architectures", f"exactly one of {known}")
    return str(names[0])


def _refuse_what_is_not_computed(fields: _Fields, architecture: str) -> None:
    if fields.given("hidden_act") not in (None, "silu"):
        raise fields.refusal("hidden_act", "silu")
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if fields.flag(field):
            raise fields.refusal(field, "false")
    if fields.given("quantization_config") is not None:
        raise fields.refusal("quantization_config", "unquantized bfloat16, float16 or float32 weights")
    layer_types = fields.given("layer_types")
    if layer_types is not None and any(kind != "full_attention" for kind in layer_types):
        raise fields.refusal("layer_types", "full_attention in every layer")
    # transformers gives Mistral a window of 4,096 when the field is absent; only an explicit null means none.
    if architecture == "MistralForCausalLM" and fields.raw.get("sliding_window", 4096) is not None:
        raise fields.refusal("sliding_window", "null: attention over the whole context")


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    _refuse_partial_rope(fields)
    theta = fields.positive("rope_theta", 10_000.0)
    parameters = fields.section("rope_parameters") or fields.section("rope_scaling")
    if parameters is None:
        return theta, None
    _refuse_partial_rope(parameters)
    _refuse_unknown_rope(parameters)
    theta = parameters.positive("rope_theta", theta)
    name = "rope_type" if "rope_type" in parameters.raw or "type" not in parameters.raw else "type"
    kind = parameters.raw.get(name, "default")
    if kind == "default":
        return theta, None
    if kind not in _SCALINGS:
        raise parameters.refusal(name, f"default, {', '.join(_SCALINGS)}: others depend on the context's length")
    return theta, _SCALINGS[kind](parameters)


def _positions(written: int, scaling: RopeScaling | None) -> int:
    """Return how many positions a model has whose config.json says `written`: before linear scaling, as vLLM reads it."""
    return int(written * scaling.factor) if isinstance(scaling, LinearScaling) else written


def _linear(parameters: _Fields) -> LinearScaling:
    return LinearScaling(parameters.positive("factor"))


def _llama3(parameters: _Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=parameters.positive("factor"),
        low_freq_factor=parameters.positive("low_freq_factor"),
        high_freq_factor=parameters.positive("high_freq_factor"),
        original_max_position_embeddings=parameters.count("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise parameters.refusal("high_freq_factor", f"more than low_freq_factor ({scaling.low_freq_factor})")
    return scaling


def _yarn(parameters: _Fields) -> YarnScaling:
    for field in ("mscale", "mscale_all_dim"):  # DeepSeek's way to say the attention factor
        if parameters.given(field) is not None:
            raise parameters.refusal(field, "it to be absent")
    factor = parameters.positive("factor")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=parameters.count("original_max_position_embeddings"),
        beta_fast=parameters.positive("beta_fast", 32.0),
        beta_slow=parameters.positive("beta_slow", 1.0),
        attention_factor=parameters.positive("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        truncate=parameters.flag("truncate", True),
    )


_SCALINGS: dict[str, Callable[[_Fields], RopeScaling]] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}

# What transformers' rope types read, and `finetuned`, which older exporters wrote; a type ignores the fields of the others.
_ROPE_FIELDS = frozenset(
    [
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("truncate", "short_factor", "long_factor", "finetuned"),
    ]
)


def _refuse_unknown_rope(parameters: _Fields) -> None:
    """Refuse what would change the angles unseen: sections for multimodal positions, or parameters for each kind of layer."""
    for field in sorted(parameters.raw.keys() - _ROPE_FIELDS):
        if parameters.given(field) is not None:
            raise parameters.refusal(field, "it to be absent")


def _refuse_partial_rope(fields: _Fields) -> None:
    if fields.given("partial_rotary_factor") not in (None, 1):
        raise fields.refusal("partial_rotary_factor", "1.0")
