"""The allow-list: which fields and values the lane serves, judged by vLLM's own request class."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.body import Body
from gateway.eligibility import CHAT_FIELDS, Leg, Unsupported, prefill_fields, prompt_characters, prompt_fields, why_not
from tests.kit.gateway import body, chat

INF = float("inf")
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}

ADMITTED: dict[str, list[Any]] = {
    "messages": [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": []}],
        [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok", "tool_calls": []}],
    ],
    "model": ["m"],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True, False],
    "add_special_tokens": [True, False],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "cache_salt": ["s"],
    "user": ["u", ""],
    "temperature": [0, 0.0, 1, 0.7, 2, 2.0, 1e-9, -0.0],
    "top_p": [1, 1.0, 0.01],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "seed": [0, -1, 42, 2**63 - 1, -(2**63)],
    "ignore_eos": [True, False],
    "max_tokens": [1, 2**31 - 1],
    "max_completion_tokens": [1, 500],
    "stop": ["a", [], ["a"], ["a", "b", "c", "d"], "\n", "\u2028"],
    "stream": [True, False],
    "stream_options": [{}, {"include_usage": True}, {"include_usage": False}],
    "kv_transfer_params": [{}, {"anchorleg": {"claim": {}}}, {"do_remote_decode": True}],
    "n": [1],
    "logprobs": [False],
    "top_logprobs": [0],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "min_p": [0, 0.0],
    "min_tokens": [0],
    "logit_bias": [{}],
    "stop_token_ids": [[]],
    "bad_words": [[]],
    "tools": [],
    "tool_choice": ["none"],
    "parallel_tool_calls": [True, False],
    "response_format": [{"type": "text"}],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "include_stop_str_in_output": [False],
    "use_beam_search": [False],
    "echo": [False],
    "return_token_ids": [False],
}

REFUSED: dict[str, list[Any]] = {
    "messages": [
        [],
        "hi",
        {},
        ["hi"],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": {}}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "input_audio"}]}],
    ],
    "model": ["", 1, True, ["m"]],
    "add_generation_prompt": ["true", 1, 0],
    "continue_final_message": ["false", 1],
    "add_special_tokens": ["yes"],
    "chat_template_kwargs": [[], "x", 1],
    "cache_salt": ["", 1],
    "user": [1, {}],
    "temperature": [-1, 2.1, True, False, "0.7", INF, 10**400, [], {}],
    "top_p": [0, 0.0, -0.1, 1.1, True, "1", INF],
    "top_k": [-2, 2**31, 1.0, 1.5, True, "5"],
    "seed": [2**63, -(2**63) - 1, 1.0, True, "1"],
    "ignore_eos": [1, "true"],
    "max_tokens": [0, -1, 1.0, True, "5", 2**31],
    "max_completion_tokens": [0, -1, 1.5, False, "5", 2**31],
    "stop": ["", ["", "."], ["a", 1], [None], 1, True, {}, ["a"] * 5, [["a"]]],
    "stream": ["true", 1, 0],
    "stream_options": [{"include_usage": 1}, {"continuous_usage_stats": True}, {"x": True}, [], True],
    "n": [0, 2, 1.0, True, "1"],
    "logprobs": [True, 0, 5],
    "top_logprobs": [1, -1, False, 0.0],
    "presence_penalty": [0.1, False, "0"],
    "frequency_penalty": [-1, False],
    "repetition_penalty": [1.1, 0, True],
    "min_p": [0.1, False],
    "min_tokens": [1, 100, False],
    "logit_bias": [{"5": -100}, []],
    "stop_token_ids": [[5], {}],
    "bad_words": [["x"], ""],
    "tools": [[], [{"type": "function", "function": {"name": "f"}}], {}],
    "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": ["true", 1],
    "response_format": [{"type": "json_object"}, {"type": "json_schema"}, {}, {"type": "text", "x": 1}],
    "skip_special_tokens": [False, 1],
    "spaces_between_special_tokens": [False],
    "include_stop_str_in_output": [True, 0],
    "use_beam_search": [True],
    "echo": [True],
    "return_token_ids": [True],
}

PLAIN_VLLM_ONLY = frozenset(
    {"reasoning_effort", "thinking_token_budget", "include_reasoning", "watermarking", "length_penalty"}
    | {"truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids"}
    | {"documents", "chat_template", "media_io_kwargs", "mm_processor_kwargs", "structured_outputs", "priority"}
    | {"request_id", "session_id", "return_tokens_as_token_ids", "routed_experts_prompt_start", "return_token_offsets"}
    | {"return_prompt_text", "mm_payload", "return_mm_kwargs", "ec_transfer_params", "vllm_xargs"}
    | {"repetition_detection", "stream_interval"}
)
"""Fields of vLLM's that the lane does not know: a request with one goes to plain vLLM."""


def judge(key: str, value: Any) -> Unsupported | None:
    with_stream = {"stream": True} if key == "stream_options" else {}
    return why_not(Body(json.dumps(chat(**with_stream) | {key: value}).encode()))


def test_every_row_has_its_values_here() -> None:
    assert set(ADMITTED) == set(CHAT_FIELDS)
    assert set(REFUSED) == set(CHAT_FIELDS) - {"kv_transfer_params"}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ADMITTED.items() for value in values])
def test_an_admitted_value_is_served(key: str, value: Any) -> None:
    assert judge(key, value) is None


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_any_other_value_is_plain_vllms_and_the_field_is_named(key: str, value: Any) -> None:
    why = judge(key, value)
    assert why is not None
    assert (why.reason, why.param) == (f"unsupported_{key}", key)
    assert key in why.detail


@pytest.mark.parametrize("key", sorted(set(CHAT_FIELDS) - {"messages", "model"}))
def test_null_is_absent(key: str) -> None:
    assert judge(key, None) is None


@pytest.mark.parametrize("key", ["messages", "model"])
def test_what_is_required_and_missing_or_null_is_plain_vllms(key: str) -> None:
    for raw in ({k: v for k, v in chat().items() if k != key}, chat() | {key: None}):
        why = why_not(Body(json.dumps(raw).encode()))
        assert why is not None
        assert why.reason == f"missing_{key}"


def test_the_nulls_that_sdks_send_are_served() -> None:
    nulls = dict.fromkeys(["stop", "stream", "stream_options", "n", "logprobs", "tools", "seed", "max_tokens"])
    assert why_not(body(**nulls, user="")) is None


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_without_a_stream_are_plain_vllms_to_refuse(stream: dict[str, Any]) -> None:
    why = why_not(body(stream_options={"include_usage": True}, **stream))
    assert why is not None
    assert why.reason == "unsupported_stream_options"


@given(st.text(max_size=20).filter(lambda key: key not in CHAT_FIELDS), st.one_of(st.integers(), st.text(), st.booleans()))
def test_an_unknown_field_is_plain_vllms_with_one_reason_for_all(key: str, value: Any) -> None:
    why = why_not(body(**{key: value}))
    assert why is not None
    assert (why.reason, why.param) == ("unknown_field", key)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ADMITTED.items() for value in values])
def test_vllm_accepts_whatever_the_lane_admits(oracle: SimpleNamespace, key: str, value: Any) -> None:
    with_stream = {"stream": True} if key == "stream_options" else {}
    oracle.chat.ChatCompletionRequest.model_validate(json.loads(json.dumps(chat(**with_stream) | {key: value})))


def test_every_field_of_vllms_is_in_the_table_or_known_to_be_plain_vllms(oracle: SimpleNamespace) -> None:
    fields = set(oracle.chat.ChatCompletionRequest.model_fields)
    assert fields - set(CHAT_FIELDS) == PLAIN_VLLM_ONLY
    assert set(CHAT_FIELDS) <= fields


def test_the_prompt_reaches_the_prefill_leg_with_whatever_a_template_may_read() -> None:
    shaping = {key for key, row in CHAT_FIELDS.items() if row.leg is Leg.PREFILL}
    assert set(prefill_fields()) == shaping | {"tool_choice", "parallel_tool_calls", "response_format"}


def test_counting_a_prompt_needs_only_what_shapes_it() -> None:
    assert set(prompt_fields()) == set(prefill_fields()) - {
        "cache_salt",
        "user",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
    }


def test_characters_are_those_of_all_texts() -> None:
    messages = [
        {"role": "system", "content": "naïve 🙂"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]},
    ]
    assert prompt_characters(body(messages=messages)) == 7 + 3
