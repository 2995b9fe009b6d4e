"""The field table: its rows are vLLM's fields, and its values are those that vLLM takes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat

from gateway.body import Body
from gateway.eligibility import why_not
from gateway.endpoints import Endpoint
from gateway.fields import FIELDS, Leg
from tests.kit.fields import CHAT, COMPLETIONS, OPENAI_ONLY, VALUES, request, with_value

ADMITTED = [(e, key, value) for e, rows in VALUES.items() for key, (served, _) in rows.items() for value in served]
REFUSED = [(e, key, value) for e, rows in VALUES.items() for key, (_, others) in rows.items() for value in others]


def validate(oracle: SimpleNamespace, endpoint: Endpoint, raw: dict[str, Any]) -> Any:
    """vLLM's request; raises what vLLM raises."""
    kind = oracle.chat.ChatCompletionRequest if endpoint is CHAT else oracle.CompletionRequest
    return kind.model_validate(json.loads(json.dumps(raw)))


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_row_has_its_values_here(endpoint: Endpoint) -> None:
    assert set(VALUES[endpoint]) == set(FIELDS[endpoint])
    for key, row in FIELDS[endpoint].items():
        assert (VALUES[endpoint][key][0] == []) == (row.leg is Leg.PLAIN), key


@pytest.mark.parametrize("endpoint", Endpoint)
def test_the_table_has_a_row_for_each_field_of_vllms_and_no_others_but_openais(
    oracle: SimpleNamespace, endpoint: Endpoint
) -> None:
    kind = oracle.chat.ChatCompletionRequest if endpoint is CHAT else oracle.CompletionRequest
    assert set(kind.model_fields) <= set(FIELDS[endpoint])
    others = set(FIELDS[endpoint]) - set(kind.model_fields)
    assert others <= OPENAI_ONLY | ({"max_completion_tokens"} if endpoint is COMPLETIONS else set())
    assert not OPENAI_ONLY & set(kind.model_fields)


@pytest.mark.parametrize(
    ("endpoint", "params"),
    [
        (CHAT, openai_chat.CompletionCreateParamsBase),
        (COMPLETIONS, openai_completion.CompletionCreateParamsBase),
    ],
)
def test_the_table_has_a_row_for_each_field_of_openais(endpoint: Endpoint, params: Any) -> None:
    assert set(params.__annotations__) <= set(FIELDS[endpoint])


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_null_is_admitted_where_vllm_takes_one(oracle: SimpleNamespace, endpoint: Endpoint) -> None:
    from vllm.exceptions import VLLMValidationError

    def takes_null(key: str) -> bool:
        try:
            validate(oracle, endpoint, request(endpoint) | {key: None})
        except (ValueError, VLLMValidationError, TypeError):  # the last for messages: vLLM answers 500
            return False
        return True

    nullable = {key: row.nullable for key, row in FIELDS[endpoint].items()}
    assert nullable == {key: takes_null(key) for key in FIELDS[endpoint]}


@pytest.mark.parametrize(("endpoint", "key", "value"), ADMITTED)
def test_an_admitted_value_is_served_and_vllm_takes_it(
    oracle: SimpleNamespace, endpoint: Endpoint, key: str, value: Any
) -> None:
    raw = with_value(endpoint, key, value)
    assert why_not(endpoint, Body(json.dumps(raw).encode()), tools=True) is None
    validate(oracle, endpoint, raw)


@pytest.mark.parametrize(("endpoint", "key", "value"), REFUSED)
def test_any_other_value_is_plain_vllms_and_the_field_is_named(endpoint: Endpoint, key: str, value: Any) -> None:
    why = why_not(endpoint, Body(json.dumps(with_value(endpoint, key, value)).encode()), tools=True)
    assert why is not None
    assert (why.reason, why.param) == (f"unsupported_{key}", key)
    assert key in why.detail
