"""Requests by the field: of each field values that the lane serves, and others."""

import json
from typing import Any

from gateway.endpoints import Endpoint

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
INF = float("inf")
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
IGNORED = ["x", 1, {"a": "b"}, [], True]
"""What vLLM does not look at may be anything."""

SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["m"], ["", 1, True, ["m"]]),
    "add_special_tokens": ([True, False], ["yes", 1]),
    "cache_salt": (["s", "é", "x" * 128], ["", 1, "x" * 129, "a/b", "a\\b", "a@b", "a\0b"]),
    "user": (["u", ""], [1, {}]),
    "priority": ([0, 1, -1, 2**63 - 1], [2**63, 1.0, "1", True]),
    "request_id": (["r", ""], [1, []]),
    "session_id": (["s", ""], [1, []]),
    "temperature": ([0, 0.0, 1, 0.7, 2, 2.0, 1e-9, -0.0], [-1, 2.1, True, False, "0.7", INF, 10**400, [], {}]),
    "top_p": ([1, 1.0, 0.01], [0, 0.0, -0.1, 1.1, True, "1", INF]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, 1.0, 1.5, True, "5"]),
    "min_p": ([0, 0.0, 0.1, 1], [-0.1, 1.1, False, "0"]),
    "seed": ([0, -1, 42, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.0, True, "1"]),
    "presence_penalty": ([0, 0.0, -2, 2.0], [2.1, -2.1, False, "0", INF]),
    "frequency_penalty": ([0, 0.5, -2, 2], [-3, False, "0", [1]]),
    "repetition_penalty": ([1, 1.0, 0.5, 1.3, 20], [0, -1, True, "1", INF, 1e39, 1e-46]),
    "logit_bias": (
        [{}, {"5": -100}, {"5": 1e9, "007": 0.5}, {"0": 1}],
        [[], {"x": 1}, {"-1": 1}, {"1_0": 1}, {" 1": 1}, {"٣": 1}, {"5": "1"}, {"5": None}, {"5": True}, {"5": INF}, {"": 1}],
    ),
    "allowed_token_ids": ([[1], [1, 1, 0]], [[], ["1"], [1.0], [True], [-1], 5, {}]),
    "bad_words": ([[], ["x"], ["x", "x", " y "]], ["", "x", [""], [" "], ["\u00a0"], [1], {}]),
    "stop_token_ids": ([[], [5], [5, 5, 0]], [{}, ["5"], [5.0], [True], [-1], [[5]]]),
    "min_tokens": ([0, 1, 2**31 - 1], [-1, 1.0, "1", False]),
    "ignore_eos": ([True, False], [1, "true"]),
    "watermarking": ([False], [True, 0]),
    "response_format": (
        [
            {"type": "text"},
            {"type": "text", "json_schema": None},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True, "description": "d"}},
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}},
            {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
                "triggers": ["<f>"],
            },
        ],
        [
            {},
            [],
            "text",
            {"type": "xml"},
            {"type": ["text"]},
            {"type": "text", "x": 1},
            {"type": "json_object", "schema": SCHEMA},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "a"}},
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": "yes"}},
            {"type": "json_schema", "json_schema": {"name": "a", "json_schema": SCHEMA}},
            {"type": "structural_tag"},
            {"type": "structural_tag", "structures": [{"begin": "<f>", "end": "</f>"}], "triggers": ["<f>"]},
        ],
    ),
    "structured_outputs": (
        [
            {"json": SCHEMA},
            {"json": json.dumps(SCHEMA)},
            {"json": SCHEMA, "disable_any_whitespace": False, "whitespace_pattern": None, "regex": None},
            {"json_object": True},
            {"regex": "a+"},
            {"choice": ["a", "b"]},
            {"grammar": "root ::= 'a'"},
            {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})},
        ],
        [
            {},
            [],
            {"json": SCHEMA, "regex": "a"},
            {"json": []},
            {"json": " "},
            {"json_object": False},
            {"choice": []},
            {"choice": [1]},
            {"choice": "ab"},
            {"grammar": " "},
            {"regex": "a\0"},
            {"regex": 1},
            {"structural_tag": ""},
            {"structural_tag": {}},
            {"regex": "a", "disable_any_whitespace": True},
            {"json": SCHEMA, "disable_additional_properties": True},
            {"json": SCHEMA, "whitespace_pattern": "\\s"},
            {"json": SCHEMA, "backend": "xgrammar"},
        ],
    ),
    "max_tokens": ([1, 2**31 - 1], [0, -1, 1.0, True, "5", 2**31]),
    "stop": (
        ["a", [], ["a"], ["a", "b", "c", "d"], "\n", "\u2028"],
        ["", ["", "."], ["a", 1], [None], 1, True, {}, ["a"] * 5, [["a"]]],
    ),
    "include_stop_str_in_output": ([True, False], [0, "x"]),
    "skip_special_tokens": ([True, False], [1]),
    "spaces_between_special_tokens": ([True, False], [1]),
    "stream": ([True, False], ["true", 1, 0]),
    "stream_options": (
        [{}, {"include_usage": True}, {"include_usage": None, "continuous_usage_stats": True}, {"include_obfuscation": False}],
        [{"include_usage": 1}, {"continuous_usage_stats": "x"}, {"x": True}, [], True],
    ),
    "return_token_ids": ([True, False], [1]),
    "return_tokens_as_token_ids": ([True, False], ["x"]),
    "kv_transfer_params": (
        [{}, {"anchorleg": {"claim": {}}}, {"do_remote_decode": True, "x": [2**63, None]}, {"prompt_token_ids": None}],
        [[], "x", {"prompt_token_ids": [1]}, {"x": 2**64}, {"x": [{"y": -(2**63) - 1}]}],
    ),
    "use_beam_search": ([False], [True, 0]),
    "length_penalty": ([1, 0.5, -3], ["1", True, INF]),
    "truncation_side": (["left", "right"], ["both", ""]),
    "logprob_token_ids": ([[]], [[1], {}]),
    "ec_transfer_params": ([{}], [{"a": 1}, []]),
    "vllm_xargs": ([{}], [{"a": 1}, []]),
    "thinking_token_budget": ([-1], [0, 5, "1", -1.0]),
    "stream_interval": ([1], [0, 2, True]),
    "routed_experts_prompt_start": ([0], [1, -1, 0.0]),
    "return_token_offsets": ([True, False], [1]),
    "mm_payload": (["tensors", "none"], ["x", True]),
    "return_mm_kwargs": ([True, False], [1]),
    "truncate_prompt_tokens": ([], [-1, 5, 0]),
    "prompt_logprobs": ([], [0, 1, -1]),
    "repetition_detection": ([], [{}, {"max_pattern_size": 3, "min_count": 2}]),
    "metadata": (IGNORED, []),
    "store": (IGNORED, []),
    "service_tier": (IGNORED, []),
    "safety_identifier": (IGNORED, []),
    "prompt_cache_key": (IGNORED, []),
    "prompt_cache_options": (IGNORED, []),
    "prompt_cache_retention": (IGNORED, []),
}
"""Of each field the values that the lane serves, and others."""

CHAT_ONLY: dict[str, tuple[list[Any], list[Any]]] = {
    "messages": (
        [
            [{"role": "user", "content": "hi"}],
            [{"role": "user", "content": ""}],
            [{"role": "someone", "content": "hi", "name": "n"}],
            [{"role": "user"}],
            [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
            [{"role": "user", "content": []}],
            [
                {"role": "user", "content": "add"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "3"},
            ],
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok", "tool_calls": [], "refusal": None}],
            [{"role": "function", "name": "f", "content": None}],
        ],
        [
            [],
            "hi",
            {},
            ["hi"],
            [{"content": "hi"}],
            [{"role": 1, "content": "hi"}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": None}],
            [{"role": "tool", "content": None}],
            [{"role": "assistant", "content": None, "tool_calls": None}],
            [{"role": "user", "content": "hi", "name": None}],
            [{"role": "user", "content": {}}],
            [{"role": "user", "content": ["hi"]}],
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "a", "uuid": "u", "image_url": "x"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "input_audio"}]}],
        ],
    ),
    "add_generation_prompt": ([True, False], ["true", 1, 0]),
    "continue_final_message": ([True, False], ["false", 1]),
    "documents": ([[], [{}], [{"title": "t", "text": "x"}]], [{}, ["x"], [{"a": 1}], [{"a": None}]]),
    "chat_template": (["", "{{ messages }}"], [1, {}]),
    "chat_template_kwargs": ([{}, {"enable_thinking": False}], [[], "x", 1]),
    "reasoning_effort": (["none", "minimal", "low", "medium", "high", "xhigh", "max"], ["", "huge", 1, ["low"]]),
    "tools": (
        [[TOOL], [{"function": {"name": "add", "description": None, "parameters": None, "strict": True}}]],
        [
            [],
            {},
            ["add"],
            [{"type": "function"}],
            [{"type": "custom", "custom": {"name": "x"}}],
            [{"type": "function", "function": {"name": 1}}],
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            [{"type": "function", "function": {"name": "f", "strict": "no"}}],
            [{"type": None, "function": {"name": "f"}}],
        ],
    ),
    "tool_choice": (
        ["none", "auto", "required", NAMED],
        [
            "",
            "any",
            1,
            ["auto"],
            {},
            {"type": "function"},
            {"type": "x", "function": {"name": "add"}},
            {"function": {"name": ""}},
        ],
    ),
    "parallel_tool_calls": ([True, False], ["true", 1]),
    "include_reasoning": ([True], ["true", 1]),
    "return_prompt_text": ([True, False], [1]),
    "logprobs": ([True, False], [0, 5, "true"]),
    "top_logprobs": ([0, 1, 20], [-1, 21, False, 0.0, "1"]),
    "max_completion_tokens": ([1, 500], [0, -1, 1.5, False, "5", 2**31]),
    "n": ([1], [0, 2, 1.0, True, "1"]),
    "echo": ([False], [True, 0]),
    "media_io_kwargs": ([{}], [{"image": {}}, []]),
    "mm_processor_kwargs": ([{}], [{"a": 1}, []]),
    "verbosity": (IGNORED, []),
    "prediction": (IGNORED, []),
    "modalities": ([["text"]], [["text", "audio"], "text", []]),
    "audio": ([], [{"voice": "alloy", "format": "mp3"}]),
    "functions": ([], [[], [{"name": "f"}]]),
    "function_call": ([], ["none", {"name": "f"}]),
    "moderation": ([], [{"model": "m"}]),
    "web_search_options": ([], [{}]),
}

COMPLETIONS_ONLY: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt": (
        ["hi", " ", [1], [1, 2, 3], ["hi"], [[1, 2]], [0]],
        ["", [], [""], [[]], ["a", "b"], [[1], [2]], [1, "a"], [1.0], [True], [-1], 5, {}, [["a"]], [{"prompt": "a"}]],
    ),
    "logprobs": ([0, 1, 20], [-1, 21, True, False, 1.0, "1"]),
    "n": ([1], [0, 2, 1.0, True]),
    "best_of": ([1], [2, 0, "x"]),
    "echo": ([False], [True, 0]),
    "suffix": ([], ["", "x"]),
    "prompt_embeds": ([], ["", [], "AAAA"]),
    "max_completion_tokens": (IGNORED, []),
}

VALUES = {CHAT: CHAT_ONLY | SHARED, COMPLETIONS: COMPLETIONS_ONLY | SHARED}
OPENAI_ONLY = frozenset(
    {"metadata", "store", "service_tier", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "verbosity", "prediction", "modalities", "audio"}
    | {"functions", "function_call", "moderation", "web_search_options", "best_of"}
)
"""Fields of OpenAI's that are none of vLLM's: vLLM ignores them."""
COMPANIONS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
}
"""What a field needs beside it."""


def request(endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if endpoint is CHAT else {"prompt": "hi"}
    return {"model": "m", **asked, **fields}


def with_value(endpoint: Endpoint, key: str, value: Any) -> dict[str, Any]:
    return request(endpoint, **COMPANIONS.get(key, {})) | {key: value}
