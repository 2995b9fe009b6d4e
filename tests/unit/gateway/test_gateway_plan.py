"""One request becomes a plan and a prefill body: the only place where that happens."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.body import Body
from gateway.eligibility import Unsupported, why_not
from gateway.plan import Plan, make_plan, prefill_body
from handoff.claim import CLAIM_KEY, Claim, ClaimKeys, from_params
from tests.kit.gateway import SECRET, body, card, chat

KEYS = ClaimKeys([SECRET.encode()])
CLAIM = KEYS.sign(Claim(handoff_id="0" * 32, host="d", port=1, slot=0, epoch=7, expires=2**31))


def planned(request: Body, **defaults: Any) -> Plan:
    assert why_not(request) is None
    plan = make_plan(request, card(**defaults))
    assert isinstance(plan, Plan), plan
    return plan


def prefill(request: Body, **defaults: Any) -> dict[str, Any]:
    rewritten: dict[str, Any] = json.loads(prefill_body(request, planned(request, **defaults), CLAIM))
    return rewritten


@pytest.mark.parametrize(
    ("fields", "decoded"),
    [
        ({}, None),
        ({"max_tokens": 24}, 24),
        ({"max_completion_tokens": 24}, 24),
        ({"max_tokens": 7, "max_completion_tokens": 24}, 24),
        ({"max_tokens": None, "max_completion_tokens": 24}, 24),
        ({"max_tokens": 24, "max_completion_tokens": None}, 24),
    ],
)
def test_prefill_makes_one_token_and_decode_the_clients_number(
    oracle: SimpleNamespace, fields: dict[str, Any], decoded: int | None
) -> None:
    request = body(**fields)
    asked = oracle.chat.ChatCompletionRequest.model_validate(prefill(request)).model_dump()
    assert (asked["max_tokens"], asked["max_completion_tokens"]) == (1, None)
    assert planned(request).max_tokens == decoded


def test_the_models_own_limit_counts_where_the_client_names_none() -> None:
    assert planned(body(), max_tokens=99).max_tokens == 99
    assert planned(body(max_tokens=5), max_tokens=99).max_tokens == 5
    assert planned(body(max_completion_tokens=500), max_tokens=99).max_tokens == 500


def test_min_tokens_never_stands_beside_the_one_token() -> None:
    assert "min_tokens" not in prefill(body(min_tokens=0, max_tokens=500))
    why = why_not(body(min_tokens=100, max_tokens=500))
    assert why is not None


@pytest.mark.parametrize("usage", [True, False])
def test_stream_and_its_options_leave_the_prefill_leg_together(usage: bool) -> None:
    request = body(stream=True, stream_options={"include_usage": usage})
    rewritten = prefill(request)
    assert rewritten["stream"] is False
    assert "stream_options" not in rewritten
    plan = planned(request)
    assert (plan.form.stream, plan.form.include_usage) == (True, usage)


def test_nulls_are_absent_on_both_legs() -> None:
    nulls = dict.fromkeys(["stop", "stream", "stream_options", "n", "logprobs", "tools", "seed", "max_tokens", "temperature"])
    assert planned(body(**nulls)) == planned(body())
    assert prefill(body(**nulls)) == prefill(body())


MESSAGES = (
    '[ {"role":"user", "content":"a\\u00e9\\n" , "x": 1.50},'
    ' {"content":null,"role":"assistant","tool_calls":[{"id":"1","type":"function",'
    '"function":{"arguments":"{ \\"b\\": 1E2}","name":"f"}}]},'
    ' {"role":"assistant","content":"ok","tool_calls":[]}, {"role":"user","content":[{"type":"text","text":"hi"}]} ]'
)


def test_messages_reach_prefill_byte_for_byte() -> None:
    raw = f'{{"max_tokens" : 9,\n"messages" :{MESSAGES},"model":"tiny","temperature":0.70}}'.encode()
    rewritten = prefill_body(Body(raw), planned(Body(raw)), CLAIM)
    assert f'"messages" :{MESSAGES}'.encode() in rewritten
    assert json.loads(rewritten)["messages"] == json.loads(MESSAGES)


@pytest.mark.parametrize(
    "field",
    [
        {"chat_template_kwargs": {"b": 1, "a": None}},
        {"cache_salt": "s"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "text"}},
        {"add_generation_prompt": False},
        {"user": "u"},
    ],
)
def test_whatever_a_template_or_the_prefix_cache_reads_stays(field: dict[str, Any]) -> None:
    assert prefill(body(**field)).items() >= field.items()


@pytest.mark.parametrize("sent", [{}, {"do_remote_decode": True}, {CLAIM_KEY: {"claim": {"host": "evil"}, "signature": "x"}}])
def test_a_clients_own_kv_transfer_params_are_dropped(sent: dict[str, Any]) -> None:
    raw = json.dumps(chat(kv_transfer_params=sent)).encode()
    rewritten = prefill_body(Body(raw), planned(Body(raw)), CLAIM)
    assert rewritten.count(b"kv_transfer_params") == 1
    params = json.loads(rewritten)["kv_transfer_params"]
    signed = from_params(params)
    assert signed is not None
    assert KEYS.verify(signed) == CLAIM.claim
    assert set(params) == {CLAIM_KEY}


def test_defaults_of_the_model_are_resolved_once_for_both_legs() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    plan, rewritten = planned(body(), **defaults), prefill(body(), **defaults)
    for leg in (
        (plan.sampling.temperature, plan.sampling.top_p, plan.sampling.top_k),
        (
            rewritten["temperature"],
            rewritten["top_p"],
            rewritten["top_k"],
        ),
    ):
        assert leg == (0.6, 0.95, 20)


def test_what_the_client_says_goes_before_the_models_defaults() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    rewritten = prefill(body(temperature=0, top_p=1, top_k=0), **defaults)
    assert (rewritten["temperature"], rewritten["top_p"], rewritten["top_k"]) == (0, 1, 0)


def test_without_defaults_vllms_own_apply() -> None:
    sampling = planned(body()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, sampling.ignore_eos) == (1, 1, 0, None, False)


@pytest.mark.parametrize("defaults", [{"min_p": 0.1}, {"repetition_penalty": 1.1}])
def test_defaults_that_the_lane_cannot_apply_leave_the_model_to_plain_vllm(defaults: dict[str, Any]) -> None:
    plan = make_plan(body(), card(**defaults))
    assert isinstance(plan, Unsupported)
    assert plan.reason == "model_defaults"


def test_defaults_without_effect_are_no_obstacle() -> None:
    planned(body(), min_p=0.0, repetition_penalty=1.0, top_k=-1)


def meaning(params: Any, name: str) -> Any:
    """A sampling value; vLLM takes -1 and 0 alike for a top_k that keeps every token."""
    value = getattr(params, name)
    return max(0, value) if name == "top_k" else value


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 1e-320, 1e-9, 0.0099, 0.01, 0.7, 1, 2])
@pytest.mark.parametrize("top_k", [-1, 0, 5])
@pytest.mark.parametrize("seed", [None, -1, 0, 42])
def test_both_legs_sample_as_vllm_samples_the_clients_request(
    oracle: SimpleNamespace, temperature: float, top_k: int, seed: int | None
) -> None:
    request = chat(temperature=temperature, top_k=top_k, seed=seed)

    def params(raw: dict[str, Any], max_tokens: int) -> Any:
        return oracle.chat.ChatCompletionRequest.model_validate(raw).to_sampling_params(max_tokens, {})

    plain, leg = params(request, 9), params(prefill(Body(json.dumps(request).encode())), 1)
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "ignore_eos"):
        assert meaning(leg, name) == meaning(plain, name), name
    sampling = planned(Body(json.dumps(request).encode())).sampling
    assert (sampling.temperature, sampling.seed) == (plain.temperature, plain.seed)
    if sampling.temperature > 0:
        assert (sampling.top_p, sampling.top_k) == (plain.top_p, meaning(plain, "top_k"))
    assert (leg.max_tokens, leg.min_tokens, leg.n) == (1, 0, 1)


@pytest.mark.parametrize("stop", ["a", ["a", "b"], [], None])
def test_stop_strings_are_the_gateways_and_never_on_the_prefill_leg(stop: Any) -> None:
    request = body(stop=stop)
    assert "stop" not in prefill(request)
    assert planned(request).stop == tuple([stop] if isinstance(stop, str) else stop or ())


def test_the_whole_body_is_one_that_vllm_accepts(oracle: SimpleNamespace) -> None:
    full = body(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=9,
        max_completion_tokens=24,
        stop=["x"],
        seed=1,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        ignore_eos=True,
        kv_transfer_params={"a": 1},
        tool_choice="none",
        response_format={"type": "text"},
        cache_salt="s",
        user="u",
    )
    asked = oracle.chat.ChatCompletionRequest.model_validate(prefill(full))
    assert (asked.stream, asked.stream_options, asked.stop, asked.seed) == (False, None, [], 1)


def test_a_megabyte_of_prompt_is_copied_not_rewritten() -> None:
    text = json.dumps("é" * 500_000, ensure_ascii=False)
    raw = f'{{"model":"tiny","messages":[{{"role":"user","content":{text}}}],"max_tokens":5}}'.encode()
    assert text.encode() in prefill_body(Body(raw), planned(Body(raw)), CLAIM)
