"""The prefill leg's body: the prompt as it came, one token chosen as the client asked, and the claim."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.body import Body
from gateway.cards import Defaults
from gateway.eligibility import why_not
from gateway.endpoints import Endpoint
from gateway.plan import Plan, make_plan, prefill_body
from handoff.claim import CLAIM_KEY, Claim, ClaimKeys, from_params
from tests.kit.fields import CHAT, COMPLETIONS, SCHEMA, TOOL, VALUES, request
from tests.kit.gateway import SECRET, card
from tests.kit.sampled import sampled_alike, vllms_params, vllms_request

KEYS = ClaimKeys([SECRET.encode()])
CLAIM = KEYS.sign(Claim(handoff_id="0" * 32, host="d", port=1, slot=0, epoch=7, expires=2**31))
CARD = card()
OTHERS = Defaults(0.1, 0.2, 3, 0.4, 1.5, 6, 0.7, 0.8)
"""Defaults of a vLLM that was told others than the model's."""


def planned(body: Body, endpoint: Endpoint = CHAT, defaults: Defaults | None = None) -> Plan:
    assert why_not(endpoint, body, tools=True) is None
    model = CARD if defaults is None else replace(CARD, defaults=defaults)
    plan = make_plan(endpoint, body, model, tools=True)
    assert isinstance(plan, Plan), plan
    return plan


def prefill(fields: dict[str, Any], endpoint: Endpoint = CHAT, defaults: Defaults | None = None) -> dict[str, Any]:
    body = Body(json.dumps(request(endpoint, **fields)).encode())
    rewritten: dict[str, Any] = json.loads(prefill_body(body, planned(body, endpoint, defaults), CLAIM))
    return rewritten


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 24},
        {"max_completion_tokens": 24},
        {"max_tokens": 7, "max_completion_tokens": 24},
        {"max_tokens": None, "max_completion_tokens": 24},
    ],
)
def test_prefill_makes_one_token(oracle: SimpleNamespace, endpoint: Endpoint, fields: dict[str, Any]) -> None:
    rewritten = prefill(fields, endpoint)
    assert "max_completion_tokens" not in rewritten
    assert vllms_params(vllms_request(oracle, endpoint, rewritten), endpoint, Defaults(max_tokens=99)).max_tokens == 1


@pytest.mark.parametrize(("asked", "left"), [({}, 0), ({"min_tokens": 0}, 0), ({"min_tokens": 1}, 1), ({"min_tokens": 100}, 1)])
def test_a_minimum_of_tokens_leaves_the_one_token_no_end(asked: dict[str, Any], left: int) -> None:
    assert prefill({"max_tokens": 500, **asked})["min_tokens"] == left


@pytest.mark.parametrize("endpoint", Endpoint)
def test_stream_and_its_options_leave_the_prefill_leg_together(endpoint: Endpoint) -> None:
    rewritten = prefill({"stream": True, "stream_options": {"include_usage": True}}, endpoint)
    assert rewritten["stream"] is False
    assert "stream_options" not in rewritten


@pytest.mark.parametrize("stop", ["a", ["a", "b"], [], None])
def test_stop_strings_are_the_gateways_and_never_on_the_prefill_leg(stop: Any) -> None:
    assert "stop" not in prefill({"stop": stop, "include_stop_str_in_output": True})


@pytest.mark.parametrize(
    ("endpoint", "fields", "told"),
    [
        (CHAT, {"logprobs": True}, {"logprobs": True, "top_logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 5}, {"logprobs": True, "top_logprobs": 5}),
        (COMPLETIONS, {"logprobs": 0}, {"logprobs": 0}),
        (COMPLETIONS, {"logprobs": 5, "return_tokens_as_token_ids": False}, {"logprobs": 5}),
    ],
)
def test_logprobs_name_tokens_by_their_ids(endpoint: Endpoint, fields: dict[str, Any], told: dict[str, Any]) -> None:
    rewritten = prefill(fields, endpoint)
    assert rewritten.items() >= (told | {"return_tokens_as_token_ids": True}).items()


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"return_tokens_as_token_ids": True}])
def test_without_logprobs_there_is_nothing_to_name(fields: dict[str, Any]) -> None:
    assert prefill(fields).keys().isdisjoint({"logprobs", "top_logprobs", "return_tokens_as_token_ids"})


MESSAGES = (
    '[ {"role":"user", "content":"a\\u00e9\\n" , "x": 1.50},'
    ' {"content":null,"role":"assistant","tool_calls":[{"id":"1","type":"function",'
    '"function":{"arguments":"{ \\"b\\": 1E2}","name":"f"}}]},'
    ' {"role":"assistant","content":"ok","tool_calls":[]}, {"role":"user","content":[{"type":"text","text":"hi"}]} ]'
)


@pytest.mark.parametrize(
    ("endpoint", "prompt"),
    [
        (CHAT, f'"messages" :{MESSAGES}'),
        (CHAT, f'"messages" :{MESSAGES},"tools": [ {json.dumps(TOOL)} ],"tool_choice" : "auto"'),
        (COMPLETIONS, '"prompt" : "a\\u00e9\\n\\ud83d\\ude42"'),
        (COMPLETIONS, '"prompt":[ 1,2 , 3]'),
        (COMPLETIONS, '"prompt":[ "a b" ],"add_special_tokens": false'),
        (COMPLETIONS, '"prompt":[[1 ]]'),
    ],
)
def test_the_prompt_reaches_prefill_byte_for_byte(endpoint: Endpoint, prompt: str) -> None:
    body = Body(f'{{"max_tokens" : 9,\n{prompt},"model":"tiny","temperature":0.70}}'.encode())
    rewritten = prefill_body(body, planned(body, endpoint), CLAIM)
    for member in prompt.split(',"'):
        assert member.lstrip('"').encode() in rewritten
    assert json.loads(rewritten).items() >= json.loads(f"{{{prompt}}}").items()


@pytest.mark.parametrize(
    "field",
    [
        {"chat_template_kwargs": {"b": 1, "a": None}},
        {"cache_salt": "s"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"reasoning_effort": "low"},
        {"documents": [{"a": "b"}]},
        {"add_generation_prompt": False},
        {"user": "u"},
        {"priority": 3},
        {"request_id": "r"},
        {"metadata": {"a": "b"}},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"structured_outputs": {"regex": "a+"}},
        {"allowed_token_ids": [1, 2]},
        {"logit_bias": {"5": 1e9}},
        {"bad_words": ["x", "x"]},
        {"stop_token_ids": [5, 5]},
        {"return_token_ids": True},
        {"return_prompt_text": True},
    ],
)
def test_what_vllm_reads_stays_as_it_came(field: dict[str, Any]) -> None:
    assert prefill(field).items() >= field.items()


@pytest.mark.parametrize("sent", [{}, {"do_remote_decode": True}, {CLAIM_KEY: {"claim": {"host": "evil"}, "signature": "x"}}])
def test_a_clients_own_kv_transfer_params_are_dropped(sent: dict[str, Any]) -> None:
    body = Body(json.dumps(request(CHAT, kv_transfer_params=sent)).encode())
    rewritten = prefill_body(body, planned(body), CLAIM)
    assert rewritten.count(b"kv_transfer_params") == 1
    params = json.loads(rewritten)["kv_transfer_params"]
    signed = from_params(params)
    assert signed is not None
    assert KEYS.verify(signed) == CLAIM.claim
    assert set(params) == {CLAIM_KEY}


@st.composite
def fields_of(draw: st.DrawFn, endpoint: Endpoint) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(sorted(VALUES[endpoint])), unique=True, max_size=10))
    return {key: draw(st.sampled_from(VALUES[endpoint][key][0] or [None])) for key in keys}


@pytest.mark.parametrize("endpoint", Endpoint)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_first_token_is_chosen_as_planned_whatever_vllms_own_defaults_are(
    oracle: SimpleNamespace, endpoint: Endpoint, data: st.DataObject
) -> None:
    body = Body(json.dumps(request(endpoint) | data.draw(fields_of(endpoint))).encode())
    if why_not(endpoint, body, tools=True) is not None:
        return
    plan = make_plan(endpoint, body, CARD, tools=True)
    if not isinstance(plan, Plan):
        return
    leg = json.loads(prefill_body(body, plan, CLAIM))
    assert leg.pop("kv_transfer_params").keys() == {CLAIM_KEY}
    one_token = replace(
        plan,
        max_tokens=1,
        form=replace(
            plan.form, stream=False, stop=(), include_stop=False, skip_special_tokens=True, spaces_between_special_tokens=True
        ),
        sampling=replace(plan.sampling, min_tokens=min(1, plan.sampling.min_tokens)),
    )
    sampled_alike(vllms_params(vllms_request(oracle, endpoint, leg), endpoint, OTHERS), one_token)


def test_a_megabyte_of_prompt_is_copied_not_rewritten() -> None:
    text = json.dumps("é" * 500_000, ensure_ascii=False)
    body = Body(f'{{"model":"tiny","messages":[{{"role":"user","content":{text}}}],"max_tokens":5}}'.encode())
    assert text.encode() in prefill_body(body, planned(body), CLAIM)
