"""What config.json may say, in both of its forms; the rest is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from decode_daemon.engine.config import LinearScaling, Llama3Scaling, LlamaConfig, YarnScaling, parse_config
from decode_daemon.engine.protocol import EngineError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


def test_absent_fields_take_transformers_defaults() -> None:
    config = parse_config(LLAMA)
    assert (config.kv_heads, config.head_dim, config.rms_eps, config.rope_theta) == (4, 16, 1e-6, 10_000.0)
    assert (config.tied, config.rope_scaling, config.qkv_bias, config.qk_norm) == (False, None, False, False)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}},
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500_000, "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()}},
    ],
    ids=["transformers 5", "rope_scaling", "rope_scaling with type"],
)
def test_every_form_of_the_rope_fields_reads_alike(rope: dict[str, Any]) -> None:
    config = parse_config(LLAMA | rope)
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 128)


def test_linear_and_yarn_scaling_are_read_with_yarns_usual_values() -> None:
    linear = parse_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert (linear.rope_scaling, linear.max_positions) == (LinearScaling(2.0), 1024)  # as vLLM multiplies them
    assert parse_config(LLAMA | {"rope_parameters": YARN}).rope_scaling == YarnScaling(
        4.0, 128, 32.0, 1.0, 0.1 * math.log(4) + 1, True
    )
    given = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}
    assert parse_config(LLAMA | {"rope_parameters": YARN | given}).rope_scaling == YarnScaling(4.0, 128, 16.0, 2.0, 1.5, False)


def test_a_rope_field_of_another_type_or_without_a_value_changes_nothing() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "beta_fast": 32, "mrope_section": None, "finetuned": True}
    assert parse_config(LLAMA | {"rope_parameters": rope}) == parse_config(LLAMA | {"rope_theta": 1e6})


def test_qwen_architectures_bring_their_bias_and_norms() -> None:
    qwen2 = parse_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2})
    qwen3 = parse_config(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2})
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 16)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (MISTRAL | {"sliding_window": 4096}, "sliding_window"),
        (MISTRAL, "sliding_window"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}}, "rope_scaling.mrope_section"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.original_max_position_embeddings"),
        ({"rope_parameters": YARN | {"mscale": 1.0}}, "rope_parameters.mscale"),
        ({"rope_parameters": YARN | {"truncate": 1}}, "rope_parameters.truncate"),
        ({"rope_parameters": LLAMA3 | {"factor": -1}}, "rope_parameters.factor"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "rope_parameters.high_freq_factor"),
        ({"rope_parameters": "llama3"}, "rope_parameters"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineError, match=f"config.json: {field} is .*this engine needs "):
        parse_config(LLAMA | changes)


def test_the_refusal_comes_before_any_weight_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_act": "gelu"}))
    with pytest.raises(EngineError, match="hidden_act"):
        LlamaConfig.read(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["absent", "cut short", "not an object"])
def test_an_unreadable_config_names_the_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineError, match=str(tmp_path / "config.json")):
        LlamaConfig.read(tmp_path)
