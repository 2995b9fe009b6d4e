"""What the lane serves of a request as a whole: required fields, nulls, unknown fields, what fields say together, parsers."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.body import Body
from gateway.eligibility import Unsupported, why_not
from gateway.endpoints import Endpoint
from gateway.fields import FIELDS
from tests.kit.fields import CHAT, COMPLETIONS, NAMED, TOOL, request

SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def judge(
    fields: dict[str, Any], endpoint: Endpoint = CHAT, *, tools: bool = False, reasoning: bool = False
) -> Unsupported | None:
    return why_not(endpoint, Body(json.dumps(request(endpoint, **fields)).encode()), tools=tools, reasoning=reasoning)


def reason(fields: dict[str, Any], endpoint: Endpoint = CHAT, **parsers: bool) -> str | None:
    why = judge(fields, endpoint, **parsers)
    return None if why is None else why.reason


def vllm_takes(oracle: SimpleNamespace, endpoint: Endpoint, asked: dict[str, Any]) -> bool:
    from vllm.exceptions import VLLMValidationError

    kind = oracle.chat.ChatCompletionRequest if endpoint is CHAT else oracle.CompletionRequest
    try:
        kind.model_validate(asked)
    except (ValueError, VLLMValidationError):
        return False
    return True


@pytest.mark.parametrize(
    ("endpoint", "key"), [(CHAT, "messages"), (CHAT, "model"), (COMPLETIONS, "prompt"), (COMPLETIONS, "model")]
)
def test_what_is_required_and_missing_or_null_is_plain_vllms(endpoint: Endpoint, key: str) -> None:
    whole = request(endpoint)
    for fields in ({k: v for k, v in whole.items() if k != key}, whole | {key: None}):
        why = why_not(endpoint, Body(json.dumps(fields).encode()))
        assert why is not None
        assert (why.reason, why.param) == (f"missing_{key}", key)


@pytest.mark.parametrize(("endpoint", "key"), [(e, key) for e in Endpoint for key, row in FIELDS[e].items() if row.nullable])
def test_a_null_that_vllm_takes_is_no_wish(endpoint: Endpoint, key: str) -> None:
    expected = {"model": "missing_model", "tool_choice": "unsupported_tool_choice"}.get(key)
    assert reason({key: None}, endpoint) == expected


@pytest.mark.parametrize(
    ("endpoint", "key"),
    [(e, k) for e in Endpoint for k, row in FIELDS[e].items() if not row.nullable and k not in ("messages", "prompt")],
)
def test_a_null_that_vllm_refuses_is_plain_vllms(endpoint: Endpoint, key: str) -> None:
    assert reason({key: None}, endpoint) == f"unsupported_{key}"


def test_the_nulls_that_sdks_send_are_served() -> None:
    nulls = ["stop", "stream", "stream_options", "n", "logprobs", "tools", "seed", "max_tokens", "functions", "audio"]
    assert reason(dict.fromkeys(nulls) | {"user": ""}) is None


@pytest.mark.parametrize("endpoint", Endpoint)
@given(st.text(max_size=20), st.one_of(st.integers(), st.text(), st.booleans(), st.none()))
def test_an_unknown_field_is_plain_vllms_with_one_reason_for_all_unless_it_is_null(
    endpoint: Endpoint, key: str, value: Any
) -> None:
    if key not in FIELDS[endpoint]:
        why = judge({key: value}, endpoint)
        assert (why and (why.reason, why.param)) == (None if value is None else ("unknown_field", key))


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", {"\ud83d": 1}])
def test_half_of_a_surrogate_pair_is_plain_vllms(text: Any) -> None:
    assert reason({"chat_template_kwargs": {"x": text}}) == "invalid_unicode"
    assert reason({"chat_template_kwargs": {"x": "\U0001f642 \\ud800"}}) is None


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_without_a_stream_are_plain_vllms_to_refuse(
    oracle: SimpleNamespace, endpoint: Endpoint, stream: dict[str, Any]
) -> None:
    for options, served in (({"include_usage": False}, False), ({}, True)):
        fields = {"stream_options": options, **stream}
        assert (reason(fields, endpoint) is None) is served
        assert vllm_takes(oracle, endpoint, request(endpoint, **fields)) is served


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"top_logprobs": 2}, "unsupported_top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "unsupported_top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "unsupported_continue_final_message"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "unsupported_structured_outputs"),
        ({"tool_choice": "auto"}, "unsupported_tool_choice"),
        ({"tool_choice": "required", "tools": None}, "unsupported_tool_choice"),
        ({"tool_choice": {"function": {"name": "sub"}}, "tools": [TOOL]}, "unsupported_tool_choice"),
    ],
)
def test_fields_that_vllm_refuses_together_are_plain_vllms_to_refuse(
    oracle: SimpleNamespace, fields: dict[str, Any], why: str
) -> None:
    assert reason(fields, tools=True) == why
    if why != "unsupported_structured_outputs":  # which vLLM finds later, where it makes one of the two
        assert not vllm_takes(oracle, CHAT, request(CHAT, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 0},
        {"top_logprobs": 2, "logprobs": True},
        {"continue_final_message": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        {"tool_choice": "none"},
    ],
)
def test_fields_that_vllm_takes_together_are_served(oracle: SimpleNamespace, fields: dict[str, Any]) -> None:
    assert reason(fields) is None
    assert vllm_takes(oracle, CHAT, request(CHAT, **fields))


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": NAMED}])
def test_tools_are_served_only_where_vllms_parser_can_be_reached(choice: dict[str, Any]) -> None:
    assert reason({"tools": [TOOL], **choice}) == "unsupported_tools"
    assert reason({"tools": [TOOL], **choice}, reasoning=True) == "unsupported_tools"
    assert reason({"tools": [TOOL], **choice}, tools=True) is None
    assert reason({"tools": [TOOL], **choice}, tools=True, reasoning=True) is None


def test_tools_that_may_not_be_called_need_no_parser() -> None:
    assert reason({"tools": [TOOL], "tool_choice": "none", "stop": "x", "logprobs": True}) is None


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ({"stop": "x"}, "stop"),
        ({"stop": ["x"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": SCHEMA}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_vllms_parsers_know_nothing_of_is_plain_vllms_beside_them(field: dict[str, Any], key: str) -> None:
    assert reason({"tools": [TOOL], **field}, tools=True) == f"unsupported_{key}_with_tools"
    assert reason({"tools": [TOOL], **field}, tools=True, reasoning=True) == f"unsupported_{key}_with_tools"
    assert reason(field, reasoning=True) == f"unsupported_{key}_with_reasoning"
    assert reason(field, tools=True) is None


@pytest.mark.parametrize(
    "field", [{"stop": []}, {"logprobs": False, "top_logprobs": 0}, {"response_format": {"type": "text"}}, {"n": 1}]
)
def test_fields_that_ask_for_nothing_are_served_beside_parsers(field: dict[str, Any]) -> None:
    assert reason({"tools": [TOOL], **field}, tools=True) is None
    assert reason(field, reasoning=True) is None


def test_a_completion_is_never_parsed_but_vllm_constrains_its_thoughts_otherwise() -> None:
    assert reason({"stop": "x", "logprobs": 1}, COMPLETIONS, reasoning=True) is None
    why = reason({"structured_outputs": {"regex": "a"}}, COMPLETIONS, reasoning=True)
    assert why == "unsupported_structured_outputs_with_reasoning"


def test_hidden_reasoning_is_served_where_vllm_parses_it() -> None:
    assert reason({"include_reasoning": False}) == "unsupported_include_reasoning"
    assert reason({"include_reasoning": False}, reasoning=True) is None


def test_the_reasons_are_few_enough_for_a_metrics_label() -> None:
    assert all(key.replace("_", "").isalpha() for rows in FIELDS.values() for key in rows)
    assert sum(map(len, FIELDS.values())) < 200
