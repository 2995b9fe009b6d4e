"""The completion with which vLLM goes on: the same sampling, over a prompt that holds the answer so far."""

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
from gateway.plan import Plan, make_plan
from gateway.resuming import resume_completion
from tests.kit.fields import CHAT, COMPLETIONS, VALUES, request
from tests.kit.gateway import card
from tests.kit.sampled import sampled_alike, vllms_params, vllms_request

CARD = card()
OTHERS = Defaults(0.1, 0.2, 3, 0.4, 1.5, 6, 0.7, 0.8)
"""Defaults of a vLLM that was told others than the model's."""
SAMPLED = [
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    *("stop_token_ids", "min_tokens", "ignore_eos", "logprobs", "priority", "cache_salt", "stop"),
]


def plan_of(endpoint: Endpoint = CHAT, **fields: Any) -> Plan:
    plan = make_plan(endpoint, Body(json.dumps(request(endpoint, **fields)).encode()), CARD)
    assert isinstance(plan, Plan), plan
    return plan


def resumed(plan: Plan, done: int = 3, max_tokens: int = 20) -> dict[str, Any]:
    body = resume_completion(plan, [1, 2], range(5, 5 + done), max_tokens)
    assert body is not None
    return body


@pytest.mark.parametrize("endpoint", Endpoint)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), done=st.integers(0, 5))
def test_what_follows_is_sampled_as_planned_whatever_vllms_own_defaults_are(
    oracle: SimpleNamespace, endpoint: Endpoint, data: st.DataObject, done: int
) -> None:
    keys = data.draw(st.lists(st.sampled_from(SAMPLED), unique=True))
    fields = {key: data.draw(st.sampled_from(VALUES[endpoint][key][0])) for key in keys}
    body = Body(json.dumps(request(endpoint, **fields)).encode())
    plan = make_plan(endpoint, body, CARD)
    if why_not(endpoint, body) is not None or not isinstance(plan, Plan):
        return
    rest = (plan.max_tokens or 2**31) - 1
    theirs = vllms_request(oracle, COMPLETIONS, json.loads(json.dumps(resumed(plan, done, max_tokens=max(rest, 1)))))
    assert (theirs.prompt, theirs.return_token_ids, theirs.cache_salt) == ([1, 2, *range(5, 5 + done)], True, plan.cache_salt)
    assert theirs.priority == plan.priority
    shifted = None if plan.sampling.seed is None else (plan.sampling.seed + done) % 2**63
    left = max(0, plan.sampling.min_tokens - done)
    if left > max(rest, 1):
        return  # no daemon stops before the minimum
    expected = replace(
        plan,
        max_tokens=max(rest, 1),
        form=replace(plan.form, stream=True, stop=(), include_stop=False),
        sampling=replace(plan.sampling, seed=shifted, min_tokens=left),
    )
    sampled_alike(vllms_params(theirs, COMPLETIONS, OTHERS), expected)


def test_the_minimum_shrinks_with_what_is_done() -> None:
    assert resumed(plan_of(min_tokens=5), 3)["min_tokens"] == 2
    assert resumed(plan_of(min_tokens=5), 9)["min_tokens"] == 0


@pytest.mark.parametrize("seed", [0, 42, 2**63 - 1, -(2**63)])
def test_a_seed_is_shifted_so_that_no_draw_is_repeated(seed: int) -> None:
    assert resumed(plan_of(seed=seed), 3)["seed"] == (seed + 3) % 2**63
    assert resumed(plan_of(seed=seed), 3)["seed"] not in (-1, seed)


def test_without_a_seed_there_is_none() -> None:
    assert "seed" not in resumed(plan_of())


def test_a_cache_salt_stays_with_the_prompt() -> None:
    assert resumed(plan_of(cache_salt="s"))["cache_salt"] == "s"
    assert "cache_salt" not in resumed(plan_of())


@pytest.mark.parametrize(
    ("endpoint", "fields"), [(CHAT, {"logprobs": True, "top_logprobs": 4}), (COMPLETIONS, {"logprobs": 4})]
)
def test_logprobs_are_asked_for_in_the_completions_form_with_ids_for_names(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    body = resumed(plan_of(endpoint, **fields))
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (4, True)
    assert "top_logprobs" not in body


def test_stop_strings_are_the_gateways() -> None:
    assert "stop" not in resumed(plan_of(stop="x"))


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"bad_words": ["several tokens"]},
    ],
)
def test_what_counts_over_the_answer_alone_cannot_be_gone_on_with(fields: dict[str, Any]) -> None:
    assert resume_completion(plan_of(**fields), [1], [2], 5) is None


def test_penalties_of_the_models_defaults_count_too() -> None:
    body = Body(json.dumps(request(CHAT)).encode())
    plan = make_plan(CHAT, body, replace(CARD, defaults=Defaults(presence_penalty=1.0)))
    assert isinstance(plan, Plan)
    assert resume_completion(plan, [1], [2], 5) is None


def test_the_repetition_penalty_and_bad_words_of_one_token_can_be_gone_on_with() -> None:
    plan = plan_of(repetition_penalty=1.3, bad_words=["a"])
    assert {len(ids) for ids in plan.sampling.bad_word_ids} == {1}
    assert resumed(plan).items() >= {"repetition_penalty": 1.3, "bad_words": ["a"]}.items()
