"""What the connector tells of vLLM's configuration is what vLLM was told, and what the gateway reads."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from connector.serving import describe_serving
from gateway.serving import read_handed_over
from handoff.claim import CLAIM_KEY
from tests.kit.scheduling import FIRST, Daemon

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
PLAIN: dict[str, Any] = {
    "defaults": {},
    "longest_answer": None,
    "logprobs_mode": "raw_logprobs",
    "grammar_backend": "auto",
    "compact_json": False,
    "reasoning_parser": "",
    "grammar_in_reasoning": False,
    "watermark": False,
}


def told(folder: Path, *, structured: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    """What is told of a vLLM with these options, by vLLM's own classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.config import ModelConfig, StructuredOutputsConfig, VllmConfig

        (folder / "config.json").write_text(json.dumps(MODEL))
        options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, **model}
        config = ModelConfig(model=str(folder), tokenizer=str(folder), **options)
        return describe_serving(
            VllmConfig(model_config=config, structured_outputs_config=StructuredOutputsConfig(**structured or {}))
        )


def test_a_vllm_that_was_told_nothing(tmp_path: Path) -> None:
    assert told(tmp_path) == PLAIN


def test_the_models_own_defaults_are_told_unless_vllm_is_to_leave_them(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 20, "max_new_tokens": 9}))
    own = {"temperature": 0.5, "top_k": 20, "max_tokens": 9}
    assert told(tmp_path) == PLAIN | {"defaults": own}
    assert told(tmp_path, generation_config="vllm") == PLAIN
    # Of a folder of its own, vLLM takes the length for a limit of every answer.
    assert told(tmp_path, generation_config=str(tmp_path)) == PLAIN | {"defaults": own, "longest_answer": 9}


def test_what_an_operator_overrides_is_told(tmp_path: Path) -> None:
    overridden = {"repetition_penalty": 1.5, "max_new_tokens": 7}
    defaults = {"repetition_penalty": 1.5, "max_tokens": 7}
    expected = PLAIN | {"defaults": defaults, "longest_answer": 7}
    assert told(tmp_path, override_generation_config=overridden) == expected
    assert told(tmp_path, generation_config="vllm", override_generation_config=overridden) == expected


def test_kinds_of_logprobs_grammars_and_parsers_are_told(tmp_path: Path) -> None:
    structured = {"backend": "guidance", "disable_any_whitespace": True, "enable_in_reasoning": True}
    structured["reasoning_parser"] = "deepseek_r1"
    described = told(tmp_path, structured=structured, logprobs_mode="processed_logits")
    assert described == PLAIN | {
        "logprobs_mode": "processed_logits",
        "grammar_backend": "guidance",
        "compact_json": True,
        "reasoning_parser": "deepseek_r1",
        "grammar_in_reasoning": True,
    }


def test_a_watermark_is_told() -> None:
    model = SimpleNamespace(get_diff_sampling_param=dict)
    assert describe_serving(SimpleNamespace(model_config=model, watermark_config=object()))["watermark"] is True


def test_a_version_of_vllm_without_an_option_has_it_off() -> None:
    model = SimpleNamespace(get_diff_sampling_param=dict)
    assert describe_serving(SimpleNamespace(model_config=model)) == PLAIN


def test_the_gateway_reads_what_is_told_with_each_first_token() -> None:
    daemon = Daemon(serving=PLAIN | {"defaults": {"top_k": 20}})
    try:
        request, _ = daemon.request(4)
        daemon.step(request, 4, new=[1])
        params = daemon.finish(request)
    finally:
        daemon.close()
    read = read_handed_over({"kv_transfer_params": params})
    assert (read.first_token, read.prompt_tail) == (FIRST, [0, 1, 2, 3])
    assert read.serving.defaults == {"top_k": 20}
    assert json.loads(json.dumps(params)) == params
    assert set(params) == {CLAIM_KEY}
